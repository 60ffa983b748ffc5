"""A test-only SGLang plugin: every draft from a CUDA graph is made again without, with DDTREE_TEST_COMPARE_DRAFTS=1.

A drafter that drafts nonsense costs speed and no token, so that no answer tells. The eager pass runs with the model
runner's own attention backend, whatever the graph's is. A draft that differs ends the server; the log says once of each
width that its drafts were compared. Listed before the scripted drafter, which replaces what is compared here.
"""

import logging
import os

import torch

logger = logging.getLogger(__name__)


def compared(draft):
    """`DDTreeWorker._draft`, compared."""
    passes, seen = {}, set()

    def wrapper(worker, batch, bonus_tokens, width):
        from sglang.srt.speculative.ddtree_captured_width import attributes

        ids, logprobs = draft(worker, batch, bonus_tokens, width)
        tail = worker._draft_passes[width]._tail
        if tail is None or ids.data_ptr() != tail.ids.data_ptr():
            return ids, logprobs  # not from a graph
        runner = worker.draft_model_runner

        def eager(forward_batch):
            with attributes(runner, decode_cuda_graph_runner=None):
                return runner.forward(forward_batch)

        if width not in passes:
            passes[width] = worker._draft_pass(width, eager, None)
        # The eager pass leaves the tail alone; the scripted drafter and the tree read copies or the tail itself.
        again_ids, again = passes[width].run(batch, bonus_tokens, worker._host_bound(batch))
        # Other tiles, other sums, in float32; near ties may change places.
        torch.testing.assert_close(logprobs, again, atol=1e-3, rtol=1e-3)
        alike = float((ids == again_ids).float().mean())
        assert alike > 0.95, f"of {width} positions' candidates {alike:.0%} are alike"
        if width not in seen:
            seen.add(width)
            logger.warning("DDTREE test: drafts of %d positions are as without graphs.", width)
        return ids, logprobs

    return wrapper


def load() -> None:
    if os.environ.get("DDTREE_TEST_COMPARE_DRAFTS") != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def after_activate(result) -> None:
        from sglang.srt.speculative.ddtree_worker import DDTreeWorker

        DDTreeWorker._draft = compared(DDTreeWorker._draft)

    HookRegistry.register("sglang_ddtree.activation.activate", after_activate, HookType.AFTER)
