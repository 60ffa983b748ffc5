"""The serving benchmarks without a server: models of a shape, flags, timing, what is kept, tables, targets."""

import argparse
import asyncio
import contextlib
import csv
import json
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from _load import ROOT
from aiohttp import web
from sglang.srt.plugins import load_plugins

load_plugins()
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_round  # noqa: E402
import bench_serving  # noqa: E402
import bench_simulated  # noqa: E402
from serving_bench import auto_rounds, decode, load, report, servers, shapes  # noqa: E402
from sglang.srt.server_args import ServerArgs, prepare_server_args  # noqa: E402
from sglang_ddtree.flags import config_of  # noqa: E402

SHAPES = [shapes.QWEN3_8B, shapes.TINY]


def arguments(tmp_path, *flags):
    parser = argparse.ArgumentParser()
    decode.add_arguments(parser, "out", [1, 8, 32])
    return parser.parse_args(["--out", str(tmp_path / "out"), *flags])


# --- Models of a shape ------------------------------------------------------------------------------


def test_layers_are_spread_as_in_the_trained_drafter():
    config = json.loads((ROOT / "models/smollm2-135m-dflash/config.json").read_text())
    trained = config["dflash_config"]["target_layer_ids"]
    assert shapes.spread_layers(config["num_target_layers"], len(trained)) == trained


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_sglang_accepts_the_folders(shape, tmp_path):
    target, drafter = shapes.write_models(shape, tmp_path)
    flags = ["--model-path", str(target), "--load-format", "dummy", "--skip-tokenizer-init"]
    args = prepare_server_args([*flags, *servers.mode_flags("ddtree-31", drafter, 8)])
    model = args.get_model_config()
    assert model.hf_config.architectures == ["Qwen3ForCausalLM"]
    assert (model.hidden_size, model.num_hidden_layers, model.vocab_size, model.head_dim) == (
        *(shape.hidden_size, shape.layers, shape.vocab_size, shape.head_dim),
    )
    assert model.context_len == shape.context
    # Only a readable DFlash drafter that fits the target gets this far.
    assert config_of(args).block_size == 16 and config_of(args).verify_width == 32


def test_the_8b_shape_has_8b_parameters():
    s = shapes.QWEN3_8B
    heads = (2 * s.heads + 2 * s.kv_heads) * s.head_dim
    layer = s.hidden_size * (heads + 3 * s.intermediate_size)
    assert 8.1e9 < s.layers * layer + 2 * s.vocab_size * s.hidden_size < 8.3e9


HYBRID = shapes.QWEN36_27B


def test_sglang_reads_the_hybrid_shape(tmp_path):
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
    from sglang.srt.configs.model_config import ModelConfig
    from sglang_ddtree import hybrid

    target, drafter = shapes.write_models(HYBRID, tmp_path)
    model = ModelConfig(str(target))
    text = hybrid_gdn_config(model)
    assert (text.hidden_size, text.num_hidden_layers, text.head_dim) == (5120, 64, 256)
    assert text.full_attention_layer_ids == list(range(3, 64, 4)) and len(text.linear_layer_ids) == 48
    assert (text.linear_num_key_heads, text.linear_num_value_heads, text.linear_value_head_dim) == (16, 48, 128)
    assert model.model_is_mrope and sum(text.rope_parameters["mrope_section"]) == text.head_dim / 4 / 2
    assert hybrid.recurrent_layers(model) is hybrid.GDN
    flags = ["--model-path", str(target), "--speculative-algorithm", "DDTREE"]
    config = json.loads((drafter / "config.json").read_text())
    assert config["hidden_size"] == text.hidden_size and len(config["dflash_config"]["target_layer_ids"]) == 5
    if servers.has_gpu():
        return
    with pytest.raises(ValueError, match=r"of type gated delta rule \(GDN\), and SGLang keeps the states .* on a GPU"):
        prepare_server_args([*flags, "--speculative-draft-model-path", str(drafter), "--device", "cpu"])


def test_the_hybrid_shape_has_27b_parameters():
    s, r = HYBRID, HYBRID.recurrent
    keys, values = r.key_heads * r.head_dim, r.value_heads * r.head_dim
    # Queries with their gate; keys, values, gate and output of the recurrence, the two gates per head left out.
    attention = s.hidden_size * s.head_dim * (3 * s.heads + 2 * s.kv_heads)
    recurrence = s.hidden_size * (2 * keys + 3 * values)
    mlp = 3 * s.hidden_size * s.intermediate_size
    attention_layers = s.layers // r.attention_every
    layers = attention_layers * attention + (s.layers - attention_layers) * recurrence + s.layers * mlp
    assert 26.5e9 < layers + 2 * s.vocab_size * s.hidden_size < 27.5e9


def test_servers_of_a_hybrid_have_room_for_its_states_and_no_images(tmp_path):
    args = arguments(tmp_path, "--shape", "qwen3.6-27b", "--requests", "1", "8")
    (plan,) = decode.plans_for(args, ["ddtree-31"], decode.RECORDED)
    flags = dict(zip(plan.flags, plan.flags[1:], strict=False))
    assert flags["--max-running-requests"] == "8" and flags["--max-mamba-cache-size"] == "48"
    assert plan.env["DDTREE_TEST_TEXT_ONLY"] == "1" and plan.env["PYTHONPATH"] == str(ROOT / "tests" / "plugins")
    assert "27B" in decode.model_of(args) and plan.name.startswith("qwen3.6-27b")
    (plan,) = decode.plans_for(arguments(tmp_path), ["ddtree-31"], decode.RECORDED)
    assert "--max-mamba-cache-size" not in plan.flags and "PYTHONPATH" not in plan.env
    assert plan.name.startswith("qwen3-8b")


# --- Flags ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dflash", "ddtree-", "ddtree-x", "ddtree-0", "eagle-3", "plain-1x", ""])
def test_unknown_modes_are_refused(mode):
    with pytest.raises(ValueError, match="a mode is plain, dflash-WIDTH, ddtree-BUDGET or shadow-BUDGET"):
        servers.kind_of(mode)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize(
    "mode, algorithm", [("plain", None), ("dflash-8", "DFLASH"), ("ddtree-15", "DDTREE"), ("shadow-15", "DDTREE")]
)
def test_sglang_knows_every_flag(mode, algorithm, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "has_gpu", lambda: gpu)
    args = arguments(tmp_path)
    (plan,) = decode.plans_for(args, [mode], decode.RECORDED)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    got = parser.parse_args(plan.flags)
    assert got.load_format == "dummy" and got.max_running_requests == 32
    assert got.speculative_algorithm == algorithm
    assert (got.attention_backend == "triton") is gpu
    assert not got.disable_overlap_schedule and not got.disable_cuda_graph


def test_every_mode_gets_the_same_server_but_for_its_own_flags(tmp_path, monkeypatch):
    monkeypatch.setattr(servers, "has_gpu", lambda: True)
    modes = ["plain", "dflash-16", "ddtree-63"]
    common = []
    for plan in decode.plans_for(arguments(tmp_path), modes, decode.RECORDED):
        flags = plan.flags[: plan.flags.index("--max-total-tokens")]
        common.append(flags)
    assert common[0] == common[1] == common[2]


def test_acceptance_is_forced_by_the_environment(tmp_path):
    args = arguments(tmp_path)
    plain, chain, tree = decode.plans_for(args, ["plain", "dflash-16", "ddtree-15"], decode.RECORDED)
    assert plain.env == {}
    assert chain.env == {"SGLANG_SIMULATE_ACC_LEN": "3.223"} and tree.env == {"SGLANG_SIMULATE_ACC_LEN": "4.013"}
    (one,) = decode.plans_for(args, ["ddtree-15"], "1")
    assert one.env == {"SGLANG_SIMULATE_ACC_LEN": "1.0"} and one.file_name != tree.file_name


def test_a_rate_that_was_not_recorded_is_named():
    with pytest.raises(SystemExit, match="no rate was recorded for ddtree-20"):
        decode.rate_of("ddtree-20", decode.RECORDED)
    assert decode.rate_of("ddtree-20", "2.5") == 2.5
    with pytest.raises(argparse.ArgumentTypeError, match="at least 1, got 0.5"):
        decode.accept_length_argument("0.5")


def test_without_a_gpu_nothing_is_measured_but_a_smoke_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(servers, "has_gpu", lambda: False)
    with pytest.raises(SystemExit, match="--smoke"):
        decode.settle_arguments(arguments(tmp_path))
    assert servers.select_modes(["plain", "dflash-16", "ddtree-7"], None) == ["plain", "ddtree-7"]
    assert "DFLASH, width 16: skipped" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no mode is left"):
        servers.select_modes([], ["dflash-16"])
    with pytest.raises(SystemExit, match="got 'tree'"):
        servers.select_modes([], ["tree"])


def test_prompts_share_no_prefix_and_stay_the_same():
    prompts = decode.make_prompts(8, 20, 320)
    assert [len(prompt) for prompt in prompts] == [20] * 8 and len({prompt[0] for prompt in prompts}) > 4
    assert prompts[:3] == decode.make_prompts(3, 20, 320)
    assert all(0 <= token < 320 for prompt in prompts for token in prompt)


def test_recorded_prompts_are_the_beginnings_of_the_recorded_texts():
    data = np.load(bench_serving.PROMPTS)
    prompts = bench_serving.recorded_prompts(bench_serving.PROMPTS)
    assert [name for name, _ in prompts[:6]] == ["humaneval", "gsm8k", "mtbench"] * 2
    assert sorted(len(ids) for _, ids in prompts) == sorted(data["P"].tolist())
    assert prompts[0][1] == data["ids"][: data["P"][0]].tolist()
    assert len(bench_serving.prompts_for(1, prompts)) == len(bench_serving.prompts_for(8, prompts)) == 40
    assert len(bench_serving.prompts_for(32, prompts)) == 160


# --- Timing -----------------------------------------------------------------------------------------


def stream(times, tokens, rounds=None, **meta):
    made = load.Stream(sent=0.0, times=times, tokens=tokens)
    made.meta = {**({} if rounds is None else {"spec_verify_ct": rounds}), **meta}
    return made


def test_a_chunk_is_a_round_where_their_numbers_agree():
    assert stream([0, 1, 2, 3], [1, 5, 9, 10], rounds=3).rounds == [0, 1, 2, 3]
    assert stream([0, 1, 2], [1, 2, 3]).rounds == [0, 1, 2]
    # Three rounds in two chunks: by tokens.
    assert stream([0, 1, 2], [1, 5, 7], rounds=3).rounds == [0, 2, 3]
    assert stream([0.0], [1]).rounds == [0]


def test_time_per_token_leaves_the_first_one_out():
    assert stream([0.5, 1.5], [1, 11]).ms_per_output_token == pytest.approx(100)
    assert stream([0.5], [1]).ms_per_output_token is None
    assert stream([0.5], [1]).ms_to_first_token == 500


def test_the_window_holds_full_batches_alone():
    # Alone until 2.0 a round takes 0.1 s, then 0.2 s, until the other one ends at 4.0.
    times = [1.0 + 0.1 * i for i in range(11)] + [2.0 + 0.2 * i for i in range(1, 11)] + [4.1]
    probe = stream(times, [1 + 2 * i for i in range(len(times))], rounds=len(times) - 1)
    window = load.full_batch_window([probe, stream([2.0, 4.0], [1, 21], rounds=10)], block=5)
    assert window.ms_per_round == pytest.approx([200, 200])
    assert (window.seconds, window.rounds, window.tokens) == (pytest.approx(2.0), 10, 20)
    found = decode.summarize([window, window])
    assert found["mean_ms"] == pytest.approx(200) and found["committed_per_round"] == 2 and found["rounds"] == 20
    with pytest.raises(load.RequestFailed, match="less than 11 rounds"):
        load.full_batch_window([probe, stream([2.0, 4.0], [1, 21], rounds=10)], block=11)


@contextlib.contextmanager
def fake_server(answer):
    """An HTTP server in a thread whose /generate is ``answer(request)``; yields its URL."""
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)

    async def start():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return site._server.sockets[0].getsockname()[1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def chunk(tokens, finish=None, **meta):
    return {
        "output_ids": list(range(tokens)),
        "meta_info": {"completion_tokens": tokens, "finish_reason": finish, **meta},
    }


async def reply(request, *chunks):
    response = web.StreamResponse()
    await response.prepare(request)
    for content in chunks:
        await response.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        await asyncio.sleep(0.02)
    await response.write(b"data: [DONE]\n\n")
    return response


def test_a_closed_loop_keeps_its_number_and_its_order():
    running, most, asked = 0, 0, []

    async def answer(request):
        nonlocal running, most
        body = await request.json()
        asked.append(body)
        running += 1
        most = max(most, running)
        end = chunk(body["input_ids"][0], {"type": "length"}, spec_verify_ct=2, spec_num_correct_drafts=3)
        response = await reply(request, chunk(1), end)
        running -= 1
        return response

    with fake_server(answer) as url:
        streams, seconds = load.closed_loop(url, [[n] for n in range(2, 12)], 3, {"max_new_tokens": 9})
    assert [s.tokens for s in streams] == [[1, n] for n in range(2, 12)]
    assert [len(s.ids) for s in streams] == list(range(2, 12))
    assert most == 3 and seconds > 0.1
    assert asked[0]["stream"] and asked[0]["sampling_params"]["max_new_tokens"] == 9
    assert asked[0]["sampling_params"]["temperature"] == 0 and asked[0]["sampling_params"]["stream_interval"] > 1000
    assert bench_serving.committed_per_round(streams) == 2.5


def test_all_at_once_streams_every_round_of_the_first_alone():
    intervals = []

    async def answer(request):
        body = await request.json()
        intervals.append((body["input_ids"][0], body["sampling_params"]["stream_interval"]))
        return await reply(request, chunk(1), chunk(5), chunk(7, {"type": "length"}, spec_verify_ct=2))

    with fake_server(answer) as url:
        streams = load.all_at_once(url, [[0], [1], [2]], {})
    assert streams[0].rounds == [0, 1, 2]
    assert [interval for _, interval in sorted(intervals)] == [1, load._NEVER, load._NEVER]


@pytest.mark.parametrize(
    "chunks, message",
    [
        ([], "without an end"),
        ([chunk(1)], "without an end"),
        ([{"error": {"message": "out of memory"}}], "out of memory"),
        ([chunk(1, {"type": "abort", "message": "gone"})], "aborted.*gone"),
    ],
)
def test_a_broken_stream_is_an_error(chunks, message):
    async def answer(request):
        return await reply(request, *chunks)

    with fake_server(answer) as url, pytest.raises(load.RequestFailed, match=message):
        load.closed_loop(url, [[1]], 1, {})


def test_a_refused_request_is_an_error():
    async def answer(request):
        return web.Response(status=400, text="no such thing")

    with fake_server(answer) as url, pytest.raises(load.RequestFailed, match="HTTP 400: no such thing"):
        load.all_at_once(url, [[1]], {})


# --- What is kept -----------------------------------------------------------------------------------


class FakeServer:
    """Stands in for BenchServer: dies if its flags say so."""

    events: list[str] = []

    def __init__(self, flags, log, env):
        self.name = flags[0]
        self.events.append(f"start {self.name}")

    def wait_ready(self, timeout_s):
        if self.name == "dying":
            raise RuntimeError("exit code 1\nand a log")
        self.events.append(f"ready {self.name}")
        return 1.0

    def get(self, path):
        assert path == "/server_info"
        return {"max_total_num_tokens": 100, "disable_overlap_schedule": False}

    def stop(self):
        if f"stop {self.name}" not in self.events:
            self.events.append(f"stop {self.name}")


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(servers, "BenchServer", FakeServer)
    monkeypatch.setattr(FakeServer, "events", [])
    return lambda: FakeServer.events


def plan_of(mode, name, *points, **conditions):
    return servers.Plan(mode=mode, flags=[name], points=list(points), conditions=conditions)


def test_an_interrupted_run_goes_on(events, tmp_path):
    def breaks(server, plan, point, record):
        if point == "b":
            raise RuntimeError("interrupted")
        return {"value": point}

    plan = plan_of("plain", "one", "a", "b", "c", tokens=(1, 2))
    records, errors = servers.measure_plans([plan], tmp_path, {"code": "x"}, breaks)
    assert errors == {"plain": "broke off: RuntimeError: interrupted"} and list(records["plain"].points) == ["a"]
    assert events() == ["start one", "ready one", "stop one"]

    asked = []
    records, errors = servers.measure_plans(
        [plan], tmp_path, {"code": "x"}, lambda server, plan, point, record: asked.append(point) or {"value": point}
    )
    assert asked == ["b", "c"] and not errors and list(records["plain"].points) == ["a", "b", "c"]
    assert records["plain"].settings["kv_tokens"] == 100 and records["plain"].settings["overlap"] == "on"

    del events()[:]
    records, _ = servers.measure_plans([plan], tmp_path, {"code": "x"}, breaks)
    assert events() == [] and records["plain"].points["c"] == {"value": "c"}


@pytest.mark.parametrize("change", ["identity", "flags", "conditions"])
def test_results_of_other_conditions_are_measured_again(change, events, tmp_path):
    def measure(server, plan, point, record):
        return change

    servers.measure_plans([plan_of("plain", "one", "a", n=1)], tmp_path, {"code": "x"}, lambda *_: "old")
    other = plan_of("plain", "two" if change == "flags" else "one", "a", n=2 if change == "conditions" else 1)
    identity = {"code": "y" if change == "identity" else "x"}
    records, _ = servers.measure_plans([other], tmp_path, identity, measure)
    assert records["plain"].points == {"a": change}


def test_servers_start_together_and_one_failure_leaves_the_others(events, tmp_path):
    plans = [plan_of("plain", "one", "a"), plan_of("dflash-16", "dying", "a"), plan_of("ddtree-7", "three", "a")]

    def measure(server, plan, point, record):
        events().append(f"measure {server.name}")
        return 1

    records, errors = servers.measure_plans(plans, tmp_path, {}, measure, together=2)
    assert errors == {"dflash-16": "did not start: RuntimeError: exit code 1"}
    assert records["dflash-16"].points == {} and records["ddtree-7"].points == {"a": 1}
    assert events() == [
        *("start one", "start dying", "ready one", "stop dying", "measure one", "stop one"),
        *("start three", "ready three", "measure three", "stop three"),
    ]


def test_servers_take_turns_point_by_point_and_auto_starts_alone(events, tmp_path):
    plans = [
        plan_of("ddtree-auto", "one", "a", "b", "c"),
        plan_of("plain", "two", "a", "b"),
        plan_of("ddtree-7", "three", "b"),
    ]
    measured = []

    def measure(server, plan, point, record):
        measured.append((server.name, point))
        if (server.name, point) == ("two", "a"):
            raise RuntimeError("broken")
        return point

    records, errors = servers.measure_plans(plans, tmp_path, {}, measure, together=3)
    assert measured == [("two", "a"), ("one", "a"), ("three", "b"), ("one", "b"), ("one", "c")]
    assert list(errors) == ["plain"] and list(records["ddtree-auto"].points) == ["a", "b", "c"]
    assert events()[:6] == ["start two", "start three", "ready two", "ready three", "start one", "ready one"]
    assert events()[6] == "stop two"


def test_what_a_server_says_of_graphs_and_overlap():
    info = {
        "cuda_graph_config": {"decode": {"backend": "full"}},
        "disable_overlap_schedule": True,
        "speculative_num_draft_tokens": 16,
        "internal_states": [{"startup_time": {"cuda_graph": {"decode": 0.0, "target_verify": 1.5, "draft_decode": 2}}}],
    }
    found = servers.settings_of(info)
    assert (found["decode_graphs"], found["captured"]) == ("full", "target_verify draft_decode")
    assert (found["overlap"], found["verify_width"]) == ("off", 16)
    assert servers.settings_of({})["overlap"] == "unknown" and servers.settings_of({})["captured"] == "none"


# --- The gate ---------------------------------------------------------------------------------------


def test_the_gate_demands_equality_in_float32_alone():
    expected = [[1, 2, 3, 4, 5, 6]] * 4
    late = [*expected[:3], [1, 2, 3, 4, 9, 9]]
    assert "3 of 4 answers equal, 4 begin alike" in bench_serving.check_gate(late, expected, exact=False)
    with pytest.raises(bench_serving.GateFailed, match="3 of 4 answers equal.*float32"):
        bench_serving.check_gate(late, expected, exact=True)
    assert bench_serving.check_gate(expected, expected, exact=True).startswith("4 of 4")


def test_the_gate_stops_garbage_in_bfloat16():
    expected = [[1, 2, 3, 4, 5]] * 8
    garbage = [[1, 2, 9, 9, 9]] * 3 + expected[:5]
    with pytest.raises(bench_serving.GateFailed, match="5 of 8 answers equal, 5 begin alike"):
        bench_serving.check_gate(garbage, expected, exact=False)
    # An answer shorter than the prefix that is compared.
    assert bench_serving.check_gate([[7, 8]], [[7, 8]], exact=False).startswith("1 of 1")


# --- Tables and targets -----------------------------------------------------------------------------


def rows_of(key, values, **more):
    return [
        {"context": 128, "requests": n, "mode": mode, key: value, **more}
        for mode, by_requests in values.items()
        for n, value in by_requests.items()
    ]


def test_a_verdict_at_its_limit_passes():
    assert report.Verdict("x", 1.03, 1.03, at_most=True).passed and report.Verdict("x", 1.3, 1.3).passed
    missed = report.Verdict("round", 1.0312, 1.03, at_most=True, note="why")
    assert str(missed) == "FAIL  round: 1.031, target at most 1.030 (why)"


def test_round_targets():
    rows = rows_of("ms_per_round", {"dflash-16": {1: 7.0, 8: 8.0, 32: 20.0}, "ddtree-15": {1: 7.0, 8: 8.8}})
    rows += [{**row, "context": 8192, "ms_per_round": 99.0} for row in rows]
    assert [(v.what, v.got, v.passed) for v in bench_round.targets(rows)] == [
        ("1 requests, round of ddtree-15 / dflash-16", 1.0, True),
        ("8 requests, round of ddtree-15 / dflash-16", pytest.approx(1.1), False),
    ]
    assert bench_round.targets([]) == []


def test_simulated_targets_take_the_best_of_either_side():
    speeds = {
        "plain": {1: 999.0},
        "dflash-8": {1: 100.0, 8: 120.0},
        "dflash-16": {1: 110.0, 8: 100.0},
        "ddtree-7": {1: 120.0, 8: 132.0, 32: 50.0},
        "ddtree-63": {1: 154.0, 8: 90.0},
    }
    first, second = bench_simulated.targets(rows_of("tokens_per_s", speeds))
    assert (first.what, first.got, first.passed) == (
        "1 requests, simulated, ddtree-63 / dflash-16",
        pytest.approx(1.4),
        True,
    )
    assert (second.what, second.got, second.passed) == (
        *("8 requests, simulated, ddtree-7 / dflash-8", pytest.approx(1.1), False),
    )
    del speeds["dflash-8"]
    assert "(without dflash-8)" in str(bench_simulated.targets(rows_of("tokens_per_s", speeds))[0])


@pytest.mark.parametrize(
    "requests, speed, committed, limit, passed",
    [
        (1, 1.09, 1.20, 1.08, True),
        (1, 1.07, 1.20, 1.08, False),
        (1, 1.07, 1.08, 1.08, False),
        # The committed tokens do not allow 1.08: 0.97 of what they allow.
        (1, 1.03, 1.05, 0.97 * 1.05, True),
        (1, 1.01, 1.05, 0.97 * 1.05, False),
        (32, 1.03, 1.20, 1.03, True),
    ],
)
def test_serving_targets(requests, speed, committed, limit, passed):
    got = bench_serving.verdict(requests, "ddtree-15", speed, committed)
    assert got.limit == pytest.approx(limit) and got.passed is passed
    rows = [
        {"requests": requests, "mode": "dflash-16", "tokens_per_s": 100.0, "committed_per_round": 2.0},
        {
            **{"requests": requests, "mode": "ddtree-15"},
            **{"tokens_per_s": 100.0 * speed, "committed_per_round": 2.0 * committed},
        },
    ]
    (same,) = bench_serving.targets(rows, "ddtree-15")
    assert same.got == pytest.approx(speed) and same.limit == pytest.approx(limit)
    assert f"| {requests} | {speed:.3f} | {committed:.3f} | - | - |" in bench_serving.ratios(rows, "ddtree-15")


def test_simulated_tokens_per_second_are_at_the_exact_rate():
    plan = plan_of("ddtree-15", "x", "8 x 128", "32 x 128", "2 x 128", rate=4.0)
    points = {
        "8 x 128": {"ms_per_round": 9.9, "mean_ms": 10.0, "committed_per_round": 3.9},
        "32 x 128": {"skipped": "needs 9 KV tokens, there are 8"},
    }
    rows = decode.result_rows([plan], {"ddtree-15": SimpleNamespace(points=points)}, {"ddtree-15": "broke off: x"})
    assert rows[0]["tokens_per_s"] == 8 * 4.0 * 100
    assert [row.get("error") for row in rows] == [None, "needs 9 KV tokens, there are 8", "broke off: x"]
    assert decode.pivot(rows, lambda row: f"{row['tokens_per_s']:.0f}", False) == (
        "|  | 8 requests | 32 requests | 2 requests |\n|---|---|---|---|\n| DDTREE, budget 15 | 3200 | - | - |"
    )
    assert "- DDTREE, budget 15, 2 x 128 requests: broke off: x" in report.problems(rows)


def test_spread_and_tables():
    assert report.spread([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == (3.5, 2.0, 5.0)
    assert report.spread([7.0]) == (7.0, 7.0, 7.0)
    columns = [("a", lambda row: row["a"]), ("b", lambda row: f"{row['b']:.1f}")]
    assert (
        report.markdown_table([{"a": 1, "b": 2}, {"a": 3}], columns) == "| a | b |\n|---|---|\n| 1 | 2.0 |\n| 3 | - |"
    )


def make_report(smoke):
    return report.Report(
        title="Milliseconds of something",
        model="a model",
        notes=["a note"],
        tables=["a table"],
        rows=[
            {"context": 16, "requests": 1, "mode": "plain", "ms": 2.0},
            {"context": 16, "requests": 1, "mode": "ddtree-7", "error": "did not start"},
        ],
        settings={"plain": servers.settings_of({})},
        verdicts=[report.Verdict("x", 2.0, 1.0)],
        y_name="ms",
        y_key="ms",
        smoke=smoke,
    )


def test_a_report_says_what_it_is(tmp_path):
    make_report(smoke=False).write(tmp_path / "new" / "real", "abc1234")
    text = (tmp_path / "new" / "real.md").read_text()
    for part in (
        "## Milliseconds of something\n",
        "commit abc1234, code ",
        "- PASS  x",
        "did not start",
        "| no speculation |",
    ):
        assert part in text
    assert str(ROOT) not in text
    with (tmp_path / "new" / "real.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["ms"] for row in rows] == ["2.0", ""] and rows[0]["label"] == "Milliseconds of something"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        assert not report.plot_lines(tmp_path / "none.png", "t", "y", {"": [("a", [1], [1.0])]})


def test_a_smoke_run_is_labelled_and_not_judged(tmp_path):
    make_report(smoke=True).write(tmp_path / "smoke", None)
    text = (tmp_path / "smoke.md").read_text()
    assert "(smoke run)" in text and report.SMOKE_LABEL in text and "PASS" not in text and "not judged" in text
    assert "smoke run" in (tmp_path / "smoke.csv").read_text()


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    make_report(smoke=False).write(tmp_path / "real", None)
    assert (tmp_path / "real.png").read_bytes().startswith(b"\x89PNG")


# --- What the budget auto decided.


METRICS = """# HELP sglang:ddtree_auto_verify_tokens Verify tokens
sglang:ddtree_auto_verify_tokens_bucket{le="8.0",tp_rank="0"} 3.0
sglang:ddtree_auto_verify_tokens_count{tp_rank="0"} ROUNDS
sglang:ddtree_auto_verify_tokens_sum{tp_rank="0"} TOKENS
sglang:ddtree_auto_plain_rounds_total{tp_rank="0"} 5.0
sglang:ddtree_auto_narrow_rounds_total{tp_rank="0"} HALF
sglang:ddtree_auto_narrow_rounds_total{tp_rank="1"} HALF
sglang:ddtree_auto_probe_rounds_total{tp_rank="0"} 0.0
sglang:ddtree_auto_forecast_tokens_total{tp_rank="0"} 400.0
sglang:ddtree_auto_expected_tokens_total{tp_rank="0"} 500.0
sglang:ddtree_auto_committed_tokens_total{tp_rank="0"} COMMITTED
sglang:num_running_reqs{tp_rank="0"} 7.0
"""


def metrics_of(rounds: int, tokens: int, half: int, committed: int) -> str:
    text = METRICS.replace("ROUNDS", str(rounds)).replace("TOKENS", str(tokens))
    return text.replace("HALF", str(half)).replace("COMMITTED", str(committed))


def test_what_was_decided_between_two_readings():
    before = auto_rounds.sums("")
    middle, after = (auto_rounds.sums(metrics_of(*numbers)) for numbers in ((10, 640, 1, 300), (30, 1040, 3, 700)))
    assert "num_running_reqs" not in str(after) and after["narrow_rounds_total"] == 6
    first = auto_rounds.between(before, middle)
    assert first["rounds"] == 10 and first["plain"] == 0.5 and first["committed_per_expected"] == 0.6
    grown = {**middle, "forecast_tokens_total": 0.0, "expected_tokens_total": 0.0}
    second = auto_rounds.between(grown, after)
    assert second["rounds"] == 20 and second["verify_tokens"] == 20 and second["plain"] == 0
    assert second["narrow"] == 0.2 and second["committed"] == 20 and second["committed_per_forecast"] == 1
    assert auto_rounds.between(after, after) == {}
    assert "20 rounds of 20 tokens, 0% plain, 20% half a block" in auto_rounds.in_words(second)


def test_only_a_server_with_the_budget_auto_is_asked():
    readings = [metrics_of(10, 640, 1, 300), metrics_of(10, 640, 1, 300), metrics_of(10, 640, 1, 300), ""]
    server = SimpleNamespace(text=lambda path: readings.pop(0))
    with auto_rounds.watched(server, "ddtree-15") as found:
        pass
    assert found == {} and len(readings) == 4
    with auto_rounds.watched(server, "ddtree-auto") as found:
        assert len(readings) == 3
    assert found == {} and len(readings) == 2
