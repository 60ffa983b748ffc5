"""Decoding of a model's shape with random weights and forced acceptance: what bench_round and bench_simulated share.

Both read the same measurements, so a server that one of them has measured is not started for the other. One server
per mode measures every number of requests: all requests are sent at once, and the clock runs while all of them are
decoding, so neither prompts nor a half empty batch count. SGLang's SGLANG_SIMULATE_ACC_LEN (a mean, one draw per round
for the whole batch) decides how many tokens a round commits; the text is meaningless.
"""

from __future__ import annotations

import argparse
import math
import operator
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving_bench import load, report, servers, shapes
from serving_bench.servers import PLAIN, BenchServer, Plan, Record

# Committed tokens per round that this project recorded with a trained drafter of block 16 (SmolLM2-135M-Instruct and
# models/smollm2-135m-dflash; greedy, 64 prompts each of HumanEval, GSM8K and MT-bench, 256 new tokens at most, cap 8).
RECORDED_RATES = {
    PLAIN: 1.0,
    "dflash-8": 3.148,
    "dflash-16": 3.223,
    "ddtree-7": 3.531,
    "ddtree-15": 4.013,
    "ddtree-31": 4.334,
    "ddtree-63": 4.606,
    # It serves the chain.
    "shadow-15": 3.223,
}
RECORDED = "recorded"
DEFAULT_BUDGETS = [7, 15, 31, 63]


def rate_of(mode: str, accept_length: str) -> float:
    """Tokens a round commits.

    Raises:
        SystemExit: no rate was recorded for that mode.
    """
    if mode == PLAIN:
        return 1.0
    if accept_length != RECORDED:
        return float(accept_length)
    if mode not in RECORDED_RATES:
        known = ", ".join(RECORDED_RATES)
        raise SystemExit(
            f"no rate was recorded for {mode}, only for {known}; bench_round.py --accept-length takes one."
        )
    return RECORDED_RATES[mode]


def accept_length_argument(text: str) -> str:
    if text != RECORDED and float(text) < 1:
        raise argparse.ArgumentTypeError(f"must be {RECORDED} or a number of at least 1, got {text}.")
    return text


def add_arguments(parser: argparse.ArgumentParser, name: str, requests: Sequence[int]) -> None:
    parser.add_argument("--out", type=Path, default=Path("results") / name, help="results are OUT.csv, .md and .png")
    parser.add_argument("--shape", choices=list(shapes.SHAPES), default="qwen3-8b", help="of the target")
    parser.add_argument("--requests", nargs="+", type=int, default=list(requests), help="running at once")
    parser.add_argument("--budgets", nargs="+", type=int, default=DEFAULT_BUDGETS, help="of DDTREE")
    parser.add_argument(
        "--only", nargs="+", metavar="MODE", help="of plain, dflash-WIDTH, ddtree-BUDGET, shadow-BUDGET"
    )
    parser.add_argument("--context", nargs="+", type=int, default=[128], help="tokens in a prompt")
    parser.add_argument("--topk-cap", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=128, help="per repetition")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="triton", help="attention backend of every server on a GPU")
    parser.add_argument(
        "--together", type=int, default=1, help="servers to start at a time (short contexts); measured one by one"
    )
    parser.add_argument("--commit", help="to name in the results where git cannot tell it")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few rounds, on a CPU too")
    parser.add_argument("server_flags", nargs="*", help="after --: more flags for every server")


def settle_arguments(args: argparse.Namespace) -> None:
    """Fill in what a smoke run changes; resolve paths, since servers run elsewhere. Mutates ``args``.

    Raises:
        SystemExit: there is no GPU.
    """
    args.out = args.out.resolve()
    if args.smoke:
        args.requests = [n for n in args.requests if n <= 2] or [1]
        args.context, args.rounds, args.repeats = [16], 16, 1
    elif not servers.has_gpu():
        raise SystemExit("this measures a GPU, and there is none; --smoke runs the same code with a tiny model.")
    if args.together > 1 and max(args.context) > 4096:
        raise SystemExit(f"--together {args.together} with --context {max(args.context)}: their KV pools do not fit.")


def model_of(args: argparse.Namespace) -> str:
    if args.smoke:
        return "tiny random model"
    return {"qwen3-8b": "Qwen3-8B", "qwen3.6-27b": "Qwen3.6-27B"}[args.shape] + "'s shape, random weights, bfloat16"


def point_name(requests: int, context: int) -> str:
    return f"{requests} x {context}"


def tokens_per_request(rounds: int, rate: float, requests: int) -> int:
    """Tokens that take ``rounds`` rounds in a full batch; the surplus covers requests that begin one by one."""
    return math.ceil(rate * (rounds + 8 + requests))


def reserve_per_request(width: int, block_size: int) -> int:
    """KV slots beyond its tokens that a request may hold: two rounds."""
    return 2 * max(width, block_size)


def plans_for(args: argparse.Namespace, modes: Sequence[str], accept_length: str) -> list[Plan]:
    """One server per mode, on model folders written beside the results."""
    shape, dtype = (shapes.TINY, "float32") if args.smoke else (shapes.SHAPES[args.shape], "bfloat16")
    if args.smoke and servers.has_gpu():
        dtype = "bfloat16"
    target, drafter = shapes.write_models(shape, args.out.parent / "models", dtype)
    # Equal for every selection of --requests, so that a filtered run's results serve the whole one; but recurrent
    # states of every node leave no room for requests that are not measured.
    most = 2 if args.smoke else max(args.requests) if shape.recurrent else max(32, *args.requests)
    plans = []
    for mode in modes:
        rate = rate_of(mode, accept_length)
        width = servers.verify_width(mode, shape.block_size)
        tokens = tokens_per_request(args.rounds, rate, most)
        # Twice the tokens: the prefix cache keeps those of the repetition before, and nothing is evicted while the
        # clock runs. Later ones repeat them, since a forced acceptance commits the same token again and again. Once
        # more for the scheduler, which lets a request wait rather than risk that the pool runs out.
        slots = max(args.context) + 3 * tokens + reserve_per_request(width, shape.block_size)
        flags = [
            *("--model-path", str(target), "--load-format", "dummy", "--skip-tokenizer-init"),
            *servers.common_flags(dtype, most, args.backend),
            *("--max-total-tokens", str(most * slots)),
            *servers.mode_flags(mode, drafter, args.topk_cap),
            *hybrid_flags(shape, most),
            *args.server_flags,
        ]
        env = {} if mode == PLAIN else {"SGLANG_SIMULATE_ACC_LEN": str(rate)}
        if args.smoke:
            env["OMP_NUM_THREADS"] = "1"
        if shape.recurrent:
            # As text alone: SGLang wants an image processor's files otherwise.
            env |= {"PYTHONPATH": str(servers.ROOT / "tests" / "plugins"), "DDTREE_TEST_TEXT_ONLY": "1"}
        plans.append(
            Plan(
                mode=mode,
                flags=flags,
                env=env,
                points=[point_name(n, context) for context in args.context for n in args.requests],
                conditions={"rate": rate, "width": width, "rounds": args.rounds, "repeats": args.repeats},
                name=f"{shape.name}-{mode}" + ("" if mode == PLAIN else f"-rate-{rate:g}"),
            )
        )
    return plans


def hybrid_flags(shape: shapes.Shape, most: int) -> list[str]:
    """Recurrent states for ``most`` requests, five each, and one for the prompt of each that the prefix cache keeps."""
    return ["--max-mamba-cache-size", str(6 * most)] if shape.recurrent else []


def make_prompts(requests: int, context: int, vocabulary: int) -> list[list[int]]:
    """Random prompts that share no prefix; those of fewer requests are among those of more."""
    prompts = []
    for index in range(requests):
        draw = random.Random(1000 * context + index)
        prompts.append([draw.randrange(vocabulary - 64) for _ in range(context)])
    return prompts


def measure_point(server: BenchServer, plan: Plan, point: str, record: Record) -> dict[str, Any]:
    """Windows of a full batch, one per repetition; or why there are none."""
    requests, context = (int(part) for part in point.split(" x "))
    want = plan.conditions
    shape = next((shape for shape in shapes.SHAPES.values() if plan.name.startswith(shape.name)), shapes.TINY)
    tokens = tokens_per_request(want["rounds"], want["rate"], requests)
    need = requests * (context + tokens + reserve_per_request(want["width"], shape.block_size))
    have = record.settings.get("kv_tokens") or need
    if need > have:
        print(f"{servers.label(plan.mode)}, {point}: needs {need} KV tokens, there are {have}", flush=True)
        return {"skipped": f"needs {need} KV tokens, there are {have}"}
    prompts = make_prompts(requests, context, shape.vocab_size)
    block = max(4, want["rounds"] // 8)
    sampling = {"ignore_eos": True}
    # Compiles what this batch size still needs, and puts the prompts into the prefix cache.
    load.all_at_once(server.url, prompts, {**sampling, "max_new_tokens": math.ceil(want["rate"] * (8 + requests))})
    windows = [
        load.full_batch_window(load.all_at_once(server.url, prompts, {**sampling, "max_new_tokens": tokens}), block)
        for _ in range(want["repeats"])
    ]
    found = summarize(windows)
    print(
        f"{servers.label(plan.mode)}, {requests} requests, context {context}: {found['ms_per_round']:.2f} ms per round "
        f"({found['p20_ms']:.2f} to {found['p80_ms']:.2f}), {found['committed_per_round']:.2f} tokens per round",
        flush=True,
    )
    return found


def summarize(windows: Sequence[load.Window]) -> dict[str, Any]:
    """A point's numbers from its repetitions."""
    median, low, high = report.spread([ms for window in windows for ms in window.ms_per_round])
    seconds, rounds = sum(w.seconds for w in windows), sum(w.rounds for w in windows)
    return {
        "ms_per_round": median,
        "p20_ms": low,
        "p80_ms": high,
        "mean_ms": 1000.0 * seconds / rounds,
        "rounds": rounds,
        "committed_per_round": sum(w.tokens for w in windows) / rounds,
    }


def result_rows(plans: Sequence[Plan], records: dict[str, Record], errors: dict[str, str]) -> list[dict[str, Any]]:
    """One row per context, number of requests and mode; an "error" stands in for missing numbers."""
    rows = []
    for point in plans[0].points if plans else []:
        requests, context = (int(part) for part in point.split(" x "))
        for plan in plans:
            rate, mode = plan.conditions["rate"], plan.mode
            row: dict[str, Any] = {"context": context, "requests": requests, "mode": mode, "forced_rate": rate}
            found = records[mode].points.get(point)
            if found is None:
                row["error"] = errors.get(mode, "not measured")
            elif "skipped" in found:
                row["error"] = found["skipped"]
            else:
                row |= found
                # At exactly the forced rate: its draws would add noise of their own.
                row["tokens_per_s"] = 1000.0 * requests * rate / found["mean_ms"]
            rows.append(row)
    return rows


def pivot(rows: Sequence[dict[str, Any]], cell: Any, contexts: bool) -> str:
    """A table with a line per mode and a column per number of requests."""
    columns: list[report.Column] = [("", lambda row: servers.label(row["mode"]))]
    if contexts:
        columns.append(("context", lambda row: row["context"]))
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for row in rows:
        line = lines.setdefault((row["context"], row["mode"]), {"mode": row["mode"], "context": row["context"]})
        line[f"at {row['requests']}"] = cell(row) if "error" not in row else "-"
    for n in dict.fromkeys(row["requests"] for row in rows):
        columns.append((f"{n} request{'s' if n > 1 else ''}", operator.itemgetter(f"at {n}")))
    return report.markdown_table(list(lines.values()), columns)


def run(
    args: argparse.Namespace, modes: Sequence[str], accept_length: str
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]], bool]:
    """Measure; returns rows, the servers' settings by mode, and whether every server did its work."""
    plans = plans_for(args, modes, accept_length)
    records, errors = servers.measure_plans(
        plans, args.out.parent / "servers", report.identity(), measure_point, args.together
    )
    settings = {mode: record.settings for mode, record in records.items()}
    return result_rows(plans, records, errors), settings, not errors


def write_report(args: argparse.Namespace, rows: Any, settings: Any, complete: bool, **shown: Any) -> int:
    """Write the report of a decode benchmark; returns the exit code. ``shown``: what `report.Report` asks besides."""
    report.Report(model=model_of(args), rows=rows, settings=settings, smoke=args.smoke, **shown).write(
        args.out, args.commit
    )
    return 0 if complete else 1
