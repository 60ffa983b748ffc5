"""A tiny target, its drafter, and the servers on them, shared by the tests.

An idle server sleeps, but keeps some 2 GB: the least recently used ones make room.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import tiny_models
import torch
import warm_start
from serving import GPU_ENVIRONMENT, HERE, Server, environment, output_ids
from warm_start import WarmParent

CONTEXT = 512
BLOCK_SIZE = 8
COMMON = (
    *("--dtype", "float32", "--max-total-tokens", "6000", "--max-running-requests", "16"),
    *("--random-seed", "7"),
    # A GPU's default backend may know no float32.
    *(("--attention-backend", "triton") if torch.cuda.is_available() else ()),
    # Prefill graphs take a minute to compile: only where they are asked for.
    *(
        ("--cuda-graph-backend-prefill", "disabled")
        if torch.cuda.is_available() and not os.environ.get("DDTREE_TEST_PREFILL_GRAPHS")
        else ()
    ),
)


# The round as a GPU runs it, where there is none: kernels that Triton interprets, and overlap scheduling.
DEVICE_ROUND = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "DDTREE_TEST_CPU_OVERLAP": "1"}


# One thread: two that wait for each other lose more than tiny matrices gain.
ENVIRONMENT = {"PYTHONPATH": str(HERE / "plugins"), "OMP_NUM_THREADS": "1", **GPU_ENVIRONMENT}
# The environments of so many servers that a process with their imports is worth its start.
_SHARED: tuple[dict[str, str], ...] = ({}, DEVICE_ROUND)
_parents: list[WarmParent] = []
_parents_lock = threading.Lock()


def parent_of(env: dict[str, str]) -> WarmParent | None:
    """Who forks a server with this environment; None where it is to be spawned."""
    if not warm_start.POSSIBLE:
        return None
    with _parents_lock:
        if not _parents:
            _parents.extend([WarmParent(environment(ENVIRONMENT | own)) for own in _SHARED])
    return next((parent for parent in _parents if parent.serves(environment(env))), None)


def greedy(target: Path, prompt: list[int], tokens: int) -> list[int]:
    """The target's greedy continuation, with transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def _set_end(target: Path) -> tuple[list[int], int]:
    """Make a token that the target says within an accepted run its end of sequence.

    Returns:
        The prompt, and the index of that token in its greedy continuation: neither the first token of a round that
        accepts all drafts nor its last.
    """
    for trial in range(100):
        prompt = list(b"the end comes in mid-path %d" % trial)
        tokens = greedy(target, prompt, 40)
        for index in range(BLOCK_SIZE, 40):
            # One token from prefill, then BLOCK_SIZE a round.
            if tokens[index] not in tokens[:index] and (index - 1) % BLOCK_SIZE in range(2, BLOCK_SIZE - 2):
                for name in ("config.json", "generation_config.json"):
                    path = target / name
                    content = json.loads(path.read_text())
                    content["eos_token_id"] = tokens[index]
                    path.write_text(json.dumps(content))
                return prompt, index
    raise AssertionError("no prompt whose continuation brings a new token late enough")


MAX_RUNNING = 4
# Of all pairs, the least recently used first.
_running: dict[tuple[Path, str], Server] = {}


def running_servers() -> list[Server]:
    return list(_running.values())


def stop_all() -> None:
    while _running:
        _running.popitem()[1].stop()


def stop_parents() -> None:
    while _parents:
        _parents.pop().stop()


def assert_slots_are_back() -> None:
    """No running server has lost a KV slot. One that has is stopped, so that one test fails for it and not all."""
    for key, server in list(_running.items()):
        try:
            server.assert_slots_are_back()
        except (AssertionError, OSError):
            _running.pop(key).stop()
            raise


@dataclasses.dataclass
class Pair:
    """One target, its drafter, and the servers started on them."""

    folder: Path
    kind: str
    eos_prompt: list[int]
    eos_at: int

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def drafter(self) -> Path:
        return self.folder / "drafter"

    @property
    def script_path(self) -> Path:
        return self.folder / "script.json"

    def script(self, **content: Any) -> None:
        """What the scripted drafter proposes from now on; nothing: the real drafter."""
        before = self.script_path.stat().st_mtime_ns if self.script_path.exists() else 0
        self.script_path.write_text(json.dumps(content))
        if self.script_path.stat().st_mtime_ns <= before:
            os.utime(self.script_path, ns=(before + 1, before + 1))

    def server(self, name: str, *args: str, env: dict[str, str] | None = None) -> Server:
        """The server of that name, started if it does not run; without speculation if the name begins with "plain"."""
        key = (self.folder, name)
        if key in _running:
            _running[key] = _running.pop(key)
            return _running[key]
        while len(_running) >= MAX_RUNNING:
            _running.pop(next(iter(_running))).stop()
        env = {**ENVIRONMENT, **(env or {})}
        command = ["--model-path", str(self.target), *COMMON, *args]
        if env.get("TRITON_INTERPRET") == "1":
            # SGLang's own warm-up is eight tokens: ten seconds where the kernels are interpreted.
            command.append("--skip-server-warmup")
        if not name.startswith("plain"):
            command += ["--speculative-algorithm", "DDTREE"]
            command += ["--speculative-draft-model-path", str(self.drafter)]
            env.setdefault("DDTREE_TEST_SCRIPT", str(self.script_path))
            env.setdefault("DDTREE_TEST_TARGET", str(self.target))
        server = Server(command, self.folder / f"{name}.log", env=env, parent=parent_of(env))
        server.wait_ready()
        _running[key] = server
        return server

    def stop(self, name: str) -> None:
        """Stop a server that no other test needs."""
        _running.pop((self.folder, name)).stop()

    @property
    def plain(self) -> Server:
        return self.server("plain")

    @property
    def tree(self) -> Server:
        return self.server("tree", "--speculative-ddtree-budget", "15", "--enable-metrics")

    @property
    def device(self) -> Server:
        flags = ("--attention-backend", "triton", "--page-size", "16", "--enable-metrics")
        return self.server("device", "--speculative-ddtree-budget", "7", *flags, env=DEVICE_ROUND)

    @property
    def chain(self) -> Server:
        return self.server("chain", "--speculative-ddtree-shadow-linear", "--enable-metrics")

    def expected(self, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        """Greedy token ids without speculation."""
        return output_ids(self.plain.generate(prompts, **sampling))


def make_pair(folder: Path, kind: str) -> Pair:
    tiny_models.make_target(folder / "target", kind, context=CONTEXT)
    eos_prompt, eos_at = _set_end(folder / "target")
    tiny_models.make_drafter(folder / "drafter", block_size=BLOCK_SIZE)
    pair = Pair(folder, kind, eos_prompt, eos_at)
    pair.script()
    return pair
