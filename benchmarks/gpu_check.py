"""Correctness and committed tokens per round on a GPU: no speculation, DFLASH and DDTREE side by side.

    python benchmarks/gpu_check.py --target models/SmolLM2-135M-Instruct --drafter models/smollm2-135m-dflash \
        --dtypes float32 bfloat16 --backends triton flashinfer --budgets 7 15 31 63 --out results/

Every server answers the same prompts greedily. In float32 the tokens of DDTREE must equal those without
speculation (exit code 1 if not); in bfloat16, where rounding depends on the batch's shape, the table reports how
many prompts differ and where first, for DFLASH and for DDTREE. Several servers start at a time to save minutes,
so nothing here is a timing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import subprocess
import sys
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from serving import GPU_ENVIRONMENT, Server, committed_per_round, output_ids  # noqa: E402

PROMPTS = ROOT / "tests" / "data" / "prompts.json"


def load_prompts(target: str, chat: bool) -> list[list[int]]:
    """Token ids of the 20 prompts; random models get their bytes, without a template."""
    items = json.loads(PROMPTS.read_text())
    if not chat:
        return [list(item["messages"][-1]["content"].encode())[:120] for item in items]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = [
        tokenizer.apply_chat_template(item["messages"], tokenize=False, add_generation_prompt=True) for item in items
    ]
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def mode_flags(mode: str, drafter: str) -> list[str]:
    """Server flags of "plain", "dflash" or "ddtree-B"."""
    if mode == "plain":
        return []
    flags = ["--speculative-draft-model-path", drafter]
    if mode == "dflash":
        return ["--speculative-algorithm", "DFLASH", *flags]
    budget = mode.split("-")[1]
    return ["--speculative-algorithm", "DDTREE", *flags, "--speculative-ddtree-budget", budget]


def answer(args: argparse.Namespace, name: str, flags: list[str], prompts: list[list[int]]) -> dict:
    """Start one server, ask all prompts one by one and all at once, stop it; kept in a file for a later call."""
    kept = args.out / f"{name}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    env = {"PYTHONPATH": str(ROOT / "tests" / "plugins"), **GPU_ENVIRONMENT} if "float32" in flags else {}
    server = Server(flags, args.out / f"{name}.log", env=env)
    try:
        server.wait_ready()
        params = dict(max_new_tokens=args.tokens, ignore_eos=False)
        single = [server.generate([prompt], **params)[0] for prompt in prompts]
        batch = server.generate(prompts, **params)
        speculative = "--speculative-algorithm" in flags
        found = {
            "single": output_ids(single),
            "batch": output_ids(batch),
            "tau": committed_per_round(single) if speculative else 1.0,
            "tau_batch": committed_per_round(batch) if speculative else 1.0,
        }
        kept.write_text(json.dumps(found))
        return found
    finally:
        server.stop()


def differences(got: list[list[int]], expected: list[list[int]]) -> tuple[int, int | None]:
    """Prompts whose tokens differ, and the earliest differing position of all."""
    firsts = []
    for a, b in zip(got, expected, strict=True):
        if a != b:
            pairs = zip(a, b, strict=False)
            firsts.append(next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b))))
    return len(firsts), min(firsts, default=None)


def versions() -> str:
    import sglang
    import torch
    import triton

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return f"{gpu}; sglang {sglang.__version__}, torch {torch.__version__}, triton {triton.__version__}; {commit}"


def table(rows: list[dict]) -> str:
    head = (
        "| dtype | backend | mode | tokens per round, one at a time | all at once | prompts that differ from no "
        "speculation, one at a time | first position | all at once | first position |"
    )
    lines = [head, "|" + "---|" * 9]
    for row in rows:
        cells = [row["dtype"], row["backend"], row["mode"]]
        if "error" in row:
            cells += [row["error"], "", "", "", "", ""]
        else:
            cells += [f"{row['tau']:.3f}", f"{row['tau_batch']:.3f}"]
            for key in ("single_diff", "batch_diff"):
                count, first = row[key]
                cells += [f"{count} of {row['prompts']}", "-" if first is None else str(first)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--backends", nargs="+", default=["triton", "flashinfer"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[7, 15, 31, 63])
    parser.add_argument("--no-dflash", action="store_true")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--parallel", type=int, default=6, help="servers at a time")
    parser.add_argument("--raw", action="store_true", help="no chat template (random models)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("server_flags", nargs="*", help="after --: more flags for every server")
    args = parser.parse_args()
    # Servers run in the output folder.
    args.out = args.out.resolve()
    args.target, args.drafter = (
        str(Path(name).resolve()) if Path(name).exists() else name for name in (args.target, args.drafter)
    )
    args.out.mkdir(parents=True, exist_ok=True)
    prompts = load_prompts(args.target, not args.raw)
    modes = ["plain", *([] if args.no_dflash else ["dflash"]), *(f"ddtree-{budget}" for budget in args.budgets)]

    jobs = {}
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        for dtype in args.dtypes:
            for backend in args.backends:
                for mode in modes:
                    flags = [
                        *("--model-path", args.target, "--dtype", dtype, "--attention-backend", backend),
                        *("--max-total-tokens", "40000", "--max-running-requests", "32"),
                        *("--mem-fraction-static", "0.9", "--cuda-graph-max-bs", "32"),
                        *("--cuda-graph-backend-prefill", "disabled"),
                        *mode_flags(mode, args.drafter),
                        *args.server_flags,
                    ]
                    name = f"{dtype}-{backend}-{mode}"
                    jobs[dtype, backend, mode] = pool.submit(answer, args, name, flags, prompts)

    rows, failed = [], False
    for (dtype, backend, mode), job in jobs.items():
        row = {"dtype": dtype, "backend": backend, "mode": mode, "prompts": len(prompts)}
        try:
            got, plain = job.result(), jobs[dtype, backend, "plain"].result()
        except Exception:
            row["error"] = "did not start: " + traceback.format_exc().strip().splitlines()[-1][:160]
            failed |= mode.startswith("ddtree") and jobs[dtype, backend, "plain"].exception() is None
        else:
            row |= {key: got[key] for key in ("tau", "tau_batch")}
            row["single_diff"] = differences(got["single"], plain["single"])
            row["batch_diff"] = differences(got["batch"], plain["single"])
            if dtype == "float32" and mode.startswith("ddtree"):
                failed |= row["single_diff"][0] > 0 or row["batch_diff"][0] > 0
        rows.append(row)
    text = f"{versions()}\n\n{table(rows)}\n"
    (args.out / "table.md").write_text(text)
    (args.out / "rows.json").write_text(json.dumps(rows, indent=1))
    print(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
