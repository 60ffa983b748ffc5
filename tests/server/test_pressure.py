"""A server under pressure: too little memory, too many requests, clients that leave, operators that interfere."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import re
import threading
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from pairs import BLOCK_SIZE, CONTEXT, Pair, greedy
from serving import Server, free_port, output_ids

DEPTH = BLOCK_SIZE - 1
SIDE = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH]
LONG = dict(temperature=0, max_new_tokens=200, ignore_eos=True)


@pytest.fixture
def small(qwen3: Pair) -> Server:
    """A pool that a few requests fill. SGLang counts every slot after every step there, and ends if one is missing."""
    qwen3.script(ranks=SIDE)
    return qwen3.server(
        "small",
        *("--speculative-ddtree-budget", "15", "--max-total-tokens", "900", "--schedule-conservativeness", "0.1"),
        *("--grammar-backend", "llguidance"),
        env={"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"},
    )


@pytest.mark.feature("retraction when the KV pool is full")
def test_retraction(qwen3: Pair, small: Server) -> None:
    """More requests than the KV pool holds: some are retracted and begin again (sglang #19881, #13765)."""
    prompts = [list(b"request %d " % i * 8) for i in range(8)]
    params = dict(max_new_tokens=120, ignore_eos=True)
    answers = small.generate(prompts, **params)
    assert output_ids(answers) == qwen3.expected(prompts, **params)
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    # A retracted request keeps its rounds; its second prefill gives one more token that no round committed.
    for meta in (answer["meta_info"] for answer in answers):
        assert meta["ddtree"]["rounds"] == meta["spec_verify_ct"]
        tokens = meta["ddtree"]["committed_tokens"] + 1 + meta["num_retractions"]
        assert 120 <= tokens < 120 + BLOCK_SIZE
    small.assert_pool_empty()


# Slots of the pool, and of two rounds of budget 15.
POOL, RESERVED = 300, 32


def tiny_pools(pair: Pair) -> tuple[Server, Server]:
    """Servers without speculation and with it, whose pool holds less than the context."""
    flags = ("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.1")
    env = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
    pair.script(ranks=SIDE)
    return (
        pair.server("plain-tiny", *flags, env=env),
        pair.server("tiny", "--speculative-ddtree-budget", "15", *flags, env=env),
    )


def try_it(server: Server, prompt: list[int], tokens: int) -> tuple[list[int], str]:
    """The tokens and the reason of the end."""
    params = dict(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    answer = server.post("/generate", {"input_ids": prompt, "sampling_params": params})
    return answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]


@pytest.mark.feature("a KV pool smaller than the context")
def test_out_of_memory_in_mid_round(qwen3: Pair) -> None:
    """A request ends by its length before the pool has no room for its next round (sglang #19881, #13765).

    So it does without speculation, where a step takes one slot; a round reserves more than it commits, and the answer
    is shorter by as much. Nothing is lost, and nobody else is touched.
    """
    plain, tree = tiny_pools(qwen3)
    prompts = {length: [(7 * i + length) % 250 for i in range(length)] for length in (60, 150, 200, 250, 290)}

    def expected_of(length: int, tokens: int) -> tuple[list[int], str]:
        said, reason = try_it(plain, prompts[length], tokens)
        assert (len(said), reason) == (tokens, "length")
        return said[: max(1, POOL - RESERVED - length)], reason

    for length, tokens in ((200, POOL - RESERVED - 200), (200, 98), (250, 48), (290, 8)):
        assert try_it(tree, prompts[length], tokens) == expected_of(length, tokens)
        tree.assert_slots_are_back()
    # Longer than any pool could answer: the same words.
    assert tree.refused("/generate", {"input_ids": [1] * POOL}) == plain.refused("/generate", {"input_ids": [1] * POOL})
    # Beside others, which are retracted for it or it for them.
    asked = [(150, 140), (60, 60), (60, 61), (60, 62)]
    expected = [expected_of(length, tokens) for length, tokens in asked]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(try_it, tree, prompts[length], tokens) for length, tokens in asked]
        assert [future.result() for future in futures] == expected
    tree.assert_pool_empty()
    for name in ("plain-tiny", "tiny"):
        qwen3.stop(name)


@pytest.mark.feature("500 requests in the queue")
def test_five_hundred_requests_in_the_queue(qwen3: Pair, small: Server) -> None:
    """Short ones, so that requests end and begin at every step (sglang #18803: a recycled row is overwritten)."""
    prompts = [list(b"%03d" % i) for i in range(500)]
    params = [dict(temperature=0, ignore_eos=True, max_new_tokens=1 + i % 4) for i in range(500)]
    body = {"input_ids": prompts, "sampling_params": params}
    qwen3.script()
    assert output_ids(small.post("/generate", body)) == output_ids(qwen3.plain.post("/generate", body))


def masked_greedy(pair: Pair, prompt: str, grammar: str, tokens: int) -> list[int]:
    """The target's greedy continuation under an llguidance grammar, with transformers."""
    import llguidance.hf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair.target)
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    end = json.loads((pair.target / "config.json").read_text())["eos_token_id"]
    # SGLang ends at the model's end of sequence and at the tokenizer's.
    ends = [end, tiny_models.EOS_TOKEN_ID]
    vocabulary = llguidance.hf.from_tokenizer(tokenizer, tiny_models.VOCABULARY, eos_token=[end])
    matcher = llguidance.LLMatcher(vocabulary, grammar)
    start = tokenizer(prompt).input_ids
    ids = list(start)
    while len(ids) < len(start) + tokens and ids[-1] not in ends:
        mask = torch.tensor([byte != 0 for byte in matcher.compute_logit_bias()])
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits.masked_fill(~mask, float("-inf")).argmax()))
        matcher.consume_token(ids[-1])
        assert not matcher.is_error(), matcher.get_error()
    return ids[len(start) :]


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"enum": ["ab", "cd"]}},
        "required": ["n", "s"],
    }
)
EBNF = 'root ::= ("ab" | "cd") [0-9]+ ";" root2\nroot2 ::= "x" | "yz"'
GRAMMARS = {
    "regex": ("[0-9]{6}-[a-f]{6}", "[0-9]{6}-[a-f]{6}"),
    "ebnf": (EBNF, "(ab|cd)[0-9]+;(x|yz)"),
    "json_schema": (SCHEMA, None),
    # Holds what the target would say anyway, so that long legal runs meet illegal siblings.
    "free": ("(.|\n)*", "(?s).*"),
}


@pytest.mark.feature("structured output with llguidance: regex, EBNF, JSON schema")
@pytest.mark.parametrize("kind", GRAMMARS)
def test_llguidance(qwen3: Pair, small: Server, kind: str) -> None:
    """--grammar-backend llguidance: each node's mask follows its own path, whatever is drafted."""
    from llguidance import LLMatcher, grammar_from

    text, pattern = GRAMMARS[kind]
    field = "regex" if kind == "free" else kind
    if field == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_flexible": True, "whitespace_pattern": None}
        )
    else:
        grammar = grammar_from(field, text)
    expected = masked_greedy(qwen3, "digits:", grammar, 40)
    unbound = {"temperature": 0, "max_new_tokens": 20}
    expected_free = qwen3.plain.post("/generate", {"text": "free:", "sampling_params": unbound})["output_ids"]
    sampling = {"temperature": 0, "max_new_tokens": 40, field: text}
    for ranks in (SIDE, [[0] * DEPTH], None):
        qwen3.script(**({"ranks": ranks} if ranks else {}))
        # A request without a grammar beside it.
        mixed = {"text": ["digits:", "free:"], "sampling_params": [sampling, unbound]}
        got, free = small.post("/generate", mixed)
        assert got["output_ids"] == expected
        assert free["output_ids"] == expected_free
    sampled = small.post("/generate", {"text": "digits:", "sampling_params": {**sampling, "temperature": 1.0}})
    for answer in (got, sampled):
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert re.fullmatch(pattern, answer["text"]) if pattern else set(json.loads(answer["text"])) == {"n", "s"}


def test_an_invalid_grammar_is_refused(small: Server) -> None:
    status, text = small.refused("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4, "regex": "(("}})
    assert status == 400 and "regex" in text


def ask(server: Server, rid: str, prompt: str, **params: Any) -> dict[str, Any]:
    return server.post("/generate", {"rid": rid, "text": prompt, "sampling_params": {**LONG, **params}})


@pytest.mark.feature("aborts, and clients that leave")
def test_aborts_at_any_moment(qwen3: Pair, small: Server) -> None:
    """Queued, in prefill, in a round, retracted: what an aborted request has said is right, others do not notice."""
    rng = random.Random(5)
    prompts = {f"abort-{i}": f"aborted {i} " * rng.randint(1, 9) for i in range(9)}
    keep = {f"keep-{i}": f"kept {i} " * (1 + i) for i in range(4)}
    lengths = dict(max_new_tokens=50)
    expected = {rid: ask(qwen3.plain, rid, prompt, **lengths) for rid, prompt in {**prompts, **keep}.items()}
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        asked = {rid: pool.submit(ask, small, rid, text, **lengths) for rid, text in {**keep, **prompts}.items()}
        for rid in prompts:
            time.sleep(rng.random() / 20)
            small.post("/abort_request", {"rid": rid})
        answers = {rid: future.result() for rid, future in asked.items()}
    for rid in keep:
        assert answers[rid]["output_ids"] == expected[rid]["output_ids"]
    aborted = [rid for rid in prompts if answers[rid]["meta_info"]["finish_reason"]["type"] == "abort"]
    assert len(aborted) > 4
    for rid in prompts:
        said = answers[rid]["output_ids"] or []
        assert said == expected[rid]["output_ids"][: len(said)]
    small.assert_pool_empty()


def leave(server: Server, prompt: str, chunks: int | None) -> None:
    """Ask and close the connection: after as many chunks of a stream, or without waiting for an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"text": prompt, "sampling_params": LONG, "stream": chunks is not None}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    if chunks is None:
        time.sleep(0.2)
    else:
        response = connection.getresponse()
        for _ in range(2 * chunks):  # each is followed by an empty line
            response.readline()
    connection.close()


@pytest.mark.feature("aborts, and clients that leave")
def test_clients_that_leave(qwen3: Pair, small: Server) -> None:
    """In mid-stream, or before there is an answer: their requests end, and the slots come back."""
    prompt, params = list(b"I stay"), dict(max_new_tokens=60, ignore_eos=True)
    expected = qwen3.expected([prompt], **params)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        leaving = [pool.submit(leave, small, f"I leave {i} ", i % 4 or None) for i in range(12)]
        assert output_ids(small.generate([prompt], **params)) == expected
        for future in leaving:
            future.result()
    # All would go on for 200 tokens each, more than the pool holds.
    small.assert_pool_empty()


TOO_LONG = [
    ("/generate", {"input_ids": [1] * (CONTEXT + 88)}),
    ("/generate", {"input_ids": [1] * CONTEXT}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": CONTEXT + 1}}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 10**9}}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": -1}}),
    ("/v1/completions", {"model": "default", "prompt": "x" * (CONTEXT + 1), "max_tokens": 4}),
    ("/v1/completions", {"model": "default", "prompt": "x", "max_tokens": 10**9}),
]


def test_longer_than_the_context(qwen3: Pair) -> None:
    """Refused in SGLang's own words."""
    for path, body in TOO_LONG:
        expected = qwen3.plain.refused(path, body)
        assert expected[0] == 400
        assert qwen3.tree.refused(path, body) == expected


def test_longer_than_the_pool(qwen3: Pair, small: Server) -> None:
    """Requests that need most of the pool each run one after the other (sglang #27338: too small index buffers)."""
    qwen3.script()
    prompts, params = [[65 + i] * 450 for i in range(3)], dict(max_new_tokens=40, ignore_eos=True)
    assert output_ids(small.generate(prompts, **params)) == qwen3.expected(prompts, **params)


class Running:
    """A long request under way in a thread of its own, read as a stream."""

    def __init__(self, server: Server, prompt: str):
        self.chunks = 0
        self.last: dict[str, Any] = {}
        self.thread = threading.Thread(target=self._read, args=(server, prompt))
        self.thread.start()
        deadline = time.monotonic() + 60
        while self.chunks < 3 and time.monotonic() < deadline:
            time.sleep(0.01)

    def _read(self, server: Server, prompt: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        body = {"text": prompt, "sampling_params": LONG, "stream": True}
        connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            data = line.decode().removeprefix("data: ").strip()
            if data and data != "[DONE]":
                self.last = json.loads(data)
                self.chunks += 1

    def result(self) -> dict[str, Any]:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.last


@pytest.mark.feature("`/flush_cache`, `/pause_generation` and `/continue_generation`")
def test_flush_cache_while_a_request_runs(qwen3: Pair, small: Server) -> None:
    """Refused as without speculation, and the request does not notice."""
    running = Running(small, "do not flush me")
    status, _ = small.refused("/flush_cache", {})
    assert status == 400
    assert running.result()["output_ids"] == ask(qwen3.plain, "flush", "do not flush me")["output_ids"]
    small.assert_pool_empty()


@pytest.mark.feature("`/flush_cache`, `/pause_generation` and `/continue_generation`")
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_and_continue(qwen3: Pair, small: Server, mode: str) -> None:
    """/pause_generation in mid-answer: nothing is said until /continue_generation, then what would have been said."""
    prompt = "pause me"
    expected = ask(qwen3.plain, "pause", prompt)["output_ids"]
    running = Running(small, prompt)
    small.post("/pause_generation", {"mode": mode})
    try:
        time.sleep(0.3)
        said = running.chunks
        time.sleep(0.5)
        assert running.chunks == said
    finally:
        small.post("/continue_generation", {})
    answer = running.result()
    got, meta = answer["output_ids"], answer["meta_info"]
    assert got == expected[: len(got)]
    if mode == "abort":
        assert meta["finish_reason"]["type"] == "abort" and len(got) < len(expected)
    else:
        assert len(got) == len(expected) and meta["num_retractions"] == (mode == "retract")
    assert ask(small, "after", prompt, max_new_tokens=9)["output_ids"] == expected[:9]
    small.assert_pool_empty()


def another_target(pair: Pair) -> Path:
    """A target of the pair's shape with other weights, made once."""
    folder = pair.folder / "other"
    if not folder.exists():
        tiny_models.make_target(folder, "qwen3", context=CONTEXT, seed=9)
    return folder


@pytest.mark.feature("`/update_weights_from_disk`: the drafter keeps its weights")
def test_new_weights(qwen3: Pair, small: Server) -> None:
    """/update_weights_from_disk: the target changes, the drafter stays, the answers are the new target's."""
    other = another_target(qwen3)
    prompt, params = list(b"who are you"), dict(max_new_tokens=24, ignore_eos=True)
    before = output_ids(small.generate([prompt], **params))
    qwen3.script()
    refused = small.refused("/update_weights_from_disk", {"model_path": str(qwen3.folder / "nowhere")})
    assert refused[0] == 400
    assert output_ids(small.generate([prompt], **params)) == before
    answer = small.post("/update_weights_from_disk", {"model_path": str(other)})
    assert answer["success"], answer
    try:
        changed = output_ids(small.generate([prompt], **params))[0]
        assert changed == greedy(other, prompt, 24) != before[0]
    finally:
        assert small.post("/update_weights_from_disk", {"model_path": str(qwen3.target)})["success"]
    assert output_ids(small.generate([prompt], **params)) == before


@pytest.mark.feature("`/update_weights_from_distributed`: the drafter keeps its weights")
def test_new_weights_from_a_trainer(qwen3: Pair, small: Server) -> None:
    """The target's tensors over a process group, of which this process is the other rank."""
    import torch.distributed
    from safetensors.torch import load_file
    from sglang.srt.utils import init_custom_process_group

    other = another_target(qwen3)
    prompt, params = list(b"who are you"), dict(max_new_tokens=24, ignore_eos=True)
    before = output_ids(small.generate([prompt], **params))
    port, group = free_port(), {"group_name": "trainer"}
    joined = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    tensors = load_file(other / "model.safetensors")
    sizes = {"dtypes": ["float32"] * len(tensors), "shapes": [list(x.shape) for x in tensors.values()]}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(small.post, "/init_weights_update_group", {**joined, **group})
        trainer = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, **group
        )
        assert answer.result()["success"]
        answer = pool.submit(small.post, "/update_weights_from_distributed", {"names": [*tensors], **sizes, **group})
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=trainer)
        assert answer.result()["success"]
    try:
        assert output_ids(small.generate([prompt], **params)) == [greedy(other, prompt, 24)] != before
    finally:
        assert small.post("/update_weights_from_disk", {"model_path": str(qwen3.target)})["success"]
    assert output_ids(small.generate([prompt], **params)) == before


def test_operators_questions_are_answered_as_without_speculation(qwen3: Pair) -> None:
    for path in ("/health", "/health_generate", "/model_info"):
        assert qwen3.tree.get(path) == qwen3.plain.get(path), path


def test_the_plugin_adds_no_endpoint(qwen3: Pair) -> None:
    paths = [{p: sorted(m) for p, m in json.loads(s.get("/openapi.json"))["paths"].items()} for s in both(qwen3)]
    assert len(paths[0]) > 50
    assert paths[1] == paths[0]


def both(pair: Pair) -> tuple[Server, Server]:
    return pair.plain, pair.tree


# What a request could try to change for all, and sizes that would grow a server's memory. Sampling parameters first.
HOSTILE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"speculative_ddtree_budget": 3, "spec_algorithm": "NONE", "_ddtree_config": {"budget": 200}}),
    ({"custom_params": {"speculative_ddtree_budget": 3}}, {}),
    ({"n": -1}, {}),
    ({"temperature": -1}, {}),
    ({"top_p": 7}, {}),
    ({"top_k": -7}, {}),
    ({"logit_bias": {"100000": 5}}, {}),
    ({"stop": ["never"] * 2000}, {}),
    ({"stop_token_ids": [10**9]}, {}),
    ({"json_schema": "{"}, {}),
    ({}, {"return_logprob": True, "token_ids_logprob": [10**6]}),
    ({}, {"session_params": {"id": "nobody"}}),
    ({}, {"lora_path": "nowhere"}),
    ({}, {"input_embeds": [[0.0] * 64] * 3, "text": None}),
]
# Without speculation these end SGLang 0.5.17's server.
OUT_OF_BOUNDS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": [65, 10**6]}, "input_ids"),
    ({"input_ids": [65, -5]}, "input_ids"),
    ({"text": "hi", "return_logprob": True, "top_logprobs_num": 10**6}, "top_logprobs_num"),
]


def status_of(server: Server, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        return 200, server.post("/generate", body)["output_ids"]
    except urllib.error.HTTPError as error:
        return error.code, None


def test_no_request_changes_the_server_for_others(qwen3: Pair) -> None:
    """The configuration stays, the next request is answered as before, and sizes are bounded."""
    plain, tree = both(qwen3)
    before = json.loads(tree.get("/server_info"))["ddtree"]
    for sampling, rest in HOSTILE:
        body = {"text": "hi", "sampling_params": {"temperature": 0, "max_new_tokens": 6, **sampling}, **rest}
        body = {key: value for key, value in body.items() if value is not None}
        assert status_of(tree, body) == status_of(plain, body), body
    for body, name in OUT_OF_BOUNDS:
        status, text = tree.refused("/generate", {**body, "sampling_params": {"max_new_tokens": 6}})
        assert status == 400 and name in text
    assert json.loads(tree.get("/server_info"))["ddtree"] == before
    prompt = list(b"as before")
    assert output_ids(tree.generate([prompt])) == qwen3.expected([prompt], max_new_tokens=32)
    tree.assert_pool_empty()
