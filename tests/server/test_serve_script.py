"""`make serve` on a tiny pair: it shows an answer and both rates, and fails fast where it cannot serve."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from pairs import Pair
from serving import HERE, environment, free_port

SCRIPT = HERE.parent / "scripts" / "serve.py"


def run(pair: Pair, *flags: str, timeout: float = 400) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), "--port", str(free_port()), "--target", str(pair.target)]
    command += ["--drafter", str(pair.drafter), "--once", "--max-tokens", "24", *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=timeout)


def test_one_answer_and_both_rates(qwen3: Pair) -> None:
    done = run(qwen3, "--question", "What is a tree?")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "> What is a tree?" in done.stdout
    rates = re.findall(r"^(tree|chain) +(\d+\.\d\d) tokens committed per round", done.stdout, re.MULTILINE)
    assert {name for name, _ in rates} == {"tree", "chain"}
    assert all(float(rate) >= 1 for _, rate in rates)
    assert "two texts differ" not in done.stdout


def test_it_fails_fast_when_the_server_dies(qwen3: Pair) -> None:
    start = time.monotonic()
    done = run(qwen3, "--", "--no-such-flag")
    assert done.returncode == 1
    assert "--no-such-flag" in done.stderr and "exit code 2" in done.stderr
    assert time.monotonic() - start < 120


def test_a_missing_model_is_named(qwen3: Pair, tmp_path: Path) -> None:
    done = run(qwen3, "--target", str(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr and "python scripts/smollm2.py" in done.stderr
