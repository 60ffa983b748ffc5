"""A stand-in for ``sgl_kernel`` on machines without a GPU: what SGLang's CPU engine needs, in plain PyTorch.

Only names that SGLang imports on the CPU are defined, and no catch-all: SGLang probes for optional features
by trying imports (``sgl_kernel.allreduce``, ``causal_conv1d_fwd``, ``scalar_type``), and those must fail.
For the same reason no ``torch.ops.sgl_kernel.convert_weight_packed`` exists: it would announce Intel AMX.
"""

from . import torch_ops
from .kv_copy import copy_all_layer_kv_cache_cpu
from .missing import has_no_stand_in
from .request_slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
)
from .speculative import (
    build_tree_kernel_efficient_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    reconstruct_indices_from_tree_mask,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

build_draft_decode_metadata_cpu = has_no_stand_in("build_draft_decode_metadata_cpu")
merge_state_v2 = has_no_stand_in("merge_state_v2")

torch_ops.register()

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "merge_state_v2",
    "reconstruct_indices_from_tree_mask",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
