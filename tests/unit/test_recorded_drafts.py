"""The production builder over real drafts: a silent change of the tree rule moves these numbers."""

import numpy as np
import pytest
from _load import ROOT, load, load_ddtree_utils

utils = load_ddtree_utils()
recorded_drafts = load("recorded_drafts", "benchmarks/recorded_drafts.py")


@pytest.fixture(scope="module")
def recorded():
    return recorded_drafts.load(ROOT / "tests/data/recorded-drafts-sample.npz")


def test_the_sample_is_balanced_and_whole(recorded):
    assert recorded.names == ["humaneval", "gsm8k", "mtbench"]
    assert np.bincount(recorded.sets).tolist() == [14, 13, 13]
    assert recorded.top_ids.shape == recorded.top_lp.shape == (7223, 15, 16)
    assert int(recorded.rows.sum()) == 7223 and int(recorded.lens.sum()) == len(recorded.ids)


@pytest.mark.parametrize(
    "budget, cap, chain, expected",
    [
        (15, 8, True, {"humaneval": 3.741, "gsm8k": 4.021, "mtbench": 2.831, "all": 3.402}),
        (7, 8, True, {"humaneval": 3.585, "gsm8k": 3.855, "mtbench": 2.771, "all": 3.292}),
        (7, 8, False, {"humaneval": 3.941, "gsm8k": 4.149, "mtbench": 3.197, "all": 3.676}),
        (15, 8, False, {"humaneval": 4.544, "gsm8k": 4.835, "mtbench": 3.562, "all": 4.187}),
        (31, 8, False, {"humaneval": 4.988, "gsm8k": 5.294, "mtbench": 3.773, "all": 4.520}),
        (63, 8, False, {"humaneval": 5.337, "gsm8k": 5.764, "mtbench": 3.964, "all": 4.819}),
    ],
)
def test_committed_tokens_per_round(recorded, budget, cap, chain, expected):
    got = recorded_drafts.committed_tokens_per_round(recorded, budget, cap, chain)
    # The literals are rounded to three decimals; the replay itself is exact.
    assert got == pytest.approx(expected, abs=6e-4)


def test_replay_matches_a_plain_loop_over_heap_trees(recorded):
    budget, cap = 15, 8
    rounds = recorded_drafts.rounds_per_prompt(recorded, recorded_drafts.accepted_per_row(recorded, budget, cap))
    token_begin, row_begin = 0, 0
    for prompt in range(len(recorded.lens)):
        text = recorded.ids[token_begin : token_begin + recorded.lens[prompt]].tolist()
        token_begin += len(text)
        at, count = int(recorded.prompt_lens[prompt]), 0
        if prompt % 8 == 0:
            while at < len(text) - 1:
                row = row_begin + at - int(recorded.prompt_lens[prompt])
                ids, lp = recorded.top_ids[row, :, :cap].tolist(), recorded.top_lp[row, :, :cap].tolist()
                tree = utils.build_tree_heap(text[at], ids, lp, budget)
                node, accepted = 0, 0
                for i in range(1, budget + 1):
                    target = at + accepted + 1
                    if tree.parents[i] == node and target < len(text) and tree.tokens[i] == text[target]:
                        # Indices ascend along a path, so one pass over the nodes follows it.
                        node, accepted = i, accepted + 1
                at, count = at + accepted + 1, count + 1
            assert count == rounds[prompt]
        row_begin += int(recorded.rows[prompt])


def test_chain_accepts_the_matching_prefix_of_first_ranks(recorded):
    accepted = recorded_drafts.accepted_per_row(recorded, 15, 1)
    start = int(recorded.prompt_lens[0])
    text = recorded.ids[: recorded.lens[0]].tolist()
    for row in range(int(recorded.rows[0])):
        expected = 0
        for token, target in zip(recorded.top_ids[row, :, 0].tolist(), text[start + row + 1 :], strict=False):
            if token != target:
                break
            expected += 1
        assert int(accepted[row]) == expected


def test_sampling_is_seeded_balanced_and_keeps_rows_and_text_together(recorded, tmp_path):
    for name in ("a.npz", "b.npz"):
        recorded_drafts.save_sample(recorded, tmp_path / name, prompts=7, seed=3)
    a, b = recorded_drafts.load(tmp_path / "a.npz"), recorded_drafts.load(tmp_path / "b.npz")
    assert np.bincount(a.sets).tolist() == [3, 2, 2]
    assert np.array_equal(a.src, b.src) and np.array_equal(a.ids, b.ids)
    # A prompt takes the rounds it took in the full recording.
    full = recorded_drafts.rounds_per_prompt(recorded, recorded_drafts.accepted_per_row(recorded, 7, 1))
    sample = recorded_drafts.rounds_per_prompt(a, recorded_drafts.accepted_per_row(a, 7, 1))
    for prompt, rounds in enumerate(sample):
        same = (recorded.sets == a.sets[prompt]) & (recorded.src == a.src[prompt])
        assert full[same].tolist() == [rounds]


def test_markdown_table(recorded, tmp_path):
    recorded_drafts.save_sample(recorded, tmp_path / "tiny.npz", prompts=3, seed=0)
    lines = recorded_drafts.markdown_table(recorded_drafts.load(tmp_path / "tiny.npz"), [7], 8).splitlines()
    assert lines[0] == "| committed tokens per round | humaneval | gsm8k | mtbench | all |"
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| chain, 15 drafts", "| tree B=7, K=7"]
