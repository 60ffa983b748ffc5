"""The target's verify graphs, captured with a tree's mask."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_tree_backend import reads_ancestor_bits
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.dflash_info import DDTreeVerifyInput
from sglang_ddtree.flags import config_of


class DDTreeVerifyGraphRunner(DecodeCudaGraphRunner):
    """SGLang's runner, but what it captures is a tree, and packed rounds are not its own.

    For the DFLASH family SGLang captures a causal verify without a mask. A tree replayed from such a graph would
    be verified causally and still give fluent text.
    """

    def can_run_graph(self, forward_batch: Any) -> bool:
        """A packed round has no graph: the captured ones verify N nodes of every request."""
        if getattr(forward_batch.spec_info, "qo_indptr", None) is not None:
            return False
        return super().can_run_graph(forward_batch)

    def get_spec_info(self, num_tokens: int) -> Any:
        """The verify input that a graph of ``num_tokens`` tokens is captured with."""
        config, nodes = config_of(self.model_runner.server_args), self.captured_req_width
        mask = None if reads_ancestor_bits(self.attn_backend) else self.buffers.custom_mask
        # Only the shape counts: a backend that reads bits copies every round's into its own buffers.
        bits = torch.zeros((1, nodes, -(-nodes // 64)), dtype=torch.int64, device=self.device)
        return DDTreeVerifyInput.create_dummy_input(config, mask, bits)
