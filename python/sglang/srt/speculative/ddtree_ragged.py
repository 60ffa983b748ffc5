"""One budget of verify tokens for a whole batch: trees of different sizes, without padding between them.

Trees are built dense, C nodes each, in best-first order. So of all drafted nodes of all requests the best are a
prefix of every tree: `allot_nodes` says how long each is, `pack_nodes` lays the prefixes one behind the other for the
verify pass, and `walk_packed` follows the target's choices inside them and plans the commit. A prefix of a tree is a
tree, since a parent precedes its children: no link and no ancestor bit of a kept node points outside.

This is the plain reference of `ddtree_ragged_kernels`, equal to it bit for bit on every device. It needs torch and
NumPy only, and save for `expected_gain`, which is the host's, nothing here waits for the device.

Letters in shapes: bs requests, C nodes of a dense tree (the root counted), T verify tokens that a round can hold,
W = ceil(C / 64), P = max_depth + 1 places of a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

# More nodes do not fit the sum of probabilities below: 63 * 2**24 < 2**31.
MAX_NODES = 64
BINS = 64

# Bins of -score are as wide as numbers are apart that have three bits of mantissa, counted from 1/8: 1/64 where nodes
# are nearly certain, 1/4 at 2, 1 at 8. Adding 1/8 and cutting the float's bits is exact on every device.
BIN_ORIGIN = 0.125
BIN_SHIFT = 20
FIRST_BIN = 0x3E000000 >> BIN_SHIFT

# exp(-x) = 2**-k * exp(-r) in units of 2**-24, by single float32 operations in a fixed order: a library's exp differs
# from device to device. All these are exact in float32.
EXP_LIMIT = 20.0
LOG2_E = 1.4426950216293335
LN_2 = 0.6931471824645996
EXP_TERMS = (0.0013888889225199819, -0.008333333767950535, 0.0416666679084301, -0.1666666716337204, 0.5, -1.0, 1.0)
PROBABILITY_ONE = 16777216.0

MAGNITUDE = 0x7FFFFFFF
INFINITE_COST = 0x7F800000


@dataclass(frozen=True, eq=False)
class Allotment:
    """How many nodes of each tree a round verifies; all tensors contiguous and on one device.

    Attributes:
        qo_lens: int32 [bs]; nodes of the request, its first ones, the root counted: from 1 to what exists.
        qo_indptr: int32 [bs + 1]; where each request's nodes begin among the packed ones. The last is their number,
            at most T.
        histogram: int32 [64]; drafted nodes that exist, kept or not, of all requests, by -score. Bin j holds
            those from `bin_edges`[j] to below [j + 1], the last one all above. For `expected_gain`.
        expected: float32 [bs]; drafted nodes of the request that are expected to be accepted, the sum of exp(score)
            over the kept ones, each rounded to 2**-24.
    """

    qo_lens: torch.Tensor
    qo_indptr: torch.Tensor
    histogram: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True, eq=False)
class PackedNodes:
    """The kept nodes of all requests, one per row, in the order of requests and then of nodes.

    Rows behind the last request's nodes are a tail that belongs to nobody: it fills a graph's size. A model may run
    it, as token 0 at position 0 with SGLang's dummy slot 0, but no request's range of `Allotment.qo_indptr` covers
    it, so attention over ranges leaves its output unwritten, and nothing reads it. Only ``owners`` tells the tail.

    Attributes:
        tokens: int64 [T]; 0 in the tail.
        positions: int64 [T], committed length + depth; 0 in the tail.
        slots: int64 [T], the KV slot; 0 in the tail.
        ancestor_bits: int64 [T, W]; bit j % 64 of word j // 64 is set if and only if the row may attend node j of its
            request (itself or an ancestor). No bit in the tail. Bit 63 is the sign bit.
        depths: int64 [T], 0 for roots and in the tail.
        owners: int64 [T], the request; -1 in the tail.
        nodes: int64 [T], the node's index in its request's tree; 0 for roots and in the tail.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    ancestor_bits: torch.Tensor
    depths: torch.Tensor
    owners: torch.Tensor
    nodes: torch.Tensor


@dataclass(frozen=True, eq=False)
class PackedWalk:
    """What a ragged verify round commits, and where that comes from and goes to, per request.

    A path has P places, place 0 the root's. Behind the path a place points at the node of its own number, or at the
    root where the request has no such node; `positions` goes along. So moving a place's keys and values, or writing
    what belongs to its row, changes nothing that counts even if done for all places: the root is written with its
    own. Within a request ``kv_from`` is never before ``kv_to`` in the order of its slots.

    Attributes:
        accept_index: int64 [bs, P]; the accepted path as node indices of the request's own tree, beginning with the
            root 0, then -1.
        num_accepted_drafts: int64 [bs]; drafted nodes on the path.
        bonus: int64 [bs]; the target's choice at the last node of the path, the next root.
        next_tokens: int64 [bs, P]; the committed tokens in front (the target's choices along the path, the bonus
            last), 0 behind.
        accept_lens: int32 [bs]; committed tokens, num_accepted_drafts + 1.
        new_seq_lens: [bs], seq_lens + accept_lens in the dtype of ``seq_lens``.
        rows: int64 [bs, P]; the places' nodes among the packed rows.
        kv_from: int64 [bs, P]; the KV slots of those nodes.
        kv_to: int64 [bs, P]; the request's front slots, where they belong.
        positions: int64 [bs, P]; the positions of ``kv_to``: seq_lens + 0, 1, 2 ..., the root's where a place points
            at the root.
    """

    accept_index: torch.Tensor
    num_accepted_drafts: torch.Tensor
    bonus: torch.Tensor
    next_tokens: torch.Tensor
    accept_lens: torch.Tensor
    new_seq_lens: torch.Tensor
    rows: torch.Tensor
    kv_from: torch.Tensor
    kv_to: torch.Tensor
    positions: torch.Tensor


def allocate_allotment(bs: int, device: torch.device | str) -> Allotment:
    """Uninitialised buffers for `ddtree_ragged_kernels.allot_nodes(..., out=...)`, which writes every cell."""
    return Allotment(
        qo_lens=torch.empty(bs, dtype=torch.int32, device=device),
        qo_indptr=torch.empty(bs + 1, dtype=torch.int32, device=device),
        histogram=torch.empty(BINS, dtype=torch.int32, device=device),
        expected=torch.empty(bs, dtype=torch.float32, device=device),
    )


def allocate_packed(total: int, words: int, device: torch.device | str) -> PackedNodes:
    """Uninitialised buffers for `ddtree_ragged_kernels.pack_nodes(..., out=...)`, which writes every cell.

    Args:
        total: T, rows.
        words: W, words of ancestor bits per row.
        device: where the buffers live.
    """

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=device)

    return PackedNodes(
        tokens=empty(total),
        positions=empty(total),
        slots=empty(total),
        ancestor_bits=empty(total, words),
        depths=empty(total),
        owners=empty(total),
        nodes=empty(total),
    )


def allocate_walk(
    bs: int, max_depth: int, device: torch.device | str, *, seq_lens_dtype: torch.dtype = torch.int64
) -> PackedWalk:
    """Uninitialised buffers for `ddtree_ragged_kernels.walk_packed(..., out=...)`, which writes every cell.

    Args:
        bs: requests.
        max_depth: steps at most, usually D-1; P = max_depth + 1.
        device: where the buffers live.
        seq_lens_dtype: dtype of ``seq_lens`` and ``new_seq_lens``.
    """

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    places = max_depth + 1
    return PackedWalk(
        accept_index=empty(bs, places),
        num_accepted_drafts=empty(bs),
        bonus=empty(bs),
        next_tokens=empty(bs, places),
        accept_lens=empty(bs, dtype=torch.int32),
        new_seq_lens=empty(bs, dtype=seq_lens_dtype),
        rows=empty(bs, places),
        kv_from=empty(bs, places),
        kv_to=empty(bs, places),
        positions=empty(bs, places),
    )


def allot_nodes(scores: torch.Tensor, num_nodes: torch.Tensor, total: int) -> Allotment:
    """Share ``total`` verify tokens among the requests of a batch: every root, then the likeliest drafted nodes.

    The higher score goes first; equal scores go to the request with the lower index, then to the node with the lower
    index. If fewer nodes exist than ``total`` allows, all of them are kept.

    Args:
        scores: float32 [bs, C], contiguous, C at most 64; natural-log probability of every node's path as in
            `DraftTree.scores`: <= 0 and non-increasing along a tree. -inf is probability zero, which alone does not
            make a node absent. Values are not checked: outside this contract the numbers of nodes stay within their
            limits but mean nothing (a NaN reads as -inf, a positive number as its negative). The root's is not read.
        num_nodes: int64 [bs], contiguous, same device; the first num_nodes[b] nodes of request b exist. The root
            always does, and C nodes at most. 1 makes a request a root alone.
        total: T, verify tokens, at least bs: the roots are counted.

    Returns:
        `Allotment` of new tensors.

    Raises:
        ValueError: a shape, dtype, device or ``total`` is not as above.
    """
    bs, cap = check_allotment(scores, num_nodes, total)
    device = scores.device
    node = torch.arange(cap, device=device)
    drafted = (node >= 1) & (node < num_nodes[:, None])
    # Magnitudes' bits order scores downwards: 0.0 first, -inf last. What is absent comes behind -inf.
    cost = (scores.view(torch.int32) & MAGNITUDE).clamp_(max=INFINITE_COST)
    ranked = torch.where(drafted, cost, MAGNITUDE).flatten()
    order = torch.argsort(ranked, stable=True)
    place = torch.empty_like(order)
    place.scatter_(0, order, torch.arange(bs * cap, device=device))
    kept = (place.view(bs, cap) < total - bs) & drafted
    qo_lens = 1 + kept.sum(1)
    probability = torch.where((node >= 1) & (node < qo_lens[:, None]), _probability(cost), 0)
    histogram = torch.zeros(BINS, dtype=torch.int32, device=device)
    histogram.scatter_add_(0, _bin(cost).flatten(), drafted.flatten().to(torch.int32))
    return Allotment(
        qo_lens=qo_lens.to(torch.int32),
        qo_indptr=torch.nn.functional.pad(qo_lens.cumsum(0), (1, 0)).to(torch.int32),
        histogram=histogram,
        expected=probability.sum(1).to(torch.float32) / PROBABILITY_ONE,
    )


def _probability(cost: torch.Tensor) -> torch.Tensor:
    """exp(-x) in units of 2**-24, int32, of costs: the bits of x >= 0. Off by less than 8 units."""
    x = cost.view(torch.float32).clamp(max=EXP_LIMIT)
    y = x * LOG2_E
    k = (y + 0.5).to(torch.int32)
    r = (y - k.to(torch.float32)) * LN_2
    value = torch.full_like(r, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        value = value * r + term
    units = (value * PROBABILITY_ONE + 0.5).to(torch.int32)
    half = torch.bitwise_right_shift(torch.bitwise_left_shift(torch.ones_like(k), k), 1)
    return torch.bitwise_right_shift(units + half, k)


def _bin(cost: torch.Tensor) -> torch.Tensor:
    """The bin of costs, int64: the bits of -score >= 0."""
    bits = (cost.view(torch.float32) + BIN_ORIGIN).view(torch.int32)
    return ((bits >> BIN_SHIFT) - FIRST_BIN).clamp(max=BINS - 1).to(torch.int64)


def bin_edges() -> np.ndarray:
    """Where the bins of `Allotment.histogram` begin, in -score (nats): float64 [64], the first one 0."""
    bits = (np.arange(FIRST_BIN, FIRST_BIN + BINS, dtype=np.int32) << BIN_SHIFT).astype(np.int32)
    return bits.view(np.float32).astype(np.float64) - BIN_ORIGIN


@cache
def _bin_means() -> np.ndarray:
    """The mean of exp(-x) over every bin, float64 [64]. The last one is open: nothing there is worth a node."""
    low = bin_edges()
    width = np.append(np.diff(low), np.inf)
    return np.exp(-low) * -np.expm1(-width) / width


def expected_gain(histogram: np.ndarray | Sequence[int], nodes: np.ndarray | Sequence[float]) -> np.ndarray:
    """Drafted nodes that a batch is expected to have accepted, if its ``nodes`` likeliest are verified. On the host.

    Nodes are taken to lie evenly within their bin, so this is near the sum of their exp(score), not equal to it.

    Args:
        histogram: int [64], of `Allotment`, on the host.
        nodes: [...], drafted nodes over all requests, at least 0; more than exist add nothing.

    Returns:
        float64 [...], over all requests.

    Raises:
        ValueError: the histogram does not have 64 bins.
    """
    counts = np.asarray(histogram, np.float64)
    if counts.shape != (BINS,):
        raise ValueError(f"histogram must have the shape [{BINS}], got {list(counts.shape)}.")
    mean = _bin_means()
    ends = np.concatenate([[0.0], counts.cumsum()])
    gains = np.concatenate([[0.0], (counts * mean).cumsum()])
    # Interpolation needs ascending points; an empty bin repeats one, with the same gain.
    return np.interp(np.asarray(nodes, np.float64), ends, gains)


def pack_nodes(
    tokens: torch.Tensor,
    depths: torch.Tensor,
    ancestor_bits: torch.Tensor,
    qo_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    total: int,
) -> PackedNodes:
    """Lay the kept nodes of all requests one behind the other, as a verify pass reads them.

    The KV slot of request b's node j is req_to_token[req_pool_indices[b], seq_lens[b] + j], as in a dense round.

    Args:
        tokens, depths: int64 [bs, C], of `DraftTree`.
        ancestor_bits: int64 [bs, C, W], of `DeviceTree` or `ddtree_utils.bit_mask`.
        qo_indptr: int32 [bs + 1], of `Allotment`.
        seq_lens: int32 or int64 [bs], committed tokens per request.
        req_pool_indices: int32 or int64 [bs]; the request's row of ``req_to_token``.
        req_to_token: int32 [R, L]; KV slots. A column from L on reads as slot 0: reserve the upper bound.
        total: T, rows to make, at least qo_indptr[bs] (which the device alone knows; rows from T on are lost).

    All tensors are contiguous and on one device.

    Returns:
        `PackedNodes` of new tensors.

    Raises:
        ValueError: a shape, dtype, device or ``total`` is not as above.
    """
    bs, cap, words = check_pack(
        tokens, depths, ancestor_bits, qo_indptr, seq_lens, req_pool_indices, req_to_token, total
    )
    device = tokens.device
    row = torch.arange(total, device=device)
    if bs == 0:
        zero = torch.zeros_like(row)
        return PackedNodes(zero, zero, zero, row.new_zeros(total, words), zero, zero - 1, zero)
    ends = qo_indptr.to(torch.int64)
    # The first request that ends behind the row.
    request = torch.searchsorted(ends[1:].contiguous(), row, right=True)
    owned = request < bs
    request.clamp_(max=bs - 1)
    node = torch.where(owned, row - ends[request], 0)
    depth = torch.where(owned, depths[request, node], 0)
    length = seq_lens.to(torch.int64)[request]
    columns = req_to_token.shape[1]
    column = length + node
    slot = req_to_token[req_pool_indices[request], column.clamp(max=columns - 1)].to(torch.int64)
    return PackedNodes(
        tokens=torch.where(owned, tokens[request, node], 0),
        positions=torch.where(owned, length + depth, 0),
        slots=torch.where(owned & (column < columns), slot, 0),
        ancestor_bits=torch.where(owned[:, None], ancestor_bits[request, node], 0),
        depths=depth,
        owners=torch.where(owned, request, -1),
        nodes=node,
    )


def walk_packed(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    qo_indptr: torch.Tensor,
    choices: torch.Tensor,
    max_depth: int,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
) -> PackedWalk:
    """Follow the target's choices down the kept part of every tree, and plan the commit.

    As `ddtree_utils.walk_trees` and `plan_commit` on trees cut to their kept nodes: at each node the target's choice
    is taken; if it is the token of a kept child the walk goes there (of two the first), else it stops and that choice
    is the bonus token. With one independent draw per node this is exactly target sampling.

    Args:
        tokens: int64 [bs, C], of `DraftTree`.
        parents: int64 [bs, C]; -1 for the root and for padding.
        qo_indptr: int32 [bs + 1], of `Allotment`.
        choices: int64 [T], the target's token at every packed row; a value that is no token matches nothing.
        max_depth: steps at most, at least 0, usually D-1; deeper nodes are not accepted. P = max_depth + 1, which
            may exceed C.
        seq_lens: int32 or int64 [bs], committed tokens per request.
        slots: int64 [T], of `PackedNodes`.

    All tensors are contiguous and on one device.

    Returns:
        `PackedWalk` of new tensors.

    Raises:
        ValueError: a shape, dtype, device or ``max_depth`` is not as above.
    """
    bs, cap = check_walk(tokens, parents, qo_indptr, choices, max_depth, seq_lens, slots)
    device = tokens.device
    begin = qo_indptr[:-1, None].to(torch.int64)
    count = qo_indptr[1:, None].to(torch.int64) - begin
    node = torch.arange(cap, device=device)
    kept = node < count
    # Node by node, to compare with tokens. What is behind the kept ones is never looked at.
    chosen = choices[torch.where(kept, begin + node, begin)]
    current = torch.zeros((bs, 1), dtype=torch.int64, device=device)
    path = [current]
    for _ in range(max_depth):
        # A walk that has stopped stays at its node, where the same choice finds no child again.
        matches = kept & (parents == current) & (tokens == chosen.gather(1, current))
        first = torch.where(matches, node, cap).amin(-1, keepdim=True)
        child = torch.where(first < cap, first, -1)
        path.append(child)
        current = torch.where(child >= 0, child, current)
    accept_index = torch.cat(path, dim=1)
    accepted = accept_index >= 0
    num_accepted_drafts = accepted.sum(1) - 1
    accept_lens = (num_accepted_drafts + 1).to(torch.int32)
    place = torch.arange(max_depth + 1, device=device)
    # An accepted node never lies before its place, so this changes only places behind the path.
    own = torch.where(place < count, place, 0)
    rows = begin + torch.where(accepted, accept_index, own)
    return PackedWalk(
        accept_index=accept_index,
        num_accepted_drafts=num_accepted_drafts,
        bonus=chosen.gather(1, current)[:, 0],
        next_tokens=torch.where(accepted, choices[rows], 0),
        accept_lens=accept_lens,
        new_seq_lens=seq_lens + accept_lens,
        rows=rows,
        kv_from=slots[rows],
        kv_to=slots[begin + own],
        positions=seq_lens[:, None].to(torch.int64) + own,
    )


def check_allotment(scores: torch.Tensor, num_nodes: torch.Tensor, total: int) -> tuple[int, int]:
    """bs and C of `allot_nodes`' arguments, or its ValueError."""
    if scores.dim() != 2 or not 1 <= scores.shape[1] <= MAX_NODES:
        raise ValueError(f"scores must have the shape [bs, C], C from 1 to {MAX_NODES}, got {list(scores.shape)}.")
    bs, cap = scores.shape
    check_tensor("scores", scores, (torch.float32,), (bs, cap), scores.device)
    check_tensor("num_nodes", num_nodes, (torch.int64,), (bs,), scores.device)
    if total < bs:
        raise ValueError(f"total must be at least {bs}, one root per request, got {total}.")
    return bs, cap


def check_pack(
    tokens: torch.Tensor,
    depths: torch.Tensor,
    ancestor_bits: torch.Tensor,
    qo_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    total: int,
) -> tuple[int, int, int]:
    """bs, C and W of `pack_nodes`' arguments, or its ValueError."""
    bs, cap = _check_trees(tokens, "depths", depths, qo_indptr, seq_lens)
    device, words = tokens.device, -(-cap // 64)
    check_tensor("ancestor_bits", ancestor_bits, (torch.int64,), (bs, cap, words), device)
    check_tensor("req_pool_indices", req_pool_indices, (torch.int32, torch.int64), (bs,), device)
    if req_to_token.dim() != 2 or min(req_to_token.shape) < 1:
        raise ValueError(f"req_to_token must have the shape [R, L], none of them 0, got {list(req_to_token.shape)}.")
    check_tensor("req_to_token", req_to_token, (torch.int32,), tuple(req_to_token.shape), device)
    if total < bs:
        raise ValueError(f"total must be at least {bs}, one root per request, got {total}.")
    return bs, cap, words


def check_walk(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    qo_indptr: torch.Tensor,
    choices: torch.Tensor,
    max_depth: int,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[int, int]:
    """bs and C of `walk_packed`'s arguments, or its ValueError."""
    if max_depth < 0:
        raise ValueError(f"max_depth must be at least 0, got {max_depth}.")
    bs, cap = _check_trees(tokens, "parents", parents, qo_indptr, seq_lens)
    if choices.dim() != 1 or choices.shape[0] < bs:
        raise ValueError(f"choices must have the shape [T], T at least {bs}, got {list(choices.shape)}.")
    check_tensor("choices", choices, (torch.int64,), tuple(choices.shape), tokens.device)
    check_tensor("slots", slots, (torch.int64,), tuple(choices.shape), tokens.device)
    return bs, cap


def _check_trees(
    tokens: torch.Tensor, name: str, other: torch.Tensor, qo_indptr: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[int, int]:
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens must have the shape [bs, C], C at least 1, got {list(tokens.shape)}.")
    bs, cap = tokens.shape
    check_tensor("tokens", tokens, (torch.int64,), (bs, cap), tokens.device)
    check_tensor(name, other, (torch.int64,), (bs, cap), tokens.device)
    check_tensor("qo_indptr", qo_indptr, (torch.int32,), (bs + 1,), tokens.device)
    check_tensor("seq_lens", seq_lens, (torch.int32, torch.int64), (bs,), tokens.device)
    return bs, cap


def check_tensor(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    """Raise a ValueError that names the tensor unless it is contiguous and as given."""
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}.")
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, got {list(x.shape)}.")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {x.device}.")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {list(x.stride())}.")
