"""The oracle on the real pair: plain decoding, a chain and a tree give the same tokens, in ever fewer rounds.

Also that the oracle reads the drafter rightly: a drafter read wrongly is hardly ever accepted.
"""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch

# One of each kind.
PROMPT_IDS = ["code-fizz", "math-bakery", "chat-rain"]
NEW_TOKENS = 48
BUDGET, TOPK_CAP = 15, 8


@pytest.fixture(scope="module")
def runs(target, tokenizer, drafter_dir, prompts):
    """For each prompt: (plain tokens, OracleResult of the chain, OracleResult of the tree)."""
    drafter = oracle.load_drafter(drafter_dir, target)
    eos = [tokenizer.eos_token_id]
    results = {}
    for prompt in prompts:
        if prompt["id"] not in PROMPT_IDS:
            continue
        ids = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True)["input_ids"]
        results[prompt["id"]] = (
            oracle.generate_plain(target, ids, NEW_TOKENS, eos),
            oracle.generate_chain(target, drafter, ids, NEW_TOKENS, eos),
            oracle.generate_tree(target, drafter, ids, BUDGET, TOPK_CAP, NEW_TOKENS, eos),
        )
    return results


@pytest.mark.parametrize("prompt_id", PROMPT_IDS)
def test_same_tokens(runs, prompt_id):
    plain, chain, tree = runs[prompt_id]
    assert plain
    assert chain.token_ids == plain
    assert tree.token_ids == plain


@pytest.mark.parametrize("prompt_id", PROMPT_IDS)
def test_rounds_add_up(runs, prompt_id):
    plain, *speculative = runs[prompt_id]
    for result in speculative:
        rounds = result.committed_per_round
        assert min(rounds) >= 1
        # The prefill's token, then the rounds; only the last round may have been cut.
        assert 1 + sum(rounds[:-1]) < len(plain) <= 1 + sum(rounds)


def test_tree_commits_more_than_chain(runs):
    chain = [n for _, result, _ in runs.values() for n in result.committed_per_round]
    tree = [n for _, _, result in runs.values() for n in result.committed_per_round]
    assert np.mean(tree) > np.mean(chain)
    # About 3.5 over these three prompts; a drafter that is read wrongly gets little more than 1.
    assert np.mean(tree) > 2.5


def test_best_first_tree_takes_the_best_of_all_paths():
    """Against every path of a small case, sorted: no heap, no search."""
    rng = np.random.default_rng(0)
    depth, vocabulary, budget, cap = 4, 7, 12, 3
    log_probs = torch.log_softmax(torch.tensor(rng.normal(size=(depth, vocabulary)) * 2, dtype=torch.float32), -1)
    tree = oracle.best_first_tree(5, log_probs, budget, cap)

    best = [sorted(row, reverse=True)[:cap] for row in log_probs.numpy()]
    scores = []
    level = [np.float32(0)]
    for values in best:
        level = [score + value for score in level for value in values]
        scores += level
    expected = sorted(scores, reverse=True)[:budget]

    got = [np.float32(0)]
    for node in range(1, budget + 1):
        parent = tree.parents[node]
        assert parent < node
        assert tree.depths[node] == tree.depths[parent] + 1
        got.append(got[parent] + log_probs[tree.depths[node] - 1, tree.tokens[node]].numpy())
    assert got[1:] == expected


def test_tree_smaller_than_its_budget():
    """Two positions of two candidates have six nodes; the budget asks for more and no padding appears."""
    log_probs = torch.log_softmax(torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.5, 0.0]]), -1)
    tree = oracle.best_first_tree(0, log_probs, budget=40, topk_cap=2)
    assert len(tree.tokens) == 7
    assert sorted(tree.depths) == [0, 1, 1, 2, 2, 2, 2]


def test_equal_scores_go_to_the_shallower_node_first():
    """Probability one at each first choice: every node of the chain scores 0, and it comes in order."""
    log_probs = torch.full((3, 4), float("-inf"))
    log_probs[:, 2] = 0.0
    tree = oracle.best_first_tree(1, log_probs, budget=3, topk_cap=1)
    assert (tree.tokens, tree.parents, tree.depths) == ([1, 2, 2, 2], [-1, 0, 1, 2], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("max_new_tokens", "eos_ids", "expected"),
    [
        (10, (), ([4, 5, 6], False)),
        (3, (), ([4, 5, 6], True)),
        (2, (), ([4, 5], True)),
        (10, (5,), ([4, 5], True)),
        (1, (5,), ([4], True)),
    ],
)
def test_truncation(max_new_tokens, eos_ids, expected):
    assert oracle.truncate([4, 5, 6], max_new_tokens, eos_ids) == expected
