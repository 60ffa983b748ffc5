"""A server with recorded drafts and a recorded target: it says the recorded text, in the rounds computed offline.

The benchmark of that name rests on it. Packed rounds and rounds without a draft say the same text. DFLASH's own hooks
need a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny_models
from launcher import ServerDied
from pairs import BLOCK_SIZE, DEVICE_ROUND, Pair
from serving import HERE, Server, committed_per_round
from test_bench_smoke import BENCHMARKS, run

sys.path.insert(0, str(BENCHMARKS))

import recorded_drafts  # noqa: E402
from serving_bench.recorded_texts import Texts  # noqa: E402

CONTEXT = 24
REPLAY = str(BENCHMARKS / "replay")


@pytest.fixture(scope="module")
def texts() -> Texts:
    recorded = recorded_drafts.load(HERE / "data" / "recorded-drafts-sample.npz")
    return Texts(recorded, tiny_models.VOCABULARY, BLOCK_SIZE - 1)


@pytest.fixture(scope="module")
def recording(texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "replay.npz"
    texts.save(path)
    return path


def replay(pair: Pair, recording: Path, name: str, *flags: str, env: dict[str, str] | None = None) -> Server:
    env = {"PYTHONPATH": REPLAY, "DDTREE_REPLAY": str(recording), **(env or {})}
    return pair.server(f"replay-{name}", "--load-format", "dummy", *flags, env=env)


def ask(server: Server, texts: Texts, chosen: list[int], serial: int) -> list[dict]:
    """Whole answers to the chosen texts, all at once."""
    prompts = [texts.prompt(text, serial + i, CONTEXT) for i, text in enumerate(chosen)]
    params = [{"temperature": 0, "max_new_tokens": len(texts.answers[text]), "ignore_eos": True} for text in chosen]
    answers = server.post("/generate", {"input_ids": prompts, "sampling_params": params})
    for text, answer in zip(chosen, answers, strict=True):
        # The first token is prefill's, of the random model.
        assert answer["output_ids"][1:] == texts.answers[text][1:]
    return answers


def rounds(answers: list[dict]) -> list[int]:
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


# The benchmark that rests on this runs on a GPU, and so do these; all of them pass on a CPU too, in seven minutes.
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode, flags", [("ddtree-15", ("--speculative-ddtree-budget", "15")), ("shadow-15", ())])
def test_rounds_are_those_of_the_recording(
    qwen3: Pair, texts: Texts, recording: Path, mode: str, flags: tuple[str, ...]
) -> None:
    """A tree and the chain, which is what DFLASH of this width drafts; texts alone and side by side."""
    flags = flags or ("--speculative-ddtree-shadow-linear",)
    server = replay(qwen3, recording, mode, *flags)
    expected = texts.rounds(mode, topk_cap=8)
    assert expected is not None
    answers = []
    for serial, text in enumerate(texts.order[:3]):
        answers += ask(server, texts, [text], serial)
    answers += ask(server, texts, texts.order[3:9], serial=100)
    assert rounds(answers) == [expected[text] for text in texts.order[:9]]
    tokens = sum(len(texts.answers[text]) - 1 for text in texts.order[:9])
    # The last round may accept tokens behind the text's end: none, here, since nothing drafted is the filler.
    assert committed_per_round(answers) == pytest.approx(tokens / sum(rounds(answers)), abs=9 / sum(rounds(answers)))
    # The recording accepts far more than random models do.
    assert tokens / sum(rounds(answers)) > 2


def test_rounds_of_changing_shape_say_the_same_text(qwen3: Pair, texts: Texts, recording: Path) -> None:
    """Packed rounds, whose rows have owners, and rounds that draft nothing."""
    env = {"PYTHONPATH": f"{REPLAY}:{HERE / 'plugins'}", "DDTREE_TEST_ROUNDS": "1", "DDTREE_TEST_SCRIPT": ""}
    server = replay(qwen3, recording, "packed", "--speculative-ddtree-budget", "15", env=env)
    answers = ask(server, texts, texts.order[:8], serial=0)
    whole = texts.rounds("ddtree-15", topk_cap=8)
    assert whole is not None
    # Some rounds verified less than the whole trees.
    assert sum(rounds(answers)) > sum(whole[text] for text in texts.order[:8])


def test_overlap(qwen3: Pair, texts: Texts, recording: Path) -> None:
    """Rounds of which the host knows nothing when they start; two texts, since the kernels may be interpreted."""
    env = dict(DEVICE_ROUND)
    if env:
        env["PYTHONPATH"] = f"{REPLAY}:{HERE / 'plugins'}"
        env["DDTREE_TEST_SCRIPT"] = ""
    flags = ("--speculative-ddtree-budget", "7", "--attention-backend", "triton", "--page-size", "16")
    server = replay(qwen3, recording, "device", *flags, env=env)
    chosen = sorted(texts.order, key=lambda text: len(texts.answers[text]))[:2]
    expected = texts.rounds("ddtree-7", topk_cap=8)
    assert expected is not None
    assert rounds(ask(server, texts, chosen, serial=0)) == [expected[text] for text in chosen]


def test_real_weights_are_refused(qwen3: Pair, recording: Path) -> None:
    env = {"PYTHONPATH": REPLAY, "DDTREE_REPLAY": str(recording)}
    with pytest.raises(ServerDied, match="REPLAY: --load-format must be dummy, got auto"):
        qwen3.server("replay-refused", env=env)


def test_the_benchmark(tmp_path: Path) -> None:
    shown = run(
        "bench_replay.py", tmp_path / "replay", "--only", "ddtree-7", "--requests", "1", "2", "--jump", "ddtree-7"
    )
    assert "SMOKE RUN" in shown and "1 answers as recorded" in shown
    for name in ("replay.csv", "replay.md", "replay-jump.csv"):
        assert "REPLAY" in (tmp_path / name).read_text()
