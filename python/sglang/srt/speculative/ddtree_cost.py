"""What a round costs: seconds by running requests and verify tokens, measured once, corrected while serving.

A table holds a row of (verify tokens, seconds) per measured number of requests and per draft width, and one row of
(requests, seconds) for plain rounds. It is kept on disk per identity (model, GPU, tensor-parallel size, versions):
times of anything else are measured anew.

NumPy and the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

# 2: contexts are measured.
FORMAT = 2
# The share of a round's (clipped) deviation that goes into the point beside it, and into all points alike.
_POINT_RATE, _SHARED_RATE = 0.03, 0.02
# A round that stands for others counts for so many at most.
_MOST_WEIGHT = 3
# The same for what the context adds.
_CONTEXT_RATE = 0.05
# One round moves nothing by more than this (natural log); beyond _OUTLIER it does not count at all ...
_CLIP, _OUTLIER = 0.2, math.log(2)
# ... unless so many in a row say the same: then the machine has changed.
_PATIENCE = 16
_POINT_BOUND, _SHARED_BOUND, _CONTEXT_BOUND = math.log(2), math.log(4), math.log(2)
# How fast the host's own time is believed, and its least share in a plain round where only drafting ones were seen.
_HOST_RATE, _PLAIN_SHARE = 0.2, 0.6


def isotonic(values: np.ndarray) -> np.ndarray:
    """The non-decreasing sequence nearest to ``values`` in squares (pool adjacent violators), float64 [n].

    Steps stay steps; a point that is dearer than the next one is averaged with it.
    """
    means: list[float] = []
    counts: list[int] = []
    for value in np.asarray(values, np.float64).tolist():
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, count = means.pop(), counts.pop()
            means[-1] = (means[-1] * counts[-1] + mean * count) / (counts[-1] + count)
            counts[-1] += count
    return np.repeat(means, counts)


class _Row:
    """Seconds along one axis: measured points, a correction each, and the monotone curve through them."""

    def __init__(self, points: Mapping[int, float]) -> None:
        self.points = np.array(sorted(points), np.float64)
        self.measured = np.array([points[point] for point in sorted(points)], np.float64)
        self._correction = np.zeros(len(points))
        self._fitted = isotonic(self.measured)

    def at(self, x: np.ndarray | float) -> np.ndarray:
        """Interpolated; flat below the first point, and above the last as dear per unit as the last."""
        beyond = np.maximum(np.asarray(x, np.float64) / self.points[-1], 1.0)
        return np.interp(x, self.points, self._fitted) * beyond

    def correct(self, x: float, step: float) -> None:
        """Move the point nearest to ``x`` (by ratio) by ``step``, natural log. Mutates the curve."""
        nearest = int(np.abs(np.log(self.points / x)).argmin())
        self._correction[nearest] = _within(self._correction[nearest] + step, _POINT_BOUND)
        self._fitted = isotonic(self.measured * np.exp(self._correction))


def _within(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


def _check(what: str, key: Sequence[int], seconds: float) -> None:
    if min(key) < 1:
        raise ValueError(f"{what}: requests and tokens must be at least 1, got {list(key)}.")
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{what} at {list(key)}: seconds must be positive and finite, got {seconds}.")


class _HostTimes:
    """Seconds that the host was seen to need for rounds of so many requests, whatever they verified.

    More requests never take it less, so that what was seen of fewer is a bound for more.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}

    def observe(self, requests: int, seconds: float) -> None:
        before = self._seen.get(requests, seconds)
        self._seen[requests] = before + _HOST_RATE * (seconds - before)

    def bound(self, requests: int, seconds: float) -> None:
        """A round of so many requests took no longer: nor does the host need longer, for them or for fewer."""
        for seen in [seen for seen in self._seen if seen <= requests]:
            self._seen[seen] = min(self._seen[seen], seconds)

    def at(self, requests: int) -> float:
        return max((seconds for seen, seconds in self._seen.items() if seen <= requests), default=0.0)


class CostTable:
    """Seconds per round. Monotone in the verify tokens, linear between measured numbers of requests (at equal tokens
    per request).

    Beyond the most requests measured, a batch costs what its share of that many does, in proportion; likewise beyond
    the most tokens. Below the fewest it costs what the fewest do.

    Args:
        identity: what the times hold for, see `identity`.
        plain: requests to seconds of a plain round; empty if not measured.
        drafted: draft width to (requests, verify tokens) to seconds of a drafting round, roots counted in the tokens.
        context: draft width (0: plain) to seconds per committed token, summed over requests, that the context adds;
            left out: none. One factor for all of them is corrected while serving.
        context_base: committed tokens per request at which the times were taken.
        quiet: whether nothing else seems to have run meanwhile; what was measured on a busy device is not kept on disk.

    Raises:
        ValueError: a time is not positive and finite, or a key is below 1.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        plain: Mapping[int, float],
        drafted: Mapping[int, Mapping[tuple[int, int], float]],
        context: Mapping[int, float] | None = None,
        context_base: float = 0.0,
        quiet: bool = True,
    ) -> None:
        for requests, seconds in plain.items():
            _check("plain", [requests], seconds)
        for width, cells in drafted.items():
            if width < 2:
                raise ValueError(f"a draft width is at least 2, got {width}.")
            for key, seconds in cells.items():
                _check(f"draft width {width}", key, seconds)
        slopes = dict(context or {})
        if not all(math.isfinite(x) and x >= 0 for x in [*slopes.values(), context_base]):
            raise ValueError(f"context must be finite and not negative, got {slopes} and base {context_base}.")
        self.identity = dict(identity)
        self.context, self.context_base, self.quiet = slopes, float(context_base), quiet
        self._plain = _Row(plain) if plain else None
        self._drafted: dict[int, dict[int, _Row]] = {}
        for width, cells in drafted.items():
            if not cells:
                continue
            rows: dict[int, dict[int, float]] = {}
            for (requests, tokens), seconds in sorted(cells.items()):
                rows.setdefault(requests, {})[tokens] = seconds
            self._drafted[width] = {requests: _Row(row) for requests, row in rows.items()}
        self._shared, self._context_correction = 0.0, 0.0
        self._outliers = 0
        self._host_plain, self._host_drafted = _HostTimes(), _HostTimes()

    @property
    def has_plain(self) -> bool:
        """Whether plain rounds were measured."""
        return self._plain is not None

    @property
    def draft_widths(self) -> tuple[int, ...]:
        """The measured draft widths, ascending."""
        return tuple(sorted(self._drafted))

    def plain_seconds(self, requests: int, context_tokens: float = 0.0) -> float:
        """Expected seconds of a plain round; arguments as in `seconds`."""
        assert self._plain is not None, "plain rounds were not measured: look at has_plain"
        device = float(self._plain.at(requests)) * math.exp(self._shared) + self._context(0, requests, context_tokens)
        host = max(self._host_plain.at(requests), _PLAIN_SHARE * self._host_drafted.at(requests))
        return max(device, host)

    def seconds(
        self, draft_width: int, requests: int, tokens: np.ndarray | int, context_tokens: float = 0.0
    ) -> np.ndarray:
        """Expected seconds of drafting rounds, float64 [...] like ``tokens``.

        Args:
            draft_width: a measured one.
            requests: running.
            tokens: [...], verify tokens over all requests, roots counted.
            context_tokens: committed tokens of all requests; fewer than the measured rounds had count as that many.

        Raises:
            KeyError: the draft width was not measured.
        """
        rows = self._drafted[draft_width]
        measured = list(rows)
        x = np.asarray(tokens, np.float64)
        # Beyond the largest measured batch: as that many batches of it.
        beyond = max(requests / measured[-1], 1.0)
        n = min(max(requests, measured[0]), measured[-1])
        x = x / beyond
        high = next(r for r in measured if r >= n)
        low = max(r for r in measured if r <= n)
        if low == high:
            curve = rows[low].at(x)
        else:
            # At equal tokens per request, for which both rows have times; a + b R + c T comes out exactly.
            share = (n - low) / (high - low)
            curve = (1 - share) * rows[low].at(x * low / n) + share * rows[high].at(x * high / n)
        device = curve * beyond * math.exp(self._shared) + self._context(draft_width, requests, context_tokens)
        return np.maximum(device, max(self._host_plain.at(requests), self._host_drafted.at(requests)))

    def _context(self, draft_width: int, requests: int, context_tokens: float) -> float:
        slope = self.context.get(draft_width, 0.0) * math.exp(self._context_correction)
        return slope * max(context_tokens - requests * self.context_base, 0.0)

    def observe(
        self,
        draft_width: int,
        requests: int,
        tokens: int,
        seconds: float,
        context_tokens: float = 0.0,
        host_bound: bool = False,
        stands_for: int = 1,
    ) -> bool:
        """Take in a round's measured time, slowly. Mutates the corrections.

        A part of the deviation goes into the measured point nearest to the round, a part into all points alike: a
        machine that is slower at everything must not make untried points look cheap. What the context is expected to
        take of the round takes that share of the deviation: a round that is mostly context tells little of the points.
        A time off by more than a factor of two is ignored, until 16 rounds in a row are.

        Args:
            draft_width: 0 for a plain round.
            seconds: from the round's beginning to the next one's, with nothing else (a prefill) between.
            host_bound: the device had nothing left to do when the next round was launched. Then it is the host that
                takes so long, for any round of so many requests, and nothing is learnt about the device.
            stands_for: rounds of which this one is timed; corrections are faster where it is one of several.

        Returns:
            Whether it counted; rounds that the table does not cover do not.
        """
        if draft_width == 0:
            rows = {requests: self._plain} if self._plain is not None else {}
        else:
            rows = dict(self._drafted.get(draft_width, {}))
        if not rows or not (math.isfinite(seconds) and seconds > 0):
            return False
        host = self._host_drafted if draft_width else self._host_plain
        if not host_bound:
            host.bound(requests, seconds)
            # A plain round is the lesser part of a drafting one.
            self._host_plain.bound(requests, seconds)
        expected = (
            self.plain_seconds(requests, context_tokens)
            if draft_width == 0
            else float(self.seconds(draft_width, requests, tokens, context_tokens))
        )
        deviation = math.log(seconds / expected)
        # A pause looks like a host that is busy; and a busy one may well take thrice what the device does.
        limit = 2 * _OUTLIER if host_bound else _OUTLIER
        self._outliers = self._outliers + 1 if abs(deviation) > limit else 0
        if 0 < self._outliers < _PATIENCE:
            return False
        if host_bound:
            host.observe(requests, seconds)
            return True
        step = min(max(deviation, -_CLIP), _CLIP) * min(stands_for, _MOST_WEIGHT)
        of_context = step * min(self._context(draft_width, requests, context_tokens) / expected, 1.0)
        step -= of_context
        self._context_correction = _within(self._context_correction + _CONTEXT_RATE * of_context, _CONTEXT_BOUND)
        self._shared = _within(self._shared + _SHARED_RATE * step, _SHARED_BOUND)
        row = rows[min(rows, key=lambda r: abs(math.log(r / requests)))]
        row.correct(requests if draft_width == 0 else tokens, _POINT_RATE * step)
        return True

    # --- On disk: what was measured, without what serving corrected.

    def to_json(self) -> dict[str, Any]:
        """Everything that `from_json` needs, as JSON's own types."""
        plain = self._plain
        return {
            "format": FORMAT,
            "identity": self.identity,
            "plain": [] if plain is None else [[int(r), s] for r, s in zip(plain.points, plain.measured, strict=True)],
            "drafted": {
                str(width): [
                    [requests, int(tokens), seconds]
                    for requests, row in rows.items()
                    for tokens, seconds in zip(row.points, row.measured, strict=True)
                ]
                for width, rows in self._drafted.items()
            },
            "context": {str(width): slope for width, slope in self.context.items()},
            "context_base": self.context_base,
        }

    @classmethod
    def from_json(cls, data: Any) -> CostTable:
        """The table that `to_json` described.

        Raises:
            ValueError: it is not such a description.
        """
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format must be {FORMAT}, got {data['format']!r}.")
            return cls(
                dict(data["identity"]),
                {int(requests): float(seconds) for requests, seconds in data["plain"]},
                {
                    int(width): {(int(requests), int(tokens)): float(seconds) for requests, tokens, seconds in cells}
                    for width, cells in data["drafted"].items()
                },
                {int(width): float(slope) for width, slope in data["context"].items()},
                float(data["context_base"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a cost table: {type(error).__name__}: {error}") from None

    def save(self, path: str | Path) -> None:
        """Write the table, whole or not at all; folders are made.

        Raises:
            OSError: it cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks may write at once: each its own file, and the last to rename wins.
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            part.write_text(json.dumps(self.to_json(), indent=1) + "\n")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def identity(model: str, gpu: str, tp_size: int, **others: str | int) -> dict[str, str | int]:
    """What a table's times hold for: model, GPU, tensor-parallel size and whatever else changes them (versions,
    attention backends, dtype, budget, captured buckets)."""
    return {"model": model, "gpu": gpu, "tp_size": tp_size, **others}


def cache_path(folder: str | Path, of: Mapping[str, Any]) -> Path:
    """The file of an identity in a folder of tables."""
    digest = hashlib.sha256(json.dumps(dict(of), sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"cost-{digest[:16]}.json"


def load(path: str | Path, of: Mapping[str, Any]) -> CostTable | None:
    """A table from disk, or None, with the reason in the log: there is none, it is corrupt, or its identity differs."""
    try:
        table = CostTable.from_json(json.loads(Path(path).read_text()))
    except FileNotFoundError:
        logger.info("DDTREE: no cost table at %s.", path)
        return None
    except (OSError, ValueError) as error:
        logger.warning("DDTREE: the cost table %s cannot be read (%s).", path, error)
        return None
    wanted = dict(of)
    differing = sorted(
        key for key in {*table.identity, *wanted} if table.identity.get(key, None) != wanted.get(key, None)
    )
    if differing:
        details = ", ".join(f"{key} {table.identity.get(key)!r}, now {wanted.get(key)!r}" for key in differing)
        logger.warning("DDTREE: the cost table %s is stale: %s.", path, details)
        return None
    return table


def load_or_measure(
    path: str | Path,
    of: Mapping[str, Any],
    measure: Callable[[], CostTable],
    agree: Callable[[bool], bool] = bool,
) -> CostTable | None:
    """The table on disk if it is good, else what ``measure`` returns, which is then written there.

    Logged: that a table was measured on a busy device, and so is not written, and a disk that cannot be written.

    Args:
        path: of `cache_path`.
        of: the identity.
        measure: measures.
        agree: takes what is so on this rank, a good table on disk or a quiet device, and says what is so where it
            counts: ranks that measure together must all measure or none.

    Returns:
        None only where there is no table here and ``agree`` says that there is one.
    """
    table = load(path, of)
    if agree(table is not None):
        if table is not None:
            known = "" if table.context else ", which knows no context's cost: delete it to measure again"
            logger.info("DDTREE: cost table from %s%s.", path, known)
        return table
    logger.info("DDTREE: measuring round times.")
    table = measure()
    # Ranks of one host share the file: where the first one's times are no good, none is written.
    if not agree(table.quiet):
        logger.warning(
            "DDTREE: round times differed when they were measured again: something else ran on this GPU or its host. "
            "Serving corrects them, but they are not kept: the next start measures anew. Start it while nothing else "
            "runs."
        )
        return table
    try:
        table.save(path)
    except OSError as error:
        logger.warning(
            "DDTREE: the cost table cannot be written to %s (%s): measured anew at the next start.", path, error
        )
    return table
