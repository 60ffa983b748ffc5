"""A test-only SGLang plugin: plain PyTorch instead of the CUDA kernels that know no float32.

The norm, activation and rotary kernels of SGLang's GPU wheels take 16-bit numbers alone, so a float32 server, which
exact comparisons need, does not start on a GPU. With DDTREE_TEST_TORCH_OPS=1 every operator that has a native
PyTorch form uses it, for no speculation, DFLASH and DDTREE alike; attention stays the backend's own.
"""

import os


def _native(dispatch, operator):
    return operator.forward_native


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("DDTREE_TEST_TORCH_OPS") == "1":
        target = "sglang.srt.layers.utils.multi_platform.MultiPlatformOp.dispatch_forward"
        HookRegistry.register(target, _native, HookType.AROUND)
