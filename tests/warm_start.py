"""Servers as forks of one process that has SGLang imported already: they start in a few seconds, not in thirty.

Each of three processes of a server spends ten seconds on imports. A fork runs ``python -m sglang.launch_server`` as it
is, through runpy, and loads the plugins as ever; only its scheduler and its detokenizer are forks of it where SGLang
would spawn them. Servers that are spawned in whole are started by test_modes.py, test_serve_script.py and
test_bench_smoke.py.

Run as a script this is the process that forks: commands are lines of JSON on standard input, and so are the answers.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# CUDA does not survive a fork.
POSSIBLE = not torch.cuda.is_available()
# What a server reads when it runs, not when it is imported, and what pytest changes from test to test.
_READ_AT_RUN_TIME = (
    *("DDTREE_TEST_", "SGLANG_DDTREE_", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "SGLANG_CPU_OMP_THREADS_BIND"),
    "PYTEST_",
)


def _read_at_import(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_READ_AT_RUN_TIME)}


class Forked:
    """A fork of the warm process: as much of ``subprocess.Popen`` as a server needs."""

    def __init__(self, parent: WarmParent, pid: int):
        self._parent, self.pid = parent, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            # A parent that has ended took its forks along.
            self.returncode = self._parent.ask(poll=self.pid) if self._parent.runs else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked server", timeout)
            time.sleep(0.05)
        assert self.returncode is not None
        return self.returncode


class WarmParent:
    """The process that forks, ended with this one."""

    def __init__(self, env: dict[str, str]):
        self.env = env
        self._lock = threading.Lock()
        self._asked = 0
        # Ctrl-C is this process's to handle.
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        atexit.register(self.stop)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """Its standard input ends: it kills its forks and ends. So it does when this process is killed."""
        self._process.communicate()
        atexit.unregister(self.stop)

    def serves(self, env: dict[str, str]) -> bool:
        """Whether a server with this environment would have imported the same."""
        return _read_at_import(env) == _read_at_import(self.env)

    def ask(self, **command: Any) -> Any:
        with self._lock:
            assert self._process.stdin and self._process.stdout
            self._asked += 1
            self._process.stdin.write(json.dumps([self._asked, command]) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, "the process that forks servers has ended"
            number, answer = json.loads(line)
            # A test that timed out may have left an answer unread.
            while number < self._asked:
                number, answer = json.loads(self._process.stdout.readline())
        return answer

    def start(self, args: Sequence[str], env: dict[str, str], log: Path) -> Forked:
        """``python -m sglang.launch_server`` with these arguments, in a process group of its own."""
        return Forked(self, self.ask(args=list(args), env=env, log=str(log)))


def _serve(args: list[str], env: dict[str, str], log: str) -> int:
    import runpy
    import traceback

    os.setsid()
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, copy in ((nothing, 0), (sink, 1), (sink, 2)):
        os.dup2(descriptor, copy)
    os.chdir(os.path.dirname(log))
    # Forks would all draw the same seeds.
    random.seed()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["launch_server.py", *args]
    try:
        runpy.run_module("sglang.launch_server", run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Fork until standard input ends."""
    import multiprocessing

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    from sglang_ddtree import cpu

    # As the plugin does it: before anything of SGLang is imported.
    if cpu.needs_stand_ins():
        cpu.install()
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  every model's module

    choose = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method=None, force=False: choose("fork", force)

    codes: dict[int, int | None] = {}

    def end(*_: Any) -> None:
        for pid, code in codes.items():
            if code is None:
                # Both: a fork that has just begun leads no group yet.
                for kill in (os.killpg, os.kill):
                    with contextlib.suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
        # To take down what was imported takes seconds.
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    try:
        for line in sys.stdin:
            number, command = json.loads(line)
            if "poll" in command:
                pid = command["poll"]
                if codes[pid] is None:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
                answer = codes[pid]
            else:
                answer = os.fork()
                if answer == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    answers.close()
                    code = _serve(**command)
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
                codes[answer] = None
            answers.write(json.dumps([number, answer]) + "\n")
            answers.flush()
    finally:
        # Also where nobody reads an answer any more.
        end()


if __name__ == "__main__":
    main()
