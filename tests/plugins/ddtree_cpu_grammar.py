"""A test-only SGLang plugin: structured output on the CPU for servers without speculation, as a DDTREE server has it.

SGLang has no mask kernel there; without this there would be nothing to compare with.
"""

import os


def load() -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_ddtree.activation import GRAMMAR_HOOKS

    if "DDTREE_TEST_SCRIPT" not in os.environ and not torch.cuda.is_available():
        for target, hook in GRAMMAR_HOOKS.items():
            HookRegistry.register(target, hook, HookType.AROUND)
