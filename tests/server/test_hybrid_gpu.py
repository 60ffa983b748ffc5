"""Trees on a target with recurrent layers, by SGLang's own verify kernels: a tiny Qwen3.5 in float32, on a GPU.

Three of four layers are gated delta rules with a short convolution. A sibling that began at another node's state, a
commit of the wrong node's, or a state kept for the wrong prefix would change the tokens of the next rounds; the
histogram of accepted drafts shows that the intended paths were really taken. What the target says comes from the server
without speculation, which decodes by other kernels than those that verify.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from pairs import BLOCK_SIZE, Pair
from serving import Server, output_ids
from serving import accepted_drafts_histogram as histogram

pytestmark = pytest.mark.gpu

DEPTH = BLOCK_SIZE - 1
# Long enough for what contexts cost to be measured.
CONTEXT = 2048
INTERVAL = 64
# A convolution's window holds inputs of a round beside kept ones: in float32 both must be.
ENVIRONMENT = {
    "DDTREE_TEST_TARGET": "",
    "DDTREE_TEST_TEXT_ONLY": "1",
    "DDTREE_TEST_TORCH_RECURRENT": "1",
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
}
# States as many as 16 requests need, and as many again for prefixes; by itself SGLang would take half of the GPU.
STATES = ("--max-mamba-cache-size", "160", "--mamba-track-interval", str(INTERVAL))
TREE = ("--speculative-ddtree-budget", "15")
SERVERS = {
    "tree": (*TREE, "--page-size", "16"),
    "tree-eager": (*TREE, "--disable-cuda-graph", "--disable-overlap-schedule"),
    "tree-lazy": (*TREE, "--mamba-radix-cache-strategy", "extra_buffer_lazy"),
}
# Rounds of 1, 4, 8 or 16 nodes for every request: as decided, or another number every round.
# FlashInfer's sampler is compiled when a request first needs it, which takes longer than all of a test.
AUTO_ALONE = ("--speculative-ddtree-budget", "auto", "--decode-log-interval", "1", "--sampling-backend", "pytorch")
AUTO = (*AUTO_ALONE, "--page-size", "16")
AUTO_SERVERS = {
    "auto": (AUTO, {}),
    "auto-random": (AUTO, {"DDTREE_TEST_ROUNDS": "1"}),
    "auto-random-lazy": ((*AUTO, "--mamba-radix-cache-strategy", "extra_buffer_lazy"), {"DDTREE_TEST_ROUNDS": "2"}),
    "auto-random-eager": (
        (*AUTO_ALONE, "--disable-cuda-graph", "--disable-overlap-schedule"),
        {"DDTREE_TEST_ROUNDS": "3"},
    ),
}
# Three are padded to a captured batch of four; the last is longer than two chunks of a prompt's recurrence.
PROMPTS = [list(b"hello tree"), list(b"a second, longer prompt"), list(b"0123456789 " * 12)]
LENGTH = 41
SIDE = [[0, 1, 0, 0, 0, 0, 0], [1, 0, 0, -1, -1, -1, -1], [-1] * DEPTH]


class Hybrid(Pair):
    def server(self, name: str, *args: str, env: dict[str, str] | None = None) -> Server:
        return super().server(name, *STATES, *args, env={**ENVIRONMENT, **(env or {})})

    def named(self, name: str) -> Server:
        return self.server(name, *SERVERS[name])

    def auto(self, name: str) -> Server:
        flags, env = AUTO_SERVERS[name]
        return self.server(name, *flags, env={"SGLANG_DDTREE_CACHE_DIR": str(self.folder / name), **env})

    def continuations(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy token ids without speculation, from a cold prefix cache; a round's worth more than asked for."""
        self.plain.assert_pool_empty()
        return output_ids(self.plain.generate(prompts, max_new_tokens=tokens + 2 * BLOCK_SIZE, ignore_eos=True))

    def follow(self, prompts: list[list[int]], answers: list[list[int]], ranks: list[list[int]]) -> None:
        """Let the drafter know what the target will say, and where in its candidates that stands."""
        known = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        self.script(ranks=ranks, known=known)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    tiny_models.make_hybrid(folder / "target", context=CONTEXT)
    tiny_models.make_drafter(folder / "drafter", target_layers=8, layer_ids=(1, 3, 5), block_size=BLOCK_SIZE)
    return folder


@pytest.fixture
def hybrid(models: Path) -> Iterator[Hybrid]:
    pair = Hybrid(models, "qwen3.5", [], -1)
    pair.script()
    yield pair
    pair.script()


@pytest.fixture(scope="module")
def said(models: Path) -> Callable[[Hybrid], list[list[int]]]:
    """What the target says to PROMPTS, asked once."""
    kept: list[list[list[int]]] = []

    def get(hybrid: Hybrid) -> list[list[int]]:
        if not kept:
            kept.append(hybrid.continuations(PROMPTS, LENGTH))
        return kept[0]

    return get


def ask(server: Server, prompts: list[list[int]], tokens: int = LENGTH) -> list[dict[str, Any]]:
    return server.generate(prompts, max_new_tokens=tokens, ignore_eos=True)


def firsts(answers: list[list[int]], tokens: int) -> list[list[int]]:
    return [answer[:tokens] for answer in answers]


def test_it_is_allowed_and_says_what_its_states_cost(hybrid: Hybrid) -> None:
    server = hybrid.named("tree")
    info = json.loads(server.get("/server_info"))
    assert info["ddtree"]["exact"] is True
    assert info["disable_overlap_schedule"] is False and info["page_size"] == 16
    log = server.log.read_text()
    assert "for the 16 nodes of a request" in log and "requests fit" in log
    assert "ancestor bits" in log


@pytest.mark.feature("hybrid targets with gated delta rule layers (Qwen3.5)", on="gpu")
@pytest.mark.parametrize("name", SERVERS)
def test_the_drafters_own_trees(hybrid: Hybrid, name: str, said: Callable[[Hybrid], list[list[int]]]) -> None:
    expected = firsts(said(hybrid), LENGTH)
    assert output_ids(ask(hybrid.named(name), PROMPTS)) == expected


@pytest.mark.feature("hybrid targets with gated delta rule layers (Qwen3.5)", on="gpu")
@pytest.mark.parametrize("name", SERVERS)
def test_side_branch_at_every_depth(hybrid: Hybrid, name: str, said: Callable[[Hybrid], list[list[int]]]) -> None:
    """The chain is left at one depth and the walk goes on along the side branch, round after round."""
    server, answers = hybrid.named(name), said(hybrid)
    for depth in range(1, DEPTH + 1):
        hybrid.follow(PROMPTS, answers, [[1 if d == depth else 0 for d in range(1, DEPTH + 1)]])
        got = ask(server, PROMPTS)
        assert output_ids(got) == firsts(answers, LENGTH), f"depth {depth}"
        assert [histogram(answer) for answer in got] == [{DEPTH: 5}] * len(PROMPTS), f"depth {depth}"


ROUNDS = {
    "the chain": ([[0] * DEPTH], {DEPTH: 5}),
    "nothing accepted": ([[-1] * DEPTH], {0: 40}),
    "two side branches in turn": ([[1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]], {DEPTH: 5}),
    "a side branch, then nothing": ([[0, 1, 0, -1, -1, -1, -1], [-1] * DEPTH], {0: 8, 3: 8}),
    "a high rank alone": ([[7] + [-1] * (DEPTH - 1)], {1: 20}),
}


@pytest.mark.feature("hybrid targets with gated delta rule layers (Qwen3.5)", on="gpu")
@pytest.mark.parametrize("name", SERVERS)
def test_rounds_in_turn(hybrid: Hybrid, name: str, said: Callable[[Hybrid], list[list[int]]]) -> None:
    """A round without a draft starts from the state that a round with a side branch left (vllm #52942)."""
    server, answers = hybrid.named(name), said(hybrid)
    for what, (ranks, rounds) in ROUNDS.items():
        hybrid.follow(PROMPTS, answers, ranks)
        got = ask(server, PROMPTS)
        assert output_ids(got) == firsts(answers, LENGTH), what
        assert [histogram(answer) for answer in got] == [rounds] * len(PROMPTS), what


@pytest.mark.feature("hybrid targets with gated delta rule layers (Qwen3.5)", on="gpu")
@pytest.mark.parametrize("name", SERVERS)
def test_eight_requests_that_end_one_by_one(hybrid: Hybrid, name: str) -> None:
    """A slot of states that a request leaves is another's at once, while a round may be under way."""
    prompts = [list(b"request %d " % i * (1 + 3 * (i % 4))) for i in range(16)]
    lengths = [5 + 7 * (i % 6) for i in range(16)]
    answers = hybrid.continuations(prompts, max(lengths))
    hybrid.follow(prompts, answers, SIDE)
    server = hybrid.named(name)
    params = [dict(temperature=0, ignore_eos=True, max_new_tokens=length) for length in lengths]
    for chosen in (slice(0, 8), slice(8, 16), slice(0, 16)):
        body = {"input_ids": prompts[chosen], "sampling_params": params[chosen]}
        expected = [answer[:length] for answer, length in zip(answers[chosen], lengths[chosen], strict=True)]
        assert output_ids(server.post("/generate", body)) == expected
    server.assert_pool_empty()


@pytest.mark.feature("hybrid targets with gated delta rule layers (Qwen3.5)", on="gpu")
@pytest.mark.parametrize("name", SERVERS)
def test_a_prefix_hit_restores_the_state_of_its_position(hybrid: Hybrid, name: str) -> None:
    """Of a prompt, and of a place within an answer that was accepted along side branches (sglang #34043)."""
    server = hybrid.named(name)
    server.assert_pool_empty()
    prompt = list(b"what was said before, and how it went on: " * 3)[:100]
    # The last round ends with the answer: 1 from the prompt, then 8 a round.
    tokens = 1 + 18 * BLOCK_SIZE
    answers = hybrid.continuations([prompt], tokens)
    ranks = [[1, 0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0]]
    hybrid.follow([prompt], answers, ranks)
    cached = []
    for _ in ("cold", "warm"):
        (answer,) = ask(server, [prompt], tokens)
        assert answer["output_ids"] == answers[0][:tokens]
        assert histogram(answer) == {DEPTH: 18}
        cached.append(answer["meta_info"]["cached_tokens"])
    # Kept where 64 tokens of a prompt end; or of the whole prompt, which helps a longer one alone.
    assert cached == [0, 0 if name == "tree-eager" else INTERVAL]

    longer = [*prompt, *answers[0][:tokens], *b" and on"]
    expected = hybrid.continuations([longer], LENGTH)
    hybrid.follow([longer], expected, SIDE)
    (answer,) = ask(server, [longer])
    assert answer["output_ids"] == expected[0][:LENGTH]
    # All that was committed is kept where a request's own state is handed on, else the last multiple of the interval.
    kept = len(prompt) + tokens - 1
    last = kept // INTERVAL * INTERVAL
    # A lazy server gives a state up rather than let a round under way write it.
    possible = {"tree": [last], "tree-eager": [kept], "tree-lazy": range(INTERVAL, last + 1, INTERVAL)}
    assert answer["meta_info"]["cached_tokens"] in possible[name]
    server.assert_pool_empty()
    hybrid.follow([longer], expected, SIDE)
    (answer,) = ask(server, [longer])
    assert answer["output_ids"] == expected[0][:LENGTH] and answer["meta_info"]["cached_tokens"] == 0
    server.assert_pool_empty()


@pytest.mark.feature("`--speculative-ddtree-budget auto` with gated delta rule layers (Qwen3.5)", on="gpu")
@pytest.mark.parametrize("name", AUTO_SERVERS)
def test_rounds_of_changing_width(hybrid: Hybrid, name: str, said: Callable[[Hybrid], list[list[int]]]) -> None:
    """A state that a round of one width leaves is where a round of another begins."""
    server, answers = hybrid.auto(name), said(hybrid)
    hybrid.script()
    assert output_ids(ask(server, PROMPTS)) == firsts(answers, LENGTH), "the drafter's own trees"
    for what, (ranks, _) in ROUNDS.items():
        hybrid.follow(PROMPTS, answers, ranks)
        for _ in range(2):
            assert output_ids(ask(server, PROMPTS)) == firsts(answers, LENGTH), what
    prompts = [list(b"request %d " % i * (1 + 3 * (i % 4))) for i in range(16)]
    lengths = [5 + 7 * (i % 6) for i in range(16)]
    known = hybrid.continuations(prompts, max(lengths))
    hybrid.follow(prompts, known, SIDE)
    params = [dict(temperature=0, ignore_eos=True, max_new_tokens=length) for length in lengths]
    for chosen in (slice(0, 8), slice(0, 16)):
        body = {"input_ids": prompts[chosen], "sampling_params": params[chosen]}
        expected = [answer[:length] for answer, length in zip(known[chosen], lengths[chosen], strict=True)]
        assert output_ids(server.post("/generate", body)) == expected
    # Of a place within an answer that rounds of several widths committed.
    longer = [*PROMPTS[0], *answers[0][:LENGTH], *b" and on"]
    (expected,) = hybrid.continuations([longer], LENGTH)
    hybrid.follow([longer], [expected], SIDE)
    for _ in ("cold", "warm"):
        assert output_ids(ask(server, [longer])) == [expected[:LENGTH]]
    sampled = server.generate(PROMPTS, temperature=0.8, top_p=0.9, max_new_tokens=30, ignore_eos=True)
    assert all(len(ids) == 30 for ids in output_ids(sampled))
    server.assert_pool_empty()
    log = (hybrid.folder / f"{name}.log").read_text()
    if "random" in name:
        assert all(f"a round verifies {nodes} nodes per request" in log for nodes in (1, 4, 8, 16))
    if "eager" not in name:
        assert "the target verifies 1, 4, 8, 16 nodes per request from CUDA graphs" in log
        assert "ms per round by requests and verify tokens" in log and "a context token adds" in log
        # Rounds of every width.
        rounds = [line for line in log.splitlines() if "Decode batch" in line]
        assert rounds and all("cuda graph: True" in line for line in rounds)
    hybrid.stop(name)


@pytest.mark.feature("hybrid targets with gated delta rule layers (Qwen3.5)", on="gpu")
def test_shadow_linear_serves_the_chain(hybrid: Hybrid, said: Callable[[Hybrid], list[list[int]]]) -> None:
    server = hybrid.server("chain", "--speculative-ddtree-shadow-linear")
    answers = said(hybrid)
    for ranks, rounds in (([[0] * DEPTH], {DEPTH: 5}), ([[0, 0, 0, -1, -1, -1, -1], [-1] * DEPTH], {0: 8, 3: 8})):
        hybrid.follow(PROMPTS, answers, ranks)
        got = ask(server, PROMPTS)
        assert output_ids(got) == firsts(answers, LENGTH)
        assert [histogram(answer) for answer in got] == [rounds] * len(PROMPTS)
    server.assert_pool_empty()
    hybrid.stop("chain")


def test_requests_that_do_not_fit_are_an_error(hybrid: Hybrid) -> None:
    """SGLang would lower the number; its own line about it names no remedy that a tree has (sglang #36889)."""
    with pytest.raises(RuntimeError, match="the server died"):
        hybrid.server("too-small", *TREE, "--max-mamba-cache-size", "20")
    log = (hybrid.folder / "too-small.log").read_text()
    assert "DDTREE: --max-running-requests 16 does not fit." in log
    assert "--max-mamba-cache-size 20 holds 5 states for each of 4; give 80 or drop it" in log


def test_another_type_of_convolution_states_is_refused(hybrid: Hybrid) -> None:
    """In bfloat16 beside a float32 target SGLang's kernel for trees does not even compile."""
    with pytest.raises(RuntimeError, match="the server died"):
        hybrid.server("rounded", *TREE, env={"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"})
    assert "set SGLANG_MAMBA_CONV_DTYPE=float32" in (hybrid.folder / "rounded.log").read_text()
