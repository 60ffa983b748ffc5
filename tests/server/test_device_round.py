"""The round that stays on the device, in whole: ancestor-mask attention, kernels between the forwards, overlap, pages.

Without a GPU Triton interprets all of it, SGLang's own kernels too, and a test plugin lets the scheduler run ahead on
the CPU: all but CUDA graphs and the concurrency of streams is the same.
"""

from __future__ import annotations

import json
import threading

import pytest
from pairs import BLOCK_SIZE, CONTEXT, DEVICE_ROUND, Pair
from serving import accepted_drafts_histogram as histogram
from serving import output_ids

DEPTH = BLOCK_SIZE - 1
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"0123456789 " * 12)]


def test_the_round_is_the_devices(qwen3: Pair) -> None:
    assert "ancestor bits" in qwen3.device.log.read_text()
    info = json.loads(qwen3.device.get("/server_info"))
    assert info["disable_overlap_schedule"] is False
    assert (info["attention_backend"], info["page_size"]) == ("triton", 16)


# Short answers: without a GPU the kernels are interpreted, and of the paths one with all others' turns. The first token
# comes from prefill.
@pytest.mark.parametrize(
    "ranks, tokens, rounds",
    [
        ([[0] * DEPTH], 17, {DEPTH: 2}),
        pytest.param([[-1] * DEPTH], 9, {0: 8}, marks=pytest.mark.gpu),
        ([[0, 1, 0, -1, -1, -1, -1], [-1] * DEPTH], 15, {0: 2, 3: 3}),
        pytest.param([[1, 0, 0, -1, -1, -1, -1], [0, 1, 0, -1, -1, -1, -1]], 17, {3: 4}, marks=pytest.mark.gpu),
    ],
    ids=["chain", "nothing", "a side branch, then nothing", "two side branches in turn"],
)
def test_scripted_paths(qwen3: Pair, ranks: list[list[int]], tokens: int, rounds: dict[int, int]) -> None:
    length = dict(max_new_tokens=tokens, ignore_eos=True)
    expected = qwen3.expected(PROMPTS, **length)
    qwen3.script(ranks=ranks)
    answers = qwen3.device.generate(PROMPTS, **length)
    assert output_ids(answers) == expected
    assert [histogram(answer) for answer in answers] == [rounds] * len(PROMPTS)
    qwen3.device.assert_pool_empty()


SIDE = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH]


def test_requests_come_and_go(qwen3: Pair) -> None:
    """Requests join a running batch and end within it, each at another round, greedy ones beside sampled ones.

    A round that was launched before its request's end was known must not disturb its neighbours.
    """
    prompts = [list(b"request %d " % i * (1 + i % 3)) for i in range(6)]
    lengths = [3, 20, 9, 14, 1, 17]
    expected = [
        qwen3.expected([prompt], max_new_tokens=length, ignore_eos=True)[0]
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    qwen3.script(ranks=SIDE)
    answers: dict[int, list[int]] = {}

    def ask(index: int) -> None:
        sampling = dict(max_new_tokens=lengths[index], ignore_eos=True)
        answers[index] = qwen3.device.generate([prompts[index]], **sampling)[0]["output_ids"]

    def ask_sampled() -> None:
        answers[-1] = qwen3.device.generate([prompts[0]], max_new_tokens=15, ignore_eos=True, temperature=1.0)[0][
            "output_ids"
        ]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    threads.append(threading.Thread(target=ask_sampled))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers[i] for i in range(len(prompts))] == expected
    assert len(answers[-1]) == 15
    qwen3.device.assert_pool_empty()


def test_ends_within_an_accepted_run(qwen3: Pair) -> None:
    """At the end of sequence, and at the context's end, where the slots of two rounds are reserved beyond the row."""
    long = list(b"ab" * ((CONTEXT - 30) // 2))
    prompts, params = [qwen3.eos_prompt, long], dict(max_new_tokens=64)
    expected = qwen3.expected([qwen3.eos_prompt], **params) + qwen3.expected([long], max_new_tokens=22)
    qwen3.script(ranks=[[0] * DEPTH])
    answers = qwen3.device.generate([prompts[0]], **params) + qwen3.device.generate([long], max_new_tokens=22)
    assert output_ids(answers) == expected
    assert len(answers[0]["output_ids"]) == qwen3.eos_at + 1
    qwen3.device.assert_pool_empty()


# Interpreted it takes minutes; retraction itself is tested in test_pressure.py, and only a GPU has pages.
@pytest.mark.feature("`--page-size` above 1 (16 and 64)")
@pytest.mark.gpu
def test_retraction_of_large_pages(qwen3: Pair) -> None:
    """More requests than the pool holds, whole pages of 64 slots, and prompts prefilled in pieces."""
    # Two pages each at first, three at the end: two requests outgrow five pages.
    prompts = [list(b"%d: " % i * 14) for i in range(2)]
    params = dict(max_new_tokens=88, ignore_eos=True)
    expected = qwen3.expected(prompts, **params)
    qwen3.script(ranks=[[0] * DEPTH, [1, 0, -1, -1, -1, -1, -1]])
    server = qwen3.server(
        "device-tiny",
        *("--speculative-ddtree-budget", "3", "--attention-backend", "triton", "--page-size", "64"),
        *("--max-total-tokens", "320", "--schedule-conservativeness", "0.1", "--chunked-prefill-size", "64"),
        env=DEVICE_ROUND,
    )
    answers = server.generate(prompts, **params)
    assert output_ids(answers) == expected
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    server.assert_pool_empty()
    qwen3.stop("device-tiny")
