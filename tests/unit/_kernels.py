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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from serving import environment

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).resolve().parents[2]


class Interpreter:
    """One process for all files: to import PyTorch and SGLang takes as long as most files' tests.

    It runs beside the tests of this process, of which those that want its outcome come last: two cores are busy.
    """

    def __init__(self, files: Iterable[Path]):
        self.files = sorted(files)
        self.folder = tempfile.TemporaryDirectory()
        self.report, self.output = Path(self.folder.name) / "report.xml", Path(self.folder.name) / "output.txt"
        options = ["-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", f"--junitxml={self.report}"]
        command = [sys.executable, "-m", "pytest", *options, *map(str, self.files)]
        env = environment({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
        with self.output.open("w") as sink:
            self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=sink, stderr=subprocess.STDOUT)

    @functools.cache  # noqa: B019  one instance
    def outcome(self) -> tuple[dict[str, tuple[int, int]], str]:
        """By file: tests that passed and tests that did not; and what was printed."""
        try:
            # It began before the first of this process's tests, and a test may take 900 s.
            self.process.wait(800)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        output = self.output.read_text()[-12_000:]
        assert self.report.exists(), output
        counts: dict[str, tuple[int, int]] = {}
        for case in ElementTree.parse(self.report).iter("testcase"):
            name = Path(case.get("file") or "").name
            passed, others = counts.get(name, (0, 0))
            counts[name] = (passed, others + 1) if len(case) else (passed + 1, others)
        return counts, output

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


# Started by conftest.py, for the files of this run that are to be interpreted.
interpreter: Interpreter | None = None


def assert_passes_in_the_interpreter(file: str) -> None:
    """A test file in a process where Triton interprets; nothing in it may be skipped there."""
    own = Path(file).resolve()
    assert interpreter is not None and own in interpreter.files
    counts, output = interpreter.outcome()
    passed, others = counts.get(own.name, (0, 0))
    assert passed and not others, f"{own.name}: {passed} passed, {others} did not\n{output}"


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
