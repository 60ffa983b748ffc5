"""The drafter's candidates: top-K ids and log-probabilities under the target's (vocab-parallel) head."""

from __future__ import annotations

from typing import Any

import torch


def local_vocabulary(lm_head: Any) -> tuple[torch.Tensor, int]:
    """This rank's rows of the head and the global id of the first.

    Returns:
        weight: [local vocabulary, hidden], padding rows cut off.
        start: global token id of row 0.
    Raises:
        ValueError: the head is quantised or has added vocabulary.
    """
    weight = getattr(lm_head, "weight", None)
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError("DDTREE needs an unquantised lm_head: the drafter's probabilities are computed with it.")
    shard = getattr(lm_head, "shard_indices", None)
    if shard is None:
        return weight, 0
    if int(shard.num_added_elements) != 0:
        raise ValueError("DDTREE does not support an lm_head with added vocabulary (e.g. from LoRA).")
    return weight[: int(shard.num_org_elements)], int(shard.org_vocab_start_index)


def shard_topk(logits: torch.Tensor, k: int, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Top-K and log-normaliser of one rank's logits.

    Args:
        logits: [rows, local vocabulary], any float dtype.
        k: candidates to keep; fewer are returned where the shard holds fewer.
        start: global id of the first column.
    Returns:
        values float32 [rows, k'], ids int64 [rows, k'] (global), lse float32 [rows].
    """
    values = logits.float()
    lse = torch.logsumexp(values, dim=-1)
    # Rank 0 has to be the token DFLASH drafts, the first maximum; topk leaves the order of ties open.
    best = torch.argmax(logits, dim=-1, keepdim=True)
    top_values = [values.gather(1, best)]
    top_ids = [best]
    if k > 1 and values.shape[1] > 1:
        rest = values.scatter(1, best, float("-inf"))
        rest_values, rest_ids = torch.topk(rest, min(k, values.shape[1]) - 1, dim=-1)
        top_values.append(rest_values)
        top_ids.append(rest_ids)
    return torch.cat(top_values, 1), torch.cat(top_ids, 1) + start, lse


def merge_topk(values: torch.Tensor, ids: torch.Tensor, lse: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the ranks' candidates, exactly and in the same way on every rank.

    Args:
        values: float32 [ranks, rows, k'].
        ids: int64 [ranks, rows, k'].
        lse: float32 [ranks, rows].
        k: candidates to keep.
    Returns:
        ids int64 [rows, k], logprobs float32 [rows, k]: natural logarithms normalised over the whole vocabulary,
        best first. A NaN becomes -inf: a node that is never accepted rather than a broken order.
    """
    ranks, rows, width = values.shape
    flat_values = values.permute(1, 0, 2).reshape(rows, ranks * width)
    flat_ids = ids.permute(1, 0, 2).reshape(rows, ranks * width)
    # Stable: of equal values the lower rank's comes first, which holds the lower token ids.
    sorted_values, order = torch.sort(flat_values, dim=1, descending=True, stable=True)
    kept_ids = flat_ids.gather(1, order[:, :k])
    logprobs = sorted_values[:, :k] - torch.logsumexp(lse, dim=0)[:, None]
    # Rounding can leave a probability a hair above 1.
    logprobs = torch.nan_to_num(logprobs, nan=float("-inf"), neginf=float("-inf")).clamp_(max=0.0)
    return kept_ids, logprobs


def topk_logprobs(
    hidden: torch.Tensor, lm_head: Any, k: int, tp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of every row.

    Args:
        hidden: [rows, hidden], the drafter's output.
        lm_head: the target's head (SGLang's ``ParallelLMHead`` or any module with ``weight``).
        k: candidates per row, at most the vocabulary.
        tp_group: SGLang's tensor-parallel group, None or of size 1 for a whole head.
    Returns:
        ids int64 [rows, k] (global), logprobs float32 [rows, k], best first.
    """
    weight, start = local_vocabulary(lm_head)
    logits = torch.matmul(hidden.to(weight.dtype), weight.T)
    values, ids, lse = shard_topk(logits, k, start)
    if tp_group is None or tp_group.world_size == 1:
        return merge_topk(values[None], ids[None], lse[None], k)
    ranks = tp_group.world_size
    if values.shape[1] < k:  # every rank must contribute the same shape to the gather
        missing = k - values.shape[1]
        values = torch.nn.functional.pad(values, (0, missing), value=float("-inf"))
        ids = torch.nn.functional.pad(ids, (0, missing), value=0)

    def gather(part: torch.Tensor) -> torch.Tensor:
        return tp_group.all_gather(part.contiguous(), dim=0).view(ranks, *part.shape)

    return merge_topk(gather(values), gather(ids), gather(lse), k)
