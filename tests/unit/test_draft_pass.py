"""A pass of the drafter at one width, and a model runner's second width: what is swapped, and what comes back."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner  # noqa: E402
from sglang.srt.speculative.ddtree_captured_width import CapturedWidth, attributes, capture_width  # noqa: E402
from sglang.srt.speculative.ddtree_draft_pass import DraftPass  # noqa: E402
from sglang.srt.speculative.ddtree_draft_tail import DraftTail  # noqa: E402

# --- Another width of a model runner.


class Graphs(DecodeCudaGraphRunner):
    """SGLang's graph runner, of which only what it asks of the model runner is kept."""

    def __init__(self, model_runner: Any, *, attn_backend: Any = None, speculative_num_draft_tokens: int | None = None):
        self.attn_backend = attn_backend or model_runner.attn_backend
        self.captured_req_width = model_runner.decode_num_tokens_per_req(num_draft_tokens=speculative_num_draft_tokens)
        # As SGLang's capture reads them.
        self.captured_with = model_runner.attn_backend, list(model_runner.capture_tail_hooks)
        if model_runner.broken:
            raise RuntimeError("out of memory")


class ModelRunner:
    """SGLang's model runner, as far as a width is concerned; its own is 16."""

    def __init__(self) -> None:
        self.broken, self.init_new_workspace = False, False
        self.prefill_attention_backend_str = self.decode_attention_backend_str = "triton"
        self.attn_backend = SimpleNamespace(name="own")
        self.capture_tail_hooks = ["own hook"]
        self.decode_cuda_graph_runner = Graphs(self)
        self.ran: list[tuple[Any, Any, Any]] = []

    def decode_num_tokens_per_req(self, *, num_draft_tokens: int | None = None) -> int:
        return 16

    def _get_attention_backend(self, init_new_workspace: bool = False) -> Any:
        self.init_new_workspace = init_new_workspace
        return SimpleNamespace(name="new", workspace=init_new_workspace)

    def _decode_cuda_graph_runner_cls(self) -> type:
        return Graphs

    def forward(self, forward_batch: Any) -> str:
        self.ran.append((forward_batch, self.attn_backend, self.decode_cuda_graph_runner))
        if forward_batch == "bad":
            raise RuntimeError("bad")
        return f"output of {forward_batch}"


def test_a_second_width_has_backend_graphs_and_hooks_of_its_own():
    runner = ModelRunner()
    before = dict(vars(runner))
    made = capture_width(runner, 8, ["narrow hook"])
    assert (made.graphs.captured_req_width, made.backend.name, made.backend.workspace) == (8, "new", True)
    assert made.backend.decode_attention_backend_str == made.backend.prefill_attention_backend_str == "triton"
    assert made.graphs.captured_with == (made.backend, ["narrow hook"])
    # The model runner is as it was, and asks its class for its width.
    assert vars(runner) == before and runner.decode_num_tokens_per_req() == 16


def test_a_forward_takes_the_width_and_gives_it_back():
    runner = ModelRunner()
    own = runner.attn_backend, runner.decode_cuda_graph_runner
    made = capture_width(runner, 8)
    assert made.forward("batch") == "output of batch"
    with pytest.raises(RuntimeError, match="bad"):
        made.forward("bad")
    assert runner.ran == [("batch", made.backend, made.graphs), ("bad", made.backend, made.graphs)]
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == own
    runner.forward("wide")
    assert runner.ran[-1] == ("wide", *own)


def test_a_capture_that_fails_leaves_the_runner_alone():
    runner = ModelRunner()
    runner.broken = True
    before = dict(vars(runner))
    with pytest.raises(RuntimeError, match="out of memory"):
        capture_width(runner, 8)
    assert vars(runner) == before


@pytest.mark.parametrize("width", [8, 32])
def test_what_cannot_be_captured_is_refused(width):
    runner = ModelRunner()
    if width == 8:
        runner.decode_cuda_graph_runner = SimpleNamespace()  # SGLang's eager runner, or None
    with pytest.raises(RuntimeError, match=f"no decode graphs of at least {width} tokens"):
        capture_width(runner, width)


def test_graphs_of_another_width_are_refused(monkeypatch):
    """A graph runner that does not ask the model runner for its width."""
    runner = ModelRunner()

    class Stubborn(Graphs):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.captured_req_width = 16

    monkeypatch.setattr(runner, "_decode_cuda_graph_runner_cls", lambda: Stubborn)
    with pytest.raises(RuntimeError, match="captured 16 tokens wide .* asked for were 8"):
        capture_width(runner, 8)


def test_attributes_come_back():
    class Thing:
        shared = "class"

    thing = Thing()
    thing.own = 1
    with pytest.raises(KeyError), attributes(thing, own=2, shared="mine", new=3):
        assert (thing.own, thing.shared, thing.new) == (2, "mine", 3)
        raise KeyError
    assert vars(thing) == {"own": 1} and thing.shared == "class"


# --- A pass.

WIDTH, REQUESTS, TOPK, MASK = 4, 3, 2, 300


def make_pass(width: int = WIDTH, tail: DraftTail | None = None, graph: bool = False) -> tuple[DraftPass, list[Any]]:
    seen: list[Any] = []

    def forward(batch: Any) -> Any:
        seen.append(batch)
        hidden = torch.arange(len(batch.input_ids), dtype=torch.float32)[:, None]
        return SimpleNamespace(can_run_graph=graph, logits_output=SimpleNamespace(hidden_states=hidden))

    def candidates(hidden: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        drafted = hidden.view(-1, width, 1)[:, 1:].expand(-1, -1, TOPK)
        return drafted.long(), -drafted

    table = torch.arange(1000, dtype=torch.int32).view(10, 100)
    return DraftPass(
        width, forward, candidates, tail=tail, mask_token_id=MASK, req_to_token=table, by_kernel=False
    ), seen


def batch_of(lengths: list[int]) -> SimpleNamespace:
    rows = torch.tensor([7, 2, 5][: len(lengths)])
    return SimpleNamespace(seq_lens=torch.tensor(lengths), req_pool_indices=rows)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_block_is_as_wide_as_the_pass(width):
    made, seen = make_pass(width)
    lengths = [10, 3, 20]
    ids, logprobs = made.run(batch_of(lengths), torch.tensor([11, 12, 13]), torch.tensor([10, 9, 20]))
    assert ids.shape == logprobs.shape == (REQUESTS, width - 1, TOPK)
    (batch,) = seen
    assert batch.input_ids.view(REQUESTS, width).tolist() == [[bonus] + [MASK] * (width - 1) for bonus in (11, 12, 13)]
    places = [list(range(n, n + width)) for n in lengths]
    assert batch.positions.view(REQUESTS, width).tolist() == places
    rows = [[100 * row + at for at in place] for row, place in zip((7, 2, 5), places, strict=True)]
    assert batch.out_cache_loc.view(REQUESTS, width).tolist() == rows
    assert batch.seq_lens.tolist() == lengths
    # Upper bounds of the host's, with the block; what attention and graphs ask for the width.
    assert batch.seq_lens_cpu.tolist() == [10 + width, 9 + width, 20 + width] and batch.seq_lens_sum == 39 + 3 * width
    assert batch.spec_info.draft_token_num == batch.spec_info.num_tokens_per_req == width
    # The root's own row is left out.
    assert ids[1, 0].tolist() == [width + 1] * TOPK


@pytest.mark.parametrize("graph", [False, True])
def test_a_graph_leaves_its_candidates_in_the_tail(graph):
    head = SimpleNamespace(weight=torch.zeros(8, 1))
    tail = DraftTail(lm_head=head, block_size=WIDTH, topk=TOPK, max_bs=8, tp_group=None, device="cpu")
    tail.ids.fill_(77)
    made, _ = make_pass(tail=tail, graph=graph)
    ids, logprobs = made.run(batch_of([5, 6]), torch.tensor([1, 2]), torch.tensor([5, 6]))
    assert ids.shape == logprobs.shape == (2, WIDTH - 1, TOPK)
    # A batch that no graph holds runs eagerly.
    assert (ids.data_ptr() == tail.ids.data_ptr() and bool((ids == 77).all())) == graph


def test_a_tail_of_another_width_is_a_mistake():
    tail = DraftTail(lm_head=None, block_size=8, topk=TOPK, max_bs=8, tp_group=None, device="cpu")
    with pytest.raises(AssertionError, match="for a draft of 4 positions"):
        make_pass(tail=tail)


def test_a_captured_width_is_what_a_pass_runs():
    """The two together, as the worker puts them."""
    runner = ModelRunner()
    made = capture_width(runner, WIDTH)
    assert isinstance(made, CapturedWidth)
    draft = DraftPass(
        WIDTH,
        made.forward,
        lambda hidden, width: (hidden, hidden),
        tail=None,
        mask_token_id=MASK,
        req_to_token=torch.zeros((10, 100), dtype=torch.int32),
        by_kernel=False,
    )
    with pytest.raises(AttributeError):  # the stand-in's output is a string
        draft.run(batch_of([5]), torch.tensor([1]), torch.tensor([5]))
    assert runner.ran[0][1:] == (made.backend, made.graphs)


# --- What the worker makes of it.


def worker_of(auto: bool, **fields: Any) -> SimpleNamespace:
    from sglang.srt.speculative.ddtree_worker import DDTreeWorker
    from sglang_ddtree.flags import DDTreeConfig

    worker = SimpleNamespace(config=DDTreeConfig(budget=63, block_size=16, auto=auto), block_size=16, **fields)
    worker.of = lambda name, *args, **options: getattr(DDTreeWorker, name)(worker, *args, **options)
    return worker


def test_a_budget_that_is_a_number_has_one_width():
    assert worker_of(auto=False).of("_draft_widths") == (16,)
    assert worker_of(auto=True).of("_draft_widths") == (8, 16)


def test_a_round_drafts_what_was_decided():
    assert worker_of(auto=True, _auto_round=SimpleNamespace(draft_width=8)).of("_width_of_round") == 8
    assert worker_of(auto=False, _auto_round=None).of("_width_of_round") == 16
    drafted = []
    passes = {
        width: SimpleNamespace(run=lambda *args, width=width: drafted.append((width, *args))) for width in (8, 16)
    }
    worker = worker_of(auto=True, _draft_passes=passes, _host_bound=lambda batch: "lengths")
    worker.of("_draft", "batch", "bonus", 8)
    worker.of("_draft", "batch", "bonus", 16)
    assert drafted == [(8, "batch", "bonus", "lengths"), (16, "batch", "bonus", "lengths")]


@pytest.mark.parametrize("free", [1.9, 2.1])
def test_half_a_draft_needs_memory_for_its_graphs(free: float, monkeypatch, caplog):
    from sglang.srt.speculative import ddtree_worker

    asked = []

    def available(device: str, gpu_id: int, *, distributed: bool, cpu_group: Any) -> float:
        asked.append((device, gpu_id, distributed, cpu_group))
        return free

    # All ranks of a group answer alike.
    monkeypatch.setattr(ddtree_worker, "get_tp_group", lambda: SimpleNamespace(world_size=2, cpu_group="group"))
    monkeypatch.setattr(ddtree_worker, "get_available_gpu_memory", available)
    runner, made = ModelRunner(), []
    tail = DraftTail(lm_head=None, block_size=8, topk=TOPK, max_bs=8, tp_group=None, device="cpu")

    def draft_pass(*args: Any) -> str:
        made.append(args)
        return "pass"

    worker = worker_of(auto=True, device="cuda", gpu_id=3, draft_model_runner=runner, ps=SimpleNamespace(tp_rank=0))
    worker._draft_tail, worker._draft_pass = lambda width: tail, draft_pass
    worker._free_gb = lambda: worker.of("_free_gb")
    found = worker.of("_capture_narrow_draft", 8)
    assert asked == [("cuda", 3, True, "group")]
    if free < 2:
        assert found is None and not made and "only 1.90 GB of GPU memory are free" in caplog.text
        return
    assert found is not None and found[0] == "pass" and found[1].captured_req_width == 8
    ((width, forward, given),) = made
    assert (width, given) == (8, tail) and forward("batch") == "output of batch"
    # Its own tail, and nothing of the whole block's.
    (hook,) = found[1].captured_with[1]
    assert runner.ran[0][2] is found[1] and hook is not None


@pytest.mark.parametrize("free", [1.9, 2.1])
def test_the_target_has_graphs_of_every_uniform_width_or_does_not_start(free: float, monkeypatch, caplog):
    from sglang.srt.speculative import ddtree_worker

    monkeypatch.setattr(ddtree_worker, "DDTreeVerifyGraphRunner", Graphs)
    runner = ModelRunner()
    target = SimpleNamespace(model_runner=runner)
    worker = worker_of(auto=True, target_worker=target, ps=SimpleNamespace(tp_rank=0), _free_gb=lambda: free)
    worker.config = dataclasses.replace(worker.config, budget=15, uniform=True)
    worker._target_graphs = lambda: runner.decode_cuda_graph_runner
    if free < 2:
        with pytest.raises(
            RuntimeError, match="graphs of the target for 8 nodes per request, and only 1.90 GB"
        ) as error:
            worker.of("_capture_uniform")
        assert "--speculative-ddtree-max-budget (now 15)" in str(error.value)
        # A server that serves goes on without.
        worker.of("_capture_uniform", serving=True)
        assert worker._uniform == {} and "launched kernel by kernel" in caplog.text
        return
    worker.of("_capture_uniform")
    # From the widest down, each with what is captured behind the target's own.
    assert list(worker._uniform) == [8, 4, 1]
    for nodes, captured in worker._uniform.items():
        assert captured.graphs.captured_req_width == nodes and captured.graphs.captured_with[1] == ["own hook"]
        with captured.in_place():
            assert runner.decode_cuda_graph_runner is captured.graphs and runner.attn_backend is captured.backend
        assert runner.attn_backend.name == "own"
    # New graphs of the target bring new ones of every width, and only they.
    before, renew = dict(worker._uniform), []
    worker._commit_graphs, worker._capture_uniform = None, lambda serving: renew.append(serving)
    worker.of("_renew_commits")
    assert not renew and worker._uniform == before
    runner.decode_cuda_graph_runner = Graphs(runner)
    worker.of("_renew_commits")
    assert renew == [True]


def test_a_budget_that_is_a_number_has_no_other_graphs_of_the_target():
    runner = ModelRunner()
    worker = worker_of(auto=True, target_worker=SimpleNamespace(model_runner=runner), _uniform_of=None)
    worker._target_graphs = lambda: runner.decode_cuda_graph_runner
    worker.of("_capture_uniform")
    assert worker._uniform == {} and worker._uniform_of is None


@pytest.mark.parametrize("by_kernel", [False, True])
def test_the_blocks_kernel_is_compiled_before_any_request(by_kernel: bool, monkeypatch):
    from sglang.srt.speculative import ddtree_draft_pass

    prepared: list[dict[str, Any]] = []
    monkeypatch.setattr(
        ddtree_draft_pass, "_prepare_dflash_draft_block_unchecked", lambda **given: prepared.append(given)
    )
    table = torch.zeros((2, 20), dtype=torch.int32)
    of = ddtree_draft_pass.DraftPass(
        8,
        print,
        lambda hidden, width: (hidden, hidden),
        tail=None,
        mask_token_id=3,
        req_to_token=table,
        by_kernel=by_kernel,
    )
    of.warm_up()
    assert len(prepared) == by_kernel
    for given in prepared:
        assert given["block_ids_out"].shape == given["cache_loc_out"].shape == (1, 8)
        assert given["prefix_lens"].tolist() == given["req_pool_indices"].tolist() == [0]
