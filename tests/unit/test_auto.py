"""`AutoBudget`, all that the worker knows of `--speculative-ddtree-budget auto`: no model, no device, a fake clock."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_ddtree import metrics, overlay  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig  # noqa: E402

overlay.lay()

from sglang.srt.speculative import ddtree_auto, ddtree_cost  # noqa: E402
from sglang.srt.speculative.ddtree_auto import AutoBudget, request_classes  # noqa: E402
from sglang.srt.speculative.ddtree_cost import CostTable  # noqa: E402
from sglang.srt.speculative.ddtree_cost_cache import cache_folder, cost_table, identity_of  # noqa: E402
from sglang.srt.speculative.ddtree_gain import GRID, PRIOR  # noqa: E402
from sglang.srt.speculative.ddtree_measure import measure_costs, measure_uniform_costs  # noqa: E402
from sglang.srt.speculative.ddtree_policy import DEFAULT  # noqa: E402
from sglang.srt.speculative.ddtree_ragged import bin_edges  # noqa: E402
from sglang.srt.speculative.ddtree_result import DDTreeBatchResult  # noqa: E402
from sglang.srt.speculative.ddtree_sizes import (  # noqa: E402
    draft_widths,
    most_tokens,
    request_grid,
    token_buckets,
    uniform_widths,
)

CONFIG = DDTreeConfig(budget=63, block_size=16, auto=True)
LOADS = (1, 2, 4, 8, 16, 32, 64)
BUCKETS = token_buckets(64, 63)


def table(
    of: dict[str, Any] | None = None, plain=0.005, plain_slope=1e-5, fixed=0.0065, per_request=5e-5, per_token=1e-4
) -> CostTable:
    cells = {(r, t): fixed + per_request * r + per_token * t for r in LOADS for t in BUCKETS if r <= t <= 64 * r}
    return CostTable(of or {}, {r: plain + plain_slope * r for r in LOADS}, {16: cells})


class Clock:
    """A device that runs behind the host. An event is over once the device has come past it."""

    def __init__(self) -> None:
        self.launched, self.reached, self.made = 0.0, 0.0, 0
        self.stuck = False

    def event(self) -> Any:
        at = self.launched
        self.made += 1
        return SimpleNamespace(
            at=at,
            query=lambda: not self.stuck and at <= self.reached,
            elapsed_time=lambda later: 1000 * (later.at - at),
        )


def histogram_of(probabilities: np.ndarray) -> list[int]:
    """Of nodes of these probabilities, by plain search in the bins' edges."""
    places = np.searchsorted(bin_edges(), -np.log(probabilities), side="right") - 1
    return np.bincount(places.ravel(), minlength=64).tolist()


# What the 63 nodes of a request are worth one by one where the prior holds.
NODES = np.maximum(np.diff(np.interp(np.arange(64.0), GRID, PRIOR[16])), 1e-6)


class World:
    """Rounds with true gains and times, both noisy. What they tell comes back two rounds later."""

    def __init__(
        self, truth: CostTable, believed: CostTable | None, seed=0, share=1.0, bias=1.0, host=0.0, **others
    ) -> None:
        self.truth, self.share, self.bias, self.host = truth, share, bias, host
        self.clock, self.rng = Clock(), np.random.default_rng(seed)
        self.auto = AutoBudget(CONFIG, buckets=BUCKETS, new_event=self.clock.event, cost=believed, **others)
        self._late: deque[tuple[Any, ...]] = deque()

    def round(self, requests: int, name: str = "greedy") -> ddtree_auto.AutoRound:
        run = self.auto.begin_round(requests, 0.0, {name: requests})
        if run.plain:
            seconds = self.truth.plain_seconds(requests)
            told: tuple[Any, ...] = (run, None, None, [0] * requests)
        else:
            seconds = float(self.truth.seconds(16, requests, run.tokens))
            noise = self.rng.gamma(4.0, 0.25, (requests, 1))
            p = np.clip(self.share * noise * NODES, 1e-9, 1.0)
            least = np.sort(p, axis=None)[::-1][: run.tokens - requests]
            expected = np.where(p >= (least[-1] if len(least) else 2.0), p, 0).sum(1)
            accepted = self.rng.poisson(self.bias * expected).clip(max=15)
            told = (run, histogram_of(p), expected.tolist(), accepted.tolist())
        begin = self.clock.launched
        seconds *= math.exp(self.rng.normal(0, 0.05)) * (20 if self.rng.random() < 0.01 else 1)
        host = self.host * requests
        self.clock.launched = begin + seconds
        self.auto.launched()
        # The device has reached this round's beginning when the host decides the next one, or waits for it by then.
        self.clock.launched = begin + max(seconds, host)
        self.clock.reached = begin if seconds > host else self.clock.launched
        self._late.append(told)
        if len(self._late) > 2:
            past, *numbers = self._late.popleft()
            self.auto.end_round(past, *numbers, [name] * past.requests)
        return run

    def rounds(self, requests: int, count: int, name: str = "greedy") -> list[ddtree_auto.AutoRound]:
        return [self.round(requests, name) for _ in range(count)]

    def rate(self, requests: int, run: ddtree_auto.AutoRound) -> float:
        """The true tokens per second of a round like this one."""
        host = self.host * requests
        if run.plain:
            return requests / max(self.truth.plain_seconds(requests), host)
        nodes = min((run.tokens - requests) / requests, 63)
        drafts = self.share * self.bias * float(np.interp(nodes, GRID, PRIOR[16]))
        return requests * (1 + drafts) / max(float(self.truth.seconds(16, requests, run.tokens)), host)

    def best(self, requests: int) -> float:
        runs = [
            SimpleNamespace(plain=True),
            *(SimpleNamespace(plain=False, tokens=t) for t in BUCKETS if t >= requests),
        ]
        return max(self.rate(requests, run) for run in runs)


# --- Decisions.


def test_trees_shrink_as_the_load_grows_until_nothing_is_drafted():
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=table())
    runs = {n: auto.begin_round(n, 0.0, {"greedy": n}) for n in LOADS}
    each = [run.tokens / n for n, run in runs.items()]
    assert each == sorted(each, reverse=True) and each[0] >= 12
    assert runs[64].plain and (runs[64].tokens, runs[64].draft_width, runs[64].forecast) == (64, 0, 64)
    for n, run in runs.items():
        assert run.owner is auto and run.requests == n
        assert run.plain or (run.tokens in BUCKETS and run.draft_width == 16 and run.forecast > n)


def test_without_a_table_every_request_gets_fifteen_nodes_or_the_most_there_are():
    auto = AutoBudget(CONFIG, buckets=BUCKETS)
    assert [auto.begin_round(n).tokens for n in (1, 4, 64)] == [16, 64, 1024]
    small = AutoBudget(DDTreeConfig(budget=3, block_size=16, auto=True), buckets=token_buckets(4, 3))
    assert [small.begin_round(n).tokens for n in (1, 4)] == [4, 16]
    auto.cost = table()
    assert auto.cost is auto.policy.cost and auto.begin_round(64).plain


def test_a_batch_that_no_bucket_holds_runs_plain_or_is_refused():
    assert AutoBudget(CONFIG, buckets=(4, 8)).begin_round(9).plain
    with pytest.raises(ValueError, match="no bucket holds 9 requests"):
        AutoBudget(CONFIG, buckets=(4, 8), plain=False).begin_round(9)


def test_the_block_size_has_to_be_known():
    with pytest.raises(AssertionError, match="block size"):
        AutoBudget(DDTreeConfig(budget=63, auto=True), buckets=BUCKETS)


def test_the_first_ranks_choice_is_run_everywhere():
    asked = []

    def first_rank(own: tuple[int, ...]) -> tuple[int, ...]:
        asked.append(own)
        return (16, 96, len(asked) == 2) if len(asked) < 3 else (0, 8, 0)

    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=table(), decide=first_rank)
    runs = [auto.begin_round(8) for _ in range(3)]
    assert [(run.plain, run.draft_width, run.tokens) for run in runs] == [(False, 16, 96)] * 2 + [(True, 0, 8)]
    assert [run.probe for run in runs] == [False, True, False]
    assert runs[0].forecast == pytest.approx(8 * (1 + np.interp(11, GRID, PRIOR[16]))) and runs[2].forecast == 8
    assert all(width == 16 and tokens in BUCKETS and not probe for width, tokens, probe in asked)
    # Where it agrees, its own choice stands whole.
    alone, both = (AutoBudget(CONFIG, buckets=BUCKETS, cost=table(), decide=d) for d in (None, lambda own: own))
    assert alone.begin_round(4).forecast == both.begin_round(4).forecast
    with pytest.raises(AssertionError, match="chose 4 tokens for 8 requests"):
        AutoBudget(CONFIG, buckets=BUCKETS, decide=lambda own: (16, 4, 0)).begin_round(8)
    # Its draft's width too, of those that there are.
    both = AutoBudget(CONFIG, buckets=BUCKETS, draft_widths=(8, 16), decide=lambda own: (8, 96, 0))
    run = both.begin_round(8)
    assert (run.draft_width, run.tokens, run.narrow) == (8, 96, True)
    assert run.forecast == pytest.approx(8 * (1 + np.interp(11, GRID, PRIOR[8])))
    with pytest.raises(AssertionError, match="drafts 8 positions"):
        AutoBudget(CONFIG, buckets=BUCKETS, decide=lambda own: (8, 96, 0)).begin_round(8)


@pytest.mark.parametrize(
    "block_size, halves, widths",
    [(16, 1, (8, 16)), (16, 2, (4, 8, 16)), (16, 9, (4, 8, 16)), (10, 1, (5, 10)), (8, 1, (4, 8)), (16, 0, (16,))]
    # Half of it would draft less than three tokens.
    + [(7, 1, (7,)), (2, 3, (2,))],
)
def test_widths_that_are_drafted(block_size: int, halves: int, widths: tuple[int, ...]):
    assert draft_widths(block_size, halves) == widths


def two_widths(half: float, whole: float) -> CostTable:
    """Times of rounds whose draft takes so long per request, at half a block and at a whole one."""
    cells = {
        width: {(r, t): 0.0065 + each * r + 1e-5 * t for r in LOADS for t in BUCKETS if r <= t <= 64 * r}
        for width, each in ((8, half), (16, whole))
    }
    return CostTable({}, {r: 0.005 + 5e-5 * r for r in LOADS}, cells)


def test_a_round_tells_of_the_width_that_it_drafted():
    """Narrow rounds are counted, and their scores move the narrow curve most."""
    auto = AutoBudget(CONFIG, buckets=BUCKETS, draft_widths=(8, 16), cost=two_widths(5e-5, 1e-4))
    few, many = auto.begin_round(1), auto.begin_round(64)
    assert (few.draft_width, few.narrow) == (16, False) and (many.draft_width, many.narrow) == (8, True)
    wide = replace(many, draft_width=16)
    told = histogram_of(np.full((64, 63), 0.9))
    for run in (wide, many, wide, many):
        assert auto.end_round(run, told, None, [0] * 64, []).narrow == run.narrow
    assert auto.totals.narrow_rounds == 2 and auto.totals.plain_rounds == 0
    before = {width: float(auto.policy.gain.at(64, 64 * 5, width)) for width in (8, 16)}
    auto.end_round(many, histogram_of(np.full((64, 63), 0.1)), None, [0] * 64, [])
    fallen = {width: float(auto.policy.gain.at(64, 64 * 5, width)) / before[width] for width in (8, 16)}
    assert fallen[8] < fallen[16] < 1


# --- The loop around it.


@pytest.mark.parametrize("per_token, plain_at_64", [(1e-4, True), (1e-5, False)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 8])
def test_a_load_that_jumps_settles_within_50_rounds(per_token, plain_at_64, seed, every):
    truth = table(per_token=per_token)
    world = World(truth, table(per_token=per_token), seed, every=every)
    for requests, plain in ((1, False), (64, plain_at_64), (1, False)):
        world.rounds(requests, 50)
        settled = world.rounds(requests, 300)
        assert {run.plain for run in settled if not run.probe} == {plain}
        # Probes counted; the mean time per token, since that is what throughput is.
        times = [1 / world.rate(requests, run) for run in settled]
        assert len(times) / sum(times) > 0.95 * world.best(requests)
    totals = world.auto.totals
    timed = 0.9 if every == 1 else 0.11
    assert totals.rounds == 3 * 350 - 2 and totals.timed > timed * totals.rounds


def test_no_round_is_timed_with_the_decision_of_the_next():
    """A host of which every round takes 4 ms, and a decision 0.9 more: nothing tells drafts from plain rounds."""
    clock, told = SimpleNamespace(now=0.0), Counter()

    def event() -> Any:
        at = clock.now
        return SimpleNamespace(at=at, query=lambda: True, elapsed_time=lambda later: 1000 * (later.at - at))

    costs = table(plain=1e-5)
    observe = costs.observe

    def observed(width: int, requests: int, tokens: int, seconds: float, *others: Any, **more: Any) -> bool:
        told[width, round(1000 * seconds, 3)] += 1
        return observe(width, requests, tokens, seconds, *others, **more)

    costs.observe = observed  # type: ignore[method-assign]
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs, new_event=event, every=8)
    decide = auto.policy.next_round

    def slow(*arguments: Any) -> Any:
        clock.now += 0.0009
        return decide(*arguments)

    auto.policy.next_round = slow  # type: ignore[method-assign]
    for _ in range(400):
        run = auto.begin_round(32)
        clock.now += 0.004
        auto.launched()
        auto.end_round(run, None, None, [0] * 32, [])
    assert set(told) == {(0, 4.0), (16, 4.0)}


def test_a_decision_holds_for_some_rounds():
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=table(), every=4, plain=False)
    fresh = [auto.begin_round(2).fresh for _ in range(9)]
    assert fresh == [True, False, False, False, True, False, False, False, True]
    # Another number of requests is another question, unless it is nearly the same.
    assert [auto.begin_round(requests).fresh for requests in (3, 3, 2, 2)] == [True, False, True, False]
    rounds = [auto.begin_round(requests) for requests in (32, 30, 36, 28, 37, 27, 32, 31)]
    assert [run.fresh for run in rounds] == [True, False, False, False, True, True, True, False]
    assert [run.requests for run in rounds] == [32, 30, 36, 28, 37, 27, 32, 31]
    assert all(run.tokens == rounds[0].tokens for run in rounds[:4])


def test_a_plain_round_kept_has_its_own_requests():
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=table(plain=1e-5), every=4)
    rounds = [auto.begin_round(requests) for requests in (32, 31, 33)]
    assert [(run.plain, run.tokens, run.fresh) for run in rounds] == [
        (True, 32, True),
        (True, 31, False),
        (True, 33, False),
    ]


def test_a_uniform_round_kept_has_as_many_nodes_for_its_own_requests():
    config = replace(CONFIG, budget=15)
    auto = AutoBudget(config, buckets=BUCKETS, widths=(4, 8, 16), every=4)
    rounds = [auto.begin_round(requests) for requests in (32, 31, 35, 40)]
    assert [(run.tokens, run.nodes, run.fresh) for run in rounds] == [
        (512, 16, True),
        (496, 16, False),
        (560, 16, False),
        (640, 16, True),
    ]
    other = AutoBudget(config, buckets=BUCKETS, widths=(4, 8, 16), decide=lambda own: (16, 4 * 32, 0))
    assert other.begin_round(32).nodes == 4


@pytest.mark.parametrize(
    "most, widths",
    [(1, (1, 2)), (3, (1, 4)), (15, (1, 4, 8, 16)), (20, (1, 4, 8, 16, 21)), (63, (1, 4, 8, 16, 32, 64))],
)
def test_widths_of_uniform_rounds(most: int, widths: tuple[int, ...]):
    assert uniform_widths(most) == widths


def test_uniform_rounds_are_timed_by_requests_and_nodes():
    asked = []

    def verify(nodes: int) -> Callable[[int], float]:
        def time(requests: int) -> float:
            asked.append((nodes, requests))
            return 0.004 + 1e-5 * nodes * requests

        return time

    made = measure_uniform_costs(
        {16: lambda requests: 0.002 + 1e-4 * requests}, {n: verify(n) for n in (1, 4, 16)}, (1, 2, 8), {"model": "m"}
    )
    assert made.draft_widths == (16,) and made.identity == {"model": "m"}
    assert made.plain_seconds(8) == pytest.approx(0.004 + 8e-5)
    # Between measured numbers of requests at equal nodes for each.
    for requests in (1, 2, 5, 8):
        expected = 0.006 + 1e-4 * requests + 1e-5 * 16 * requests
        assert float(made.seconds(16, requests, 16 * requests)) == pytest.approx(expected)
    # Everything twice.
    assert sorted(asked) == sorted(2 * [(nodes, requests) for nodes in (1, 4, 16) for requests in (1, 2, 8)])
    host = measure_uniform_costs(
        {16: lambda requests: 0.001}, {1: verify(1), 4: verify(4)}, (1,), {}, host_drafted=0.02, host_plain=0.01
    )
    assert (float(host.seconds(16, 1, 4)), host.plain_seconds(1)) == (0.02, 0.01)


def test_a_decision_is_not_kept_for_more_requests_than_its_tokens():
    auto = AutoBudget(CONFIG, buckets=BUCKETS, decide=lambda own: (16, 64, 0), every=4)
    assert auto.begin_round(60).fresh and not auto.begin_round(64).fresh
    with pytest.raises(AssertionError, match="chose 64 tokens for 65 requests"):
        auto.begin_round(65)


def test_ranks_decide_in_the_same_rounds():
    """The first rank probes because of its own times; the others do not keep that round's decision either."""
    costs = table(plain=1e-5), table()
    said: list[tuple[int, ...]] = []
    first = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs[0], every=4, decide=lambda own: said.append(own) or own)
    other = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs[1], every=4, decide=lambda own: said[-1])
    probes = 0
    for requests in [32] * 400 + [8] * 400:
        one, two = first.begin_round(requests), other.begin_round(requests)
        assert (one.fresh, one.draft_width, one.tokens, one.probe) == (
            two.fresh,
            two.draft_width,
            two.tokens,
            two.probe,
        )
        probes += one.probe
    assert probes


def test_contexts_are_asked_for_only_where_a_round_is_decided():
    asked: list[float] = []

    def context() -> float:
        asked.append(1000.0 * (1 + len(asked)))
        return asked[-1]

    clock, costs = Clock(), Observed()
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs, new_event=clock.event, every=4)
    for _ in range(9):
        run = auto.begin_round(2, context)
        clock.launched += 0.008
        clock.reached = clock.launched
        auto.end_round(run, None, None, [0] * 2, ["greedy"] * 2)
    assert asked == [1000.0, 2000.0, 3000.0]
    # What a round's time is laid beside is its own context.
    assert [told[4] for told in costs.told] == asked[:2]


def test_long_contexts_make_larger_trees_worth_while():
    cells = {(r, t): 0.004 + 1e-4 * t for r in LOADS for t in BUCKETS if r <= t <= 64 * r}
    costs = CostTable({}, {r: 0.003 for r in LOADS}, {16: cells}, {0: 5e-8, 16: 5e-8}, context_base=1.0)
    runs = [
        AutoBudget(CONFIG, buckets=BUCKETS, cost=costs).begin_round(16, lambda each=each: 16.0 * each)
        for each in (1, 1000, 10_000, 100_000)
    ]
    totals = [run.tokens for run in runs]
    # A prefix is read once for all of a request's tokens: the more there is to read, the less they count.
    assert totals == sorted(totals) and totals[-1] > 4 * totals[0]
    assert [run.plain for run in runs][::3] == [True, False]


def test_a_host_that_takes_longer_than_plain_rounds_makes_drafts_worth_while():
    """At many requests a plain round is short on the device, and the host is not done with the last one."""
    # On the device alone plain rounds would be the best.
    assert World(table(), table()).auto.begin_round(64).plain
    world = World(table(), table(), host=20e-3 / 64)
    world.rounds(64, 50)
    settled = world.rounds(64, 100)
    assert {run.plain for run in settled if not run.probe} == {False}
    times = [1 / world.rate(64, run) for run in settled]
    assert len(times) / sum(times) > 0.95 * world.best(64)


def test_a_table_that_is_wrong_is_corrected():
    # Believed: tokens are nearly free. True: they are dear, so that wide trees lose.
    world = World(table(), table(per_token=1e-5, fixed=0.008))
    first = world.rounds(16, 1)[0]
    world.rounds(16, 1500)
    last = world.rounds(16, 100)
    assert np.mean([run.tokens for run in last if not run.plain]) < 0.6 * first.tokens
    assert np.mean([world.rate(16, run) for run in last]) > world.rate(16, first)


def test_a_drafter_that_is_too_sure_of_itself_gets_smaller_trees_for_that_class_alone():
    world = World(table(plain=0.012), table(plain=0.012), bias=0.3)
    before = world.auto.begin_round(8, 0.0, {"high": 8}).tokens
    world.rounds(8, 600, "high")
    calibration = world.auto.policy.calibration
    assert calibration.ratio("high") == pytest.approx(0.3, abs=0.1) and calibration.ratio("greedy") == 1
    assert world.auto.begin_round(8, 0.0, {"high": 8}).tokens < before
    totals = world.auto.totals
    assert totals.committed < 0.8 * totals.expected
    # What it expects has learnt from that; the drafter's own word has not.
    assert abs(totals.committed - totals.forecast) < abs(totals.committed - totals.expected)


def test_hopeless_drafts_are_probed_now_and_then():
    world = World(table(), table(), share=0.001)
    world.rounds(4, 400)
    runs = world.rounds(4, 300)
    assert {run.plain for run in runs if not run.probe} == {True}
    assert 2 <= sum(run.probe for run in runs) <= 6
    totals = world.auto.totals
    assert totals.plain_rounds > 500 and totals.probe_rounds >= sum(run.probe for run in runs) - 1


# --- Times.


def run_rounds(auto: AutoBudget, clock: Clock, seconds: list[float], requests: int = 4) -> None:
    for took in seconds:
        run = auto.begin_round(requests)
        clock.launched += took
        clock.reached = clock.launched
        auto.end_round(run, None, None, [0] * requests, ["greedy"] * requests)


class Observed(CostTable):
    """Remembers what it was told."""

    def __init__(self) -> None:
        source = table().to_json()
        super().__init__(
            {}, {r: s for r, s in source["plain"]}, {16: {(r, t): s for r, t, s in source["drafted"]["16"]}}
        )
        self.told: list[tuple[Any, ...]] = []

    def observe(self, *arguments: Any, **others: Any) -> bool:
        self.told.append(arguments)
        return super().observe(*arguments, **others)


def test_a_round_lasts_until_the_next_one_begins():
    clock, costs = Clock(), Observed()
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs, new_event=clock.event)
    run = auto.begin_round(4, 1000.0)
    clock.launched = 0.010
    auto.begin_round(4, 1004.0)
    # The device has not come so far: nothing is told, and nothing waits.
    auto.end_round(run, None, None, [0] * 4, ["greedy"] * 4)
    assert costs.told == []
    clock.reached = 0.010
    auto.end_round(run, None, None, [0] * 4, ["greedy"] * 4)
    assert costs.told == [(16, 4, run.tokens, pytest.approx(0.010), 1000.0, False)]


def test_a_device_that_waited_tells_of_the_host():
    clock, costs = Clock(), Observed()
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs, new_event=clock.event)
    run = auto.begin_round(4)
    clock.launched = clock.reached = 0.004
    auto.launched()
    clock.launched = clock.reached = 0.010
    auto.begin_round(4)
    auto.end_round(run, None, None, [0] * 4, ["greedy"] * 4)
    assert costs.told == [(16, 4, run.tokens, pytest.approx(0.010), 0.0, True)]


def test_what_runs_between_rounds_does_not_count():
    clock, costs = Clock(), Observed()
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs, new_event=clock.event)
    run_rounds(auto, clock, [0.008] * 3)
    auto.interrupt()
    clock.launched += 5.0  # a prefill
    run_rounds(auto, clock, [0.009] * 3)
    assert [told[3] for told in costs.told] == pytest.approx([0.008, 0.008, 0.009, 0.009])
    auto.interrupt()
    auto.interrupt()
    run_rounds(auto, clock, [0.009])
    assert len(costs.told) == 4


def test_events_that_never_come_hold_nothing_up():
    clock, costs = Clock(), Observed()
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=costs, new_event=clock.event)
    clock.stuck = True
    run_rounds(auto, clock, [0.008] * 1000)
    assert costs.told == [] and len(auto._pending) <= ddtree_auto._PENDING and clock.made == 1999
    clock.stuck = False
    run_rounds(auto, clock, [0.008])
    assert len(costs.told) == ddtree_auto._PENDING


def test_without_events_or_table_nothing_is_timed():
    clock = Clock()
    for auto in (
        AutoBudget(CONFIG, buckets=BUCKETS, cost=table()),
        AutoBudget(CONFIG, buckets=BUCKETS, new_event=clock.event),
    ):
        run_rounds(auto, clock, [0.008] * 20)
        assert auto.totals.rounds == 20 and auto.totals.timed == 0 and not auto._pending


def test_rounds_whose_numbers_never_come_back_are_not_kept():
    clock = Clock()
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=table(), new_event=clock.event)
    for _ in range(1000):
        auto.begin_round(4)
    assert len(auto._pending) <= ddtree_auto._PENDING and auto.totals.rounds == 0


# --- What comes back.


def test_numbers_reach_gain_and_calibration():
    auto = AutoBudget(CONFIG, buckets=BUCKETS)
    run = auto.begin_round(3)
    p = np.full((3, 63), 0.5)
    before = float(auto.policy.gain.at(3, 30, 16))
    report = auto.end_round(run, histogram_of(p), [4.0, 2.0, 3.0], [3, 0, 1], ["high", "greedy", "high"])
    assert float(auto.policy.gain.at(3, 30, 16)) > before
    assert auto.policy.calibration.ratio("high") == pytest.approx((4 + 200) / (7 + 200))
    assert auto.policy.calibration.ratio("greedy") == pytest.approx(200 / 202)
    assert (report.expected, report.committed, report.tokens, report.plain) == (12, 7, 48, False)
    assert report.forecast == run.forecast
    # Tensors and arrays do as well.
    auto.end_round(run, np.array(histogram_of(p)), torch.tensor([4.0, 2.0, 3.0]).tolist(), [3, 0, 1], ["low"] * 3)
    assert auto.totals.rounds == 2 and auto.totals.expected == 24


def test_a_plain_round_tells_no_gain():
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=table())
    run, before = auto.begin_round(64), auto.policy.gain.at(1, np.array(GRID), 16).tolist()
    assert run.plain
    report = auto.end_round(run, None, None, [0] * 64, ["greedy"] * 64)
    assert (report.plain, report.expected, report.committed, report.forecast) == (True, 64, 64, 64)
    assert auto.policy.gain.at(1, np.array(GRID), 16).tolist() == before


def test_a_uniform_round_tells_what_each_place_is_worth():
    auto = AutoBudget(replace(CONFIG, budget=15), buckets=BUCKETS, widths=(4, 8, 16))
    run = auto.begin_round(3)
    assert (run.tokens, run.nodes) == (48, 16)
    before = float(auto.policy.gain.at(3, 21, 16))
    worth = [3.0] * 7 + [0.0] * 8
    report = auto.end_round(run, None, [7.0] * 3, [7, 6, 7], ["greedy"] * 3, worth)
    assert (report.expected, report.committed) == (24, 23)
    assert before < float(auto.policy.gain.at(3, 21, 16)) <= 21
    # Seven nodes are all that is worth something.
    for _ in range(200):
        auto.end_round(run, None, [7.0] * 3, [7, 7, 7], ["greedy"] * 3, worth)
    assert auto.policy.gain.at(3, np.array([9, 21, 45]), 16).tolist() == pytest.approx([9, 21, 21], rel=0.05)


def test_lists_of_unequal_length_are_a_mistake():
    auto = AutoBudget(CONFIG, buckets=BUCKETS)
    run = auto.begin_round(2)
    with pytest.raises(ValueError):
        auto.end_round(run, [0] * 64, [1.0, 1.0], [0, 0], ["greedy"])
    with pytest.raises(ValueError, match="histogram"):
        auto.end_round(run, [0] * 63, [1.0, 1.0], [0, 0], ["greedy"] * 2)


def test_classes_of_requests():
    params = [(1.0, 1), (0.5, -1), (1.0, 50), (1.5, 1 << 30)]
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(temperature=t, top_k=k)) for t, k in params]
    assert request_classes(reqs) == ["greedy", "low", "middle", "high"]
    from sglang.srt.sampling.sampling_params import SamplingParams

    assert request_classes([SimpleNamespace(sampling_params=SamplingParams(temperature=0.0))]) == ["greedy"]


# --- Metrics.


def request(*, finished: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        finished=lambda: finished,
        is_retracted=False,
        spec_cap_lens_histogram=[],
        sampling_params=SimpleNamespace(temperature=1.0, top_k=1),
    )


def test_a_result_brings_its_numbers_back_and_they_are_shown():
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()

    def registered(kind: Any) -> Any:
        return lambda *args, **kwargs: kind(*args, registry=registry, **kwargs)

    class Collector:  # hashable, as SGLang's own is
        _counter_cls = staticmethod(registered(prometheus_client.Counter))
        _histogram_cls = staticmethod(registered(prometheus_client.Histogram))
        labels = {"tp_rank": 0}

    processor = SimpleNamespace(
        server_args=SimpleNamespace(_ddtree_config=CONFIG),
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=True),
        metrics_collector=Collector(),
    )
    auto = AutoBudget(CONFIG, buckets=BUCKETS, cost=table())
    # One of the two ended while the round was under way: its numbers are as good as the other's.
    batch = SimpleNamespace(reqs=[request(), request(finished=True)])
    run = auto.begin_round(2, 0.0, Counter(request_classes(batch.reqs)))

    def drafting(**told: torch.Tensor) -> DDTreeBatchResult:
        result = DDTreeBatchResult(
            logits_output=SimpleNamespace(hidden_states=None),
            copy_done=SimpleNamespace(record=lambda: None),
            next_token_ids=torch.zeros(2, dtype=torch.int64),
            round_stats=torch.tensor([[2, 16, 7, 0], [1, 16, 7, 0]]),
            auto_round=run,
            expected=torch.tensor([2.5, 1.5]),
            **told,
        )
        result.copy_to_cpu(return_logprob=False)
        return result

    drafted = drafting(histogram=torch.ones(64, dtype=torch.int64))
    metrics.count_rounds(processor, drafted, batch)
    plain = DDTreeBatchResult(round_stats=torch.tensor([[0, 1, 0, 0]] * 64), auto_round=auto.begin_round(64))
    metrics.count_rounds(processor, plain, SimpleNamespace(reqs=[request() for _ in range(64)]))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"sglang:ddtree_{name}", {"tp_rank": "0", **labels})

    assert value("rounds_total") == 65 and value("committed_tokens_sum") == 67
    assert value("auto_verify_tokens_count") == 2 and value("auto_verify_tokens_sum") == run.tokens + 64
    assert value("auto_verify_tokens_bucket", le=f"{run.tokens}.0") == 1
    assert value("auto_plain_rounds_total") == 1 and value("auto_probe_rounds_total") == 0
    assert value("auto_narrow_rounds_total") == 0
    assert value("auto_expected_tokens_total") == 2 + 4 + 64 and value("auto_committed_tokens_total") == 2 + 3 + 64
    assert value("auto_forecast_tokens_total") == pytest.approx(run.forecast + 64)
    assert auto.policy.calibration.ratio("greedy") == pytest.approx((3 + 200) / (4 + 200))
    # Nothing is shown where metrics are off, and it learns all the same.
    processor.metrics_reporter.current_scheduler_metrics_enabled = False
    metrics.count_rounds(processor, drafted, batch)
    assert value("auto_verify_tokens_count") == 2 and auto.totals.rounds == 3
    learnt = float(auto.policy.gain.at(2, 126, 16))
    metrics.count_rounds(processor, drafting(worth=torch.full((63,), 2.0)), batch)
    assert auto.totals.rounds == 4 and float(auto.policy.gain.at(2, 126, 16)) > learnt
    processor.metrics_reporter.current_scheduler_metrics_enabled = True
    short = AutoBudget(CONFIG, buckets=BUCKETS, draft_widths=(8, 16), cost=two_widths(0.0, 1e-4)).begin_round(64)
    result = DDTreeBatchResult(round_stats=torch.tensor([[2, 16, 7, 0]] * 64), auto_round=short)
    metrics.count_rounds(processor, result, SimpleNamespace(reqs=[request() for _ in range(64)]))
    assert value("auto_narrow_rounds_total") == 1 and value("auto_plain_rounds_total") == 1


def test_a_result_without_auto_is_counted_as_ever():
    result = DDTreeBatchResult(round_stats=torch.tensor([[2, 16, 7, 0]]))
    assert (result.auto_round, result.histogram, result.expected) == (None, None, None)
    req = request()
    processor = SimpleNamespace(
        server_args=SimpleNamespace(_ddtree_config=DDTreeConfig(budget=15, block_size=8)),
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=False),
    )
    metrics.count_rounds(processor, result, SimpleNamespace(reqs=[req]))
    assert req.spec_cap_lens_histogram[0] == 1


# --- Buckets.


@given(st.integers(1, 6000), st.integers(1, 63))
@hypothesis_settings(max_examples=300, deadline=None)
def test_buckets(max_requests, max_budget):
    buckets = token_buckets(max_requests, max_budget)
    assert buckets == tuple(sorted(set(buckets))) and 1 in buckets and len(buckets) <= 24
    most, everything = buckets[-1], max_requests * (max_budget + 1)
    assert most == most_tokens(max_requests, max_budget) and max_requests <= most <= everything
    assert most <= max(1024, min(16 * max_requests, 2048), 4 * max_requests + 7) and most > min(everything, 1024) - 8
    assert all(tokens % 8 == 0 for tokens in buckets if tokens > 64)
    assert all(high <= 2 * low for low, high in zip(buckets, buckets[1:], strict=False))
    # Where it matters most, no step is above half as much again.
    assert all(high <= 1.5 * low for low, high in zip(buckets, buckets[1:], strict=False) if 64 <= low < 1024)
    assert min(max_budget + 1, most) in buckets


def test_buckets_of_usual_servers():
    assert token_buckets(1, 15) == (1, 2, 4, 8, 16)
    fine = token_buckets(48, 63)
    assert {64, 96, 128, 160, 192, 224, 256, 320, 384, 448} <= set(fine)
    assert fine[-1] == 1024 and token_buckets(128, 63)[-1] == token_buckets(256, 63)[-1] == 2048
    assert token_buckets(600, 63)[-1] == 2400
    assert token_buckets(8, 63)[-1] == 512
    for arguments in ((0, 63), (1, 0)):
        with pytest.raises(ValueError, match="needs a request and a node"):
            token_buckets(*arguments)


def test_numbers_of_requests_to_measure():
    assert request_grid(1) == (1,) and request_grid(8) == (1, 2, 4, 8) and request_grid(48) == (1, 2, 4, 8, 16, 32, 48)


# --- The table of times.


def test_costs_are_measured_part_by_part(caplog):
    calls = Counter()

    def timer(name: str, fixed: float, each: float):
        def seconds(number: int) -> float:
            calls[name, number] += 1
            return fixed + each * number

        return seconds

    caplog.set_level(logging.INFO)
    made = measure_costs(
        {8: timer("half a draft", 0.0005, 1e-5), 16: timer("draft", 0.001, 1e-5)},
        timer("verify", 0.004, 1e-5),
        (1, 4, 12, 999),
        (1, 2, 4, 8, 16, 32, 64),
        {"model": "m"},
        max_budget=5,
        context={0: 1e-9},
        context_base=100.0,
    )
    assert set(calls.values()) == {2}
    assert {tokens for name, tokens in calls if name == "verify"} == {1, 2, 4, 8, 16, 32, 64}
    assert all({n for name, n in calls if name == part} == {1, 4, 12} for part in ("draft", "half a draft"))
    described = made.to_json()
    cells = {(r, t): s for r, t, s in described["drafted"]["16"]}
    # Up to R * 6 tokens, rounded up to the next bucket: 6 -> 8, 24 -> 32, 72 -> the last.
    wanted = {1: (1, 2, 4, 8), 4: (4, 8, 16, 32), 12: (16, 32, 64)}
    assert set(cells) == {(r, t) for r, totals in wanted.items() for t in totals}
    assert cells[4, 16] == pytest.approx(0.001 + 4e-5 + 0.004 + 16e-5)
    half = {(r, t): s for r, t, s in described["drafted"]["8"]}
    assert set(half) == set(cells) and half[4, 16] == pytest.approx(0.0005 + 4e-5 + 0.004 + 16e-5)
    assert dict(described["plain"])[12] == pytest.approx(0.004 + 16e-5)
    assert made.identity == {"model": "m"} and made.context_base == 100.0 and made.context == {0: 1e-9}
    short, line = [record.getMessage() for record in caplog.records if "ms per round" in record.getMessage()]
    assert "draft width 8" in short and "4: 4.04 plain, 4.58 at 4" in short
    assert "draft width 16" in line and "4: 4.04 plain, 5.08 at 4, 5.20 at 16, 5.36 at 32" in line
    # It serves.
    assert AutoBudget(CONFIG, buckets=(1, 2, 4, 8, 16, 32, 64), cost=made).begin_round(4).tokens >= 4


def test_no_round_is_shorter_than_the_host_takes_to_launch_it():
    def verify(tokens: int) -> float:
        return 1e-4 * tokens

    made = measure_costs(
        {16: lambda n: 0.001}, verify, (1,), (1, 16, 64), {}, host_drafted=0.004, host_plain=0.002
    ).to_json()
    assert dict(made["plain"]) == {1: 0.002}
    assert [cell[2] for cell in made["drafted"]["16"]] == pytest.approx([0.004, 0.004, 0.0074])


@pytest.mark.parametrize("seed", range(5))
def test_what_other_work_added_to_a_time_is_not_believed(seed):
    """Another server that starts on the same device made one time of four longer, by up to half."""
    rng = np.random.default_rng(seed)
    totals = token_buckets(64, 63)

    def disturbed(seconds: Callable[[int], float]) -> Callable[[int], float]:
        return lambda size: seconds(size) * (1 + rng.random() / 2 * (rng.random() < 0.25))

    def verify(tokens: int) -> float:
        return 0.005 + 2e-5 * tokens

    def draft(load: int) -> float:
        return 0.001 + 5e-5 * load

    def slowed(seconds: Callable[[int], float]) -> Callable[[int], float]:
        return lambda size: seconds(size) * (1 + rng.random() / 20)

    quiet, busy = (measure_costs({16: w(draft)}, w(verify), LOADS, totals, {}) for w in (slowed, disturbed))
    assert quiet.quiet and not busy.quiet
    clean = measure_costs({16: draft}, verify, LOADS, totals, {}).to_json()["drafted"]["16"]
    made = busy.to_json()["drafted"]["16"]
    ratios = [got / true for (_, _, got), (_, _, true) in zip(made, clean, strict=True)]
    assert min(ratios) > 0.999
    # Both times of a size were disturbed now and then, but then a larger one's bounds it.
    assert np.quantile(ratios, 0.9) < 1.1 and np.mean(ratios) < 1.03
    assert np.mean([disturbed(verify)(8) / verify(8) for _ in range(400)]) > 1.04


def test_buckets_that_hold_nobody_cannot_be_measured():
    with pytest.raises(ValueError, match="no bucket of .* holds any of the requests"):
        measure_costs({16: float}, float, (8,), (1, 4), {})
    with pytest.raises(ValueError, match="positive and finite"):
        measure_costs({16: lambda n: 0.0}, lambda n: math.nan, (1,), (1, 4), {})


def server_args(**fields: Any) -> SimpleNamespace:
    given = dict(model_path="org/target", tp_size=2, dtype="bfloat16", attention_backend="triton")
    return SimpleNamespace(**(given | fields))


def test_what_a_table_holds_for():
    base = identity_of(server_args(), CONFIG, (1, 2, 4), (8, 16), 64)
    assert (base["model"], base["tp_size"], base["budget"], base["buckets"]) == ("org/target", 2, 63, "1,2,4")
    assert base["torch"] == torch.__version__ and base["sglang"] and base["sglang_ddtree"] and base["gpu"]
    others = [
        identity_of(server_args(**{name: "other"}), CONFIG, (1, 2, 4), (8, 16), 64)
        for name in (
            "model_path",
            "dtype",
            "attention_backend",
            "quantization",
            "mamba_ssm_dtype",
            "speculative_draft_model_path",
        )
    ]
    others += [
        identity_of(server_args(tp_size=1), CONFIG, (1, 2, 4), (8, 16), 64),
        identity_of(server_args(), CONFIG, (1, 2, 8), (8, 16), 64),
        identity_of(server_args(), CONFIG, (1, 2, 4), (16,), 64),
        identity_of(server_args(), CONFIG, (1, 2, 4), (8, 16), 8),
        identity_of(server_args(), DDTreeConfig(budget=31, block_size=16, auto=True), (1, 2, 4), (8, 16), 64),
    ]
    paths = {ddtree_cost.cache_path("x", of) for of in [base, *others]}
    assert len(paths) == len(others) + 1


def test_where_tables_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("SGLANG_DDTREE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "sglang-ddtree"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "sglang-ddtree"
    monkeypatch.setenv("SGLANG_DDTREE_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    made = []
    for _ in range(2):
        cost_table({"model": "a"}, lambda: made.append(1) or table({"model": "a"}))
    assert len(made) == 1 and len(list((tmp_path / "mine").iterdir())) == 1


def test_ranks_measure_together_or_not_at_all(tmp_path):
    def never() -> CostTable:
        raise AssertionError("nobody else measures")

    # The first rank has a table, this one has none; and the other way round.
    assert cost_table({"model": "a"}, never, lambda found: True, tmp_path) is None
    assert cost_table({"model": "a"}, table, folder=tmp_path) is not None
    made = []
    assert cost_table({"model": "a"}, lambda: made.append(1) or table(), lambda found: False, tmp_path) and made


def test_what_the_first_rank_measured_on_a_busy_device_no_rank_keeps(tmp_path):
    # This rank's times agreed, the first one's did not.
    assert cost_table({"model": "a"}, table, lambda so_here: False, tmp_path) is not None
    assert not list(tmp_path.iterdir())


def test_the_margins_are_the_policys():
    assert AutoBudget(CONFIG, buckets=BUCKETS).policy._settings == DEFAULT
