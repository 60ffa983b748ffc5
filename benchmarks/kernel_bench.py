"""What the benchmarks of single kernels share: modules by path, CUDA graphs, event times, conditions, results."""

from __future__ import annotations

import csv
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from by_path import load  # noqa: E402

__all__ = ["L2_FLUSH_BYTES", "capture", "conditions", "event_times", "load", "need_gpu", "spread", "write_results"]

L2_FLUSH_BYTES = 256 << 20


def need_gpu(script: str) -> None:
    """
    Raises:
        SystemExit: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise SystemExit(f"{script} measures GPU time: it needs a CUDA device, and torch finds none.")


def capture(body: Callable[[], None], warm_up: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """``body`` as one CUDA graph, after ``warm_up`` has run as often as given on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def event_times(
    run: Callable[[], object],
    samples: int,
    flush: torch.Tensor | None,
    enough: Callable[[int], bool] = lambda taken: False,
) -> list[float]:
    """Microseconds of each sample between CUDA events, ascending.

    Args:
        flush: overwritten before every sample, to clear the L2 cache; None: caches stay warm.
        enough: stops early, asked with the number of samples taken.
    """
    pairs: list[tuple[Any, Any]] = []
    for _ in range(samples):
        if flush is not None:
            flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
        if enough(len(pairs)):
            break
    torch.cuda.synchronize()
    return sorted(1000.0 * start.elapsed_time(end) for start, end in pairs)


def spread(times: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of ascending times."""
    low, high = (times[round(q * (len(times) - 1))] for q in (0.2, 0.8))
    return statistics.median(times), low, high


def conditions(script: str) -> str:
    """GPU, versions, commit and command, in one line."""
    import triton

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {triton.__version__}; commit {commit}; "
        f"`{shlex.join(['python', f'benchmarks/{script}', *sys.argv[1:]])}`"
    )


def write_results(out: Path, row_type: type, rows: list[Any], text: str, plot: Callable[..., bool]) -> None:
    """OUT.csv of the rows (of a dataclass), OUT.md of the text, which is printed too, and OUT.png by ``plot``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([f.name for f in fields(row_type)])
        writer.writerows(astuple(row) for row in rows)
    out.with_suffix(".md").write_text(text)
    print(text)
    if not plot(rows, out.with_suffix(".png"), torch.cuda.get_device_name()):
        print("No PNG: matplotlib is not installed.")
