"""A test-only SGLang plugin: how long a round keeps the host, step by step, with DDTREE_TEST_HOST_TIMES=1.

A small model's round is as long as the host takes to launch it. Every 200 decode rounds the log gets a line with the
mean microseconds of the steps, and of the whole round of a DDTREE or DFLASH server ("between": from one to the next).
Steps that others contain are counted in both.
"""

import functools
import logging
import os
import time

logger = logging.getLogger(__name__)
EVERY = 200
WORKER = "sglang.srt.speculative.ddtree_worker"
ROUND = "round"
STEPS = {
    f"{WORKER}.DDTreeWorker": ("_draft", "_build", "_verify_input", "_commit", "_move_kv", "_feed_drafter"),
    WORKER: ("eagle_prepare_for_verify", "choose_tokens"),
    "sglang.srt.speculative.ddtree_round.DeviceRound": ("build", "commit", "stats"),
    "sglang.srt.speculative.ddtree_auto.AutoBudget": ("begin_round", "end_round", "launched"),
    "sglang.srt.speculative.ddtree_commit_graph.CommitGraphs": ("replay",),
    "sglang.srt.speculative.ddtree_packed_graph.PackedCommitGraphs": ("pack", "replay"),
    "sglang.srt.speculative.dflash_info.DDTreeVerifyInput": ("prepare_packed",),
    "sglang.srt.managers.tp_worker.TpModelWorker": ("forward_batch_generation",),
}


class Times:
    def __init__(self):
        self.seconds, self.rounds, self.last = {}, 0, None
        self.requests = self.graphs = 0

    def add(self, name, seconds):
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def end_round(self, begin):
        if self.last is not None:
            self.add("between", begin - self.last)
        self.last, self.rounds = begin, self.rounds + 1
        if self.rounds % EVERY == 0:
            words = ", ".join(f"{name} {1e6 * total / EVERY:.0f}" for name, total in sorted(self.seconds.items()))
            requests, graphs = self.requests / EVERY, self.graphs / EVERY
            logger.info("host times, us per round: %s; %.1f requests, %.2f in graphs", words, requests, graphs)
            self.seconds.clear()
            self.requests = self.graphs = 0


TIMES = Times()


def timed(function, name):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            TIMES.add(name, time.perf_counter() - begin)

    return wrapper


def timed_round(function):
    @functools.wraps(function)
    def wrapper(worker, batch, *args, **kwargs):
        decodes = not (batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle())
        begin = time.perf_counter()
        result = function(worker, batch, *args, **kwargs)
        if decodes:
            TIMES.add(ROUND, time.perf_counter() - begin)
            TIMES.requests += len(batch.seq_lens)
            TIMES.graphs += bool(result.can_run_cuda_graph)
            TIMES.end_round(begin)
        else:
            TIMES.last = None
        return result

    return wrapper


def find(name):
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def time_ddtree(result) -> None:
    for owner, names in STEPS.items():
        owner = find(owner)
        for name in names:
            setattr(owner, name, timed(getattr(owner, name), name))
    worker = find(f"{WORKER}.DDTreeWorker")
    worker.forward_batch_generation = timed_round(worker.forward_batch_generation)


def time_dflash(result, *args) -> None:
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

    if not hasattr(DFlashWorkerV2, "_timed"):
        DFlashWorkerV2._timed = True
        DFlashWorkerV2.forward_batch_generation = timed_round(DFlashWorkerV2.forward_batch_generation)


def load() -> None:
    if os.environ.get("DDTREE_TEST_HOST_TIMES") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang_ddtree.activation.activate", time_ddtree, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", time_dflash, HookType.AFTER)
