"""A pass of the drafter at one width: its block, its forward and the candidates that come of it.

The budget `auto` chooses round by round how many positions are drafted. The passes share the drafter, its KV cache and
its slots; each has its own block buffers, and from CUDA graphs its own graphs and tail (`ddtree_captured_width`).

D here is the pass's width: the block is [bonus, mask x (D - 1)].
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.kernels.ops.speculative.dflash import _prepare_dflash_draft_block_unchecked
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.ddtree_draft_tail import DraftTail
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

Candidates = tuple[torch.Tensor, torch.Tensor]


class DraftPass:
    """One pass over every request's block, eager or from graphs.

    Args:
        width: D, positions of the block, the bonus token's counted; at least 2.
        forward: runs the drafter over D tokens per request: the model runner's own, or a `CapturedWidth`'s.
        candidates: takes the drafter's output [bs * D, hidden] and D, gives what `run` returns; for an eager forward.
        tail: what the graphs of ``forward`` were captured with, if they were.
        mask_token_id: of the drafter.
        req_to_token: int32 [rows, positions], SGLang's table of slots.
        by_kernel: prepare the block in one Triton launch.
    """

    def __init__(
        self,
        width: int,
        forward: Callable[[ForwardBatch], Any],
        candidates: Callable[[torch.Tensor, int], Candidates],
        *,
        tail: DraftTail | None,
        mask_token_id: int,
        req_to_token: torch.Tensor,
        by_kernel: bool,
    ) -> None:
        assert tail is None or tail.block_size == width, f"a tail of {tail} for a draft of {width} positions"
        self.width, self._forward, self._candidates, self._tail = width, forward, candidates, tail
        self._mask_token_id, self._req_to_token, self._by_kernel = int(mask_token_id), req_to_token, by_kernel
        device = req_to_token.device
        self._spec_info = make_draft_block_spec_info(draft_token_num=width, device=device)
        self._offsets = torch.arange(width, dtype=torch.int64, device=device)
        # Tokens, positions and slots of the kernel's block, each int64 [most requests so far, D].
        self._buffers = torch.empty((3, 0, width), dtype=torch.int64, device=device)

    def run(self, batch: Any, bonus_tokens: torch.Tensor, seq_lens_cpu: torch.Tensor) -> Candidates:
        """Draft once.

        Args:
            batch: SGLang's ``ScheduleBatch``.
            bonus_tokens: int64 [bs].
            seq_lens_cpu: int [bs], committed lengths or upper bounds of them, on the CPU.

        Returns:
            ids int64 [bs, D - 1, K] and log-probabilities float32 [bs, D - 1, K] for block positions 1..D-1; from
            graphs views that the next pass of this width overwrites.
        """
        bs = batch.seq_lens.shape[0]
        block, positions, slots = self._block(batch, bonus_tokens)
        # An upper bound per row for backends that plan on the host.
        bounds = seq_lens_cpu.to(torch.int32) + self.width
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=block.view(-1),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            out_cache_loc=slots.view(-1),
            seq_lens_sum=int(bounds.sum()),
            seq_lens_cpu=bounds,
            positions=positions.view(-1),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with torch.inference_mode():
            output = self._forward(forward_batch)
            if self._tail is not None and output.can_run_graph:
                return self._tail.ids[:bs], self._tail.logprobs[:bs]
            return self._candidates(output.logits_output.hidden_states, self.width)

    def warm_up(self) -> None:
        """Run the block's kernel once, before any request waits for it to be compiled."""
        if not self._by_kernel:
            return
        zero = torch.zeros(1, dtype=torch.int64, device=self._req_to_token.device)
        self._block(SimpleNamespace(seq_lens=zero, req_pool_indices=zero), zero)

    def _block(self, batch: Any, bonus_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, positions and KV slots of the drafted blocks, each int64 [bs, D]."""
        bs, width = batch.seq_lens.shape[0], self.width
        if self._by_kernel:
            if self._buffers.shape[1] < bs:
                self._buffers = self._buffers.new_empty((3, max(bs, 2 * self._buffers.shape[1]), width))
            block, positions, slots = self._buffers[:, :bs]
            _prepare_dflash_draft_block_unchecked(
                bonus_tokens=bonus_tokens,
                prefix_lens=batch.seq_lens,
                req_pool_indices=batch.req_pool_indices,
                req_to_token=self._req_to_token,
                block_ids_out=block,
                positions_out=positions,
                cache_loc_out=slots,
                mask_token_id=self._mask_token_id,
            )
            return block, positions, slots
        block = torch.full((bs, width), self._mask_token_id, dtype=torch.int64, device=bonus_tokens.device)
        block[:, 0] = bonus_tokens
        slots = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self._req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=bs,
            draft_token_num=width,
            device=bonus_tokens.device,
        )
        return block, batch.seq_lens[:, None] + self._offsets, slots
