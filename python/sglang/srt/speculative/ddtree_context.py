"""Long contexts without a request, to time graphs with at start.

A graph reads the keys of as many tokens as its batch's lengths say, from the slots that ``req_to_token`` names. Before
the first request both are free to be chosen: rows are lent distinct slots of the pool, which nobody has taken and which
are only read, and hold again afterwards what they held. What the graphs write goes to SGLang's dummy slot 0, as when
they are captured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

# Tokens per request. Below the least, what they add is lost in the noise of a few replays.
MOST_TOKENS, LEAST_TOKENS = 8192, 1024
MOST_REQUESTS = 8


@dataclass(frozen=True)
class LongContexts:
    """What is timed: so many requests, each with so many committed tokens."""

    requests: int
    tokens: int


def fitting(runners: Sequence[Any], most_requests: int) -> LongContexts | None:
    """The longest contexts that fit what every runner's server has; None, with the reason in the log: too short.

    Every request's slots are its own, or their keys would come from the GPU's cache.

    Args:
        runners: SGLang's decode graph runners, drafters' and the target's.
        most_requests: that all of their graphs hold.
    """
    tables = [runner.model_runner.req_to_token_pool.req_to_token for runner in runners]
    pool = min(int(runner.model_runner.token_to_kv_pool.size) for runner in runners)
    # As in a round, the new tokens fit behind the context.
    ahead = sum(int(runner.captured_req_width) for runner in runners)
    context = min(int(runner.model_runner.model_config.context_len) for runner in runners)
    width = min(context, *(table.shape[1] for table in tables)) - ahead
    tokens = min(MOST_TOKENS, width, pool)
    # Row 0 is what padding points at.
    requests = min(MOST_REQUESTS, most_requests, *(table.shape[0] - 1 for table in tables))
    if tokens < LEAST_TOKENS or requests < 1:
        logger.info(
            "DDTREE: what longer contexts cost is not measured and taken for nothing: %d tokens fit (context length "
            "%d, KV pool %d), it takes %d.",
            max(tokens, 0),
            context,
            pool,
            LEAST_TOKENS,
        )
        return None
    return LongContexts(min(requests, pool // tokens), tokens)


@contextmanager
def lent_slots(runner: Any, contexts: LongContexts) -> Iterator[None]:
    """Rows 1 to R of ``req_to_token`` name slots of the KV pool, each its own, while the block runs.

    Mutates these rows and the runner's inputs, and puts back what they held, also if the block raises.
    """
    table = runner.model_runner.req_to_token_pool.req_to_token
    rows = table[1 : contexts.requests + 1]
    # What a replay leaves here is what the next batch of a capture would start from.
    inputs = [getattr(runner.buffers, name) for name in ("seq_lens", "seq_lens_cpu", "req_pool_indices")]
    changed = [rows, *inputs]
    kept = [x.clone() for x in changed]
    slots = torch.arange(1, contexts.requests * contexts.tokens + 1, dtype=rows.dtype, device=rows.device)
    try:
        rows[:, : contexts.tokens].copy_(slots.view(contexts.requests, contexts.tokens))
        yield
    finally:
        for x, before in zip(changed, kept, strict=True):
            x.copy_(before)
        if rows.device.type == "cuda":
            # Requests are given their slots on another stream.
            torch.cuda.synchronize()


def batch_of(runner: Any, requests: int, total: int, tokens: int) -> Any:
    """A batch of the runner's capture whose requests are those of `lent_slots`.

    Args:
        runner: captured.
        requests: R, tokens: of each one's context.
        total: new tokens of the batch; packed, T, of which every request has an equal share, and what is left nobody.
    """
    batch, _, _ = runner.capture_prepare(requests, num_tokens=total)
    # New tensors: the runner loads them into its inputs as it does a request's.
    batch.seq_lens = torch.full_like(batch.seq_lens, tokens)
    batch.seq_lens_cpu = torch.full_like(batch.seq_lens_cpu, tokens)
    batch.orig_seq_lens, batch.seq_lens_sum = batch.seq_lens, requests * tokens
    batch.req_pool_indices = torch.arange(1, requests + 1, out=torch.empty_like(batch.req_pool_indices))
    spec_info = batch.spec_info
    if getattr(spec_info, "qo_indptr", None) is not None:
        # The capture's own are of as many requests as the graph holds, a node each.
        share = min(total // requests, int(spec_info.draft_token_num))
        starts = torch.arange(requests + 1, dtype=torch.int32, device=spec_info.qo_indptr.device)
        spec_info.qo_indptr = starts * share
    return batch
