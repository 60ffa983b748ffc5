"""`ddtree_stats.tree_stats` in one launch instead of eight: a round of a small model is as long as its launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree_ragged import PackedWalk
from sglang.srt.speculative.ddtree_utils import DraftTree, WalkResult


def tree_stats(tree: DraftTree, walk: WalkResult | PackedWalk, out: torch.Tensor | None = None) -> torch.Tensor:
    """Numbers of a round that verified its trees; arguments and result as of `ddtree_stats.tree_stats`.

    All tensors are contiguous and on one device, as `ddtree_kernels` makes them; ``out`` int64 [bs, 4] is overwritten
    and returned.
    """
    bs, n = tree.ranks.shape
    places = walk.accept_index.shape[1]
    if out is None:
        out = torch.empty((bs, 4), dtype=torch.int64, device=tree.ranks.device)
    if bs:
        _stats_kernel[(bs,)](
            tree.ranks,
            tree.depths,
            tree.num_nodes,
            walk.accept_index,
            walk.num_accepted_drafts,
            out,
            n,
            places,
            BLOCK=triton.next_power_of_2(max(n, places)),
            num_warps=1,
        )
    return out


@triton.jit(do_not_specialize=["n", "places"])
def _stats_kernel(ranks, depths, num_nodes, accept_index, num_accepted, out, n, places, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    deepest = tl.max(tl.load(depths + request * n + at, mask=at < n, other=0), axis=0)
    node = tl.load(accept_index + request * places + at, mask=at < places, other=-1)
    # Behind the path there is no node; the root's own rank is -1.
    rank = tl.load(ranks + request * n + node, mask=node >= 0, other=-1)
    out += request * 4
    tl.store(out, tl.load(num_accepted + request))
    tl.store(out + 1, tl.load(num_nodes + request))
    tl.store(out + 2, deepest)
    tl.store(out + 3, (tl.max(rank, axis=0) > 0).to(tl.int64))
