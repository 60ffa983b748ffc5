"""What a round takes here: replays of the captured graphs, timed at start, before any request.

The parts are timed apart, on the device by replaying nothing but the graph, and on the host by what it takes to launch
it: a round lasts as long as the longer of the two. Contexts are as short as SGLang's capture makes them; what longer
ones add is left to the correction while serving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative.ddtree_auto import measure_costs, request_grid
from sglang.srt.speculative.ddtree_cost import CostTable

_REPEATS = 5
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

        def launch() -> None:
            # As if it had not been loaded yet.
            runner.execute(batch)

        def replay() -> None:
            runner.backend.replay(runner._replay_graph_key, batch)

        return launch, replay

    return PartTimes(prepare)


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
        max_budget, identity: as in `ddtree_auto.measure_costs`.
    """

    def draft_tokens(drafter: Any, requests: int) -> tuple[int, int]:
        size = min(size for size in drafter.capture_bs if size >= requests)
        return size, size * drafter.captured_req_width

    def verify_tokens(total: int) -> tuple[int, int]:
        return target._ragged_capture_slots(total), total

    def prepare_commit(total: int) -> tuple[Callable[[], None], Callable[[], None]]:
        def launch() -> None:
            commits.replay(1, total)

        return launch, launch

    drafts = {width: of_runner(drafter, partial(draft_tokens, drafter)) for width, drafter in drafters.items()}
    verify = of_runner(target, verify_tokens)
    commit, totals = PartTimes(prepare_commit), target.capture_num_tokens
    most = min(commits.largest, *(max(drafter.capture_bs) for drafter in drafters.values()))
    with torch.inference_mode():
        # The host's times first, which every cell needs.
        for part, size in (*((draft, 1) for draft in drafts.values()), (verify, totals[0]), (commit, totals[0])):
            part(size)
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
        )
