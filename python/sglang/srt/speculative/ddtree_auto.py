"""`--speculative-ddtree-budget auto` as the worker sees it: what a round verifies, and what was learnt from it.

`AutoBudget` owns the policy with all that it decides from. Before a round the worker asks it how many tokens to verify
(`begin_round`); when the round's numbers have reached the host, one or more rounds later, they come back to it
(`end_round`). Nothing here waits for the device: a round's time is read once its end has been reached, from events
that are only queried. A wrong guess, a late number or a lost one costs speed, never a token.

Standard library and NumPy, and through `ddtree_ragged` torch; no SGLang.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.speculative.ddtree_calibration import Calibration, temperature_class
from sglang.srt.speculative.ddtree_cost import CostTable
from sglang.srt.speculative.ddtree_gain import GainCurve, uniform_gain
from sglang.srt.speculative.ddtree_policy import DEFAULT, Choice, Policy, Settings
from sglang.srt.speculative.ddtree_ragged import expected_gain

if TYPE_CHECKING:
    from sglang_ddtree.flags import DDTreeConfig

# Rounds whose end has not been seen yet. Overlap scheduling has two under way; an event that never comes is given up.
_PENDING = 8
# A choice is kept while the number of requests stays within this share of what it was made for.
_SAME_LOAD = 0.125


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
