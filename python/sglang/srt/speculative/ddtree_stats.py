"""What the host is told of every round beside its tokens: four numbers per request, taken on the device.

Torch alone, few launches, no host synchronisation. `sglang_ddtree.round_stats` makes the statistics of them, and
`docs/metrics.md` explains those.
"""

from __future__ import annotations

import torch
from sglang.srt.speculative.ddtree_ragged import PackedWalk
from sglang.srt.speculative.ddtree_utils import DraftTree, WalkResult


def tree_stats(tree: DraftTree, walk: WalkResult | PackedWalk) -> torch.Tensor:
    """Numbers of a round that verified its trees.

    Args:
        tree: the verified trees.
        walk: the target's walk through them.

    Returns:
        int64 [bs, 4]: accepted drafts, nodes (the root counted), depth of the deepest node, and 1 if a node of a rank
        above 0 was accepted, so that the path left the chain.
    """
    # The root stands for places behind the path: its rank is -1.
    ranks = tree.ranks.gather(1, walk.accept_index.clamp(min=0))
    return _numbers(tree, walk, (ranks > 0).any(1))


def shadow_stats(tree: DraftTree, walk: WalkResult) -> torch.Tensor:
    """Numbers of a round that verified the chain, with the tree that would have been verified instead.

    The target's choices are known at the chain's nodes alone, so that the tree's walk can be followed until the tree
    holds no more of the chain, or until the target leaves it; a sibling with the target's token is accepted there.

    Args:
        tree: the trees of the same drafts, not verified.
        walk: the target's walk along the chains.

    Returns:
        int64 [bs, 4]: accepted drafts of the chain, nodes of the tree (the root counted), depth of its deepest node,
        and 1 if the chain's last accepted node has a child with the bonus token in the tree; without meaning if more
        drafts were accepted than the tree is deep, for then it does not hold that node.
    """
    # Of the nodes of one depth the chain's is selected first, since no other has a better score and ties go to the
    # lower rank under the earlier parent. So the tree holds the chain down to its own depth, and the chain's node of
    # a depth is the first one there.
    left_at = (tree.depths == walk.num_accepted_drafts[:, None]).to(torch.uint8).argmax(1, keepdim=True)
    # The chain's own next token is not the bonus, by the walk: a child that is can only be a sibling of it.
    held = (tree.parents == left_at) & (tree.tokens == walk.bonus[:, None])
    return _numbers(tree, walk, held.any(1))


def _numbers(tree: DraftTree, walk: WalkResult | PackedWalk, side: torch.Tensor) -> torch.Tensor:
    columns = (walk.num_accepted_drafts, tree.num_nodes, tree.depths.amax(1), side.to(torch.int64))
    return torch.stack(columns, dim=1)
