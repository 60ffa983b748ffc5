"""Names under ``torch.ops.sgl_kernel`` that SGLang's modules look up while they are imported on the CPU."""

import torch

from .missing import has_no_stand_in

# The linear-attention backends and the Qwen3.5 models bind these at import; nothing probes for them.
LOOKED_UP_AT_IMPORT = (
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)


def register() -> None:
    """Give ``torch.ops.sgl_kernel`` a stub for each name above that no library has registered."""
    namespace = torch.ops.sgl_kernel
    for name in LOOKED_UP_AT_IMPORT:
        if not hasattr(namespace, name):
            setattr(namespace, name, has_no_stand_in(name))
