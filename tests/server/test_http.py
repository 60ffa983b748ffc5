"""Through HTTP and the openai client: every answer equals that of the same server without speculation."""

import concurrent.futures
import json
import re

import pytest
from pairs import BLOCK_SIZE, CONTEXT, Pair
from serving import Server, output_ids

DEPTH = BLOCK_SIZE - 1
# Side branches at several depths, and a round that accepts nothing.
MIXED = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH, [0] * DEPTH]


@pytest.fixture
def pair(qwen3: Pair) -> Pair:
    qwen3.script(ranks=MIXED)
    return qwen3


def both(pair: Pair) -> tuple[Server, Server]:
    return pair.plain, pair.tree


def complete(server: Server, prompt: str, **params) -> str:
    params = {"temperature": 0, "max_tokens": 40, **params}
    return server.client().completions.create(model="default", prompt=prompt, **params).choices[0].text


def chat(server: Server, text: str, **params):
    params = {"temperature": 0, "max_tokens": 40, **params}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return server.client().chat.completions.create(model="default", messages=messages, **params)


@pytest.mark.feature("completions and chat")
def test_completion(pair: Pair) -> None:
    plain, tree = both(pair)
    for prompt in ("hello", "The quick brown fox", "1 2 3 4 5 6 7 8 9 10"):
        assert complete(tree, prompt) == complete(plain, prompt)


@pytest.mark.feature("completions and chat")
def test_chat(pair: Pair) -> None:
    plain, tree = both(pair)
    expected, got = chat(plain, "What is a tree?"), chat(tree, "What is a tree?")
    assert got.choices[0].message.content == expected.choices[0].message.content
    assert got.choices[0].finish_reason == expected.choices[0].finish_reason
    assert got.usage.completion_tokens == expected.usage.completion_tokens


@pytest.mark.feature("streaming")
def test_streaming(pair: Pair) -> None:
    """The chunks of a stream join to the text of the whole answer, in completions and in chat."""
    plain, tree = both(pair)
    expected = complete(plain, "stream this")
    chunks = tree.client().completions.create(
        model="default", prompt="stream this", temperature=0, max_tokens=40, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in chunks]
    assert len([p for p in pieces if p]) > 1
    assert "".join(pieces) == expected

    expected = chat(plain, "stream that").choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(tree, "stream that", stream=True)]
    assert "".join(pieces) == expected


@pytest.mark.feature("stops: EOS, stop strings, stop tokens, `max_tokens`, `ignore_eos`")
def test_stop_strings(pair: Pair) -> None:
    """A stop string that ends within an accepted run cuts it there, streaming or not."""
    plain, tree = both(pair)
    free = complete(plain, "stop soon", extra_body={"ignore_eos": True})
    stop = next(free[i : i + 2] for i in range(8, len(free) - 2) if free.find(free[i : i + 2]) == i)
    expected = complete(plain, "stop soon", stop=[stop])
    assert expected == free[: free.find(stop)]
    assert complete(tree, "stop soon", stop=[stop]) == expected
    chunks = tree.client().completions.create(
        model="default", prompt="stop soon", temperature=0, max_tokens=40, stop=[stop], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


@pytest.mark.feature("`n` above 1")
def test_several_choices(pair: Pair) -> None:
    plain, tree = both(pair)
    answer = tree.client().completions.create(model="default", prompt="many", temperature=0, max_tokens=30, n=3)
    assert [choice.text for choice in answer.choices] == [complete(plain, "many", max_tokens=30)] * 3


def test_eight_concurrent_requests_of_different_lengths(pair: Pair) -> None:
    """Requests end at different rounds, so the batch shrinks in mid-flight."""
    plain, tree = both(pair)
    asks = [(f"request {i} " * (1 + 3 * i), 5 + 9 * i) for i in range(8)]

    def ask(server: Server, item: tuple[str, int]) -> str:
        return complete(server, item[0], max_tokens=item[1], extra_body={"ignore_eos": True})

    expected = [ask(plain, item) for item in asks]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda item: ask(tree, item), asks))
    assert got == expected


@pytest.mark.feature("prefix cache")
def test_shared_prefix_twice(pair: Pair) -> None:
    """After a prefix hit the drafter still knows the prefix (vllm #47930, sglang #28528).

    The second time the prompt comes from the cache; the real drafter must then propose what it proposed
    before, so the rounds must accept the same numbers of drafts.
    """
    plain, tree = both(pair)
    prefix = list(b"a long shared prefix, " * 8)
    prompts = [prefix + list(b"first"), prefix + list(b"second")]
    params = dict(max_new_tokens=30, ignore_eos=True)
    expected = pair.expected(prompts, **params)
    plain.flush_cache()
    for script in ({}, {"ranks": MIXED}):
        tree.flush_cache()
        pair.script(**script)
        cold = [tree.generate([p], **params)[0] for p in prompts]
        pair.script(**script)
        warm = [tree.generate([p], **params)[0] for p in prompts]
        assert warm[0]["meta_info"]["cached_tokens"] >= len(prefix)
        assert output_ids(cold) == output_ids(warm) == expected
        for before, after in zip(cold, warm, strict=True):
            key = "spec_correct_drafts_histogram"
            assert before["meta_info"][key] == after["meta_info"][key]


@pytest.mark.feature("aborts, and clients that leave")
def test_abort_in_mid_stream(pair: Pair) -> None:
    """A client that leaves takes nothing with it: others go on, and the slots come back."""
    plain, tree = both(pair)
    stream = tree.client().completions.create(
        model="default",
        prompt="leave me",
        temperature=0,
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for count, _ in enumerate(stream):
        if count == 2:
            break
    stream.close()
    assert complete(tree, "still there?") == complete(plain, "still there?")
    tree.assert_pool_empty()


@pytest.mark.feature("requests up to the context limit")
def test_near_the_context_limit(pair: Pair) -> None:
    """Rows reserve two rounds past the limit without touching their neighbours (sglang #33579, #26972)."""
    plain, tree = both(pair)
    # SGLang keeps a few tokens of the context for the answer.
    lengths = (CONTEXT - 7, CONTEXT - 15, CONTEXT - 40, 40)
    prompts = [[(7 * i + length) % 250 for i in range(length)] for length in lengths]
    # A request may run to the context's end; the short one beside them is the neighbour that would suffer.
    params = [{"temperature": 0, "ignore_eos": True, "max_new_tokens": CONTEXT - length - 1} for length in lengths]
    body = {"input_ids": prompts, "sampling_params": params}
    answers = plain.post("/generate", body), tree.post("/generate", body)
    assert output_ids(answers[1]) == output_ids(answers[0])
    reasons = [[a["meta_info"]["finish_reason"] for a in side] for side in answers]
    assert reasons[0] == reasons[1]
    tree.assert_pool_empty()


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["ab", "cd"]}},
    "required": ["n", "s"],
}
GRAMMARS = {
    "regex": ({"regex": "[0-9]{6}-[a-f]{6}"}, "[0-9]{6}-[a-f]{6}"),
    "EBNF": ({"ebnf": 'root ::= ("ab" | "cd") [0-9]+ ";" root2\nroot2 ::= "x" | "yz"'}, "(ab|cd)[0-9]+;(x|yz)"),
    "JSON schema": ({"json_schema": json.dumps(SCHEMA)}, None),
}


# Once more with interpreted kernels, under overlap scheduling.
@pytest.mark.feature("structured output with xgrammar: regex, EBNF, JSON schema")
@pytest.mark.parametrize("kind, served", [*((kind, "tree") for kind in GRAMMARS), ("regex", "device")])
def test_structured_output(pair: Pair, kind: str, served: str) -> None:
    """The mask of a node follows the node's own path, illegal siblings never win: the target's own masked choices
    (vllm #53777, #55313; sglang #30096).

    The scripted drafter knows what the target would say without a grammar, so that its drafts are mostly illegal; the
    real one proposes at random.
    """
    grammar, pattern = GRAMMARS[kind]
    server = getattr(pair, served)
    sampling = {"temperature": 0, "max_new_tokens": 40, **grammar}
    body = {"text": "digits:", "sampling_params": sampling}
    expected = pair.plain.post("/generate", body)
    for ranks in (MIXED, None) if served == "tree" else (MIXED,):
        pair.script(**({"ranks": ranks} if ranks else {}))
        # A request without a grammar beside it.
        mixed = {"text": ["digits:", "free:"], "sampling_params": [sampling, {"temperature": 0, "max_new_tokens": 20}]}
        got, free = server.post("/generate", mixed)
        assert got["output_ids"] == expected["output_ids"]
        assert got["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        assert free["text"] == complete(pair.plain, "free:", max_tokens=20)
    finished = expected["meta_info"]["finish_reason"]["type"] == "stop"
    if pattern and finished:
        assert re.fullmatch(pattern, expected["text"])
    elif finished:
        assert set(json.loads(expected["text"])) == {"n", "s"}
    # Sampled, too, only what the grammar allows.
    sampled = server.post("/generate", {**body, "sampling_params": {**sampling, "temperature": 1.0}})
    if pattern and sampled["meta_info"]["finish_reason"]["type"] == "stop":
        assert re.fullmatch(pattern, sampled["text"])


REFUSED = [
    pytest.param(
        {"frequency_penalty": 0.5},
        marks=pytest.mark.feature(
            "request: frequency penalty",
            refused="DDTREE speculative decoding does not support frequency_penalty yet. Drop it, or use a server "
            "without speculation.",
        ),
    ),
    pytest.param(
        {"presence_penalty": 0.5},
        marks=pytest.mark.feature(
            "request: presence penalty",
            refused="DDTREE speculative decoding does not support presence_penalty yet. Drop it, or use a server "
            "without speculation.",
        ),
    ),
    pytest.param(
        {"repetition_penalty": 1.2},
        marks=pytest.mark.feature(
            "request: repetition penalty",
            refused="DDTREE speculative decoding does not support repetition_penalty yet. Drop it, or use a server "
            "without speculation.",
        ),
    ),
    pytest.param(
        {"min_new_tokens": 4},
        marks=pytest.mark.feature(
            "request: `min_tokens`",
            refused="DDTREE speculative decoding does not support min_new_tokens yet. Drop it, or use a server "
            "without speculation.",
        ),
    ),
]


@pytest.mark.parametrize("asked", REFUSED, ids=json.dumps)
def test_unsupported_features_get_400(pair: Pair, asked: dict, refused: str) -> None:
    """Among them a repetition penalty, which would be ignored within a run (sglang #28180)."""
    body = {"text": "hi", "sampling_params": {"max_new_tokens": 4, "temperature": 0, **asked}}
    status, text = pair.tree.refused("/generate", body)
    assert status == 400
    assert refused in text
    # OpenAI's API has its own name for one of them.
    names = {"min_new_tokens": "min_tokens"}
    body = {"model": "default", "max_tokens": 4, **{names.get(name, name): value for name, value in asked.items()}}
    messages = [{"role": "user", "content": "hi"}]
    for path, said in (("completions", {"prompt": "hi"}), ("chat/completions", {"messages": messages})):
        status, text = pair.tree.refused(f"/v1/{path}", {**body, **said})
        assert status == 400 and refused in text
    # The server goes on, and the refused request left nothing behind.
    assert complete(pair.tree, "after") == complete(pair.plain, "after")


@pytest.mark.feature("logit bias")
def test_logit_bias(pair: Pair) -> None:
    plain, tree = both(pair)
    bias = {"65": 100.0}
    got = complete(tree, "biased", logit_bias=bias)
    assert got == complete(plain, "biased", logit_bias=bias)
    assert len(set(got)) == 1


def test_pool_is_empty_at_the_end(pair: Pair) -> None:
    pair.tree.assert_pool_empty()
    assert complete(pair.tree, "hello") == complete(pair.plain, "hello")
