"""Top-K and log-sum-exp of a vocabulary shard in Triton: float32 arithmetic, no float32 copy of the logits.

Two launches. The first gives every row's vocabulary to many programs, a chunk each: a chunk's sum of exponentials
and its K largest logits, found among the maxima of small groups of columns. The second merges a row's chunks. The
order is total (larger logit first, of equal ones the lower token id), so rank 0 is the first maximum, the token that
DFLASH drafts, and neither the split into chunks nor the split into tensor-parallel ranks changes which ids are kept.

The same second launch merges the ranks of a tensor-parallel group: there a rank is a chunk.

Nothing here waits for the device and every launch geometry follows from shapes, so both may be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_TOPK = 64
# Cells of the merge that one program can hold in registers.
_MAX_MERGE_CELLS = 8192
_CHUNK = 4096
# Columns that are searched again for every candidate they gave; about the chunk's square root.
_GROUP = 64
_NO_ID = tl.constexpr(0x7FFFFFFF)


def _chunk_size(vocabulary: int, k: int) -> int:
    chunk = min(_CHUNK, max(128, triton.next_power_of_2(vocabulary)))
    while triton.cdiv(vocabulary, chunk) * triton.next_power_of_2(k) > _MAX_MERGE_CELLS:
        chunk *= 2
    return chunk


def chunk_topk(logits: torch.Tensor, k: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The K largest logits and the log-sum-exp of every chunk of every row.

    Args:
        logits: [rows, local vocabulary], float32, bfloat16 or float16, the last dimension contiguous.
        k: candidates, 1 to 64.
        start: global id of the first column.
    Returns:
        values float32 [chunks, rows, k], ids int64 [chunks, rows, k] (global; -1 where a chunk holds fewer than k),
        lse float32 [chunks, rows].
    Raises:
        ValueError: a shape, a stride or k is not as above.
    """
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"k must be from 1 to {MAX_TOPK}, got {k}.")
    if logits.dim() != 2 or logits.shape[1] < 1 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [rows, vocabulary] with contiguous rows, got {list(logits.shape)}.")
    rows, vocabulary = logits.shape
    chunk = _chunk_size(vocabulary, k)
    chunks = triton.cdiv(vocabulary, chunk)
    values = torch.empty((chunks, rows, k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((chunks, rows, k), dtype=torch.int64, device=logits.device)
    lse = torch.empty((chunks, rows), dtype=torch.float32, device=logits.device)
    if rows:
        _chunk_kernel[(chunks, rows)](
            logits,
            values,
            ids,
            lse,
            logits.stride(0),
            vocabulary,
            start,
            rows,
            k,
            GROUPS=chunk // _GROUP,
            WIDTH=_GROUP,
            num_warps=4,
        )
    return values, ids, lse


@triton.jit(do_not_specialize=["vocabulary", "start", "rows", "k"])
def _chunk_kernel(
    logits,
    values_out,
    ids_out,
    lse_out,
    row_stride,
    vocabulary,
    start,
    rows,
    k,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    group = tl.arange(0, GROUPS)
    within = tl.arange(0, WIDTH)
    first = chunk * GROUPS * WIDTH
    column = first + group[:, None] * WIDTH + within[None, :]
    inside = column < vocabulary
    x = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)

    is_nan = x != x
    clean = tl.where(is_nan, float("-inf"), x)
    best = tl.max(clean, axis=1)
    top = tl.max(best, axis=0)
    # A chunk of nothing but -inf must not become NaN; one with a NaN must.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.sum(tl.where(is_nan, float("nan"), tl.exp(x - base)), axis=1), axis=0)
    place = chunk.to(tl.int64) * rows + row
    tl.store(lse_out + place, base + tl.log(total))

    # Every group's best; the chunk's best is among them. A group that gave it is read again for its next one, so a
    # rank costs GROUPS + WIDTH cells, not their product.
    free = tl.min(tl.where(inside & (clean == best[:, None]), column, _NO_ID), axis=1)
    for rank in range(k):
        value = tl.max(tl.where(free == _NO_ID, float("-inf"), best), axis=0)
        at = tl.min(tl.where(best == value, free, _NO_ID), axis=0)
        found = at != _NO_ID
        tl.store(values_out + place * k + rank, tl.where(found, value, float("-inf")))
        tl.store(ids_out + place * k + rank, tl.where(found, (at + start).to(tl.int64), -1))
        taken = tl.where(found, (at - first) // WIDTH, 0)
        again = first + taken * WIDTH + within
        y = tl.load(logits + row * row_stride + again, mask=again < vocabulary, other=float("-inf")).to(tl.float32)
        y = tl.where(y != y, float("-inf"), y)
        later = (again < vocabulary) & ((y < value) | ((y == value) & (again > at)))
        next_value = tl.max(tl.where(later, y, float("-inf")), axis=0)
        next_at = tl.min(tl.where(later & (y == next_value), again, _NO_ID), axis=0)
        mine = (group == taken) & found
        best = tl.where(mine, next_value, best)
        free = tl.where(mine, next_at, free)


def merge_chunks(
    values: torch.Tensor, ids: torch.Tensor, lse: torch.Tensor, k: int, *, normalise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge chunks (or ranks) to the K best of every row, in one launch.

    Args:
        values: float32 [chunks, rows, k'], contiguous.
        ids: int64 [chunks, rows, k'], contiguous; below 0: no candidate.
        lse: float32 [chunks, rows], contiguous.
        k: candidates to keep, 1 to 64.
        normalise: return natural log-probabilities in place of logits: at most 0, and -inf for a NaN, so that a
            node is never accepted rather than the order broken.
    Returns:
        values float32 [rows, k], ids int64 [rows, k] (-1 where fewer than k candidates exist), lse float32 [rows].
    Raises:
        ValueError: k is out of range, or one program cannot hold that many candidates.
    """
    chunks, rows, width = values.shape
    if not 1 <= k <= MAX_TOPK:
        raise ValueError(f"k must be from 1 to {MAX_TOPK}, got {k}.")
    cells = triton.next_power_of_2(chunks) * triton.next_power_of_2(width)
    if cells > 4 * _MAX_MERGE_CELLS:
        raise ValueError(f"{chunks} chunks of {width} candidates are too many to merge in one program.")
    out_ids = torch.empty((rows, k), dtype=torch.int64, device=values.device)
    out_values = torch.empty((rows, k), dtype=torch.float32, device=values.device)
    out_lse = torch.empty((rows,), dtype=torch.float32, device=values.device)
    if rows:
        _merge_kernel[(rows,)](
            values,
            ids,
            lse,
            out_values,
            out_ids,
            out_lse,
            rows,
            chunks,
            width,
            k,
            CHUNKS=triton.next_power_of_2(chunks),
            WIDTH=triton.next_power_of_2(width),
            NORMALISE=normalise,
            num_warps=4 if cells <= 2048 else 8,
        )
    return out_values, out_ids, out_lse


@triton.jit(do_not_specialize=["rows", "chunks", "width", "k"])
def _merge_kernel(
    values,
    ids,
    lse,
    values_out,
    ids_out,
    lse_out,
    rows,
    chunks,
    width,
    k,
    CHUNKS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    part = tl.load(lse + chunk * rows + row, mask=chunk < chunks, other=float("-inf"))
    is_nan = part != part
    top = tl.max(tl.where(is_nan, float("-inf"), part), axis=0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.where(is_nan, float("nan"), tl.exp(part - base)), axis=0)
    row_lse = base + tl.log(total)
    tl.store(lse_out + row, row_lse)

    cell = tl.arange(0, CHUNKS * WIDTH)
    from_chunk = cell // WIDTH
    rank = cell % WIDTH
    inside = (from_chunk < chunks) & (rank < width)
    place = (from_chunk.to(tl.int64) * rows + row) * width + rank
    value = tl.load(values + place, mask=inside, other=float("-inf"))
    token = tl.load(ids + place, mask=inside, other=-1).to(tl.int32)
    free = tl.where(token >= 0, token, _NO_ID)
    for kept in range(k):
        best = tl.max(tl.where(free == _NO_ID, float("-inf"), value), axis=0)
        at = tl.min(tl.where(value == best, free, _NO_ID), axis=0)
        result = best
        if NORMALISE:
            # Rounding can leave a probability a hair above 1.
            result = tl.minimum(best - row_lse, 0.0)
            result = tl.where(best - row_lse != best - row_lse, float("-inf"), result)
        tl.store(values_out + row * k + kept, result)
        tl.store(ids_out + row * k + kept, tl.where(at == _NO_ID, -1, at).to(tl.int64))
        free = tl.where(free == at, _NO_ID, free)
