"""Faults put in on purpose: each must be noticed by the test that guards against it.

    make mutations                                      # all of them, about ten minutes on a CPU
    python tests/mutations.py slots_are_not_moved       # one

Exit code 1 if a fault goes unnoticed, or if its test fails for another reason than a failed comparison: the server did
not start, or the fault was never put in.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = "tests/server"
# The fault (tests/plugins/ddtree_mutations.py) -> the test that must fail.
GUARDS = {
    "slots_are_not_moved": f"{SERVER}/test_scripted.py::test_side_branch_twice_in_a_row",
    "siblings_see_each_other": f"{SERVER}/test_scripted.py::test_side_branch_at_every_depth",
    "rows_have_no_headroom": f"{SERVER}/test_http.py::test_near_the_context_limit",
    "the_grammar_is_ignored": f"{SERVER}/test_http.py::test_structured_output",
    "a_run_ends_where_it_ends": f"{SERVER}/test_stops.py::test_every_way_to_end_within_a_run",
    "everyone_is_greedy": f"{SERVER}/test_sampled.py::test_distribution_with_a_drafter_that_is_often_right",
    "the_pool_is_not_bounded": f"{SERVER}/test_pressure.py::test_out_of_memory_in_mid_round",
}


def noticed(mutation: str, test: str) -> str | None:
    """How the test noticed it, in its own words; None if it did not."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            folder + "/t",
            test,
        ]
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"DDTREE_TEST_MUTATION": mutation}, capture_output=True, text=True
        )
        logs = "".join(log.read_text(errors="replace") for log in Path(folder).rglob("*.log"))
    if f"mutation: {mutation}" not in logs:
        raise RuntimeError(f"{mutation} was never put in:\n{run.stdout[-3000:]}")
    if run.returncode == 0:
        return None
    return next((line[1:].strip() for line in run.stdout.splitlines() if line.startswith("E ")), "no word of its own")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mutations", nargs="*", help=f"of {', '.join(GUARDS)}; all by default")
    chosen = parser.parse_args().mutations or list(GUARDS)
    unknown = sorted(set(chosen) - set(GUARDS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(GUARDS)}.")
    failed = 0
    for mutation in chosen:
        words = noticed(mutation, GUARDS[mutation])
        failed += words is None
        print(f"{mutation}: " + ("NOT NOTICED" if words is None else f"noticed: {words[:160]}"), flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
