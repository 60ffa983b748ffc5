"""Random batches of random requests: DDTREE answers as no speculation does, whatever the drafter proposes."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import BLOCK_SIZE, Pair

DEPTH = BLOCK_SIZE - 1

prompts = st.binary(min_size=1, max_size=60).map(list) | st.sampled_from(
    [list(b"shared prefix " * 5 + b"%d" % i) for i in range(3)]
)
lengths = st.integers(1, 30)
# Endings that come within a run: letters and tokens that the tiny target says often, by chance.
endings = st.fixed_dictionaries(
    {},
    optional={
        "ignore_eos": st.booleans(),
        "stop": st.lists(st.text("abcdefghij ", min_size=1, max_size=2), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 255), min_size=1, max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 255).map(str), st.floats(-5, 5), max_size=2),
    },
)
greedy = st.tuples(prompts, lengths, endings).map(
    lambda r: (r[0], {"temperature": 0.0, "max_new_tokens": r[1], **r[2]})
)
# Beside them, not compared.
sampled = st.tuples(prompts, lengths).map(lambda r: (r[0], {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": r[1]}))
batches = st.lists(greedy | greedy | sampled, min_size=1, max_size=8)
# At which rank the drafter puts the target's own token at every depth, -1: nowhere; None: the real drafter.
scripts = st.none() | st.lists(st.lists(st.integers(-1, 2), min_size=DEPTH, max_size=DEPTH), min_size=1, max_size=3)


def answers(server: Any, batch: list[tuple[list[int], dict[str, Any]]]) -> list[tuple[list[int], Any]]:
    body = {"input_ids": [prompt for prompt, _ in batch], "sampling_params": [params for _, params in batch]}
    return [(answer["output_ids"], answer["meta_info"]["finish_reason"]) for answer in server.post("/generate", body)]


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches, ranks=scripts)
def test_random_batches(
    qwen3: Pair, batch: list[tuple[list[int], dict[str, Any]]], ranks: list[list[int]] | None
) -> None:
    expected = answers(qwen3.plain, batch)
    qwen3.script(**({"ranks": ranks} if ranks else {}))
    for (_, params), want, got in zip(batch, expected, answers(qwen3.tree, batch), strict=True):
        if params["temperature"] == 0:
            assert got == want
        else:
            assert 1 <= len(got[0]) <= params["max_new_tokens"]
