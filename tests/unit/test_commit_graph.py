"""A commit by one replay, against the same steps one by one. In the interpreter or on a GPU, see `_kernels.py`."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter

triton = pytest.importorskip("triton")

from sglang.srt.plugins import load_plugins  # noqa: E402

load_plugins()

from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from _commit import FEATURES, Server  # noqa: E402
from sglang.srt.speculative import ddtree_commit_graph as m  # noqa: E402
from sglang.srt.speculative.ddtree_round import DeviceRound, TorchRound  # noqa: E402

on_device = [] if INTERPRETED else [pytest.mark.gpu]
BUDGET, DEPTH, TOPK = 7, 5, 3
NODES = BUDGET + 1
SIZES = [1, 2, 4]


def verify(server: Server, rng: np.random.Generator, raw: int, bs: int, tree) -> torch.Tensor:
    """A verify pass of ``raw`` requests in the graph of ``bs``; returns the tokens it finds likeliest, [raw, N]."""
    tokens = tree.tree.tokens.cpu()
    # Now and then a node's own child, else nothing that is there.
    likeliest = torch.from_numpy(rng.integers(30, 50, (bs, NODES)))
    for b in range(raw):
        for node in range(1, NODES):
            parent = int(tree.tree.parents[b, node])
            if parent >= 0 and rng.random() < 0.6:
                likeliest[b, parent] = tokens[b, node]
    server.logits[bs * NODES].copy_(torch.nn.functional.one_hot(likeliest.view(-1), 50).to(torch.float32))
    server.hidden[bs * NODES].copy_(torch.from_numpy(rng.normal(size=(bs * NODES, FEATURES))))
    slots = (1 + torch.from_numpy(rng.permutation(199)))[: raw * NODES]
    server.buffers.out_cache_loc.zero_()
    server.buffers.out_cache_loc[: raw * NODES] = slots.to(DEVICE)
    server.buffers.seq_lens.fill_(1)
    server.buffers.seq_lens[:raw] = torch.from_numpy(rng.integers(5, 90, raw)).to(DEVICE)
    server.forward(bs * NODES)
    server.bs = bs
    return likeliest[:raw]


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_same_steps_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    server = Server(SIZES, [bs * NODES for bs in SIZES], DEPTH + 1)
    graphs = m.CommitGraphs(budget=BUDGET, max_depth=DEPTH, feed=server.feed, **server.arguments())
    steps, reference = DeviceRound(), TorchRound()
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    committed = []
    # Padded sizes, and a larger batch's remains behind a smaller one.
    for raw, bs in ((4, 4), (3, 4), (1, 1), (2, 2), (1, 2), (4, 4)):
        ids = torch.from_numpy(rng.permuted(np.tile(np.arange(20), (raw, DEPTH, 1)), axis=-1)[..., :TOPK].copy())
        logprobs = torch.from_numpy(-np.sort(rng.exponential(size=(raw, DEPTH, TOPK)).astype(np.float32), axis=-1))
        bonus = torch.from_numpy(rng.integers(0, 20, raw))
        lens = torch.zeros(raw, dtype=torch.int64)
        out = graphs.tree(raw)
        tree = steps.build(bonus.to(DEVICE), ids.to(DEVICE), logprobs.to(DEVICE), BUDGET, lens.to(DEVICE), out)
        assert tree is out is graphs.tree(raw)
        expected_tree = reference.build(bonus, ids, logprobs, BUDGET, lens)
        choices = verify(server, rng, raw, bs, tree)
        if bs == 2:
            # A sampled round: other choices than the likeliest.
            choices = (choices + 1) % 20
            graphs.choices(raw).copy_(choices)
        assert torch.equal(graphs.choices(raw).cpu(), choices)
        seq_lens = server.buffers.seq_lens[:raw].cpu()
        slots = server.buffers.out_cache_loc[: raw * NODES].view(raw, NODES).cpu()
        walk, plan = reference.commit(expected_tree, choices, DEPTH, seq_lens, slots)
        buffers = server.pool.k_buffer + server.pool.v_buffer
        moved = [x.cpu().clone() for x in buffers]
        valid = torch.arange(DEPTH + 1) < plan.accept_lens[:, None]
        for x in moved:
            x[plan.kv_to[valid]] = x[plan.kv_from[valid]]
        hidden = server.hidden[bs * NODES].cpu()[plan.rows.view(-1)].view(raw, DEPTH + 1, FEATURES)

        done = graphs.replay(raw)
        assert torch.equal(done.next_tokens.cpu().view(raw, NODES), plan.next_tokens)
        assert torch.equal(done.accept_lens.cpu(), plan.accept_lens) and done.accept_lens.dtype == torch.int32
        assert torch.equal(done.new_seq_lens.cpu(), plan.new_seq_lens)
        assert torch.equal(done.bonus.cpu(), walk.bonus)
        assert torch.equal(done.rows.cpu(), plan.rows)
        assert torch.equal(done.round_stats.cpu(), reference.stats(expected_tree.tree, walk))
        for got, wanted in zip(buffers, moved, strict=True):
            assert torch.equal(got.cpu(), wanted)
        assert torch.equal(server.fed[:raw].cpu(), torch.where(valid[..., None], hidden, 0.0))
        earlier.append((done.next_tokens, plan.next_tokens))
        committed.extend(plan.accept_lens.tolist())
    assert len(set(committed)) > 2, "the rounds must differ"
    # A later round leaves the results of earlier ones alone.
    for got, wanted in earlier:
        assert torch.equal(got.cpu().view(wanted.shape), wanted)


test_equals_the_same_steps_one_by_one.pytestmark += on_device


def test_more_than_any_graph_holds() -> None:
    server = Server(SIZES, [bs * NODES for bs in SIZES], DEPTH + 1)
    graphs = m.CommitGraphs(budget=BUDGET, max_depth=DEPTH, feed=server.feed, **server.arguments())
    assert graphs.tree(max(SIZES)) is not None and graphs.tree(max(SIZES) + 1) is None


test_more_than_any_graph_holds.pytestmark = on_device


def test_a_workspace_of_its_own() -> None:
    helper = SimpleNamespace(
        _proj_workspace=1, _k_workspace=2, _v_workspace=3, _workspace_dtype=4, _workspace_capacity=5, weight=6
    )
    own = m.with_own_workspace(helper)
    assert (own._proj_workspace, own._k_workspace, own._v_workspace, own._workspace_dtype) == (None,) * 4
    assert own._workspace_capacity == 0 and own.weight == 6 and helper._workspace_capacity == 5


if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        assert_passes_in_the_interpreter(__file__)
