"""Where a prefill's tokens stand in their requests, told to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def prompt_positions(
    prefix_lens: Sequence[int], extend_lens: Sequence[int], device: torch.device | str
) -> torch.Tensor:
    """Absolute positions of a prefill's tokens, request after request.

    Args:
        prefix_lens: of every request, tokens that are in the cache already.
        extend_lens: tokens that are read now, behind those.
        device: where the positions go. A copy from memory that is not pinned would wait there for all that was
            launched before.

    Returns:
        int64 [sum of extend_lens].
    """
    spans = [np.arange(begin, begin + count) for begin, count in zip(prefix_lens, extend_lens, strict=True)]
    values = np.concatenate(spans) if spans else np.empty(0, np.int64)
    host = torch.empty(len(values), dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
    host.numpy()[:] = values
    return host.to(device, non_blocking=True)
