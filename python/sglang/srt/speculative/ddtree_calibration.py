"""How far the drafter's probabilities can be believed: accepted drafts against the sum of their scores.

Over many rounds the exp(score) of a tree's nodes should add up to its accepted drafts. A drafter is a little too sure
or not sure enough of itself, and differently so for a sampled target. The ratio is kept per class of temperature. It
scales the gain that `ddtree_policy` expects and so changes speed only, never output.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

CLASSES = ("greedy", "low", "middle", "high")
_UPPER = (0.7, 1.1)


def temperature_class(temperature: float) -> str:
    """The class of a request: "greedy" (0), "low" (at most 0.7), "middle" (at most 1.1) or "high".

    SGLang turns temperature 0 into top-k 1; tell this function 0 for such a request.
    """
    if temperature <= 0:
        return "greedy"
    return "low" if temperature <= _UPPER[0] else "middle" if temperature <= _UPPER[1] else "high"


class Calibration:
    """The ratio of accepted to expected drafts per class of temperature, slowly corrected, within bounds.

    Args:
        memory: expected drafts over which a ratio is averaged; older ones are forgotten exponentially.
        prior: expected drafts that a class is taken to have seen at a ratio of 1 before any data, and that hold the
            ratio near 1 while there are few.
        low, high: bounds of a ratio.

    Raises:
        ValueError: memory or prior is not positive, or not 0 < low <= 1 <= high.
    """

    def __init__(self, memory: float = 4000.0, prior: float = 200.0, low: float = 0.25, high: float = 1.5) -> None:
        if not (memory > 0 and prior > 0):
            raise ValueError(f"memory and prior must be positive, got {memory} and {prior}.")
        if not 0 < low <= 1 <= high:
            raise ValueError(f"bounds must satisfy 0 < low <= 1 <= high, got {low} and {high}.")
        self._memory, self._prior, self._bounds = memory, prior, (low, high)
        self._expected = dict.fromkeys(CLASSES, 0.0)
        self._observed = dict.fromkeys(CLASSES, 0.0)

    def observe(self, name: str, expected: float, observed: float) -> bool:
        """Take in a round's requests of one class. Mutates that class alone.

        Args:
            name: of `CLASSES`.
            expected: sum of exp(score) over the drafted nodes verified for them, not calibrated.
            observed: their accepted drafts.

        Returns:
            Whether it counted: numbers that are not finite, negative, or without anything expected are ignored.

        Raises:
            KeyError: no such class.
        """
        before = self._expected[name], self._observed[name]
        if not (math.isfinite(expected) and math.isfinite(observed)) or expected <= 0 or observed < 0:
            return False
        kept = math.exp(-expected / self._memory)
        self._expected[name] = before[0] * kept + expected
        self._observed[name] = before[1] * kept + observed
        return True

    def ratio(self, name: str) -> float:
        """Accepted drafts per expected one in a class, within the bounds; 1 before any data."""
        ratio = (self._observed[name] + self._prior) / (self._expected[name] + self._prior)
        return min(max(ratio, self._bounds[0]), self._bounds[1])

    def factor(self, requests: Mapping[str, int] | None = None) -> float:
        """The ratio of a batch: the classes' mean, weighed by their running requests (None or empty: all greedy)."""
        total = sum(requests.values()) if requests else 0
        if not requests or total <= 0:
            return self.ratio("greedy")
        return sum(count * self.ratio(name) for name, count in requests.items()) / total
