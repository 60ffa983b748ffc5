"""The target's own choice at every node of a verified tree."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch


def _of_owners(tensor: torch.Tensor, num_nodes: int, owners: torch.Tensor | None) -> torch.Tensor:
    """One row per node of what has one per request."""
    if owners is None:
        return torch.repeat_interleave(tensor, num_nodes, dim=0)
    return tensor.index_select(0, owners)


def _per_node(sampling_info: Any, num_nodes: int, owners: torch.Tensor | None) -> Any:
    """One row of sampling parameters per node instead of per request."""

    def repeat(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else _of_owners(tensor, num_nodes, owners)

    return dataclasses.replace(
        sampling_info,
        temperatures=repeat(sampling_info.temperatures),
        top_ps=repeat(sampling_info.top_ps),
        top_ks=repeat(sampling_info.top_ks),
        min_ps=repeat(sampling_info.min_ps),
        sampling_seed=repeat(sampling_info.sampling_seed),
        # Bias and grammar are applied before; per-request extras have no meaning for a node.
        logit_bias=None,
        grammars=None,
        grammar_mask=None,
        penalizer_orchestrator=None,
        return_sampling_masks=None,
    )


def takes_likeliest(sampling_info: Any) -> bool:
    """Whether `choose_tokens` without a grammar would be the maximum of the logits as they are."""
    return bool(sampling_info.is_all_greedy) and sampling_info.logit_bias is None


def choose_tokens(
    *,
    logits_output: Any,
    sampling_info: Any,
    positions: torch.Tensor,
    num_nodes: int,
    owners: torch.Tensor | None = None,
    sampler: Any,
    grammar_mask: Any = None,
    tp_group: Any = None,
    keep_logits: bool = False,
) -> torch.Tensor:
    """Draw the target's token at every node, as plain decoding would at that node.

    The nodes are handed to SGLang's own sampler as rows of an ordinary batch. A walk visits each node at most
    once, so one independent draw per node is exactly target sampling (arXiv 2604.12989), with every filter the
    sampler knows and, with a sampling seed, the very draw plain decoding makes at that position.

    Args:
        logits_output: holds ``next_token_logits`` [bs * num_nodes, vocabulary]; overwritten, by bias and grammar in any
            case.
        sampling_info: ``SamplingBatchInfo`` of the bs requests.
        positions: int64 [bs * num_nodes].
        num_nodes: N; 1 for a packed round.
        owners: of a packed round int64 [T], the request of every row, in place of N rows for each; then read T for
            bs * num_nodes.
        sampler: the target's ``Sampler``.
        grammar_mask: SGLang's ``GrammarMask`` over the bs * num_nodes rows.
        tp_group: ranks that must agree on the draws.
        keep_logits: leave the logits as they were before temperature and filters, for log-probabilities.
    Returns:
        int64 [bs, num_nodes]; packed [T, 1].
    """
    from sglang.srt.utils.async_probe import sanitize_nan_logits

    logits = logits_output.next_token_logits
    sanitize_nan_logits(logits, "DDTREE verify: target logits")
    if sampling_info.logit_bias is not None:
        bias = sampling_info.logit_bias
        bias = bias if owners is None else _of_owners(bias, num_nodes, owners)
        logits.view(-1, num_nodes, logits.shape[-1]).add_(bias[:, None])
    if grammar_mask is not None:
        grammar_mask.apply(logits)

    choices = torch.argmax(logits, dim=-1)
    if not sampling_info.is_all_greedy:
        # The sampler works in place.
        scratch = dataclasses.replace(logits_output, next_token_logits=logits.clone()) if keep_logits else logits_output
        drawn = sampler(
            scratch,
            _per_node(sampling_info, num_nodes, owners),
            return_logprob=False,
            top_logprobs_nums=[],
            token_ids_logprobs=[],
            positions=positions,
        ).to(choices.dtype)
        # A greedy request beside sampled ones: of tied maxima it takes the first, as it does alone.
        greedy = _of_owners(sampling_info.top_ks == 1, num_nodes, owners)
        choices = torch.where(greedy, choices, drawn)
        if tp_group is not None and tp_group.world_size > 1:
            choices = choices.contiguous()
            tp_group.broadcast(choices, src=0)
    return choices.view(-1, num_nodes)
