"""The target's verify graphs, captured with a tree's mask."""

from __future__ import annotations

from bisect import bisect_left
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.triton_tree_backend import reads_ancestor_bits
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.ddtree_sizes import token_buckets
from sglang.srt.speculative.dflash_info import DDTreeVerifyInput
from sglang.srt.utils.common import get_cuda_graph_batch_size_alignment
from sglang_ddtree.flags import config_of


class DDTreeVerifyGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner, but what it captures is a tree; with the budget ``auto`` graphs may be for packed rounds.

    For the DFLASH family SGLang captures a causal verify without a mask. A tree replayed from such a graph would
    be verified causally and still give fluent text.

    Packed graphs are keyed by their number of verify tokens T, as SGLang's own ragged verify keys them, and hold any
    requests that fit. Uniform ones, a fixed budget's and those for targets with recurrent layers, are keyed by
    requests, N tokens each.
    """

    # Set by the parent.
    capture_bs: Any
    captured_req_width: Any

    @property
    def ragged_verify_mode(self) -> bool:
        """SGLang's word for graphs keyed by tokens. Its own switch asks the environment, and another algorithm."""
        return config_of(self.model_runner.server_args).packed

    @ragged_verify_mode.setter
    def ragged_verify_mode(self, value: bool) -> None:
        """The parent's answer, which is not asked for."""

    def _build_ragged_verify_token_buckets(self) -> list[int]:
        most = max(self.capture_bs) * self.captured_req_width
        server_args = self.model_runner.server_args
        buckets = token_buckets(max(self.capture_bs), config_of(server_args).budget)
        # Where tensor parallelism deals tokens out, all ranks must get as many.
        step = get_cuda_graph_batch_size_alignment(server_args)
        return [tokens for tokens in buckets if tokens <= most and tokens % step == 0]

    def _ragged_capture_slots(self, num_tokens: int) -> int:
        """Requests that a graph of so many tokens holds."""
        return min(num_tokens, self.max_bs)

    def _capture_one_stream(self, stream_idx: int | None = None) -> None:
        if not self.ragged_verify_mode:
            super()._capture_one_stream(stream_idx)
            return
        # The parent goes through batch sizes and makes tokens of them: as if every request had one.
        sizes, width = self.capture_bs, self.captured_req_width
        self.capture_bs, self.captured_req_width = self.capture_num_tokens, 1
        try:
            super()._capture_one_stream(stream_idx)
        finally:
            self.capture_bs, self.captured_req_width = sizes, width

    def _stage_ragged_verify_layout(self, ragged_layout: Any, graph_size_key: int) -> None:
        """Nothing: the attention backend copies where requests begin."""

    def holds(self, total: int, requests: int) -> bool:
        """Whether a packed round of exactly so many tokens has a graph."""
        if not self.ragged_verify_mode or requests > self._ragged_capture_slots(total):
            return False
        at = bisect_left(self.capture_num_tokens, total)
        return at < len(self.capture_num_tokens) and self.capture_num_tokens[at] == total

    def can_run_graph(self, forward_batch: Any) -> bool:
        """A packed round only in a graph of its very size, a uniform one not in packed graphs."""
        spec_info = forward_batch.spec_info
        if getattr(spec_info, "qo_indptr", None) is None:
            return not self.ragged_verify_mode and super().can_run_graph(forward_batch)
        return self.holds(len(spec_info.draft_token), forward_batch.batch_size) and super().can_run_graph(forward_batch)

    def get_spec_info(self, num_tokens: int) -> Any:
        """The verify input that a graph of ``num_tokens`` tokens is captured with."""
        config = config_of(self.model_runner.server_args)
        if self.ragged_verify_mode:
            return self._packed_input(num_tokens)
        nodes = self.captured_req_width
        mask = None if reads_ancestor_bits(self.attn_backend) else self.buffers.custom_mask
        # Only the shape counts: a backend that reads bits copies every round's into its own buffers.
        bits = torch.zeros((1, nodes, -(-nodes // 64)), dtype=torch.int64, device=self.device)
        return DDTreeVerifyInput.create_dummy_input(config, mask, bits, nodes)

    def _packed_input(self, total: int) -> DDTreeVerifyInput:
        """A packed round of roots, which are as many as the graph holds, the last one with what is left."""
        config, slots = config_of(self.model_runner.server_args), self._ragged_capture_slots(total)
        starts = torch.arange(slots + 1, dtype=torch.int32, device=self.device)
        bits = torch.ones((total, -(-(config.budget + 1) // 64)), dtype=torch.int64, device=self.device)
        spec_info = DDTreeVerifyInput.create_dummy_input(config, None, bits)
        spec_info.draft_token_num = min(config.verify_width, total)
        spec_info.qo_indptr, spec_info.depths = starts, torch.zeros(total, dtype=torch.int64, device=self.device)
        spec_info.ragged_verify_layout = ragged_layout(total)
        return spec_info


def ragged_layout(total: int) -> Any:
    """What SGLang's graph runner reads of a packed round: its number of tokens."""
    return SimpleNamespace(graph_num_tokens=total)
