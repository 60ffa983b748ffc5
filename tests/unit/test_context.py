"""Long contexts through SGLang's own graph runner and the tree's backend, up to what the kernels read.

Without graphs, models or a distributed state. In the interpreter or on a GPU: `_kernels.py`.
"""

from types import SimpleNamespace

import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter
from test_triton_tree_backend import CONTEXT, SLOTS, World, on_device

pytest.importorskip("triton")

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang_ddtree import overlay  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig  # noqa: E402

overlay.lay()

import sglang.srt.model_executor.forward_batch_info as batches  # noqa: E402
import sglang.srt.model_executor.runner.decode_cuda_graph_runner as runners  # noqa: E402
import sglang.srt.speculative.ddtree_graph_runner as tree_runners  # noqa: E402
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode  # noqa: E402
from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers  # noqa: E402
from sglang.srt.speculative.ddtree_context import LongContexts, batch_of, lent_slots  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

WIDTH, BLOCK, MOST = 8, 4, 4
CONFIG = DDTreeConfig(budget=WIDTH - 1, block_size=BLOCK, auto=True)
TOTALS = [1, 4, 16, 32]


def make_runner(world: World, draft: bool, monkeypatch: pytest.MonkeyPatch):
    """A runner as it is after its capture, for loading batches."""
    of = runners.DecodeCudaGraphRunner if draft else tree_runners.DDTreeVerifyGraphRunner
    parallel = lambda: SimpleNamespace(moe_ep_size=1)  # noqa: E731
    monkeypatch.setattr(batches, "get_parallel", parallel)
    monkeypatch.setattr(tree_runners, "config_of", lambda server_args: CONFIG)
    runner, width = object.__new__(of), BLOCK if draft else WIDTH
    runner.model_runner = SimpleNamespace(
        server_args=SimpleNamespace(enable_lora=False),
        is_draft_worker=draft,
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        hisparse_coordinator=None,
        attn_backend=None,
        req_to_token_pool=SimpleNamespace(req_to_token=world.table),
        token_to_kv_pool=SimpleNamespace(size=SLOTS - 1),
        model_config=SimpleNamespace(context_len=CONTEXT),
    )
    runner.capture_bs, runner.captured_req_width, runner.capture_num_tokens = [1, 2, MOST], width, TOTALS
    runner.max_bs, runner.device, runner.pp_size, runner.dp_size = MOST, DEVICE, 1, 1
    runner.seq_len_fill_value, runner.capture_forward_mode = 1, ForwardMode.TARGET_VERIFY
    runner.capture_hidden_mode = CaptureHiddenMode.NULL if draft else CaptureHiddenMode.FULL
    for name in (
        "require_gathered_buffer",
        "require_mlp_tp_gather",
        "require_attn_tp_gather",
        "enable_prefill_cp",
        "enable_two_batch_overlap",
        "enable_pdmux",
        "is_encoder_decoder",
    ):
        setattr(runner, name, False)
    if draft:
        runner.ragged_verify_mode = False
    runner.deepep_adapter = SimpleNamespace(replay=lambda: None)
    tokens = MOST * width
    runner.buffers = DecodeInputBuffers.create(
        device=DEVICE,
        max_bs=MOST,
        max_num_token=tokens,
        hidden_size=8,
        next_token_logits_buffer=torch.zeros(tokens, 8, device=DEVICE),
        dtype=torch.float32,
        dp_size=1,
        pp_size=1,
        is_encoder_decoder=False,
        require_mlp_tp_gather=False,
        seq_len_fill_value=1,
        encoder_len_fill_value=0,
        num_tokens_per_req=width,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=False,
    )
    runner.buffer_registry = build_decode_registry(
        device=DEVICE,
        max_bs=MOST,
        max_num_token=tokens,
        seq_len_fill_value=1,
        cache_loc_dtype=torch.int64,
        source=runner.buffers,
    )
    backend = runner.attn_backend = world.backend(draft=draft)
    runner.model_runner.attn_backend = backend
    backend.init_cuda_graph_state(MOST, tokens)
    # What a capture leaves behind in the backend.
    for size in runner.capture_bs if draft else TOTALS:
        requests, total = (size, size * width) if draft else (runner._ragged_capture_slots(size), size)
        batch, _, _ = runner.capture_prepare(requests, num_tokens=total)
        batch.encoder_lens = None
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
    return runner


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@on_device
@pytest.mark.parametrize("draft, total, requests", [(False, 4, 3), (False, 32, 2), (True, 12, 3), (True, 16, 4)])
def test_a_replay_reads_the_slots_that_were_lent(
    draft: bool, total: int, requests: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, length = make_runner(world, draft, monkeypatch), 290
    backend = runner.attn_backend
    world.table.copy_(torch.randint(1, SLOTS, world.table.shape))
    before = world.table.clone()

    def loaded(tokens: int) -> list[list[int]]:
        """What the kernels of a replay are told: every request's slots."""
        batch = batch_of(runner, requests, total, tokens)
        runner.load_batch(batch)
        # Nothing is written but to the dummy slot.
        assert not runner.buffers.out_cache_loc.any()
        ends = backend.kv_indptr[: requests + 1].tolist()
        return [backend.cuda_graph_kv_indices[a:b].tolist() for a, b in zip(ends, ends[1:], strict=False)]

    with lent_slots(runner, LongContexts(requests, length)):
        short, long = loaded(1), loaded(length)
        bs = runner.bs
        lengths, nodes = backend.kv_indptr[: bs + 1].diff().tolist(), backend.qo_indptr[: bs + 1].diff().tolist()
        # How the prefixes are dealt out follows: parts of every request's whole context.
        tree = backend._graph_round.head(bs) if draft else backend._packed_rounds[total]
        items = tree.plan.items.tolist()
    assert [len(slots) for slots in short] == [1] * requests
    assert sorted(sum(long, [])) == list(range(1, requests * length + 1))
    assert lengths == [length] * requests + [1] * (bs - requests)
    assert nodes[:requests] == [BLOCK if draft else min(total // requests, WIDTH)] * requests
    for b in range(requests):
        assert sum(end - begin for owner, begin, end, _ in items if owner == b) == length
    assert torch.equal(world.table, before)
    # The next batch of a capture is as short as ever.
    batch, _, _ = runner.capture_prepare(requests, num_tokens=total)
    runner.load_batch(batch)
    assert backend.kv_indptr[: bs + 1].diff().tolist() == [1] * bs
    assert not runner.buffers.req_pool_indices.any()


if not INTERPRETED:

    def test_contexts_in_the_interpreter() -> None:
        assert_passes_in_the_interpreter(__file__)
