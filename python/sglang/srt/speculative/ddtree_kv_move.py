"""Move the accepted path's keys and values to the front of the round's slots, in Triton.

SGLang's `move_kv_cache` takes two lists of slots whose number the host knows, and copies all of them. Here it is a
path's greatest length for every request, of which a round accepts a few places, and of these the ones that a chain
would have accepted lie in their slot already. One launch for all layers copies what is left and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool

# A slot is copied in words of 8 bytes.
_WORD = 8
_BLOCK = 256


def movable(kv_cache: Any) -> MHATokenToKVPool | None:
    """The pool whose buffers `move_accepted` may copy byte by byte; None where SGLang's own move is needed.

    Only SGLang's plain pool of keys and values per token qualifies: others keep scales, translate slots or have
    another layout.
    """
    pool = kv_cache.full_kv_pool if type(kv_cache) is HybridLinearKVPool else kv_cache
    if type(pool) is not MHATokenToKVPool or pool.use_hnd or pool.layer_num == 0:
        return None
    slot_bytes = {x[0].nbytes for x in (*pool.k_buffer, *pool.v_buffer)}
    return None if any(n % _WORD for n in slot_bytes) else pool


def move_accepted(
    pool: MHATokenToKVPool, kv_to: torch.Tensor, kv_from: torch.Tensor, accept_lens: torch.Tensor
) -> None:
    """Copy every layer's keys and values from ``kv_from`` to ``kv_to``, the first ``accept_lens`` of each row.

    Within a row both ascend and ``kv_from`` is never before ``kv_to`` in the round's order of slots, so that going
    through a row in order overwrites nothing that is still to be read. Rows share no slot.

    Args:
        pool: as `movable` gives it.
        kv_to, kv_from: int64 [bs, P].
        accept_lens: int [bs], from 1 to P; place 0 is the root, which lies where it belongs.
    """
    bs, places = kv_to.shape
    if bs == 0 or places < 2:
        return
    buffers = pool.data_ptrs.shape[0]
    widest = max(pool.k_buffer[0][0].nbytes, pool.v_buffer[0][0].nbytes) // _WORD
    block = min(_BLOCK, triton.next_power_of_2(widest))
    _move_kernel[(bs, buffers, triton.cdiv(widest, block))](
        pool.data_ptrs,
        pool.data_strides,
        kv_to,
        kv_from,
        accept_lens,
        kv_to.stride(0),
        kv_from.stride(0),
        BLOCK=block,
        num_warps=1 if block <= 64 else 2,
    )


@triton.jit(do_not_specialize=["to_stride", "from_stride"])
def _move_kernel(data_ptrs, data_strides, kv_to, kv_from, accept_lens, to_stride, from_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    buffer = tl.program_id(1)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(data_ptrs + buffer).to(tl.pointer_type(tl.int64))
    words = tl.load(data_strides + buffer).to(tl.int64) // 8
    inside = word < words
    accepted = tl.load(accept_lens + row)
    for place in range(1, accepted):
        source = tl.load(kv_from + row * from_stride + place)
        target = tl.load(kv_to + row * to_stride + place)
        if source != target:
            moved = tl.load(base + source * words + word, mask=inside)
            tl.store(base + target * words + word, moved, mask=inside)
