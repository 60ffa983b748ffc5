"""Every way to end a request within an accepted run, and what is made of its text: streams, parsers, grammars.

The target is taught two answers by heart, so that the text is known; the scripted drafter proposes them in long runs.
"""

from __future__ import annotations

import concurrent.futures
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from pairs import BLOCK_SIZE, CONTEXT, Pair, stop_all
from serving import Server

DEPTH = BLOCK_SIZE - 1
WHOLE_RUNS = [[0] * DEPTH]
# Runs of several lengths, some along side branches: ends lie at every place of a run.
MIXED = [[0, 1, 0, 0, 0, 0, 0], [0, 0, 0, -1, -1, -1, -1], [0] * DEPTH, [0, 0, 0, 0, 1, 0, -1]]

THINK, SAYS = "Bäume: \U0001f333 und 木.", "Forty-two, größer als 7 ✓!"
CITIES = ("Zürich", "Oslo")
CALL = "\n".join(
    f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}", "days": 3}}}}\n</tool_call>' for city in CITIES
)
ANSWERS = {"think": f"<think>{THINK}</think>{SAYS}", "call": f"<think>Ask.</think>{CALL}"}
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
FLAGS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25")


def prompt_of(text: str) -> str:
    """What the chat template makes of one user message."""
    return f"<|user|>{text}\n<|assistant|>"


def name_marks(target: Path) -> None:
    """Make the parsers' marks tokens of their own, as in real tokenizers: SGLang reads marks in pieces wrongly."""
    from transformers import AutoTokenizer

    path = target / "tokenizer.json"
    content = path.read_text()
    for index, mark in enumerate(MARKS, start=tiny_models.MASK_TOKEN_ID + 1):
        assert f"<|extra{index}|>" in content
        content = content.replace(f"<|extra{index}|>", mark)
    path.write_text(content)
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_tokens(list(MARKS))
    assert len(tokenizer) == tiny_models.VOCABULARY
    tokenizer.save_pretrained(target)


def teach(target: Path) -> None:
    """Train the target until it gives the answers by heart."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    rows = []
    for question, answer in ANSWERS.items():
        prompt = tokenizer(prompt_of(question)).input_ids
        rows.append((len(prompt), prompt + tokenizer(answer).input_ids + [tiny_models.EOS_TOKEN_ID]))
    length = max(len(ids) for _, ids in rows)
    inputs = torch.tensor([ids + [0] * (length - len(ids)) for _, ids in rows])
    labels = inputs.clone()
    for label, (start, ids) in zip(labels, rows, strict=True):
        label[:start], label[len(ids) :] = -100, -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(1000):
        output = model(inputs, labels=labels)
        chosen = torch.log_softmax(output.logits[:, :-1], -1).gather(-1, labels[:, 1:, None].clamp(min=0))[..., 0]
        # The likeliest token everywhere, by far: no rounding can change it.
        if bool((chosen[labels[:, 1:] >= 0] > -0.05).all()):
            model.save_pretrained(target)
            return
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    raise AssertionError("the target did not learn its answers")


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("taught")
    tiny_models.make_target(folder / "target", context=CONTEXT, scale=1.0)
    name_marks(folder / "target")
    teach(folder / "target")
    tiny_models.make_drafter(folder / "drafter", block_size=BLOCK_SIZE)
    pair = Pair(folder, "taught", [], 0)
    pair.script(ranks=MIXED)
    # Two servers that start at once, and need the room of all others meanwhile.
    stop_all()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda start: start(pair), (plain_server, tree_server)))
    return pair


def plain_server(pair: Pair) -> Server:
    return pair.server("plain", *FLAGS)


def tree_server(pair: Pair) -> Server:
    return pair.server("tree", "--speculative-ddtree-budget", "15", *FLAGS)


@pytest.fixture
def servers(taught: Pair) -> tuple[Server, Server]:
    taught.script(ranks=MIXED)
    return plain_server(taught), tree_server(taught)


def short(answer: dict[str, Any]) -> tuple[Any, ...]:
    meta = answer["meta_info"]
    return answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"]


def ends(text: str, ids: list[int]) -> list[dict[str, Any]]:
    """Sampling parameters that end the "think" answer in many ways and places.

    Args:
        text: what the target says, and goes on to say after its end of sequence.
        ids: the same as tokens.
    """
    answer = ANSWERS["think"]
    eos = ids.index(tiny_models.EOS_TOKEN_ID)
    once = [i for i in range(0, len(answer) - 3, 2) if answer.find(answer[i : i + 3]) == i]
    # Of a stop string whose characters come in pieces SGLang leaves the beginning in the text, without speculation.
    cuts = [answer[i : i + 3] for i in once if answer[i : i + 3].isascii()]
    unique = [token for token in ids[:eos] if ids.count(token) == 1][::2]
    cases: list[dict[str, Any]] = [{"stop": cut} for cut in cuts]
    cases += [{"stop_token_ids": [token]} for token in unique]
    cases += [{"max_new_tokens": n} for n in range(1, 2 * BLOCK_SIZE)]
    # A limit in the same run as the end of sequence: before it, at it, behind it.
    cases += [{"max_new_tokens": eos + 1 + n} for n in range(-3, BLOCK_SIZE)]
    cases += [{"max_new_tokens": 30, "stop": cut} for cut in cuts if 20 < answer.find(cut) < 44]
    # Two stop strings, the later one named first; a string behind the end of sequence; a token beside a string.
    cases += [{"stop": [late, early]} for early, late in zip(cuts, cuts[2:], strict=False)]
    behind = text[len(answer) :]
    strings = [behind[i : i + length] for length in (1, 2) for i in range(8)]
    cases += [{"stop": string} for string in strings if string.isascii() and string and string not in answer]
    cases += [{"stop": cut, "stop_token_ids": [token]} for cut, token in zip(cuts[3:], unique[3:], strict=False)]
    # An expression that matches at the end of what has been said, and no longer a token later.
    cases += [{"stop_regex": re.escape(cut) + "$"} for cut in cuts[:9]]
    cases += [{"stop": cuts[9], "no_stop_trim": True}, {"stop": cuts[10], "ignore_eos": True}]
    cases += [{"ignore_eos": True, "max_new_tokens": n} for n in (eos, eos + 1, eos + 7)]
    return cases


@pytest.mark.feature("stops: EOS, stop strings, stop tokens, `max_tokens`, `ignore_eos`")
def test_every_way_to_end_within_a_run(taught: Pair, servers: tuple[Server, Server]) -> None:
    """The first end in the text wins, whatever kind it is, as if tokens came one at a time."""
    plain, tree = servers
    prompt = prompt_of("think")
    greedy = {"temperature": 0, "max_new_tokens": 120}
    free = plain.post("/generate", {"text": prompt, "sampling_params": {**greedy, "ignore_eos": True}})
    assert free["text"].startswith(ANSWERS["think"])
    params = [{**greedy, **case} for case in ends(free["text"], free["output_ids"])]
    body = {"text": [prompt] * len(params), "sampling_params": params}
    expected = plain.post("/generate", body)
    for ranks in (WHOLE_RUNS, MIXED):
        taught.script(ranks=ranks)
        got = tree.post("/generate", body)
        wrong = [(p, short(g), short(e)) for p, g, e in zip(params, got, expected, strict=True) if short(g) != short(e)]
        assert not wrong, f"{len(wrong)} of {len(params)}, the first: {wrong[0]}"
        # The script was accepted, so that the ends did lie within runs.
        assert sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in got) > 10 * len(got)


def events(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.post(path, {**body, "stream": True})
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.feature("streaming")
@pytest.mark.parametrize("more", [{}, {"stop": "als"}, {"max_tokens": 33}, {"stop": [" 7 ✓", "öß"]}], ids=str)
def test_streams_are_whole_and_in_order(servers: tuple[Server, Server], more: dict[str, Any]) -> None:
    """No chunk holds half a character or a stop string; together they are the whole answer, counted once."""
    plain, tree = servers
    body = {"model": "default", "prompt": prompt_of("think"), "temperature": 0, "max_tokens": 100, **more}
    expected = plain.post("/v1/completions", body)
    assert tree.post("/v1/completions", body)["choices"] == expected["choices"]
    chunks = events(tree, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    usage = chunks.pop()["usage"]
    pieces = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len([piece for piece in pieces if piece]) > 2
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == expected["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[key] == expected["usage"][key]


def chat(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 250, **more}


def message_of(answer: dict[str, Any]) -> dict[str, Any]:
    """A chat answer without the ids that are drawn at random."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return {
        "reasoning": message.get("reasoning_content") or "",
        "content": message.get("content") or "",
        "calls": [(call["name"], call["arguments"]) for call in calls],
        "finish": choice["finish_reason"],
    }


def message_of_stream(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    reasoning, content, calls, finish = "", "", {}, None
    for (choice,) in (chunk["choices"] for chunk in chunks if chunk["choices"]):
        delta = choice["delta"]
        reasoning += delta.get("reasoning_content") or ""
        content += delta.get("content") or ""
        finish = choice["finish_reason"] or finish
        for call in delta.get("tool_calls") or []:
            name, arguments = calls.get(call["index"], ("", ""))
            part = call["function"]
            calls[call["index"]] = name + (part.get("name") or ""), arguments + (part.get("arguments") or "")
    calls_in_order = [calls[index] for index in sorted(calls)]
    return {"reasoning": reasoning, "content": content, "calls": calls_in_order, "finish": finish}


CHATS = {
    "reasoning": chat("think"),
    "tools": chat("call", tools=[TOOL]),
    # Ends while it thinks, in the run that ends thinking, and within a call.
    **{f"limit {n}": chat("think", max_tokens=n) for n in (5, 19, 23, 24)},
    "stop in thinking": chat("think", stop=["木"]),
    "limit in a call": chat("call", tools=[TOOL], max_tokens=60),
    "not separated": chat("think", separate_reasoning=False),
}


@pytest.mark.feature("`--reasoning-parser`, `--tool-call-parser`")
@pytest.mark.parametrize("name", CHATS)
def test_parsers_see_the_same_text(servers: tuple[Server, Server], name: str) -> None:
    """--reasoning-parser and --tool-call-parser, whole answers and streams."""
    plain, tree = servers
    body = CHATS[name]
    expected, got = (server.post("/v1/chat/completions", body) for server in (plain, tree))
    assert message_of(got) == message_of(expected)
    assert got["usage"] == expected["usage"]
    streamed, expected_stream = (message_of_stream(events(server, "/v1/chat/completions", body)) for server in servers)
    assert streamed == expected_stream
    if name == "reasoning":
        assert message_of(got)["reasoning"] == THINK and message_of(got)["content"] == SAYS
    if name == "tools":
        calls = [(name, json.loads(arguments)) for name, arguments in message_of(got)["calls"]]
        assert calls == [("weather", {"city": city, "days": 3}) for city in CITIES]
        assert streamed["calls"] and message_of(got)["finish"] == "tool_calls"


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "s": {"enum": ["ab", "cd"]}},
    "required": ["n", "s"],
}


@pytest.mark.feature("structured output after reasoning")
def test_a_grammar_begins_after_the_reasoning(servers: tuple[Server, Server]) -> None:
    """The end of thinking lies within an accepted run: from there on the grammar rules."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    body = chat("think", response_format=schema, max_tokens=80)
    expected, got = (server.post("/v1/chat/completions", body) for server in servers)
    assert message_of(got) == message_of(expected)
    assert message_of(got)["reasoning"] == THINK
    assert message_of(got)["content"].lstrip().startswith("{")


def test_pools_are_empty_afterwards(servers: tuple[Server, Server]) -> None:
    for server in servers:
        server.assert_pool_empty()
