"""An offline model, not a measurement: tokens per second of plain, DFLASH, fixed budgets and auto on recorded drafts.

    python benchmarks/auto_offline.py --data tests/data/recorded-drafts-sample.npz

Rounds of R concurrent recorded requests are replayed: which drafts are accepted is exact for greedy decoding, what a
round costs is looked up in a CSV of milliseconds measured with other weights (benchmarks/data; interpolated between
the measured widths and numbers of requests). The policy is the one that serves: it knows what drafts are worth from
earlier rounds alone, and one total of verify tokens goes to the likeliest nodes over all requests. What the model
leaves out: what a ragged verify costs beside its tokens, prefills, contexts longer than the CSV's, noise in times.

A finished request is replaced at once, so every round is full. Needs numpy and torch, no SGLang and no GPU.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from by_path import load  # noqa: E402

recorded_drafts = load("recorded_drafts", "benchmarks/recorded_drafts.py")
ddtree_utils = recorded_drafts.ddtree_utils
gain = load("ddtree_gain", "python/sglang/srt/speculative/ddtree_gain.py")
cost = load("ddtree_cost", "python/sglang/srt/speculative/ddtree_cost.py")
calibration = load("ddtree_calibration", "python/sglang/srt/speculative/ddtree_calibration.py")
policy = load("ddtree_policy", "python/sglang/srt/speculative/ddtree_policy.py")

TIMES = ROOT / "benchmarks/data/h200-8b-round-ms.csv"
LOADS = (1, 2, 4, 8, 16, 32)
BUDGETS = (7, 15, 31, 63)
CHAINS = (8, 16)
MAX_NODES, TOPK_CAP = 63, 8
# Tokens per request and their sums over requests that have a graph: about a quarter apart.
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
BUCKETS = tuple(sorted({width << shift for width in WIDTHS for shift in range(6)}))
# Rounds until the host sees a round's scores.
DELAY = 2
_NEVER = np.iinfo(np.int64).max
_CHUNK = 256


@dataclass(frozen=True)
class Replay:
    """What every recorded row would draft and accept.

    Attributes:
        probabilities: float32 [rows, MAX_NODES], exp(score) of the tree's nodes in selection order.
        path: int64 [rows, D-1], the index of the accepted path's node at depth 1, 2, ... in that order (the root is
            0), a huge number where the path has ended. A tree cut to its first n nodes accepts those that are <= n.
        chains: block size to accepted drafts of a chain, int64 [rows].
        first: int64 [prompts], a prompt's first row.
        rows: int64 [prompts], rows per prompt.
    """

    probabilities: np.ndarray
    path: np.ndarray
    chains: dict[int, np.ndarray]
    first: np.ndarray
    rows: np.ndarray


def prepare(recorded: Any) -> Replay:
    """Build and walk the largest tree of every row; smaller budgets are its beginnings."""
    roots, targets = (torch.from_numpy(x) for x in recorded_drafts._targets(recorded))
    depth = recorded.top_ids.shape[1]
    probabilities, paths = [], []
    for begin in range(0, len(roots), _CHUNK):
        rows = slice(begin, begin + _CHUNK)
        ids = torch.from_numpy(recorded.top_ids[rows, :, :TOPK_CAP].astype(np.int64))
        logprobs = torch.from_numpy(recorded.top_lp[rows, :, :TOPK_CAP].astype(np.float32))
        tree = ddtree_utils.build_trees(roots[rows], ids, logprobs, MAX_NODES)
        walk = ddtree_utils.walk_trees(tree.tokens, tree.parents, targets[rows].gather(1, tree.depths), depth)
        probabilities.append(tree.scores[:, 1:].exp().numpy())
        paths.append(walk.accept_index[:, 1:].numpy())
    path = np.concatenate(paths)
    return Replay(
        probabilities=np.concatenate(probabilities),
        path=np.where(path >= 0, path, _NEVER),
        chains={width: recorded_drafts.accepted_per_row(recorded, width - 1, 1) for width in CHAINS},
        first=np.cumsum(recorded.rows) - recorded.rows,
        rows=recorded.rows,
    )


def load_times(path: str | Path = TIMES) -> dict[str, Any]:
    """Cost tables of a CSV with the columns mode, draft, width, requests, ms: per mode ("ddtree", "dflash"), the plain
    rounds in both."""
    plain: dict[int, float] = {}
    drafted: dict[str, dict[int, dict[tuple[int, int], float]]] = defaultdict(lambda: defaultdict(dict))
    with open(path) as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            requests, seconds = int(row["requests"]), float(row["ms"]) / 1e3
            if row["mode"] == "plain":
                plain[requests] = seconds
            else:
                drafted[row["mode"]][int(row["draft"])][requests, requests * int(row["width"])] = seconds
    return {mode: cost.CostTable({}, plain, cells) for mode, cells in drafted.items()}


class _Batch:
    """R requests under way; prompts come in a seeded order that is the same for every mode."""

    def __init__(self, replay: Replay, requests: int, seed: int) -> None:
        self._replay, self._prompts = replay, self._order(replay, seed)
        self._end = np.zeros(requests, np.int64)
        self.row = np.zeros(requests, np.int64)
        for slot in range(requests):
            self._start(slot)

    @staticmethod
    def _order(replay: Replay, seed: int) -> Iterator[int]:
        rng = np.random.default_rng(seed)
        while True:
            yield from rng.permutation(np.flatnonzero(replay.rows > 0)).tolist()

    def _start(self, slot: int) -> None:
        prompt = next(self._prompts)
        self.row[slot] = self._replay.first[prompt]
        self._end[slot] = self.row[slot] + self._replay.rows[prompt]

    def commit(self, accepted: np.ndarray) -> int:
        """Go on by the accepted drafts, int64 [R], and a bonus token each: the committed tokens, ends cut off."""
        committed = np.minimum(accepted + 1, self._end - self.row)
        self.row += committed
        for slot in np.flatnonzero(self.row >= self._end):
            self._start(int(slot))
        return int(committed.sum())


def nodes_per_request(probabilities: np.ndarray, nodes: int) -> np.ndarray:
    """How many of its first nodes each request gets when the batch gets its ``nodes`` likeliest.

    Args:
        probabilities: float [R, B], non-increasing along a row.
        nodes: W over all requests.

    Returns:
        int64 [R]; sums to min(W, R * B). Equal probabilities: the earlier request first.
    """
    best = np.argsort(-probabilities, axis=None, kind="stable")[:nodes]
    return np.bincount(best // probabilities.shape[1], minlength=len(probabilities))


def simulate(
    replay: Replay,
    times: dict[str, Any],
    mode: str,
    requests: int,
    tokens: int,
    seed: int = 0,
) -> tuple[float, dict[str, float]]:
    """One mode at one load until ``tokens`` are committed.

    Args:
        mode: "plain", "dflash-D", "ddtree-B" or "auto".
        requests: running, R.

    Returns:
        Tokens per second in the model, and what is worth telling: "committed" tokens per round and request,
        "verified" tokens per round, "plain" share of rounds, "ratio" of accepted to expected drafts (1 if unknown).
    """
    batch = _Batch(replay, requests, seed)
    kind, _, number = mode.partition("-")
    auto = _auto(times) if kind == "auto" else None
    # Computed once: a fixed mode costs the same in every round.
    fixed = 0.0
    if kind == "plain":
        fixed = times["ddtree"].plain_seconds(requests)
    elif kind == "dflash":
        fixed = float(times["dflash"].seconds(int(number), requests, requests * int(number)))
    elif kind == "ddtree":
        fixed = float(times["ddtree"].seconds(16, requests, requests * (int(number) + 1)))
    late: deque[tuple[np.ndarray, float, float] | None] = deque()
    done = rounds = verified = plain = 0
    seconds = expected_sum = accepted_sum = 0.0
    while done < tokens:
        rows = batch.row
        width = requests
        if kind == "plain":
            accepted = np.zeros(requests, np.int64)
        elif kind == "dflash":
            accepted = replay.chains[int(number)][rows]
            width *= int(number)
        elif kind == "ddtree":
            accepted = (replay.path[rows] <= int(number)).sum(1)
            width *= int(number) + 1
        else:
            assert auto is not None
            choice = auto.next_round(requests)
            width, fixed = choice.tokens, choice.seconds
            if choice.draft_width == 0:
                accepted = np.zeros(requests, np.int64)
                plain += 1
                late.append(None)
            else:
                probabilities = replay.probabilities[rows]
                each = nodes_per_request(probabilities, choice.nodes)
                accepted = (replay.path[rows] <= each[:, None]).sum(1)
                expected = float(probabilities[np.arange(MAX_NODES) < each[:, None]].sum(dtype=np.float64))
                late.append((gain.gain_vector(probabilities, auto.gain.points), expected, float(accepted.sum())))
                expected_sum, accepted_sum = expected_sum + expected, accepted_sum + float(accepted.sum())
            told = late.popleft() if len(late) > DELAY else None
            if told is not None:
                vector, expected, observed = told
                auto.gain.observe(requests, {16: vector})
                auto.calibration.observe("greedy", expected, observed)
        done += batch.commit(accepted)
        rounds, verified, seconds = rounds + 1, verified + width, seconds + fixed
    return done / seconds, {
        "committed": done / rounds / requests,
        "verified": verified / rounds,
        "plain": plain / rounds,
        "ratio": accepted_sum / expected_sum if expected_sum else 1.0,
    }


def _auto(times: dict[str, Any]) -> Any:
    curve = gain.GainCurve(MAX_NODES, (16,))
    return policy.Policy(curve, times["ddtree"], calibration.Calibration(), BUCKETS, draft_widths=(16,))


def modes() -> list[str]:
    """The modes in the order of the table."""
    return ["plain", *(f"dflash-{width}" for width in CHAINS), *(f"ddtree-{budget}" for budget in BUDGETS), "auto"]


def simulate_all(
    replay: Replay, times: dict[str, Any], loads: Sequence[int] = LOADS, tokens: int = 40_000, seed: int = 0
) -> dict[str, dict[int, tuple[float, dict[str, float]]]]:
    """`simulate` of every mode at every load."""
    return {mode: {load: simulate(replay, times, mode, load, tokens, seed) for load in loads} for mode in modes()}


def markdown_table(results: dict[str, dict[int, tuple[float, dict[str, float]]]]) -> str:
    """Tokens per second of the model by load; auto against the best fixed budget and the best other mode below."""
    loads = list(next(iter(results.values())))
    heads = ["1 request" if n == 1 else f"{n} requests" for n in loads]
    lines = [
        f"| tokens/s (offline model, not measured) | {' | '.join(heads)} |",
        f"|---|{'---|' * len(loads)}",
    ]
    for mode, row in results.items():
        lines.append(f"| {mode} | {' | '.join(f'{row[n][0]:,.0f}' for n in loads)} |")
    best = {
        "best fixed budget": [mode for mode in results if mode.startswith("ddtree")],
        "best of plain and DFLASH": [mode for mode in results if not mode.startswith(("ddtree", "auto"))],
    }
    auto = results["auto"]
    for name, others in best.items():
        ratios = [f"{auto[n][0] / max(results[mode][n][0] for mode in others):.3f}" for n in loads]
        lines.append(f"| auto / {name} | {' | '.join(ratios)} |")
    told = {
        "verify tokens per request": lambda n: f"{auto[n][1]['verified'] / n:.1f}",
        "committed per round and request": lambda n: f"{auto[n][1]['committed']:.2f}",
        "share of plain rounds": lambda n: f"{auto[n][1]['plain']:.3f}",
        "accepted / expected drafts": lambda n: f"{auto[n][1]['ratio']:.3f}",
    }
    for name, cell in told.items():
        lines.append(f"| auto: {name} | {' | '.join(cell(n) for n in loads)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with top16.npz and meta.npz, or a sample's npz")
    parser.add_argument("--times", type=Path, default=TIMES, help="CSV of measured milliseconds per round")
    parser.add_argument("--requests", type=int, nargs="+", default=list(LOADS))
    parser.add_argument("--tokens", type=int, default=40_000, help="committed tokens per mode and load")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts' order")
    args = parser.parse_args(argv)
    replay = prepare(recorded_drafts.load(args.data))
    print("An offline model: recorded acceptance, looked-up round times. Not a measurement.\n")
    print(markdown_table(simulate_all(replay, load_times(args.times), args.requests, args.tokens, args.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
