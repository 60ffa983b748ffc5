"""A test-only SGLang plugin: every round verifies another number of tokens, with DDTREE_TEST_ROUNDS set to a seed.

A fifth of the rounds are plain, a tenth uniform, and the others share a random total among their requests: from one
node each to whole trees, and some more than there can be, which leaves a tail that belongs to nobody. With the budget
auto half of these totals are ones that have a graph, if any has. Listed before the scripted drafter, which sees nothing
of it but rounds without drafts.
"""

import os
import random


def shapes(seed: int):
    """Stands for `DDTreeWorker._shape_of_round`."""
    rng = random.Random(seed)

    def choose(worker, batch):
        bs, kind = len(batch.seq_lens), rng.random()
        if kind < 0.2:
            return "plain"
        if kind < 0.3:
            return None
        most = bs * worker.config.verify_width + 3
        captured = [] if worker._auto is None else [total for total in worker._auto.buckets if bs <= total <= most]
        if captured and rng.random() < 0.5:
            return rng.choice(captured)
        return rng.randint(bs, most)

    return choose


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seed = os.environ.get("DDTREE_TEST_ROUNDS")
    if not seed:
        return

    def after_activate(result) -> None:
        from sglang.srt.speculative.ddtree_worker import DDTreeWorker

        DDTreeWorker._shape_of_round = shapes(int(seed))

    HookRegistry.register("sglang_ddtree.activation.activate", after_activate, HookType.AFTER)
