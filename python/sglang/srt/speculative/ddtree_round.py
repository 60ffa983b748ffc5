"""The steps of a round between its two forwards: in PyTorch, or in Triton kernels on the device.

Both give the same trees and the same commits, bit for bit (`tests/unit/test_ddtree_kernels.py`), and neither waits
for the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from sglang.srt.speculative import ddtree_kernels, ddtree_stats, ddtree_stats_kernel
from sglang.srt.speculative.ddtree_utils import (
    CommitPlan,
    DraftTree,
    WalkResult,
    bit_mask,
    build_trees,
    full_mask,
    plan_commit,
    qlen_only_mask,
    tree_positions,
    walk_trees,
)


@dataclasses.dataclass(frozen=True, eq=False)
class RoundTree:
    """The trees of one round with what a verify pass reads; N nodes per request, W = ceil(N / 64).

    Attributes:
        tree: the trees themselves.
        positions: int64 [bs, N], committed length + depth.
        ancestor_bits: int64 [bs, N, W], who may attend whom; None on the CPU, where nothing reads it.
    """

    tree: DraftTree
    positions: torch.Tensor
    ancestor_bits: torch.Tensor | None


class TorchRound:
    """Build, mask and commit in PyTorch: the reference, and the CPU's way."""

    on_device = False

    def build(
        self,
        bonus_tokens: torch.Tensor,
        ids: torch.Tensor,
        logprobs: torch.Tensor,
        budget: int,
        seq_lens: torch.Tensor,
    ) -> RoundTree:
        """Build every request's tree; arguments as in `ddtree_utils.build_trees`, ``seq_lens`` int [bs]."""
        tree = build_trees(bonus_tokens, ids, logprobs, budget, validate=False)
        bits = None if tree.visible.device.type == "cpu" else bit_mask(tree.visible)
        return RoundTree(tree, tree_positions(tree.depths, seq_lens), bits)

    def tree_mask(self, tree: RoundTree) -> torch.Tensor:
        """The tree part of the mask alone, bool [bs * N * N]."""
        return qlen_only_mask(tree.tree.visible)

    def full_mask(self, tree: RoundTree, seq_lens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """SGLang's FULL_MASK, bool, written into ``out`` from its front; what lies behind has no meaning."""
        return full_mask(tree.tree.visible, seq_lens, out=out)

    def commit(
        self,
        tree: RoundTree,
        choices: torch.Tensor,
        max_depth: int,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[WalkResult, CommitPlan]:
        """Walk the target's choices int64 [bs, N] and plan the commit; ``slots`` int64 [bs, N]."""
        walk = walk_trees(tree.tree.tokens, tree.tree.parents, choices, max_depth)
        return walk, plan_commit(walk, choices, seq_lens, slots)

    def stats(self, tree: RoundTree, walk: WalkResult) -> torch.Tensor:
        """What the host is told of the round, int64 [bs, 4]: see `ddtree_stats.tree_stats`."""
        return ddtree_stats.tree_stats(tree.tree, walk)


class DeviceRound(TorchRound):
    """The same by Triton kernels: one launch to build and compile, one to walk and plan, one for the numbers."""

    on_device = True

    def build(
        self,
        bonus_tokens: torch.Tensor,
        ids: torch.Tensor,
        logprobs: torch.Tensor,
        budget: int,
        seq_lens: torch.Tensor,
    ) -> RoundTree:
        tree = ddtree_kernels.build_trees(bonus_tokens, ids, logprobs, budget, seq_lens=seq_lens)
        return RoundTree(tree, tree.positions, tree.ancestor_bits)

    def tree_mask(self, tree: RoundTree) -> torch.Tensor:
        return ddtree_kernels.visible_mask(tree.ancestor_bits).view(-1)

    def full_mask(self, tree: RoundTree, seq_lens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return ddtree_kernels.full_mask(tree.ancestor_bits, seq_lens, out=out)

    def commit(
        self,
        tree: RoundTree,
        choices: torch.Tensor,
        max_depth: int,
        seq_lens: torch.Tensor,
        slots: torch.Tensor,
    ) -> tuple[WalkResult, CommitPlan]:
        walk: Any = ddtree_kernels.walk_trees(
            tree.tree.tokens, tree.tree.parents, choices, max_depth, seq_lens=seq_lens, slots=slots
        )
        plan = CommitPlan(**{field.name: getattr(walk, field.name) for field in dataclasses.fields(CommitPlan)})
        return walk, plan

    def stats(self, tree: RoundTree, walk: WalkResult) -> torch.Tensor:
        return ddtree_stats_kernel.tree_stats(tree.tree, walk)
