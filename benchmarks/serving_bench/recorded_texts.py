"""Recorded texts as requests to a replay server: ids within its vocabulary, the file it reads, what it must do."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import numpy as np
import recorded_drafts
from recorded_drafts import Recorded

from serving_bench import servers

# A text's number, and a request's, are two prompt tokens of this base each; every vocabulary has them.
BASE = 256


def map_ids(ids: np.ndarray, safe: int) -> np.ndarray:
    """Token ids modulo ``safe``."""
    return (ids.astype(np.int64) % safe).astype(ids.dtype)


def map_candidates(ids: np.ndarray, safe: int) -> np.ndarray:
    """Candidates [..., K] modulo ``safe``; one that meets a better one of its position takes the next free id."""
    assert ids.shape[-1] <= safe, f"{ids.shape[-1]} candidates in {safe} ids"
    found = map_ids(ids, safe)
    for k in range(1, ids.shape[-1]):
        while (taken := (found[..., :k] == found[..., k : k + 1]).any(-1)).any():
            found[..., k] = np.where(taken, map_ids(found[..., k] + 1, safe), found[..., k])
    return found


class Texts:
    """A recording as a server of ``vocabulary`` tokens replays it.

    Ids that the vocabulary holds stay as they are. Drafts and texts that were mapped accept each other differently
    than before, so whatever is expected of the server is computed from this recording.

    Args:
        recorded: as `recorded_drafts.load` gives it.
        vocabulary: of the server's target.
        depth: block positions to keep, the first ones.
    """

    def __init__(self, recorded: Recorded, vocabulary: int, depth: int = 15):
        # Free above: special tokens, and the filler that no candidate is.
        self.filler = vocabulary - 64
        assert self.filler >= BASE, f"a vocabulary of {vocabulary} tokens is too small for prompts of base {BASE}"
        assert len(recorded.lens) <= BASE**2, f"{len(recorded.lens)} texts have no number of two digits"
        self.recorded = dataclasses.replace(
            recorded,
            ids=map_ids(recorded.ids, self.filler),
            top_ids=map_candidates(recorded.top_ids[:, :depth], self.filler),
            top_lp=recorded.top_lp[:, :depth],
        )
        ends = np.cumsum(recorded.lens, dtype=np.int64)
        self.answers: list[list[int]] = [
            self.recorded.ids[end - rows - 1 : end].tolist() for end, rows in zip(ends, self.recorded.rows, strict=True)
        ]
        self.longest = max(map(len, self.answers))
        self._rounds: dict[tuple[str, int], list[int]] = {}

    def save(self, path: Path) -> None:
        """Write what `benchmarks/replay/ddtree_replay.py` reads."""
        text = np.full((len(self.answers), self.longest + 1), self.filler, dtype=np.int32)
        for row, answer in zip(text, self.answers, strict=True):
            row[: len(answer)] = answer
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        lens = np.array([len(answer) for answer in self.answers])
        np.savez(part, ids=self.recorded.top_ids, lp=self.recorded.top_lp, text=text, lens=lens, base=BASE)
        part.replace(path)

    def prompt(self, text: int, serial: int, length: int) -> list[int]:
        """A prompt of ``length`` tokens for that text, of which no two requests share more than the first two."""
        draw = random.Random(serial)
        head = [*divmod(text, BASE), *divmod(serial % BASE**2, BASE)]
        return head + [draw.randrange(BASE) for _ in range(length - len(head))]

    @functools.cached_property
    def order(self) -> list[int]:
        """All texts, the sets in turn, so that every stretch is balanced; within a set shuffled."""
        draw = random.Random(0)
        queues = [np.flatnonzero(self.recorded.sets == g).tolist() for g in range(len(self.recorded.names))]
        for queue in queues:
            draw.shuffle(queue)
        return [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]

    def rounds(self, mode: str, topk_cap: int) -> list[int] | None:
        """Rounds that every text must take, to its end; None where that is not known beforehand."""
        kind, number = servers.kind_of(mode)
        if kind == servers.PLAIN:
            return self.recorded.rows.tolist()
        if kind == servers.AUTO:
            return None
        if (mode, topk_cap) not in self._rounds:
            depth = self.recorded.top_ids.shape[1]
            chain = {"dflash": number - 1, "shadow": depth}.get(kind)
            accepted = recorded_drafts.accepted_per_row(
                self.recorded, number if chain is None else chain, topk_cap if chain is None else 1
            )
            self._rounds[mode, topk_cap] = recorded_drafts.rounds_per_prompt(self.recorded, accepted).tolist()
        return self._rounds[mode, topk_cap]
