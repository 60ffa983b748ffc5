"""Packed rounds in a server: each with another number of verify tokens for all its requests, or with no draft at all.

The tokens are those of no speculation all the same. Without a GPU the device's round is interpreted, as in
test_device_round.py.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pairs import BLOCK_SIZE, DEVICE_ROUND, Pair
from serving import Server, output_ids
from test_logprobs import ASKED, PARTS, assert_alike
from test_sampled import Exact, check_distribution

DEPTH = BLOCK_SIZE - 1
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"x"), list(b"0123456789 " * 6)]
SIDE = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH]
SCRIPTS: dict[str, list[list[int]] | None] = {
    "chain": [[0] * DEPTH],
    "side branches": SIDE,
    "a high rank": [[5] + [-1] * (DEPTH - 1)],
    "real drafter": None,
}


def packed(pair: Pair, where: str) -> Server:
    """The server whose rounds change shape: in PyTorch without overlap, or with the device's kernels and overlap."""
    budget = ("--speculative-ddtree-budget", "15" if where == "torch" else "7")
    if where == "torch":
        return pair.server("packed", *budget, env={"DDTREE_TEST_ROUNDS": "1"})
    flags = ("--attention-backend", "triton", "--page-size", "16")
    return pair.server("packed-device", *budget, *flags, env=DEVICE_ROUND | {"DDTREE_TEST_ROUNDS": "7"})


def script(pair: Pair, ranks: list[list[int]] | None) -> None:
    pair.script(**({} if ranks is None else {"ranks": ranks}))


# What is interpreted is slow: less of it.
@pytest.mark.parametrize(
    "where, name",
    [
        *(("torch", name) for name in SCRIPTS),
        # On a CPU test_auto_budget.py interprets these steps, with drafts of changing length besides.
        pytest.param("device", "side branches", marks=pytest.mark.gpu),
        pytest.param("device", "real drafter", marks=pytest.mark.gpu),
    ],
)
def test_greedy_tokens(qwen3: Pair, where: str, name: str) -> None:
    prompts = PROMPTS if where == "torch" else PROMPTS[:2]
    length = dict(max_new_tokens=60 if where == "torch" else 16, ignore_eos=True)
    expected = qwen3.expected(prompts, **length)
    script(qwen3, SCRIPTS[name])
    answers = packed(qwen3, where).generate(prompts, **length)
    assert output_ids(answers) == expected
    if name == "side branches":
        reports = [answer["meta_info"]["ddtree"] for answer in answers]
        rounds = sum(report["rounds"] for report in reports)
        nodes = sum(report["tree_nodes_per_round"] * report["rounds"] for report in reports)
        # Trees were cut, and still accepted from.
        assert 0 < nodes < rounds * (15 if where == "torch" else 7)
        assert sum(report["committed_tokens"] for report in reports) > rounds


@pytest.mark.parametrize("where", ["torch", pytest.param("device", marks=pytest.mark.gpu)])
def test_requests_come_and_go(qwen3: Pair, where: str) -> None:
    """Requests join a running batch and end within it, greedy ones beside a sampled one."""
    lengths = [3, 20, 9, 14, 1, 17] if where == "torch" else [3, 12, 8]
    prompts = [list(b"request %d " % i * (1 + i % 3)) for i in range(len(lengths))]
    expected = [
        qwen3.expected([prompt], max_new_tokens=length, ignore_eos=True)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    server = packed(qwen3, where)
    qwen3.script(ranks=SIDE)
    answers: dict[int, list[int]] = {}

    def ask(index: int, **sampling: Any) -> None:
        sampling = dict(ignore_eos=True, **sampling)
        answers[index] = server.generate([prompts[max(index, 0)]], **sampling)[0]["output_ids"]

    threads = [threading.Thread(target=ask, args=(i,), kwargs=dict(max_new_tokens=n)) for i, n in enumerate(lengths)]
    threads.append(threading.Thread(target=ask, args=(-1,), kwargs=dict(max_new_tokens=8, temperature=1.0)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(prompts))] == expected
    assert len(answers[-1]) == 8
    server.assert_pool_empty()


def test_three_positions_a_token(pair_of: Callable[[str], Pair]) -> None:
    """A target that takes positions as images have them: SGLang shapes them as if all requests had as many tokens."""
    pair = pair_of("mrope")
    length = dict(max_new_tokens=40, ignore_eos=True)
    expected = pair.expected(PROMPTS[:3], **length)
    pair.script(ranks=SIDE)
    assert output_ids(packed(pair, "torch").generate(PROMPTS[:3], **length)) == expected
    for name in ("plain", "packed"):
        pair.stop(name)


def test_ends_within_an_accepted_run(qwen3: Pair) -> None:
    expected = qwen3.expected([qwen3.eos_prompt], max_new_tokens=64)
    qwen3.script(ranks=[[0] * DEPTH])
    answer = packed(qwen3, "torch").generate([qwen3.eos_prompt], max_new_tokens=64)[0]
    assert answer["output_ids"] == expected[0]
    assert len(answer["output_ids"]) == qwen3.eos_at + 1


def test_structured_output(qwen3: Pair) -> None:
    """The grammar's mask has a row per verified node; beside a request without a grammar."""
    pattern = "[0-9]{12}-[a-f]{12}"
    params = [
        dict(temperature=0, max_new_tokens=40, regex=pattern),
        dict(temperature=0, max_new_tokens=30, ignore_eos=True),
        dict(temperature=1.0, max_new_tokens=40, regex=pattern),
    ]
    body = {"input_ids": PROMPTS[:3], "sampling_params": params}
    expected = qwen3.plain.post("/generate", body)
    qwen3.script(ranks=SIDE)
    answers = packed(qwen3, "torch").post("/generate", body)
    assert output_ids(answers[:2]) == output_ids(expected[:2])
    assert re.fullmatch(pattern, answers[0]["text"]) and re.fullmatch(pattern, answers[2]["text"])


def test_logprobs(qwen3: Pair) -> None:
    params = dict(temperature=0, max_new_tokens=30, ignore_eos=True)
    body = {"input_ids": PROMPTS[:2], "sampling_params": params, **ASKED}
    expected = qwen3.plain.post("/generate", body)
    qwen3.script(ranks=SIDE)
    for got, want in zip(packed(qwen3, "torch").post("/generate", body), expected, strict=True):
        assert got["output_ids"] == want["output_ids"]
        for part in PARTS:
            assert_alike(got["meta_info"][part], want["meta_info"][part], part)


def test_sampled_tokens_follow_the_targets_distribution(qwen3: Pair) -> None:
    exact = Exact(qwen3.target, {"temperature": 1.0, "top_k": 4})
    check_distribution(qwen3, exact, 0.05, packed(qwen3, "torch"), ranks=[[1, 0, 0, 0, 0, 0, 0]])
