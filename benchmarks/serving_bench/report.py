"""Results as CSV, Markdown and PNG: conditions, tables, verdicts on targets."""

from __future__ import annotations

import csv
import hashlib
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

from serving_bench.servers import ROOT, label

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


def identity() -> dict[str, str]:
    """What every kept result depends on: the device, the packages and this package's own code."""
    code = hashlib.sha256()
    for path in sorted((ROOT / "python").rglob("*.py")):
        code.update(path.read_bytes())
    return {"device": device(), "versions": versions(), "code": code.hexdigest()[:12]}


def command_line() -> str:
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", name, *sys.argv[1:]])


def conditions(who: dict[str, str], commit_name: str | None) -> list[str]:
    """The lines above a table; ``commit_name`` stands in where this is no checkout."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    made_from = f"commit {commit_name or commit()}, code {who['code']}"
    return [f"{who['device']}; {who['versions']}; {made_from}; {now}", "", f"    {command_line()}"]


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
        word, relation = "PASS" if self.passed else "FAIL", "at most" if self.at_most else "at least"
        note = f" ({self.note})" if self.note else ""
        return f"{word}  {self.what}: {self.got:.3f}, target {relation} {self.limit:.3f}{note}"


Rows = Sequence[dict[str, Any]]
Column = tuple[str, Callable[[dict[str, Any]], Any]]


def markdown_table(rows: Rows, columns: Sequence[Column]) -> str:
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


def write_csv(path: Path, rows: Rows) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


Line = tuple[str, Sequence[float], Sequence[float]]


def plot_lines(path: Path, title: str, y_name: str, panels: dict[str, list[Line]]) -> bool:
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
        axis.set(xscale="log", yscale="log", xlabel="requests", title=name)
        axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axis.xaxis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y_name)
    axes[0][-1].legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def settings_table(settings: dict[str, dict[str, Any]]) -> str:
    """What each mode's server said about itself."""
    columns: list[Column] = [
        ("server", lambda row: row["mode"]),
        ("decode graphs, asked for", lambda row: row["decode_graphs"]),
        ("graphs captured", lambda row: row["captured"]),
        ("overlap", lambda row: row["overlap"]),
        ("attention backend", lambda row: row["backend"]),
        ("verify width", lambda row: row["verify_width"]),
        ("page size", lambda row: row["page_size"]),
        ("dtype", lambda row: row["dtype"]),
        ("KV tokens", lambda row: row["kv_tokens"]),
    ]
    return markdown_table([{"mode": label(mode), **found} for mode, found in settings.items() if found], columns)


def ratio(rows: Rows, key: str, over: str, under: str, **where: Any) -> float | None:
    """``key`` of one mode over that of another in the rows that ``where`` describes, None if either is missing."""
    here = [row for row in rows if key in row and all(row[name] == value for name, value in where.items())]
    values = {row["mode"]: row[key] for row in here}
    return values[over] / values[under] if over in values and under in values else None


def lines_of(rows: Rows, key: str) -> dict[str, list[Line]]:
    """Panels for ``plot_lines``: one per context, a single one where rows name none."""
    panels: dict[str, list[Line]] = {}
    for context in dict.fromkeys(row.get("context") for row in rows):
        here = [row for row in rows if row.get("context") == context and key in row]
        panels["" if context is None else f"prompts of {context} tokens"] = [
            (
                label(mode),
                [row["requests"] for row in here if row["mode"] == mode],
                [row[key] for row in here if row["mode"] == mode],
            )
            for mode in dict.fromkeys(row["mode"] for row in here)
        ]
    return panels


def problems(rows: Rows) -> str:
    """Everything that was not measured, one line per mode and reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "error" in row:
            point = f"{row['requests']}" + (f" x {row['context']}" if "context" in row else "")
            found.setdefault((row["mode"], row["error"]), []).append(point)
    lines = [f"- {label(mode)}, {', '.join(points)} requests: {error}" for (mode, error), points in found.items()]
    return "\n".join(["Not measured:", "", *lines]) if lines else ""


@dataclass(frozen=True)
class Report:
    """Everything a benchmark shows; ``write`` makes the files."""

    title: str
    model: str
    notes: Sequence[str]
    tables: Sequence[str]
    rows: Rows
    settings: dict[str, dict[str, Any]]
    verdicts: Sequence[Verdict]
    y_name: str
    y_key: str
    smoke: bool

    def markdown(self, head: Sequence[str]) -> str:
        """``head`` are the conditions' lines."""
        targets = "\n".join(f"- {verdict}" for verdict in self.verdicts)
        if self.smoke:
            targets = "Targets are not judged in a smoke run."
        notes = [*([SMOKE_LABEL, ""] if self.smoke else []), *head, "", *self.notes]
        title = self.title + (" (smoke run)" if self.smoke else "")
        parts = [f"## {title}", "\n".join(notes), *self.tables, targets]
        parts += [settings_table(self.settings), problems(self.rows)]
        return "\n\n".join(part for part in parts if part) + "\n"

    def write(self, out: Path, commit_name: str | None) -> None:
        """Write OUT.csv, OUT.md and, where matplotlib is installed, OUT.png; print the Markdown."""
        out.parent.mkdir(parents=True, exist_ok=True)
        kind = "smoke run" if self.smoke else self.title
        write_csv(out.with_name(out.name + ".csv"), [{**row, "label": kind} for row in self.rows])
        text = self.markdown(conditions(identity(), commit_name))
        out.with_name(out.name + ".md").write_text(text)
        print("\n" + text)
        title = f"{SMOKE_LABEL if self.smoke else self.title}\n{self.model}; {device()}"
        panels = {name: lines for name, lines in lines_of(self.rows, self.y_key).items() if lines}
        if panels and not plot_lines(out.with_name(out.name + ".png"), title, self.y_name, panels):
            print("No PNG: matplotlib is not installed.")
