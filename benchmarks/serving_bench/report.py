"""Results as CSV, Markdown and PNG: conditions, tables, verdicts on targets."""

from __future__ import annotations

import csv
import importlib.metadata
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SMOKE_LABEL = "SMOKE RUN, NOT A BENCHMARK: a tiny random model, to see that everything runs."
_PACKAGES = ("sglang-ddtree", "sglang", "sglang-kernel", "flashinfer-python", "torch", "triton")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def commit() -> str:
    """The commit of this checkout, "+" behind it if tracked files differ from it; "unknown" without git."""
    head = _output("git", "rev-parse", "--short", "HEAD")
    return head + ("+" if head and _output("git", "status", "--porcelain", "--untracked-files=no") else "") or "unknown"


def device() -> str:
    """The GPUs' names and driver, or the processor of a machine without one."""
    lines = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    if not lines:
        return f"no GPU, {platform.machine()}"
    name, _, driver = lines[0].partition(", ")
    return f"{len(lines)} x {name}, driver {driver}"


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in _PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def identity(commit_name: str) -> dict[str, str]:
    """What every kept result depends on."""
    return {"commit": commit_name, "device": device(), "versions": versions()}


def command_line() -> str:
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def conditions(who: dict[str, str]) -> list[str]:
    """The lines above a table."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return [f"{who['device']}; {who['versions']}; commit {who['commit']}; {now}", "", f"    {command_line()}"]


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile (the nearest values)."""
    assert values, "nothing was measured"
    ordered = sorted(values)
    low, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.2, 0.8))
    return statistics.median(ordered), low, high


@dataclass(frozen=True)
class Verdict:
    """One target met or missed."""

    what: str
    got: float
    limit: float
    at_most: bool = False
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.got <= self.limit if self.at_most else self.got >= self.limit

    def __str__(self) -> str:
        relation = "at most" if self.at_most else "at least"
        tail = f" ({self.note})" if self.note else ""
        return f"{'PASS' if self.passed else 'FAIL'}  {self.what}: {self.got:.3f}, target {relation} {self.limit:.3f}{tail}"


Column = tuple[str, Callable[[dict[str, Any]], Any]]


def markdown_table(rows: Sequence[dict[str, Any]], columns: Sequence[Column]) -> str:
    """A cell that its function cannot make for want of a key stays "-"."""
    lines = ["| " + " | ".join(name for name, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = []
        for _, cell in columns:
            try:
                cells.append(str(cell(row)))
            except KeyError:
                cells.append("-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


Line = tuple[str, Sequence[float], Sequence[float]]


def plot_lines(path: Path, title: str, y_name: str, panels: dict[str, list[Line]], *, log_y: bool = False) -> bool:
    """One panel per key, a line per mode over the number of requests. False if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(6 * len(panels), 4.5), sharey=True, squeeze=False)
    for axis, (name, lines) in zip(axes[0], panels.items(), strict=True):
        for mode, xs, ys in lines:
            axis.plot(xs, ys, marker="o", label=mode)
        ticks = sorted({x for _, xs, _ in lines for x in xs})
        axis.set(xscale="log", xlabel="requests", title=name)
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.minorticks_off()
        if log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y_name)
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def settings_table(settings: dict[str, dict[str, Any]], label: Callable[[str], str]) -> str:
    """What each mode's server said about itself."""
    columns: list[Column] = [
        ("server", lambda row: row["mode"]),
        ("decode graphs", lambda row: row["decode_graphs"]),
        ("overlap", lambda row: row["overlap"]),
        ("attention backend", lambda row: row["backend"]),
        ("verify width", lambda row: row["verify_width"]),
        ("page size", lambda row: row["page_size"]),
        ("dtype", lambda row: row["dtype"]),
        ("KV tokens", lambda row: row["kv_tokens"]),
    ]
    return markdown_table([{"mode": label(mode), **found} for mode, found in settings.items() if found], columns)


def write_report(
    out: Path, *, title: str, notes: Sequence[str], tables: Sequence[str], rows: Sequence[dict[str, Any]]
) -> str:
    """Write OUT.csv and OUT.md; returns the Markdown."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_csv(out.with_name(out.name + ".csv"), rows)
    text = "\n\n".join([f"## {title}", "\n".join(notes), *tables]) + "\n"
    out.with_name(out.name + ".md").write_text(text)
    return text
