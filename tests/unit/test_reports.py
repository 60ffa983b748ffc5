"""docs/reports.md: every public report has a test, the test exists, and it names the report."""

from __future__ import annotations

import ast
import re

import pytest
from _load import ROOT, load

REPORTS = (ROOT / "docs" / "reports.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in REPORTS.partition("\n## ")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| report")
]
# `test_file.py::test_name`; a name without a file is in the file before it.
TEST = re.compile(r"`(?:(test_\w+\.py)::)?(test_\w+)`")
REPORT = re.compile(r"#\d+")


def sources(cell: str) -> dict[str, str]:
    """The tests that a cell of the table names: their text, with the comments above them."""
    found, file = {}, ""
    for named, test in TEST.findall(cell):
        file = named or file
        (path,) = (ROOT / "tests").rglob(file)
        lines = path.read_text().splitlines()
        functions = [node for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.FunctionDef)]
        (function,) = (node for node in functions if node.name == test)
        start = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        while lines[start - 2].startswith("#"):
            start -= 1
        text = "\n".join(lines[start - 1 : function.end_lineno])
        # Cases can be listed beside a test, the module's own docstring speaks for all of its tests.
        names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and node.id.isupper()}
        for node in ast.parse("\n".join(lines)).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names:
                text += "\n".join(lines[node.lineno - 1 : node.end_lineno])
        found[f"{file}::{test}"] = text + (ast.get_docstring(ast.parse("\n".join(lines))) or "")
    return found


@pytest.mark.parametrize("report, fault, tests", ROWS, ids=[row[0] for row in ROWS])
def test_a_report_has_a_test_that_names_it(report: str, fault: str, tests: str) -> None:
    texts = sources(tests)
    assert texts, "no test named"
    for number in REPORT.findall(report):
        assert any(number in text for text in texts.values()), f"{number} is in none of {sorted(texts)}"


def test_every_fault_has_a_guard_that_is_named() -> None:
    guards = load("mutations", "tests/mutations.py").GUARDS
    faults = load("ddtree_mutations", "tests/plugins/ddtree_mutations.py").MUTATIONS
    assert set(guards) == set(faults)
    table = REPORTS.partition("## Faults put in on purpose")[2]
    for guard in guards.values():
        file, _, name = guard.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()
        assert f"`{file.rpartition('/')[2]}::{name}`" in table
