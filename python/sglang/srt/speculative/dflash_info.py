"""DDTREE's batch state, beside DFLASH's own.

SGLang has a module of this name: the overlay runs this file in that module's namespace, so both sets of
classes are imported from ``sglang.srt.speculative.dflash_info``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.eagle_info import EagleVerifyInput


class PackedForwardBatch(ForwardBatch):
    """A forward whose requests have different numbers of tokens."""

    def compute_spec_mrope_positions(self, model_runner, batch: ScheduleBatch, seq_positions=None) -> None:
        """Positions of a target that takes three a token, int64 [3, T].

        Three of one number are text's. Images would set a request's apart, and have no requests here.
        """
        positions = batch.spec_info.positions if seq_positions is None else seq_positions
        self.mrope_positions = positions.repeat(3, 1)


@dataclass
class DDTreeVerifyInput(EagleVerifyInput):
    """One target verify of a batch of trees, N nodes each (a chain is a tree of topk 1), or packed.

    A packed round has trees of different sizes, their T nodes one behind the other; the two backends of DDTREE alone
    know it.

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

    Packed, draft_token and positions are int64 [T], ancestor_bits is [T, W], there is no mask and no link, and
    draft_token_num is what the widest tree can have; and
        qo_indptr: int32 [bs + 1], where each request's nodes begin. None: not packed.
        depths: int64 [T].
    """

    ancestor_bits: torch.Tensor | None = None
    qo_indptr: torch.Tensor | None = None
    depths: torch.Tensor | None = None

    # Same layout as EAGLE's, and it accepts a missing mask.
    generate_attn_arg_prefill = DFlashVerifyInput.generate_attn_arg_prefill

    def prepare_packed(self, batch: ScheduleBatch, slots: torch.Tensor, model_runner) -> tuple[ForwardBatch, bool]:
        """The target's forward of a packed round, as SGLang's ``eagle_prepare_for_verify`` makes a uniform one's.

        Args:
            batch: becomes the verify batch.
            slots: int64 [T], where the nodes' keys and values go.
            model_runner: the target's.

        Returns:
            The forward, and whether it runs from a graph, into which it has been loaded then.
        """
        assert self.qo_indptr is not None, "not packed"
        batch.input_ids, batch.out_cache_loc, batch.spec_info = self.draft_token, slots, self
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        forward_batch = PackedForwardBatch.init_new(
            batch, model_runner, capture_hidden_mode=CaptureHiddenMode.FULL, return_hidden_states_before_norm=False
        )
        graphs = model_runner.decode_cuda_graph_runner
        if graphs is None or not graphs.can_run_graph(forward_batch):
            return forward_batch, False
        graphs.load_batch(forward_batch)
        forward_batch.mark_forward_metadata_ready()
        return forward_batch, True

    @classmethod
    def create_dummy_input(
        cls,
        config,
        custom_mask: torch.Tensor | None,
        ancestor_bits: torch.Tensor | None = None,
        nodes: int | None = None,
    ) -> DDTreeVerifyInput:
        """Shape-only input for warm-up and capture; ``config`` is the server's DDTreeConfig.

        ``nodes``: N; None: of the widest tree.
        """
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
            draft_token_num=config.verify_width if nodes is None else nodes,
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
