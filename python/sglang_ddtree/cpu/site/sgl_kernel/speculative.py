"""``sgl_kernel.speculative``: SGLang imports some of its functions by this path, others from the package."""

from .accepted_tokens import fill_accept_out_cache_loc_cpu, fill_bonus_tokens_cpu, rotate_input_ids_cpu
from .tree_links import build_tree_kernel_efficient_cpu, reconstruct_indices_from_tree_mask
from .tree_walk import verify_tree_greedy_cpu

__all__ = [
    "build_tree_kernel_efficient_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
