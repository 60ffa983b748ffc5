"""The servers of a benchmark: modes and their flags, start, what they report, results that outlive an interruption."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from launcher import HOST, ServerProcess, free_port  # noqa: E402

START_TIMEOUT_S = 400
PLAIN = "plain"
# DDTREE with one budget for the batch, which follows the load.
AUTO = "ddtree-auto"
AUTO_WIDTH = 64


def kind_of(mode: str) -> tuple[str, int]:
    """ "plain", "dflash-WIDTH", "ddtree-BUDGET" or "shadow-BUDGET" in its two parts.

    "plain" and "ddtree-auto" have no number: they are their own kind, with a 0.

    Raises:
        ValueError: it is none of them.
    """
    kind, _, number = mode.partition("-")
    if mode in (PLAIN, AUTO):
        return mode, 0
    if kind in ("dflash", "ddtree", "shadow") and number.isdigit() and int(number) > 0:
        return kind, int(number)
    raise ValueError(f"a mode is plain, dflash-WIDTH, ddtree-BUDGET or shadow-BUDGET, got {mode!r}.")


def verify_width(mode: str, block_size: int) -> int:
    """Tokens per request that a round verifies at most."""
    kind, number = kind_of(mode)
    return {PLAIN: 1, "dflash": number, "ddtree": number + 1, "shadow": block_size, AUTO: AUTO_WIDTH}[kind]


def label(mode: str) -> str:
    """A mode's name in tables and plots."""
    kind, number = kind_of(mode)
    return {
        PLAIN: "no speculation",
        AUTO: "DDTREE, auto",
        "dflash": f"DFLASH, width {number}",
        "ddtree": f"DDTREE, budget {number}",
        "shadow": f"DDTREE, shadow-linear, budget {number}",
    }[kind]


def select_modes(modes: Sequence[str], only: Sequence[str] | None) -> list[str]:
    """The modes asked for, less what this machine cannot run.

    Raises:
        SystemExit: one was asked for that is none, or nothing is left.
    """
    try:
        for mode in only or ():
            kind_of(mode)
    except ValueError as error:
        raise SystemExit(f"--only: {error}") from None
    chosen = list(only or modes)
    if not has_gpu():
        for mode in [mode for mode in chosen if mode.startswith("dflash")]:
            print(f"{label(mode)}: skipped, SGLang's DFLASH runs on a GPU only", flush=True)
            chosen.remove(mode)
    if not chosen:
        raise SystemExit("no mode is left to measure.")
    return chosen


def mode_flags(mode: str, drafter: Path, topk_cap: int) -> list[str]:
    """Server flags that choose a mode."""
    kind, number = kind_of(mode)
    if kind == PLAIN:
        return []
    algorithm = "DFLASH" if kind == "dflash" else "DDTREE"
    flags = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(drafter)]
    if kind == "dflash":
        return [*flags, "--speculative-dflash-block-size", str(number)]
    if kind == "shadow":
        flags.append("--speculative-ddtree-shadow-linear")
    budget = "auto" if kind == AUTO else str(number)
    return [*flags, "--speculative-ddtree-budget", budget, "--speculative-ddtree-topk-cap", str(topk_cap)]


def has_gpu() -> bool:
    from sglang_ddtree.requirements import has_gpu

    return has_gpu()


def common_flags(dtype: str, max_requests: int, backend: str) -> list[str]:
    """What every mode's server gets; all else is SGLang's default, overlap scheduling and prefill graphs among it."""
    flags = ["--dtype", dtype, "--max-running-requests", str(max_requests), "--random-seed", "7", "--sleep-on-idle"]
    # What auto decided is read from them (auto_rounds.py); every mode pays for them alike.
    flags += ["--enable-metrics"]
    if has_gpu():
        flags += ["--attention-backend", backend, "--cuda-graph-max-bs", str(max_requests)]
    return flags


class BenchServer(ServerProcess):
    """One ``python -m sglang.launch_server``."""

    def __init__(self, flags: Sequence[str], log: Path, env: dict[str, str]):
        port = free_port()
        command = [sys.executable, "-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *flags]
        values = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **env}
        if "PYTHONPATH" in env and "PYTHONPATH" in os.environ:
            values["PYTHONPATH"] = env["PYTHONPATH"] + os.pathsep + os.environ["PYTHONPATH"]
        super().__init__(command, port, log, env=values)

    def stop(self) -> None:
        """Kill it, which takes no time, and leaves a GPU's memory to the next one."""
        self.kill()

    def get(self, path: str) -> Any:
        return json.loads(self.text(path))

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return response.read().decode()

    def flush_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            urllib.error.HTTPError: it was refused for half a minute, as it is while requests run.
        """
        deadline = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(urllib.request.Request(self.url + "/flush_cache", b""), timeout=60):
                    return
            except urllib.error.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def settings_of(info: dict[str, Any]) -> dict[str, Any]:
    """What a server says about itself in /server_info that decides its speed."""
    graphs = (info.get("cuda_graph_config") or {}).get("decode") or {}
    overlap = info.get("disable_overlap_schedule")
    states = info.get("internal_states") or [{}]
    seconds = (states[0].get("startup_time") or {}).get("cuda_graph") or {}
    return {
        "decode_graphs": graphs.get("backend", "unknown"),
        # The backend is what was asked for; seconds were spent only on what was captured.
        "captured": " ".join(phase for phase, spent in seconds.items() if spent) or "none",
        "overlap": "unknown" if overlap is None else "off" if overlap else "on",
        "backend": info.get("attention_backend"),
        "page_size": info.get("page_size"),
        "verify_width": info.get("speculative_num_draft_tokens") or 1,
        "dtype": info.get("dtype"),
        "kv_tokens": info.get("max_total_num_tokens"),
    }


@dataclass
class Plan:
    """One server to measure, and what of it."""

    mode: str
    flags: list[str]
    points: list[str]
    """Names of the measurements, in their order."""
    env: dict[str, str] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)
    """What else a kept result depends on."""
    name: str = ""
    """Of the result's file; the mode if empty."""

    @property
    def file_name(self) -> str:
        return self.name or self.mode


class Record:
    """What one server measured, kept in a file point by point; one of other conditions is started anew."""

    def __init__(self, path: Path, identity: dict[str, Any]):
        self.path = path
        self.data: dict[str, Any] = {"identity": identity, "settings": {}, "points": {}}
        if path.exists():
            kept = json.loads(path.read_text())
            # Through JSON, which has no tuples.
            if kept["identity"] == json.loads(json.dumps(identity)):
                self.data = kept
            else:
                print(f"{path.name}: kept under other conditions, measured again", flush=True)

    @property
    def points(self) -> dict[str, Any]:
        return self.data["points"]

    @property
    def settings(self) -> dict[str, Any]:
        return self.data["settings"]

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.data))
        part.replace(self.path)


def record_of(plan: Plan, folder: Path, identity: dict[str, Any]) -> Record:
    """What is kept of a plan's server.

    Args:
        folder: of the records.
        identity: what all results depend on, the device and the code among it.
    """
    own = {"flags": plan.flags, "env": plan.env, "conditions": plan.conditions}
    return Record(folder / f"{plan.file_name}.json", {**identity, **own})


Measure = Callable[[BenchServer, Plan, str, Record], Any]


def measure_plans(
    plans: Sequence[Plan], folder: Path, identity: dict[str, Any], measure: Measure, together: int = 1
) -> tuple[dict[str, Record], dict[str, str]]:
    """Measure what is missing, one server at a time.

    Args:
        plans: one per mode.
        folder: of the records and the servers' logs.
        identity: as for ``record_of``.
        measure: makes one point; its result is kept as JSON.
        together: servers that start at the same time, auto's behind the others. None is measured before all of them
            are up, and then they take turns, point by point.
    Returns:
        Records by mode, and the error of each mode that could not be measured (its earlier points are kept).
    """
    records = {plan.mode: record_of(plan, folder, identity) for plan in plans}
    errors: dict[str, str] = {}
    todo = [plan for plan in plans if any(point not in records[plan.mode].points for point in plan.points)]
    for plan in plans:
        if plan not in todo:
            print(f"{label(plan.mode)}: all kept in {records[plan.mode].path}", flush=True)
    for at in range(0, len(todo), together):
        _measure_group(todo[at : at + together], folder, records, errors, measure)
    return records, errors


def _measure_group(
    group: Sequence[Plan], folder: Path, records: dict[str, Record], errors: dict[str, str], measure: Measure
) -> None:
    servers: list[BenchServer] = []
    ready: list[tuple[Plan, BenchServer]] = []
    # Auto times its rounds while it starts, for which nothing else may run.
    waves = [[plan for plan in group if plan.mode != AUTO], [plan for plan in group if plan.mode == AUTO]]
    try:
        for wave in waves:
            started = len(servers)
            for plan in wave:
                print(f"{label(plan.mode)}: starting a server", flush=True)
                servers.append(BenchServer(plan.flags, folder / f"{plan.file_name}.log", plan.env))
            for plan, server in zip(wave, servers[started:], strict=True):
                try:
                    took = server.wait_ready(START_TIMEOUT_S)
                    print(f"{label(plan.mode)}: ready after {took:.0f} s", flush=True)
                    records[plan.mode].settings.update(settings_of(server.get("/server_info")))
                    ready.append((plan, server))
                except Exception as error:
                    _note(errors, plan, "did not start", error)
                    # It may be loading yet, beside servers that time their rounds.
                    server.stop()
        # Point by point and not server by server: what else the machine does changes from minute to minute, and what is
        # compared with each other should be measured close together.
        for point in dict.fromkeys(point for plan, _ in ready for point in plan.points):
            for plan, server in ready:
                record = records[plan.mode]
                if plan.mode in errors or point not in plan.points or point in record.points:
                    continue
                try:
                    record.points[point] = measure(server, plan, point, record)
                    record.save()
                except Exception as error:
                    _note(errors, plan, "broke off", error)
                    server.stop()
    finally:
        for server in servers:
            server.stop()


def _note(errors: dict[str, str], plan: Plan, what: str, error: Exception) -> None:
    traceback.print_exception(error)
    errors[plan.mode] = f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
