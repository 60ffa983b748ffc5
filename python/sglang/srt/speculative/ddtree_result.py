"""A round's result with its numbers, which reach the host together with its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.managers.utils import GenerationBatchResult, _async_d2h


@dataclass
class DDTreeBatchResult(GenerationBatchResult):
    """SGLang's result of a round, and a few numbers per request.

    Attributes:
        round_stats: int64 [bs, 4] of `ddtree_stats`, on the device until it has been copied.
    """

    round_stats: torch.Tensor | None = None

    def copy_to_cpu(self, return_logprob: bool, return_hidden_states: bool = True) -> None:
        # First, since SGLang ends its own copies with the event that tells the host they are done.
        if self.round_stats is not None:
            self.round_stats = _async_d2h(self.round_stats)
        super().copy_to_cpu(return_logprob, return_hidden_states)
