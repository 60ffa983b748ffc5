"""A test-only SGLang plugin: a decode round that waits for the GPU ends the server, with DDTREE_TEST_SYNC set.

``error``: as it is. ``item``: a round reads one number back, to show that the check would notice. Listed before the
scripted drafter, so that it wraps the round alone, not what that one reads back.
"""

import os


def _checked(forward, read_back: bool):
    import torch

    def wrapper(worker, batch, *args, **kwargs):
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle():
            return forward(worker, batch, *args, **kwargs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            if read_back:
                batch.seq_lens.sum().item()
            return forward(worker, batch, *args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return wrapper


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    mode = os.environ.get("DDTREE_TEST_SYNC")
    if not mode:
        return

    def after_activate(result) -> None:
        from sglang.srt.speculative.ddtree_worker import DDTreeWorker

        DDTreeWorker.forward_batch_generation = _checked(DDTreeWorker.forward_batch_generation, mode == "item")

    HookRegistry.register("sglang_ddtree.activation.activate", after_activate, HookType.AFTER)
