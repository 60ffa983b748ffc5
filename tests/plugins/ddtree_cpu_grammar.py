"""A test-only SGLang plugin: xgrammar's own CPU kernel for servers without speculation, where SGLang has none.

A DDTREE server brings its own; this one lets it be compared.
"""

import os


def _on_cpu(original, self, logits, vocab_mask):
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def _without_pinning(original, vocab_size, batch_size):
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def load() -> None:
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if "DDTREE_TEST_SCRIPT" not in os.environ and not torch.cuda.is_available():
        module = "sglang.srt.constrained.xgrammar_backend"
        HookRegistry.register(f"{module}.XGrammarGrammar.apply_vocab_mask", _on_cpu, HookType.AROUND)
        HookRegistry.register(f"{module}._allocate_token_bitmask", _without_pinning, HookType.AROUND)
