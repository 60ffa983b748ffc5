"""DDTree on the device in Triton: build, compile and walk draft trees, bit for bit as `ddtree_utils` does.

Nothing here waits for the device, and every launch geometry follows from shapes alone, so all functions may
be captured in a CUDA graph once they have run (a first call compiles). Outputs may be preallocated buffers.

`build_trees` is one launch with one warp per request. It selects nodes best first, but lazily: a node offers
only its likeliest child that is not yet selected, so the frontier has one entry per selected node and lives
in registers. One step is two warp-wide minima over 32-bit integers, where sorting level by level would take
hundreds of bitonic stages. That this is the reference's order:

    Write u < v for the order (-score, depth, parent's place, rank). Siblings have one depth and one parent.
    Log-probabilities fall with rank and float32 addition is monotone, so scores fall too; equal ones fall to
    the rank. Hence a sibling of lower rank is always earlier in this order, and among the unselected
    children of a selected node the lowest rank comes first. So the minimum over all unselected children of
    selected nodes (what the heap pops) is the minimum over one child per selected node (what this pops).
    Selecting a child replaces its parent's entry by the next rank and adds one entry for the child itself;
    both invariants hold again. Two entries never have one parent, so (-score, depth, parent) already decides.

A score is never positive, so its magnitude's bits as an integer order scores downwards: +0.0 first, -inf last.
Nothing treats -inf as absent; an entry that does not exist has a larger cost than -inf.

Letters in shapes: bs requests, N = budget + 1 nodes, W = ceil(N / 64), D block size, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree_utils import DraftTree, WalkResult, max_tree_nodes

# What the fields of a packed key below can hold.
MAX_BUDGET = 256
MAX_TOPK = 64
MAX_BLOCK_SIZE = 128

_WORD_BITS = 64
_MASK_CELLS = 1024

# A key is depth (7 bits), parent (9), rank (6), last child selected before from the same parent (9; 0: none).
# Its high fields are the tie order; the low ones come along, so that a minimum yields the whole node.
_DEPTH_SHIFT = tl.constexpr(24)
_DEPTH_ONE = tl.constexpr(1 << 24)
_PARENT_SHIFT = tl.constexpr(15)
_PARENT_ONE = tl.constexpr(1 << 15)
_PARENT_MASK = tl.constexpr(0x1FF)
_RANK_SHIFT = tl.constexpr(9)
_RANK_ONE = tl.constexpr(1 << 9)
_RANK_MASK = tl.constexpr(0x3F)
_LAST_MASK = tl.constexpr(0x1FF)
_NO_ENTRY = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, eq=False)
class DeviceTree(DraftTree):
    """A `DraftTree` with what a verify pass reads, all tensors contiguous and on one device.

    Attributes:
        visible: bool [bs, N, N] as in `DraftTree`, or None if it was not asked for (nothing needs it dense).
        positions: int64 [bs, N], committed length + depth, or None if built without `seq_lens`. Padding
            stands at the committed length.
        ancestor_bits: int64 [bs, N, W]; bit j % 64 of word j // 64 is set if and only if the row may attend
            column j (itself or an ancestor). Bit 63 is the sign bit, so read the words as unsigned.
    """

    visible: torch.Tensor | None
    positions: torch.Tensor | None
    ancestor_bits: torch.Tensor

    def head(self, bs: int) -> DeviceTree:
        """Views of the first `bs` requests: a smaller batch in buffers made for a larger one."""
        return replace(self, **_heads(self, bs))


@dataclass(frozen=True, eq=False)
class DeviceWalk(WalkResult):
    """A `WalkResult` with what a commit reads, all tensors contiguous and on one device.

    Attributes:
        next_tokens: int64 [bs, N]; the committed tokens in front (the target's choices along the path, the
            bonus last), 0 behind.
        accept_lens: int32 [bs]; committed tokens, num_accepted_drafts + 1.
        new_seq_lens: [bs], seq_lens + accept_lens in the dtype of `seq_lens`, or None without `seq_lens`.
        rows, kv_from, kv_to, positions: int64 [bs, max_depth + 1] as in `CommitPlan`, or None without `slots`.
    """

    next_tokens: torch.Tensor
    accept_lens: torch.Tensor
    new_seq_lens: torch.Tensor | None
    rows: torch.Tensor | None
    kv_from: torch.Tensor | None
    kv_to: torch.Tensor | None
    positions: torch.Tensor | None

    def head(self, bs: int) -> DeviceWalk:
        """Views of the first `bs` requests: a smaller batch in buffers made for a larger one."""
        return replace(self, **_heads(self, bs))


def allocate_tree(
    bs: int,
    budget: int,
    device: torch.device | str,
    *,
    positions: bool = True,
    visible: bool = False,
) -> DeviceTree:
    """Uninitialised buffers for `build_trees(..., out=...)`, which writes every cell of them.

    Args:
        bs: requests.
        budget: drafted nodes per tree, the root not counted; N = budget + 1.
        device: where the buffers live.
        positions: with a buffer for positions; `build_trees` then needs `seq_lens`.
        visible: with a buffer for the dense mask, bs * N * N bytes.

    Raises:
        ValueError: budget is out of range.
    """
    _check_budget(budget)
    n = budget + 1

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DeviceTree(
        tokens=empty(bs, n),
        parents=empty(bs, n),
        depths=empty(bs, n),
        scores=empty(bs, n, dtype=torch.float32),
        ranks=empty(bs, n),
        num_nodes=empty(bs),
        first_child=empty(bs, n),
        next_sibling=empty(bs, n),
        visible=empty(bs, n, n, dtype=torch.bool) if visible else None,
        positions=empty(bs, n) if positions else None,
        ancestor_bits=empty(bs, n, _words(n)),
    )


def allocate_walk(
    bs: int,
    num_nodes: int,
    max_depth: int,
    device: torch.device | str,
    *,
    seq_lens_dtype: torch.dtype | None = torch.int64,
    slots: bool = False,
) -> DeviceWalk:
    """Uninitialised buffers for `walk_trees(..., out=...)`, which writes every cell of them.

    Args:
        bs: requests.
        num_nodes: N, nodes per tree, the root counted.
        max_depth: steps at most, usually D-1.
        device: where the buffers live.
        seq_lens_dtype: dtype of `seq_lens` and `new_seq_lens`; None: walk without `seq_lens`.
        slots: with buffers for what follows from the nodes' KV slots.
    """
    places = max_depth + 1

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return DeviceWalk(
        accept_index=empty(bs, places),
        num_accepted_drafts=empty(bs),
        bonus=empty(bs),
        next_tokens=empty(bs, num_nodes),
        accept_lens=empty(bs, dtype=torch.int32),
        new_seq_lens=None if seq_lens_dtype is None else empty(bs, dtype=seq_lens_dtype),
        rows=empty(bs, places) if slots else None,
        kv_from=empty(bs, places) if slots else None,
        kv_to=empty(bs, places) if slots else None,
        positions=empty(bs, places) if slots else None,
    )


def build_trees(
    root_tokens: torch.Tensor,
    candidate_ids: torch.Tensor,
    candidate_logprobs: torch.Tensor,
    budget: int,
    *,
    seq_lens: torch.Tensor | None = None,
    visible: bool = False,
    out: DeviceTree | None = None,
    validate: bool = True,
) -> DeviceTree:
    """Build and compile every request's tree in one launch: bit for bit `ddtree_utils.build_trees`.

    Args:
        root_tokens: int64 [bs], the last committed tokens.
        candidate_ids: int64 [bs, D-1, K], distinct within a position, best first; any strides. Ranks from
            `budget` on cannot be selected; min(K, budget) is at most 64, D at most 128.
        candidate_logprobs: float32 [bs, D-1, K], natural log: <= 0, non-increasing in K; -inf is probability
            zero; any strides. Values are not checked: outside this contract (a NaN reads as a score of -inf)
            the tree is unspecified, but no access leaves its tensor.
        budget: drafted nodes per tree, the root not counted; 1 to 256. N = budget + 1.
        seq_lens: int32 or int64 [bs], committed tokens per request; gives `positions`.
        visible: without `out`, also make the dense mask, by a second launch.
        out: buffers of exactly this batch (see `allocate_tree` and `DeviceTree.head`), overwritten and
            returned. Its `positions` and `visible` say whether those are wanted.
        validate: look at shapes and dtypes; with the same buffers round after round, once is enough.

    Returns:
        A `DeviceTree`: new tensors, or `out`.

    Raises:
        ValueError: a shape, dtype, device, the budget or a limit is not as above.
    """
    if validate:
        _check_budget(budget)
        _check_candidates(root_tokens, candidate_ids, candidate_logprobs)
    bs, levels, topk = candidate_ids.shape
    topk = min(topk, budget)
    if topk > MAX_TOPK:
        raise ValueError(f"candidates per position must be at most {MAX_TOPK}, got min(K, budget) = {topk}.")
    if levels + 1 > MAX_BLOCK_SIZE:
        raise ValueError(f"the block size must be at most {MAX_BLOCK_SIZE}, got {levels + 1}.")
    if validate:
        _check_seq_lens(seq_lens, bs, candidate_ids.device)
    if out is None:
        out = allocate_tree(bs, budget, candidate_ids.device, positions=seq_lens is not None, visible=visible)
    elif validate:
        _check_out(out, allocate_tree(bs, budget, "meta", visible=True), candidate_ids.device)
        if (out.positions is None) != (seq_lens is None):
            raise ValueError("out.positions and seq_lens must be given together or not at all.")
    if bs == 0:
        return out

    n = budget + 1
    _build_kernel[(bs,)](
        root_tokens,
        candidate_ids,
        candidate_logprobs,
        seq_lens,
        out.tokens,
        out.parents,
        out.depths,
        out.scores,
        out.ranks,
        out.num_nodes,
        out.first_child,
        out.next_sibling,
        out.positions,
        out.ancestor_bits,
        root_tokens.stride(0),
        *candidate_ids.stride(),
        *candidate_logprobs.stride(),
        0 if seq_lens is None else seq_lens.stride(0),
        n,
        max_tree_nodes(levels + 1, topk, budget),
        levels,
        topk,
        # A full warp at least, or a minimum over it is no single instruction.
        BLOCK=max(32, triton.next_power_of_2(budget)),
        WORDS=_words(n),
        HAS_POSITIONS=seq_lens is not None,
        num_warps=1,
    )
    if out.visible is not None:
        visible_mask(out.ancestor_bits, out=out.visible)
    return out


@triton.jit
def _cost(score):
    # The magnitude's bits; a NaN costs what -inf does, so that no value looks like _NO_ENTRY.
    return tl.minimum(score.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)


# What a request has one of lies anywhere in the last round's results, and drafts may be of several lengths: compiled
# once, not while serving.
@triton.jit(
    do_not_specialize=["ids_stride_b", "lp_stride_b", "n", "drafted", "levels", "topk"],
    do_not_specialize_on_alignment=["root_tokens", "seq_lens"],
)
def _build_kernel(
    root_tokens,
    ids,
    logprobs,
    seq_lens,
    tokens_out,
    parents_out,
    depths_out,
    scores_out,
    ranks_out,
    num_nodes_out,
    first_child_out,
    next_sibling_out,
    positions_out,
    bits_out,
    root_stride,
    ids_stride_b,
    ids_stride_d,
    ids_stride_k,
    lp_stride_b,
    lp_stride_d,
    lp_stride_k,
    seq_stride,
    n,
    drafted,
    levels,
    topk,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
):
    # One program, one warp, one request: a lazy best-first search, then links, positions and ancestor bits.
    # Lane i is drafted node i + 1; the root's frontier entry is a pair of scalars.
    request = tl.program_id(0).to(tl.int64)
    ids += request * ids_stride_b
    logprobs += request * lp_stride_b
    row = request * n
    lane = tl.arange(0, BLOCK)
    node = lane + 1

    # Frontier: cost and key of every node's best unselected child. Nodes: score, and the key it was popped by.
    cost = tl.full([BLOCK], _NO_ENTRY, tl.int32)
    key = tl.zeros([BLOCK], tl.int32)
    score = tl.zeros([BLOCK], tl.float32)
    own = tl.zeros([BLOCK], tl.int32)
    # Sums start from the root's +0.0, so no score is -0.0.
    root_cost = _cost(0.0 + tl.load(logprobs))
    root_key = tl.full([], _DEPTH_ONE, tl.int32)

    for new in range(1, drafted + 1):
        best = tl.minimum(tl.min(cost, axis=0), root_cost)
        popped = tl.min(tl.where(cost == best, key, _NO_ENTRY), axis=0)
        # The root's children are the shallowest of all: a tie is theirs.
        popped = tl.where(root_cost == best, root_key, popped)
        depth = popped >> _DEPTH_SHIFT
        parent = (popped >> _PARENT_SHIFT) & _PARENT_MASK
        rank = (popped >> _RANK_SHIFT) & _RANK_MASK
        # 0.0 - x, because -(0.0) would be the other zero.
        new_score = 0.0 - best.to(tl.float32, bitcast=True)

        has_sibling = rank + 1 < topk
        has_child = depth < levels
        sibling_lp = tl.load(logprobs + (depth - 1) * lp_stride_d + (rank + 1) * lp_stride_k, mask=has_sibling, other=0)
        child_lp = tl.load(logprobs + depth * lp_stride_d, mask=has_child, other=0)
        sibling_key = ((popped & ~_LAST_MASK) + _RANK_ONE) | new
        child_key = (depth + 1) * _DEPTH_ONE | new * _PARENT_ONE

        is_parent = node == parent
        is_new = node == new
        cost = tl.where(is_parent, tl.where(has_sibling, _cost(score + sibling_lp), _NO_ENTRY), cost)
        cost = tl.where(is_new, tl.where(has_child, _cost(new_score + child_lp), _NO_ENTRY), cost)
        key = tl.where(is_parent, sibling_key, key)
        key = tl.where(is_new, child_key, key)
        score = tl.where(is_new, new_score, score)
        own = tl.where(is_new, popped, own)
        of_root = parent == 0
        root_sibling_cost = tl.where(has_sibling, _cost(0.0 + sibling_lp), _NO_ENTRY)
        root_cost = tl.where(of_root, root_sibling_cost, root_cost)
        root_key = tl.where(of_root, sibling_key, root_key)

    real = node <= drafted
    inside = node < n
    depth = own >> _DEPTH_SHIFT
    parent = (own >> _PARENT_SHIFT) & _PARENT_MASK
    rank = (own >> _RANK_SHIFT) & _RANK_MASK
    last = own & _LAST_MASK

    # Links are scattered over -1: through the node itself (rank 0) its parent's first child, otherwise the
    # sibling selected before it. Siblings are selected in the order of their ranks.
    tl.store(first_child_out + row + node, tl.full([BLOCK], -1, tl.int64), mask=inside)
    tl.store(next_sibling_out + row + node, tl.full([BLOCK], -1, tl.int64), mask=inside)
    tl.store(next_sibling_out + row, -1)
    # Another thread's store must not overtake: this is a barrier with memory ordering in the block.
    tl.debug_barrier()
    # The root always has a child, so its cell needs no -1 first.
    tl.store(first_child_out + row + parent, node.to(tl.int64), mask=real & (rank == 0))
    tl.store(next_sibling_out + row + last, node.to(tl.int64), mask=real & (rank > 0))

    token = tl.load(ids + (depth - 1) * ids_stride_d + rank * ids_stride_k, mask=real, other=0)
    tl.store(tokens_out + row + node, token, mask=inside)
    tl.store(parents_out + row + node, tl.where(real, parent, -1).to(tl.int64), mask=inside)
    tl.store(depths_out + row + node, depth.to(tl.int64), mask=inside)
    tl.store(scores_out + row + node, tl.where(real, score, float("-inf")), mask=inside)
    tl.store(ranks_out + row + node, tl.where(real, rank, -1).to(tl.int64), mask=inside)
    tl.store(tokens_out + row, tl.load(root_tokens + request * root_stride))
    tl.store(parents_out + row, -1)
    tl.store(depths_out + row, 0)
    tl.store(scores_out + row, 0.0)
    tl.store(ranks_out + row, -1)
    tl.store(num_nodes_out + request, drafted + 1)
    if HAS_POSITIONS:
        length = tl.load(seq_lens + request * seq_stride).to(tl.int64)
        tl.store(positions_out + row + node, length + depth, mask=inside)
        tl.store(positions_out + row, length)

    # Climb from every node at once. Padding and nodes under the root climb to themselves, which adds nothing.
    up = tl.where(real & (parent > 0), parent - 1, lane)
    deepest = tl.max(depth, axis=0)
    for word in range(WORDS):
        bits = tl.where(real & (word == 0), 1, 0).to(tl.int64)
        at = lane
        for _ in range(deepest):
            ancestor = at + 1
            bit = tl.full([BLOCK], 1, tl.int64) << (ancestor & 63).to(tl.int64)
            bits |= tl.where((ancestor >> 6) == word, bit, 0)
            at = tl.gather(up, at, axis=0)
        tl.store(bits_out + (row + node) * WORDS + word, bits, mask=inside)
        tl.store(bits_out + row * WORDS + word, tl.where(word == 0, 1, 0))


def visible_mask(ancestor_bits: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The dense mask of ancestor bits: `ddtree_utils.ancestor_mask`.

    Args:
        ancestor_bits: int64 [bs, N, W], contiguous.
        out: bool [bs, N, N], contiguous, same device, overwritten.

    Returns:
        bool [bs, N, N]; True: the row may attend the column. A new tensor, or `out`.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    bs, n = _check_bits(ancestor_bits)
    if out is None:
        out = torch.empty((bs, n, n), dtype=torch.bool, device=ancestor_bits.device)
    _check_buffer("out", out, torch.bool, (bs, n, n), ancestor_bits.device)
    if bs:
        grid = (bs, triton.cdiv(n * n, _MASK_CELLS))
        _visible_kernel[grid](ancestor_bits, out.view(torch.uint8), n, _words(n), CELLS=_MASK_CELLS)
    return out


@triton.jit(do_not_specialize=["n", "words"])
def _visible_kernel(bits, out, n, words, CELLS: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    cell = tl.program_id(1) * CELLS + tl.arange(0, CELLS)
    inside = cell < n * n
    row = cell // n
    column = cell - row * n
    word = tl.load(bits + (request * n + row) * words + (column >> 6), mask=inside, other=0)
    see = (word >> (column & 63).to(tl.int64)) & 1
    tl.store(out + request * n * n + cell, see.to(tl.uint8), mask=inside)


def full_mask(
    ancestor_bits: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    out: torch.Tensor,
    fill_prefix: bool = True,
) -> torch.Tensor:
    """SGLang's FULL_MASK into a preallocated buffer: prefix and tree columns of every node, flattened.

    Request b has N rows of seq_lens[b] + N columns, row-major; requests follow each other without gaps, so
    request b begins at N * sum(seq_lens[:b]) + N * N * b. True: the row may attend the column. Cells behind
    the mask stay as they are (unlike `ddtree_utils.full_mask` without `total`), and a mask longer than the
    buffer is cut, since only the device knows its length.

    Args:
        ancestor_bits: int64 [bs, N, W], contiguous.
        seq_lens: int32 or int64 [bs], committed tokens per request, same device.
        out: bool, 1-D, contiguous, same device, written in place.
        fill_prefix: write the prefix columns (True). With False they stay as they are, for readers that skip
            them, as SGLang's Triton attention does; the cost then does not grow with the context.

    Returns:
        `out`.

    Raises:
        ValueError: a shape, dtype or device is not as above, or `out` cannot hold even bs * N * N cells.
    """
    bs, n = _check_bits(ancestor_bits)
    device = ancestor_bits.device
    _check_seq_lens(seq_lens, bs, device)
    if out.dtype != torch.bool or out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out must be a contiguous 1-D bool tensor, got {list(out.shape)} {out.dtype}.")
    if out.device != device:
        raise ValueError(f"out must be on {device} like ancestor_bits, got {out.device}.")
    if out.numel() < bs * n * n:
        raise ValueError(f"out must hold at least {bs * n * n} cells, got {out.numel()}.")
    if bs:
        _full_mask_kernel[(bs, n)](
            ancestor_bits,
            seq_lens,
            out.view(torch.uint8),
            seq_lens.stride(0),
            out.numel(),
            n,
            _words(n),
            BLOCK=triton.next_power_of_2(n),
            CELLS=_MASK_CELLS,
            FILL_PREFIX=fill_prefix,
        )
    return out


@triton.jit(do_not_specialize=["capacity", "n", "words"])
def _full_mask_kernel(
    bits,
    seq_lens,
    out,
    seq_stride,
    capacity,
    n,
    words,
    BLOCK: tl.constexpr,
    CELLS: tl.constexpr,
    FILL_PREFIX: tl.constexpr,
):
    # One program per row. Every program sums the lengths before its request itself: no scan, no second launch.
    request = tl.program_id(0)
    row = tl.program_id(1)
    before = tl.zeros([], tl.int64)
    some = tl.arange(0, 128)
    for start in range(0, request, 128):
        lengths = tl.load(seq_lens + (start + some) * seq_stride, mask=start + some < request, other=0)
        before += tl.sum(lengths.to(tl.int64), axis=0)
    length = tl.load(seq_lens + request * seq_stride).to(tl.int64)
    begin = n * before + request.to(tl.int64) * n * n + row * (length + n)

    column = tl.arange(0, BLOCK)
    words_at = bits + (request.to(tl.int64) * n + row) * words
    word = tl.load(words_at + (column >> 6), mask=column < n, other=0)
    see = (word >> (column & 63).to(tl.int64)) & 1
    cell = begin + length + column
    tl.store(out + cell, see.to(tl.uint8), mask=(column < n) & (cell < capacity))
    if FILL_PREFIX:
        piece = tl.arange(0, CELLS)
        for start in range(0, length, CELLS):
            prefix_cell = begin + start + piece
            ones = tl.full([CELLS], 1, tl.uint8)
            tl.store(out + prefix_cell, ones, mask=(start + piece < length) & (prefix_cell < capacity))


def walk_trees(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    choices: torch.Tensor,
    max_depth: int,
    *,
    seq_lens: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    out: DeviceWalk | None = None,
) -> DeviceWalk:
    """Follow the target's choices down every tree in one launch: bit for bit `ddtree_utils.walk_trees`.

    With `slots` the same launch makes the commit plan, bit for bit `ddtree_utils.plan_commit`.

    Args:
        tokens: int64 [bs, N], contiguous.
        parents: int64 [bs, N], contiguous; -1 for the root and for padding, else an index below N.
        choices: int64 [bs, N], contiguous; the target's token at every node. A value that is no token
            matches nothing.
        max_depth: steps at most, at least 0, usually D-1; deeper nodes are not accepted.
        seq_lens: int32 or int64 [bs], committed tokens per request; gives `new_seq_lens`. Not changed,
            unless `out.new_seq_lens` is the same tensor.
        slots: int64 [bs, N], contiguous; the KV slot of every node. Needs `seq_lens` and max_depth < N.
        out: buffers of exactly this batch (see `allocate_walk` and `DeviceWalk.head`), overwritten and
            returned.

    Returns:
        A `DeviceWalk`: new tensors, or `out`.

    Raises:
        ValueError: a shape, dtype or device is not as above.
    """
    if max_depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}.")
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens must have the shape [bs, N], N at least 1, got {list(tokens.shape)}.")
    bs, n = tokens.shape
    device = tokens.device
    for name, x in (("tokens", tokens), ("parents", parents), ("choices", choices)):
        _check_buffer(name, x, torch.int64, (bs, n), device)
    _check_seq_lens(seq_lens, bs, device)
    seq_lens_dtype = None if seq_lens is None else seq_lens.dtype
    with_slots = slots is not None
    if slots is not None:
        _check_buffer("slots", slots, torch.int64, (bs, n), device)
        if seq_lens is None or max_depth >= n:
            raise ValueError(f"slots need seq_lens and max_depth < N, got max_depth {max_depth} and N = {n}.")
    if out is None:
        out = allocate_walk(bs, n, max_depth, device, seq_lens_dtype=seq_lens_dtype, slots=with_slots)
    else:
        for name, given in (("new_seq_lens", seq_lens), ("rows", slots)):
            if (getattr(out, name) is None) != (given is None):
                partner = "seq_lens" if name == "new_seq_lens" else "slots"
                raise ValueError(f"out.{name} and {partner} must be given together or not at all.")
        like = allocate_walk(bs, n, max_depth, "meta", seq_lens_dtype=seq_lens_dtype, slots=with_slots)
        _check_out(out, like, device)
    if bs == 0:
        return out
    _walk_kernel[(bs,)](
        tokens,
        parents,
        choices,
        seq_lens,
        slots,
        out.accept_index,
        out.num_accepted_drafts,
        out.bonus,
        out.next_tokens,
        out.accept_lens,
        out.new_seq_lens,
        out.rows,
        out.kv_from,
        out.kv_to,
        out.positions,
        0 if seq_lens is None else seq_lens.stride(0),
        n,
        max_depth,
        BLOCK=max(32, triton.next_power_of_2(n)),
        PATH_BLOCK=max(32, triton.next_power_of_2(max(n, max_depth + 1))),
        HAS_SEQ_LENS=seq_lens is not None,
        HAS_SLOTS=with_slots,
        num_warps=1,
    )
    return out


@triton.jit(do_not_specialize=["n", "max_depth"])
def _walk_kernel(
    tokens,
    parents,
    choices,
    seq_lens,
    slots,
    accept_index_out,
    num_accepted_out,
    bonus_out,
    next_tokens_out,
    accept_lens_out,
    new_seq_lens_out,
    rows_out,
    kv_from_out,
    kv_to_out,
    positions_out,
    seq_stride,
    n,
    max_depth,
    BLOCK: tl.constexpr,
    PATH_BLOCK: tl.constexpr,
    HAS_SEQ_LENS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    # One program, one warp, one request. Whether a node is its parent's choice is known for all nodes at once,
    # so a step of the walk is one minimum over registers and reads no memory.
    request = tl.program_id(0).to(tl.int64)
    row = request * n
    node = tl.arange(0, BLOCK)
    inside = node < n
    parent = tl.load(parents + row + node, mask=inside, other=-1)
    linked = (parent >= 0) & (parent < n)
    chosen = tl.load(choices + row + parent, mask=linked, other=0)
    token = tl.load(tokens + row + node, mask=inside, other=0)
    chosen_by = tl.where(linked & (token == chosen), parent, -1).to(tl.int32)

    slot = tl.arange(0, PATH_BLOCK)
    path = tl.where(slot == 0, 0, -1)
    steps = tl.zeros([], tl.int32)
    current = tl.zeros([], tl.int32)
    # The lowest index: of siblings with one token the first wins.
    child = tl.min(tl.where(chosen_by == current, node, BLOCK), axis=0)
    while (child < BLOCK) & (steps < max_depth):
        steps += 1
        current = child
        path = tl.where(slot == steps, current, path)
        child = tl.min(tl.where(chosen_by == current, node, BLOCK), axis=0)

    committed = tl.load(choices + row + path, mask=path >= 0, other=0)
    tl.store(accept_index_out + request * (max_depth + 1) + slot, path.to(tl.int64), mask=slot <= max_depth)
    tl.store(next_tokens_out + row + slot, committed, mask=slot < n)
    tl.store(num_accepted_out + request, steps.to(tl.int64))
    tl.store(accept_lens_out + request, steps + 1)
    tl.store(bonus_out + request, tl.load(choices + row + current))
    if HAS_SEQ_LENS:
        length = tl.load(seq_lens + request * seq_stride)
        tl.store(new_seq_lens_out + request, length + steps + 1)
    if HAS_SLOTS:
        used = slot <= max_depth
        # Behind the path a place points at its own node: moving it moves nothing.
        from_row = row + tl.where(path >= 0, path, slot)
        place = request * (max_depth + 1) + slot
        tl.store(rows_out + place, from_row, mask=used)
        tl.store(kv_from_out + place, tl.load(slots + from_row, mask=used, other=0), mask=used)
        tl.store(kv_to_out + place, tl.load(slots + row + slot, mask=used, other=0), mask=used)
        begin = tl.load(seq_lens + request * seq_stride).to(tl.int64)
        tl.store(positions_out + place, begin + slot, mask=used)


def _heads(buffers: DeviceTree | DeviceWalk, bs: int) -> dict[str, Any]:
    parts = ((f.name, getattr(buffers, f.name)) for f in fields(buffers))
    return {name: None if x is None else x[:bs] for name, x in parts}


def _words(n: int) -> int:
    return -(-n // _WORD_BITS)


def _check_budget(budget: int) -> None:
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(f"budget must be from 1 to {MAX_BUDGET}, got {budget}.")


def _check_candidates(root_tokens: torch.Tensor, candidate_ids: torch.Tensor, candidate_logprobs: torch.Tensor) -> None:
    if candidate_ids.dim() != 3 or min(candidate_ids.shape[1:]) < 1:
        raise ValueError(
            "candidate_ids must have the shape [bs, D-1, K] with at least one position and one candidate, "
            f"got {list(candidate_ids.shape)}."
        )
    shape = tuple(candidate_ids.shape)
    for name, x, dtype, expected in (
        ("root_tokens", root_tokens, torch.int64, shape[:1]),
        ("candidate_ids", candidate_ids, torch.int64, shape),
        ("candidate_logprobs", candidate_logprobs, torch.float32, shape),
    ):
        _check_like(name, x, dtype, expected, candidate_ids.device)


def _check_seq_lens(seq_lens: torch.Tensor | None, bs: int, device: torch.device) -> None:
    if seq_lens is None:
        return
    if seq_lens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"seq_lens must be torch.int32 or torch.int64, got {seq_lens.dtype}.")
    _check_like("seq_lens", seq_lens, seq_lens.dtype, (bs,), device)


def _check_bits(ancestor_bits: torch.Tensor) -> tuple[int, int]:
    if ancestor_bits.dim() != 3 or ancestor_bits.shape[2] != _words(ancestor_bits.shape[1]):
        raise ValueError(f"ancestor_bits must have the shape [bs, N, ceil(N / 64)], got {list(ancestor_bits.shape)}.")
    shape = tuple(ancestor_bits.shape)
    _check_buffer("ancestor_bits", ancestor_bits, torch.int64, shape, ancestor_bits.device)
    return shape[0], shape[1]


def _check_like(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {x.dtype}.")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, got {list(x.shape)}.")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {x.device}.")


def _check_buffer(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    _check_like(name, x, dtype, shape, device)
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}.")


def _check_out(out: DeviceTree | DeviceWalk, expected: DeviceTree | DeviceWalk, device: torch.device) -> None:
    for field in fields(expected):
        x, like = getattr(out, field.name), getattr(expected, field.name)
        if x is not None and like is not None:
            _check_buffer(f"out.{field.name}", x, like.dtype, tuple(like.shape), device)
