"""Positions of a prefill's tokens."""

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.speculative.ddtree_prefill import prompt_positions  # noqa: E402


@pytest.mark.parametrize(
    "prefix_lens, extend_lens, expected",
    [
        ([0], [3], [0, 1, 2]),
        ([5, 0, 2], [2, 1, 3], [5, 6, 0, 2, 3, 4]),
        ([7, 4], [0, 1], [4]),
        ([], [], []),
    ],
)
def test_positions_follow_the_prefix(prefix_lens, extend_lens, expected):
    positions = prompt_positions(prefix_lens, extend_lens, "cpu")
    assert positions.dtype == torch.int64 and positions.tolist() == expected


def test_lengths_that_do_not_belong_together():
    with pytest.raises(ValueError):
        prompt_positions([1, 2], [3], "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            torch.tensor([1, 2], device="cuda")
        positions = prompt_positions([5, 0], [2, 1], torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert positions.tolist() == [5, 6, 0]
