"""Sampled output follows the target's distribution, whatever the drafter is confident of.

Chi-square tests of the next three tokens over many requests against exact probabilities, computed with
transformers in float64. Seeds are fixed, so a test either passes or fails for good.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from pairs import BLOCK_SIZE, Pair
from serving import Server, output_ids

PROMPT = list(b"sample from here")
SAMPLES = 1600
TOKENS = 3
# A right distribution is rejected once in ten thousand tests.
P_VALUE = 1e-4

# Chosen so that a few hundred sequences carry all the probability.
FILTERS = [
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 0.7, "top_k": 4},
    {"temperature": 0.25, "top_p": 0.6},
    {"temperature": 0.5, "min_p": 0.3},
    {"temperature": 0.6, "top_k": 5, "top_p": 0.9, "min_p": 0.2},
]


def filtered(logits: torch.Tensor, params: dict) -> torch.Tensor:
    """The distribution a request samples from: temperature, then top-k, top-p and min-p on one sorted list."""
    probs = torch.softmax(logits.double() / params["temperature"], dim=-1)
    values, order = torch.sort(probs, descending=True)
    before = torch.cumsum(values, 0) - values
    keep = torch.arange(len(values)) < params.get("top_k", len(values))
    keep &= before <= params.get("top_p", 1.0)
    keep &= values >= values[0] * params.get("min_p", 0.0)
    result = torch.zeros_like(probs)
    result[order] = values * keep
    return result / result.sum()


class Exact:
    """Probabilities of short continuations."""

    def __init__(self, target: Path, params: dict):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.params = params

    @torch.inference_mode()
    def next(self, prefix: list[int]) -> dict[int, float]:
        probs = filtered(self.model(torch.tensor([prefix])).logits[0, -1], self.params)
        return {token: float(probs[token]) for token in torch.nonzero(probs)[:, 0].tolist()}

    def sequences(self, prefix: list[int], tokens: int) -> dict[tuple[int, ...], float]:
        if tokens == 0:
            return {(): 1.0}
        return {
            (token, *rest): p * q
            for token, p in self.next(prefix).items()
            for rest, q in self.sequences([*prefix, token], tokens - 1).items()
        }


def chi_square_p(observed: list[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    """p-value; the cells expected fewer than 5 times are merged into one."""
    counts = dict.fromkeys(exact, 0)
    for sequence in observed:
        assert sequence in counts, f"{sequence} has probability zero"
        counts[sequence] += 1
    cells, rest = [], [0.0, 0.0]
    for sequence, p in exact.items():
        expected = p * len(observed)
        if expected >= 5:
            cells.append((counts[sequence], expected))
        else:
            rest = [rest[0] + counts[sequence], rest[1] + expected]
    if rest[1] > 0:
        cells.append((rest[0], rest[1]))
    assert len(cells) > 3, "too few cells to tell distributions apart"
    total = sum(expected for _, expected in cells)
    seen = [count for count, _ in cells]
    return scipy.stats.chisquare(seen, [e * len(observed) / total for _, e in cells]).pvalue


def sample(server: Server, params: dict, count: int = SAMPLES) -> tuple[list[tuple[int, ...]], float]:
    sampling = {**params, "max_new_tokens": TOKENS, "ignore_eos": True}
    sequences, rounds, drafts = [], 0, 0
    for _ in range(count // 200):
        answers = server.generate([PROMPT] * 200, **sampling)
        sequences += [tuple(ids) for ids in output_ids(answers)]
        rounds += sum(a["meta_info"]["spec_verify_ct"] for a in answers)
        drafts += sum(a["meta_info"]["spec_num_correct_drafts"] for a in answers)
    return sequences, drafts / rounds


def wrong_candidates(exact: Exact) -> dict:
    """A drafter that is confident of the less likely tokens: the tree holds what may follow, the unlikeliest first and
    with half of the probability."""
    rows = []
    for position in (1, 2):
        marginal: dict[int, float] = {}
        for sequence, p in exact.sequences(PROMPT, position + 1).items():
            marginal[sequence[position]] = marginal.get(sequence[position], 0.0) + p
        likely = sorted(marginal, key=marginal.__getitem__)[-8:]
        rows.append(likely + [t for t in range(250) if t not in likely][: 8 - len(likely)])
    logprobs = [-0.7, -2.0, -2.1, -2.2, -2.3, -2.4, -2.5, -2.6]
    positions = BLOCK_SIZE - 1
    return {"fixed": rows + [rows[-1]] * (positions - 2), "logprobs": [logprobs] * positions}


def check_distribution(
    pair: Pair, exact: Exact, accepted_drafts: float, server: Server | None = None, **script: Any
) -> None:
    """The served tokens follow ``exact``; fewer accepted drafts per round would not have exercised the walk."""
    pair.script(**script)
    observed, accepted = sample(server or pair.tree, exact.params)
    assert chi_square_p(observed, exact.sequences(PROMPT, TOKENS)) > P_VALUE
    assert accepted > accepted_drafts


@pytest.mark.feature("sampled requests: the target's distribution (temperature, top-k, top-p, min-p)")
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_distribution_with_a_confidently_wrong_drafter(qwen3: Pair, params: dict) -> None:
    """Nor is a token of probability zero ever served (sglang #35771)."""
    exact = Exact(qwen3.target, params)
    check_distribution(qwen3, exact, 0.1, **wrong_candidates(exact))


@pytest.mark.feature("sampled requests: the target's distribution (temperature, top-k, top-p, min-p)")
def test_distribution_with_a_drafter_that_is_often_right(qwen3: Pair) -> None:
    exact = Exact(qwen3.target, {"temperature": 1.0, "top_k": 4})
    check_distribution(qwen3, exact, 0.2, ranks=[[1, 0, 0, 0, 0, 0, 0]])


def test_the_test_can_fail(qwen3: Pair) -> None:
    """Greedy output, served as if it were sampled, is noticed."""
    params = {"temperature": 1.0, "top_k": 3}
    exact = Exact(qwen3.target, params)
    qwen3.script()
    greedy = tuple(output_ids(qwen3.tree.generate([PROMPT], max_new_tokens=TOKENS, ignore_eos=True))[0])
    assert chi_square_p([greedy] * SAMPLES, exact.sequences(PROMPT, TOKENS)) < P_VALUE
    observed, _ = sample(qwen3.tree, params)
    assert chi_square_p(observed, exact.sequences(PROMPT, TOKENS)) > P_VALUE
    another = Exact(qwen3.target, {"temperature": 0.6, "top_k": 3}).sequences(PROMPT, TOKENS)
    assert chi_square_p(observed, another) < P_VALUE


@pytest.mark.feature("greedy and sampled requests in one batch")
def test_greedy_and_sampled_in_one_batch(qwen3: Pair) -> None:
    """A greedy request beside sampled ones gives its own greedy tokens."""
    prompts = [list(b"greedy one"), list(b"greedy two")]
    expected = qwen3.expected(prompts, max_new_tokens=30, ignore_eos=True)
    qwen3.script(ranks=[[0, 1, 0, 0, 0, 0, 0]])
    sampled = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 30, "ignore_eos": True}
    greedy = {"temperature": 0, "max_new_tokens": 30, "ignore_eos": True}
    answers = qwen3.tree.post(
        "/generate",
        {
            "input_ids": list(itertools.chain.from_iterable((p, PROMPT) for p in prompts)),
            "sampling_params": [greedy, sampled] * 2,
        },
    )
    assert [answers[0]["output_ids"], answers[2]["output_ids"]] == expected
