"""A round's result with its numbers, which reach the host together with its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.utils import GenerationBatchResult, _async_d2h

if TYPE_CHECKING:
    from sglang.srt.speculative.ddtree_auto import AutoRound


@dataclass
class DDTreeBatchResult(GenerationBatchResult):
    """SGLang's result of a round, and a few numbers of it.

    Tensors are on the device until they have been copied.

    Attributes:
        round_stats: int64 [bs, 4] of `ddtree_stats`.
        auto_round: what `AutoBudget.begin_round` decided; None where the budget is a number. Stays on the host.
        histogram: int [64], `Allotment.histogram` of a round that drafted under auto, else None.
        expected: float32 [bs], `Allotment.expected` of such a round, else None.
        worth: float32, of `node_worth`, in place of the histogram where a round was uniform under auto.
    """

    round_stats: torch.Tensor | None = None
    auto_round: AutoRound | None = None
    histogram: torch.Tensor | None = None
    expected: torch.Tensor | None = None
    worth: torch.Tensor | None = None

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        # First, since SGLang ends its own copies with the event that tells the host they are done.
        for name in ("round_stats", "histogram", "expected", "worth"):
            told = getattr(self, name)
            if told is not None:
                setattr(self, name, _async_d2h(told))
        super().copy_to_cpu(return_logprob, return_hidden_states)
