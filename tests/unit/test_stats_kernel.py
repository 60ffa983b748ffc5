"""A round's numbers by one kernel, against those by PyTorch. In the interpreter or on a GPU, see `_kernels.py`."""

import dataclasses

import numpy as np
import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter, compile_for

triton = pytest.importorskip("triton")

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.speculative import ddtree_stats, ddtree_stats_kernel  # noqa: E402
from sglang.srt.speculative.ddtree_utils import build_trees, walk_trees  # noqa: E402

on_device = [] if INTERPRETED else [pytest.mark.gpu]


def to_device(part):
    moved = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    return dataclasses.replace(
        part, **{name: x.to(DEVICE).contiguous() for name, x in moved.items() if torch.is_tensor(x)}
    )


@pytest.mark.parametrize("budget", [1, 7, 15, 63, 64, 256])
def test_equals_pytorch(budget):
    rng = np.random.default_rng(budget)
    bs, levels, topk = 9, 15, min(8, budget)
    ids = torch.from_numpy(rng.permuted(np.tile(np.arange(11), (bs, levels, 1)), axis=-1)[..., :topk].copy())
    logprobs = torch.from_numpy(-np.sort(rng.exponential(size=(bs, levels, topk)).astype(np.float32), axis=-1))
    tree = build_trees(torch.zeros(bs, dtype=torch.int64), ids, logprobs, budget)
    # Choices that walk from no step to the deepest node, along the chain or leaving it at once.
    ranks = torch.zeros(bs, levels, 1, dtype=torch.int64)
    ranks[1::2, 0] = min(1, topk - 1)
    said = ids.gather(2, ranks)[..., 0]
    said = torch.where(torch.arange(levels) < 2 * torch.arange(bs)[:, None], said, -7)
    choices = torch.cat([said, torch.full((bs, 1), -7)], dim=1).gather(1, tree.depths)
    walk = walk_trees(tree.tokens, tree.parents, choices, levels)
    expected = ddtree_stats.tree_stats(tree, walk)
    assert budget < 15 or (len(set(expected[:, 0].tolist())) > 2 and expected[:, 3].unique().numel() == 2)
    got = ddtree_stats_kernel.tree_stats(to_device(tree), to_device(walk))
    assert torch.equal(got.cpu(), expected)
    empty = ddtree_stats_kernel.tree_stats(
        dataclasses.replace(tree, ranks=tree.ranks[:0]), dataclasses.replace(walk, accept_index=walk.accept_index[:0])
    )
    assert empty.shape == (0, 4)


test_equals_pytorch.pytestmark = [*test_equals_pytorch.pytestmark, *on_device]

if not INTERPRETED:

    @pytest.mark.parametrize("arch", [80, 90, 100, 120])
    def test_compiles_ahead_of_time(arch, tmp_path, monkeypatch):
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        types = {"n": "i32", "places": "i32"}
        kernel = ddtree_stats_kernel._stats_kernel
        compiled = compile_for(arch, kernel, {"BLOCK": 64}, lambda arg: types.get(arg, "*i64"), num_warps=1)
        assert compiled.asm["cubin"]

    def test_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
