"""The round that stays on the device, in whole: kernels between the forwards, and overlap scheduling.

Without a GPU Triton interprets the kernels and a test plugin lets the scheduler run ahead on the CPU, so that all but
the concurrency of streams is the same.
"""

from __future__ import annotations

import threading

import pytest
from pairs import BLOCK_SIZE, CONTEXT, Pair
from serving import output_ids

DEPTH = BLOCK_SIZE - 1
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"0123456789 " * 12)]
# Short answers: without a GPU the kernels are interpreted.
LENGTH = dict(max_new_tokens=25, ignore_eos=True)


def histogram(answer: dict) -> dict[int, int]:
    counts = answer["meta_info"]["spec_correct_drafts_histogram"]
    return {drafts: rounds for drafts, rounds in enumerate(counts) if rounds}


def test_the_round_is_the_devices(qwen3: Pair) -> None:
    log = qwen3.device.log.read_text()
    assert "overlap scheduling is switched off" not in log
    assert "disable_overlap_schedule=False" in log


@pytest.mark.parametrize(
    "ranks, rounds",
    [
        ([[0] * DEPTH], {DEPTH: 3}),
        ([[-1] * DEPTH], {0: 24}),
        ([[0, 1, 0, -1, -1, -1, -1], [-1] * DEPTH], {0: 4, 3: 5}),
        ([[1, 0, 0, -1, -1, -1, -1], [0, 1, 0, -1, -1, -1, -1]], {3: 6}),
    ],
    ids=["chain", "nothing", "a side branch, then nothing", "two side branches in turn"],
)
def test_scripted_paths(qwen3: Pair, ranks: list[list[int]], rounds: dict[int, int]) -> None:
    expected = qwen3.expected(PROMPTS, **LENGTH)
    qwen3.script(ranks=ranks)
    answers = qwen3.device.generate(PROMPTS, **LENGTH)
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
