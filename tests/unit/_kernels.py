"""What the tests of Triton kernels share.

Whether Triton compiles or interprets is decided when it is imported. So with TRITON_INTERPRET=1 such a file tests its
kernels on the CPU; without, it starts itself once with that variable, compiles the kernels ahead of time for several
GPUs, and tests them on a CUDA device (marker `gpu`).
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving import environment

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
ROOT = Path(__file__).resolve().parents[2]


def assert_passes_in_the_interpreter(file: str, timeout: int = 600) -> None:
    """Run one test file in a process where Triton interprets; nothing in it may be skipped there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(file).resolve())]
    env = environment({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    summary = run.stdout.strip().splitlines()[-1:]
    assert run.returncode == 0, run.stdout[-10_000:] + run.stderr[-2_000:]
    assert "passed" in summary[0] and "skipped" not in summary[0], summary


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
