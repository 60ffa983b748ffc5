"""What a round takes here: replays of the captured graphs, timed at start, before any request.

The parts are timed apart, on the device by replaying nothing but the graph, and on the host by what it takes to launch
it: a round lasts as long as the longer of the two. Contexts are as short as SGLang's capture makes them; what longer
ones add per token is timed once per draft width, on the device (`context_slopes`).
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative.ddtree_context import LongContexts, batch_of, fitting, lent_slots
from sglang.srt.speculative.ddtree_cost import CostTable
from sglang.srt.speculative.ddtree_measure import measure_costs, measure_uniform_costs
from sglang.srt.speculative.ddtree_sizes import request_grid

logger = logging.getLogger(__name__)

_REPEATS = 5
_TURNS = 3
# Nodes per request where a verify's share of the context is timed, fewer where the budget is.
_NODES = 16
# The host's time for a round over that for its three replays: the scheduler, the tree and the packing (measured on an
# H200's host with a small model, docs/gpu-runs.md).
HOST_SHARE = 1.8


class PartTimes:
    """Seconds of one part of a round, by its size.

    Args:
        prepare: takes a size and returns (launch, replay): all that the host does to run the part, and the bare graph.

    Attributes:
        host: seconds that the host took to launch it, the least of all sizes; infinite before any.
    """

    def __init__(self, prepare: Callable[[int], tuple[Callable[[], None], Callable[[], None]]]) -> None:
        self._prepare = prepare
        self.host = float("inf")

    def __call__(self, size: int) -> float:
        """Seconds on the device, the least of a few."""
        launch, replay = self._prepare(size)
        launch()
        torch.cuda.synchronize()
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            launch()
            self.host = min(self.host, time.perf_counter() - begin)
            torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        # All launched before the first has ended, or a short graph would wait for the host.
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        torch.cuda.synchronize()
        return min(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)) / 1000


def of_runner(runner: Any, tokens_of: Callable[[int], tuple[int, int]]) -> PartTimes:
    """A part that is a forward of one of SGLang's decode graph runners.

    Args:
        runner: the runner, captured.
        tokens_of: takes the part's size, gives requests and tokens of the graph that serves it.
    """

    def prepare(size: int) -> tuple[Callable[[], None], Callable[[], None]]:
        requests, tokens = tokens_of(size)
        batch, _, _ = runner.capture_prepare(requests, num_tokens=tokens)
        return _run(runner, batch)

    return PartTimes(prepare)


def _run(runner: Any, batch: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """What `PartTimes` asks for, of a batch of the runner's capture."""

    def launch() -> None:
        # As if it had not been loaded yet.
        runner.execute(batch)

    def replay() -> None:
        runner.backend.replay(runner._replay_graph_key, batch)

    return launch, replay


# A graph of so many requests with so many nodes each: the runner that has it, and its tokens.
GraphOf = Callable[[int, int], tuple[Any, int]]


def context_slopes(
    drafters: Mapping[int, Any], target: Any, most_requests: int, graph_of: GraphOf | None = None
) -> dict[int, float]:
    """Seconds that a context token adds to a round, by draft width, 0 for a plain one; empty if it cannot be timed.

    Args:
        drafters: graph runners by draft width, captured.
        target: as in `measure`, or of the widest uniform rounds.
        most_requests: that all of them have graphs for.
        graph_of: the target's verify; None: packed.
    """
    try:
        return _slopes(drafters, target, most_requests, graph_of or partial(_packed_graph, target))
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        # The device is in no state to serve; and what befalls one rank alone, the others must not wait for.
        raise
    except Exception:
        logger.warning("DDTREE: what longer contexts cost cannot be measured and is taken for nothing.", exc_info=True)
        return {}


def _packed_graph(target: Any, requests: int, nodes: int) -> tuple[Any, int]:
    totals = target.capture_num_tokens
    return target, totals[min(bisect_left(totals, requests * nodes), len(totals) - 1)]


def _slopes(drafters: Mapping[int, Any], target: Any, most_requests: int, graph_of: GraphOf) -> dict[int, float]:
    contexts = fitting([*drafters.values(), target], most_requests)
    if contexts is None:
        return {}

    def verify(nodes: int) -> float:
        runner, total = graph_of(contexts.requests, nodes)
        return _slope(runner, contexts, total)

    drafted = verify(_NODES)
    slopes = {0: verify(1)}
    for width, drafter in drafters.items():
        slopes[width] = drafted + _slope(drafter, contexts, contexts.requests * drafter.captured_req_width)
    return slopes


def _slope(runner: Any, contexts: LongContexts, total: int) -> float:
    """Seconds per context token of a forward with ``total`` new tokens, at least 0."""
    short = int(runner.seq_len_fill_value)

    def prepare(tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
        return _run(runner, batch_of(runner, contexts.requests, total, tokens))

    seconds = PartTimes(prepare)
    with lent_slots(runner, contexts):
        # Turn about: other work on the device only ever makes a time longer.
        both = [(seconds(contexts.tokens), seconds(short)) for _ in range(_TURNS)]
    added = min(long for long, _ in both) - min(short for _, short in both)
    return max(added, 0.0) / (contexts.requests * (contexts.tokens - short))


def _uniform_tokens(runner: Any, requests: int) -> tuple[int, int]:
    """Requests and tokens of the graph, of so many tokens per request, that serves so many requests."""
    size = min(size for size in runner.capture_bs if size >= requests)
    return size, size * runner.captured_req_width


def measure(
    *,
    drafters: Mapping[int, Any],
    target: Any,
    commits: Any,
    max_budget: int,
    identity: Mapping[str, Any],
) -> CostTable:
    """Time all parts of packed rounds.

    Args:
        drafters, target: the graph runners, captured; the drafter's by draft width, and ``target`` is a
            `DDTreeVerifyGraphRunner` of packed rounds.
        commits: the `PackedCommitGraphs`.
        max_budget, identity: as in `ddtree_measure.measure_costs`.
    """

    def verify_tokens(total: int) -> tuple[int, int]:
        return target._ragged_capture_slots(total), total

    def prepare_commit(total: int) -> tuple[Callable[[], None], Callable[[], None]]:
        def launch() -> None:
            commits.replay(1, total)

        return launch, launch

    drafts = {width: of_runner(drafter, partial(_uniform_tokens, drafter)) for width, drafter in drafters.items()}
    verify = of_runner(target, verify_tokens)
    commit, totals = PartTimes(prepare_commit), target.capture_num_tokens
    most = min(commits.largest, *(max(drafter.capture_bs) for drafter in drafters.values()))
    with torch.inference_mode():
        # The host's times first, which every cell needs.
        for part, size in (*((draft, 1) for draft in drafts.values()), (verify, totals[0]), (commit, totals[0])):
            part(size)
        context = context_slopes(drafters, target, min(most, totals[-1]))
        draft_host = max(draft.host for draft in drafts.values())
        return measure_costs(
            drafts,
            lambda total: verify(total) + commit(total),
            request_grid(most),
            totals,
            identity,
            max_budget=max_budget,
            host_drafted=HOST_SHARE * (draft_host + verify.host + commit.host),
            host_plain=HOST_SHARE * (verify.host + commit.host),
            context=context,
            context_base=float(target.seq_len_fill_value),
        )


def measure_uniform(
    *, drafters: Mapping[int, Any], targets: Mapping[int, Any], identity: Mapping[str, Any]
) -> CostTable:
    """Time the parts of uniform rounds.

    What follows the choices is launched kernel by kernel there, and not timed: serving tells.

    Args:
        drafters: as in `measure`.
        targets: the target's graph runners by nodes per request, the root alone among them.
        identity: as in `ddtree_measure.measure_costs`.
    """
    verify = {nodes: of_runner(runner, partial(_uniform_tokens, runner)) for nodes, runner in targets.items()}
    drafts = {width: of_runner(drafter, partial(_uniform_tokens, drafter)) for width, drafter in drafters.items()}
    most = min(max(runner.capture_bs) for runner in (*targets.values(), *drafters.values()))
    nodes_of = sorted(targets)

    def graph_of(requests: int, nodes: int) -> tuple[Any, int]:
        width = nodes_of[min(bisect_left(nodes_of, nodes), len(nodes_of) - 1)]
        return targets[width], requests * width

    with torch.inference_mode():
        for part in (*drafts.values(), *verify.values()):
            part(1)
        context = context_slopes(drafters, targets[nodes_of[-1]], most, graph_of)
        draft_host = max(draft.host for draft in drafts.values())
        verify_host = max(part.host for part in verify.values())
        return measure_uniform_costs(
            drafts,
            verify,
            request_grid(most),
            identity,
            host_drafted=HOST_SHARE * (draft_host + verify_host),
            host_plain=HOST_SHARE * verify_host,
            context=context,
            context_base=float(targets[nodes_of[-1]].seq_len_fill_value),
        )
