"""A packed commit by one replay, against the same steps one by one. In the interpreter or on a GPU: `_kernels.py`."""

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
from sglang.srt.speculative.ddtree_packed_graph import PackedCommitGraphs  # noqa: E402
from sglang.srt.speculative.ddtree_round import DeviceRound, TorchRound, root_trees  # noqa: E402

on_device = [] if INTERPRETED else [pytest.mark.gpu]
BUDGET, DEPTH, TOPK = 7, 5, 3
SIZES, TOTALS = [1, 2, 4], [1, 2, 4, 8, 12, 20, 32]


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_same_steps_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    server = Server(SIZES, TOTALS, DEPTH + 1)
    graphs = PackedCommitGraphs(budget=BUDGET, max_depth=DEPTH, feed=server.feed_rows, **server.arguments())
    # All shapes of packing were compiled.
    assert {(bs, total) for total in TOTALS for bs in SIZES if bs <= total} <= set(graphs._shares)
    steps, reference = DeviceRound(), TorchRound()
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    committed = []
    # Full and cut trees, roots alone, a tail behind all nodes, padded sizes, and a larger batch's remains.
    for raw, total in (
        (4, 32),
        (3, 12),
        (3, 12),
        (2, 2),
        (1, 8),
        (3, 4),
        (4, 20),
        (1, 1),
        (2, 20),
        (2, 20),
        (2, 8),
        (4, 8),
    ):
        plain = total < raw + 1 or (raw, total) == (3, 4)
        ids = torch.from_numpy(rng.permuted(np.tile(np.arange(20), (raw, DEPTH, 1)), axis=-1)[..., :TOPK].copy())
        logprobs = torch.from_numpy(-np.sort(rng.exponential(size=(raw, DEPTH, TOPK)).astype(np.float32), axis=-1))
        bonus = torch.from_numpy(rng.integers(0, 20, raw))
        seq_lens = torch.from_numpy(rng.integers(5, 30, raw))
        table = (1 + torch.from_numpy(rng.permutation(199)))[: raw * 40].view(raw, -1).to(torch.int32)
        pool_rows = torch.arange(raw)
        if plain:
            tree, expected_tree = graphs.plain_tree(bonus.to(DEVICE)), root_trees(bonus, seq_lens)
        else:
            out = graphs.tree(raw)
            arguments = (bonus.to(DEVICE), ids.to(DEVICE), logprobs.to(DEVICE), BUDGET, seq_lens.to(DEVICE))
            tree = steps.build(*arguments, out)
            assert tree is out
            expected_tree = reference.build(bonus, ids, logprobs, BUDGET, seq_lens)
        moved_to = [x.to(DEVICE) for x in (seq_lens, pool_rows, table)]
        packed = graphs.pack(tree, total, *moved_to)
        assert bool((graphs._indptr[raw + 1 : min(total, max(SIZES)) + 1] == total).all())
        wanted = reference.pack(expected_tree, total, seq_lens, pool_rows, table)
        for name, x in vars(wanted.nodes).items():
            got = getattr(packed.nodes, name).cpu()
            assert torch.equal(got, x), name
        for name, x in vars(wanted.share).items():
            assert plain and name in ("histogram", "expected") or torch.equal(getattr(packed.share, name).cpu(), x), (
                name
            )

        # The verify pass: now and then a node's own child, else nothing that is there.
        choices = torch.from_numpy(rng.integers(30, 50, total))
        starts, lens = wanted.share.qo_indptr.tolist(), wanted.share.qo_lens.tolist()
        for b in range(raw):
            for node in range(1, lens[b]):
                if rng.random() < 0.6:
                    parent = int(wanted.tree.parents[b, node])
                    choices[starts[b] + parent] = wanted.tree.tokens[b, node]
        server.logits[total].copy_(torch.nn.functional.one_hot(choices, 50).to(torch.float32))
        server.hidden[total].copy_(torch.from_numpy(rng.normal(size=(total, FEATURES))))
        server.buffers.seq_lens.fill_(1)
        server.buffers.seq_lens[:raw] = moved_to[0]
        server.buffers.out_cache_loc[:total] = packed.nodes.slots
        server.forward(total)
        # Behind the last row lies what a larger round left: let it match the tree that an earlier round left there.
        held = graphs._places[total].requests
        if raw < held and total < max(TOTALS):
            stale = graphs._trees.whole
            server.tail.choices[starts[raw]] = stale.tokens[raw, 1]
            server.buffers.out_cache_loc[starts[raw] : starts[raw] + 8] = torch.arange(150, 158)[
                : max(TOTALS) - starts[raw]
            ].to(DEVICE)
        if raw == 2:
            # A sampled round: other choices than the likeliest.
            choices = (choices + 1) % 20
            graphs.choices(total).copy_(choices[:, None])
        depth = min(DEPTH, wanted.tree.tokens.shape[1] - 1)
        walk = reference.commit_packed(wanted, choices, depth, seq_lens)
        buffers = server.pool.k_buffer + server.pool.v_buffer
        moved = [x.cpu().clone() for x in buffers]
        valid = torch.arange(depth + 1) < walk.accept_lens[:, None]
        for x in moved:
            x[walk.kv_to[valid]] = x[walk.kv_from[valid]]
        drafted = server.drafted.cpu().clone()
        drafted[walk.kv_to[valid]] = server.hidden[total].cpu()[walk.rows[valid]]
        drafted[walk.kv_to[valid], 0] = walk.positions[valid].to(torch.float32)

        done = graphs.replay(raw, total)
        assert torch.equal(done.next_tokens.cpu().view(raw, -1)[:, : depth + 1], walk.next_tokens)
        assert torch.equal(done.accept_lens.cpu(), walk.accept_lens) and done.accept_lens.dtype == torch.int32
        assert torch.equal(done.new_seq_lens.cpu(), walk.new_seq_lens)
        assert torch.equal(done.bonus.cpu(), walk.bonus)
        assert torch.equal(done.rows.cpu()[:, : depth + 1], walk.rows)
        assert torch.equal(done.round_stats.cpu(), reference.stats(wanted.cut(), walk))
        if not plain:
            assert torch.equal(done.histogram.cpu(), wanted.share.histogram)
            assert torch.equal(done.expected.cpu(), wanted.share.expected)
        # What fills the graph up, whatever an earlier round left there for it to walk.
        rest = graphs._places[total].walk
        assert not rest.kv_to[raw:].any() and not rest.kv_from[raw:].any()
        for got, x in zip(buffers, moved, strict=True):
            # Slot 0 is SGLang's dummy.
            assert torch.equal(got.cpu()[1:], x[1:])
        # As for the target's pool: what was accepted, where it belongs, and nothing else.
        assert torch.equal(server.drafted.cpu()[1:], drafted[1:])
        earlier.append((done.next_tokens, done.next_tokens.cpu().clone()))
        committed.extend(walk.accept_lens.tolist())
    assert len(set(committed)) > 2, "the rounds must differ"
    # A later round leaves the results of earlier ones alone.
    for got, x in earlier:
        assert torch.equal(got.cpu(), x)


test_equals_the_same_steps_one_by_one.pytestmark += on_device

if not INTERPRETED:

    def test_in_the_interpreter() -> None:
        assert_passes_in_the_interpreter(__file__)
