"""What the tests of Triton kernels share.

Whether Triton compiles or interprets is decided when it is imported. So with TRITON_INTERPRET=1 such a file tests its
kernels on the CPU; without, it starts itself once with that variable, compiles the kernels ahead of time for several
GPUs, and tests them on a CUDA device (marker `gpu`).
"""

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from serving import environment

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).resolve().parents[2]
# Files of this run that are to be interpreted; tests/unit/conftest.py knows.
selected: set[Path] = set()


def assert_passes_in_the_interpreter(file: str) -> None:
    """Run a test file in a process where Triton interprets; nothing in it may be skipped there."""
    own = Path(file).resolve()
    counts, output = _interpreted(tuple(sorted({own, *selected})))
    passed, others = counts.get(own.name, (0, 0))
    assert passed and not others, f"{own.name}: {passed} passed, {others} did not\n{output}"


@functools.cache
def _interpreted(files: tuple[Path, ...]) -> tuple[dict[str, tuple[int, int]], str]:
    """By file: tests that passed and tests that did not; and what was printed.

    One process for all files: to import PyTorch and SGLang takes as long as most files' tests.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={report}"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
        env = environment({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
        run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=2400)
        output = run.stdout[-10_000:] + run.stderr[-2_000:]
        assert report.exists(), output
        counts: dict[str, tuple[int, int]] = {}
        for case in ElementTree.parse(report).iter("testcase"):
            name = Path(case.get("file") or "").name
            passed, others = counts.get(name, (0, 0))
            counts[name] = (passed, others + 1) if len(case) else (passed + 1, others)
    return counts, output


def compile_for(
    arch: int,
    kernel: Any,
    constants: dict[str, Any],
    type_of: Callable[[str], str],
    attributes: dict[Any, Any] | None = None,
    **options: int,
) -> Any:
    """Compile a kernel for a GPU that is not there; ``type_of`` gives Triton's type of each argument by name."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {arg: "constexpr" if arg in constants else type_of(arg) for arg in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
