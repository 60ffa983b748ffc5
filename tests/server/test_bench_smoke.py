"""One benchmark from end to end with a tiny model: a server, timed rounds, files; what it kept serves the next one."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from serving import HERE, environment

BENCHMARKS = HERE.parent / "benchmarks"


def run(script: str, out: Path, *flags: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--smoke", "--out", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rounds_are_timed_and_kept_for_the_simulation(tmp_path: Path) -> None:
    shown = run("bench_round.py", tmp_path / "round", "--only", "ddtree-7", "--requests", "1", "2")
    assert "SMOKE RUN" in shown and "starting a server" in shown
    with (tmp_path / "round.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["requests"], row["mode"], row["label"]) for row in rows] == [
        ("1", "ddtree-7", "smoke run"),
        ("2", "ddtree-7", "smoke run"),
    ]
    for row in rows:
        assert 0 < float(row["p20_ms"]) <= float(row["ms_per_round"]) <= float(row["p80_ms"])
        # Each round commits 3 or 4 tokens, 3.531 in the mean: the simulation is honoured.
        assert 3 <= float(row["committed_per_round"]) <= 4
        speed = int(row["requests"]) * 3531 / float(row["mean_ms"])
        assert float(row["tokens_per_s"]) == pytest.approx(speed)

    shown = run("bench_simulated.py", tmp_path / "simulated", "--only", "ddtree-7", "--requests", "1", "2")
    assert "starting a server" not in shown and "SIMULATED" in shown
    assert f"{float(rows[0]['tokens_per_s']):.0f}" in (tmp_path / "simulated.md").read_text()
