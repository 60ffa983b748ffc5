"""A load of a constant number of requests, every slot refilled at once; and one that jumps.

What is counted lies between two moments at which all slots are full, so neither the start nor the end of the load is in
it. A server has settled by then, and both moments are the sending of certain requests: every mode is measured over the
same texts, not over the same time, as far as its slowness allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import aiohttp

from serving_bench import load
from serving_bench.load import Stream

# How often a slot that must not send looks again, and how long an abort may take before it is repeated.
_PAUSE_S, _REPEAT_S = 0.005, 0.25


@dataclass
class Ask:
    """One request."""

    key: int
    """Which text it stands for."""
    ids: list[int]
    tokens: int
    """To generate, whatever they are."""
    whole: bool = True
    """False: cut short."""


@dataclass
class Answer:
    ask: Ask
    stream: Stream
    slot: int

    @property
    def finished(self) -> bool:
        """It came to its own end."""
        return bool(self.stream.meta.get("finish_reason")) and not self.stream.aborted


@dataclass
class Steady:
    """A constant load. Times are ``time.perf_counter()`` in seconds."""

    begin: float
    end: float
    counted: int
    """Requests sent between the two."""
    complete: bool
    """As many as were asked for: the time limit did not cut them."""
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        tokens = sum(a.stream.tokens_until(self.end) - a.stream.tokens_until(self.begin) for a in self.answers)
        return tokens / (self.end - self.begin)

    @property
    def ended(self) -> list[Answer]:
        """Whole answers that came to their end while it was counted."""
        return [a for a in self.answers if a.ask.whole and a.finished and self.begin <= a.stream.times[-1] <= self.end]


class _Slots:
    """Requests under way, by slot."""

    def __init__(self, session: aiohttp.ClientSession, url: str, interval: int | None, name: str):
        self.session, self.url, self.interval, self.name = session, url, interval, name
        self.answers: list[Answer] = []
        self.running: dict[int, str] = {}
        self._all_begun = False
        self.cut: set[str] = set()

    async def send(self, slot: int, ask: Ask) -> None:
        stream = Stream(sent=time.perf_counter())
        # Of equal length: SGLang aborts every request whose name begins as asked.
        rid = f"{self.name}-{len(self.answers):06d}"
        self.answers.append(Answer(ask, stream, slot))
        self.running[slot] = rid
        sampling = {"max_new_tokens": ask.tokens, "ignore_eos": True}
        try:
            await load.generate(
                self.session,
                self.url,
                ask.ids,
                sampling,
                interval=self.interval,
                rid=rid,
                stream=stream,
                may_abort=True,
            )
        except load.RequestFailed:
            # Aborted so early that there is no answer.
            if rid not in self.cut:
                raise
        finally:
            del self.running[slot]

    def all_begun(self, slots: int) -> bool:
        """Each slot has had a first token."""
        if not self._all_begun:
            self._all_begun = len({answer.slot for answer in self.answers if answer.stream.times}) >= slots
        return self._all_begun

    async def _abort(self, **which: object) -> None:
        async with self.session.post(self.url + "/abort_request", json=which):
            pass

    async def abort(self, slots: Sequence[int]) -> None:
        rids = [self.running[slot] for slot in slots if slot in self.running]
        self.cut |= set(rids)
        await asyncio.gather(*(self._abort(rid=rid) for rid in rids))

    async def drain(self) -> None:
        """Abort whatever runs, until nothing does."""
        while self.running:
            self.cut |= set(self.running.values())
            await self._abort(abort_all=True)
            deadline = time.perf_counter() + _REPEAT_S
            while self.running and time.perf_counter() < deadline:
                await asyncio.sleep(_PAUSE_S)


def constant(
    url: str,
    asks: Iterator[Ask],
    slots: int,
    *,
    settle: int,
    count: int,
    settle_s: float,
    limit_s: float,
    name: str = "steady",
) -> Steady:
    """Keep ``slots`` requests running, then abort what is left.

    Args:
        asks: never ends; the first ``slots`` of them start together, and should be cut to different lengths.
        settle: requests beyond the first ``slots`` to send before counting begins, or
        settle_s: seconds, whichever comes first; in any case every slot has had a first token.
        count: requests to send while it is counted, or
        limit_s: seconds, whichever comes first.
        name: of the requests; no other load of the server has it.
    """

    async def run() -> Steady:
        async with load.open_session() as session:
            state = _Slots(session, url, None, name)
            start = time.perf_counter()
            begin: float | None = None
            end: float | None = None
            at_begin = 0

            def sent() -> int:
                return len(state.answers) - slots

            def look(now: float) -> None:
                """Begin or end the window if it is time."""
                nonlocal begin, end, at_begin
                if begin is None:
                    if (sent() >= settle or now >= start + settle_s) and state.all_begun(slots):
                        begin, at_begin = now, sent()
                elif end is None and (sent() >= at_begin + count or now >= begin + limit_s):
                    end = now

            async def slot(index: int) -> None:
                while end is None:
                    await state.send(index, next(asks))
                    look(time.perf_counter())

            async def clock() -> None:
                while end is None:
                    await asyncio.sleep(_PAUSE_S)
                    look(time.perf_counter())
                await state.drain()

            jobs = [asyncio.create_task(job) for job in (clock(), *(slot(i) for i in range(slots)))]
            try:
                await asyncio.gather(*jobs)
            finally:
                for job in jobs:
                    job.cancel()
            assert begin is not None and end is not None, "the clock has ended"
            # What was sent at the very end is not counted.
            counted = sum(begin < a.stream.sent <= end for a in state.answers)
            return Steady(begin, end, counted, sent() >= at_begin + count, state.answers)

    return asyncio.run(run())


@dataclass
class Jump:
    """A load that jumps. Times are seconds from its start."""

    times: list[float]
    """Where an interval begins."""
    requests: list[int]
    """Slots of the interval."""
    tokens_per_s: list[float]
    answers: list[Answer]


def jumping(
    url: str,
    asks: Callable[[], Ask],
    phases: Sequence[tuple[int, float]],
    *,
    step_s: float = 0.5,
    interval: int = 8,
    name: str = "jump",
) -> Jump:
    """Run phases of (slots, seconds) one after another; requests of slots that a phase lacks are aborted.

    Args:
        asks: gives the next request.
        step_s: length of an interval whose tokens are counted.
        interval: tokens between chunks, so that a request's tokens have a time.
        name: as for `constant`.
    """

    async def run() -> Jump:
        async with load.open_session() as session:
            state = _Slots(session, url, interval, name)
            most = max(slots for slots, _ in phases)
            now_open = 0
            ended = False

            async def slot(index: int) -> None:
                while not ended:
                    if index < now_open:
                        await state.send(index, asks())
                    else:
                        await asyncio.sleep(_PAUSE_S)

            jobs = [asyncio.create_task(slot(i)) for i in range(most)]
            start = time.perf_counter()
            changes: list[tuple[float, int]] = []
            until = start
            for slots, seconds in phases:
                now_open = slots
                changes.append((time.perf_counter() - start, slots))
                await state.abort(range(slots, most))
                until += seconds
                await asyncio.sleep(until - time.perf_counter())
                for job in jobs:
                    if job.done():
                        job.result()
            ended = True
            stop = time.perf_counter() - start
            await state.drain()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*jobs)
            times = [i * step_s for i in range(int(stop / step_s))]
            requests = [max((at, n) for at, n in changes if at < t + step_s / 2)[1] for t in times]
            totals = [sum(a.stream.tokens_until(start + t) for a in state.answers) for t in [*times, stop]]
            ends = [*times[1:], stop]
            speeds = [
                (after - before) / (end - begin)
                for before, after, begin, end in zip(totals, totals[1:], times, ends, strict=False)
            ]
            return Jump(times, requests, speeds, state.answers)

    return asyncio.run(run())
