"""Log-probabilities: those of no speculation, one entry per returned token (z-lab/dflash #39, sglang #33459)."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import BLOCK_SIZE, Pair

DEPTH = BLOCK_SIZE - 1
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt")]
SIDE = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH]
# Float32, but sums in another order: a verify of 16 tokens is another matrix product than a decode of one.
TOLERANCE = 1e-4
ASKED = dict(return_logprob=True, logprob_start_len=0, top_logprobs_num=3, token_ids_logprob=[7, 65])
PARTS = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")
PARTS += ("input_token_ids_logprobs", "output_token_ids_logprobs")


def ask(server: Any, prompts: list[list[int]], params: dict[str, Any], **asked: Any) -> list[dict[str, Any]]:
    return server.post("/generate", {"input_ids": prompts, "sampling_params": params, **asked})


def assert_alike(got: Any, expected: Any, where: str) -> None:
    """Nested lists of numbers, ids, texts and None."""
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected), where
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_alike(a, b, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, abs=TOLERANCE), where
    else:
        assert got == expected, where


@pytest.mark.feature("log-probabilities: input, output, the best, chosen tokens")
@pytest.mark.parametrize("served", ["tree", "chain", "device"])
def test_generate(qwen3: Pair, served: str) -> None:
    """Input and output, the best three and two chosen tokens; an accepted path leaves the chain on the way."""
    params = dict(temperature=0, max_new_tokens=14, ignore_eos=True)
    expected = ask(qwen3.plain, PROMPTS, params, **ASKED)
    qwen3.script(ranks=SIDE)
    answers = ask(getattr(qwen3, served), PROMPTS, params, **ASKED)
    for got, want in zip(answers, expected, strict=True):
        assert got["output_ids"] == want["output_ids"]
        for part in PARTS:
            assert want["meta_info"][part], part
            assert_alike(got["meta_info"][part], want["meta_info"][part], part)


@pytest.mark.feature("log-probabilities: input, output, the best, chosen tokens")
def test_a_batch_in_which_one_asks(qwen3: Pair) -> None:
    """Beside a sampled request, for which the sampler overwrites the logits in place."""
    length = dict(max_new_tokens=12, ignore_eos=True)
    greedy = dict(temperature=0, **length)
    expected = ask(qwen3.plain, PROMPTS[:1], greedy, return_logprob=True)
    qwen3.script(ranks=SIDE)
    params = [greedy, dict(temperature=1.0, top_p=0.9, **length)]
    body = {"input_ids": PROMPTS, "sampling_params": params, "return_logprob": True}
    answers = qwen3.tree.post("/generate", body)
    part = "output_token_logprobs"
    assert answers[0]["output_ids"] == expected[0]["output_ids"]
    assert_alike(answers[0]["meta_info"][part], expected[0]["meta_info"][part], part)
    # At temperature 1 the entries of sampled tokens are the target's own, which it also gives them as a prompt.
    tokens = answers[1]["output_ids"]
    once = dict(temperature=0, max_new_tokens=1)
    scored = ask(qwen3.plain, [PROMPTS[1] + tokens], once, return_logprob=True, logprob_start_len=0)
    known = scored[0]["meta_info"]["input_token_logprobs"][len(PROMPTS[1]) :]
    assert_alike(answers[1]["meta_info"][part], known, part)


@pytest.mark.feature("log-probabilities: input, output, the best, chosen tokens")
def test_a_stop_within_an_accepted_run(qwen3: Pair) -> None:
    """The end of sequence, a stop token and the length cut a run: as many entries as tokens."""
    free = ask(qwen3.plain, [qwen3.eos_prompt], dict(temperature=0, max_new_tokens=30, ignore_eos=True))[0][
        "output_ids"
    ]
    stop = next(token for i, token in enumerate(free) if i > 1 and i % BLOCK_SIZE > 1 and token not in free[:i])
    qwen3.script(ranks=[[0] * DEPTH])
    for params in (dict(max_new_tokens=30), dict(max_new_tokens=30, stop_token_ids=[stop]), dict(max_new_tokens=5)):
        params = dict(temperature=0, **params)
        expected = ask(qwen3.plain, [qwen3.eos_prompt], params, return_logprob=True, top_logprobs_num=2)[0]
        got = ask(qwen3.tree, [qwen3.eos_prompt], params, return_logprob=True, top_logprobs_num=2)[0]
        assert got["output_ids"] == expected["output_ids"]
        for part in ("output_token_logprobs", "output_top_logprobs"):
            assert len(got["meta_info"][part]) == len(got["output_ids"])
            assert_alike(got["meta_info"][part], expected["meta_info"][part], part)


@pytest.mark.feature("log-probabilities in completions and chat")
def test_openai(qwen3: Pair) -> None:
    """Completions and chat, with a stop string inside an accepted run, plain and as a stream."""
    qwen3.script(ranks=[[0] * DEPTH])
    answers = []
    for server in (qwen3.plain, qwen3.tree):
        client = server.client()
        asked = dict(model="default", temperature=0, max_tokens=20)
        done = client.completions.create(prompt="hello", logprobs=2, extra_body={"ignore_eos": True}, **asked)
        assert len(done.choices[0].logprobs.tokens) == 20
        stop = done.choices[0].text[6:8]
        cut = client.completions.create(prompt="hello", logprobs=2, stop=stop, **asked)
        echoed = client.completions.create(prompt="hello", logprobs=2, echo=True, **asked)
        assert len(echoed.choices[0].logprobs.tokens) > len("hello")
        chunks = list(client.completions.create(prompt="hello", logprobs=2, stream=True, **asked))
        streamed = [
            p for c in chunks if c.choices and c.choices[0].logprobs for p in c.choices[0].logprobs.token_logprobs
        ]
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2, **asked
        )
        answers.append(
            [
                done.choices[0].logprobs.token_logprobs,
                cut.choices[0].logprobs.token_logprobs,
                cut.choices[0].text,
                echoed.choices[0].logprobs.token_logprobs,
                streamed,
                [entry.logprob for entry in chat.choices[0].logprobs.content],
            ]
        )
    assert_alike(answers[1], answers[0], "openai")
