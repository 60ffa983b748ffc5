#!/usr/bin/env python3
"""The README's support table, made of the tests' ``feature`` markers.

    python scripts/support_table.py            # rewrite the table in README.md
    python scripts/support_table.py --check    # exit code 1 if the README has another one

A test that shows a feature carries ``@pytest.mark.feature("name")``; one that shows a refusal carries the message too:
``@pytest.mark.feature("name", refused="message")``. ``on="cpu"`` or ``on="gpu"``: it shows this for one device alone.
The markers are read from the source, so that neither PyTorch nor SGLang is imported; every argument is a literal.

A feature is in the CPU's column if a test that carries it runs on a CPU, that is without the marker ``gpu``. It is in
the GPU's column if all its tests that can run there have passed there: docs/gpu-tests.txt lists those, a line each,

    <commit> <file>[::<test>]     passed on a GPU at this commit
    not <file>::<test>            of a file that is listed: this test did not run

Without such a line a feature is "not run yet" on a GPU.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RECORD = ROOT / "docs" / "gpu-tests.txt"
BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
DEVICES = ("cpu", "gpu")
NOT_RUN, NOTHING, SAME = "not run yet", "-", "the same"


@dataclasses.dataclass(frozen=True)
class Shown:
    """One marker on one test."""

    feature: str
    refused: str | None
    """The message of a refusal; None: the feature works."""
    on: tuple[str, ...]
    """The devices for which the test shows it: "cpu", "gpu"."""
    test: str
    """File, from the repository's root, and function: ``tests/server/test_http.py::test_chat``."""

    @property
    def says(self) -> str:
        return "works" if self.refused is None else f"refused: {self.refused}"


@dataclasses.dataclass
class Record:
    """What has passed on a GPU."""

    passed: dict[str, str]
    """A file or a test -> the commit."""
    missing: set[str]
    """Tests of listed files that did not run."""

    def holds(self, test: str) -> bool:
        return test not in self.missing and (test in self.passed or test.partition("::")[0] in self.passed)


def read_record(text: str) -> Record:
    """The record in docs/gpu-tests.txt.

    Raises:
        ValueError: a line is neither a commit nor "not" with a file or test behind it.
    """
    record = Record({}, set())
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        known = len(words) == 2 and (words[0] == "not" or set(words[0]) <= set("0123456789abcdef"))
        if not known:
            raise ValueError(f"{RECORD.name}:{number}: expected a commit or 'not', then a file or test, got {line!r}.")
        if words[0] == "not":
            record.missing.add(words[1])
        else:
            record.passed[words[1]] = words[0]
    return record


def marks(node: ast.AST, name: str) -> Iterator[ast.expr]:
    """Every use of ``pytest.mark.<name>`` under ``node``: the call with its arguments, or the bare attribute."""
    if isinstance(node, ast.Call) and is_mark(node.func, name):
        yield node
    elif isinstance(node, ast.expr) and is_mark(node, name):
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from marks(child, name)


def is_mark(node: ast.expr, name: str) -> bool:
    return ast.unparse(node) == f"pytest.mark.{name}" if isinstance(node, ast.Attribute) else False


def shown_by(source: str, path: str) -> list[Shown]:
    """The markers of one test file.

    Args:
        source: the file's text.
        path: its name from the repository's root.
    Raises:
        ValueError: a marker is not of the form that this file's header describes, or on nothing that is a test.
    """
    tree = ast.parse(source)
    # Cases can be listed beside a test: a decorator then names the list.
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    everywhere = values.get("pytestmark", ast.List(elts=[]))
    found, used = [], set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
            continue
        where: list[ast.AST] = [*function.decorator_list, everywhere]
        names = {node.id for place in where for node in ast.walk(place) if isinstance(node, ast.Name)}
        where += [values[name] for name in names if name in values and name != "pytestmark"]
        needs_gpu = any(True for place in (*function.decorator_list, everywhere) for _ in marks(place, "gpu"))
        for call in (call for place in where for call in marks(place, "feature")):
            used.add(call)
            found.append(read_mark(call, f"{path}::{function.name}", needs_gpu))
    lost = [call.lineno for call in marks(tree, "feature") if call not in used]
    if lost:
        raise ValueError(f"{path}: feature markers on nothing that is a test, in the lines {lost}.")
    return found


def read_mark(call: ast.expr, test: str, needs_gpu: bool) -> Shown:
    try:
        assert isinstance(call, ast.Call)
        (feature,) = (ast.literal_eval(argument) for argument in call.args)
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        on = options.pop("on", None)
        refused = options.pop("refused", None)
        assert isinstance(feature, str) and isinstance(refused, (str, type(None))) and not options
        assert on is None or on in DEVICES
    except (AssertionError, ValueError) as error:
        got = ast.unparse(call)
        raise ValueError(
            f'{test}: expected feature("name", refused="message", on="cpu" or "gpu"), got {got}.'
        ) from error
    devices = (on,) if on else ("gpu",) if needs_gpu else DEVICES
    return Shown(feature, refused, devices, test)


def collect(folder: Path = ROOT / "tests") -> list[Shown]:
    """The markers of all tests under ``folder``."""
    paths = sorted(folder.rglob("test_*.py"))
    return [mark for path in paths for mark in shown_by(path.read_text(), path.relative_to(ROOT).as_posix())]


def cell(shown: list[Shown], device: str, record: Record) -> str:
    """What the table says of one feature on one device.

    Raises:
        ValueError: the tests show different things.
    """
    here = [mark for mark in shown if device in mark.on]
    if not here:
        return NOTHING
    says = {mark.says for mark in here}
    if len(says) > 1:
        raise ValueError(f"{here[0].feature!r} on {device}: tests show different things: {sorted(says)}.")
    if device == "gpu" and not all(record.holds(mark.test) for mark in here):
        return NOT_RUN
    return says.pop()


def render(shown: list[Shown], record: Record) -> str:
    """Two Markdown tables: what works on some device, and what is refused wherever it was tried."""
    features: dict[str, list[Shown]] = {}
    for mark in sorted(shown, key=lambda mark: mark.feature.strip("`-").lower()):
        features.setdefault(mark.feature, []).append(mark)
    works: list[str] = []
    refused: list[str] = []
    for feature, of_it in features.items():
        cells = [cell(of_it, device, record) for device in DEVICES]
        if cells[0] == cells[1] != "works" and cells[0] not in (NOTHING, NOT_RUN):
            cells[1] = SAME
        row = " | ".join(text.replace("|", "\\|") for text in (feature, *cells))
        (works if any(mark.refused is None for mark in of_it) else refused).append(f"| {row} |")
    head = ["| | CPU | GPU |", "|---|---|---|"]
    lines = [*head, *works]
    if refused:
        lines += ["", "Refused at start, a request with HTTP 400, in these words:", "", *head, *refused]
    return "\n".join(lines)


def replaced(readme: str, table: str) -> str:
    """The README with ``table`` between its two marks.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN} and {END}.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if README.md is out of date")
    args = parser.parse_args()
    before = README.read_text()
    after = replaced(before, render(collect(), read_record(RECORD.read_text())))
    if args.check and after != before:
        print("README.md: the support table is out of date. Run make support-table.", file=sys.stderr)
        return 1
    if after != before:
        README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
