"""Round statistics: a script gives known rounds, and ``meta_info``, ``/metrics`` and ``/server_info`` show them."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pairs import BLOCK_SIZE, Pair
from serving import Server, output_ids

DEPTH = BLOCK_SIZE - 1
BUDGET = 15
PROMPTS = [list(b"hello tree"), list(b"count the rounds"), list(b"x")]
# One token from prefill, 40 from rounds.
LENGTH = dict(max_new_tokens=41, ignore_eos=True)
FULL = [[0] * DEPTH]
NOTHING = [[-1] * DEPTH]
SIDE = [[0, 1, 0, 0, 0, 0, 0]]


def histogram(counts: list[int]) -> dict[int, int]:
    return {value: rounds for value, rounds in enumerate(counts) if rounds}


def samples(server: Server) -> dict[str, float]:
    """DDTREE's Prometheus samples, each metric's summed over its labels (buckets are left out)."""
    found: dict[str, float] = {}
    for line in server.get("/metrics").splitlines():
        name, _, rest = line.partition("{")
        if name.startswith("sglang:ddtree_") and not name.endswith("_bucket"):
            assert 'model_name="' in rest and 'tp_rank="0"' in rest
            found[name.removeprefix("sglang:ddtree_")] = found.get(name, 0.0) + float(rest.rpartition(" ")[2])
    return found


@contextmanager
def counted(server: Server) -> Iterator[dict[str, float]]:
    """What the samples grow by within the block."""
    before, grown = samples(server), {}
    yield grown
    grown |= {name: value - before.get(name, 0.0) for name, value in samples(server).items()}


def ask(pair: Pair, server: Server, **script) -> list[dict]:
    """``meta_info["ddtree"]`` of each prompt; the tokens equal those of no speculation."""
    expected = pair.expected(PROMPTS, **LENGTH)
    pair.script(**script)
    answers = server.generate(PROMPTS, **LENGTH)
    assert output_ids(answers) == expected
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["ddtree"]["rounds"] == meta["spec_verify_ct"]
        # SGLang counts accepted drafts, one fewer than the tokens committed.
        drafts = histogram(meta["spec_correct_drafts_histogram"])
        assert histogram(meta["ddtree"]["committed_tokens_histogram"]) == {n + 1: r for n, r in drafts.items()}
        assert "spec_cap_lens_histogram" not in meta
    return [answer["meta_info"]["ddtree"] for answer in answers]


# --- The tree is served ------------------------------------------------------------------------------


@pytest.mark.feature("round statistics in `meta_info` and `/metrics`")
@pytest.mark.parametrize(
    "ranks, committed, side",
    [
        (FULL, {8: 5}, 0),
        (NOTHING, {1: 40}, 0),
        (SIDE, {8: 5}, 5),
        ([[0] * (DEPTH - 1) + [1]], {8: 5}, 5),
        # 4 tokens along a side branch, then 1 token.
        ([[1, 0, 0, -1, -1, -1, -1], *NOTHING], {1: 8, 4: 8}, 8),
        # 4 tokens along the chain, then 4 along a side branch.
        ([[0, 0, 0, -1, -1, -1, -1], [0, 2, 0, -1, -1, -1, -1]], {4: 10}, 5),
    ],
    ids=["chain", "nothing", "side branch", "side branch at the end", "every other round", "chain and side branch"],
)
def test_tree(qwen3: Pair, ranks: list[list[int]], committed: dict[int, int], side: int) -> None:
    server = qwen3.tree
    with counted(server) as grown:
        reports = ask(qwen3, server, ranks=ranks)
    rounds = sum(committed.values())
    for report in reports:
        assert report["rounds"] == rounds
        assert histogram(report["committed_tokens_histogram"]) == committed
        assert histogram(report["accepted_depth_histogram"]) == {n - 1: r for n, r in committed.items()}
        assert report["committed_tokens"] == 40
        assert report["committed_tokens_per_round"] == 40 / rounds
        assert report["tree_nodes_per_round"] == BUDGET
        assert 1 <= report["tree_depth_per_round"] <= DEPTH
        assert report["side_branch_rounds"] == side
        assert report["side_branch_share"] == side / rounds
    requests = len(PROMPTS)
    assert grown["rounds_total"] == grown["committed_tokens_count"] == rounds * requests
    assert grown["committed_tokens_sum"] == 40 * requests
    assert grown["tree_nodes_total"] == BUDGET * rounds * requests
    assert grown["tree_depth_sum"] == sum(report["tree_depth_per_round"] * rounds for report in reports)
    assert grown["side_branch_rounds_total"] == side * requests
    assert not [name for name in grown if "mismatch" in name or "shadow" in name]


@pytest.mark.parametrize("spread, depth", [(1, 7), (2, 4), (8, 2)])
def test_tree_depth(qwen3: Pair, spread: int, depth: int) -> None:
    """15 nodes: the chain first, or two, or eight equally likely candidates at every position."""
    for report in ask(qwen3, qwen3.tree, ranks=FULL, spread=spread):
        assert report["tree_depth_per_round"] == depth


@pytest.mark.feature("round statistics in `meta_info` and `/metrics`")
def test_accept_rate_reaches_one(qwen3: Pair) -> None:
    """A path holds one node per depth: at most 7 of the 15 drafted nodes (SGLang's own rate would end at 7 / 15)."""
    server = qwen3.tree
    expected = qwen3.expected(PROMPTS[:1], max_new_tokens=65, ignore_eos=True)
    qwen3.script(ranks=FULL)
    # SGLang writes the gauges every 40 rounds; these are more than twice as many.
    for _ in range(11):
        (answer,) = server.generate(PROMPTS[:1], max_new_tokens=65, ignore_eos=True)
        assert answer["output_ids"] == expected[0]
    meta = answer["meta_info"]
    assert meta["spec_accept_rate"] == 1.0
    assert meta["spec_num_proposed_drafts"] == BUDGET * 8
    lines = [line for line in server.get("/metrics").splitlines() if line.startswith("sglang:spec_accept")]
    shown = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert shown == {"sglang:spec_accept_rate": 1.0, "sglang:spec_accept_length": 8.0}
    loads = json.loads(server.get("/v1/loads?include=all"))["loads"][0]
    assert loads["speculative"]["accept_rate"] == 1.0
    assert "accept len: 8.00, accept rate: 1.00" in server.log.read_text()


def test_a_request_that_ends_within_a_round(qwen3: Pair) -> None:
    """The round counts as it was verified, as in SGLang's own histogram; a request without a round has no numbers."""
    qwen3.script(ranks=FULL)
    for tokens, rounds in ((1, 0), (2, 1), (9, 1), (12, 2)):
        (answer,) = qwen3.tree.generate(PROMPTS[:1], max_new_tokens=tokens, ignore_eos=True)
        meta = answer["meta_info"]
        assert meta["completion_tokens"] == tokens
        if rounds == 0:
            assert "ddtree" not in meta
            continue
        assert histogram(meta["ddtree"]["committed_tokens_histogram"]) == {8: rounds}


@pytest.mark.feature("round statistics in `meta_info` and `/metrics`")
def test_streams_and_chats_carry_the_numbers(qwen3: Pair) -> None:
    qwen3.script(ranks=SIDE)
    body = {"input_ids": PROMPTS[0], "sampling_params": {"temperature": 0, **LENGTH}, "stream": True}
    request = urllib.request.Request(
        qwen3.tree.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        lines = [line.decode().removeprefix("data: ").strip() for line in response if line.strip()]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line)["meta_info"] for line in lines[:-1]]
    assert len(chunks) > 2
    # As SGLang's own numbers, with the last chunk.
    assert ["ddtree" in meta for meta in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["ddtree"]["side_branch_share"] == 1.0
    assert histogram(chunks[-1]["ddtree"]["committed_tokens_histogram"]) == {8: 5}

    answer = qwen3.tree.post(
        "/v1/chat/completions",
        {
            "model": "default",
            "messages": [{"role": "user", "content": "count"}],
            "temperature": 0,
            "max_tokens": 20,
            "ignore_eos": True,
            "return_meta_info": True,
        },
    )
    assert answer["choices"][0]["meta_info"]["ddtree"]["side_branch_share"] == 1.0


# --- The chain is served, the tree is looked at --------------------------------------------------------


@pytest.mark.feature("`--speculative-ddtree-shadow-linear`")
@pytest.mark.parametrize(
    "script, served, tree, mismatch, rescued, pruned",
    [
        # The whole chain is accepted, and the tree holds it.
        (dict(ranks=FULL), {8: 5}, {8: 5}, 0, 0, 0),
        # No candidate is right.
        (dict(ranks=NOTHING), {1: 40}, {1: 40}, 40, 0, 0),
        # The chain ends before the second position, where the tree has the sibling: one token more at least.
        (dict(ranks=SIDE), {2: 20}, {3: 20}, 20, 20, 0),
        (dict(ranks=[[3] + [-1] * (DEPTH - 1)]), {1: 40}, {2: 40}, 40, 40, 0),
        # Three drafts, and nothing right at the fourth position.
        (dict(ranks=[[0, 0, 0, -1, -1, -1, -1]]), {4: 10}, {4: 10}, 10, 0, 0),
        # Eight equally likely candidates everywhere: 15 nodes reach the second position, the chain all seven.
        (dict(ranks=FULL, spread=8), {8: 5}, {3: 5}, 0, 0, 5),
        # The tree holds two of the chain's three drafts: it never sees the fourth position, rescue or not.
        (dict(ranks=[[0, 0, 0, 1, -1, -1, -1]], spread=8), {4: 10}, {3: 10}, 10, 0, 10),
        # One round of each kind in turn: rescued (2, at least 3), nothing (1).
        (dict(ranks=[*SIDE, *NOTHING]), {1: 13, 2: 14}, {1: 13, 3: 14}, 27, 14, 0),
    ],
    ids=[
        "chain",
        "nothing",
        "rescue",
        "rescue at the root",
        "mismatch without rescue",
        "pruned",
        "mismatch behind the tree",
        "in turn",
    ],
)
def test_shadow(
    qwen3: Pair,
    script: dict,
    served: dict[int, int],
    tree: dict[int, int],
    mismatch: int,
    rescued: int,
    pruned: int,
) -> None:
    server = qwen3.chain
    with counted(server) as grown:
        reports = ask(qwen3, server, **script)
    rounds, lower_bound = sum(served.values()), sum(tokens * n for tokens, n in tree.items())
    for report in reports:
        assert histogram(report["committed_tokens_histogram"]) == served
        assert histogram(report["tree_committed_tokens_histogram"]) == tree
        assert report["committed_tokens"] == sum(tokens * n for tokens, n in served.items())
        assert report["tree_committed_tokens"] == lower_bound
        assert report["tree_committed_tokens_per_round"] == lower_bound / rounds
        assert report["tree_nodes_per_round"] == BUDGET
        numbers = [report[f"{name}_rounds"] for name in ("mismatch", "rescued", "pruned")]
        assert numbers == [mismatch, rescued, pruned]
        assert report["rescue_share"] == (rescued / mismatch if mismatch else 0.0)
    requests = len(PROMPTS)
    assert grown["rounds_total"] == rounds * requests
    assert grown["committed_tokens_sum"] == sum(report["committed_tokens"] for report in reports)
    assert grown["shadow_committed_tokens_sum"] == lower_bound * requests
    numbers = [grown[f"{name}_rounds_total"] for name in ("mismatch", "rescued", "pruned")]
    assert numbers == [mismatch * requests, rescued * requests, pruned * requests]
    assert "side_branch_rounds_total" not in grown


def test_shadow_serves_dflashs_chain_with_the_real_drafter(qwen3: Pair) -> None:
    """The drafter's own candidates: the chain beside a tree is the chain that is served as a tree of one candidate."""
    reports = ask(qwen3, qwen3.chain)
    assert all(report["tree_committed_tokens"] >= report["rounds"] for report in reports)
    assert "shadow-linear mode is enabled" in qwen3.chain.log.read_text()


# --- Overlap scheduling --------------------------------------------------------------------------------


def test_rounds_launched_for_requests_that_had_ended_are_not_counted(qwen3: Pair) -> None:
    """Results come one round late, and each request here ends at another round."""
    server = qwen3.device
    # Short: without a GPU this server's kernels are interpreted.
    lengths = [3, 20, 9, 15, 1, 12]
    qwen3.script(ranks=[[0, 1, 0, -1, -1, -1, -1], [1, 0, 0, -1, -1, -1, -1], *NOTHING])
    metas: dict[int, dict] = {}

    def run(index: int) -> None:
        prompt = list(b"request %d " % index)
        metas[index] = server.generate([prompt], max_new_tokens=lengths[index], ignore_eos=True)[0]["meta_info"]

    with counted(server) as grown:
        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(lengths))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(metas) == len(lengths)
    for index, length in enumerate(lengths):
        # 4, 4 and 1 tokens in turn, until the length is reached; one token came from prefill.
        left, rounds = length - 1, []
        while left > 0:
            rounds.append((4, 4, 1)[len(rounds) % 3])
            left -= rounds[-1]
        if not rounds:
            assert "ddtree" not in metas[index]
            continue
        report = metas[index]["ddtree"]
        assert report["rounds"] == len(rounds)
        assert report["committed_tokens"] == sum(rounds)
        assert report["side_branch_rounds"] == sum(tokens > 1 for tokens in rounds)
    reports = [meta["ddtree"] for meta in metas.values() if "ddtree" in meta]
    assert grown["rounds_total"] == sum(report["rounds"] for report in reports)
    assert grown["committed_tokens_sum"] == sum(report["committed_tokens"] for report in reports)


# --- /server_info --------------------------------------------------------------------------------------


@pytest.mark.feature("configuration in `/server_info`")
def test_server_info(qwen3: Pair) -> None:
    shared = {"topk_cap": 8, "block_size": BLOCK_SIZE, "allow_hybrid_unsafe": False, "exact": True}
    tree = json.loads(qwen3.tree.get("/server_info"))
    assert tree["ddtree"] == {
        **shared,
        "budget": BUDGET,
        "verify_width": BUDGET + 1,
        "max_depth": DEPTH,
        "shadow_linear": False,
    }
    chain = json.loads(qwen3.chain.get("/get_server_info"))
    assert chain["ddtree"] == {
        **shared,
        "budget": BUDGET,
        "verify_width": BLOCK_SIZE,
        "max_depth": DEPTH,
        "shadow_linear": True,
    }
    assert "ddtree" not in json.loads(qwen3.plain.get("/server_info"))
