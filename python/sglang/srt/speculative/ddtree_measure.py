"""The table of round times, measured part by part: what drafts and verifies of every size take on this GPU.

`ddtree_timing` times the graphs. NumPy and the standard library only.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.speculative.ddtree_cost import CostTable

logger = logging.getLogger(__name__)

# Two measurements of the same are the same within this factor where nothing else runs.
_SAME_TIME = 1.1


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
