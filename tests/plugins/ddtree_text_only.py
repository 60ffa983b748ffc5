"""A test-only SGLang plugin: Qwen3.5 as a text model, with DDTREE_TEST_TEXT_ONLY=1.

SGLang serves it with images, for which it wants an image processor's files beside the weights, and its flag can switch
that on alone. The benchmark of that shape uses this too.
"""

import os


def _without_images(init, *args, **kwargs):
    init(*args, **{**kwargs, "enable_multimodal": False})


def load() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get("DDTREE_TEST_TEXT_ONLY") == "1":
        HookRegistry.register("sglang.srt.configs.model_config.ModelConfig.__init__", _without_images, HookType.AROUND)
