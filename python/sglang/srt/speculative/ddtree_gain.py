"""What a batch's drafts are worth: expected accepted drafts as a function of the nodes verified over all requests.

exp(score) of a node is the probability that it is accepted. A round that verifies the W likeliest nodes of all its
requests therefore expects the sum of their exp(score), G(W), in accepted drafts. The host has to choose W before the
round's own scores are known, so the device delivers G at a few fixed numbers of nodes per request (`gain_vector` says
which floats), some rounds late, and `GainCurve` averages what arrives.

NumPy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

# Nodes per request. Dense where G bends; the points below one node matter to batches of many requests.
GRID = (0.0, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 11.0, 15.0, 23.0, 31.0, 47.0, 63.0)
# Accepted drafts per round at those points before any data, by the drafter's block size: trees of smollm2-135m-dflash
# over 192 recorded answers (docs/recorded-drafts.md), top-k cap 8. Averages over rounds: an average over all positions
# is higher, because positions that a long acceptance skips count there too.
PRIOR = {
    8: (0.0, 0.193, 0.385, 0.77, 1.334, 1.737, 2.252, 2.531, 2.778, 2.932, 3.114, 3.211, 3.352, 3.442),
    16: (0.0, 0.193, 0.385, 0.77, 1.334, 1.737, 2.252, 2.531, 2.826, 3.014, 3.221, 3.334, 3.497, 3.607),
}

# What is left of the weight of a width's rounds after each round of another width, down to a least in requests' rounds.
_KEPT, _LEAST_OWN = 0.98, 16.0
# Drafts below which a curve says nothing of proportions.
_LEAST = 1e-9


def grid(max_nodes: int) -> np.ndarray:
    """The points at which a gain is kept, float64 [P]: `GRID` below ``max_nodes``, and ``max_nodes`` itself.

    Args:
        max_nodes: drafted nodes that a request can have at most, the root not counted.

    Raises:
        ValueError: max_nodes is below 1.
    """
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be at least 1, got {max_nodes}.")
    return np.array([*(point for point in GRID if point < max_nodes), float(max_nodes)])


def prior(points: np.ndarray, draft_width: int) -> np.ndarray:
    """Accepted drafts per round and request before any data, float64 [P], at nodes per request ``points``.

    Block sizes between those of `PRIOR` are interpolated; a draft of D positions never gives more than D - 1.
    """
    narrow, wide = min(PRIOR), max(PRIOR)
    share = min(max((draft_width - narrow) / (wide - narrow), 0.0), 1.0)
    curve = (1 - share) * np.array(PRIOR[narrow]) + share * np.array(PRIOR[wide])
    return np.minimum(np.interp(points, GRID, curve), draft_width - 1)


def grid_index(points: np.ndarray, requests: int) -> tuple[np.ndarray, np.ndarray]:
    """Where a batch's sorted scores are summed up to, for the device: an index and a fraction per grid point.

    With S[i] the sum of the batch's i largest exp(score), S[0] = 0, the delivered float of a point is
    (S[index] * (1 - fraction) + S[index + 1] * fraction) / requests; where the fraction is 0, S[index + 1] is not
    needed (and may not exist).

    Args:
        points: float64 [P], of `grid`.
        requests: in the batch.

    Returns:
        index int64 [P], fraction float64 [P] in [0, 1).
    """
    nodes = points * requests
    index = np.floor(nodes).astype(np.int64)
    return index, nodes - index


def gain_vector(probabilities: np.ndarray, points: np.ndarray) -> np.ndarray:
    """What the device delivers of a round, and the reference for it.

    Args:
        probabilities: float [requests, max_nodes], exp(score) of each request's best nodes in any order, 0 where
            there is no node.
        points: float64 [P], nodes per request, of `grid`.

    Returns:
        float64 [P], expected accepted drafts per request with the best ``points * requests`` nodes of all.
    """
    requests = len(probabilities)
    best = -np.sort(-np.asarray(probabilities, np.float64), axis=None)
    # A zero behind the end, so that index + 1 always exists.
    sums = np.concatenate([[0.0], np.cumsum(best), [best.sum()]])
    index, fraction = grid_index(points, requests)
    return (sums[index] * (1 - fraction) + sums[index + 1] * fraction) / requests


def uniform_gain(worth: np.ndarray, points: np.ndarray, requests: int) -> np.ndarray:
    """The same of a round whose requests all have as many nodes, of which each takes its own best.

    Args:
        worth: float [max_nodes], exp(score) of the best node of every request, of the second best, and so on, each
            summed over the requests; 0 where there is no node.
        points: float64 [P], nodes per request, of `grid`.
        requests: in the batch.

    Returns:
        float64 [P], expected accepted drafts per request with ``points`` nodes each.
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(worth, np.float64))])
    return np.interp(points, np.arange(len(sums)), sums) / requests


class GainCurve:
    """Expected accepted drafts of a batch over the nodes verified, averaged from rounds past.

    Kept per request over nodes per request, so that a batch that gains or loses requests rescales by itself. What it
    does not know is that many requests share nodes better than few do; so a change of the number of requests also
    takes weight from older rounds, and the next ones decide sooner.

    One curve per draft width. What a round of one width tells, it tells of the others by proportion: requests that are
    easy to draft for are so at any width. A width that was never drafted moves as the observed one does. One that was
    moves the less the more is known of it than of the observed one, or how the widths compare would stay what it was
    before any data. The longer a width was not drafted the less is known of it, and the more does its next round count.

    Args:
        max_nodes: drafted nodes that a request can have at most.
        draft_widths: block sizes D that rounds may draft, the root's position counted.
        memory: rounds over which a single request is averaged, and requests over which a batch is.
        memory_rounds: rounds that are averaged at least, however many requests they hold.
        prior_weight: requests' rounds that the prior counts for.

    Raises:
        ValueError: no draft width, or one below 2; max_nodes below 1; a memory or weight that is not positive.
    """

    def __init__(
        self,
        max_nodes: int = 63,
        draft_widths: Sequence[int] = (16,),
        memory: float = 128.0,
        memory_rounds: float = 32.0,
        prior_weight: float = 4.0,
    ) -> None:
        if not draft_widths or min(draft_widths) < 2:
            raise ValueError(f"draft_widths must name block sizes of at least 2, got {list(draft_widths)}.")
        if min(memory, memory_rounds, prior_weight) <= 0:
            raise ValueError(
                f"memory, memory_rounds and prior_weight must be positive, got {memory}, {memory_rounds} and "
                f"{prior_weight}."
            )
        self.points = grid(max_nodes)
        self.max_nodes = max_nodes
        self.draft_widths = tuple(sorted(set(draft_widths)))
        self._curves = {width: prior(self.points, width) for width in self.draft_widths}
        # By width, how many times the next narrower one's nodes its own are worth at least.
        self._over = {
            wide: np.divide(
                self._curves[wide], self._curves[narrow], out=np.ones_like(self.points), where=self.points > 0
            )
            for narrow, wide in pairwise(self.draft_widths)
        }
        self._memory, self._memory_rounds = memory, memory_rounds
        self._prior_weight = prior_weight
        self._weights = dict.fromkeys(self.draft_widths, prior_weight)
        self._requests: int | None = None

    def observe(self, requests: int, gains: Mapping[int, np.ndarray]) -> bool:
        """Take in a past round's gains. Mutates the curves.

        Args:
            requests: in that round.
            gains: draft width to float [P], `gain_vector` over the nodes of a draft of that width. The round's width;
                others are left out.

        Returns:
            Whether it counted: a vector that is not finite is ignored, and no requests or no vectors are.

        Raises:
            ValueError: a vector is not as long as the grid.
            KeyError: a width that this curve was not made for.
        """
        seen = {width: np.asarray(gain, np.float64) for width, gain in gains.items()}
        for width, gain in seen.items():
            if gain.shape != self.points.shape:
                raise ValueError(
                    f"gains of draft width {width} must have the shape {list(self.points.shape)}, one float per grid "
                    f"point, got {list(gain.shape)}."
                )
            if width not in self._curves:
                raise KeyError(f"draft width {width} is not one of {list(self.draft_widths)}")
        if requests < 1 or not seen or not all(np.isfinite(gain).all() for gain in seen.values()):
            return False
        if self._requests is not None:
            self.age(min(requests / self._requests, self._requests / requests))
        self._requests = requests
        most = max(self._memory, self._memory_rounds * requests)
        widest, before = max(seen), self._curves[max(seen)]
        for width, gain in seen.items():
            # A node's probability is at most 1, and more nodes never give less.
            gain = np.maximum.accumulate(np.clip(gain, 0.0, np.minimum(self.points, width - 1)))
            weight = min(self._weights[width], most)
            share = requests / (weight + requests)
            self._weights[width] = weight + requests
            self._curves[width] = (1 - share) * self._curves[width] + share * gain
        moved = np.divide(self._curves[widest], before, out=np.ones_like(before), where=before > _LEAST)
        told = self._own_weight(widest)
        for width in self.draft_widths:
            if width not in seen:
                own, weight = self._own_weight(width), self._weights[width]
                follows = moved ** (told / (told + own) if own else 1.0)
                limit = np.minimum(self.points, width - 1)
                self._curves[width] = np.maximum.accumulate(np.minimum(self._curves[width] * follows, limit))
                self._weights[width] = max(weight * _KEPT, min(weight, _LEAST_OWN))
        return True

    def _own_weight(self, draft_width: int) -> float:
        """What a width's curve knows from rounds that drafted it, in requests' rounds."""
        return max(self._weights[draft_width] - self._prior_weight, 0.0)

    def age(self, kept: float = 0.995) -> None:
        """A round passed that tells nothing (no draft): what is known weighs less against what comes next."""
        for width in self.draft_widths:
            self._weights[width] *= kept

    def at(self, requests: int, nodes: np.ndarray, draft_width: int) -> np.ndarray:
        """Expected accepted drafts of a round, float64 [...], not calibrated.

        Args:
            requests: running.
            nodes: [...], nodes over all requests; more than ``max_nodes`` each add nothing.
            draft_width: one of ``draft_widths``.
        """
        return self._scaled(requests, nodes, self._curves[draft_width])

    def at_least(self, requests: int, nodes: np.ndarray, draft_width: int) -> np.ndarray:
        """The same, and not less than narrower drafts say.

        Rounds of different widths have seen different texts, and with few requests those differ by much more than the
        widths do. But a whole block holds what its half would have drafted: it is worth at least what the half is, and
        as much more as it was before any data.
        """
        worth = self._curves[self.draft_widths[0]]
        for width in self.draft_widths[1 : self.draft_widths.index(draft_width) + 1]:
            least = np.minimum(worth * self._over[width], np.minimum(self.points, width - 1))
            worth = np.maximum(self._curves[width], least)
        return self._scaled(requests, nodes, worth)

    def _scaled(self, requests: int, nodes: np.ndarray, worth: np.ndarray) -> np.ndarray:
        return requests * np.interp(np.asarray(nodes) / requests, self.points, worth)
