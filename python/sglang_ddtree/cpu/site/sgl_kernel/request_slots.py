"""Reading and writing a request's row of ``req_to_token``: which KV slot holds which position.

``req_to_token`` is int32 [num_rows, pool_len]. The GPU kernels address it flat, so a range that runs past the
end of a row silently reaches into the next request's. Here such a range is an error.
"""

from collections.abc import Iterator

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write newly allocated slots into the requests' rows.

    Request b's positions [start_offset[b], end_offset[b]) take the next slots of ``out_cache_loc``, whose
    parts follow one another in the order of the batch.

    req_pool_indices, start_offset, end_offset: int [bs]; row, first position, position after the last.
    out_cache_loc: int [>= sum of lengths]. Mutates ``req_to_token``.
    """
    for row, start, end, offset in _ranges(req_pool_indices, start_offset, end_offset, pool_len):
        req_to_token[row, start:end] = out_cache_loc[offset : offset + end - start].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Read the slots of positions [start_offset[b], end_offset[b]) of each request, packed one after another.

    Arguments as in ``assign_req_to_token_pool_cpu``. Mutates the front of ``out_cache_loc``; its rest keeps
    its values.
    """
    for row, start, end, offset in _ranges(req_pool_indices, start_offset, end_offset, pool_len):
        out_cache_loc[offset : offset + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Read the ``topk * num_steps`` slots that follow each request's committed tokens.

    req_pool_indices, seq_lens: int [bs].
    out_cache_loc: int [bs * topk * num_steps], request by request; mutated.
    """
    start = seq_lens.to(torch.int64)
    end = start + topk * num_steps
    assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len)


def _ranges(
    req_pool_indices: torch.Tensor, start_offset: torch.Tensor, end_offset: torch.Tensor, pool_len: int
) -> Iterator[tuple[int, int, int, int]]:
    """For each request: its row, first position, position after the last, and offset in the packed slots."""
    offset = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        assert 0 <= start <= end <= pool_len, (
            f"row {row} of req_to_token has {pool_len} positions, got the range [{start}, {end})"
        )
        yield row, start, end, offset
        offset += end - start
