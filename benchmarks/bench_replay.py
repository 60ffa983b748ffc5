"""REPLAY: tokens per second of an 8B shape with recorded drafts and texts, at loads from 1 to 256 requests.

    python benchmarks/bench_replay.py --data DATA --out results/bench_replay
    python benchmarks/bench_replay.py --data DATA --out results/bench_replay --only ddtree-auto --jump

DATA holds recorded drafts: a folder with top16.npz and meta.npz, or the sample in tests/data, which is the default.
Needs a GPU; `--smoke` runs the same code with a tiny model anywhere, without DFLASH. Writes OUT.csv, OUT.md and OUT.png
(of `--jump` besides OUT-jump.csv), and keeps every server's numbers in servers/ beside them: an interrupted run goes on
where it stopped.

What is real: the servers, in SGLang's normal mode, every forward and kernel of a model of Qwen3-8B's size with random
weights, and how many tokens each round of each text commits, which is a trained drafter's on a small model. What is
not: the drafts and the target's choices themselves, which benchmarks/replay puts in place of the random ones.
Acceptance differs between texts and within them, as forced acceptance (bench_simulated.py) does not: a policy has
something to see.

Every answer is checked: its tokens must be the recorded text, and where the budget is fixed it must have taken the
rounds that replaying its drafts offline takes, or nothing of that server is counted.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import recorded_drafts
from serving_bench import auto_rounds, decode, load, report, servers, shapes, steady
from serving_bench.recorded_texts import Texts
from serving_bench.report import Rows, Verdict
from serving_bench.servers import AUTO, PLAIN, ROOT, BenchServer, Plan, Record
from serving_bench.steady import Answer, Ask

DATA = ROOT / "tests" / "data" / "recorded-drafts-sample.npz"
PLUGIN = ROOT / "benchmarks" / "replay"
REQUESTS = [1, 8, 32, 64, 128, 256]
BUDGETS = [3, 7, 15, 31, 63]
RIVALS = (PLAIN, "dflash-8", "dflash-16")
# Auto over the best rival, by number of requests, and over the best fixed budget at any.
TARGETS = {1: 1.35, 8: 1.15, 32: 1.10, 64: 1.05, 128: 0.98, 256: 0.98}
OVER_FIXED = 0.97
GATE, JUMP = "gate", "jump"
GATE_TEXTS = 3
CONTEXT = 128
PHASES = [(1, 4.0), (64, 6.0), (1, 4.0)]


class GateFailed(RuntimeError):
    """An answer is not the recorded one, or took other rounds than its drafts allow."""


def settle_texts(requests: int) -> int:
    """Requests to send before counting begins: some lifetimes, at high loads a part of one."""
    return min(4 * requests, 32 + requests // 2)


def counted_texts(requests: int) -> int:
    """Requests to send while it is counted: the same texts for every mode."""
    return min(12 * requests, 64 + requests)


def asks(texts: Texts, requests: int, first: int, longest: int | None = None) -> Iterator[Ask]:
    """Requests without an end; the first ``requests`` of them cut short, so that they do not end together.

    Args:
        first: serial number of the first one; a prompt is no other's beginning.
        longest: cut all to this many tokens.
    """
    draw = random.Random(requests)
    for index, serial in enumerate(itertools.count(first)):
        text = texts.order[index % len(texts.order)]
        full = min(len(texts.answers[text]), longest or texts.longest)
        tokens = max(2, round(full * draw.random())) if index < requests else full
        whole = tokens == len(texts.answers[text])
        yield Ask(text, texts.prompt(text, serial, CONTEXT), tokens, whole)


def check(answers: Sequence[Answer], texts: Texts, rounds: Sequence[int] | None, recorded: bool) -> int:
    """Compare answers with the recording; returns how many of them were whole.

    Args:
        rounds: of every text; None where they are not known.
        recorded: False for a server that speaks its own text.
    Raises:
        GateFailed: one differs.
    """
    whole = 0
    for answer in answers:
        stream, key = answer.stream, answer.ask.key
        if not answer.finished:
            continue
        # The first token is the random model's, whatever it was: a round's root is compared with nothing.
        expected = texts.answers[key][1 : answer.ask.tokens]
        if len(stream.ids) != answer.ask.tokens or (recorded and stream.ids[1:] != expected):
            same = next((i for i, (a, b) in enumerate(zip(stream.ids[1:], expected, strict=False)) if a != b), "all")
            raise GateFailed(
                f"text {key}: {len(stream.ids)} of {answer.ask.tokens} tokens, {same} behind the first as recorded"
            )
        if answer.ask.whole:
            whole += 1
            if rounds is not None and stream.num_rounds != rounds[key]:
                raise GateFailed(f"text {key} took {stream.num_rounds} rounds, its drafts allow {rounds[key]}")
    return whole


def committed_per_round(answers: Sequence[Answer]) -> float:
    """Over whole answers; the prefill's token is not counted."""
    return sum(a.stream.tokens[-1] - 1 for a in answers) / sum(a.stream.num_rounds for a in answers)


Compare = Callable[[Sequence[Answer]], int]


def measure(
    server: BenchServer, plan: Plan, point: str, record: Record, *, args: argparse.Namespace, texts: Texts
) -> dict[str, Any]:
    """The gate, the jump, or one number of requests (or why it was skipped)."""
    compare = functools.partial(
        check, texts=texts, rounds=texts.rounds(plan.mode, args.topk_cap), recorded=plan.mode != PLAIN
    )
    # No two points of a server share a prompt.
    first = 8192 * plan.points.index(point)
    name = servers.label(plan.mode)
    if point == GATE:
        return measure_gate(server.url, name, asks(texts, 0, first), 1 if args.smoke else GATE_TEXTS, compare)
    if point == JUMP:
        return measure_jump(server.url, name, asks(texts, 0, first), args.phases, compare)
    requests = int(point)
    need, have = requests * plan.conditions["slots"], record.settings.get("kv_tokens")
    if have is not None and have < need:
        print(f"{name}, {requests} requests: needs {need} KV tokens, there are {have}", flush=True)
        return {"skipped": f"needs {need} KV tokens, there are {have}"}
    with auto_rounds.watched(server, plan.mode) as decided:
        found = measure_load(server.url, name, asks(texts, requests, first), requests, args, compare)
    return found | decided


def measure_gate(url: str, name: str, source: Iterator[Ask], count: int, compare: Compare) -> dict[str, Any]:
    """The first texts, one after another."""
    answers = []
    for ask in itertools.islice(source, count):
        sampling = {"max_new_tokens": ask.tokens, "ignore_eos": True}
        (stream,), _ = load.closed_loop(url, [ask.ids], 1, sampling)
        answers.append(Answer(ask, stream, 0))
    words = f"{compare(answers)} answers as recorded, {committed_per_round(answers):.3f} tokens per round"
    print(f"{name}, gate: {words}", flush=True)
    return {"words": words}


def measure_jump(
    url: str, name: str, source: Iterator[Ask], phases: Sequence[tuple[int, float]], compare: Compare
) -> dict[str, Any]:
    found = steady.jumping(url, lambda: next(source), phases)
    compare(found.answers)
    for at, requests, speed in zip(found.times, found.requests, found.tokens_per_s, strict=True):
        print(f"{name}, {at:4.1f} s, {requests} requests: {speed:.0f} tokens/s", flush=True)
    return {"times": found.times, "requests": found.requests, "tokens_per_s": found.tokens_per_s}


def measure_load(
    url: str, name: str, source: Iterator[Ask], requests: int, args: argparse.Namespace, compare: Compare
) -> dict[str, Any]:
    found = steady.constant(
        url,
        source,
        requests,
        settle=1 if args.smoke else settle_texts(requests),
        count=2 if args.smoke else counted_texts(requests),
        settle_s=args.settle,
        limit_s=args.limit,
        name=f"load-{requests}",
    )
    compare(found.answers)
    result: dict[str, Any] = {
        "tokens_per_s": found.tokens_per_s,
        "seconds": found.end - found.begin,
        "texts": found.counted,
        "complete": found.complete,
    }
    if found.ended:
        result["committed_per_round"] = committed_per_round(found.ended)
        result["answered"] = len(found.ended)
    print(
        f"{name}, {requests} requests: {found.tokens_per_s:.0f} tokens/s in {result['seconds']:.1f} s, "
        f"{result.get('committed_per_round', 0):.3f} tokens per round",
        flush=True,
    )
    return result


def plans_for(args: argparse.Namespace, modes: Sequence[str], texts: Texts, replay: Path) -> list[Plan]:
    """One server per mode."""
    shape, dtype = (shapes.TINY, "float32") if args.smoke else (shapes.SHAPES[args.shape], "bfloat16")
    if args.smoke and servers.has_gpu():
        dtype = "bfloat16"
    target, drafter = shapes.write_models(shape, args.out.parent / "models", dtype)
    most = max(args.requests) if args.jump is None else max(*args.requests, *(n for n, _ in args.phases))
    what = hashlib.sha256(replay.read_bytes() + (PLUGIN / "ddtree_replay.py").read_bytes()).hexdigest()[:12]
    plans = []
    for mode in modes:
        width = servers.verify_width(mode, shape.block_size)
        slots = CONTEXT + texts.longest + decode.reserve_per_request(width, shape.block_size)
        env = {} if mode == PLAIN else {"PYTHONPATH": str(PLUGIN), "DDTREE_REPLAY": str(replay)}
        if args.smoke:
            env["OMP_NUM_THREADS"] = "1"
        flags = [
            *("--model-path", str(target), "--load-format", "dummy", "--skip-tokenizer-init"),
            *servers.common_flags(dtype, most, args.backend),
            # A little more than the requests hold, for what the prefix cache keeps.
            *("--max-total-tokens", str(most * slots * 9 // 8)),
            *servers.mode_flags(mode, drafter, args.topk_cap),
            *args.server_flags,
        ]
        plans.append(
            Plan(
                mode=mode,
                flags=flags,
                env=env,
                points=[GATE, *map(str, args.requests), *([JUMP] if mode == args.jump else [])],
                conditions={
                    "replay": what,
                    "slots": slots,
                    "settle": args.settle,
                    "limit": args.limit,
                    "phases": args.phases,
                },
                name=f"replay-{shape.name}-{mode}",
            )
        )
    return plans


def result_rows(
    plans: Sequence[Plan], records: dict[str, Record], errors: dict[str, str], requests: Sequence[int]
) -> list[dict[str, Any]]:
    """One row per number of requests and mode; an "error" stands in for missing numbers."""
    rows = []
    for n in requests:
        for plan in plans:
            row: dict[str, Any] = {"context": CONTEXT, "requests": n, "mode": plan.mode, "kind": "REPLAY"}
            found = records[plan.mode].points.get(str(n))
            if found is None:
                found = {"error": errors.get(plan.mode, "not measured")}
            elif "skipped" in found:
                found = {"error": found["skipped"]}
            rows.append(row | found)
    return rows


def targets(rows: Rows) -> list[Verdict]:
    """Auto against the best of no speculation and DFLASH, and against the best fixed budget."""
    found = []
    for n in dict.fromkeys(row["requests"] for row in rows):
        speed = {row["mode"]: row["tokens_per_s"] for row in rows if row["requests"] == n and "tokens_per_s" in row}
        if AUTO not in speed:
            continue
        rivals = [mode for mode in speed if mode in RIVALS]
        fixed = [mode for mode in speed if mode.startswith("ddtree") and mode != AUTO]
        missing = sorted(set(RIVALS) - set(rivals))
        note = f"without {', '.join(missing)}" if missing else ""
        if rivals and n in TARGETS:
            best = max(rivals, key=speed.__getitem__)
            found.append(
                Verdict(f"{n} requests, REPLAY, auto / {best}", speed[AUTO] / speed[best], TARGETS[n], note=note)
            )
        if fixed:
            best = max(fixed, key=speed.__getitem__)
            found.append(Verdict(f"{n} requests, REPLAY, auto / {best}", speed[AUTO] / speed[best], OVER_FIXED))
    return found


def jump_table(found: dict[str, Any], mode: str) -> str:
    lines = [
        {"s": f"{at:.1f}", "n": n, "speed": f"{speed:.0f}"}
        for at, n, speed in zip(found["times"], found["requests"], found["tokens_per_s"], strict=True)
    ]
    columns: list[report.Column] = [
        ("second", lambda row: row["s"]),
        ("requests", lambda row: row["n"]),
        ("REPLAY tokens/s", lambda row: row["speed"]),
    ]
    return f"REPLAY, a load that jumps, {servers.label(mode)}:\n\n" + report.markdown_table(lines, columns)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA, help="recorded drafts: a folder, or a sample's npz")
    parser.add_argument("--out", type=Path, default=Path("results/bench_replay"), help="results are OUT.csv, .md, .png")
    parser.add_argument("--shape", choices=["qwen3-8b"], default="qwen3-8b", help="of the target")
    parser.add_argument("--requests", nargs="+", type=int, default=REQUESTS, help="running at once")
    parser.add_argument("--budgets", nargs="+", type=int, default=BUDGETS, help="of DDTREE")
    parser.add_argument("--only", nargs="+", metavar="MODE", help=f"of plain, dflash-WIDTH, ddtree-BUDGET, {AUTO}")
    parser.add_argument(
        "--jump",
        nargs="?",
        const=AUTO,
        metavar="MODE",
        help=f"besides a load that jumps 1, 64, 1 requests, with this mode ({AUTO})",
    )
    parser.add_argument("--topk-cap", type=int, default=8)
    parser.add_argument("--settle", type=float, default=3.0, help="seconds at most before counting begins")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds at most that are counted")
    parser.add_argument("--backend", default="triton", help="attention backend of every server on a GPU")
    parser.add_argument("--together", type=int, default=1, help="servers to start at a time; they are measured in turn")
    parser.add_argument("--commit", help="to name in the results where git cannot tell it")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and a few texts, on a CPU too")
    parser.add_argument("server_flags", nargs="*", help="after --: more flags for every server")
    args = parser.parse_args(argv)
    # Servers run elsewhere.
    args.out, args.phases = args.out.resolve(), PHASES
    if args.smoke:
        args.requests = [n for n in args.requests if n <= 2] or [1]
        args.phases = [(1, 1.0), (2, 1.0), (1, 1.0)]
    elif not servers.has_gpu():
        raise SystemExit("this measures a GPU, and there is none; --smoke runs the same code with a tiny model.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    modes = servers.select_modes([*RIVALS, *(f"ddtree-{b}" for b in args.budgets), AUTO], args.only)
    if args.jump is not None and args.jump not in modes:
        raise SystemExit(f"--jump {args.jump}: that mode is not measured.")
    shape = shapes.TINY if args.smoke else shapes.SHAPES[args.shape]
    texts = Texts(recorded_drafts.load(args.data), shape.vocab_size, shape.block_size - 1)
    replay = args.out.parent / "models" / f"replay-{shape.name}.npz"
    texts.save(replay)
    plans = plans_for(args, modes, texts, replay)
    step = functools.partial(measure, args=args, texts=texts)
    records, errors = servers.measure_plans(plans, args.out.parent / "servers", report.identity(), step, args.together)
    rows = result_rows(plans, records, errors, args.requests)
    gates = [
        f"- {servers.label(mode)}: {record.points[GATE]['words'] if GATE in record.points else errors.get(mode)}"
        for mode, record in records.items()
    ]
    jump = records[args.jump].points.get(JUMP) if args.jump is not None else None
    model = "tiny random model" if args.smoke else "Qwen3-8B's shape, random weights, bfloat16"
    report.Report(
        title="REPLAY: tokens per second",
        notes=[
            f"REPLAY: recorded drafts and texts ({args.data.name}, {len(texts.answers)} texts, greedy) on {model}: "
            "real rounds, real acceptance, but of another model. Output tokens per second of all requests together "
            f"while every slot is full; prompts of {CONTEXT} tokens, prefill included; cap {args.topk_cap}."
        ],
        tables=[
            "REPLAY, gate, one text after another:\n\n" + "\n".join(gates),
            "REPLAY, tokens per second:\n\n" + decode.pivot(rows, lambda r: f"{r['tokens_per_s']:.0f}", False),
            "REPLAY, committed tokens per round (answers that ended while it was counted):\n\n"
            + decode.pivot(rows, lambda r: _committed(r), False),
            "REPLAY, seconds counted (texts sent), - behind it: cut by --limit:\n\n"
            + decode.pivot(
                rows, lambda r: f"{r['seconds']:.1f} ({r['texts']})" + ("" if r["complete"] else " -"), False
            ),
            *([jump_table(jump, args.jump)] if jump else []),
        ],
        model=model,
        rows=rows,
        settings={mode: record.settings for mode, record in records.items()},
        verdicts=[] if args.smoke else targets(rows),
        y_name="REPLAY tokens/s, all requests",
        y_key="tokens_per_s",
        smoke=args.smoke,
    ).write(args.out, args.commit)
    if jump:
        lines = [
            {"second": at, "requests": n, "tokens_per_s": speed, "mode": args.jump, "kind": "REPLAY"}
            for at, n, speed in zip(jump["times"], jump["requests"], jump["tokens_per_s"], strict=True)
        ]
        report.write_csv(args.out.with_name(args.out.name + "-jump.csv"), lines)
    return 1 if errors else 0


def _committed(row: dict[str, Any]) -> str:
    return f"{row['committed_per_round']:.3f}" if "committed_per_round" in row else "none ended"


if __name__ == "__main__":
    sys.exit(main())
