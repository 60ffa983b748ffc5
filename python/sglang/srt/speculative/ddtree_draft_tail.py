"""What follows the drafter: the target's head, top-K candidates and their log-probabilities.

On a GPU this runs inside the drafter's CUDA graph, as DFLASH's own greedy head does: one matrix product, two small
kernels, and one gather under tensor parallelism. No float32 copy of the logits exists.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.ddtree_topk import local_vocabulary, topk_logprobs
from sglang.srt.speculative.ddtree_topk_kernels import chunk_topk, merge_chunks


def pack(values: torch.Tensor, ids: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """One rank's contribution as one tensor, so that the ranks gather once.

    Args:
        values: float32 [rows, k].
        ids: int64 [rows, k], from -1 to 2^31 - 1.
        lse: float32 [rows].
    Returns:
        int32 [rows, 2 k + 1]; the floats by their bits.
    """
    return torch.cat([values.view(torch.int32), ids.to(torch.int32), lse.view(torch.int32)[:, None]], dim=1)


def unpack(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `pack` for what all ranks contributed.

    Args:
        packed: int32 [ranks, rows, 2 k + 1].
    Returns:
        values float32 [ranks, rows, k], ids int64 [ranks, rows, k], lse float32 [ranks, rows], all contiguous.
    """
    k = packed.shape[-1] // 2
    values = packed[..., :k].contiguous().view(torch.float32)
    ids = packed[..., k : 2 * k].to(torch.int64)
    return values, ids, packed[..., 2 * k].contiguous().view(torch.float32)


def device_topk_logprobs(
    hidden: torch.Tensor, lm_head: Any, k: int, tp_group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ddtree_topk.topk_logprobs` by the device kernels; the same arguments and results, k at most 64.

    Nothing waits for the device, so that a CUDA graph may hold it. Of equal logits the lower id comes first, on every
    rank the same.
    """
    weight, start = local_vocabulary(lm_head)
    logits = torch.matmul(hidden.to(weight.dtype), weight.T)
    parts = chunk_topk(logits, k, start)
    if tp_group is None or tp_group.world_size == 1:
        logprobs, ids, _ = merge_chunks(*parts, k, normalise=True)
        return ids, logprobs
    packed = pack(*merge_chunks(*parts, k, normalise=False))
    gathered = tp_group.all_gather(packed, dim=0).view(tp_group.world_size, *packed.shape)
    logprobs, ids, _ = merge_chunks(*unpack(gathered), k, normalise=True)
    return ids, logprobs


class DraftTail:
    """Candidates of every drafted position, into buffers that outlive a CUDA graph's replay.

    D is the drafter's block size, K the candidates per position.

    Attributes:
        ids: int64 [max_bs, D - 1, K], global token ids, best first.
        logprobs: float32 [max_bs, D - 1, K], natural logarithms.
    """

    def __init__(
        self, *, lm_head: Any, block_size: int, topk: int, max_bs: int, tp_group: Any, device: torch.device | str
    ):
        self.lm_head, self.block_size, self.topk, self.tp_group = lm_head, block_size, topk, tp_group
        shape = (max_bs, block_size - 1, topk)
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.logprobs = torch.full(shape, float("-inf"), dtype=torch.float32, device=device)

    def __call__(self, hidden_states: torch.Tensor, input_ids: Any = None) -> None:
        """Called within the capture of the drafter's graph.

        Args:
            hidden_states: [bs * D, hidden], the drafter's output.
            input_ids: not used; part of the interface of SGLang's capture hook.
        """
        ids, logprobs = candidates(
            hidden_states, self.lm_head, self.block_size, self.topk, self.tp_group, on_device=True
        )
        bs = ids.shape[0]
        self.ids[:bs].copy_(ids)
        self.logprobs[:bs].copy_(logprobs)


def candidates(
    hidden_states: torch.Tensor, lm_head: Any, block_size: int, topk: int, tp_group: Any, *, on_device: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of block positions 1..D-1 from the drafter's output.

    Args:
        hidden_states: [bs * D, hidden].
        lm_head, tp_group: as in `topk_logprobs`.
        block_size: D.
        topk: K.
        on_device: by Triton kernels instead of PyTorch.
    Returns:
        ids int64 [bs, D - 1, K], logprobs float32 [bs, D - 1, K].
    """
    width = hidden_states.shape[-1]
    drafted = hidden_states.view(-1, block_size, width)[:, 1:].reshape(-1, width)
    of = device_topk_logprobs if on_device else topk_logprobs
    ids, logprobs = of(drafted, lm_head, topk, tp_group)
    return ids.view(-1, block_size - 1, topk), logprobs.view(-1, block_size - 1, topk)
