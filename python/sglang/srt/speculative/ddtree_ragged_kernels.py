"""One budget of verify tokens for a whole batch, on the device in Triton: bit for bit as `ddtree_ragged` does.

Nothing here waits for the device, and every launch geometry follows from shapes alone, so all functions may be
captured in a CUDA graph once they have run (a first call compiles; `allot_nodes` does so for each power of two of
requests from 16 on). Outputs may be preallocated buffers.

`allot_nodes` is one program for the whole batch, with every node's cost in registers. A sort of all scores would be
wanted, but only the W-th lowest cost matters: the magnitude's bits of a score, which is never positive, order scores
downwards as an integer, so 31 steps of bisection find it, one sum over the batch each. All nodes below that cost are
kept, and of those that share it the first ones. Probabilities are summed as integers, so their sum has no order
either; with that and with multiplications that are not fused with additions, it is the same on every device.

Letters in shapes: bs requests, C nodes of a dense tree (the root counted), T verify tokens that a round can hold,
W = ceil(C / 64), P = max_depth + 1 places of a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from sglang.srt.speculative.ddtree_ragged import (
    BIN_ORIGIN,
    BIN_SHIFT,
    BINS,
    EXP_LIMIT,
    EXP_TERMS,
    FIRST_BIN,
    INFINITE_COST,
    LN_2,
    LOG2_E,
    MAGNITUDE,
    PROBABILITY_ONE,
    Allotment,
    PackedNodes,
    PackedWalk,
    allocate_allotment,
    allocate_packed,
    allocate_walk,
    check_allotment,
    check_pack,
    check_tensor,
    check_walk,
)

_Buffers = TypeVar("_Buffers", Allotment, PackedNodes, PackedWalk)

# Their nodes fill the registers of one program.
MAX_REQUESTS = 256

_LEAST_REQUESTS = 16
# How many nodes a warp of that program holds: 16 per thread, so that 32 warps need no more registers than there are.
_WARP_CELLS = 512
_MAX_WARPS = 32

_MAGNITUDE = tl.constexpr(MAGNITUDE)
_INFINITE_COST = tl.constexpr(INFINITE_COST)
_EXP_LIMIT = tl.constexpr(EXP_LIMIT)
_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(LN_2)
_EXP_6 = tl.constexpr(EXP_TERMS[0])
_EXP_5 = tl.constexpr(EXP_TERMS[1])
_EXP_4 = tl.constexpr(EXP_TERMS[2])
_EXP_3 = tl.constexpr(EXP_TERMS[3])
_PROBABILITY_ONE = tl.constexpr(PROBABILITY_ONE)
_PROBABILITY_UNIT = tl.constexpr(1 / PROBABILITY_ONE)
_BINS = tl.constexpr(BINS)
_BIN_ORIGIN = tl.constexpr(BIN_ORIGIN)
_BIN_SHIFT = tl.constexpr(BIN_SHIFT)
_FIRST_BIN = tl.constexpr(FIRST_BIN)


def allot_nodes(
    scores: torch.Tensor,
    num_nodes: torch.Tensor,
    total: int,
    *,
    out: Allotment | None = None,
    validate: bool = True,
) -> Allotment:
    """Share ``total`` verify tokens among a batch in one launch: bit for bit `ddtree_ragged.allot_nodes`.

    Args:
        scores: float32 [bs, C], contiguous, as there; bs at most 256, C at most 64.
        num_nodes: int64 [bs], contiguous, as there.
        total: T, at least bs.
        out: buffers of exactly this batch (see `ddtree_ragged.allocate_allotment`), overwritten and returned.
        validate: look at shapes and dtypes; with the same buffers round after round, once is enough.

    Returns:
        An `Allotment`: new tensors, or ``out``.

    Raises:
        ValueError: a shape, dtype, device, ``total`` or a limit is not as above.
    """
    bs, cap = check_allotment(scores, num_nodes, total) if validate else scores.shape
    if bs > MAX_REQUESTS:
        raise ValueError(f"a batch must have at most {MAX_REQUESTS} requests, got {bs}.")
    if validate or out is None:
        out = _buffers(out, allocate_allotment, bs, device=scores.device)
    requests = max(_LEAST_REQUESTS, triton.next_power_of_2(bs))
    nodes = triton.next_power_of_2(cap)
    _allot_kernel[(1,)](
        scores,
        num_nodes,
        out.qo_lens,
        out.qo_indptr,
        out.histogram,
        out.expected,
        bs,
        cap,
        total,
        REQUESTS=requests,
        NODES=nodes,
        num_warps=_warps(requests * nodes),
        enable_fp_fusion=False,
    )
    return out


def _warps(cells: int) -> int:
    return min(max(1, cells // _WARP_CELLS), _MAX_WARPS)


@triton.jit
def _probability(x):
    # exp(-x) in units of 2**-24, one float operation after the other, see ddtree_ragged.
    x = tl.minimum(x, _EXP_LIMIT)
    y = x * _LOG2_E
    k = (y + 0.5).to(tl.int32)
    r = (y - k.to(tl.float32)) * _LN_2
    value = _EXP_6 * r + _EXP_5
    value = value * r + _EXP_4
    value = value * r + _EXP_3
    value = value * r + 0.5
    value = value * r + -1.0
    value = value * r + 1.0
    units = (value * _PROBABILITY_ONE + 0.5).to(tl.int32)
    return (units + ((1 << k) >> 1)) >> k


# Results lie at places that depend on the batch, and lengths in the last round's: compiled once for all of them.
@triton.jit(
    do_not_specialize=["bs", "cap", "total"],
    do_not_specialize_on_alignment=["num_nodes", "qo_lens_out", "qo_indptr_out", "histogram_out", "expected_out"],
)
def _allot_kernel(
    scores,
    num_nodes,
    qo_lens_out,
    qo_indptr_out,
    histogram_out,
    expected_out,
    bs,
    cap,
    total,
    REQUESTS: tl.constexpr,
    NODES: tl.constexpr,
):
    # One program for the batch: bisect for the cost of the last node kept, then share out those that tie with it.
    request = tl.arange(0, REQUESTS)
    node = tl.arange(0, NODES)
    real = request < bs
    exist = tl.minimum(tl.load(num_nodes + request, mask=real, other=0), cap).to(tl.int32)
    drafted = (node >= 1)[None, :] & (node[None, :] < exist[:, None])
    score = tl.load(scores + request[:, None] * cap + node[None, :], mask=drafted, other=0.0)
    # A NaN costs what -inf does, so that no value looks absent.
    cost = tl.minimum(score.to(tl.int32, bitcast=True) & _MAGNITUDE, _INFINITE_COST)
    ranked = tl.where(drafted, cost, _MAGNITUDE)

    wanted = tl.minimum(total - bs, tl.sum(drafted.to(tl.int32)))
    # The highest number that fewer than `wanted` costs are below is the cost of the last node wanted.
    threshold = tl.zeros([], tl.int32)
    for step in range(31):
        candidate = threshold | (1 << (30 - step))
        below = tl.sum((ranked < candidate).to(tl.int32))
        threshold = tl.where(below < wanted, candidate, threshold)

    less = tl.sum((ranked < threshold).to(tl.int32), axis=1)
    tied = tl.sum((ranked == threshold).to(tl.int32), axis=1)
    left = wanted - tl.sum(less, axis=0)
    left -= tl.cumsum(tied, axis=0) - tied
    taken = tl.minimum(tl.maximum(left, 0), tied)
    qo_len = tl.where(real, 1 + less + taken, 0)
    tl.store(qo_lens_out + request, qo_len, mask=real)
    tl.store(qo_indptr_out, 0)
    tl.store(qo_indptr_out + 1 + request, tl.cumsum(qo_len, axis=0), mask=real)

    x = cost.to(tl.float32, bitcast=True)
    kept = (node >= 1)[None, :] & (node[None, :] < qo_len[:, None])
    units = tl.sum(tl.where(kept, _probability(x), 0), axis=1)
    # Not a division, which is not exact on every device.
    tl.store(expected_out + request, units.to(tl.float32) * _PROBABILITY_UNIT, mask=real)

    bits = (x + _BIN_ORIGIN).to(tl.int32, bitcast=True)
    bin = tl.minimum((bits >> _BIN_SHIFT) - _FIRST_BIN, _BINS - 1)
    counts = tl.histogram(tl.ravel(bin), _BINS, mask=tl.ravel(drafted))
    tl.store(histogram_out + tl.arange(0, _BINS), counts)


def pack_nodes(
    tokens: torch.Tensor,
    depths: torch.Tensor,
    ancestor_bits: torch.Tensor,
    qo_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    total: int,
    *,
    out: PackedNodes | None = None,
    validate: bool = True,
) -> PackedNodes:
    """Lay the kept nodes of all requests one behind the other in one launch: as `ddtree_ragged.pack_nodes`.

    Args:
        tokens, depths: int64 [bs, C].
        ancestor_bits: int64 [bs, C, W].
        qo_indptr: int32 [bs + 1], of `allot_nodes` with the same C.
        seq_lens: int32 or int64 [bs].
        req_pool_indices: int32 or int64 [bs].
        req_to_token: int32 [R, L].
        total: T, at least qo_indptr[bs], which is not checked; no access leaves its tensor.
        out: buffers of exactly ``total`` rows (see `ddtree_ragged.allocate_packed`), overwritten and returned.
        validate: look at shapes and dtypes; with the same buffers round after round, once is enough.

    All tensors are contiguous and on one device; meanings as there.

    Returns:
        `PackedNodes`: new tensors, or ``out``.

    Raises:
        ValueError: a shape, dtype, device or ``total`` is not as above.
    """
    if validate:
        check_pack(tokens, depths, ancestor_bits, qo_indptr, seq_lens, req_pool_indices, req_to_token, total)
    bs, cap, words = ancestor_bits.shape
    if validate or out is None:
        out = _buffers(out, allocate_packed, total, words, device=tokens.device)
    # One program per request and one for the tail.
    _pack_kernel[(bs + 1,)](
        tokens,
        depths,
        ancestor_bits,
        qo_indptr,
        seq_lens,
        req_pool_indices,
        req_to_token,
        out.tokens,
        out.positions,
        out.slots,
        out.ancestor_bits,
        out.depths,
        out.owners,
        out.nodes,
        bs,
        cap,
        words,
        req_to_token.shape[1],
        total,
        BLOCK=max(32, triton.next_power_of_2(cap)),
        num_warps=1,
    )
    return out


@triton.jit(
    do_not_specialize=["bs", "cap", "words", "columns", "total"],
    do_not_specialize_on_alignment=["qo_indptr", "seq_lens", "req_pool_indices"],
)
def _pack_kernel(
    tokens,
    depths,
    bits,
    qo_indptr,
    seq_lens,
    req_pool_indices,
    req_to_token,
    tokens_out,
    positions_out,
    slots_out,
    bits_out,
    depths_out,
    owners_out,
    nodes_out,
    bs,
    cap,
    words,
    columns,
    total,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(qo_indptr + request)
    lane = tl.arange(0, BLOCK)
    if request < bs:
        end = tl.minimum(tl.load(qo_indptr + request + 1), total)
        row = begin + lane
        kept = (row < end) & (lane < cap)
        node = request * cap + lane
        length = tl.load(seq_lens + request).to(tl.int64)
        depth = tl.load(depths + node, mask=kept, other=0)
        column = length + lane
        in_pool = tl.load(req_pool_indices + request).to(tl.int64) * columns + column
        slot = tl.load(req_to_token + in_pool, mask=kept & (column < columns), other=0)
        tl.store(tokens_out + row, tl.load(tokens + node, mask=kept, other=0), mask=kept)
        tl.store(positions_out + row, length + depth, mask=kept)
        tl.store(slots_out + row, slot.to(tl.int64), mask=kept)
        tl.store(depths_out + row, depth, mask=kept)
        tl.store(owners_out + row, request + tl.zeros([BLOCK], tl.int64), mask=kept)
        tl.store(nodes_out + row, lane.to(tl.int64), mask=kept)
        for word in range(words):
            seen = tl.load(bits + node * words + word, mask=kept, other=0)
            tl.store(bits_out + row.to(tl.int64) * words + word, seen, mask=kept)
    else:
        zero = tl.zeros([BLOCK], tl.int64)
        for start in range(begin, total, BLOCK):
            row = start + lane
            tail = row < total
            tl.store(tokens_out + row, zero, mask=tail)
            tl.store(positions_out + row, zero, mask=tail)
            tl.store(slots_out + row, zero, mask=tail)
            tl.store(depths_out + row, zero, mask=tail)
            tl.store(owners_out + row, zero - 1, mask=tail)
            tl.store(nodes_out + row, zero, mask=tail)
            for word in range(words):
                tl.store(bits_out + row.to(tl.int64) * words + word, zero, mask=tail)


def walk_packed(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    qo_indptr: torch.Tensor,
    choices: torch.Tensor,
    max_depth: int,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    *,
    out: PackedWalk | None = None,
) -> PackedWalk:
    """Follow the target's choices and plan the commit in one launch: bit for bit `ddtree_ragged.walk_packed`.

    Args:
        tokens, parents: int64 [bs, C].
        qo_indptr: int32 [bs + 1], of `allot_nodes` with the same C.
        choices: int64 [T].
        max_depth: steps at most, at least 0; P = max_depth + 1.
        seq_lens: int32 or int64 [bs]. Not changed, unless ``out.new_seq_lens`` is the same tensor.
        slots: int64 [T].
        out: buffers of exactly this batch (see `ddtree_ragged.allocate_walk`), overwritten and returned.

    All tensors are contiguous and on one device; meanings as there.

    Returns:
        A `PackedWalk`: new tensors, or ``out``.

    Raises:
        ValueError: a shape, dtype, device or ``max_depth`` is not as above.
    """
    bs, cap = check_walk(tokens, parents, qo_indptr, choices, max_depth, seq_lens, slots)
    out = _buffers(out, allocate_walk, bs, max_depth, device=tokens.device, seq_lens_dtype=seq_lens.dtype)
    if bs:
        _walk_packed_kernel[(bs,)](
            tokens,
            parents,
            qo_indptr,
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
            cap,
            max_depth,
            choices.shape[0],
            BLOCK=max(32, triton.next_power_of_2(cap)),
            PATH_BLOCK=max(32, triton.next_power_of_2(max_depth + 1)),
            num_warps=1,
        )
    return out


@triton.jit(do_not_specialize=["cap", "max_depth", "total"])
def _walk_packed_kernel(
    tokens,
    parents,
    qo_indptr,
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
    cap,
    max_depth,
    total,
    BLOCK: tl.constexpr,
    PATH_BLOCK: tl.constexpr,
):
    # One program, one warp, one request. Whether a node is its parent's choice is known for all nodes at once,
    # so a step of the walk is one minimum over registers and reads no memory.
    request = tl.program_id(0).to(tl.int64)
    begin = tl.load(qo_indptr + request)
    # What `total` and `cap` cut off here is outside the contract; no access may leave its tensor all the same.
    count = tl.minimum(tl.minimum(tl.load(qo_indptr + request + 1), total) - begin, cap)
    node = tl.arange(0, BLOCK)
    kept = node < count
    parent = tl.load(parents + request * cap + node, mask=kept, other=-1)
    linked = (parent >= 0) & (parent < count)
    chosen = tl.load(choices + begin + parent, mask=linked, other=0)
    token = tl.load(tokens + request * cap + node, mask=kept, other=0)
    chosen_by = tl.where(linked & (token == chosen), parent, -1).to(tl.int32)

    place = tl.arange(0, PATH_BLOCK)
    path = tl.where(place == 0, 0, -1)
    steps = tl.zeros([], tl.int32)
    current = tl.zeros([], tl.int32)
    # The lowest index: of siblings with one token the first wins.
    child = tl.min(tl.where(chosen_by == current, node, BLOCK), axis=0)
    while (child < BLOCK) & (steps < max_depth):
        steps += 1
        current = child
        path = tl.where(place == steps, current, path)
        child = tl.min(tl.where(chosen_by == current, node, BLOCK), axis=0)

    used = place <= max_depth
    accepted = path >= 0
    # Behind the path a place points at its own node, or at the root: moving it moves nothing.
    own = tl.where(place < count, place, 0)
    row = begin + tl.where(accepted, path, own)
    own_row = begin + own
    at = request * (max_depth + 1) + place
    length = tl.load(seq_lens + request)
    tl.store(accept_index_out + at, path.to(tl.int64), mask=used)
    tl.store(next_tokens_out + at, tl.load(choices + row, mask=used & accepted & (row < total), other=0), mask=used)
    tl.store(rows_out + at, row.to(tl.int64), mask=used)
    tl.store(kv_from_out + at, tl.load(slots + row, mask=used & (row < total), other=0), mask=used)
    tl.store(kv_to_out + at, tl.load(slots + own_row, mask=used & (own_row < total), other=0), mask=used)
    tl.store(positions_out + at, length.to(tl.int64) + own, mask=used)
    tl.store(num_accepted_out + request, steps.to(tl.int64))
    tl.store(accept_lens_out + request, steps + 1)
    tl.store(bonus_out + request, tl.load(choices + begin + current, mask=begin < total, other=0))
    tl.store(new_seq_lens_out + request, length + steps + 1)


def _buffers(
    out: _Buffers | None, allocate: Callable[..., _Buffers], *sizes: int, device: torch.device, **options: Any
) -> _Buffers:
    """New buffers, or ``out`` once it is known to be like them."""
    if out is None:
        return allocate(*sizes, device, **options)
    like = allocate(*sizes, "meta", **options)
    for field in fields(like):
        x = getattr(like, field.name)
        check_tensor(f"out.{field.name}", getattr(out, field.name), (x.dtype,), tuple(x.shape), device)
    return out
