"""A test-only SGLang plugin: every round verifies another number of tokens, with DDTREE_TEST_ROUNDS set to a seed.

A fifth of the rounds are plain, a tenth uniform, half of them with another number of nodes, and the others share a
random total among their requests: from one node each to whole trees, and some more than there can be, which leaves a
tail that belongs to nobody. With the budget auto half of these totals are ones that have a graph, if any has. Listed
before the scripted drafter, which sees nothing of it but rounds without drafts.

Where the budget auto is uniform, rounds have a random one of its widths instead; half of them are learnt from, as if
they had been decided. DDTREE_TEST_UNIFORM=1 makes it uniform on any target: without a GPU there is none that needs it.

The positions that are drafted change as well, among the widths that the worker has. With DDTREE_TEST_DRAFT_WIDTH, and
with or without a seed, every round drafts so many. The log says once of each width that it was drafted.
"""

import dataclasses
import logging
import os
import random

logger = logging.getLogger(__name__)


def shapes(seed: int, decided):
    """Stands for `DDTreeWorker._shape_of_round`, which is ``decided``."""
    rng, seen = random.Random(seed), set()

    def uniform(worker, batch):
        from sglang.srt.speculative.ddtree_round import Uniform
        from sglang.srt.speculative.ddtree_sizes import uniform_widths

        nodes = rng.choice(uniform_widths(worker.config.budget))
        if nodes not in seen:
            seen.add(nodes)
            logger.warning("DDTREE test: a round verifies %d nodes per request.", nodes)
        decided(worker, batch)
        tokens, width = nodes * len(batch.seq_lens), worker.block_size if nodes > 1 else 0
        other = dict(tokens=tokens, plain=nodes == 1, draft_width=width, fresh=rng.random() < 0.5)
        worker._auto_round = dataclasses.replace(worker._auto_round, **other)
        return Uniform(nodes)

    def choose(worker, batch):
        if worker.config.uniform:
            return uniform(worker, batch)
        bs, kind = len(batch.seq_lens), rng.random()
        if kind < 0.2:
            return "plain"
        if kind < 0.25:
            return None
        if kind < 0.3:
            from sglang.srt.speculative.ddtree_round import Uniform

            return Uniform(rng.randint(1, worker.config.verify_width))
        most = bs * worker.config.verify_width + 3
        captured = [] if worker._auto is None else [total for total in worker._auto.buckets if bs <= total <= most]
        if captured and rng.random() < 0.5:
            return rng.choice(captured)
        return rng.randint(bs, most)

    return choose


def widths(seed: int, fixed: int | None):
    """Stands for `DDTreeWorker._width_of_round`."""
    rng, seen = random.Random(seed), set()

    def choose(worker) -> int:
        width = rng.choice(list(worker._draft_passes)) if fixed is None else fixed
        if worker._auto_round is not None:
            worker._auto_round = dataclasses.replace(worker._auto_round, draft_width=width)
        if width not in seen:
            seen.add(width)
            logger.warning("DDTREE test: a round drafts %d positions.", width)
        return width

    return choose


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("DDTREE_TEST_UNIFORM") == "1":
        target = "sglang_ddtree.requirements.settle_auto_by_target"
        HookRegistry.register(target, lambda config, *_: dataclasses.replace(config, uniform=True), HookType.AFTER)
    seed, width = os.environ.get("DDTREE_TEST_ROUNDS"), os.environ.get("DDTREE_TEST_DRAFT_WIDTH")
    if not seed and not width:
        return

    def after_activate(result) -> None:
        from sglang.srt.speculative.ddtree_worker import DDTreeWorker

        DDTreeWorker._width_of_round = widths(int(seed or 0), int(width) if width else None)
        if seed:
            DDTreeWorker._shape_of_round = shapes(int(seed), DDTreeWorker._shape_of_round)

    HookRegistry.register("sglang_ddtree.activation.activate", after_activate, HookType.AFTER)
