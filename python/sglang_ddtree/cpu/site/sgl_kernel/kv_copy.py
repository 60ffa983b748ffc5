"""Moving KV slots: every layer's keys and values at once, given as raw addresses."""

import ctypes

import numpy as np
import torch


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copy slot ``src_loc[i]`` to ``tgt_loc[i]`` in every buffer, as if all were read before any is written.

    data_ptrs: uint64 [num_buffers]; addresses of contiguous buffers in host memory, one row per slot.
    strides: int64 [num_buffers]; bytes per slot of each buffer.
    tgt_loc, src_loc: int [n]; slot numbers, which may overlap. A target named twice gets its last source.
    Mutates the memory behind ``data_ptrs``. The caller keeps it alive and large enough.
    """
    if tgt_loc.numel() == 0:
        return
    targets = tgt_loc.to(torch.int64).numpy()
    sources = src_loc.to(torch.int64).numpy()
    assert targets.shape == sources.shape, f"{targets.shape[0]} target slots, {sources.shape[0]} source slots"
    lowest = min(targets.min(), sources.min())
    assert lowest >= 0, f"slot numbers must not be negative, got {lowest}"

    num_slots = int(max(targets.max(), sources.max())) + 1
    for address, slot_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_slots * slot_bytes)).from_address(address)
        slots = np.frombuffer(memory, dtype=np.uint8).reshape(num_slots, slot_bytes)
        # Indexing with an array copies, so all sources are read before the first target is written.
        slots[targets] = slots[sources]
