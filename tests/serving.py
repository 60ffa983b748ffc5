"""Real server processes for the tests: start, ask, check the KV pool, stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 300
# Float32 on a GPU: PyTorch's operators where SGLang's kernels know 16-bit numbers alone, and no rounding of
# Triton's products to TF32. Without effect on a CPU.
GPU_ENVIRONMENT = {"DDTREE_TEST_TORCH_OPS": "1", "TRITON_F32_DEFAULT": "ieee"}


class ServerDied(RuntimeError):
    """The process ended or stayed silent; the message ends with the log's tail."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The caller's environment with the tests' folder importable and nothing fetched from a hub."""
    values = dict(os.environ, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    # What the plugin must arrange by itself is not inherited from a test process that already has it.
    values.pop("SGLANG_USE_CPU_ENGINE", None)
    extra = dict(extra or {})
    if "PYTHONPATH" in extra and values.get("PYTHONPATH"):
        extra["PYTHONPATH"] += os.pathsep + values["PYTHONPATH"]
    values.update(extra)
    return values


class Server:
    """One ``python -m sglang.launch_server`` in a process group of its own."""

    def __init__(self, args: Sequence[str], log: Path, *, env: dict[str, str] | None = None):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--sleep-on-idle", *map(str, args)]
        with log.open("w") as sink:
            self.process = subprocess.Popen(
                command,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment(env),
                cwd=log.parent,
                start_new_session=True,
            )

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_ready(self) -> Server:
        """Return once a request would be answered.

        Raises:
            ServerDied: the process ended, or was not ready in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerDied(f"exit code {self.process.returncode}\n{self.log_tail()}")
            try:
                self.get("/health", timeout=20)
                return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.stop()
        raise ServerDied(f"not ready after {START_TIMEOUT_S} s\n{self.log_tail()}")

    def stop(self) -> None:
        """End the whole process group, politely first."""
        for sign, patience in ((signal.SIGTERM, 15), (signal.SIGKILL, 15)):
            try:
                os.killpg(self.process.pid, sign)
            except ProcessLookupError:
                break
            try:
                self.process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        # Children that outlived the leader.
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def get(self, path: str, timeout: float = 60) -> str:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as response:
            return response.read().decode()

    def post(self, path: str, body: Any, timeout: float = 600) -> Any:
        """POST JSON; returns the decoded answer.

        Raises:
            urllib.error.HTTPError: with the status of a refused request.
        """
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            return text

    def refused(self, path: str, body: Any) -> tuple[int, str]:
        """The status and text of a request that must be refused."""
        try:
            answer = self.post(path, body)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        raise AssertionError(f"the request was answered: {answer}")

    def generate(self, input_ids: Sequence[Sequence[int]], **sampling: Any) -> list[dict[str, Any]]:
        """``/generate`` for a batch of prompts; greedy unless told otherwise."""
        params = {"temperature": 0, "max_new_tokens": 32, **sampling}
        return self.post("/generate", {"input_ids": [list(p) for p in input_ids], "sampling_params": params})

    def used_tokens(self) -> int:
        """KV slots in use, the prefix cache's counted."""
        loads = json.loads(self.get("/v1/loads"))
        return sum(load["num_used_tokens"] for load in loads["loads"])

    def assert_pool_empty(self) -> None:
        """After the prefix cache is flushed not one slot may be in use."""
        deadline = time.monotonic() + 30
        while True:
            try:
                self.post("/flush_cache", {})
                break
            except urllib.error.HTTPError:  # refused while requests are finishing
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        while self.used_tokens() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert self.used_tokens() == 0, "KV slots leaked"

    def client(self) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url + "/v1", api_key="unused", max_retries=0)


def output_ids(answers: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def committed_per_round(answers: Sequence[dict[str, Any]]) -> float:
    """Committed tokens per verify round over all answers; the prefill's token is not counted."""
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    drafts = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    return (drafts + rounds) / rounds


def run_to_failure(args: Sequence[str], *, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Start a server that must refuse its arguments; its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", *map(str, args)],
        capture_output=True,
        text=True,
        env=environment(env),
        timeout=START_TIMEOUT_S,
        start_new_session=True,
    )
    return done.returncode, done.stdout + done.stderr
