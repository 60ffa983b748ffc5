"""`--speculative-ddtree-budget auto` as the worker sees it: what a round verifies, and what was learnt from it.

`AutoBudget` owns the policy with all that it decides from. Before a round the worker asks it how many tokens to verify
(`begin_round`); when the round's numbers have reached the host, one or more rounds later, they come back to it
(`end_round`). Nothing here waits for the device: a round's time is read once its end has been reached, from events
that are only queried. A wrong guess, a late number or a lost one costs speed, never a token.

Below it: the totals of verify tokens worth a graph (`token_buckets`), and the table of round times, measured at start
(`measure_costs`) and kept on disk (`identity_of`, `cache_folder`, `cost_table`).

Standard library and NumPy, and through `ddtree_ragged` torch; no SGLang.
"""

from __future__ import annotations

import logging
import math
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.speculative import ddtree_cost
from sglang.srt.speculative.ddtree_calibration import Calibration, temperature_class
from sglang.srt.speculative.ddtree_cost import CostTable
from sglang.srt.speculative.ddtree_gain import GainCurve, uniform_gain
from sglang.srt.speculative.ddtree_policy import DEFAULT, Choice, Policy, Settings
from sglang.srt.speculative.ddtree_ragged import expected_gain

if TYPE_CHECKING:
    from sglang_ddtree.flags import DDTreeConfig

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SGLANG_DDTREE_CACHE_DIR"
# Rounds whose end has not been seen yet. Overlap scheduling has two under way; an event that never comes is given up.
_PENDING = 8
_MOST_BUCKETS = 24
# A choice is kept while the number of requests stays within this share of what it was made for.
_SAME_LOAD = 0.125
# The most verify tokens of a round, whatever the requests; for many requests, per request, and where that ends.
_MOST_TOKENS, _TOKENS_PER_REQUEST, _MANY_TOKENS = 1024, 16, 2048
_LEAST_WIDTH = 4
# Two measurements of the same are the same within this factor where nothing else runs.
_SAME_TIME = 1.1
# Nodes per request of uniform rounds: each costs graphs, and memory for them.
_UNIFORM_WIDTHS = (1, 4, 8, 16, 32, 64)


# --- The totals of verify tokens that are captured.


def token_buckets(max_requests: int, max_budget: int) -> tuple[int, ...]:
    """Totals of verify tokens to capture, roots counted, ascending; at most 24 of them.

    Powers of two, and halves and quarters of an octave between them as far as the number allows: fine steps waste
    less, and these are where a matrix product's tiles end. They go up to `most_tokens`. The widest tree of one request
    and the roots of all requests are among them; above 64 tokens all are multiples of 8.

    Args:
        max_requests: running at once, at least 1.
        max_budget: drafted nodes per request, at least 1.

    Raises:
        ValueError: an argument is below 1.
    """
    if max_requests < 1 or max_budget < 1:
        raise ValueError(f"needs a request and a node, got max_requests {max_requests} and max_budget {max_budget}.")
    most = most_tokens(max_requests, max_budget)
    roots = max_requests if max_requests <= 64 else _round_up(max_requests, 8)
    chosen = {most, min(max_budget + 1, most), min(roots, most)}
    octaves = [2**power for power in range(most.bit_length())]
    chosen.update(octaves)
    halves = [low + low // 2 for low in octaves if low >= 16]
    quarters = [low + low // 4 * part for low in octaves if low >= 16 for part in (1, 3)]

    # Up to about 64 tokens a verify does little but read the weights; above 1024 few rounds pay.
    def rank(tokens: int) -> int:
        return 0 if tokens in halves and tokens > 64 else 1 if 128 < tokens < 1024 else 2 if tokens in halves else 3

    for tokens in sorted({*halves, *quarters}, key=lambda tokens: (rank(tokens), tokens)):
        if tokens < most and len(chosen) < _MOST_BUCKETS and (tokens <= 64 or tokens % 8 == 0):
            chosen.add(tokens)
    return tuple(sorted(chosen))


def most_tokens(max_requests: int, max_budget: int) -> int:
    """The most verify tokens that a round can have: all nodes, but not more than 1024, or 16 for each request up to
    2048, or four for each request.

    A large model computes by then, and what it computes is nearly all rejected; a small one may still be waiting for
    its launches. The logits of the rows take memory as well.
    """
    many = max(min(_TOKENS_PER_REQUEST * max_requests, _MANY_TOKENS), _round_up(4 * max_requests, 8))
    most = min(max_requests * (max_budget + 1), max(_MOST_TOKENS, many))
    return most - most % 8 if most > 64 else most


def uniform_widths(max_budget: int) -> tuple[int, ...]:
    """Nodes per request, the root counted, that a uniform round may have, ascending; the last is the widest tree's.

    The first is the root alone, a plain round's.
    """
    most = max_budget + 1
    return (*(width for width in _UNIFORM_WIDTHS if width < most), most)


def request_grid(max_requests: int) -> tuple[int, ...]:
    """Numbers of running requests to measure: powers of two, and the most."""
    return tuple(sorted({*(2**power for power in range(max_requests.bit_length())), max_requests}))


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


# --- The widths that are drafted.


def draft_widths(block_size: int, halves: int = 1) -> tuple[int, ...]:
    """Block sizes that a drafter of ``block_size`` positions drafts under the budget auto, ascending.

    Its own, and its half, ``halves`` times over; none below 4, which would draft less than 3 tokens.
    """
    widths = [block_size]
    while len(widths) <= halves and widths[0] // 2 >= _LEAST_WIDTH:
        widths.insert(0, widths[0] // 2)
    return tuple(widths)


# --- Rounds.


@dataclass(frozen=True, eq=False)
class AutoRound:
    """What a round was decided to be. It goes with the round's result and comes back in `AutoBudget.end_round`.

    Attributes:
        owner: who decided it.
        plain: the roots alone, nothing is drafted.
        tokens: T, verify tokens over all requests, roots counted: a bucket, or the requests in a plain round.
        draft_width: the drafted block's size D; 0 in a plain round.
        requests: running, R.
        forecast: committed tokens that the policy expected when it decided.
        probe: drafted to learn what drafts are worth, not because it pays.
        fresh: decided now; else it is as the round before, and nothing is learnt from it but what it committed.
    """

    owner: AutoBudget
    plain: bool
    tokens: int
    draft_width: int
    requests: int
    forecast: float
    probe: bool
    fresh: bool = True

    @property
    def nodes(self) -> int:
        """Of every request, the root counted, where all have as many."""
        return self.tokens // self.requests

    @property
    def narrow(self) -> bool:
        """Fewer positions are drafted than could be."""
        return 0 < self.draft_width < self.owner.policy.gain.draft_widths[-1]


@dataclass(frozen=True)
class AutoReport:
    """What became of a round, for metrics; sums over its requests.

    Attributes:
        plain, narrow, probe, tokens: as in `AutoRound`.
        forecast: committed tokens that the policy expected when it decided: from earlier rounds, calibrated.
        expected: committed tokens by the drafter's own probabilities of the nodes that were verified, not calibrated;
            the forecast of a round that tells nothing, because it was not decided anew.
        committed: committed tokens.
    """

    plain: bool
    narrow: bool
    probe: bool
    tokens: int
    forecast: float
    expected: float
    committed: int


@dataclass
class Totals:
    """Sums of `AutoReport` over the rounds that have ended.

    Attributes:
        rounds, plain_rounds, narrow_rounds, probe_rounds: rounds of a batch.
        tokens: chosen verify tokens.
        forecast, expected, committed: committed tokens, see `AutoReport`.
        timed: rounds whose time reached the cost table.
    """

    rounds: int = 0
    plain_rounds: int = 0
    narrow_rounds: int = 0
    probe_rounds: int = 0
    tokens: int = 0
    forecast: float = 0.0
    expected: float = 0.0
    committed: int = 0
    timed: int = 0

    def add(self, report: AutoReport) -> None:
        self.rounds += 1
        self.plain_rounds += report.plain
        self.narrow_rounds += report.narrow
        self.probe_rounds += report.probe
        self.tokens += report.tokens
        self.forecast += report.forecast
        self.expected += report.expected
        self.committed += report.committed


@dataclass(frozen=True, eq=False)
class _Timed:
    """A round's beginning, and once the next one has begun its end; events, see `AutoBudget`."""

    draft_width: int
    requests: int
    tokens: int
    context_tokens: float
    start: Any
    end: Any = None
    done: Any = None
    host_bound: bool = False


class AutoBudget:
    """Decides what every round verifies, and learns from the rounds.

    Args:
        config: of the flags, with a known block size; its ``budget`` is the most nodes per request.
        buckets: totals of verify tokens that can be run, roots counted: what is captured, else `token_buckets`.
        draft_widths: block sizes that can be drafted, the root's position counted; None: the drafter's own alone.
        decide: under tensor parallelism, what takes this rank's (draft width, tokens, probe) and returns the first
            rank's, which all ranks then run; times differ from rank to rank. Called once a decision. None: one rank.
        new_event: makes an event that has been recorded on the current stream, with ``query()`` and
            ``elapsed_time(later)`` in ms, as ``torch.cuda.Event(enable_timing=True)``. None: no times.
        cost: the table of round times; may be set later as ``cost``. Without it every request gets 15 nodes, or the
            budget if that is less.
        plain: whether plain rounds can be run.
        settings: the policy's margins.
        widths: nodes per request of uniform rounds, the root counted, those of plain rounds left out; then the tokens
            of a decision are as many for every request, and ``buckets`` are not looked at. Empty: requests share a
            round's tokens.
        every: only one round in so many is decided and learnt from, as long as the number of requests stays within an
            eighth of what it was: either takes the host some tenths of a millisecond.

    Attributes:
        policy: the policy, with its gain curve, cost table and calibration.
        buckets: ascending.
        totals: of the rounds that have ended.
    """

    def __init__(
        self,
        config: DDTreeConfig,
        *,
        buckets: Sequence[int],
        draft_widths: Sequence[int] | None = None,
        decide: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None,
        new_event: Callable[[], Any] | None = None,
        cost: CostTable | None = None,
        plain: bool = True,
        settings: Settings = DEFAULT,
        widths: Sequence[int] = (),
        every: int = 1,
    ) -> None:
        drafted = tuple(draft_widths) if draft_widths else (config.require_block_size(),)
        self.buckets = tuple(sorted(set(buckets)))
        self.totals = Totals()
        self.policy = Policy(
            GainCurve(config.budget, drafted),
            cost,
            Calibration(),
            self.buckets,
            draft_widths=drafted,
            plain=plain,
            widths=widths,
            settings=replace(
                settings,
                fallback_nodes=min(settings.fallback_nodes, config.budget),
                # Waits are counted in decisions.
                probe_first=max(settings.probe_first // every, 1),
                probe_last=max(settings.probe_last // every, 1),
            ),
        )
        self._decide, self._new_event = decide, new_event
        self._running: _Timed | None = None
        self._last: AutoRound | None = None
        self._repeated = 0
        self._every, self._uniform = every, bool(widths)
        self._pending: deque[_Timed] = deque(maxlen=_PENDING)

    @property
    def cost(self) -> CostTable | None:
        """The table of round times that the policy goes by."""
        return self.policy.cost

    @cost.setter
    def cost(self, table: CostTable | None) -> None:
        self.policy.cost = table

    def begin_round(
        self,
        requests: int,
        context_tokens: float | Callable[[], float] = 0.0,
        classes: Mapping[str, int] | Callable[[], Mapping[str, int]] | None = None,
    ) -> AutoRound:
        """Decide a round, just before the first of its kernels is launched. Mutates the policy.

        Args:
            requests: running, at least 1.
            context_tokens: committed tokens of all requests, roughly, or what gives them if asked.
            classes: requests per class of temperature, counts of `request_classes`, or what gives them if asked.

        Raises:
            ValueError: as `ddtree_policy.choose`.
        """
        # Before the decision, which is no part of the round: only a probe's end would wait for it.
        self._end_running()
        kept = self._kept(requests)
        if kept is not None:
            self._repeated += 1
            return kept
        context = context_tokens() if callable(context_tokens) else context_tokens
        choice = self.policy.next_round(requests, context, classes() if callable(classes) else classes)
        if self._decide is not None:
            own = (choice.draft_width, choice.tokens, int(choice.probe))
            choice = self._follow(choice, self._decide(own), requests)
        if self._new_event is not None:
            self._running = _Timed(choice.draft_width, requests, choice.tokens, context, self._new_event())
        made = AutoRound(
            owner=self,
            plain=choice.draft_width == 0,
            tokens=choice.tokens,
            draft_width=choice.draft_width,
            requests=requests,
            forecast=choice.committed,
            probe=choice.probe,
        )
        # A probe is one round, whatever it learns.
        self._last, self._repeated = None if made.probe else made, 0
        return made

    def _kept(self, requests: int) -> AutoRound | None:
        """The last decision once more, for about as many requests, unless it is time for another one."""
        last = self._last
        if last is None or self._repeated >= self._every - 1:
            return None
        tokens = requests * last.nodes if last.plain or self._uniform else last.tokens
        if abs(requests - last.requests) > _SAME_LOAD * last.requests or requests > tokens:
            return None
        forecast = last.forecast * requests / last.requests
        return replace(last, tokens=tokens, requests=requests, forecast=forecast, fresh=False)

    def _end_running(self) -> None:
        """End the round that is timed, if one is."""
        if self._running is None or self._new_event is None:
            return
        running = self._running
        # Whether the device already waits for what is launched next.
        host_bound = running.done is not None and bool(running.done.query())
        now = self._new_event()
        self._pending.append(replace(running, end=now, host_bound=host_bound))
        self._running = None

    def launched(self) -> None:
        """All of the round that began last has been launched."""
        if self._running is not None and self._running.done is None and self._new_event is not None:
            self._running = replace(self._running, done=self._new_event())

    def _follow(self, own: Choice, decided: tuple[int, ...], requests: int) -> Choice:
        """The first rank's choice, of which only the shape is known, and whether it is a probe."""
        width, tokens, probe = decided
        if (own.draft_width, own.tokens, own.probe) == (width, tokens, bool(probe)):
            return own
        assert tokens >= requests, f"the first rank chose {tokens} tokens for {requests} requests"
        gain = self.policy.gain
        assert width in (0, *gain.draft_widths), (
            f"the first rank drafts {width} positions, here are {gain.draft_widths}"
        )
        nodes = min(tokens - requests, requests * gain.max_nodes) if width else 0
        drafts = float(gain.at(requests, np.array(nodes), width)) if width else 0.0
        return Choice(width, tokens, nodes, requests + drafts, math.nan, bool(probe))

    def interrupt(self) -> None:
        """Something other than a round of decoding is about to run: the last round's time is not told by the next
        one's beginning."""
        self._running = None

    def end_round(
        self,
        round: AutoRound,
        histogram: Sequence[int] | np.ndarray | None,
        expected: Iterable[float] | None,
        accepted: Sequence[int],
        classes_of_requests: Sequence[str],
        worth: Sequence[float] | np.ndarray | None = None,
    ) -> AutoReport:
        """Learn from a round whose numbers have reached the host, at any delay. Mutates all that is decided from.

        Args:
            round: of `begin_round`.
            histogram: [64], drafted nodes of all requests by -score, `ddtree_ragged.Allotment.histogram`; None in a
                plain round, in a uniform one, and in one that is not fresh.
            expected: [R], `ddtree_ragged.Allotment.expected`; None in a plain round and in one that is not fresh.
            accepted: [R], accepted drafts of every request of the round, whether it is still running or not.
            classes_of_requests: [R], of `request_classes`; read only with ``expected``.
            worth: of a uniform round, as in `ddtree_gain.uniform_gain`, in place of the histogram.
        """
        requests, gain = len(accepted), self.policy.gain
        if requests and round.draft_width and (histogram is not None or worth is not None):
            if worth is not None:
                drafts = uniform_gain(np.asarray(worth), gain.points, requests)
            else:
                assert histogram is not None
                drafts = expected_gain(histogram, gain.points * requests) / requests
            gain.observe(requests, {round.draft_width: drafts})
        drafted = 0.0
        if expected is not None:
            sums: dict[str, tuple[float, int]] = {}
            for name, probable, taken in zip(classes_of_requests, expected, accepted, strict=True):
                before = sums.get(name, (0.0, 0))
                sums[name] = before[0] + probable, before[1] + taken
            for name, (probable, taken) in sums.items():
                self.policy.calibration.observe(name, probable, taken)
                drafted += probable
        self._read_times()
        report = AutoReport(
            plain=round.plain,
            narrow=round.narrow,
            probe=round.probe,
            tokens=round.tokens,
            forecast=round.forecast,
            expected=requests + drafted if expected is not None or round.plain else round.forecast,
            committed=requests + sum(accepted),
        )
        self.totals.add(report)
        return report

    def _read_times(self) -> None:
        """Hand the times of rounds that are over to the cost table; rounds end in the order in which they began."""
        while self._pending and self._pending[0].end.query():
            timed = self._pending.popleft()
            if self.cost is None:
                continue
            seconds = timed.start.elapsed_time(timed.end) / 1000
            self.totals.timed += self.cost.observe(
                timed.draft_width,
                timed.requests,
                timed.tokens,
                seconds,
                timed.context_tokens,
                timed.host_bound,
                stands_for=self._every,
            )


def request_classes(reqs: Iterable[Any]) -> list[str]:
    """The class of temperature of every request (SGLang's ``Req``), of `ddtree_calibration.CLASSES`."""
    params = (req.sampling_params for req in reqs)
    # SGLang turns temperature 0 into top-k 1 at temperature 1.
    return [temperature_class(0.0 if of.top_k == 1 else of.temperature) for of in params]


# --- The table of round times.


@dataclass
class _Memo:
    """Times by their one argument, each measured once unless asked again; seconds."""

    measure: Callable[[int], float]
    seen: dict[int, float] = field(default_factory=dict)

    def __call__(self, number: int) -> float:
        if number not in self.seen:
            self.seen[number] = float(self.measure(number))
        return self.seen[number]

    def settle(self) -> list[float]:
        """Measure all once more, and keep what whatever else ran meanwhile did not add.

        Other work on the device or the host only ever makes a time longer, so the shorter one is the truer; and where a
        larger size took less than a smaller one, the smaller one cannot truly take more.

        Returns:
            By size, the longer of both times over the shorter.
        """
        least, apart = math.inf, []
        for number in sorted(self.seen, reverse=True):
            first, second = self.seen[number], float(self.measure(number))
            apart.append(max(first, second) / min(first, second) if first > 0 and second > 0 else math.inf)
            least = min(least, first, second)
            self.seen[number] = least
        return apart


def _settled(parts: Iterable[_Memo]) -> bool:
    """Measure all parts once more; whether nearly all times were the same again, as they are on an idle device."""
    apart = sorted(ratio for part in parts for ratio in part.settle())
    # One in seven may differ: the first few see a clock that is still rising.
    return apart[len(apart) - 1 - len(apart) // 7] < _SAME_TIME


def measure_costs(
    time_drafts: Mapping[int, Callable[[int], float]],
    time_verify: Callable[[int], float],
    requests: Sequence[int],
    buckets: Sequence[int],
    identity: Mapping[str, Any],
    *,
    max_budget: int = 63,
    host_drafted: float = 0.0,
    host_plain: float = 0.0,
    context: Mapping[int, float] | None = None,
    context_base: float = 0.0,
) -> CostTable:
    """Time the parts of a round and add them up: every number of requests with every bucket that it can fill.

    A drafting round of R requests and T tokens takes draft(R) + verify(T), a plain one verify(the smallest bucket that
    holds R). Each part is timed twice per argument, ascending and then descending, with all others between.

    Args:
        time_drafts: by draft width, seconds of draft and build by requests.
        time_verify: seconds of the target's forward and of all that follows, by verify tokens: a bucket.
        requests: numbers of running requests, see `request_grid`; those that no bucket holds are left out.
        buckets: totals of verify tokens.
        identity: of `identity_of`.
        max_budget: nodes per request; a bucket behind the one that holds the widest trees of all requests is left out.
        host_drafted, host_plain: seconds that the host needs for a drafting and a plain round; none is shorter.
        context, context_base: as in `CostTable`; the context at which the times were taken.

    Raises:
        ValueError: no bucket holds any of the requests, or a time is not positive and finite.
    """
    totals = sorted(set(buckets))
    loads = [load for load in sorted(set(requests)) if totals and load <= totals[-1]]
    if not loads:
        raise ValueError(f"no bucket of {totals} holds any of the requests {sorted(set(requests))}.")
    drafts, verify = {width: _Memo(time) for width, time in time_drafts.items()}, _Memo(time_verify)
    # Neighbours are compared with each other: measured one after the other, they see the same clock and temperature.
    largest = min(bisect_left(totals, loads[-1] * (max_budget + 1)), len(totals) - 1)
    for tokens in totals[bisect_left(totals, loads[0]) : largest + 1]:
        verify(tokens)
    for draft in drafts.values():
        for load in loads:
            draft(load)
    quiet = _settled((verify, *drafts.values()))
    plain: dict[int, float] = {}
    drafted: dict[int, dict[tuple[int, int], float]] = {width: {} for width in drafts}
    for load in loads:
        first = bisect_left(totals, load)
        last = min(bisect_left(totals, load * (max_budget + 1)), len(totals) - 1)
        plain[load] = max(verify(totals[first]), host_plain)
        for width, draft in drafts.items():
            for tokens in totals[first : last + 1]:
                drafted[width][load, tokens] = max(draft(load) + verify(tokens), host_drafted)
    return _told(CostTable(identity, plain, drafted, context, context_base, quiet), plain, drafted)


def measure_uniform_costs(
    time_drafts: Mapping[int, Callable[[int], float]],
    time_verify: Mapping[int, Callable[[int], float]],
    requests: Sequence[int],
    identity: Mapping[str, Any],
    *,
    host_drafted: float = 0.0,
    host_plain: float = 0.0,
    context: Mapping[int, float] | None = None,
    context_base: float = 0.0,
) -> CostTable:
    """The same for uniform rounds: every number of requests with every number of nodes.

    Args:
        time_drafts: as in `measure_costs`.
        time_verify: by nodes per request, 1 among them, seconds of the target's forward by requests.
        requests: numbers of running requests, see `request_grid`.
        identity, host_drafted, host_plain, context, context_base: as in `measure_costs`.

    Raises:
        ValueError: a time is not positive and finite.
    """
    loads = sorted(set(requests))
    drafts = {width: _Memo(time) for width, time in time_drafts.items()}
    verify = {nodes: _Memo(time) for nodes, time in time_verify.items()}
    parts = (*verify.values(), *drafts.values())
    for part in parts:
        for load in loads:
            part(load)
    quiet = _settled(parts)
    plain = {load: max(verify[1](load), host_plain) for load in loads}
    drafted = {
        width: {
            (load, load * nodes): max(draft(load) + time(load), host_drafted)
            for load in loads
            for nodes, time in verify.items()
            if nodes > 1
        }
        for width, draft in drafts.items()
    }
    return _told(CostTable(identity, plain, drafted, context, context_base, quiet), plain, drafted)


def _told(
    table: CostTable, plain: Mapping[int, float], drafted: Mapping[int, Mapping[tuple[int, int], float]]
) -> CostTable:
    """The table, once the log has said what is in it."""
    for width, cells in drafted.items():
        log_costs(width, plain, cells)
    if table.context:
        slopes = ", ".join(
            f"{1e6 * slope:.4f} us {f'with draft width {width}' if width else 'plain'}"
            for width, slope in sorted(table.context.items())
        )
        logger.info("DDTREE: a context token adds %s.", slopes)
    return table


def log_costs(width: int, plain: Mapping[int, float], drafted: Mapping[tuple[int, int], float]) -> None:
    """A draft width's times in short: ms by requests, plain and at a few totals of verify tokens."""
    parts = []
    for load in sorted(plain):
        totals = [tokens for requests, tokens in sorted(drafted) if requests == load]
        few = sorted({totals[0], totals[len(totals) // 2], totals[-1]})
        cells = ", ".join(f"{1000 * drafted[load, tokens]:.2f} at {tokens}" for tokens in few)
        parts.append(f"{load}: {1000 * plain[load]:.2f} plain, {cells}")
    logger.info("DDTREE: ms per round by requests and verify tokens (draft width %d): %s.", width, "; ".join(parts))


def identity_of(
    server_args: Any, config: DDTreeConfig, buckets: Sequence[int], widths: Sequence[int], most_requests: int
) -> dict[str, str | int]:
    """What a table of round times holds for, see `ddtree_cost.identity`.

    Args:
        server_args: SGLang's, resolved.
        config: of the flags.
        buckets: totals of verify tokens.
        widths: block sizes that are drafted.
        most_requests: that there are times for.
    """
    import torch
    from sglang_ddtree import __version__

    def text(name: str) -> str:
        return str(getattr(server_args, name, None))

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return ddtree_cost.identity(
        text("model_path"),
        gpu,
        int(server_args.tp_size),
        revision=text("revision"),
        drafter=text("speculative_draft_model_path"),
        drafter_revision=text("speculative_draft_model_revision"),
        dtype=text("dtype"),
        quantization=text("quantization"),
        kv_cache_dtype=text("kv_cache_dtype"),
        attention_backend=text("attention_backend"),
        draft_attention_backend=text("speculative_draft_attention_backend"),
        linear_attn_backend=text("linear_attn_backend"),
        mamba_ssm_dtype=text("mamba_ssm_dtype"),
        disable_cuda_graph=text("disable_cuda_graph"),
        block_size=config.require_block_size(),
        draft_widths=",".join(str(width) for width in widths),
        budget=config.budget,
        topk=config.topk,
        buckets=",".join(str(tokens) for tokens in buckets),
        most_requests=most_requests,
        sglang=_version("sglang"),
        torch=torch.__version__,
        triton=_version("triton"),
        sglang_ddtree=__version__,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def cache_folder() -> Path:
    """Where tables are kept: SGLANG_DDTREE_CACHE_DIR, else ``sglang-ddtree`` in the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "sglang-ddtree"


def cost_table(
    identity: Mapping[str, Any],
    measure: Callable[[], CostTable],
    agree: Callable[[bool], bool] = bool,
    folder: str | Path | None = None,
) -> CostTable | None:
    """The table of this server: from disk, else measured now and written there.

    Args:
        identity: of `identity_of`.
        measure: measures; under tensor parallelism on all ranks together.
        agree: under tensor parallelism, what takes whether this rank found a table and returns whether the first rank
            did: all ranks measure, or none.
        folder: None: `cache_folder`.

    Returns:
        None only on a rank that found no table where the first rank, which decides, found one.
    """
    path = ddtree_cost.cache_path(cache_folder() if folder is None else folder, identity)
    return ddtree_cost.load_or_measure(path, identity, measure, agree)
