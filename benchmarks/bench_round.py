"""Milliseconds per round: no speculation, DFLASH and DDTREE on a model's shape with random weights.

    python benchmarks/bench_round.py --out results/bench_round
    python benchmarks/bench_round.py --shape qwen3.6-27b --only dflash-16 ddtree-15 ddtree-31 --requests 1 8 \\
        --out results/bench_round_27b

Needs a GPU; `--smoke` runs the same code with a tiny model anywhere. Writes OUT.csv, OUT.md and OUT.png, and keeps
every server's numbers in servers/ beside them: an interrupted run goes on where it stopped.

A round is everything between two commits: draft, tree, verify, walk, commit and the scheduler's work. Acceptance is
forced, because random weights accept hardly a draft: to the recorded rates by default, so that a round commits, and
moves, as many tokens as a real one (`--accept-length 1` for one token per round). How the time is taken:
serving_bench/decode.py. `--shape` chooses the target: Qwen3-8B, or Qwen3.6-27B with its recurrent layers. `--context
1024 8192 32768` measures long prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from serving_bench import decode, report, servers
from serving_bench.report import Rows, Verdict

REQUESTS = [1, 2, 4, 8, 16, 32]
TARGET_REQUESTS = (1, 8, 32)
# A tree of 15 nodes verifies as many tokens as DFLASH's block of 16.
TREE, CHAIN, LIMIT = "ddtree-15", "dflash-16", 1.03
# The chain served by DDTREE, with trees only counted beside it.
SHADOW, SHADOW_LIMIT = "shadow-15", 1.02


def targets(rows: Rows) -> list[Verdict]:
    """A tree's and a shadow-linear round against a chain's of the same verify width, at the shortest context."""
    context = min((row["context"] for row in rows), default=0)
    found = []
    for n in TARGET_REQUESTS:
        for mode, limit in ((TREE, LIMIT), (SHADOW, SHADOW_LIMIT)):
            got = report.ratio(rows, "ms_per_round", mode, CHAIN, context=context, requests=n)
            if got is not None:
                found.append(Verdict(f"{n} requests, round of {mode} / {CHAIN}", got, limit, at_most=True))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    decode.add_arguments(parser, "bench_round", REQUESTS)
    parser.add_argument(
        "--accept-length",
        type=decode.accept_length_argument,
        default=decode.RECORDED,
        help="tokens a round commits: a number, or recorded (default) for each mode's recorded rate",
    )
    args = parser.parse_args(argv)
    decode.settle_arguments(args)
    modes = servers.select_modes(["plain", CHAIN, SHADOW, *(f"ddtree-{b}" for b in args.budgets)], args.only)
    rows, settings, complete = decode.run(args, modes, args.accept_length)
    contexts = len(args.context) > 1
    table = decode.pivot(rows, lambda r: f"{r['ms_per_round']:.2f} ({r['p20_ms']:.2f}-{r['p80_ms']:.2f})", contexts)
    rates = decode.pivot(rows, lambda r: f"{r['committed_per_round']:.2f}", contexts)
    return decode.write_report(
        args,
        rows,
        settings,
        complete,
        title="Milliseconds per round",
        notes=[
            "Median of blocks of rounds (20th-80th percentile), every request decoding; simulated acceptance, "
            f"prompts of {', '.join(map(str, args.context))} tokens.",
        ],
        tables=[table, "Committed tokens per round, forced:\n\n" + rates],
        verdicts=targets(rows),
        y_name="ms per round",
        y_key="ms_per_round",
    )


if __name__ == "__main__":
    sys.exit(main())
