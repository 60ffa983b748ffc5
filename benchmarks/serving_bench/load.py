"""Timed requests to ``/generate``, seen from the client: streamed, many at a time.

A request streams its first token and its end; in between nothing, or every round where that is asked for
(``every_round``). So a first token has its time and yet the server's HTTP side stays out of the numbers: a small model
on a fast GPU makes more chunks per second than any HTTP front end serves, with and without speculation alike.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

REQUEST_TIMEOUT_S = 900
# A stream interval that no answer reaches: the first token and the end are sent at any interval.
_NEVER = 1_000_000


class RequestFailed(RuntimeError):
    """The server refused a request or broke it off; the message holds its answer."""


@dataclass
class Stream:
    """One answered request. Times are ``time.perf_counter()`` of this process, in seconds."""

    sent: float
    times: list[float] = field(default_factory=list)
    """When each chunk arrived; the first holds the first token, the last the end."""
    tokens: list[int] = field(default_factory=list)
    """Generated tokens so far, per chunk."""
    ids: list[int] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    """SGLang's meta_info of the last chunk."""

    def add(self, at: float, answer: dict[str, Any]) -> None:
        self.meta = answer["meta_info"]
        self.times.append(at)
        self.tokens.append(self.meta["completion_tokens"])
        self.ids = answer.get("output_ids") or self.ids

    @property
    def aborted(self) -> bool:
        return (self.meta.get("finish_reason") or {}).get("type") == "abort"

    def tokens_until(self, at: float) -> float:
        """Generated tokens at that time, evenly spread between chunks."""
        if not self.times or at < self.times[0]:
            return 0.0
        return float(np.interp(at, self.times, self.tokens))

    @property
    def num_rounds(self) -> int:
        """Decode rounds of the whole answer. Without speculation a round is a token; prefill brings the first one."""
        return self.meta.get("spec_verify_ct", self.tokens[-1] - 1)

    @property
    def rounds(self) -> list[float]:
        """Decode rounds so far, per chunk. SGLang counts them in the last chunk alone."""
        if len(self.times) - 1 == self.num_rounds:
            return [float(i) for i in range(len(self.times))]
        # Some chunk holds several rounds: by the answer's own mean of tokens per round.
        per_token = self.num_rounds / max(1, self.tokens[-1] - 1)
        return [(count - 1) * per_token for count in self.tokens]

    @property
    def ms_per_output_token(self) -> float | None:
        """Milliseconds per token after the first; None for a single token."""
        count = self.tokens[-1] - 1
        return 1000.0 * (self.times[-1] - self.times[0]) / count if count else None

    @property
    def ms_to_first_token(self) -> float:
        return 1000.0 * (self.times[0] - self.sent)


async def generate(
    session: aiohttp.ClientSession,
    url: str,
    ids: Sequence[int],
    sampling: dict[str, Any],
    *,
    interval: int | None = None,
    rid: str | None = None,
    stream: Stream | None = None,
    may_abort: bool = False,
) -> Stream:
    """One streamed request.

    Args:
        interval: tokens between chunks, beside the first one and the end; None: no chunk in between.
        rid: SGLang's name for the request, to abort it by.
        stream: filled while the request runs, and returned.
        may_abort: an aborted request is an answer too, of the tokens so far.
    Raises:
        RequestFailed: it was refused or broke off.
    """
    params = {"temperature": 0, **sampling, "stream_interval": interval or _NEVER}
    body = {"input_ids": list(ids), "sampling_params": params, "stream": True, **({"rid": rid} if rid else {})}
    stream = Stream(sent=time.perf_counter()) if stream is None else stream
    async with session.post(url + "/generate", json=body) as response:
        if response.status != 200:
            raise RequestFailed(f"HTTP {response.status}: {(await response.text())[:500]}")
        async for line in response.content:
            at = time.perf_counter()
            if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                continue
            answer = json.loads(line[5:])
            if "meta_info" not in answer:
                raise RequestFailed(str(answer)[:500])
            stream.add(at, answer)
    if not stream.times or stream.meta.get("finish_reason") is None:
        raise RequestFailed("the stream ended without an end")
    if stream.aborted and not may_abort:
        raise RequestFailed(f"aborted: {stream.meta['finish_reason']}")
    return stream


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0),
        # A chunk repeats all tokens so far and has to fit as one line.
        read_bufsize=1 << 20,
    )


def all_at_once(url: str, prompts: Sequence[Sequence[int]], sampling: dict[str, Any]) -> list[Stream]:
    """Send all prompts at the same moment; the first one streams every round."""

    async def run() -> list[Stream]:
        async with open_session() as session:
            jobs = [generate(session, url, ids, sampling, interval=None if i else 1) for i, ids in enumerate(prompts)]
            return await asyncio.gather(*jobs)

    return asyncio.run(run())


def closed_loop(
    url: str, prompts: Sequence[Sequence[int]], concurrency: int, sampling: dict[str, Any]
) -> tuple[list[Stream], float]:
    """Keep ``concurrency`` requests running until every prompt is answered.

    Returns:
        The answers in the prompts' order, and the seconds from the first request to the last answer.
    """
    answers: dict[int, Stream] = {}

    async def worker(session: aiohttp.ClientSession, queue: Iterator[tuple[int, Sequence[int]]]) -> None:
        for index, ids in queue:
            answers[index] = await generate(session, url, ids, sampling)

    async def run() -> float:
        async with open_session() as session:
            queue = iter(enumerate(prompts))
            start = time.perf_counter()
            await asyncio.gather(*(worker(session, queue) for _ in range(concurrency)))
            return time.perf_counter() - start

    seconds = asyncio.run(run())
    return [answers[i] for i in range(len(prompts))], seconds


@dataclass
class Window:
    """The part of a run in which every request is decoding."""

    seconds: float
    rounds: float
    tokens: int
    """Of one request."""
    ms_per_round: list[float]
    """One value per block of rounds."""


def full_batch_window(streams: Sequence[Stream], block: int) -> Window:
    """What the first request saw between the last first token and the first end.

    Args:
        streams: of one ``all_at_once``; the first has a chunk per round.
        block: rounds per value of ``ms_per_round``; averages over a block hide the jitter of HTTP.
    Raises:
        RequestFailed: the requests were never decoding together for as long as a block.
    """
    begin, end = max(s.times[0] for s in streams), min(s.times[-1] for s in streams)
    probe, counted = streams[0], streams[0].rounds
    inside = [i for i, at in enumerate(probe.times) if begin <= at <= end]
    samples, at = [], 0
    for i in range(1, len(inside)):
        first, last = inside[at], inside[i]
        rounds = counted[last] - counted[first]
        if rounds >= block:
            samples.append(1000.0 * (probe.times[last] - probe.times[first]) / rounds)
            at = i
    if not samples:
        raise RequestFailed(
            f"{len(streams)} requests were decoding together for less than {block} rounds; ask for more tokens."
        )
    first, last = inside[0], inside[-1]
    return Window(
        seconds=probe.times[last] - probe.times[first],
        rounds=counted[last] - counted[first],
        tokens=probe.tokens[last] - probe.tokens[first],
        ms_per_round=samples,
    )
