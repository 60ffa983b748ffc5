"""Simulated acceptance for benchmarks: SGLang's SGLANG_SIMULATE_ACC_LEN, honoured by a tree.

With random weights hardly a draft is accepted. SGLang lets a benchmark force the committed tokens per round, so that
a model's shape can be timed without its weights; the text is meaningless.
"""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.speculative.ddtree_ragged import PackedWalk
from sglang.srt.speculative.ddtree_round import PackedTree, TorchRound
from sglang.srt.speculative.ddtree_utils import WalkResult
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, _sample_simulated_acc_len

# A token that every vocabulary has; SGLang's own simulation commits this one too.
FIXED_TOKEN = 100


def is_simulating() -> bool:
    """Whether SGLANG_SIMULATE_ACC_LEN forces the committed tokens per round (its value is a mean)."""
    return SIMULATE_ACC_LEN > 0


def simulate_walk(choices: torch.Tensor, max_depth: int) -> tuple[torch.Tensor, WalkResult]:
    """A walk of the forced length through every tree, the same for the whole batch.

    Args:
        choices: int64 [bs, N]; only shape and device are used.
        max_depth: the deepest node; at most max_depth + 1 tokens are committed.
    Returns:
        choices: int64 [bs, N], the fixed token everywhere.
        walk: its path is the front nodes, so the commit moves as many KV slots as a real one of that length.
    """
    bs, nodes = choices.shape
    committed = _sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, max_depth + 1)
    index = torch.arange(max_depth + 1, device=choices.device)
    path = torch.where(index < committed, index, -1).expand(bs, -1).contiguous()
    fixed = torch.full_like(choices, FIXED_TOKEN)
    walk = WalkResult(
        accept_index=path,
        num_accepted_drafts=torch.full((bs,), committed - 1, dtype=torch.int64, device=choices.device),
        bonus=fixed[:, 0].clone(),
    )
    return fixed, walk


def simulate_packed(
    steps: TorchRound, packed: PackedTree, max_depth: int, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, PackedWalk]:
    """The same for a packed round: a request with fewer nodes than the forced length accepts what it has.

    Args:
        steps: the round's.
        packed: the trees; only their sizes count.
        max_depth: as above.
        seq_lens: int [bs].
    Returns:
        choices: int64 [T], the fixed token everywhere.
        walk: its path is the front nodes.
    """
    committed = _sample_simulated_acc_len(SIMULATE_ACC_LEN, SIMULATE_ACC_METHOD, max_depth + 1)
    tree = packed.tree
    # A chain through all nodes, of which the target says every token.
    parents = torch.arange(-1, tree.parents.shape[1] - 1, device=tree.parents.device).expand_as(tree.parents)
    fixed = torch.full_like(tree.tokens, FIXED_TOKEN)
    chains = dataclasses.replace(packed, tree=dataclasses.replace(tree, tokens=fixed, parents=parents.contiguous()))
    choices = torch.full_like(packed.nodes.tokens, FIXED_TOKEN)
    return choices, steps.commit_packed(chains, choices, committed - 1, seq_lens)
