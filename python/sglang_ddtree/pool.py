"""How long a request may become where the KV pool holds little more than the request itself."""

from typing import Any


def end_before_the_pool(scheduler: Any, req: Any) -> None:
    """Bound ``req``'s new tokens, so that the slots of two rounds always fit behind it. Mutates ``req``.

    SGLang ends a request by its length where the pool would be full. It counts one slot per decode step; a round
    reserves more than it commits, and a request that is alone and finds no room for it would be aborted with status
    500, its answer lost. One token needs no round: prefill gives it.

    Args:
        scheduler: SGLang's ``Scheduler``, which has bounded ``req`` in its own way.
        req: a ``Req`` whose prompt is known.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    slots = scheduler.max_total_num_tokens // scheduler.page_size * scheduler.page_size
    room = slots - get_alloc_reserve_per_decode(scheduler.server_args) - len(req.origin_input_ids)
    params = req.sampling_params
    params.max_new_tokens = min(params.max_new_tokens, max(1, room))
