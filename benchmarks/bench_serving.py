"""Tokens per second and time per output token of a real pair: no speculation, DFLASH and DDTREE side by side.

    python scripts/smollm2.py && python benchmarks/bench_serving.py --out results/bench_serving

SmolLM2-135M-Instruct and its trained drafter over prompts of HumanEval, GSM8K and MT-bench (tests/data), greedy, until
the end of the answer or 256 tokens. Needs a GPU; `--smoke` runs the same code with a tiny pair anywhere. Writes
OUT.csv, OUT.md and OUT.png, and keeps every server's numbers in servers/ beside them: an interrupted run goes on where
it stopped.

The gate comes first: in float32 a mode must answer with the tokens of no speculation or it is not timed; in bfloat16,
where rounding depends on a batch's shape and an answer may leave the other's at a close call, nearly all answers must
begin alike. Then, per number of requests, a warm-up and `--repeats` passes over the prompts with that many running at
a time, each with an empty prefix cache. Times are the client's; requests stream their first token and their end.

SGLang's own `sglang.benchmark.serving` does not fit: its results hold no token ids to compare, no rounds per request
(the mean it shows runs since the server's start, warm-up included), and its data sets are texts, not the recorded ids.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from serving_bench import auto_rounds, load, report, servers
from serving_bench.report import Rows, Verdict
from serving_bench.servers import PLAIN, ROOT, BenchServer, Plan, Record

PROMPTS = ROOT / "tests" / "data" / "recorded-drafts-sample.npz"
GATE = "gate"
GATE_PROMPTS, GATE_TOKENS = 12, 64
# bfloat16 flips about 1 % of this target's greedy choices: 4 tokens agree in 19 prompts of 20. Garbage never does.
GATE_PREFIX, GATE_SHARE = 4, 0.75
CHAIN = "dflash-16"
# DDTREE's throughput over DFLASH's, by number of requests; and what is asked of a round's cost where the committed
# tokens per round do not allow that.
TARGETS = {1: 1.08, 8: 1.03, 32: 1.03}
ROUND_COST = 0.97

Prompt = tuple[str, list[int]]


class GateFailed(RuntimeError):
    """A mode's answers are not those of no speculation."""


def recorded_prompts(path: Path) -> list[Prompt]:
    """Name of the set and token ids of every prompt, the sets in turn, so that any beginning is balanced."""
    data = np.load(path)
    names = [str(name) for name in data["names"]]
    begin = np.concatenate([[0], np.cumsum(data["lens"])])
    queues: dict[str, list[list[int]]] = {name: [] for name in names}
    for i, group in enumerate(data["g"]):
        queues[names[group]].append(data["ids"][begin[i] : begin[i] + data["P"][i]].astype(int).tolist())
    longest = max(map(len, queues.values()))
    return [(name, queues[name][i]) for i in range(longest) for name in names if i < len(queues[name])]


def tiny_prompts(count: int) -> list[Prompt]:
    return [("random", list(b"prompt %d of a smoke run" % i)) for i in range(count)]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_gate(got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]], exact: bool) -> str:
    """How far a mode's answers are those of no speculation, in words.

    Raises:
        GateFailed: they differ more than the number format explains.
    """
    equal = sum(list(a) == list(b) for a, b in zip(got, expected, strict=True))
    begun = sum(common_prefix(a, b) >= min(GATE_PREFIX, len(a), len(b)) for a, b in zip(got, expected, strict=True))
    words = f"{equal} of {len(expected)} answers equal, {begun} begin alike ({GATE_PREFIX} tokens)"
    if exact and equal < len(expected):
        raise GateFailed(f"{words}; float32 allows no difference")
    if begun < GATE_SHARE * len(expected):
        raise GateFailed(f"{words}; fewer than {GATE_SHARE:.0%} is more than rounding explains")
    return words


def committed_per_round(streams: Sequence[load.Stream]) -> float:
    """Over all requests; the prefill's token is not counted."""
    rounds = sum(s.num_rounds for s in streams)
    drafts = sum(s.meta.get("spec_num_correct_drafts", 0) for s in streams)
    return (drafts + rounds) / rounds


def prompts_for(requests: int, prompts: Sequence[Prompt]) -> list[Prompt]:
    """A pass: all prompts, over and over until every slot has had four requests."""
    times = max(1, -(-4 * requests // len(prompts)))
    return list(prompts) * times


def measure(
    server: BenchServer,
    plan: Plan,
    point: str,
    record: Record,
    *,
    prompts: list[Prompt],
    args: argparse.Namespace,
    reference: Callable[[], Record],
) -> dict[str, Any]:
    """The gate's answers, or one number of requests."""
    ids = [prompt for _, prompt in prompts]
    if point == GATE:
        streams, _ = load.closed_loop(server.url, ids[:GATE_PROMPTS], 1, {"max_new_tokens": args.gate_tokens})
        answers = [stream.ids for stream in streams]
        words = "it is the reference"
        if plan.mode != PLAIN:
            expected = reference().points.get(GATE)
            if expected is None:
                raise GateFailed("no speculation has no answers to compare with; measure plain first")
            words = check_gate(answers, expected["answers"], args.dtype == "float32")
        print(f"{servers.label(plan.mode)}, gate: {words}", flush=True)
        return {"answers": answers, "words": words}

    requests = int(point)
    chosen = prompts_for(requests, prompts)
    passes = []
    warm = [ids[i % len(ids)] for i in range(2 * requests)]
    load.closed_loop(server.url, warm, requests, {"max_new_tokens": min(32, args.tokens)})
    with auto_rounds.watched(server, plan.mode) as decided:
        for _ in range(args.repeats):
            server.flush_cache()
            passes.append(
                load.closed_loop(server.url, [p for _, p in chosen], requests, {"max_new_tokens": args.tokens})
            )
    found = summarize(passes, [name for name, _ in chosen]) | decided
    found["answers"] = [stream.ids for stream in passes[0][0][: len(prompts)]]
    print(
        f"{servers.label(plan.mode)}, {requests} requests: {found['tokens_per_s']:.0f} tokens/s, "
        f"{found['ms_per_token']:.3f} ms per token, {found['committed_per_round']:.3f} tokens per round",
        flush=True,
    )
    return found


def summarize(passes: Sequence[tuple[list[load.Stream], float]], names: Sequence[str]) -> dict[str, Any]:
    """A point's numbers; ``names`` are the prompts' sets in a pass's order."""
    speeds = [sum(s.tokens[-1] for s in streams) / seconds for streams, seconds in passes]
    streams = [s for found, _ in passes for s in found]
    ms, low, high = report.spread([s.ms_per_output_token for s in streams if s.ms_per_output_token is not None])
    groups: dict[str, list[load.Stream]] = {}
    for found, _ in passes:
        for name, stream in zip(names, found, strict=True):
            groups.setdefault(name, []).append(stream)
    return {
        "tokens_per_s": statistics.median(speeds),
        "slowest_pass": min(speeds),
        "fastest_pass": max(speeds),
        "ms_per_token": ms,
        "p20_ms": low,
        "p80_ms": high,
        "ms_to_first_token": statistics.median(s.ms_to_first_token for s in streams),
        "committed_per_round": committed_per_round(streams),
        **{f"committed_{name}": committed_per_round(found) for name, found in groups.items()},
        "requests_answered": len(streams),
        "output_tokens": sum(s.tokens[-1] for s in streams),
        "cached_prompt_tokens": sum(s.meta.get("cached_tokens", 0) for s in streams),
    }


def result_rows(
    plans: Sequence[Plan], records: dict[str, Record], errors: dict[str, str], reference: Record
) -> list[dict[str, Any]]:
    """One row per number of requests and mode; an "error" stands in for missing numbers."""
    rows = []
    plain = reference.points.get("1", {})
    for point in plans[0].points[1:] if plans else []:
        for plan in plans:
            row: dict[str, Any] = {"requests": int(point), "mode": plan.mode}
            found = records[plan.mode].points.get(point)
            if found is None:
                row["error"] = errors.get(plan.mode, "not measured")
            else:
                row |= {key: value for key, value in found.items() if key != "answers"}
                if "answers" in plain:
                    pairs = zip(found["answers"], plain["answers"], strict=True)
                    row["equal_answers"] = sum(a == b for a, b in pairs)
                    row["answers"] = len(plain["answers"])
            rows.append(row)
    return rows


def verdict(requests: int, tree: str, speed: float, committed: float) -> Verdict:
    """A target on throughput, or on the round's cost where the committed tokens per round do not allow the first.

    Args:
        speed: DDTREE's tokens per second over DFLASH's.
        committed: its committed tokens per round over DFLASH's.
    """
    limit, note = TARGETS[requests], f"committed tokens per round {committed:.3f}"
    if committed < limit:
        limit, note = ROUND_COST * committed, f"{ROUND_COST} of the committed tokens per round, {committed:.3f}"
    return Verdict(f"{requests} requests, tokens/s of {tree} / {CHAIN}", speed, limit, note=note)


def targets(rows: Rows, tree: str) -> list[Verdict]:
    found = []
    for n in TARGETS:
        speed = report.ratio(rows, "tokens_per_s", tree, CHAIN, requests=n)
        committed = report.ratio(rows, "committed_per_round", tree, CHAIN, requests=n)
        if speed is not None and committed is not None:
            found.append(verdict(n, tree, speed, committed))
    return found


def table(rows: Rows, names: Sequence[str]) -> str:
    columns: list[report.Column] = [
        ("requests", lambda r: r["requests"]),
        ("mode", lambda r: servers.label(r["mode"])),
        ("tokens/s (passes)", lambda r: f"{r['tokens_per_s']:.0f} ({r['slowest_pass']:.0f}-{r['fastest_pass']:.0f})"),
        ("ms per output token (p20-p80)", lambda r: f"{r['ms_per_token']:.3f} ({r['p20_ms']:.3f}-{r['p80_ms']:.3f})"),
        ("ms to first token", lambda r: f"{r['ms_to_first_token']:.1f}"),
        ("committed tokens per round", lambda r: f"{r['committed_per_round']:.3f}"),
        *((name, lambda r, name=name: f"{r[f'committed_{name}']:.3f}") for name in names),
        ("answers equal to no speculation, one at a time", lambda r: f"{r['equal_answers']} of {r['answers']}"),
        ("answered", lambda r: r["requests_answered"]),
    ]
    return report.markdown_table(rows, columns)


def ratios(rows: Rows, tree: str) -> str:
    """DDTREE over the two others."""
    lines = []
    for n in dict.fromkeys(row["requests"] for row in rows):
        line: dict[str, Any] = {"requests": n}
        for key, name in (("tokens_per_s", "speed"), ("committed_per_round", "committed"), ("ms_per_token", "ms")):
            for under in (PLAIN, CHAIN):
                got = report.ratio(rows, key, tree, under, requests=n)
                if got is not None:
                    line[f"{name} {under}"] = f"{got:.3f}"
        lines.append(line)
    columns: list[report.Column] = [
        ("requests", lambda r: r["requests"]),
        ("tokens/s, DDTREE / DFLASH", lambda r: r[f"speed {CHAIN}"]),
        ("committed tokens per round, DDTREE / DFLASH", lambda r: r[f"committed {CHAIN}"]),
        ("ms per output token, DDTREE / DFLASH", lambda r: r[f"ms {CHAIN}"]),
        ("tokens/s, DDTREE / no speculation", lambda r: r[f"speed {PLAIN}"]),
    ]
    return report.markdown_table(lines, columns)


def plans_for(args: argparse.Namespace, modes: Sequence[str]) -> list[Plan]:
    env = {}
    if args.dtype == "float32":
        sys.path.insert(0, str(ROOT / "tests"))
        from serving import GPU_ENVIRONMENT

        # SGLang's GPU kernels for norm, activation and rotary positions know no float32.
        env = {"PYTHONPATH": str(ROOT / "tests" / "plugins"), **GPU_ENVIRONMENT} if servers.has_gpu() else {}
    if args.smoke:
        env["OMP_NUM_THREADS"] = "1"
    most = max(args.requests) if args.smoke else max(32, *args.requests)
    points = [GATE, *([] if args.gate_only else map(str, args.requests))]
    return [
        Plan(
            mode=mode,
            flags=[
                *("--model-path", str(args.target)),
                *servers.common_flags(args.dtype, most, args.backend),
                *("--max-total-tokens", "4000" if args.smoke else "200000"),
                *servers.mode_flags(mode, args.drafter, args.topk_cap),
                *args.server_flags,
            ],
            env=env,
            points=points,
            conditions={
                name: str(getattr(args, name)) for name in ("tokens", "repeats", "gate_tokens", "prompts", "limit")
            },
            name=f"{args.target.name}-{args.dtype}-{mode}",
        )
        for mode in modes
    ]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("results/bench_serving"), help="results are OUT.csv, .md, .png"
    )
    parser.add_argument("--target", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", type=Path, default=ROOT / "models" / "smollm2-135m-dflash")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="npz of recorded drafts, or its meta.npz")
    parser.add_argument("--limit", type=int, help="use this many prompts")
    parser.add_argument("--requests", nargs="+", type=int, default=list(TARGETS), help="running at once")
    parser.add_argument("--budget", type=int, default=15, help="the number to measure and judge beside auto")
    parser.add_argument("--topk-cap", type=int, default=8)
    parser.add_argument(
        "--only", nargs="+", metavar="MODE", help=f"of plain, dflash-WIDTH, ddtree-BUDGET, {servers.AUTO}"
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--backend", default="triton", help="attention backend of every server on a GPU")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens at most")
    parser.add_argument("--repeats", type=int, default=2, help="passes over the prompts")
    parser.add_argument("--gate-only", action="store_true", help="compare answers, time nothing")
    parser.add_argument("--together", type=int, default=1, help="servers to start at a time; they are measured in turn")
    parser.add_argument("--commit", help="to name in the results where git cannot tell it")
    parser.add_argument("--smoke", action="store_true", help="a tiny random pair and a few tokens, on a CPU too")
    parser.add_argument("server_flags", nargs="*", help="after --: more flags for every server")
    args = parser.parse_args(argv)
    args.out, args.gate_tokens = args.out.resolve(), GATE_TOKENS
    if args.smoke:
        args.requests = [n for n in args.requests if n <= 2] or [1]
        args.tokens, args.gate_tokens, args.repeats, args.dtype = 16, 16, 1, "float32"
        args.target, args.drafter = tiny_pair(args.out.parent / "models")
    elif not servers.has_gpu():
        raise SystemExit("this measures a GPU, and there is none; --smoke runs the same code with a tiny pair.")
    for folder, remedy in ((args.target, "run python scripts/smollm2.py"), (args.drafter, "give --drafter")):
        if not (folder / "config.json").is_file():
            raise SystemExit(f"{folder} holds no model; {remedy}.")
    args.target, args.drafter = args.target.resolve(), args.drafter.resolve()
    return args


def tiny_pair(folder: Path) -> tuple[Path, Path]:
    """The random pair of the tests, made once."""
    sys.path.insert(0, str(ROOT / "tests"))
    import tiny_models

    target, drafter = folder / "tiny-target", folder / "tiny-drafter"
    if not (target / "config.json").exists():
        tiny_models.make_target(target)
    tiny_models.make_drafter(drafter, block_size=16)
    return target, drafter


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    prompts = tiny_prompts(6) if args.smoke else recorded_prompts(args.prompts)[: args.limit]
    tree = f"ddtree-{args.budget}"
    modes = servers.select_modes([PLAIN, CHAIN, tree, servers.AUTO], args.only)
    folder, identity = args.out.parent / "servers", report.identity()
    plain = plans_for(args, [PLAIN])[0]

    def reference() -> Record:
        # Read again whenever it is asked for: what an earlier call kept serves too, where --only leaves the mode out.
        return servers.record_of(plain, folder, identity)

    # No speculation first: the others are compared with it.
    plans = plans_for(args, sorted(modes, key=lambda mode: mode != PLAIN))
    step = functools.partial(measure, prompts=prompts, args=args, reference=reference)
    records, errors = servers.measure_plans(plans, folder, identity, step, args.together)

    rows = result_rows(plans, records, errors, reference())
    judged = [] if args.smoke else targets(rows, tree)
    names = list(dict.fromkeys(name for name, _ in prompts))
    gates = [
        f"- {servers.label(mode)}: {record.points[GATE]['words'] if GATE in record.points else errors.get(mode)}"
        for mode, record in records.items()
    ]
    model = "tiny random pair" if args.smoke else f"{args.target.name}, {args.drafter.name}"
    report.Report(
        title="Serving throughput",
        notes=[
            f"{model}, {args.dtype}; {len(prompts)} prompts, greedy, at most {args.tokens} new tokens; cap "
            f"{args.topk_cap}. Closed loop, client's clock, median of {args.repeats} passes; requests stream their "
            "first token and their end."
        ],
        tables=[
            "Gate, answers one at a time against no speculation:\n\n" + "\n".join(gates),
            *([] if args.gate_only else [table(rows, names), ratios(rows, tree)]),
        ],
        model=f"{model}, {args.dtype}",
        rows=rows,
        settings={mode: record.settings for mode, record in records.items()},
        verdicts=judged,
        y_name="output tokens/s",
        y_key="tokens_per_s",
        smoke=args.smoke,
    ).write(args.out, args.commit)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
