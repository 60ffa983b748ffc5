"""The offline model of `auto`: that it is the replay it says it is, and that auto keeps up with every fixed budget."""

import numpy as np
import pytest
from _load import ROOT, load

auto_offline = load("auto_offline", "benchmarks/auto_offline.py")
recorded_drafts = load("recorded_drafts", "benchmarks/recorded_drafts.py")
SAMPLE = ROOT / "tests/data/recorded-drafts-sample.npz"


@pytest.fixture(scope="module")
def recorded():
    return recorded_drafts.load(SAMPLE)


@pytest.fixture(scope="module")
def replay(recorded):
    return auto_offline.prepare(recorded)


@pytest.fixture(scope="module")
def times():
    return auto_offline.load_times()


@pytest.fixture(scope="module")
def results(replay, times):
    return auto_offline.simulate_all(replay, times, tokens=20_000)


@pytest.mark.parametrize("budget", auto_offline.BUDGETS)
def test_the_largest_tree_cut_short_accepts_what_a_smaller_one_does(recorded, replay, budget):
    assert (replay.path <= budget).sum(1).tolist() == recorded_drafts.accepted_per_row(recorded, budget, 8).tolist()


def test_every_mode_costs_what_was_measured(times):
    assert times["ddtree"].plain_seconds(32) == pytest.approx(5.69e-3)
    assert float(times["ddtree"].seconds(16, 8, 8 * 32)) == pytest.approx(10.76e-3)
    assert float(times["dflash"].seconds(16, 1, 16)) == pytest.approx(7.13e-3)
    # Not measured: on the line from 1 to 8 requests.
    assert float(times["dflash"].seconds(8, 2, 16)) == pytest.approx(7.27e-3 + (8.32 - 7.27) / 7 * 1e-3)


def test_nodes_go_to_the_likeliest_of_all_requests():
    rng = np.random.default_rng(0)
    probabilities = -np.sort(-rng.random((5, 9)), axis=1)
    for nodes in (0, 1, 7, 44, 45, 99):
        each = auto_offline.nodes_per_request(probabilities, nodes)
        order = sorted(((p, b) for b, row in enumerate(probabilities.tolist()) for p in row), reverse=True)[:nodes]
        assert each.tolist() == [sum(b == request for _, b in order) for request in range(5)]


def test_rounds_of_one_request_are_those_of_the_recording(recorded, replay, times):
    # One pass over all answers and, since an answer's end cuts a round off, its exact number of rounds.
    total = int(recorded.rows.sum())
    _, told = auto_offline.simulate(replay, times, "ddtree-15", 1, total)
    rounds = recorded_drafts.rounds_per_prompt(recorded, recorded_drafts.accepted_per_row(recorded, 15, 8)).sum()
    assert told["committed"] == pytest.approx(total / rounds)


def test_plain_rounds_commit_a_token_each(results, times):
    for requests, (rate, told) in results["plain"].items():
        assert told["committed"] == 1 and rate == pytest.approx(requests / times["ddtree"].plain_seconds(requests))


def test_auto_is_within_three_percent_of_the_best_mode_at_every_load(results):
    for requests in auto_offline.LOADS:
        best = max(row[requests][0] for mode, row in results.items() if mode != "auto")
        assert results["auto"][requests][0] >= 0.97 * best, requests


def test_auto_takes_plain_rounds_where_drafts_do_not_pay(replay, times):
    dear = auto_offline.cost.CostTable({}, {8: 5e-3}, {16: {(8, 64): 40e-3, (8, 512): 60e-3}})
    rate, told = auto_offline.simulate(replay, {"ddtree": dear}, "auto", 8, 8_000)
    assert told["plain"] > 0.95
    # The probes cost little.
    assert rate > 0.95 * 8 / 5e-3


def test_the_table_says_that_it_is_a_model(capsys):
    assert auto_offline.main(["--data", str(SAMPLE), "--requests", "1", "8", "--tokens", "2000"]) == 0
    out = capsys.readouterr().out
    assert "Not a measurement" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert lines[0] == "| tokens/s (offline model, not measured) | 1 request | 8 requests |"
    assert [line.split(" | ")[0][2:] for line in lines[2:]][: len(auto_offline.modes())] == auto_offline.modes()


def test_the_same_seed_gives_the_same_numbers(replay, times):
    a, b = (auto_offline.simulate(replay, times, "auto", 4, 3_000, seed=5) for _ in range(2))
    assert a == b
