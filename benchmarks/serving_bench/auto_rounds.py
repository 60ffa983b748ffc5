"""What a server with the budget auto decided while something was measured, from its Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from serving_bench.servers import AUTO, BenchServer

_PREFIX = "sglang:ddtree_auto_"


def sums(metrics: str) -> dict[str, float]:
    """The metrics of the budget auto in Prometheus' text, added up over labels; names without their prefix."""
    found: dict[str, float] = {}
    for line in metrics.splitlines():
        if line.startswith(_PREFIX) and "_bucket{" not in line:
            name = line[len(_PREFIX) :].partition("{")[0].partition(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Rounds of the batch from one reading to the other, and what they were on average; empty if there was none."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    rounds = grown.get("verify_tokens_count", 0.0)
    if not rounds:
        return {}
    committed = grown["committed_tokens_total"]
    return {
        "rounds": rounds,
        "verify_tokens": grown["verify_tokens_sum"] / rounds,
        "committed": committed / rounds,
        **{name: grown[f"{name}_rounds_total"] / rounds for name in ("plain", "narrow", "probe")},
        **{f"committed_per_{name}": committed / grown[f"{name}_tokens_total"] for name in ("forecast", "expected")},
    }


def in_words(decided: Mapping[str, float]) -> str:
    return (
        f"{decided['rounds']:.0f} rounds of {decided['verify_tokens']:.0f} tokens, {decided['plain']:.0%} plain, "
        f"{decided['narrow']:.0%} half a block, {decided['probe']:.1%} probes; committed {decided['committed']:.0f} a "
        f"round, {decided['committed_per_forecast']:.2f} of the forecast, "
        f"{decided['committed_per_expected']:.2f} of the drafter's word"
    )


@contextmanager
def watched(server: BenchServer, mode: str) -> Iterator[dict[str, Any]]:
    """A dictionary that holds what was decided meanwhile, under names with "auto_", once the block has ended.

    Only of a server with the budget auto; its metrics must be on. Nothing is asked of it while the block runs.
    """
    result: dict[str, Any] = {}
    before = sums(server.text("/metrics")) if mode == AUTO else {}
    yield result
    if mode == AUTO:
        decided = between(before, sums(server.text("/metrics")))
        if decided:
            result.update({f"auto_{name}": value for name, value in decided.items()})
            print(f"  decided: {in_words(decided)}", flush=True)
