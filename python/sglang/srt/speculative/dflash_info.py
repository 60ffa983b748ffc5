"""DDTREE's batch state, beside DFLASH's own.

SGLang has a module of this name: the overlay runs this file in that module's namespace, so both sets of
classes are imported from ``sglang.srt.speculative.dflash_info``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.eagle_info import EagleVerifyInput


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """One target verify of a batch of trees, N nodes each (a chain is a tree of topk 1).

    Attributes used by SGLang's attention backends and commit:
        draft_token: int64 [bs * N], the nodes' tokens, node 0 the last committed one.
        positions: int64 [bs * N], committed length + depth.
        custom_mask: bool, True: the row may attend the column. On the GPU SGLang's full mask
            (per request N rows of seq_len + N columns), on the CPU the tree part only [bs * N * N].
            None: causal over the N tokens, right for a chain alone.
        retrieve_next_token, retrieve_next_sibling: int64 [bs, N], first child and next sibling, -1 for none.
        spec_steps: the deepest node possible.
        topk: more than 1 selects the tree paths of the backends.
        ancestor_bits: int64 [bs, N, W], the mask as `TritonTreeMaskAttnBackend` reads it, which needs no dense one.
    """

    ancestor_bits: torch.Tensor | None = None

    # Same layout as EAGLE's, and it accepts a missing mask.
    generate_attn_arg_prefill = DFlashVerifyInput.generate_attn_arg_prefill

    @classmethod
    def create_dummy_input(
        cls, config, custom_mask: torch.Tensor | None, ancestor_bits: torch.Tensor | None = None
    ) -> DDTreeVerifyInput:
        """Shape-only input for warm-up and capture; ``config`` is the server's DDTreeConfig."""
        return cls(
            draft_token=None,
            custom_mask=None if config.shadow_linear else custom_mask,
            positions=None,
            retrieve_index=None,
            retrieve_next_token=None,
            retrieve_next_sibling=None,
            retrieve_cum_len=None,
            spec_steps=config.max_depth,
            topk=1 if config.shadow_linear else 2,
            draft_token_num=config.verify_width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            ancestor_bits=None if config.shadow_linear else ancestor_bits,
        )


@dataclass
class DDTreeDraftInput(DFlashDraftInputV2):
    """What a running request carries from round to round: the bonus token and the committed length."""

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve the slots of two rounds per request, in whole pages. Mutates ``batch`` and its requests.

        EAGLE's preparation is the right one for a tree; the size comes from ``get_alloc_len_per_decode``, the
        wider of draft block and tree.
        """
        from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode

        if batch.batch_size() == 0:
            return
        eagle_prepare_for_decode(batch)
        # What the host may plan with while it does not know the committed lengths.
        reserved = [req.kv.kv_allocated_len for req in batch.reqs]
        self.reserved_seq_lens_cpu = torch.tensor(reserved, dtype=torch.int32)
        self.reserved_seq_lens_sum = sum(reserved)
