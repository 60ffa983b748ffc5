"""The replay harness without a server: ids and prompts, tables and gathers, hooks on stand-in modules, the load."""

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import json
import sys
import threading
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _load import ROOT, load_ddtree_utils
from aiohttp import web
from sglang.srt.plugins import load_plugins

load_plugins()
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_replay  # noqa: E402
import recorded_drafts  # noqa: E402
from _load import load as load_by_path  # noqa: E402
from serving_bench import servers, steady  # noqa: E402
from serving_bench.recorded_texts import BASE, Texts, map_candidates, map_ids  # noqa: E402

plugin = load_by_path("ddtree_replay", "benchmarks/replay/ddtree_replay.py")
utils = load_ddtree_utils()
SAMPLE = ROOT / "tests/data/recorded-drafts-sample.npz"
VOCABULARY = 320


@pytest.fixture(scope="module")
def recorded():
    return recorded_drafts.load(SAMPLE)


@pytest.fixture(scope="module")
def texts(recorded):
    return Texts(recorded, VOCABULARY, depth=7)


@pytest.fixture(scope="module")
def recording(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "replay.npz"
    texts.save(path)
    return plugin.Recording(path, "cpu")


# --- Ids and prompts --------------------------------------------------------------------------------


def test_candidates_stay_distinct_and_in_range():
    ids = np.array([[3, 259, 515, 4, 260], [255, 511, 0, 1, 2]], dtype=np.uint16)
    got = map_candidates(ids, 256)
    assert got.tolist() == [[3, 4, 5, 6, 7], [255, 0, 1, 2, 3]]
    assert map_ids(ids, 256)[:, 0].tolist() == [3, 255]


def test_a_large_vocabulary_changes_nothing(recorded):
    same = Texts(recorded, 151936)
    assert np.array_equal(same.recorded.top_ids, recorded.top_ids) and np.array_equal(same.recorded.ids, recorded.ids)
    mode_rounds = same.rounds("ddtree-15", 8)
    expected = recorded_drafts.committed_tokens_per_round(recorded, 15, 8)["all"]
    assert recorded.rows.sum() / sum(mode_rounds) == pytest.approx(expected)


def test_mapped_texts_are_what_their_candidates_are_compared_with(texts, recorded):
    assert texts.recorded.top_ids.shape[1] == 7 and texts.recorded.top_ids.max() < texts.filler == VOCABULARY - 64
    ordered = np.sort(texts.recorded.top_ids, axis=-1)
    assert (ordered[..., 1:] != ordered[..., :-1]).all()
    assert [len(answer) for answer in texts.answers] == (recorded.rows + 1).tolist()
    begin = int(recorded.prompt_lens[0])
    assert texts.answers[0] == [int(i) % 256 for i in recorded.ids[begin : recorded.lens[0]]]
    with pytest.raises(AssertionError, match="too small"):
        Texts(recorded, 300)


def test_prompts_say_their_text_and_share_no_more(texts, recording):
    prompts = [texts.prompt(text, serial, 32) for serial, text in enumerate([0, 39, 39, 7])]
    assert [len(prompt) for prompt in prompts] == [32] * 4 and max(map(max, prompts)) < BASE
    assert [recording.text_of(prompt) for prompt in prompts] == [0, 39, 39, 7]
    assert prompts[1][:2] == prompts[2][:2] and prompts[1][2:4] != prompts[2][2:4]
    # SGLang's warm-up, and a prompt of one token.
    assert recording.text_of([10, 11, 12]) == recording.text_of([5]) == 0


def test_every_stretch_of_texts_is_balanced(texts):
    assert sorted(texts.order) == list(range(40))
    for begin in range(0, 36, 3):
        assert {int(texts.recorded.sets[text]) for text in texts.order[begin : begin + 3]} == {0, 1, 2}


def test_requests_start_at_different_points_and_then_run_whole(texts):
    asks = [ask for ask, _ in zip(bench_replay.asks(texts, 8, 100), range(20), strict=False)]
    assert len({ask.tokens for ask in asks[:8]}) > 4 and not all(ask.whole for ask in asks[:8])
    assert all(ask.whole and ask.tokens == len(texts.answers[ask.key]) for ask in asks[8:])
    assert len({tuple(ask.ids) for ask in asks}) == 20


# --- Tables and gathers -----------------------------------------------------------------------------


def round_at(recording, places):
    """A round whose requests (text, prompt length, answer token of the root) are given."""
    text, prompt, root = (torch.tensor(column) for column in zip(*places, strict=True))
    return plugin.Round(recording, text, prompt, prompt + root)


def test_a_row_drafts_behind_its_answer_token(texts, recording):
    places = [(0, 5, 0), (3, 9, 11), (39, 1, len(texts.answers[39]) - 2)]
    current = round_at(recording, places)
    ids, logprobs = current.drafts(5, 3)
    assert ids.shape == logprobs.shape == (3, 5, 3) and ids.dtype == torch.int64 and logprobs.dtype == torch.float32
    starts = np.concatenate([[0], np.cumsum(texts.recorded.rows)])
    for (text, _, root), got, lp in zip(places, ids, logprobs, strict=True):
        assert got.tolist() == texts.recorded.top_ids[starts[text] + root, :5, :3].tolist()
        assert lp.tolist() == texts.recorded.top_lp[starts[text] + root, :5, :3].astype(np.float32).tolist()
    assert ids.is_contiguous() and current.drafted and not current.chosen
    with pytest.raises(RuntimeError, match="8 positions of 1 candidates were asked for"):
        current.drafts(8, 1)


def test_the_choice_at_a_position_is_the_token_behind_it(texts, recording):
    places = [(0, 5, 0), (3, 9, 11), (39, 1, len(texts.answers[39]) - 2)]
    current = round_at(recording, places)
    depths = torch.tensor([[0, 1, 1, 2]] * 3)
    positions = current.answer[:, None] + current.prompt_lens[:, None] + depths
    got = current.choices(positions.view(-1), 4)
    assert got.shape == (3, 4) and current.chosen

    def said(text, index):
        answer = texts.answers[text]
        return answer[index] if index < len(answer) else texts.filler

    expected = [
        [said(text, root + depth + 1) for depth in row]
        for (text, _, root), row in zip(places, depths.tolist(), strict=True)
    ]
    assert got.tolist() == expected and expected[2][1] == texts.filler
    assert current.chain_choices(3).tolist() == [[row[0], row[1], row[3]] for row in expected]
    # Packed: rows of request 1, then of 0, then a tail that counts as the first request's, at any position.
    owners = torch.tensor([1, 1, 0, 0])
    rows = torch.stack([positions[1, 0], positions[1, 3], positions[0, 0], torch.tensor(0)])
    packed = current.choices(rows, 1, owners)
    assert packed.shape == (4, 1) and packed[:3, 0].tolist() == [expected[1][0], expected[1][3], expected[0][0]]


def test_a_request_past_its_end_reads_within_the_tables(texts, recording):
    current = round_at(recording, [(39, 1, len(texts.answers[39]) + 20), (0, 9, -4)])
    current.drafts(7, 16)
    assert current.chain_choices(8)[0].tolist() == [texts.filler] * 8


@pytest.mark.parametrize("budget, topk", [(7, 7), (15, 8)])
def test_rounds_of_whole_texts_are_the_recordings(texts, recording, budget, topk):
    """Trees built from the tables and walked with the tables' choices, all texts at once."""
    expected = texts.rounds(f"ddtree-{budget}", 8)
    prompt = torch.arange(40) + 3
    last = torch.tensor([len(answer) - 1 for answer in texts.answers])
    root, rounds = torch.zeros(40, dtype=torch.int64), torch.zeros(40, dtype=torch.int64)
    while (running := root < last).any():
        current = plugin.Round(recording, torch.arange(40), prompt, prompt + root)
        tree = utils.build_trees(torch.zeros(40, dtype=torch.int64), *current.drafts(7, topk), budget)
        positions = (prompt + root)[:, None] + tree.depths
        walk = utils.walk_trees(tree.tokens, tree.parents, current.choices(positions.view(-1), budget + 1), 7)
        rounds += running
        root += torch.where(running, walk.num_accepted_drafts + 1, 0)
    assert rounds.tolist() == expected


# --- The plugin -------------------------------------------------------------------------------------


def test_nothing_happens_by_accident(tmp_path, monkeypatch):
    registered = []
    monkeypatch.setattr(
        "sglang.srt.plugins.hook_registry.HookRegistry.register", lambda *args, **kwargs: registered.append(args)
    )
    assert "ddtree_replay" not in {point.name for point in entry_points(group="sglang.srt.plugins")}
    monkeypatch.delenv("DDTREE_REPLAY", raising=False)
    plugin.load()
    assert not registered
    # SGLang swallows an Exception of a plugin.
    monkeypatch.setenv("DDTREE_REPLAY", str(tmp_path / "none.npz"))
    with pytest.raises(SystemExit, match="must name a recording"):
        plugin.load()
    monkeypatch.setenv("DDTREE_REPLAY", str(SAMPLE))
    plugin.load()
    assert len(registered) == 2


def test_real_weights_and_forced_acceptance_are_refused(monkeypatch, caplog):
    session = plugin.Session("here.npz")
    with pytest.raises(RuntimeError, match="must be dummy, got auto"):
        session.check(SimpleNamespace(load_format="auto"))
    session.check(SimpleNamespace(load_format="dummy"))
    assert "REPLAY" in caplog.text and "here.npz" in caplog.text
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(RuntimeError, match="SGLANG_SIMULATE_ACC_LEN"):
        session.check(SimpleNamespace(load_format="dummy"))


def test_missing_seams_are_named():
    with pytest.raises(RuntimeError, match="there is no math.nothing"):
        plugin._seam(__import__("math"), "nothing")
    with pytest.raises(RuntimeError, match="test_replay.round_at takes no bonus"):
        plugin._seam(sys.modules[__name__], "round_at", "places", "bonus")


def test_the_seams_exist_in_this_sglang():
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative import dflash_worker_v2
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    # On copies: nothing of this process changes.
    worker = type("DFlashWorkerV2", (dflash_worker_v2.DFlashWorkerV2,), {})
    names = ("_compute_dflash_accept_bonus_triton_unchecked", "compute_dflash_correct_drafts_and_bonus")
    module = SimpleNamespace(DFlashWorkerV2=worker, **{name: getattr(dflash_worker_v2, name) for name in names})
    plugin.install_dflash(module, plugin.Session(""))
    plugin._seam(ModelRunner, "forward", "forward_batch")
    plugin._seam(SpeculativeAlgorithm, "create_worker", "server_args")
    # What the worker reads after the drafter's graph, and the names by which it calls what is replaced.
    source = inspect.getsource(dflash_worker_v2.DFlashWorkerV2.forward_batch_generation)
    for used in ("self._draft_sampler.out[", "draft_out.can_run_graph", "target_top1=target_predict", *names):
        assert used in source
    assert "self.draft_model_runner.forward(forward_batch)" in source


class Batch(SimpleNamespace):
    """A stand-in for SGLang's ScheduleBatch."""

    def __init__(self, reqs, seq_lens, prefill=False, greedy=True):
        mode = SimpleNamespace(is_idle=lambda: not reqs, is_extend=lambda: prefill)
        super().__init__(
            reqs=reqs,
            forward_mode=mode,
            is_extend_in_batch=False,
            req_pool_indices=torch.tensor([req.slot for req in reqs], dtype=torch.int32),
            seq_lens=torch.tensor(seq_lens),
            sampling_info=SimpleNamespace(is_all_greedy=greedy),
        )


def worker_parts():
    """What any worker has that the plugin looks at."""

    def init(self, server_args):
        self.server_args = server_args
        self.model_runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(8, 4)))

    return {"__init__": init, "block_size": 8}


def dflash_module(graph: bool):
    """A stand-in for dflash_worker_v2: drafts nobody recorded, predictions nobody accepts."""

    def accept(*, candidates, target_top1, out):
        out.append((candidates.clone(), target_top1.clone()))

    module = SimpleNamespace(
        _compute_dflash_accept_bonus_triton_unchecked=accept,
        compute_dflash_correct_drafts_and_bonus=lambda *, candidates, target_predict: (candidates, target_predict),
    )

    class DFlashWorkerV2:
        def init_cuda_graphs(self):
            self._draft_sampler = SimpleNamespace(out=torch.zeros(64, dtype=torch.int64)) if graph else None

        def _greedy_sample_from_vocab_parallel_head(self, *, hidden_states, lm_head):
            return torch.full((hidden_states,), 9)

        def forward_batch_generation(self, batch, on_publish=None):
            if batch.forward_mode.is_extend() or batch.forward_mode.is_idle():
                return None
            n = len(batch.reqs) * 7
            if self.draft_model_runner.forward("a batch").can_run_graph:
                drafts = self._draft_sampler.out[:n]
            else:
                drafts = self._greedy_sample_from_vocab_parallel_head(hidden_states=n, lm_head=None)
            candidates = torch.cat([torch.zeros(len(batch.reqs), 1, dtype=torch.int64), drafts.view(-1, 7)], 1)
            found = []
            if self.accepts:
                own = torch.full_like(candidates, 8)
                module._compute_dflash_accept_bonus_triton_unchecked(candidates=candidates, target_top1=own, out=found)
            return found

    for name, part in worker_parts().items():
        setattr(DFlashWorkerV2, name, part)

    def forward(forward_batch):
        return SimpleNamespace(can_run_graph=graph)

    DFlashWorkerV2.draft_model_runner = SimpleNamespace(forward=forward)
    DFlashWorkerV2.accepts = True
    module.DFlashWorkerV2 = DFlashWorkerV2
    return module


def admitted(texts, tmp_path, module, install):
    """A worker behind the plugin, with requests 39 and 3 prefilled."""
    path = tmp_path / "replay.npz"
    texts.save(path)
    session = plugin.Session(str(path))
    install(module, session)
    worker_class = next(value for name, value in vars(module).items() if name.endswith(("Worker", "WorkerV2")))
    worker = worker_class(SimpleNamespace(load_format="dummy"))
    reqs = [
        SimpleNamespace(origin_input_ids=texts.prompt(text, i, 12 + i), slot=slot)
        for i, (text, slot) in enumerate([(39, 5), (3, 2)])
    ]
    worker.forward_batch_generation(Batch(reqs, [12, 13], prefill=True))
    return worker, session, reqs


@pytest.mark.parametrize("graph", [True, False])
def test_dflash_drafts_and_predictions(texts, tmp_path, graph):
    worker, session, reqs = admitted(texts, tmp_path, module := dflash_module(graph), plugin.install_dflash)
    worker.init_cuda_graphs()
    assert worker.forward_batch_generation(Batch([], [])) is None
    ((candidates, predicted),) = worker.forward_batch_generation(Batch(reqs[::-1], [13 + 4, 12 + 9]))
    starts = np.concatenate([[0], np.cumsum(texts.recorded.rows)])
    for row, (text, root) in enumerate([(3, 4), (39, 9)]):
        assert candidates[row, 1:].tolist() == texts.recorded.top_ids[starts[text] + root, :, 0].tolist()
        assert predicted[row].tolist() == texts.answers[text][root + 1 : root + 9]
    # The fallback of the accept step, and calls outside of a round.
    fallback = module.compute_dflash_correct_drafts_and_bonus
    session.begin(Batch(reqs, [12, 13]))
    assert torch.equal(fallback(candidates=candidates, target_predict=predicted)[1], session.round.chain_choices(8))
    session.end()
    assert fallback(candidates=0, target_predict=7) == (0, 7)


def test_a_round_that_passes_by_the_recording_ends_the_server(texts, tmp_path):
    worker, _, reqs = admitted(texts, tmp_path, module := dflash_module(False), plugin.install_dflash)
    worker.init_cuda_graphs()
    with pytest.raises(RuntimeError, match="greedy"):
        worker.forward_batch_generation(Batch(reqs, [12, 13], greedy=False))
    module.DFlashWorkerV2.accepts = False
    with pytest.raises(RuntimeError, match="passed by the recording"):
        worker.forward_batch_generation(Batch(reqs, [12, 13]))


def ddtree_module():
    """A stand-in for ddtree_worker, whose rounds are plain, packed or of two nodes each."""

    class DDTreeWorker:
        buffer = torch.zeros((2, 2), dtype=torch.int64)

        def _draft(self, batch, bonus_tokens):
            return torch.zeros((len(batch.reqs), 7, 4), dtype=torch.int64), torch.zeros((len(batch.reqs), 7, 4))

        def _choose(self, batch, forward_batch, tree, packed, grammar_barrier=None):
            return "logits", self.buffer if packed is None else torch.zeros((3, 1), dtype=torch.int64)

        def forward_batch_generation(self, batch):
            if batch.forward_mode.is_extend():
                return None
            drafts = self._draft(batch, None) if self.kind != "plain" else None
            owners = torch.tensor([1, 0, 0])
            packed = SimpleNamespace(row_owners=lambda: owners) if self.kind == "packed" else None
            positions = batch.seq_lens[owners] if packed else (batch.seq_lens[:, None] + torch.arange(2)).view(-1)
            forward_batch = SimpleNamespace(spec_info=SimpleNamespace(positions=positions))
            if self.kind == "silent":
                return drafts, None
            return drafts, self._choose(batch, forward_batch, None, packed)

    for name, part in worker_parts().items():
        setattr(DDTreeWorker, name, part)
    return SimpleNamespace(DDTreeWorker=DDTreeWorker)


def test_ddtree_drafts_and_choices(texts, tmp_path):
    worker, _, reqs = admitted(texts, tmp_path, ddtree_module(), plugin.install_ddtree)
    batch = Batch(reqs, [12 + 9, 13 + 4])
    behind = [texts.answers[39][10:12], texts.answers[3][5:7]]
    worker.kind = "tree"
    (ids, logprobs), (_, choices) = worker.forward_batch_generation(batch)
    assert ids.shape == logprobs.shape == (2, 7, 4)
    # In place: a graph reads them where they are.
    assert choices is worker.buffer and choices.tolist() == behind
    worker.kind = "plain"
    drafts, (_, choices) = worker.forward_batch_generation(batch)
    assert drafts is None and choices.tolist() == behind
    worker.kind = "packed"
    _, (_, choices) = worker.forward_batch_generation(batch)
    assert choices.tolist() == [[behind[1][0]], [behind[0][0]], [behind[0][0]]]
    worker.kind = "silent"
    with pytest.raises(RuntimeError, match="passed by the recording"):
        worker.forward_batch_generation(batch)


# --- The load ---------------------------------------------------------------------------------------


class Server:
    """A stand-in: every request gets a token each 2 ms, until it has all or is aborted."""

    def __init__(self):
        self.running, self.most, self.aborted = {}, 0, 0
        ready, self.loop = threading.Event(), asyncio.new_event_loop()

        async def start():
            app = web.Application()
            app.add_routes([web.post("/generate", self.generate), web.post("/abort_request", self.abort)])
            self.runner = web.AppRunner(app)
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
            ready.set()

        def serve():
            asyncio.set_event_loop(self.loop)
            self.loop.run_until_complete(start())
            self.loop.run_forever()

        threading.Thread(target=serve, daemon=True).start()
        ready.wait()

    def stop(self):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def abort(self, request):
        body = await request.json()
        for rid in list(self.running):
            if body.get("abort_all") or rid == body.get("rid"):
                self.running[rid] = True
        return web.Response()

    async def generate(self, request):
        body = await request.json()
        rid, want = body["rid"], body["sampling_params"]["max_new_tokens"]
        self.running[rid] = False
        self.most = max(self.most, len(self.running))
        response = web.StreamResponse()
        await response.prepare(request)

        async def say(count, reason=None):
            meta = {"completion_tokens": count, "finish_reason": reason, "spec_verify_ct": count - 1}
            answer = {"output_ids": list(range(count)), "meta_info": meta}
            await response.write(b"data: " + json.dumps(answer).encode() + b"\n\n")

        begin = asyncio.get_running_loop().time()
        await say(1)
        count = 1
        while count < want and not self.running[rid]:
            await asyncio.sleep(0.002)
            count = min(want, 1 + int((asyncio.get_running_loop().time() - begin) / 0.002))
        self.aborted += self.running.pop(rid) and count < want
        await say(count, {"type": "length" if count == want else "abort"})
        return response


@contextlib.contextmanager
def stand_in():
    server = Server()
    try:
        yield server
    finally:
        server.stop()


def many(tokens):
    key = 0
    while True:
        yield steady.Ask(key, [1, 2], tokens, whole=key > 2)
        key += 1


def test_full_slots_are_counted_and_the_rest_aborted():
    with stand_in() as server:
        found = steady.constant(server.url, many(40), 4, settle=4, count=10, settle_s=5, limit_s=5)
        assert not server.running
    assert found.complete and found.counted >= 10 and server.most == 4 and server.aborted > 0
    # Four slots at 500 tokens a second, less the time between requests.
    assert 300 < found.tokens_per_s < 2100
    assert found.ended and all(len(a.stream.ids) == 40 and a.ask.whole for a in found.ended)
    assert bench_replay.committed_per_round(found.ended) == 1


def test_a_slow_server_is_cut_by_time():
    with stand_in() as server:
        found = steady.constant(server.url, many(2000), 2, settle=50, count=10, settle_s=0.2, limit_s=0.5)
    assert not found.complete and found.counted == 0 and not found.ended
    assert found.end - found.begin == pytest.approx(0.5, abs=0.4)
    assert 400 < found.tokens_per_s < 1200


def test_a_jump_is_seen():
    source = many(2000)
    with stand_in() as server:
        found = steady.jumping(server.url, lambda: next(source), [(1, 0.6), (8, 0.6), (1, 0.6)], step_s=0.3)
        assert not server.running
    # Wall-clock steps of a machine that may be busy: what counts is the order.
    assert [n for n, _ in itertools.groupby(found.requests)] == [1, 8, 1] and 2 <= server.most <= 8
    speeds = {n: [x for m, x in zip(found.requests, found.tokens_per_s, strict=True) if m == n] for n in (1, 8)}
    assert max(speeds[8]) > 2 * min(speeds[1])


# --- Gate, plans, verdicts --------------------------------------------------------------------------


def answered(texts, text, rounds, ids=None):
    answer = texts.answers[text]
    said = [1, *answer[1:]] if ids is None else ids
    stream = steady.Stream(sent=0.0, times=[0.0, 1.0], tokens=[1, len(said)], ids=said)
    stream.meta = {"finish_reason": {"type": "length"}, "spec_verify_ct": rounds}
    return steady.Answer(steady.Ask(text, [], len(answer)), stream, 0)


def test_the_gate(texts):
    rounds = texts.rounds("dflash-8", 8)
    right = answered(texts, 3, rounds[3])
    assert bench_replay.check([right], texts, rounds, recorded=True) == 1
    cut = dataclasses.replace(right, ask=dataclasses.replace(right.ask, whole=False))
    assert bench_replay.check([cut], texts, [0] * 40, recorded=True) == 0
    with pytest.raises(bench_replay.GateFailed, match="rounds"):
        bench_replay.check([answered(texts, 3, rounds[3] + 1)], texts, rounds, recorded=True)
    wrong = [1, *texts.answers[3][1:-1], 0]
    with pytest.raises(bench_replay.GateFailed, match="as recorded"):
        bench_replay.check([answered(texts, 3, rounds[3], wrong)], texts, rounds, recorded=True)
    assert bench_replay.check([answered(texts, 3, rounds[3], wrong)], texts, rounds, recorded=False) == 1


def test_only_speculation_is_replayed(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "has_gpu", lambda: True)
    args = bench_replay.arguments(["--out", str(tmp_path / "out"), "--jump"])
    texts.save(replay := tmp_path / "replay.npz")
    plans = {
        plan.mode: plan for plan in bench_replay.plans_for(args, ["plain", "dflash-8", "ddtree-auto"], texts, replay)
    }
    assert "DDTREE_REPLAY" not in plans["plain"].env and "PYTHONPATH" not in plans["plain"].env
    for mode in ("dflash-8", "ddtree-auto"):
        assert plans[mode].env["DDTREE_REPLAY"] == str(replay) and plans[mode].env["PYTHONPATH"].endswith("replay")
    flags = plans["ddtree-auto"].flags
    assert flags[flags.index("--speculative-ddtree-budget") + 1] == "auto"
    for plan in plans.values():
        assert plan.flags[plan.flags.index("--max-running-requests") + 1] == "256"
        assert plan.flags[plan.flags.index("--cuda-graph-max-bs") + 1] == "256"
        assert plan.flags[plan.flags.index("--load-format") + 1] == "dummy"
        assert (bench_replay.JUMP in plan.points) == (plan.mode == "ddtree-auto")


def test_verdicts():
    def rows(requests, **speed):
        return [{"requests": requests, "mode": m.replace("_", "-"), "tokens_per_s": s} for m, s in speed.items()]

    found = bench_replay.targets(
        rows(1, plain=1.0, dflash_8=2.0, dflash_16=3.0, ddtree_15=4.0, ddtree_auto=4.2)
        + rows(256, plain=10.0, dflash_8=9.0, ddtree_3=9.9, ddtree_auto=9.5)
        + rows(8, plain=1.0)
    )
    assert [verdict.passed for verdict in found] == [True, True, False, False]
    assert all("REPLAY" in verdict.what for verdict in found)
    assert "auto / dflash-16" in found[0].what and "auto / ddtree-15" in found[1].what
    assert "without dflash-16" in found[2].note
