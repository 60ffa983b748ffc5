"""Ragged verify: the reference against plain Python, and the device kernels against the reference, bit for bit.

In the interpreter or on a GPU, see `_kernels.py`.
"""

import importlib.util
import math
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from _kernels import DEVICE, INTERPRETED, ROOT, assert_passes_in_the_interpreter, compile_for
from _load import load, load_ddtree_utils
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

on_device = [] if INTERPRETED else [pytest.mark.gpu]
GARBAGE = -0x5A5A5A5A
FOLDER = "python/sglang/srt/speculative"
REFERENCE_NAME = "sglang.srt.speculative.ddtree_ragged"
KERNELS_FILE = ROOT / FOLDER / "ddtree_ragged_kernels.py"

u = load_ddtree_utils()
r = load("ddtree_ragged", f"{FOLDER}/ddtree_ragged.py")


def load_kernels(name, path):
    """The kernels with the reference loaded by path, which stays out of SGLang's own package."""
    before = sys.modules.get(REFERENCE_NAME)
    sys.modules[REFERENCE_NAME] = r
    try:
        return load(name, path)
    finally:
        if before is None:
            del sys.modules[REFERENCE_NAME]
        else:
            sys.modules[REFERENCE_NAME] = before


k = load_kernels("ddtree_ragged_kernels", f"{FOLDER}/ddtree_ragged_kernels.py")


def on(device, args):
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in args]


def guarded(allocate, cut, *sizes, **options):
    """Buffers filled with garbage, and views of them without what ``cut`` says lies behind them."""
    memory = allocate(*sizes, DEVICE, **options)
    for field in fields(memory):
        x = getattr(memory, field.name)
        x.fill_(math.nan if x.dtype == torch.float32 else GARBAGE)
    views = {f.name: cut(f.name, getattr(memory, f.name)) for f in fields(memory)}
    return memory, type(memory)(**views)


def assert_garbage_behind(memory, views):
    for field in fields(memory):
        x, used = getattr(memory, field.name), getattr(views, field.name)
        behind = x.flatten()[used.numel() :]
        same = behind.isnan() if x.dtype == torch.float32 else behind == GARBAGE
        assert bool(same.all()), f"{field.name} was written behind its end"


def assert_equal(got, expected):
    """The same dtypes, shapes and bits in every field."""
    for field in fields(expected):
        x, y = getattr(got, field.name).cpu(), getattr(expected, field.name).cpu()
        assert x.dtype == y.dtype and x.shape == y.shape and x.is_contiguous(), field.name
        if x.dtype == torch.float32:
            x, y = x.view(torch.int32), y.view(torch.int32)
        assert torch.equal(x, y), f"{field.name}: {x.tolist()}, expected {y.tolist()}"


def call(kernels, name, args, memory, views):
    """The kernel into guarded buffers, equal to the reference on the CPU and on the device."""
    expected = getattr(r, name)(*args)
    if DEVICE != "cpu":
        assert_equal(getattr(r, name)(*on(DEVICE, args)), expected)
    assert getattr(kernels, name)(*on(DEVICE, args), out=views) is views
    assert_equal(views, expected)
    assert_garbage_behind(memory, views)
    return expected


# --- allotting ------------------------------------------------------------------------------------


def draw_scores(seed, bs, cap, kind):
    """Scores float32 [bs, cap], best first behind a root of 0.0, and numbers of nodes int64 [bs]."""
    rng = np.random.default_rng(seed)
    if kind == "grid":
        values = -0.25 * rng.integers(0, 40, size=(bs, cap))
    elif kind == "equal":
        values = np.full((bs, cap), -1.5)
    elif kind == "edges":
        values = rng.choice([0.0, -0.0, -1e-45, -1e-38, -1e-9, -1.0, -1.0000001, -3e38, -math.inf], size=(bs, cap))
    else:
        values = -rng.exponential(size=(bs, cap)) * rng.choice([0.01, 1.0, 8.0], size=(bs, 1))
    scores = -np.sort(-values.astype(np.float32), axis=-1)
    scores[:, 0] = 0.0
    num_nodes = rng.integers(1, cap + 1, size=bs) if seed % 2 else np.full(bs, cap)
    # What is no node has the score that padding has.
    scores[np.arange(cap) >= num_nodes[:, None]] = -math.inf
    return torch.from_numpy(scores), torch.from_numpy(num_nodes.astype(np.int64))


def nodes_in_order(scores, num_nodes):
    bs, cap = scores.shape
    values, exist = scores.tolist(), [min(max(x, 1), cap) for x in num_nodes.tolist()]
    return sorted((-values[b][i], b, i) for b in range(bs) for i in range(1, exist[b]))


def allot_and_compare(scores, num_nodes, total, kernels=k):
    bs = scores.shape[0]
    memory, views = guarded(r.allocate_allotment, lambda name, x: x if name == "histogram" else x[:-1], bs + 1)
    got = call(kernels, "allot_nodes", (scores, num_nodes, total), memory, views)

    order = nodes_in_order(scores, num_nodes)
    kept = order[: total - bs]
    lens = [1] * bs
    expected = [0.0] * bs
    for cost, b, i in kept:
        # Best first: the kept nodes of a request are its first ones.
        assert i == lens[b]
        lens[b] += 1
        expected[b] += math.exp(-cost)
    assert got.qo_lens.tolist() == lens
    assert got.qo_indptr.tolist() == [sum(lens[:b]) for b in range(bs + 1)]
    assert sum(lens) <= total
    np.testing.assert_allclose(got.expected.tolist(), expected, rtol=1e-6, atol=1e-6)
    bins = np.searchsorted(r.bin_edges(), [cost for cost, _, _ in order], side="right") - 1
    counts = np.bincount(bins.astype(np.int64), minlength=r.BINS)
    # Adding 1/8 rounds: a number just below an edge may fall onto it.
    assert got.histogram.sum() == len(order)
    assert np.abs(np.cumsum(got.histogram.numpy() - counts)).sum() <= 0.01 * len(order)
    return got


def totals(scores, num_nodes):
    """T from the roots alone to more than exist."""
    bs, exist = scores.shape[0], int(num_nodes.sum())
    return sorted({bs, bs + 1, bs + (exist - bs) // 3, max(bs, exist - 1), exist, exist + 1, exist + 1000})


@pytest.mark.parametrize("kind", ["grid", "equal", "edges", "exponential"])
@pytest.mark.parametrize(
    "bs, cap",
    [pytest.param(*c, marks=on_device) for c in ((1, 1), (1, 64), (2, 2), (5, 16), (16, 64), (17, 33), (256, 64))],
)
def test_the_best_nodes_of_the_batch_are_kept(bs, cap, kind):
    for seed in (2 * cap, 2 * cap + 1):
        scores, num_nodes = draw_scores(seed, bs, cap, kind)
        for total in totals(scores, num_nodes):
            allot_and_compare(scores, num_nodes, total)


@pytest.mark.parametrize(
    "bs", [pytest.param(bs, marks=on_device) for bs in (3, 15, 31, 32, 33, 64, 100, 128, 129, 255)]
)
def test_any_number_of_requests(bs):
    scores, num_nodes = draw_scores(2 * bs + 1, bs, 16, "grid")
    for total in (bs, 3 * bs, 40 * bs):
        allot_and_compare(scores, num_nodes, total)


@pytest.mark.parametrize("total", [pytest.param(total, marks=on_device) for total in range(4, 14)])
def test_ties_go_to_the_earlier_request(total):
    # -1 three times in request 1, twice in 2, once in 3; -0.5 once in 2.
    scores = torch.tensor([[0.0, -2.0, -2.0, -3.0], [0.0, -1, -1, -1], [0.0, -0.5, -1, -1], [0.0, -1, -2, -2]])
    got = allot_and_compare(scores, torch.full((4,), 4), total)
    expected = {4: [1, 1, 1, 1], 5: [1, 1, 2, 1], 7: [1, 3, 2, 1], 9: [1, 4, 3, 1], 11: [1, 4, 4, 2], 13: [3, 4, 4, 2]}
    if total in expected:
        assert got.qo_lens.tolist() == expected[total]


@pytest.mark.parametrize("bs", [pytest.param(bs, marks=on_device) for bs in (2, 256)])
def test_a_root_alone_beside_a_full_tree(bs):
    scores = torch.full((bs, 64), -9.0)
    scores[1] = -0.5
    scores[:, 0] = 0.0
    num_nodes = torch.full((bs,), 64)
    assert allot_and_compare(scores, num_nodes, bs + 63).qo_lens.tolist() == [1, 64] + [1] * (bs - 2)
    # The same because nothing else exists.
    num_nodes[0], num_nodes[2:] = 1, 1
    got = allot_and_compare(scores, num_nodes, 64 * bs)
    assert got.qo_lens.tolist() == [1, 64] + [1] * (bs - 2)
    assert got.expected[0] == 0 and got.qo_indptr[-1] == bs + 63


@pytest.mark.parametrize("cap", [pytest.param(4, marks=on_device)])
def test_values_outside_the_contract_stay_within_the_limits(cap):
    scores = torch.tensor([[math.nan] * 4, [0, -1, -math.inf, math.nan], [5.0, 4.0, -3.0, -2.0], [0, -1, -2, -3]])
    num_nodes = torch.tensor([4, 4, 0, 99])
    for total in range(4, 15):
        memory, views = guarded(r.allocate_allotment, lambda name, x: x if name == "histogram" else x[:-1], 5)
        got = call(k, "allot_nodes", (scores, num_nodes, total), memory, views)
        assert got.qo_lens.min() >= 1 and got.qo_lens[2] == 1 and got.qo_lens.max() <= 4
        assert got.qo_indptr[-1] == got.qo_lens.sum() == min(total, 13)
        assert bool(got.expected.isfinite().all())


def test_a_nodes_probability_is_exp_of_its_score():
    x = torch.cat([torch.linspace(0, 20, 100_001), torch.logspace(-40, 2, 10_001), torch.tensor([0.0, math.inf])])
    units = r._probability(x.view(torch.int32))
    exact = torch.exp(-x.to(torch.float64)) * 2**24
    assert (units - exact).abs().max() < 8
    assert units[-2] == 2**24 and units[-1] == 0 and units.min() >= 0 and units.max() == 2**24


def test_the_gain_from_a_histogram_is_near_the_exact_one():
    rng = np.random.default_rng(0)
    for bs, spread in ((1, 1.0), (8, 1.0), (32, 0.1), (64, 3.0), (256, 1.0)):
        candidates = -np.sort(rng.exponential(size=(bs, 15, 8)) * spread * np.arange(0.05, 8), axis=-1)
        ids = torch.arange(8).expand(bs, 15, 8)
        tree = u.build_trees(torch.zeros(bs, dtype=torch.int64), ids, torch.tensor(candidates).float(), 63)
        got = r.allot_nodes(tree.scores, tree.num_nodes, bs)
        exact = np.cumsum(np.sort(tree.scores[:, 1:].double().exp().flatten().numpy())[::-1])
        # Averages within a bin hold for many nodes, so a single request is off by more.
        share = 0.03 if bs == 1 else 0.015
        for nodes in {bs // 4, bs, 3 * bs, 15 * bs, 63 * bs} - {0}:
            assert abs(r.expected_gain(got.histogram, nodes) / exact[nodes - 1] - 1) < share, (bs, spread, nodes)
        curve = r.expected_gain(got.histogram.tolist(), np.arange(64 * bs))
        assert curve[0] == 0 and (np.diff(curve) >= 0).all() and (np.diff(curve, 2) < 1e-9).all()
        assert curve[-1] == r.expected_gain(got.histogram, math.inf)
    edges = r.bin_edges()
    assert edges[0] == 0 and edges[1] == 1 / 64 and edges[-1] == 29.875 and (np.diff(edges, 2) >= 0).all()
    with pytest.raises(ValueError, match=r"histogram must have the shape \[64\], got \[63\]"):
        r.expected_gain([0] * 63, 1)


# --- packing --------------------------------------------------------------------------------------


def draw_trees(seed, bs, cap, vocab):
    """Random trees as dense tensors: tokens, parents, depths, num_nodes, ancestor bits."""
    rng = np.random.default_rng(seed)
    num_nodes = [int(rng.integers(1, cap + 1)) for _ in range(bs)]
    parents = [[-1] + [int(rng.integers(0, i)) if i < num_nodes[b] else -1 for i in range(1, cap)] for b in range(bs)]
    depths = [[0] * cap for _ in range(bs)]
    for b in range(bs):
        for i in range(1, num_nodes[b]):
            depths[b][i] = depths[b][parents[b][i]] + 1
    tokens = torch.from_numpy(rng.integers(0, vocab, size=(bs, cap)))
    parents = torch.tensor(parents, dtype=torch.int64).view(bs, cap)
    tokens[:, 1:][parents[:, 1:] < 0] = 0
    bits = u.bit_mask(u.ancestor_mask(parents, cap))
    return tokens, parents, torch.tensor(depths, dtype=torch.int64).view(bs, cap), num_nodes, bits


def draw_lens(seed, num_nodes):
    """Kept nodes per request, one and all among them, and where they begin."""
    rng = np.random.default_rng(seed + 1)
    lens = [int(rng.choice([1, n, rng.integers(1, n + 1)])) for n in num_nodes]
    return lens, torch.tensor([sum(lens[:b]) for b in range(len(lens) + 1)], dtype=torch.int32)


def draw_pool(seed, bs, cap, columns, dtype):
    rng = np.random.default_rng(seed + 2)
    pool = torch.from_numpy(rng.permutation((bs + 3) * columns).astype(np.int32) + 1).view(bs + 3, columns)
    rows = torch.from_numpy(rng.permutation(bs + 3)[:bs].astype(np.int64)).to(dtype)
    seq_lens = torch.from_numpy(rng.integers(0, columns - cap + 1, size=bs)).to(dtype)
    return pool, rows, seq_lens


def pack_and_compare(seed, bs, cap, tail, dtype=torch.int64, kernels=k):
    tokens, parents, depths, num_nodes, bits = draw_trees(seed, bs, cap, 50)
    lens, qo_indptr = draw_lens(seed, num_nodes)
    pool, rows, seq_lens = draw_pool(seed, bs, cap, cap + 9, dtype)
    total = sum(lens) + tail
    memory, views = guarded(r.allocate_packed, lambda _, x: x[:total], total + 40, bits.shape[2])
    got = call(kernels, "pack_nodes", (tokens, depths, bits, qo_indptr, seq_lens, rows, pool, total), memory, views)
    t = 0
    for b in range(bs):
        length = int(seq_lens[b])
        for i in range(lens[b]):
            sees, at = set(), i
            while at >= 0:
                sees.add(at)
                at = int(parents[b, at])
            words = got.ancestor_bits[t].tolist()
            assert {j for j in range(64 * len(words)) if words[j // 64] >> (j % 64) & 1} == sees
            assert got.tokens[t] == tokens[b, i] and got.depths[t] == depths[b, i] == len(sees) - 1
            assert got.positions[t] == length + depths[b, i]
            assert got.slots[t] == pool[rows[b], length + i]
            assert (got.owners[t], got.nodes[t]) == (b, i)
            t += 1
    for field in fields(got):
        expected = -1 if field.name == "owners" else 0
        assert bool((getattr(got, field.name)[t:] == expected).all()), field.name
    return got


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "bs, cap, tail",
    [pytest.param(*c, marks=on_device) for c in ((1, 1, 0), (1, 64, 1), (2, 16, 5), (7, 64, 70), (3, 65, 9))],
)
def test_packed_rows_are_the_kept_nodes_in_order(bs, cap, tail, dtype):
    for seed in range(3):
        pack_and_compare(seed, bs, cap, tail, dtype)


@pytest.mark.parametrize("bs", [pytest.param(256, marks=on_device)])
def test_many_requests_are_packed(bs):
    pack_and_compare(0, bs, 8, 100)


@pytest.mark.parametrize("total", [pytest.param(total, marks=on_device) for total in (0, 3, 100)])
def test_an_empty_batch_is_all_tail(total):
    tokens, _, depths, _, bits = draw_trees(0, 0, 4, 5)
    none = torch.zeros(0, dtype=torch.int64)
    scores = torch.zeros(0, 4, device=DEVICE)
    allotted = k.allot_nodes(scores, none.to(DEVICE), total)
    assert_equal(allotted, r.allot_nodes(scores.cpu(), none, total))
    assert allotted.qo_indptr.tolist() == [0] and not bool(allotted.histogram.any())
    args = (tokens, depths, bits.view(0, 4, 1), allotted.qo_indptr.cpu(), none, none, torch.ones(1, 9).int(), total)
    got = k.pack_nodes(*on(DEVICE, args))
    assert_equal(got, r.pack_nodes(*args))
    assert got.owners.tolist() == [-1] * total
    walk = k.walk_packed(*on(DEVICE, (tokens, tokens, allotted.qo_indptr.cpu(), got.tokens, 3, none, got.slots)))
    assert walk.accept_index.shape == (0, 4)


@pytest.mark.parametrize("short", [pytest.param(short, marks=on_device) for short in (1, 6, 12)])
def test_no_access_leaves_its_tensor(short):
    # 16 nodes, but fewer rows and fewer columns than they need.
    tokens, parents, depths, _, bits = draw_trees(4, 2, 8, 50)
    qo_indptr = torch.tensor([0, 8, 16], dtype=torch.int32)
    pool = torch.arange(1, 13, dtype=torch.int32).view(2, 6)
    total = 16 - short
    args = (tokens, depths, bits, qo_indptr, torch.tensor([2, 5]), torch.tensor([1, 0]), pool, total)
    memory, views = guarded(r.allocate_packed, lambda _, x: x[:total], 16, 1)
    got = call(k, "pack_nodes", args, memory, views)
    assert got.slots.tolist() == [9, 10, 11, 12, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0][:total]
    walked, walk_views = guarded(r.allocate_walk, lambda _, x: x[:2], 3, 12)
    args = (tokens, parents, qo_indptr, got.tokens, 12, torch.tensor([2, 5]), got.slots)
    k.walk_packed(*on(DEVICE, args), out=walk_views)
    assert_garbage_behind(walked, walk_views)


# --- walking --------------------------------------------------------------------------------------


def walk_and_compare(seed, bs, cap, max_depth, vocab, tail=3, dtype=torch.int64, kernels=k):
    tokens, parents, _, num_nodes, _ = draw_trees(seed, bs, cap, vocab)
    lens, qo_indptr = draw_lens(seed, num_nodes)
    rng = np.random.default_rng(seed + 3)
    total = sum(lens) + tail
    choices = torch.from_numpy(rng.integers(0, vocab, size=total))
    slots = torch.from_numpy(rng.permutation(total) + 1)
    seq_lens = torch.from_numpy(rng.integers(0, 1000, size=bs)).to(dtype)
    memory, views = guarded(r.allocate_walk, lambda _, x: x[:bs], bs + 1, max_depth, seq_lens_dtype=dtype)
    args = (tokens, parents, qo_indptr, choices, max_depth, seq_lens, slots)
    got = call(kernels, "walk_packed", args, memory, views)
    for b in range(bs):
        begin, length = int(qo_indptr[b]), int(seq_lens[b])
        path = [0]
        while len(path) <= max_depth:
            wanted = choices[begin + path[-1]]
            children = [i for i in range(1, lens[b]) if parents[b, i] == path[-1] and tokens[b, i] == wanted]
            if not children:
                break
            path.append(children[0])
        committed = [int(choices[begin + i]) for i in path]
        behind = max_depth + 1 - len(path)
        own = [i if i < lens[b] else 0 for i in range(max_depth + 1)]
        rows = [begin + i for i in path + own[len(path) :]]
        assert got.accept_index[b].tolist() == path + [-1] * behind
        assert got.num_accepted_drafts[b] == len(path) - 1 and got.accept_lens[b] == len(path)
        assert got.bonus[b] == committed[-1]
        assert got.next_tokens[b].tolist() == committed + [0] * behind
        assert got.new_seq_lens[b] == length + len(path) and got.new_seq_lens.dtype == dtype
        assert got.rows[b].tolist() == rows and max(rows) < begin + lens[b]
        assert got.kv_from[b].tolist() == slots[rows].tolist()
        assert got.kv_to[b].tolist() == [int(slots[begin + i]) for i in own]
        assert got.positions[b].tolist() == [length + i for i in own]
        # A copy of all places at once changes nothing behind the path.
        for target, source in list(zip(got.kv_to[b].tolist(), got.kv_from[b].tolist(), strict=True))[len(path) :]:
            assert target == source
    return got


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "bs, cap, max_depth",
    [
        pytest.param(*c, marks=on_device)
        for c in ((1, 1, 0), (3, 1, 5), (4, 16, 15), (2, 64, 15), (5, 64, 2), (3, 65, 40))
    ],
)
def test_a_walk_stays_inside_the_kept_nodes(bs, cap, max_depth, dtype):
    # A small vocabulary makes siblings of one token common too: the first must win. Token 0 is also padding's.
    for seed, vocab in enumerate((1, 2, 3, 6)):
        walk_and_compare(seed, bs, cap, max_depth, vocab, dtype=dtype)


@pytest.mark.parametrize("bs", [pytest.param(256, marks=on_device)])
def test_many_requests_are_walked(bs):
    walk_and_compare(0, bs, 8, 7, 2)


@pytest.mark.parametrize("kept", [pytest.param(kept, marks=on_device) for kept in (1, 2, 9, 16)])
def test_a_chain_is_accepted_up_to_where_it_is_cut(kept):
    # Behind the cut the rows are the next request's, whose choice there is the cut-off child's token.
    tokens, parents = torch.arange(16).repeat(2, 1), torch.arange(-1, 15).repeat(2, 1)
    choices = torch.cat([torch.arange(1, kept + 1), torch.arange(1, 17)])
    qo_indptr = torch.tensor([0, kept, kept + 16], dtype=torch.int32)
    args = (tokens, parents, qo_indptr, choices, 15, torch.tensor([7, 7]), torch.arange(kept + 16) + 100)
    got = k.walk_packed(*on(DEVICE, args))
    assert_equal(got, r.walk_packed(*args))
    assert got.num_accepted_drafts.tolist() == [kept - 1, 15] and got.bonus.tolist() == [kept, 16]
    assert got.kv_to[0].tolist() == [100 + i if i < kept else 100 for i in range(16)]
    assert got.positions[0].tolist() == [7 + i if i < kept else 7 for i in range(16)]


@pytest.mark.parametrize("bs, budget", [pytest.param(*c, marks=on_device) for c in ((1, 15), (3, 63))])
def test_with_room_for_all_a_round_is_the_dense_one(bs, budget):
    levels, cap = 15, budget + 1
    rng = np.random.default_rng(budget)
    lp = torch.from_numpy(-np.sort(rng.exponential(size=(bs, levels, 8)), axis=-1)).float()
    ids = torch.arange(8).expand(bs, levels, 8).contiguous()
    tree = u.build_trees(torch.full((bs,), 9), ids, lp, budget)
    bits = u.bit_mask(tree.visible)
    pool, rows, seq_lens = draw_pool(1, bs, cap, 200, torch.int64)
    dense_slots = pool[rows[:, None], seq_lens[:, None] + torch.arange(cap)].long()
    # Rank 0 mostly, so that paths are long.
    choices = torch.from_numpy(rng.choice([0, 0, 0, 1, 2], size=(bs, cap)))

    allotted = k.allot_nodes(tree.scores.to(DEVICE), tree.num_nodes.to(DEVICE), bs * cap)
    args = (tree.tokens, tree.depths, bits, allotted.qo_indptr, seq_lens, rows, pool, bs * cap)
    packed = k.pack_nodes(*on(DEVICE, args))
    assert torch.equal(packed.tokens.cpu(), tree.tokens.flatten())
    assert torch.equal(packed.positions.cpu(), u.tree_positions(tree.depths, seq_lens).flatten())
    assert torch.equal(packed.slots.cpu(), dense_slots.flatten())
    assert torch.equal(packed.ancestor_bits.cpu(), bits.flatten(0, 1))
    args = (tree.tokens, tree.parents, allotted.qo_indptr, choices.flatten(), levels, seq_lens, packed.slots)
    walk = k.walk_packed(*on(DEVICE, args))
    expected = u.walk_trees(tree.tokens, tree.parents, choices, levels)
    plan = u.plan_commit(expected, choices, seq_lens, dense_slots)
    for part in (expected, plan):
        for field in fields(part):
            x, y = getattr(walk, field.name).cpu(), getattr(part, field.name)
            assert x.dtype == y.dtype and torch.equal(x, y[:, : levels + 1] if field.name == "next_tokens" else y)


# --- what is refused ------------------------------------------------------------------------------


def valid(name):
    i64, i32 = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    lens, flat = torch.zeros(2, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    return {
        "allot_nodes": {"scores": torch.zeros(2, 3), "num_nodes": lens, "total": 4},
        "pack_nodes": {
            "tokens": i64,
            "depths": i64,
            "ancestor_bits": i64[..., None].clone(),
            "qo_indptr": i32,
            "seq_lens": lens,
            "req_pool_indices": lens,
            "req_to_token": torch.zeros(4, 9, dtype=torch.int32),
            "total": 5,
        },
        "walk_packed": {
            "tokens": i64,
            "parents": i64,
            "qo_indptr": i32,
            "choices": flat,
            "max_depth": 2,
            "seq_lens": lens,
            "slots": flat,
        },
    }[name]


REFUSED = [
    ("allot_nodes", {"total": 1}, "total must be at least 2, one root per request, got 1"),
    ("allot_nodes", {"scores": torch.zeros(2, 65)}, r"C from 1 to 64, got \[2, 65\]"),
    ("allot_nodes", {"scores": torch.zeros(2, 3).double()}, "scores must be torch.float32, got torch.float64"),
    ("allot_nodes", {"scores": torch.zeros(3, 2).T}, "scores must be contiguous"),
    ("allot_nodes", {"num_nodes": torch.zeros(2)}, "num_nodes must be torch.int64, got torch.float32"),
    ("allot_nodes", {"num_nodes": torch.zeros(3).long()}, r"num_nodes must have the shape \[2\], got \[3\]"),
    ("pack_nodes", {"total": 1}, "total must be at least 2, one root per request, got 1"),
    ("pack_nodes", {"tokens": torch.zeros(6).long()}, r"tokens must have the shape \[bs, C\], .* got \[6\]"),
    ("pack_nodes", {"depths": torch.zeros(2, 3)}, "depths must be torch.int64, got torch.float32"),
    ("pack_nodes", {"ancestor_bits": torch.zeros(2, 3, 2).long()}, r"\[2, 3, 1\], got \[2, 3, 2\]"),
    ("pack_nodes", {"qo_indptr": torch.zeros(2).int()}, r"qo_indptr must have the shape \[3\], got \[2\]"),
    ("pack_nodes", {"seq_lens": torch.zeros(2)}, "seq_lens must be torch.int32 or torch.int64"),
    ("pack_nodes", {"req_pool_indices": torch.zeros(2, device="meta").int()}, "must be on cpu .*, got meta"),
    ("pack_nodes", {"req_to_token": torch.zeros(4).int()}, r"req_to_token must have the shape \[R, L\], .* got \[4\]"),
    ("walk_packed", {"max_depth": -1}, "max_depth must be at least 0, got -1"),
    ("walk_packed", {"parents": torch.zeros(2, 4).long()}, r"parents must have the shape \[2, 3\], got \[2, 4\]"),
    ("walk_packed", {"choices": torch.zeros(1).long()}, r"choices must have the shape \[T\], T at least 2, got \[1\]"),
    ("walk_packed", {"slots": torch.zeros(4).long()}, r"slots must have the shape \[5\], got \[4\]"),
]


@pytest.mark.parametrize("name, changed, message", REFUSED)
def test_refuses(name, changed, message):
    for module in (r, k):
        with pytest.raises(ValueError, match=message):
            getattr(module, name)(**valid(name) | changed)


def test_the_kernels_refuse():
    many = {"scores": torch.zeros(257, 1), "num_nodes": torch.zeros(257).long(), "total": 300}
    for name, changed, message in (
        ("allot_nodes", many, "at most 256 requests, got 257"),
        ("allot_nodes", {"out": r.allocate_allotment(3, "cpu")}, r"out.qo_lens must have the shape \[2\], got \[3\]"),
        ("pack_nodes", {"out": r.allocate_packed(6, 1, "cpu")}, r"out.tokens must have the shape \[5\], got \[6\]"),
        ("walk_packed", {"out": r.allocate_walk(2, 2, "meta")}, "out.accept_index must be on cpu .*, got meta"),
        (
            "walk_packed",
            {"out": r.allocate_walk(2, 2, "cpu", seq_lens_dtype=torch.int32)},
            "out.new_seq_lens must be torch.int64, got torch.int32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            getattr(k, name)(**valid(name) | changed)


if INTERPRETED:

    @settings(max_examples=60, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1),
        bs=st.integers(1, 40),
        cap=st.integers(1, 64),
        share=st.floats(0, 1.2),
        kind=st.sampled_from(["grid", "equal", "edges", "exponential"]),
    )
    def test_the_best_nodes_of_random_batches_are_kept(seed, bs, cap, share, kind):
        allot_and_compare(*draw_scores(seed, bs, cap, kind), bs + int(share * bs * (cap - 1)))

    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 2**32 - 4), bs=st.integers(1, 6), cap=st.integers(1, 64), tail=st.integers(0, 70))
    def test_random_batches_are_packed(seed, bs, cap, tail):
        pack_and_compare(seed, bs, cap, tail)

    @settings(max_examples=40, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 4),
        bs=st.integers(1, 6),
        cap=st.integers(1, 64),
        max_depth=st.integers(0, 18),
        vocab=st.integers(1, 5),
    )
    def test_random_batches_are_walked(seed, bs, cap, max_depth, vocab):
        walk_and_compare(seed, bs, cap, max_depth, vocab)

    def check_everything(kernels):
        for kind in ("grid", "edges"):
            scores, num_nodes = draw_scores(3, 5, 16, kind)
            for total in totals(scores, num_nodes):
                allot_and_compare(scores, num_nodes, total, kernels=kernels)
        pack_and_compare(1, 3, 16, 5, kernels=kernels)
        for seed in range(4):
            walk_and_compare(seed, 3, 16, 9, 2, kernels=kernels)

    MUTATIONS = [
        ("ties-out-of-order", "tl.cumsum(tied, axis=0) - tied", "tl.cumsum(tied, axis=0)"),
        ("ties-all", "taken = tl.minimum(tl.maximum(left, 0), tied)", "taken = tied"),
        ("wrong-half", "below < wanted", "below > wanted"),
        ("coarse-bisection", "for step in range(31)", "for step in range(30)"),
        ("root-counted", "drafted = (node >= 1)", "drafted = (node >= 0)"),
        ("absent-counted", "ranked = tl.where(drafted, cost, _MAGNITUDE)", "ranked = cost"),
        ("all-expected", "(node[None, :] < qo_len[:, None])", "(node[None, :] < exist[:, None])"),
        ("position-by-index", "length + depth", "length + lane"),
        ("tail-owned", "zero - 1", "zero"),
        ("slot-of-depth", "column = length + lane", "column = length + depth"),
        ("cut-ignored", "kept = node < count", "kept = node < cap"),
        ("place-behind-the-cut", "own = tl.where(place < count, place, 0)", "own = place"),
        ("own-slot-behind-the-path", "tl.where(accepted, path, own)", "tl.where(accepted, path, 0)"),
    ]

    def test_the_checks_pass_unchanged():
        check_everything(k)

    @pytest.mark.parametrize("name, old, new", MUTATIONS, ids=[name for name, _, _ in MUTATIONS])
    def test_the_checks_notice(name, old, new, tmp_path, monkeypatch):
        source = KERNELS_FILE.read_text()
        assert source.count(old) == 1, "the mutation must change one place"
        file = tmp_path / "mutated.py"
        file.write_text(source.replace(old, new))
        monkeypatch.setitem(sys.modules, REFERENCE_NAME, r)
        spec = importlib.util.spec_from_file_location("mutated", file)
        mutated = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(mutated)
        with pytest.raises(AssertionError):
            check_everything(mutated)


if not INTERPRETED:

    class Round:
        """Allot, pack and walk over fixed buffers, as a CUDA graph holds them."""

        def __init__(self, bs, cap, total):
            self.bs, self.cap, self.total = bs, cap, total
            self.inputs = on("cuda", self.draw(0))
            self.allotted = r.allocate_allotment(bs, "cuda")
            self.packed = r.allocate_packed(total, 1, "cuda")
            self.walk = r.allocate_walk(bs, 15, "cuda")

        def draw(self, seed):
            scores, _ = draw_scores(2 * seed, self.bs, self.cap, ["grid", "edges", "exponential"][seed % 3])
            tokens, parents, depths, num_nodes, bits = draw_trees(seed, self.bs, self.cap, 2)
            pool, rows, seq_lens = draw_pool(seed, self.bs, self.cap, 300, torch.int64)
            choices = torch.from_numpy(np.random.default_rng(seed).integers(0, 2, size=self.total))
            return scores, torch.tensor(num_nodes), tokens, parents, depths, bits, pool, rows, seq_lens, choices

        def run(self, module=k, inputs=None, **buffers):
            scores, num_nodes, tokens, parents, depths, bits, pool, rows, seq_lens, choices = inputs or self.inputs
            out = {name: {"out": x} for name, x in buffers.items()}
            first = module.allot_nodes(scores, num_nodes, self.total, **out.get("allotted", {}))
            indptr = first.qo_indptr
            args = (tokens, depths, bits, indptr, seq_lens, rows, pool, self.total)
            packed = module.pack_nodes(*args, **out.get("packed", {}))
            args = (tokens, parents, indptr, choices, 15, seq_lens, packed.slots)
            return first, packed, module.walk_packed(*args, **out.get("walk", {}))

        def run_fixed(self):
            return self.run(allotted=self.allotted, packed=self.packed, walk=self.walk)

        def check(self, results):
            for got, expected in zip(results, self.run(r, on("cpu", self.inputs)), strict=True):
                assert_equal(got, expected)

    @pytest.mark.gpu
    @pytest.mark.parametrize("bs, cap, total", [(1, 64, 40), (8, 16, 64), (32, 64, 512), (256, 64, 1024)])
    def test_a_captured_round_follows_its_inputs(bs, cap, total):
        fixed = Round(bs, cap, total)
        # Compiles; a capture must not.
        fixed.run_fixed()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = fixed.run_fixed()
        for seed in range(6):
            for x, new in zip(fixed.inputs, fixed.draw(seed), strict=True):
                x.copy_(new)
            graph.replay()
            fixed.check(results)

    @pytest.mark.gpu
    @pytest.mark.parametrize("module", [k, r], ids=["kernels", "reference"])
    def test_a_round_does_not_wait_for_the_host(module):
        fixed = Round(8, 16, 64)
        fixed.run(module)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                results = fixed.run(module)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        fixed.check(results)

    # --- without a GPU --------------------------------------------------------------------------------

    TYPES = {
        "scores": "*fp32",
        "expected_out": "*fp32",
        **{name: "*i32" for name in ("qo_indptr", "req_to_token", "qo_lens_out", "qo_indptr_out", "histogram_out")},
        "accept_lens_out": "*i32",
        **{name: "*i64" for name in ("num_nodes", "tokens", "parents", "depths", "bits", "choices", "slots")},
        **{name: "*i64" for name in ("seq_lens", "req_pool_indices")},
    }

    def kernel_cases():
        for requests, nodes in ((16, 16), (16, 64), (64, 64), (256, 64)):
            sizes = {"REQUESTS": requests, "NODES": nodes}
            yield f"allot-{requests}-{nodes}", k._allot_kernel, sizes, {}, k._warps(requests * nodes)
        narrow = {"seq_lens": "*i32", "req_pool_indices": "*i32", "new_seq_lens_out": "*i32"}
        for types in ({}, narrow):
            yield f"pack-{len(types)}", k._pack_kernel, {"BLOCK": 64}, types, 1
            yield f"walk-{len(types)}", k._walk_packed_kernel, {"BLOCK": 64, "PATH_BLOCK": 32}, types, 1

    @pytest.mark.parametrize("arch", [80, 90, 100, 120])
    def test_kernels_compile_ahead_of_time(arch, tmp_path, monkeypatch):
        # An own cache, or an earlier compilation would be found.
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        for name, kernel, constants, own, warps in kernel_cases():
            types = TYPES | own

            def type_of(arg, types=types):
                return types.get(arg, "*i64" if arg.endswith("_out") else "i32")

            options = {"enable_fp_fusion": False} if name.startswith("allot") else {}
            compiled = compile_for(arch, kernel, constants, type_of, num_warps=warps, **options)
            assert compiled.asm["cubin"], name
            # A flushed subnormal would make scores tie that do not; a fused sum or a fast division is another number.
            for inexact in (".ftz", "fma.rn.f32", "div.", ".approx"):
                assert inexact not in compiled.asm["ptx"], (name, inexact)
            assert ".local" not in compiled.asm["ptx"], name

    def test_the_kernels_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
