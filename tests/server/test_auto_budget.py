"""The budget auto in a server: the tokens are those of no speculation, whatever it decides.

On a CPU there is nothing to time, so that it verifies a fixed share; on a GPU its graphs are captured and timed.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from pairs import BLOCK_SIZE, DEVICE_ROUND, Pair
from serving import Server, accepted_drafts_histogram, output_ids

DEPTH = BLOCK_SIZE - 1
ON_GPU = torch.cuda.is_available()
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"0123456789 " * 6)]
SCRIPTS: dict[str, list[list[int]] | None] = {
    "side branches": [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH],
    "real drafter": None,
}


def auto(pair: Pair, name: str, *flags: str, env: dict[str, str] | None = None) -> Server:
    folder = str(pair.folder / "costs")
    chosen = ("--speculative-ddtree-budget", "auto", "--enable-metrics", *flags)
    return pair.server(name, *chosen, env={"SGLANG_DDTREE_CACHE_DIR": folder, **(env or {})})


def script(pair: Pair, ranks: list[list[int]] | None) -> None:
    pair.script(**({} if ranks is None else {"ranks": ranks}))


def metrics(server: Server) -> dict[str, float]:
    """The sums of this package's metrics by name."""
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("sglang:ddtree")]
    found: dict[str, float] = {}
    for line in lines:
        name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
        found[name] = found.get(name, 0.0) + value
    return found


def assert_exact(pair: Pair, server: Server, name: str, **length: Any) -> list[Any]:
    expected = pair.expected(PROMPTS, **length)
    script(pair, SCRIPTS[name])
    answers = server.generate(PROMPTS, **length)
    assert output_ids(answers) == expected
    return answers


@pytest.mark.feature("`--speculative-ddtree-budget auto`")
@pytest.mark.parametrize("name", SCRIPTS)
def test_greedy_tokens(qwen3: Pair, name: str) -> None:
    server = auto(qwen3, "auto")
    answers = assert_exact(qwen3, server, name, max_new_tokens=40, ignore_eos=True)
    if name == "side branches":
        reports = [answer["meta_info"]["ddtree"] for answer in answers]
        assert sum(report["committed_tokens"] for report in reports) > sum(report["rounds"] for report in reports)
    server.assert_pool_empty()


def test_what_it_says_of_itself(qwen3: Pair) -> None:
    server = auto(qwen3, "auto")
    about = json.loads(server.get("/server_info"))["ddtree"]
    assert about["budget"] == "auto" and about["max_budget"] == 63
    before = metrics(server)
    script(qwen3, SCRIPTS["side branches"])
    server.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)
    after = metrics(server)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    committed = grown["sglang:ddtree_auto_committed_tokens_total"]
    assert committed >= 3 * 19
    assert grown["sglang:ddtree_auto_expected_tokens_total"] > 0
    assert grown["sglang:ddtree_auto_verify_tokens_count"] > 0
    log = (qwen3.folder / "auto.log").read_text()
    assert ("there are no times to decide by: every request has about 15 nodes" in log) == (not ON_GPU)


def test_the_default(qwen3: Pair) -> None:
    """Auto where rounds have times, else 15 nodes, and the log says why."""
    server = qwen3.server("default", env={"SGLANG_DDTREE_CACHE_DIR": str(qwen3.folder / "costs")})
    assert json.loads(server.get("/server_info"))["ddtree"]["budget"] == ("auto" if ON_GPU else 15)
    log = (qwen3.folder / "default.log").read_text()
    assert ("budget 15 instead of auto: rounds on a CPU have no times to decide by" in log) == (not ON_GPU)
    assert_exact(qwen3, server, "side branches", max_new_tokens=40, ignore_eos=True)
    server.assert_pool_empty()
    qwen3.stop("default")


WIDTHS = (BLOCK_SIZE // 2, BLOCK_SIZE)


def assert_drafted_at_all_widths(pair: Pair, name: str) -> None:
    log = (pair.folder / f"{name}.log").read_text()
    assert all(f"a round drafts {width} positions" in log for width in WIDTHS)


@pytest.mark.feature("`--speculative-ddtree-budget auto`")
@pytest.mark.parametrize("name", SCRIPTS)
def test_drafts_of_changing_length(qwen3: Pair, name: str) -> None:
    """Rounds that draft the drafter's block or half of it, in no order, and verify any number of tokens."""
    server = auto(qwen3, "auto-random", env={"DDTREE_TEST_ROUNDS": "3"})
    answers = assert_exact(qwen3, server, name, max_new_tokens=60, ignore_eos=True)
    assert_drafted_at_all_widths(qwen3, "auto-random")
    if name == "side branches":
        reports = [answer["meta_info"]["ddtree"] for answer in answers]
        assert sum(report["committed_tokens"] for report in reports) > sum(report["rounds"] for report in reports)
    server.assert_pool_empty()


@pytest.mark.parametrize("name", SCRIPTS)
def test_uniform_rounds_of_changing_width(qwen3: Pair, name: str) -> None:
    """As hybrid targets have them, which no CPU runs: as many nodes for every request, another number every round."""
    env = {"DDTREE_TEST_ROUNDS": "4", "DDTREE_TEST_UNIFORM": "1"}
    server = auto(qwen3, "auto-uniform", "--speculative-ddtree-max-budget", "20", env=env)
    before = metrics(server)
    answers = assert_exact(qwen3, server, name, max_new_tokens=60, ignore_eos=True)
    log = (qwen3.folder / "auto-uniform.log").read_text()
    assert all(f"a round verifies {nodes} nodes per request" in log for nodes in (1, 4, 8, 16, 21))
    grown = {key: value - before.get(key, 0.0) for key, value in metrics(server).items()}
    # Rounds that were learnt from, and plain ones.
    assert grown["sglang:ddtree_auto_expected_tokens_total"] > 0 < grown["sglang:ddtree_auto_plain_rounds_total"]
    if name == "side branches":
        reports = [answer["meta_info"]["ddtree"] for answer in answers]
        assert sum(report["committed_tokens"] for report in reports) > sum(report["rounds"] for report in reports)
    server.assert_pool_empty()


def test_a_short_draft_goes_as_deep_as_it_is_long(qwen3: Pair) -> None:
    """A target that accepts all that is drafted: three drafts and the bonus token a round, of half a block of 8."""
    server = auto(qwen3, "auto-narrow", env={"DDTREE_TEST_DRAFT_WIDTH": str(WIDTHS[0])})
    length = dict(max_new_tokens=41, ignore_eos=True)
    expected = qwen3.expected(PROMPTS[:1], **length)
    qwen3.script(ranks=[[0] * DEPTH])
    (answer,) = server.generate(PROMPTS[:1], **length)
    assert answer["output_ids"] == expected[0]
    assert accepted_drafts_histogram(answer) == {WIDTHS[0] - 1: 10}
    qwen3.stop("auto-narrow")


def test_drafts_of_changing_length_on_the_device(qwen3: Pair) -> None:
    """The same by the device's kernels and with overlap; without a GPU they are interpreted, hence so little of it."""
    flags = ("--speculative-ddtree-max-budget", "7", "--attention-backend", "triton", "--page-size", "16")
    server = auto(qwen3, "auto-device", *flags, env=DEVICE_ROUND | {"DDTREE_TEST_ROUNDS": "2"})
    length = dict(max_new_tokens=20, ignore_eos=True)
    expected = qwen3.expected(PROMPTS[:2], **length)
    script(qwen3, SCRIPTS["side branches"])
    answers = server.generate(PROMPTS[:2], **length)
    assert output_ids(answers) == expected
    assert_drafted_at_all_widths(qwen3, "auto-device")
    qwen3.stop("auto-device")


@pytest.mark.gpu
def test_graphs_of_every_width_draft_what_the_drafter_does_without(qwen3: Pair) -> None:
    """Compared in the server, round by round, at batches of several sizes; a difference ends it."""
    flags = ("--attention-backend", "triton", "--page-size", "16")
    env = {"DDTREE_TEST_ROUNDS": "9", "DDTREE_TEST_COMPARE_DRAFTS": "1"}
    server = auto(qwen3, "auto-compared", *flags, env=env)
    for count in (1, 3, 13):
        prompts = [list(b"%d and some more " % i * (1 + i % 5)) for i in range(count)]
        length = dict(max_new_tokens=30, ignore_eos=True)
        assert output_ids(server.generate(prompts, **length)) == qwen3.expected(prompts, **length)
    log = (qwen3.folder / "auto-compared.log").read_text()
    assert all(f"drafts of {width} positions are as without graphs" in log for width in WIDTHS)
    qwen3.stop("auto-compared")


@pytest.mark.gpu
@pytest.mark.feature("`--speculative-ddtree-budget auto`")
@pytest.mark.parametrize("page_size, overlap", [("1", True), ("16", True), ("16", False)])
@pytest.mark.parametrize("rounds", ["decided", "random"])
def test_graphs(qwen3: Pair, rounds: str, page_size: str, overlap: bool) -> None:
    name = f"auto-gpu-{rounds}-{page_size}-{overlap}"
    flags = ["--attention-backend", "triton", "--page-size", page_size]
    flags += [] if overlap else ["--disable-overlap-schedule"]
    server = auto(qwen3, name, *flags, env={"DDTREE_TEST_ROUNDS": "5"} if rounds == "random" else {})
    for shape in SCRIPTS:
        for _ in range(3):
            assert_exact(qwen3, server, shape, max_new_tokens=41, ignore_eos=True)
    server.assert_pool_empty()
    # Many requests that join and end in mid-batch.
    prompts = [list(b"%d and some more " % i * (1 + i % 5)) for i in range(40)]
    params = [dict(temperature=0, ignore_eos=True, max_new_tokens=3 + 7 * i % 40) for i in range(40)]
    body = {"input_ids": prompts, "sampling_params": params}
    script(qwen3, None)
    assert output_ids(server.post("/generate", body)) == output_ids(qwen3.plain.post("/generate", body))
    sampled = server.generate(PROMPTS, temperature=0.8, top_p=0.9, max_new_tokens=30, ignore_eos=True)
    assert all(len(ids) == 30 for ids in output_ids(sampled))
    log = (qwen3.folder / f"{name}.log").read_text()
    assert "ms per round by requests and verify tokens" in log or "cost table from" in log
    assert f"drafts of {WIDTHS[0]} positions run from CUDA graphs of their own" in log
    if rounds == "random":
        assert_drafted_at_all_widths(qwen3, name)
    qwen3.stop(name)
