"""How much to verify in the next round: `--speculative-ddtree-budget auto` decides here.

A round of R requests that verifies W drafted nodes, chosen best-first over all of them, is expected to commit
R + G(W) tokens and to take a measured time. Chosen is what commits most tokens per second: a total of verify tokens
T = R + W for which a graph was captured, a draft width, or no draft at all. The host decides before the round's scores
exist, from what earlier rounds told (`ddtree_gain`, `ddtree_cost`, `ddtree_calibration`); a wrong guess costs time,
never a token.

Decisions follow from their inputs alone. Under tensor parallelism all ranks must decide alike, and measured times
differ between them: let one rank decide and send its choice, or feed all of them its times.

NumPy and the standard library only; it imports no SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_calibration import Calibration
    from sglang.srt.speculative.ddtree_cost import CostTable
    from sglang.srt.speculative.ddtree_gain import GainCurve


@dataclass(frozen=True)
class Settings:
    """How reluctant the policy is. Margins are shares of the tokens per second."""

    bucket_margin: float = 0.005
    """Another bucket or draft width must be better by this much than the current one."""
    mode_margin: float = 0.03
    """A plain round instead of a drafting one, or the reverse, must be better by this much."""
    probe_first: int = 16
    """Plain rounds until the widest draft is made all the same, to learn what drafts are worth by now."""
    probe_narrow: int = 2
    """So many times as long where narrower drafts are made, which tell of the widest by proportion."""
    probe_last: int = 128
    """The wait doubles up to this many rounds while drafting stays clearly worse. A draft narrower than the current one
    waits as long."""
    probe_clear: float = 0.9
    """Drafting is clearly worse below this share of the current choice's tokens per second."""
    fallback_nodes: int = 15
    """Drafted nodes per request where no cost is known."""


DEFAULT = Settings()


@dataclass(frozen=True)
class Choice:
    """What to run.

    Attributes:
        draft_width: the drafter's block size D; 0: a plain round, without draft and tree.
        tokens: verify tokens to run, roots counted: one of the buckets, or the requests in a plain round.
        nodes: W, drafted nodes to select over all requests; tokens - requests, less where trees cannot be that large.
        committed: expected committed tokens, bonus tokens counted.
        seconds: expected time; nan where no cost is known.
        probe: drafted to learn what drafts are worth, not because it pays.
    """

    draft_width: int
    tokens: int
    nodes: int
    committed: float
    seconds: float
    probe: bool = False

    @property
    def rate(self) -> float:
        """Expected committed tokens per second."""
        return self.committed / self.seconds


def choose(
    requests: int,
    gain: GainCurve | _Gains,
    cost: CostTable | None,
    buckets: Sequence[int],
    current: Choice | None = None,
    *,
    draft_widths: Sequence[int] = (16,),
    plain: bool = True,
    factor: float = 1.0,
    context_tokens: float = 0.0,
    settings: Settings = DEFAULT,
) -> Choice:
    """The round that is expected to commit most tokens per second. Pure: nothing is changed.

    Equal rates go to the smaller bucket, then to the narrower draft.

    Args:
        requests: running, R >= 1.
        gain: expected accepted drafts.
        cost: expected seconds. Without it, or without times of any of the draft widths, the widest draft verifies the
            default budget for every request; where some are measured the others are not considered, nor is an
            unmeasured plain round.
        buckets: totals of verify tokens, roots counted, that can be run. Those below R cannot hold the batch.
        current: the choice so far, which stays unless another one is better by the settings' margins. None: the best.
        draft_widths: block sizes that can be drafted.
        plain: whether a plain round can be run.
        factor: of `Calibration.factor`, scales the gain.
        context_tokens: committed tokens of all requests.
        settings: margins and the default budget.

    Returns:
        A `Choice` whose ``tokens`` is one of ``buckets``, or R in a plain round.

    Raises:
        ValueError: R is below 1, no draft width is given, or no bucket holds R roots and plain rounds are not allowed.
    """
    if requests < 1 or not draft_widths:
        raise ValueError(f"needs a request and a draft width, got {requests} and {list(draft_widths)}.")
    tokens = np.array(sorted({bucket for bucket in buckets if bucket >= requests}), np.int64)
    if not len(tokens):
        if not plain:
            raise ValueError(f"no bucket holds {requests} requests, the largest is {max(buckets, default=None)}.")
        return _plain_round(requests, cost, context_tokens)
    nodes = np.minimum(tokens - requests, requests * gain.max_nodes)

    def committed(width: int) -> np.ndarray:
        return requests + np.minimum(factor * gain.at(requests, nodes, width), requests * (width - 1.0))

    measured = [width for width in sorted(draft_widths) if cost is not None and width in cost.draft_widths]
    if cost is None or not measured:
        width = max(draft_widths)
        # The smallest bucket that holds the default budget for everyone, or the largest there is.
        at = min(int(np.searchsorted(tokens, requests * (1 + settings.fallback_nodes))), len(tokens) - 1)
        return Choice(width, int(tokens[at]), int(nodes[at]), float(committed(width)[at]), math.nan)

    gains = np.stack([committed(width) for width in measured], axis=1)
    seconds = np.stack([cost.seconds(width, requests, tokens, context_tokens) for width in measured], axis=1)
    rates = gains / seconds
    # Buckets run along the rows, so the first maximum is the smallest bucket's.
    at, column = divmod(int(rates.argmax()), len(measured))
    if current is not None and current.draft_width in measured and current.tokens in tokens:
        kept = int(np.searchsorted(tokens, current.tokens)), measured.index(current.draft_width)
        if rates[at, column] <= rates[kept] * (1 + settings.bucket_margin):
            at, column = kept
    place = at, column
    drafted = Choice(measured[column], int(tokens[at]), int(nodes[at]), float(gains[place]), float(seconds[place]))
    if not (plain and cost.has_plain):
        return drafted
    undrafted = _plain_round(requests, cost, context_tokens)
    if current is None:
        return drafted if drafted.rate > undrafted.rate else undrafted
    holder, other = (drafted, undrafted) if current.draft_width else (undrafted, drafted)
    return other if other.rate > holder.rate * (1 + settings.mode_margin) else holder


def _plain_round(requests: int, cost: CostTable | None, context_tokens: float) -> Choice:
    known = cost is not None and cost.has_plain
    seconds = cost.plain_seconds(requests, context_tokens) if cost is not None and known else math.nan
    return Choice(0, requests, 0, float(requests), seconds)


@dataclass(frozen=True)
class _Gains:
    """A gain curve that answers otherwise: ``at`` and ``max_nodes`` as of `GainCurve`."""

    at: Callable[[int, np.ndarray, int], np.ndarray]
    max_nodes: int


class Policy:
    """`choose` round after round: remembers the choice, and drafts now and then while that does not pay.

    Scores are known of drafted rounds alone, and of the width that was drafted. So after a number of rounds without the
    widest draft it is made all the same (a probe), and that number doubles while it stays clearly worse. A draft
    narrower than the current one is made once in a long while, where it would pay if its nodes were worth as much.

    Attributes:
        gain, cost, calibration: what it decides from. The caller feeds them with what comes back from rounds, at any
            delay. ``cost`` may be set once it has been measured.
        current: the choice that holds, which a probe does not change; None before the first round.

    Args:
        buckets, draft_widths, plain, settings: as in `choose`.
        widths: nodes per request, roots counted, of rounds in which all requests have as many; then the buckets are so
            many for each request. Empty: requests share a round's tokens.
    """

    def __init__(
        self,
        gain: GainCurve,
        cost: CostTable | None,
        calibration: Calibration,
        buckets: Sequence[int],
        *,
        draft_widths: Sequence[int] = (16,),
        plain: bool = True,
        settings: Settings = DEFAULT,
        widths: Sequence[int] = (),
    ) -> None:
        self.gain, self.cost, self.calibration = gain, cost, calibration
        self.current: Choice | None = None
        self._buckets, self._draft_widths, self._plain = tuple(buckets), tuple(draft_widths), plain
        self._widths = tuple(widths)
        self._settings = settings
        self._waited, self._wait = 0, settings.probe_first
        # Rounds since each width was drafted.
        self._undrafted: dict[int, int] = {}
        self._requests = 0

    def next_round(
        self, requests: int, context_tokens: float = 0.0, classes: Mapping[str, int] | None = None
    ) -> Choice:
        """Decide a round of at least one request. Mutates ``current``, the wait for a probe and the gain's age.

        Args:
            requests: running.
            context_tokens: committed tokens of all requests.
            classes: requests per class of temperature, as in `Calibration.factor`.

        Raises:
            ValueError: as `choose`.
        """
        # None is worth less than a narrower draft.
        factor, gain = self.calibration.factor(classes), _Gains(self.gain.at_least, self.gain.max_nodes)
        choice = self.current = choose(
            requests,
            gain,
            self.cost,
            self._totals(requests),
            self._current_of(requests),
            draft_widths=self._draft_widths,
            plain=self._plain,
            factor=factor,
            context_tokens=context_tokens,
            settings=self._settings,
        )
        if choice.draft_width == 0:
            self.gain.age()
        # Another load is another question: what was learnt about waiting does not hold.
        if not self._requests <= 2 * requests <= 4 * self._requests:
            self._requests, self._wait = requests, self._settings.probe_first
        measured = [width for width in self._draft_widths if self.cost and width in self.cost.draft_widths]
        widest = max(measured or self._draft_widths)
        narrower = self._narrower_to_probe(choice, measured)
        if narrower is not None:
            own = partial(self._best_of, narrower, requests, factor, context_tokens)
            # How long it takes is known well: only what its nodes are worth may be a mistake.
            as_good = _Gains(lambda requests, nodes, _: gain.at(requests, nodes, choice.draft_width), gain.max_nodes)
            if own(as_good).rate > choice.rate:
                return replace(own(gain), probe=True)
        if choice.draft_width == widest:
            self._waited, self._wait = 0, self._settings.probe_first
            return choice
        self._waited += 1
        wait = self._wait * (self._settings.probe_narrow if choice.draft_width else 1)
        if self._waited < wait or max(self._totals(requests), default=0) < requests:
            return choice
        # By what it told itself: never taken to be worth less than narrower ones, it would be made again and again.
        probe = self._best_of(widest, requests, factor, context_tokens, self.gain)
        clearly_worse = probe.rate < choice.rate * self._settings.probe_clear
        self._waited = 0
        self._wait = min(2 * self._wait, self._settings.probe_last) if clearly_worse else self._settings.probe_first
        return replace(probe, probe=True)

    def _totals(self, requests: int) -> tuple[int, ...]:
        return tuple(requests * width for width in self._widths) if self._widths else self._buckets

    def _current_of(self, requests: int) -> Choice | None:
        """The current choice, for so many requests."""
        current = self.current
        if current is None or not self._widths or not current.draft_width:
            return current
        # What is no drafted node is a request's root.
        return replace(current, tokens=requests * (current.tokens // (current.tokens - current.nodes)))

    def _narrower_to_probe(self, choice: Choice, measured: Sequence[int]) -> int | None:
        """A width below the choice's that was not drafted for long. Mutates how long that is."""
        found = None
        for width in measured:
            self._undrafted[width] = 0 if width == choice.draft_width else self._undrafted.get(width, 0) + 1
            if width < choice.draft_width and self._undrafted[width] >= self._settings.probe_last:
                found = width
        if found is not None:
            self._undrafted[found] = 0
        return found

    def _best_of(
        self, width: int, requests: int, factor: float, context_tokens: float, gain: GainCurve | _Gains
    ) -> Choice:
        """The best round that drafts this width."""
        return choose(
            requests,
            gain,
            self.cost,
            self._totals(requests),
            draft_widths=(width,),
            plain=False,
            factor=factor,
            context_tokens=context_tokens,
            settings=self._settings,
        )
