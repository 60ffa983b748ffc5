"""Ancestor-mask attention in Triton: what `torch_tree_mask.tree_attention` computes, for a batch over a paged cache.

Every request has N tree tokens (its own N) behind a committed prefix. A token attends the whole prefix, which lies
in SGLang's paged KV cache, and of the tree what its ancestor bits name:

    out = softmax(q [K_prefix | K_tree[bits]]^T * scaling) [V_prefix | V_tree[bits]]

No mask is read for the prefix, one 64-bit word per token and 64 keys for the tree, and no mask is ever dense. One
program serves all tokens and all query heads of a KV head (as far as a tile reaches), so every key and value is
loaded once for all of them.

A small batch with a long context must still fill the GPU, so the prefix is split among programs and the parts are
merged by their log-sum-exp. Lengths are known on the device only. So the host gives a number of programs that
follows from shapes, and `plan_splits` deals the prefixes out to them on the device. With E extra splits,

    usual part L = max(min_split, ceil(sum of lengths / E)),    request b gets s_b = max(1, round(length_b / L)).

Hence sum s_b <= bs + E. Where s_b > 1, s_b <= 4/3 length_b / L, so these requests have at most 4/3 E parts together;
only they pass through scratch memory, whose size therefore depends neither on the context nor on the batch, and only
they, at most 2/3 E, are merged. Parts have a fixed order, so two runs give the same bits.

A request of many nodes keeps more of the device busy per part. Where requests differ that much, lengths are weighted
with that (`Weights`), and requests of few nodes are cut into more parts than the others.

A program that finds nothing to do still has to be launched. So parts of requests of many nodes come first: T tokens are
at most T / (few nodes + 1) such requests, which bounds their parts by shapes, and no more programs are made for them.

Nothing here waits for the device, and every launch follows from shapes alone: all functions may be captured in a
CUDA graph once they have run (a first call compiles).

Letters in shapes: bs requests, T tokens of all requests, N nodes of a request, W words per node, H query heads, G KV
heads, D head dimension of keys, DV of values, E extra splits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_HEAD_DIM = 256
# Shorter parts cost more to merge than they gain.
MIN_SPLIT = 128

_WORD_BITS = 64
_LOG2E = 1.4426950408889634
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# What a program may use where no GPU tells: that of an H100.
_SHARED_MEMORY = 227 << 10
_MERGE_TILE = 16
_MERGE_PROGRAMS = 8192


@dataclass(frozen=True)
class Tiles:
    """Launch geometry of the attention kernel.

    Attributes:
        block_m: rows of a program, a row being one (token, query head of the KV head).
        block_n: keys per step.
        num_warps, num_stages: as Triton's.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Weights:
    """What a part of a request takes of the device, in parts of a request of few nodes; see `weigh`.

    Attributes:
        few_nodes: requests of at most so many nodes count 1.
        tile_nodes, tile_weight: the others count ``tile_weight`` for every ``tile_nodes`` nodes or less.
    """

    few_nodes: int = 1 << 30
    tile_nodes: int = 1
    tile_weight: int = 1


ALIKE = Weights()


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """How the prefixes of a batch are dealt out; made by `plan_splits`, read by every layer of a round.

    Attributes:
        items: int32 [bs + E, 4], one part of a prefix each: request (-1: none), first and end index into the
            request's prefix, slot in scratch memory (-1: the request's only part, which needs none). Requests of more
            than ``weights.few_nodes`` come first.
        requests: int32 [bs, 2], first slot in scratch memory and number of parts.
        merges: int32 [most that can be], the requests of several parts in order, then -1.
        extra_splits: E.
        weights: of lengths in the sum that L follows from.
    """

    items: torch.Tensor
    requests: torch.Tensor
    merges: torch.Tensor
    extra_splits: int
    weights: Weights = ALIKE

    def head(self, bs: int) -> SplitPlan:
        """Views for a smaller batch in buffers made for a larger one."""
        extra = self.extra_splits
        merges = self.merges[: _most_merges(bs, extra)]
        return SplitPlan(self.items[: bs + extra], self.requests[:bs], merges, extra, self.weights)

    def most_items(self, tokens: int, above: int) -> int:
        """How many items there can be of requests of more than ``above`` nodes, if a batch has so many tokens.

        They are the first ones.
        """
        if above != self.weights.few_nodes:
            return self.items.shape[0]
        return min(tokens // (above + 1) + self.extra_splits, self.items.shape[0])


@functools.cache
def choose_tiles(
    rows: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, shared_memory: int = _SHARED_MEMORY
) -> Tiles:
    """Tiles that fit a device.

    Args:
        rows: N * H / G of the widest request.
        head_dim, v_head_dim: D and DV.
        dtype: the queries'.
        shared_memory: bytes that a program may use; below about 100 KB (sm_86, sm_89, sm_120) tiles get smaller.
    """
    width = max(_padded(head_dim), _padded(v_head_dim))
    if dtype == torch.float32:
        # Exact products have no tensor cores: small tiles, or registers spill.
        block_m, block_n, num_warps = min(16 if width > 128 else 32, _padded(rows)), 32 if width <= 128 else 16, 4
        limit = 2
    else:
        block_m = min(128 if width <= 128 else 64, _padded(rows))
        block_n = 64
        num_warps = 8 if block_m * width > 64 * 128 else 4
        # A key's slot is loaded before the key: five stages keep three tiles of keys and values under way.
        limit = 5
    item = dtype.itemsize
    row_bytes = (_padded(head_dim) + _padded(v_head_dim)) * item
    while block_n > 16 and block_n * row_bytes * 2 + block_m * width * item > shared_memory:
        block_n //= 2
    stages = (shared_memory - block_m * width * item) // (block_n * row_bytes)
    return Tiles(block_m, block_n, num_warps, max(1, min(limit, stages)))


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may use on a device."""
    if device.type != "cuda":
        return _SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def choose_extra_splits(max_nodes: int, heads: int, kv_heads: int, tiles: Tiles, processors: int) -> int:
    """E, so that the programs of one long request fill the device once, all at work at the same time.

    Args:
        max_nodes: N of the widest request.
        heads, kv_heads: H and G.
        tiles: the attention kernel's.
        processors: multiprocessors of the device.
    """
    programs = kv_heads * triton.cdiv(max_nodes * (heads // kv_heads), tiles.block_m)
    return max(1, _resident(tiles) * processors // programs)


def weigh(heads: int, kv_heads: int, tiles: Tiles, small_tiles: Tiles) -> Weights:
    """The weights where ``small_tiles`` serve requests of few nodes and E was chosen for these, `choose_extra_splits`.

    Args:
        heads, kv_heads: H and G.
        tiles, small_tiles: as in `tree_attention`.
    """
    group = heads // kv_heads
    weight = triton.cdiv(_resident(small_tiles), _resident(tiles))
    return Weights(small_tiles.block_m // group, max(1, tiles.block_m // group), weight)


def _resident(tiles: Tiles) -> int:
    """Programs of a multiprocessor, by registers: about 250 per thread of 64 K."""
    return 2 if tiles.num_warps <= 4 else 1


def allocate_plan(bs: int, extra_splits: int, device: torch.device | str, weights: Weights = ALIKE) -> SplitPlan:
    """Uninitialised buffers for `plan_splits(..., out=...)`, which writes every cell of them."""

    def cells(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    merges = cells(_most_merges(bs, extra_splits))
    return SplitPlan(cells(bs + extra_splits, 4), cells(bs, 2), merges, extra_splits, weights)


def scratch_numel(bs: int, extra_splits: int, max_nodes: int, heads: int, v_head_dim: int) -> int:
    """Floats of scratch memory that `tree_attention` needs; it does not grow once bs >= E / 3."""
    return _slots(bs, extra_splits) * max_nodes * heads * (v_head_dim + 1)


def allocate_scratch(
    bs: int, extra_splits: int, max_nodes: int, heads: int, v_head_dim: int, device: torch.device | str
) -> torch.Tensor:
    """Uninitialised float32 [scratch_numel(...)], which launches one after another may share."""
    numel = scratch_numel(bs, extra_splits, max_nodes, heads, v_head_dim)
    return torch.empty(numel, dtype=torch.float32, device=device)


def plan_splits(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    extra_splits: int,
    *,
    min_split: int = MIN_SPLIT,
    weights: Weights = ALIKE,
    out: SplitPlan | None = None,
) -> SplitPlan:
    """Deal the prefixes of a batch out to programs, in one launch.

    Args:
        qo_indptr: int32 or int64 [bs + 1], contiguous; a request without tokens gets no part.
        kv_indptr: int32 or int64 [bs + 1], contiguous.
        extra_splits: E, at least 0; 0: no prefix is split, and a request's result does not depend on others'.
        min_split: keys, the least L; a part may be a quarter shorter.
        weights: of `weigh`, for lengths in the sum that L follows from.
        out: buffers of exactly this batch and these weights (see `allocate_plan` and `SplitPlan.head`), overwritten and
            returned.

    Raises:
        ValueError: a shape, dtype, device or number is not as above.
    """
    bs = kv_indptr.shape[0] - 1
    for name, x in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        _check_indptr(name, x, bs, kv_indptr.device)
    if extra_splits < 0 or min_split < 1:
        raise ValueError(f"extra_splits must be >= 0 and min_split >= 1, got {extra_splits} and {min_split}.")
    if out is None:
        out = allocate_plan(bs, extra_splits, kv_indptr.device, weights)
    _check_plan("out", out, bs, kv_indptr.device)
    if out.extra_splits != extra_splits:
        raise ValueError(f"out was made for {out.extra_splits} extra splits, got {extra_splits}.")
    if out.weights != weights:
        raise ValueError(f"out was made for {out.weights}, got {weights}.")
    if bs:
        _plan_kernel[(triton.cdiv(bs + extra_splits, 16),)](
            qo_indptr,
            kv_indptr,
            out.items,
            out.requests,
            out.merges,
            bs,
            extra_splits,
            min_split,
            out.merges.shape[0],
            weights.few_nodes,
            weights.tile_nodes,
            weights.tile_weight,
            # With 16 and a 64-bit qo_indptr, as under CUDA graphs, Triton 3.6 fails to compile this.
            BLOCK=max(32, triton.next_power_of_2(bs)),
            ITEMS=16,
        )
    return out


@triton.jit(
    do_not_specialize=["bs", "extra", "min_split", "most_merges", "few_nodes", "tile_nodes", "tile_weight"],
    do_not_specialize_on_alignment=["merges"],
)
def _plan_kernel(
    qo_indptr,
    kv_indptr,
    items,
    requests,
    merges,
    bs,
    extra,
    min_split,
    most_merges,
    few_nodes,
    tile_nodes,
    tile_weight,
    BLOCK: tl.constexpr,
    ITEMS: tl.constexpr,
):
    # Every program scans all requests itself, which is cheaper than a second launch, and writes its own items.
    request = tl.arange(0, BLOCK)
    real = request < bs
    length = tl.load(kv_indptr + request + 1, mask=real, other=0) - tl.load(kv_indptr + request, mask=real, other=0)
    nodes = tl.load(qo_indptr + request + 1, mask=real, other=0) - tl.load(qo_indptr + request, mask=real, other=0)
    length = tl.where(nodes > 0, length, 0).to(tl.int32)
    weight = tl.where(nodes <= few_nodes, 1, tile_weight * tl.cdiv(nodes, tile_nodes))
    total = tl.sum(length * weight.to(tl.int32), axis=0)
    usual = tl.maximum(tl.cdiv(total, tl.maximum(extra, 1)), min_split)
    # Rounded, not up: a batch of equal requests would else be cut in two for being a little longer than a part.
    splits = tl.where(extra > 0, tl.maximum((2 * length + usual) // (2 * usual), 1), 1)
    # Equal parts of whole words, which may leave fewer of them.
    size = tl.maximum(tl.cdiv(tl.cdiv(length, splits), 64) * 64, 64)
    splits = tl.where(real, tl.maximum(tl.cdiv(length, size), 1), 0)
    many = tl.where(nodes > few_nodes, splits, 0)
    end = tl.where(nodes > few_nodes, tl.cumsum(many, axis=0), tl.sum(many, axis=0) + tl.cumsum(splits - many, axis=0))
    first = end - splits
    merged = tl.where(splits > 1, splits, 0)
    slot = tl.cumsum(merged, axis=0) - merged
    if tl.program_id(0) == 0:
        tl.store(requests + 2 * request, slot, mask=real)
        tl.store(requests + 2 * request + 1, splits, mask=real)

    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    mine = (item[:, None] >= first[None, :]) & (item[:, None] < end[None, :])
    part = item[:, None] - first[None, :]
    begin = tl.sum(tl.where(mine, part * size[None, :], 0), axis=1)
    until = tl.sum(tl.where(mine, tl.minimum((part + 1) * size[None, :], length[None, :]), 0), axis=1)
    owner = tl.sum(tl.where(mine, request[None, :] + 1, 0), axis=1) - 1
    place = tl.sum(tl.where(mine & (merged[None, :] > 0), slot[None, :] + part + 1, 0), axis=1) - 1
    inside = item < bs + extra
    tl.store(items + 4 * item, owner, mask=inside)
    tl.store(items + 4 * item + 1, begin, mask=inside)
    tl.store(items + 4 * item + 2, until, mask=inside)
    tl.store(items + 4 * item + 3, place, mask=inside)
    # There are no more merges than items.
    rank = tl.cumsum((merged > 0).to(tl.int32), axis=0) - 1
    named = (item[:, None] == rank[None, :]) & (merged[None, :] > 0)
    named_request = tl.sum(tl.where(named, request[None, :] + 1, 0), axis=1) - 1
    tl.store(merges + item, named_request, mask=item < most_merges)


def tree_attention(
    q: torch.Tensor,
    k_tree: torch.Tensor,
    v_tree: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    ancestor_bits: torch.Tensor,
    *,
    max_nodes: int,
    scaling: float,
    depths: torch.Tensor | None = None,
    sliding_window: int = -1,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: SplitPlan | None = None,
    scratch: torch.Tensor | None = None,
    tiles: Tiles | None = None,
    small_tiles: Tiles | None = None,
) -> torch.Tensor:
    """Attention of every request's tree tokens over its committed prefix and their ancestors.

    A request's tokens stand at qo_indptr[b]:qo_indptr[b + 1], possibly none; tokens behind the last request are
    neither read nor written. All tensors on one device; the last dimension of q, keys, values and out contiguous.

    Args:
        q: [T, H, D], bfloat16, float16 or float32.
        k_tree, v_tree: [T, G, D] and [T, G, DV], q's dtype; the tree's own keys and values. H is a multiple of G.
        k_cache, v_cache: [slots, G, D] and [slots, G, DV]; rounded to q's dtype where theirs is another.
        qo_indptr: int32 or int64 [bs + 1].
        kv_indptr: int32 or int64 [bs + 1].
        kv_indices: int64 or int32 [at least kv_indptr[bs]]; the slots of request b's prefix in order, or with a
            sliding window of its last tokens, are kv_indices[kv_indptr[b]:kv_indptr[b + 1]].
        ancestor_bits: int64 [at least T, W], one row per token; bit j % 64 of word j // 64 is set if and only if
            the token may attend node j of its own request. [bs, N, W] of requests with N tokens each is accepted.
        max_nodes: tokens of the widest request, at most 64 W; further tokens of a request are not computed.
        scaling: factor of the logits.
        depths: int32 or int64 [at least T]; a token's position is its prefix's length + its depth. Needed with a
            sliding window only. [bs, N] is accepted.
        sliding_window: a key at a position of at least (query's position - window) is seen; -1: no window. It
            counts positions, so siblings see the same prefix.
        logit_cap: soft cap c * tanh(logits / c), 0: none.
        k_scale, v_scale: factors of the cache's keys and values (not of the tree's), for an fp8 cache.
        sinks: [H], a logit per query head that takes weight but has no value, or None.
        out: [T, H, DV], q's dtype, overwritten and returned; None: a new tensor.
        plan: of `plan_splits` for these indptrs; None: one is made.
        scratch: float32, at least `scratch_numel(...)` for the plan; None: allocated.
        tiles: None: `choose_tiles`.
        small_tiles: serve requests of at most its ``block_m`` rows, in a launch of their own; None: all by ``tiles``,
            which for requests of few nodes compute mostly rows that do not exist.

    Returns:
        [T, H, DV]. A token that sees nothing gets zeros.

    Raises:
        ValueError: a shape, dtype, device or number is not as above, or the device has no such fp8 type.
    """
    tokens, heads, dim = _check_tensors(q, k_tree, v_tree, k_cache, v_cache, kv_indices)
    kv_heads, v_dim = v_tree.shape[1:]
    device, bs = q.device, kv_indptr.shape[0] - 1
    for name, x in (("qo_indptr", qo_indptr), ("kv_indptr", kv_indptr)):
        _check_indptr(name, x, bs, device)
    words = ancestor_bits.shape[-1]
    bits = _per_token("ancestor_bits", ancestor_bits, (torch.int64,), tokens, words, device)
    if not 1 <= max_nodes <= words * _WORD_BITS:
        raise ValueError(f"max_nodes must be from 1 to {words * _WORD_BITS}, the bits of a node, got {max_nodes}.")
    if sliding_window >= 0:
        if depths is None:
            raise ValueError(f"sliding_window {sliding_window} counts positions: depths are needed, got None.")
        depths = _per_token("depths", depths, (torch.int32, torch.int64), tokens, 1, device)
    if sinks is not None and (sinks.shape != (heads,) or sinks.device != device or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous [{heads}] on {device}, got {list(sinks.shape)} on {sinks.device}.")
    if out is None:
        out = q.new_empty((tokens, heads, v_dim))
    elif out.shape != (tokens, heads, v_dim) or out.dtype != q.dtype or out.device != device or out.stride(2) != 1:
        raise ValueError(
            f"out must be {[tokens, heads, v_dim]} {q.dtype} on {device} with a contiguous last dimension, "
            f"got {list(out.shape)} {out.dtype} on {out.device}."
        )
    group = heads // kv_heads
    rows = max_nodes * group
    if tiles is None:
        tiles = choose_tiles(rows, dim, v_dim, q.dtype, shared_memory_of(device))
    if plan is None:
        extra = choose_extra_splits(max_nodes, heads, kv_heads, tiles, _processors(device))
        plan = plan_splits(qo_indptr, kv_indptr, extra)
    else:
        _check_plan("plan", plan, bs, device)
    numel = scratch_numel(bs, plan.extra_splits, max_nodes, heads, v_dim)
    if scratch is None:
        scratch = torch.empty(numel, dtype=torch.float32, device=device)
    elif scratch.dtype != torch.float32 or scratch.numel() < numel or scratch.device != device:
        raise ValueError(
            f"scratch must hold {numel} float32 on {device}, got {scratch.numel()} {scratch.dtype} on {scratch.device}."
        )
    if bs == 0 or tokens == 0:
        return out
    partial, lse = scratch[: numel // (v_dim + 1) * v_dim], scratch[numel // (v_dim + 1) * v_dim : numel]
    for used, above, most, row_tiles, wide_items, other_items in _launches(
        plan, tokens, rows, group, tiles, small_tiles
    ):
        _attention_kernel[(kv_heads * (row_tiles * wide_items + other_items),)](
            q,
            k_tree,
            v_tree,
            k_cache,
            v_cache,
            out,
            qo_indptr,
            kv_indptr,
            kv_indices,
            bits,
            depths,
            sinks,
            plan.items,
            partial,
            lse,
            *q.stride()[:2],
            *k_tree.stride()[:2],
            *v_tree.stride()[:2],
            *k_cache.stride()[:2],
            *v_cache.stride()[:2],
            *out.stride()[:2],
            words,
            rows,
            above,
            most,
            row_tiles,
            wide_items,
            sliding_window,
            float(scaling),
            float(logit_cap),
            float(k_scale),
            float(v_scale),
            HEADS=kv_heads,
            GROUP=group,
            D=dim,
            DV=v_dim,
            BLOCK_D=_padded(dim),
            BLOCK_DV=_padded(v_dim),
            BLOCK_M=used.block_m,
            BLOCK_N=used.block_n,
            HAS_WINDOW=sliding_window >= 0,
            HAS_CAP=logit_cap > 0,
            HAS_SINKS=sinks is not None,
            PRECISION=_precision(q),
            num_warps=used.num_warps,
            num_stages=used.num_stages,
        )
    most_merges = plan.merges.shape[0]
    if most_merges:
        # Few rows per program while they are few, so that a single request's merge is spread over the device.
        wanted = triton.cdiv(most_merges * kv_heads * rows, _MERGE_PROGRAMS)
        per_program = min(_MERGE_TILE, triton.next_power_of_2(wanted))
        _merge_kernel[(triton.cdiv(rows, per_program), kv_heads, most_merges)](
            partial,
            lse,
            plan.requests,
            plan.merges,
            qo_indptr,
            out,
            *out.stride()[:2],
            rows,
            GROUP=group,
            DV=v_dim,
            BLOCK_DV=_padded(v_dim),
            ROWS=per_program,
            SPLITS=_MERGE_TILE // per_program,
        )
    return out


def _launches(
    plan: SplitPlan, tokens: int, rows: int, group: int, tiles: Tiles, small_tiles: Tiles | None
) -> list[tuple[Tiles, int, int, int, int, int]]:
    """The attention kernel's launches, of programs that have one KV head, item and tile of rows each.

    Returns:
        Tiles; a launch serves requests of more rows than the next number and at most the one after it; tiles per item;
        the first items, which have so many tiles each; and items behind them, which have one.
    """
    served = [(tiles, 0, rows)]
    if small_tiles is not None and small_tiles.block_m < rows:
        served = [(tiles, small_tiles.block_m, rows), (small_tiles, 0, small_tiles.block_m)]
    launches = []
    for used, above, most in served:
        items = plan.most_items(tokens, above // group) if above else plan.items.shape[0]
        wide_items = min(plan.most_items(tokens, used.block_m // group), items)
        launches.append((used, above, most, triton.cdiv(most, used.block_m), wide_items, items - wide_items))
    return launches


@triton.jit
def _product(a, b, acc, PRECISION: tl.constexpr):
    # Triton's interpreter multiplies the bits of a bfloat16, not the number.
    if PRECISION == "interpreted":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _softmax_step(logits, seen, top, weight, acc, v, PRECISION: tl.constexpr):
    # One step of the running softmax in base 2; a row that has seen nothing yet has top == -inf.
    logits = tl.where(seen, logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(top - base)
    weight = weight * shrink + tl.sum(p, axis=1)
    acc = _product(p.to(v.dtype), v, acc * shrink[:, None], PRECISION)
    return new_top, weight, acc


@triton.jit
def _logits(q, k, scale, logit_cap, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    # In base 2, so that the softmax needs no further factor.
    logits = _product(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32), PRECISION)
    if HAS_CAP:
        # tanh(x) = 2 / (1 + e^-2x) - 1
        power = tl.exp2(logits * (scale * (-2.0 * 1.4426950408889634) / logit_cap))
        return (2.0 / (1.0 + power) - 1.0) * (logit_cap * 1.4426950408889634)
    return logits * (scale * 1.4426950408889634)


@triton.jit(do_not_specialize=["words", "max_rows", "rows_above", "rows_most", "row_tiles", "wide_items", "window"])
def _attention_kernel(
    q_at,
    k_tree,
    v_tree,
    k_cache,
    v_cache,
    out,
    qo_indptr,
    kv_indptr,
    kv_indices,
    bits,
    depths,
    sinks,
    items,
    partial,
    partial_lse,
    q_stride,
    q_head_stride,
    k_tree_stride,
    k_tree_head_stride,
    v_tree_stride,
    v_tree_head_stride,
    k_cache_stride,
    k_cache_head_stride,
    v_cache_stride,
    v_cache_head_stride,
    out_stride,
    out_head_stride,
    words,
    max_rows,
    rows_above,
    rows_most,
    row_tiles,
    wide_items,
    window,
    scaling,
    logit_cap,
    k_scale,
    v_scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Tiles of one KV head run side by side, so that the second finds the first one's keys in the L2 cache.
    program = tl.program_id(0)
    behind = program - row_tiles * HEADS * wide_items
    tile = tl.where(behind < 0, program % row_tiles, 0)
    pair = tl.where(behind < 0, program // row_tiles, behind + HEADS * wide_items)
    kv_head = pair % HEADS
    item = pair // HEADS
    request = tl.load(items + 4 * item)
    if request < 0:
        return
    first = tl.load(qo_indptr + request).to(tl.int64)
    nodes = tl.minimum((tl.load(qo_indptr + request + 1) - first).to(tl.int32), max_rows // GROUP)
    rows = nodes * GROUP
    if (tile * BLOCK_M >= rows) | (rows <= rows_above) | (rows > rows_most):
        return
    begin = tl.load(items + 4 * item + 1)
    end = tl.load(items + 4 * item + 2)
    slot_out = tl.load(items + 4 * item + 3).to(tl.int64)
    prefix_at = tl.load(kv_indptr + request).to(tl.int64)
    prefix = (tl.load(kv_indptr + request + 1) - prefix_at).to(tl.int32)

    # A node's query heads are neighbouring rows: they share its mask word.
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < rows
    token = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    q_cells = q_at + (token * q_stride + head * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_cells, mask=real[:, None] & (d < D)[None, :], other=0.0)
    if HAS_WINDOW:
        depth = tl.load(depths + token, mask=real, other=0).to(tl.int32)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)

    # This program's part of the prefix, which every node sees.
    lane = tl.arange(0, BLOCK_N)
    k_head = k_cache + kv_head.to(tl.int64) * k_cache_head_stride + d[None, :]
    v_head = v_cache + kv_head.to(tl.int64) * v_cache_head_stride + dv[None, :]
    for start in range(begin, end, BLOCK_N):
        inside = start + lane < end
        slot = tl.load(kv_indices + prefix_at + start + lane, mask=inside, other=0).to(tl.int64)
        k_mask = inside[:, None] if D == BLOCK_D else inside[:, None] & (d < D)[None, :]
        k = tl.load(k_head + (slot * k_cache_stride)[:, None], mask=k_mask, other=0.0).to(q.dtype)
        logits = _logits(q, k, scaling * k_scale, logit_cap, HAS_CAP, PRECISION)
        seen = inside[None, :]
        if HAS_WINDOW:
            seen = seen & ((prefix - start - lane)[None, :] + depth[:, None] <= window)
        v_mask = inside[:, None] if DV == BLOCK_DV else inside[:, None] & (dv < DV)[None, :]
        v = tl.load(v_head + (slot * v_cache_stride)[:, None], mask=v_mask, other=0.0).to(q.dtype)
        top, weight, acc = _softmax_step(logits, seen, top, weight, acc, v, PRECISION)
    acc *= v_scale

    if end == prefix:
        # The last part, often the shortest, takes the tree along.
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            shrink = tl.exp2(top - new_top)
            weight = weight * shrink + tl.exp2(sink - new_top)
            acc = acc * shrink[:, None]
            top = new_top
        k_own = k_tree + first * k_tree_stride + kv_head * k_tree_head_stride + d[None, :]
        v_own = v_tree + first * v_tree_stride + kv_head * v_tree_head_stride + dv[None, :]
        # A step never crosses a word.
        tl.static_assert(64 % BLOCK_N == 0)
        for start in tl.range(0, nodes, BLOCK_N, num_stages=1):
            key = start + lane
            inside = key < nodes
            word = tl.load(bits + token * words + start // 64, mask=real, other=0)
            seen = ((word[:, None] >> (key % 64)[None, :].to(tl.int64)) & 1) != 0
            seen = seen & inside[None, :]
            if HAS_WINDOW:
                key_depth = tl.load(depths + first + key, mask=inside, other=0).to(tl.int32)
                seen = seen & (depth[:, None] - key_depth[None, :] <= window)
            k_mask = inside[:, None] & (d < D)[None, :]
            k = tl.load(k_own + key[:, None] * k_tree_stride, mask=k_mask, other=0.0)
            logits = _logits(q, k, scaling, logit_cap, HAS_CAP, PRECISION)
            v_mask = inside[:, None] & (dv < DV)[None, :]
            v = tl.load(v_own + key[:, None] * v_tree_stride, mask=v_mask, other=0.0)
            top, weight, acc = _softmax_step(logits, seen, top, weight, acc, v, PRECISION)

    weight = tl.where(weight == 0.0, 1.0, weight)
    result = acc / weight[:, None]
    stored = real[:, None] & (dv < DV)[None, :]
    if slot_out < 0:
        cells = out + (token * out_stride + head * out_head_stride)[:, None] + dv[None, :]
        tl.store(cells, result.to(out.dtype.element_ty), mask=stored)
    else:
        place = (slot_out * HEADS + kv_head) * max_rows + row
        tl.store(partial + place[:, None] * DV + dv[None, :], result, mask=stored)
        tl.store(partial_lse + place, top + tl.log2(weight), mask=real)


@triton.jit(do_not_specialize=["max_rows"], do_not_specialize_on_alignment=["merges"])
def _merge_kernel(
    partial,
    partial_lse,
    requests,
    merges,
    qo_indptr,
    out,
    out_stride,
    out_head_stride,
    max_rows,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    # Some rows of one KV head: the parts of their prefix, weighted by their log-sum-exp, in a fixed order.
    kv_head = tl.program_id(1)
    request = tl.load(merges + tl.program_id(2))
    if request < 0:
        return
    splits = tl.load(requests + 2 * request + 1)
    first = tl.load(qo_indptr + request).to(tl.int64)
    nodes = (tl.load(qo_indptr + request + 1) - first).to(tl.int32)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tl.minimum(nodes * GROUP, max_rows)
    slot = tl.load(requests + 2 * request).to(tl.int64)
    lane = tl.arange(0, SPLITS)
    dv = tl.arange(0, BLOCK_DV)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for start in range(0, splits, SPLITS):
        inside = real[:, None] & (start + lane < splits)[None, :]
        place = ((slot + start + lane)[None, :] * tl.num_programs(1) + kv_head) * max_rows + row[:, None]
        lse = tl.load(partial_lse + place, mask=inside, other=float("-inf"))
        cells = partial + place[:, :, None] * DV + dv[None, None, :]
        part = tl.load(cells, mask=inside[:, :, None] & (dv < DV)[None, None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(lse - base[:, None])
        shrink = tl.exp2(top - base)
        weight = weight * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None] + tl.sum(part * p[:, :, None], axis=1)
        top = new_top
    result = acc / tl.where(weight == 0.0, 1.0, weight)[:, None]
    head = kv_head * GROUP + row % GROUP
    cells = out + ((first + row // GROUP) * out_stride + head * out_head_stride)[:, None] + dv[None, :]
    tl.store(cells, result.to(out.dtype.element_ty), mask=real[:, None] & (dv < DV)[None, :])


def _padded(n: int) -> int:
    # Tensor cores take no side below 16.
    return max(16, triton.next_power_of_2(n))


def _precision(q: torch.Tensor) -> str:
    if q.device.type == "cpu":
        return "interpreted"
    return "ieee" if q.dtype == torch.float32 else "tf32"


def _slots(bs: int, extra_splits: int) -> int:
    return min(4 * extra_splits // 3, bs + extra_splits)


def _most_merges(bs: int, extra_splits: int) -> int:
    # A merged request has two slots at least.
    return min(bs, _slots(bs, extra_splits) // 2)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _check_tensors(
    q: torch.Tensor,
    k_tree: torch.Tensor,
    v_tree: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_indices: torch.Tensor,
) -> tuple[int, int, int]:
    tensors = {"q": q, "k_tree": k_tree, "v_tree": v_tree, "k_cache": k_cache, "v_cache": v_cache}
    for name, x in tensors.items():
        if x.dim() != 3 or x.stride(2) != 1:
            raise ValueError(
                f"{name} must have 3 dimensions, the last contiguous, got {list(x.shape)}, strides {list(x.stride())}."
            )
        if x.device != q.device:
            raise ValueError(f"{name} must be on {q.device} like q, got {x.device}.")
    tokens, heads, dim = q.shape
    kv_heads, v_dim = v_tree.shape[1:]
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"the query heads must be a multiple of the KV heads, got {heads} and {kv_heads}.")
    if not (1 <= dim <= MAX_HEAD_DIM and 1 <= v_dim <= MAX_HEAD_DIM):
        raise ValueError(f"head dimensions must be from 1 to {MAX_HEAD_DIM}, got {dim} and {v_dim}.")
    for name, shape in (
        ("k_tree", (tokens, kv_heads, dim)),
        ("v_tree", (tokens, kv_heads, v_dim)),
        ("k_cache", (k_cache.shape[0], kv_heads, dim)),
        ("v_cache", (v_cache.shape[0], kv_heads, v_dim)),
    ):
        if tensors[name].shape != shape:
            raise ValueError(f"{name} must have the shape {list(shape)}, got {list(tensors[name].shape)}.")
    if q.dtype not in _FLOATS or k_tree.dtype != q.dtype or v_tree.dtype != q.dtype:
        raise ValueError(
            "q, k_tree and v_tree must all be bfloat16, float16 or float32, "
            f"got {q.dtype}, {k_tree.dtype}, {v_tree.dtype}."
        )
    for name in ("k_cache", "v_cache"):
        if tensors[name].dtype not in _FLOATS + _FP8:
            raise ValueError(f"{name} must be bfloat16, float16, float32 or fp8, got {tensors[name].dtype}.")
    if q.device.type == "cuda" and torch.float8_e4m3fn in (k_cache.dtype, v_cache.dtype):
        if torch.cuda.get_device_capability(q.device) < (8, 9):
            raise ValueError("an fp8 e4m3 cache needs compute capability 8.9 or newer; use e5m2 or 16 bits.")
    if kv_indices.dtype not in (torch.int32, torch.int64) or not kv_indices.is_contiguous():
        raise ValueError(f"kv_indices must be contiguous int32 or int64, got {kv_indices.dtype}.")
    if kv_indices.device != q.device:
        raise ValueError(f"kv_indices must be on {q.device} like q, got {kv_indices.device}.")
    return tokens, heads, dim


def _check_indptr(name: str, x: torch.Tensor, bs: int, device: torch.device) -> None:
    if x.dtype not in (torch.int32, torch.int64) or x.shape != (bs + 1,) or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous int32 or int64 [{bs + 1}], got {list(x.shape)} {x.dtype}.")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} like the other tensors, got {x.device}.")


def _per_token(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], tokens: int, width: int, device: torch.device
) -> torch.Tensor:
    if x.dtype not in dtypes or x.device != device or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {' or '.join(map(str, dtypes))} on {device}, got {x.dtype}.")
    if x.numel() < tokens * width:
        raise ValueError(f"{name} must have a row for each of {tokens} tokens, got {list(x.shape)}.")
    return x


def _check_plan(name: str, plan: SplitPlan, bs: int, device: torch.device) -> None:
    shape = (bs + plan.extra_splits, 4)
    merges = _most_merges(bs, plan.extra_splits)
    shapes = (plan.items.shape, plan.requests.shape, plan.merges.shape)
    if shapes != (shape, (bs, 2), (merges,)) or plan.items.device != device:
        raise ValueError(
            f"{name} must be made for {bs} requests on {device} (items {list(shape)}, requests {[bs, 2]}), "
            f"got {list(plan.items.shape)} and {list(plan.requests.shape)} on {plan.items.device}."
        )
