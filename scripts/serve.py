"""Serve SmolLM2-135M-Instruct with DDTREE, show one answer, and go on serving until Ctrl-C.

    python scripts/serve.py [--port 30000] [--budget B] [--topk-cap 8] [--once] [-- more server flags]

Starts the real launch command on whatever device there is, waits for health with a bound, sends one chat
completion and prints its text and the tokens committed per round. Then the same request runs on a second,
short-lived server with DFLASH's chain, for comparison.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from launcher import HOST, ServerDied, ServerProcess, free_port

ROOT = Path(__file__).resolve().parent.parent
HEALTH_TIMEOUT_S = 600
QUESTION = "Write a Python function that returns the n-th Fibonacci number, and explain it step by step."


class ServeError(RuntimeError):
    """What was asked for cannot be served; the message says why and what to do."""


def device_flags() -> list[str]:
    """What differs between a CPU and a GPU: the number format, and sizes that fit a small machine."""
    from sglang_ddtree.requirements import has_gpu

    if has_gpu():
        # Two servers of a small model share the GPU for the comparison.
        return ["--dtype", "bfloat16", "--mem-fraction-static", "0.3"]
    return [
        *("--dtype", "float32", "--max-total-tokens", "16384", "--max-running-requests", "8"),
        "--sleep-on-idle",
    ]


def launch_command(args: argparse.Namespace, port: int, mode: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port)),
        *("--model-path", str(args.target.resolve()), "--speculative-algorithm", "DDTREE"),
        *("--speculative-draft-model-path", str(args.drafter.resolve())),
        *mode,
        *device_flags(),
        *args.server_flags,
    ]


def show_waiting(waited: float) -> None:
    """A line that counts up in a terminal, a line every 15 s elsewhere."""
    if sys.stdout.isatty():
        print(f"\rwaiting for the server: {waited:.0f} s", end="", flush=True)
    elif int(waited) % 15 == 0:
        print(f"waiting for the server: {waited:.0f} s", flush=True)


def launch(command: list[str], port: int, log: Path, running: list[ServerProcess]) -> ServerProcess:
    """Start a server, remember it in ``running``, and return once it is healthy."""
    server = ServerProcess(command, port, log)
    running.append(server)
    took = server.wait_ready(HEALTH_TIMEOUT_S, show_waiting)
    print(f"{chr(13) if sys.stdout.isatty() else ''}ready after {took:.0f} s" + " " * 20, flush=True)
    return server


def chat(server: ServerProcess, question: str, max_tokens: int) -> dict[str, Any]:
    """One greedy chat completion, with SGLang's meta info."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "return_meta_info": True,
    }
    request = urllib.request.Request(
        server.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        choice = json.load(response)["choices"][0]
    meta = choice["meta_info"]
    rounds = meta["spec_verify_ct"]
    return {
        "text": choice["message"]["content"],
        "tokens": meta["completion_tokens"],
        "rounds": rounds,
        "per_round": (meta["spec_num_correct_drafts"] + rounds) / max(rounds, 1),
        "seconds": time.monotonic() - start,
    }


def check_inputs(args: argparse.Namespace) -> None:
    for flag, folder, remedy in (
        ("--target", args.target, "run: python scripts/smollm2.py"),
        ("--drafter", args.drafter, "check out models/smollm2-135m-dflash"),
    ):
        if not (folder / "config.json").is_file():
            raise ServeError(f"{flag} {folder} holds no model; {remedy}")
    with socket.socket() as probe:
        if probe.connect_ex((HOST, args.port)) == 0:
            raise ServeError(f"--port {args.port} is in use; choose another, e.g. make serve PORT={args.port + 1}")


def report(name: str, answer: dict[str, Any]) -> None:
    print(
        f"{name:6} {answer['per_round']:.2f} tokens committed per round "
        f"({answer['tokens']} tokens in {answer['rounds']} rounds, {answer['seconds']:.1f} s)"
    )


def run(args: argparse.Namespace) -> None:
    check_inputs(args)
    logs = ROOT / ".cache" / "serve"
    tree_mode = ["--speculative-ddtree-topk-cap", str(args.topk_cap)]
    if args.budget:
        tree_mode += ["--speculative-ddtree-budget", args.budget]
    command = launch_command(args, args.port, tree_mode)
    print(shlex.join(command), flush=True)
    running: list[ServerProcess] = []
    try:
        server = launch(command, args.port, logs / "ddtree.log", running)
        tree = chat(server, args.question, args.max_tokens)
        print(f"\n> {args.question}\n\n{tree['text']}\n")
        report("tree", tree)

        print("\nthe same request with DFLASH's chain, for comparison", flush=True)
        port = free_port()
        command = launch_command(args, port, ["--speculative-ddtree-shadow-linear"])
        chain = launch(command, port, logs / "chain.log", running)
        linear = chat(chain, args.question, args.max_tokens)
        chain.stop()
        report("tree", tree)
        report("chain", linear)
        if linear["text"] != tree["text"]:
            print("The two texts differ: expected in bfloat16 alone, where rounding flips close calls.")
        if args.once:
            return
        print(f"\nserving on http://{HOST}:{args.port}/v1 until Ctrl-C; log: {server.log}", flush=True)
        server.process.wait()
        raise ServeError(f"the server ended with exit code {server.process.returncode}:\n{server.log_tail()}")
    finally:
        for launched in running:
            launched.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=ROOT / "models" / "SmolLM2-135M-Instruct")
    parser.add_argument("--drafter", type=Path, default=ROOT / "models" / "smollm2-135m-dflash")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--budget", help="of the tree; left out: the server's default")
    parser.add_argument("--topk-cap", type=int, default=8)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--once", action="store_true", help="end after the comparison")
    parser.add_argument("server_flags", nargs="*", help="after --: more flags for the server")
    # A polite kill stops the servers too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(parser.parse_args())
    except KeyboardInterrupt:
        print("\nstopped")
    except (ServeError, ServerDied) as error:
        print(f"\nserve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
