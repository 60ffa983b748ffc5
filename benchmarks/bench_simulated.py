"""SIMULATED tokens per second on an 8B shape: random weights, acceptance forced to recorded rates.

    python benchmarks/bench_simulated.py --out results/bench_simulated

Needs a GPU; `--smoke` runs the same code with a tiny model anywhere. Writes OUT.csv, OUT.md and OUT.png, and keeps
every server's numbers in servers/ beside them, which bench_round.py uses too and the other way round: after it, in the
same folder, only DFLASH at width 8 is left to start.

What is real: the time of every round, in SGLang's normal mode, of models of Qwen3-8B's size. What is simulated: how
many tokens a round commits, forced to the rates that a trained drafter reached on a small model (serving_bench/
decode.py has the table and its source). The rate of an 8B model's own drafter will differ, and with it all numbers
here; DFLASH is measured with SGLang's defaults, overlap scheduling and CUDA graphs on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from serving_bench import decode, servers
from serving_bench.report import Rows, Verdict

REQUESTS = [1, 8, 32]
CHAINS = ("dflash-8", "dflash-16")
# The best tree over the better chain, by number of requests.
TARGETS = {1: 1.30, 8: 1.15, 32: 1.05}


def targets(rows: Rows) -> list[Verdict]:
    """The best DDTREE budget against the better DFLASH width, at the shortest context."""
    context = min((row["context"] for row in rows), default=0)
    found = []
    for n, limit in TARGETS.items():
        speed = {
            row["mode"]: row["tokens_per_s"]
            for row in rows
            if (row["context"], row["requests"]) == (context, n) and "tokens_per_s" in row
        }
        trees = [mode for mode in speed if mode.startswith("ddtree")]
        chains = [mode for mode in speed if mode in CHAINS]
        if not trees or not chains:
            continue
        tree, chain = max(trees, key=speed.__getitem__), max(chains, key=speed.__getitem__)
        note = "" if len(chains) == len(CHAINS) else f"without {', '.join(set(CHAINS) - set(chains))}"
        found.append(
            Verdict(f"{n} requests, simulated, {tree} / {chain}", speed[tree] / speed[chain], limit, note=note)
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    decode.add_arguments(parser, "bench_simulated", REQUESTS)
    args = parser.parse_args(argv)
    decode.settle_arguments(args)
    modes = servers.select_modes(["plain", *CHAINS, *(f"ddtree-{b}" for b in args.budgets)], args.only)
    rows, settings, complete = decode.run(args, modes, decode.RECORDED)
    contexts = len(args.context) > 1
    speed = decode.pivot(rows, lambda r: f"{r['tokens_per_s']:.0f}", contexts)
    rates = decode.pivot(rows, lambda r: f"{r['forced_rate']:.2f} ({r['committed_per_round']:.2f})", contexts)
    times = decode.pivot(rows, lambda r: f"{r['mean_ms']:.2f}", contexts)
    return decode.write_report(
        args,
        rows,
        settings,
        complete,
        title="Simulated tokens per second",
        notes=[
            "SIMULATED acceptance at recorded rates, real round times. Output tokens per second of all requests "
            "together while all of them are decoding = requests x rate / mean time of a round; prompts of "
            f"{', '.join(map(str, args.context))} tokens.",
        ],
        tables=[
            "Simulated tokens per second:\n\n" + speed,
            "Committed tokens per round, forced (measured):\n\n" + rates,
            "Mean ms per round:\n\n" + times,
        ],
        verdicts=targets(rows),
        y_name="simulated tokens/s, all requests",
        y_key="tokens_per_s",
    )


if __name__ == "__main__":
    sys.exit(main())
