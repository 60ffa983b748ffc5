"""What a round of speculation accepted: bonus tokens, accepted slots, and the drafter's shifted input."""

import torch


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Pick each request's last accepted token, which is the target's own choice.

    accept_tokens: int, ``accept_stride`` per request, accepted ones first; accept_lens: int [bs], the bonus
    token counted, so at least 1; bonus_tokens: int [bs], mutated.
    """
    num_requests = accept_lens.numel()
    lengths = accept_lens.reshape(-1).to(torch.int64)
    assert bool((lengths >= 1).all()), f"accept_lens counts the bonus token, got {lengths.tolist()}"
    last = torch.arange(num_requests) * accept_stride + lengths - 1
    bonus_tokens[:num_requests] = accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Gather the slots of the accepted nodes of the whole batch, skipping the -1 that pad ``accept_index``.

    accept_index: int [bs, width] or flat; global node numbers, -1: none. out_cache_loc: int [bs * N].
    Mutates the front of ``accept_out_cache_loc`` (int [bs * width]); its rest keeps its values.
    """
    flat = accept_index.reshape(-1)
    accepted = flat[flat >= 0].to(torch.int64)
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None = None,
) -> None:
    """Shift each request's tokens one place to the left and append its new token.

    input_ids: int [num_tokens], mutated; extend_start_loc, extend_seq_lens: int [bs], segments of it;
    topk_index: int [bs] or [bs, 1], the new tokens. With select_index (int [bs]) the new token goes to that
    place of ``input_ids`` instead of the segment's end. An empty segment gets nothing.
    """
    segments = zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    for b, (start, length) in enumerate(segments):
        if length <= 0:
            continue
        end = start + length
        input_ids[start : end - 1] = input_ids[start + 1 : end].clone()
        last = end - 1 if select_index is None else int(select_index[b])
        input_ids[last] = topk_index.reshape(-1)[b].to(input_ids.dtype)
