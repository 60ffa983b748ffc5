"""Real server processes for the tests: start, ask, check the KV pool, stop."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "scripts"))

from launcher import HOST, ServerProcess, free_port  # noqa: E402
from warm_start import WarmParent  # noqa: E402

__all__ = [
    "GPU_ENVIRONMENT",
    "HERE",
    "Server",
    "accepted_drafts_histogram",
    "committed_per_round",
    "environment",
    "free_port",
    "output_ids",
]

START_TIMEOUT_S = 300
# Float32 on a GPU: PyTorch's operators where SGLang's kernels know 16-bit numbers alone, and no rounding of
# Triton's products to TF32. Without effect on a CPU.
GPU_ENVIRONMENT = {"DDTREE_TEST_TORCH_OPS": "1", "TRITON_F32_DEFAULT": "ieee"}


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


class Server(ServerProcess):
    """One ``python -m sglang.launch_server``, and the requests the tests send it.

    Args:
        args: of the command.
        log: the file of its output.
        env: added to the caller's environment.
        parent: forks the server, if not None.
    """

    POLL_S = 0.1

    def __init__(
        self, args: Sequence[str], log: Path, *, env: dict[str, str] | None = None, parent: WarmParent | None = None
    ):
        port = free_port()
        self._parent = parent
        command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port)]
        super().__init__([*command, "--sleep-on-idle", *map(str, args)], port, log, env=environment(env))

    def _start(self, command: Sequence[str], env: dict[str, str] | None) -> Any:
        if self._parent is None:
            return super()._start(command, env)
        # After the interpreter and the module's name.
        return self._parent.start(command[3:], dict(env or {}), self.log)

    def stop(self) -> None:
        """Kill it: SGLang takes six seconds to end when it is asked to, and nothing is left to save."""
        self.kill()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S, on_wait: Any = lambda waited: None) -> float:
        return super().wait_ready(timeout_s, on_wait)

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
        """KV slots in use, without those that only the prefix cache keeps."""
        loads = json.loads(self.get("/v1/loads"))
        return sum(load["num_used_tokens"] for load in loads["loads"])

    def assert_slots_are_back(self, patience_s: float = 30) -> None:
        """Once every request has ended the free slots and those of the prefix cache are all there are."""
        deadline = time.monotonic() + patience_s
        while self.used_tokens() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert self.used_tokens() == 0, "KV slots leaked"

    def flush_cache(self) -> None:
        """Empty the prefix cache; a request that has just been answered may still be finishing, and it is refused."""
        deadline = time.monotonic() + 30
        while True:
            try:
                self.post("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def assert_pool_empty(self) -> None:
        """After the prefix cache is flushed not one slot may be in use."""
        self.flush_cache()
        self.assert_slots_are_back()

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


def accepted_drafts_histogram(answer: dict[str, Any]) -> dict[int, int]:
    """Rounds by number of accepted drafts."""
    counts = answer["meta_info"]["spec_correct_drafts_histogram"]
    return {drafts: rounds for drafts, rounds in enumerate(counts) if rounds}
