"""The SmolLM2 pair in float32: a trained drafter, real text, real acceptance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm_start
from serving import HERE, Server, committed_per_round, environment, output_ids
from warm_start import WarmParent

TOKENS = 64
BLOCK_SIZE = 16
ITEMS = json.loads((HERE / "data" / "prompts.json").read_text())
PLUGINS = {"PYTHONPATH": str(HERE / "plugins")}
FLAGS = ("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "10")
# Committed tokens per round of 64 prompts of HumanEval, GSM8K and MT-bench with 256 new tokens each, from the
# drafter's README; ours are other prompts of the same kinds and shorter, hence the tolerance.
README_RATES = {
    "chain": {"code": 3.682, "math": 3.781, "chat": 2.678},
    "tree": {"code": 4.533, "math": 4.658, "chat": 3.373},
}
TOLERANCE = 0.30


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    texts = [
        tokenizer.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True) for item in ITEMS
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


@pytest.fixture(scope="module")
def parent() -> Iterator[WarmParent | None]:
    """Forks this module's servers."""
    found = WarmParent(environment(PLUGINS)) if warm_start.POSSIBLE else None
    yield found
    if found is not None:
        found.stop()


@pytest.fixture(scope="module")
def answers(
    smollm2_dir: Path,
    drafter_dir: Path,
    prompts: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
    parent: WarmParent | None,
) -> dict[str, list[dict]]:
    """All prompts through three servers, one after the other: they would slow each other down."""
    ddtree = ("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(drafter_dir))
    modes = {
        "plain": (),
        "chain": (*ddtree, "--speculative-ddtree-shadow-linear"),
        "tree": (*ddtree, "--speculative-ddtree-budget", "15", "--speculative-ddtree-topk-cap", "8"),
    }
    folder = tmp_path_factory.mktemp("smollm2")
    results = {}
    for name, flags in modes.items():
        args = ["--model-path", str(smollm2_dir), *FLAGS, *flags]
        server = Server(args, folder / f"{name}.log", env=PLUGINS, parent=parent)
        try:
            server.wait_ready()
            results[name] = server.generate(prompts, max_new_tokens=TOKENS)
            server.assert_pool_empty()
        finally:
            server.stop()
    return results


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_greedy_equals_no_speculation(answers: dict[str, list[dict]], mode: str) -> None:
    assert len(ITEMS) == 20
    assert output_ids(answers[mode]) == output_ids(answers["plain"])


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["code", "math", "chat"])
def test_committed_tokens_per_round(answers: dict[str, list[dict]], mode: str, kind: str) -> None:
    chosen = [answer for item, answer in zip(ITEMS, answers[mode], strict=True) if item["kind"] == kind]
    rate = committed_per_round(chosen)
    assert rate == pytest.approx(README_RATES[mode][kind], rel=TOLERANCE)


def test_the_tree_commits_more_than_the_chain(answers: dict[str, list[dict]]) -> None:
    chain, tree = (committed_per_round(answers[mode]) for mode in ("chain", "tree"))
    print(f"committed tokens per round: chain {chain:.3f}, tree {tree:.3f}")
    assert tree > 1.1 * chain


def assert_same_rounds(
    expected: dict[int, dict], prompts: list[list[int]], smollm2_dir: Path, drafter_dir: Path, block_size: int
) -> None:
    """An independent DDTree in transformers commits the same tokens in the same number of rounds.

    Args:
        expected: the server's answers by the prompt's index.
        block_size: positions that were drafted.
    """
    import torch
    from oracle import generate_tree, load_drafter
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    drafter = load_drafter(drafter_dir, target)
    drafter.block_size = block_size
    for index, answer in expected.items():
        found = generate_tree(
            target, drafter, prompts[index], budget=15, topk_cap=8, max_new_tokens=TOKENS, eos_ids=(2,)
        )
        assert found.token_ids == answer["output_ids"]
        drafts = answer["meta_info"]["spec_correct_drafts_histogram"]
        served = sorted(n + 1 for n, rounds in enumerate(drafts) for _ in range(rounds))
        assert sorted(found.committed_per_round) == served


def test_same_rounds_as_the_standalone_oracle(
    answers: dict[str, list[dict]], prompts: list[list[int]], smollm2_dir: Path, drafter_dir: Path
) -> None:
    expected = {index: answers["tree"][index] for index in (0, 8, 15)}
    assert_same_rounds(expected, prompts, smollm2_dir, drafter_dir, BLOCK_SIZE)


def test_half_a_block_is_drafted_as_by_the_standalone_oracle(
    prompts: list[list[int]], smollm2_dir: Path, drafter_dir: Path, tmp_path: Path, parent: WarmParent | None
) -> None:
    """Under the budget auto, which without times gives a single request 15 nodes; a test plugin chooses the width."""
    flags = ("--speculative-algorithm", "DDTREE", "--speculative-draft-model-path", str(drafter_dir))
    flags += ("--speculative-ddtree-budget", "auto", "--speculative-ddtree-topk-cap", "8")
    env = PLUGINS | {"DDTREE_TEST_DRAFT_WIDTH": str(BLOCK_SIZE // 2)}
    args = ["--model-path", str(smollm2_dir), *FLAGS, *flags]
    server = Server(args, tmp_path / "half.log", env=env, parent=parent)
    try:
        server.wait_ready()
        expected = {index: server.generate([prompts[index]], max_new_tokens=TOKENS)[0] for index in (0, 8, 15)}
        server.assert_pool_empty()
    finally:
        server.stop()
    assert committed_per_round(list(expected.values())) > 2
    assert_same_rounds(expected, prompts, smollm2_dir, drafter_dir, BLOCK_SIZE // 2)
