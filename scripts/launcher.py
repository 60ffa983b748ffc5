"""A server in a process group of its own: start, wait for health with a bound, stop with all its children."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"


class ServerDied(RuntimeError):
    """The process ended or never became healthy; the message ends with the log's tail."""


# Below every system's range of ephemeral ports (Linux starts at 32768): a port from that range can become the near end
# of somebody's outgoing connection between this check and the server's own bind, half a minute later.
_PORTS = range(20000, 32000)
_issued: set[int] = set()


def free_port() -> int:
    """A port of this machine that nothing listens on, never the same one twice in this process.

    Raises:
        RuntimeError: none was found.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        if port in _issued:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _issued.add(port)
        return port
    raise RuntimeError(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}.")


class ServerProcess:
    """One running launch command, its output in a log file."""

    POLL_S = 1.0

    def __init__(self, command: Sequence[str], port: int, log: Path, *, env: dict[str, str] | None = None):
        self.port, self.log = port, log
        self.url = f"http://{HOST}:{port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        self.process = self._start(command, env)

    def _start(self, command: Sequence[str], env: dict[str, str] | None) -> Any:
        """The process: a ``subprocess.Popen``, or what can do the same."""
        with self.log.open("w") as sink:
            return subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=env, cwd=self.log.parent, start_new_session=True
            )

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_ready(self, timeout_s: float, on_wait: Callable[[float], None] = lambda waited: None) -> float:
        """Return the seconds it took until /health answered; ``on_wait`` hears of every attempt before.

        Raises:
            ServerDied: the process ended, or was not healthy in time (it is stopped then).
        """
        start = time.monotonic()
        while (waited := time.monotonic() - start) < timeout_s:
            if self.process.poll() is not None:
                raise ServerDied(
                    f"the server died with exit code {self.process.returncode}; the end of {self.log}:\n"
                    f"{self.log_tail()}"
                )
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=20):
                    return waited
            except (urllib.error.URLError, OSError):
                on_wait(waited)
                time.sleep(self.POLL_S)
        self.stop()
        raise ServerDied(
            f"the server was not healthy after {timeout_s:.0f} s; the end of {self.log}:\n{self.log_tail()}"
        )

    def stop(self) -> None:
        """Ask the server to end, which lets its requests end first; kill what is left after a while.

        The signal goes to the leader alone: to SGLang a child that ends by itself has crashed, and it writes of that.
        """
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.kill(self.process.pid, signal.SIGTERM)
            self.process.wait(15)
        self.kill()

    def kill(self) -> None:
        """End the whole process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
