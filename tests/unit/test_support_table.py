"""The README's support table says what the tests' markers and the record of GPU runs say, and nothing else."""

from __future__ import annotations

import ast

import pytest
from _load import ROOT, load

table = load("support_table", "scripts/support_table.py")

RECORD = table.Record({"tests/a.py": "0abc", "tests/b.py::test_one": "0abc"}, {"tests/a.py::test_left_out"})


def shown(source: str) -> set[tuple[str, str | None, tuple[str, ...], str]]:
    return {(mark.feature, mark.refused, mark.on, mark.test) for mark in table.shown_by(source, "t.py")}


def test_the_readme_is_up_to_date() -> None:
    record = table.read_record(table.RECORD.read_text())
    expected = table.replaced(table.README.read_text(), table.render(table.collect(), record))
    assert table.README.read_text() == expected, "run make support-table"


def test_the_record_names_tests_that_exist() -> None:
    record = table.read_record(table.RECORD.read_text())
    for name in {*record.passed, *record.missing}:
        path, _, test = name.partition("::")
        functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert not test or test in functions, name


def test_markers_are_found_wherever_pytest_takes_them() -> None:
    source = """
import pytest
CASES = [pytest.param(1, marks=pytest.mark.feature("listed", refused="no"))]
UNUSED = [1]

@pytest.mark.feature("plain")
@pytest.mark.feature("second", on="cpu")
def test_plain():
    pass

@pytest.mark.gpu
@pytest.mark.feature("on a GPU")
def test_gpu():
    pass

@pytest.mark.parametrize("x", CASES)
def test_cases(x):
    pass

@pytest.mark.parametrize("x", [pytest.param(1, marks=[pytest.mark.feature("in place", refused="also " "no")])])
def test_in_place(x):
    pass

def helper():
    pass
"""
    both = ("cpu", "gpu")
    assert shown(source) == {
        ("plain", None, both, "t.py::test_plain"),
        ("second", None, ("cpu",), "t.py::test_plain"),
        ("on a GPU", None, ("gpu",), "t.py::test_gpu"),
        ("listed", "no", both, "t.py::test_cases"),
        ("in place", "also no", both, "t.py::test_in_place"),
    }
    everywhere = "pytestmark = [pytest.mark.gpu, pytest.mark.feature('all')]\ndef test_a(): pass\ndef test_b(): pass"
    assert shown(everywhere) == {("all", None, ("gpu",), f"t.py::test_{name}") for name in "ab"}


@pytest.mark.parametrize(
    "marker",
    ["feature", "feature()", "feature(name)", "feature('x', refused=1)", "feature('x', on='tpu')", "feature('x', y=1)"],
)
def test_a_marker_that_cannot_be_read(marker: str) -> None:
    with pytest.raises(ValueError, match="t.py::test_a: expected feature"):
        shown(f"@pytest.mark.{marker}\ndef test_a(): pass")


def test_a_marker_on_nothing_that_is_a_test() -> None:
    with pytest.raises(ValueError, match=r"t.py: feature markers on nothing that is a test, in the lines \[1\]"):
        shown("@pytest.mark.feature('x')\ndef helper(): pass")


def test_the_record() -> None:
    text = "# words\n\n0abc tests/a.py  # why\nnot tests/a.py::test_left_out\n0abc tests/b.py::test_one\n"
    assert table.read_record(text) == RECORD
    assert RECORD.holds("tests/a.py::test_any") and RECORD.holds("tests/b.py::test_one")
    assert not RECORD.holds("tests/a.py::test_left_out") and not RECORD.holds("tests/b.py::test_two")
    for wrong in ("yes tests/a.py", "0abc", "0abc a b"):
        with pytest.raises(ValueError, match="gpu-tests.txt:1: expected a commit"):
            table.read_record(wrong)


def mark(feature: str, test: str, refused: str | None = None, on: tuple[str, ...] = ("cpu", "gpu")) -> table.Shown:
    return table.Shown(feature, refused, on, test)


def test_a_feature_has_run_on_a_gpu_if_all_its_tests_have() -> None:
    marks = [mark("x", "tests/a.py::test_any"), mark("x", "tests/b.py::test_one")]
    assert [table.cell(marks, device, RECORD) for device in ("cpu", "gpu")] == ["works", "works"]
    marks.append(mark("x", "tests/b.py::test_two"))
    assert [table.cell(marks, device, RECORD) for device in ("cpu", "gpu")] == ["works", "not run yet"]
    # What a CPU alone shows does not wait for a GPU, and the other way round.
    assert table.cell([*marks[:2], mark("x", "tests/b.py::test_two", on=("cpu",))], "gpu", RECORD) == "works"
    assert table.cell([mark("x", "tests/a.py::test_any", on=("gpu",))], "cpu", RECORD) == "-"


def test_tests_that_contradict_each_other() -> None:
    marks = [mark("x", "tests/a.py::test_any"), mark("x", "tests/a.py::test_other", refused="no")]
    with pytest.raises(ValueError, match="'x' on cpu: tests show different things"):
        table.cell(marks, "cpu", RECORD)


def test_rows() -> None:
    a = "tests/a.py::test_any"
    marks = [
        mark("`--b`", a, refused="not here", on=("cpu",)),
        mark("`--b`", a, on=("gpu",)),
        mark("C", a, refused="one | two"),
        mark("a", a),
        mark("d", "tests/b.py::test_two", refused="no"),
    ]
    lines = table.render(marks, RECORD).splitlines()
    assert [line for line in lines if line.startswith("| ")][1:3] == [
        "| a | works | works |",
        "| `--b` | refused: not here | works |",
    ]
    assert lines[-2:] == ["| C | refused: one \\| two | the same |", "| d | refused: no | not run yet |"]
    readme = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    assert table.replaced(readme, "new") == f"before\n{table.BEGIN}\nnew\n{table.END}\nafter\n"
    with pytest.raises(ValueError, match="README.md needs the lines"):
        table.replaced("before after", "new")
