"""The steps of a round between its two forwards: in PyTorch, or in Triton kernels on the device.

Both give the same trees and the same commits, bit for bit (`tests/unit/test_ddtree_kernels.py`,
`tests/unit/test_ragged_kernels.py`), and neither waits for the device.

A round is uniform, N nodes for every request, which may be another N in every round; or packed: one number of verify
tokens T for the whole batch, which the likeliest nodes of all requests share (`ddtree_ragged`), and of trees that
differ in size no padding is verified.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from sglang.srt.speculative import (
    ddtree_kernels,
    ddtree_ragged,
    ddtree_ragged_kernels,
    ddtree_stats,
    ddtree_stats_kernel,
)
from sglang.srt.speculative.ddtree_ragged import Allotment, PackedNodes, PackedWalk
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


@dataclasses.dataclass(frozen=True)
class Uniform:
    """A round of ``nodes`` nodes for every request, the root counted; 1: the roots alone, and nothing is drafted."""

    nodes: int


# What a round verifies: None, all trees whole, N nodes each; a number, so many tokens of all requests together, at
# least one for each; "plain", the roots alone, and then nothing is drafted either; or another number of nodes for all.
RoundShape = int | Literal["plain"] | Uniform | None


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


@dataclasses.dataclass(frozen=True, eq=False)
class PackedTree:
    """The trees of one packed round, and the part of them that is verified.

    Attributes:
        tree: the dense trees, bs x C nodes.
        share: how many nodes of each tree are verified, which are its first.
        nodes: those nodes, T rows, a tail that belongs to nobody included.
    """

    tree: DraftTree
    share: Allotment
    nodes: PackedNodes

    def row_owners(self) -> torch.Tensor:
        """int64 [T], the request of every row; the tail counts as the first request's, and nothing reads it."""
        return self.nodes.owners.clamp(min=0)

    def dense_rows(self) -> torch.Tensor:
        """int64 [T], where every row lies among bs * C; the tail's is the first request's root."""
        return self.row_owners() * self.tree.tokens.shape[1] + self.nodes.nodes

    def cut(self) -> DraftTree:
        """The dense trees without the nodes that are not verified: unlinked, uncounted, of depth 0."""
        tree, count = self.tree, self.share.qo_lens[:, None]

        def link(x: torch.Tensor) -> torch.Tensor:
            return torch.where(x < count, x, -1)

        kept = torch.arange(tree.tokens.shape[1], device=count.device) < count
        return dataclasses.replace(
            tree,
            depths=torch.where(kept, tree.depths, 0),
            num_nodes=self.share.qo_lens.to(torch.int64),
            first_child=torch.where(kept, link(tree.first_child), -1),
            next_sibling=torch.where(kept, link(tree.next_sibling), -1),
        )


def root_trees(bonus_tokens: torch.Tensor, seq_lens: torch.Tensor) -> RoundTree:
    """Trees of the root alone, of a round that drafts nothing; ``bonus_tokens`` int64 [bs], ``seq_lens`` int [bs]."""
    tokens = bonus_tokens[:, None].contiguous()
    zeros, ones = torch.zeros_like(tokens), torch.ones_like(tokens)
    tree = DraftTree(
        tokens=tokens,
        parents=-ones,
        depths=zeros,
        scores=zeros.to(torch.float32),
        ranks=-ones,
        num_nodes=ones[:, 0],
        first_child=-ones,
        next_sibling=-ones,
        visible=ones[:, None].to(torch.bool),
    )
    return RoundTree(tree, seq_lens[:, None].to(torch.int64), ones[:, None])


def node_worth(tree: DraftTree, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a round tells the host of its drafts where every request verifies its first ``nodes`` nodes.

    Returns:
        float32 [C - 1], as in `ddtree_gain.uniform_gain`, and float32 [bs], the drafts that are expected to be accepted
        of each request.
    """
    # Padding has a score of -inf.
    probable = tree.scores[:, 1:].exp()
    return probable.sum(0), probable[:, : nodes - 1].sum(1)


class TorchRound:
    """Build, mask and commit in PyTorch: the reference, and the CPU's way."""

    on_device = False
    _ragged: Any = ddtree_ragged

    def build(
        self,
        bonus_tokens: torch.Tensor,
        ids: torch.Tensor,
        logprobs: torch.Tensor,
        budget: int,
        seq_lens: torch.Tensor,
        out: RoundTree | None = None,
    ) -> RoundTree:
        """Build every request's tree; arguments as in `ddtree_utils.build_trees`, ``seq_lens`` int [bs].

        ``out``: device buffers of this batch, overwritten and returned.
        """
        assert out is None, "PyTorch makes new tensors"
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

    def pack(
        self,
        tree: RoundTree,
        total: int,
        seq_lens: torch.Tensor,
        req_pool_indices: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> PackedTree:
        """Share ``total`` verify tokens among the trees; the rest as in `ddtree_ragged.pack_nodes`."""
        steps, nodes = self._ragged, tree.tree
        bits = bit_mask(nodes.visible) if tree.ancestor_bits is None else tree.ancestor_bits
        # The kernel's limit; by PyTorch any number.
        allot = (
            steps.allot_nodes if len(nodes.tokens) <= ddtree_ragged_kernels.MAX_REQUESTS else ddtree_ragged.allot_nodes
        )
        share = allot(nodes.scores, nodes.num_nodes, total)
        packed = steps.pack_nodes(
            nodes.tokens, nodes.depths, bits, share.qo_indptr, seq_lens, req_pool_indices, req_to_token, total
        )
        return PackedTree(nodes, share, packed)

    def commit_packed(
        self, packed: PackedTree, choices: torch.Tensor, max_depth: int, seq_lens: torch.Tensor
    ) -> PackedWalk:
        """Walk the target's choices int64 [T] and plan the commit, a walk and a plan in one."""
        tree, nodes = packed.tree, packed.nodes
        return self._ragged.walk_packed(
            tree.tokens, tree.parents, packed.share.qo_indptr, choices, max_depth, seq_lens, nodes.slots
        )

    def stats(self, tree: DraftTree, walk: WalkResult | PackedWalk) -> torch.Tensor:
        """What the host is told of the round, int64 [bs, 4]: see `ddtree_stats.tree_stats`."""
        return ddtree_stats.tree_stats(tree, walk)


class DeviceRound(TorchRound):
    """The same by Triton kernels: one launch to build and compile, one to walk and plan, one for the numbers.

    A packed round has two more, to share out and to pack.
    """

    on_device = True
    _ragged: Any = ddtree_ragged_kernels

    def build(
        self,
        bonus_tokens: torch.Tensor,
        ids: torch.Tensor,
        logprobs: torch.Tensor,
        budget: int,
        seq_lens: torch.Tensor,
        out: RoundTree | None = None,
    ) -> RoundTree:
        if out is not None:
            buffers: Any = out.tree
            ddtree_kernels.build_trees(
                bonus_tokens, ids, logprobs, budget, seq_lens=seq_lens, out=buffers, validate=False
            )
            return out
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

    def stats(self, tree: DraftTree, walk: WalkResult | PackedWalk) -> torch.Tensor:
        return ddtree_stats_kernel.tree_stats(tree, walk)
