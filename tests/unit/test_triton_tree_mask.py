"""Ancestor-mask attention in Triton against its PyTorch reference, in float32.

Whether Triton compiles or interprets is decided when it is imported. So with TRITON_INTERPRET=1 this file tests the
kernels on the CPU; without, it starts itself once with that variable, compiles the kernels ahead of time for several
GPUs, and tests them on a CUDA device (marker `gpu`).
"""

import itertools
import math
import random

import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter, compile_for
from _load import load, load_ddtree_utils
from test_torch_tree_mask import TREES, ancestors, chain, depths_of, random_tree, star, visible_of

triton = pytest.importorskip("triton")

from sglang.srt.layers.attention.torch_tree_mask import tree_attention as reference  # noqa: E402

m = load("triton_tree_mask", "python/sglang/srt/layers/attention/triton_tree_mask.py")
u = load_ddtree_utils()

# Float32 sums of at most 700 terms of size 1; on a GPU 4400. For 16 bits: weights and result are rounded to 8 (11)
# bits, values are up to 4, so 2 x 4 x 2^-9 (2^-12).
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 0.016, torch.float16: 0.002}
CONTEXTS = [0, 1, 63, 64, 65, 200] + ([] if INTERPRETED else [4097])


def on_device(test):
    """Where Triton compiles, a test of kernels needs a GPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


def bits_of(parents, words):
    """int64 [N, W] by loops over the parents."""
    rows = []
    for node in range(len(parents)):
        row = [0] * words
        for other in ancestors(parents, node):
            row[other // 64] |= 1 << (other % 64)
        rows.append([word - (1 << 64) if word >> 63 else word for word in row])
    return torch.tensor(rows, dtype=torch.int64)


def best_first_trees(bs, budget, seed):
    """Parents of the trees that DDTree builds of random drafts, padding included."""
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(3 * torch.randn(bs, 7, 32, generator=generator), -1)
    logprobs, ids = logprobs.topk(6, dim=-1)
    return u.build_trees(torch.zeros(bs, dtype=torch.int64), ids, logprobs, budget).parents.tolist()


class Batch:
    """Requests of ragged trees and contexts in scattered slots; what no request owns is NaN.

    Two tokens without a request stand behind the last one.
    """

    def __init__(
        self, trees, contexts, heads=4, kv_heads=2, dim=64, v_dim=None, dtype=torch.float32, cache=None, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        v_dim = v_dim or dim
        self.trees, self.contexts, self.dtype = trees, contexts, dtype

        def draw(*shape, dtype=dtype):
            return torch.randn(*shape, generator=generator).to(dtype)

        sizes = [len(parents) for parents in trees]
        self.tokens = sum(sizes)
        rows = self.tokens + 2
        self.words = -(-max(sizes) // 64)
        self.q = draw(rows, heads, dim)
        self.k, self.v = draw(rows, kv_heads, dim), draw(rows, kv_heads, v_dim)
        total = sum(contexts)
        self.kv_indices = torch.randperm(total + 70, generator=generator)[:total]
        self.k_cache = torch.full((total + 70, kv_heads, dim), math.nan).to(cache or dtype)
        self.v_cache = torch.full((total + 70, kv_heads, v_dim), math.nan).to(cache or dtype)
        self.k_cache[self.kv_indices] = draw(total, kv_heads, dim).to(cache or dtype)
        self.v_cache[self.kv_indices] = draw(total, kv_heads, v_dim).to(cache or dtype)
        self.qo_indptr = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32)
        self.kv_indptr = torch.tensor([0, *itertools.accumulate(contexts)], dtype=torch.int32)
        self.bits = torch.full((rows, self.words), -1, dtype=torch.int64)
        self.depths = torch.full((rows,), -1)
        for part, parents in zip(self.parts(), trees, strict=True):
            if parents:
                self.bits[part] = bits_of(parents, self.words)
                self.depths[part] = depths_of(parents)

    def parts(self):
        ends = self.qo_indptr.tolist()
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]

    def run(self, extra_splits=3, min_split=64, scratch=None, weights=m.ALIKE, **options):
        """On the device, into an output full of NaN, which is returned on the CPU."""
        names = ("q", "k", "v", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "bits")
        args = [getattr(self, name).to(DEVICE) for name in names]
        out = torch.full((len(self.q), self.q.shape[1], self.v.shape[2]), math.nan).to(self.dtype).to(DEVICE)
        plan = m.plan_splits(args[5], args[6], extra_splits, min_split=min_split, weights=weights)
        numel = m.scratch_numel(len(self.trees), extra_splits, self.max_nodes, *out.shape[1:])
        # One float more than asked for, to be left alone.
        scratch = torch.full((numel + 1,), math.nan, device=DEVICE)
        options.setdefault("scaling", 0.125)
        result = m.tree_attention(
            *args,
            max_nodes=self.max_nodes,
            depths=self.depths.to(DEVICE),
            out=out,
            plan=plan,
            scratch=scratch,
            **options,
        )
        assert result is out and bool(scratch[-1].isnan())
        return out.cpu()

    @property
    def max_nodes(self):
        return max(len(parents) for parents in self.trees)

    def expected(self, scaling=0.125, k_scale=1.0, v_scale=1.0, sinks=None, **options):
        """The reference, request by request, NaN where no request is."""
        out = torch.full((len(self.q), self.q.shape[1], self.v.shape[2]), math.nan)
        for b, (part, parents) in enumerate(zip(self.parts(), self.trees, strict=True)):
            if not parents:
                continue
            slots = self.kv_indices[self.kv_indptr[b] : self.kv_indptr[b + 1]]
            key = torch.cat([self.k_cache[slots].float() * k_scale, self.k[part].float()])
            value = torch.cat([self.v_cache[slots].float() * v_scale, self.v[part].float()])
            seen, depths = visible_of(parents), depths_of(parents)
            out[part] = reference(self.q[part].float(), key, value, seen, depths, scaling=scaling, **options)
        return out

    def check(self, extra_splits=3, **options):
        actual = self.run(extra_splits, **options)
        options.pop("min_split", None)
        torch.testing.assert_close(
            actual.float(), self.expected(**options), rtol=0, atol=TOLERANCE[self.dtype], equal_nan=True
        )
        return actual


# --- Trees, contexts, splits --------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("extra_splits", (0, 1, 5))
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else list(TOLERANCE))
def test_a_ragged_batch_of_trees(extra_splits, dtype):
    """Every tree of the reference's own tests once, each with another context and number of nodes."""
    trees = list(TREES.values())
    contexts = [CONTEXTS[(i + extra_splits) % len(CONTEXTS)] for i in range(len(trees))]
    Batch(trees, contexts, dtype=dtype, seed=extra_splits).check(extra_splits)


@on_device
@pytest.mark.parametrize("extra_splits", (0, 5))
def test_requests_of_few_nodes_have_tiles_of_their_own(extra_splits):
    """With 2 query heads per KV head, those of at most 8 nodes; steps of other lengths tell who served a request."""
    trees = [random_tree(nodes, nodes) for nodes in (1, 8, 9, 40)] + [[], random_tree(3, 3)]
    batch = Batch(trees, [70, 133, 90, 65, 9, 130])
    assert batch.q.shape[1] // batch.k.shape[1] == 2
    wide, narrow = m.Tiles(64, 32, 4, 1), m.Tiles(16, 16, 4, 1)
    both = batch.run(extra_splits, tiles=wide, small_tiles=narrow)
    torch.testing.assert_close(both.float(), batch.expected(), rtol=0, atol=TOLERANCE[batch.dtype], equal_nan=True)
    alone = {tiles: batch.run(extra_splits, tiles=tiles) for tiles in (wide, narrow)}
    for part, parents in zip(batch.parts(), trees, strict=True):
        own, other = (narrow, wide) if len(parents) <= 8 else (wide, narrow)
        assert torch.equal(both[part], alone[own][part])
        assert not parents or not torch.equal(alone[own][part], alone[other][part])


# Between requests of few nodes and of none: as many of many nodes as so many tokens, two of nobody with them, can be.
FULL = {8: [9, 0, 9, 1, 0, 9, 9, 0, 2, 0, 9], 32: [5, 33, 0, 1, 0, 33, 2, 0]}


@on_device
@pytest.mark.parametrize("few_nodes, narrow", [(8, True), (32, False), (32, True), (8, False)])
@pytest.mark.parametrize("extra_splits", (0, 5))
def test_no_more_programs_than_there_can_be_parts(extra_splits, few_nodes, narrow, monkeypatch):
    """The same numbers bit for bit, whichever requests come first; with 2 query heads per KV head."""
    sizes, contexts = FULL[few_nodes], [70, 300, 9, 133, 50, 640, 400, 65, 90, 7, 130]
    batch = Batch([random_tree(nodes, nodes) if nodes else [] for nodes in sizes], contexts[: len(sizes)])
    assert len(batch.q) // (few_nodes + 1) == sum(nodes > few_nodes for nodes in sizes)
    tiles = dict(tiles=m.Tiles(64, 32, 4, 1), small_tiles=m.Tiles(16, 16, 4, 1) if narrow else None)
    programs, launches = [], m._launches

    def counted(*args):
        made = launches(*args)
        programs.append(sum(row_tiles * wide + others for *_, row_tiles, wide, others in made))
        return made

    monkeypatch.setattr(m, "_launches", counted)
    # Of this weight, lengths count as if they were not weighted.
    weights = m.Weights(few_nodes=few_nodes, tile_nodes=64, tile_weight=1)
    weighted = batch.run(extra_splits, weights=weights, **tiles)
    assert torch.equal(weighted.nan_to_num(7), batch.run(extra_splits, **tiles).nan_to_num(7))
    torch.testing.assert_close(weighted.float(), batch.expected(), rtol=0, atol=1e-5, equal_nan=True)
    # One tile of 64 rows holds all requests of 9 nodes, so that there is nothing to spare without small tiles.
    assert programs[0] < programs[1] if (few_nodes, narrow) != (8, False) else programs[0] == programs[1]


def test_programs_follow_from_shapes():
    """An H200's share of Qwen3-8B (32 query heads, 8 KV heads of 128): requests of more than 16 nodes, and of 32."""
    wide, small = m.Tiles(128, 64, 8, 5), m.Tiles(64, 64, 4, 5)
    plan = m.allocate_plan(256, 33, "cpu", m.weigh(32, 8, wide, small))
    assert m._launches(plan, 288, 256, 4, wide, small) == [(wide, 64, 256, 2, 49, 0), (small, 0, 64, 1, 49, 240)]
    plan = m.allocate_plan(64, 8, "cpu", m.weigh(32, 8, wide, wide))
    assert m._launches(plan, 64, 256, 4, wide, None) == [(wide, 0, 256, 2, 9, 63)]
    # Without an order all requests may be large.
    plan = m.allocate_plan(64, 8, "cpu")
    assert m._launches(plan, 64, 256, 4, wide, None) == [(wide, 0, 256, 2, 72, 0)]
    assert m._launches(plan, 288, 256, 4, wide, small) == [(wide, 64, 256, 2, 72, 0), (small, 0, 64, 1, 72, 0)]


@on_device
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", TREES if not INTERPRETED else ["root only", "random"])
def test_a_single_request(name, context):
    Batch([TREES[name]], [context], seed=context).check(extra_splits=7)


@on_device
@pytest.mark.parametrize("budget", (3, 15, 64))
def test_best_first_trees(budget):
    bs = 2 if INTERPRETED else 8
    contexts = ([65, 3] if INTERPRETED else [65, 3, 0, 1, 4097, 64, 63, 1000])[:bs]
    Batch(best_first_trees(bs, budget, budget), contexts, seed=budget).check()


@on_device
def test_257_nodes_beside_one():
    """Five words per node; the wide request's rows are several tiles, the narrow ones' a part of one."""
    trees = [[-1], random_tree(257, 5), chain(65), star(2)]
    Batch(trees, [70, 130, 0, 63], 2, 1, dim=16 if INTERPRETED else 128).check(2)


@on_device
@pytest.mark.parametrize("min_split", [1, 1000])
def test_the_least_part(min_split):
    """19 parts, more than a step of the merge takes, or two."""
    Batch([random_tree(3, 1)], [1200], kv_heads=1, seed=1).check(extra_splits=20, min_split=min_split)


@on_device
@pytest.mark.parametrize("programs", [1, 4, 1000])
def test_merging_many_rows_at_once(programs, monkeypatch):
    monkeypatch.setattr(m, "_MERGE_PROGRAMS", programs)
    Batch([random_tree(7, 1), [-1]], [300, 70], kv_heads=1, seed=1).check(extra_splits=5)


@on_device
def test_long_indptrs_and_short_indices():
    batch = Batch([TREES["random"], [-1]], [65, 3])
    batch.qo_indptr, batch.kv_indptr = batch.qo_indptr.to(torch.int64), batch.kv_indptr.to(torch.int64)
    batch.kv_indices = batch.kv_indices.to(torch.int32)
    batch.check()


# --- Heads, dimensions, dtypes ------------------------------------------------------------------------

LAYOUTS = [(4, 4), (6, 2), (4, 1), (1, 1)] + ([] if INTERPRETED else [(32, 8), (28, 4), (64, 8), (16, 16)])
DIMS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 48)]
# Every dimension with one layout, every layout with one dimension: each is a compilation of its own.
if INTERPRETED:
    COMBINATIONS = [((4, 2), dims, torch.float32) for dims in DIMS]
    COMBINATIONS += [((4, 2), (128, 128), dtype) for dtype in (torch.bfloat16, torch.float16)]
    COMBINATIONS += [(layout, (64, 64), torch.float32) for layout in LAYOUTS]
else:
    COMBINATIONS = list(itertools.product([(8, 2)], DIMS, TOLERANCE))
    COMBINATIONS += list(itertools.product(LAYOUTS, [(128, 128)], [torch.float32, torch.bfloat16]))


@on_device
@pytest.mark.parametrize("layout, dims, dtype", COMBINATIONS)
def test_heads_dimensions_and_dtypes(layout, dims, dtype):
    contexts = [70, 0] if INTERPRETED else [1025, 0]
    batch = Batch([random_tree(11, 3), chain(3)], contexts, *layout, *dims, dtype=dtype)
    batch.check(scaling=dims[0] ** -0.5)


@on_device
def test_strided_views_are_read_where_they_lie():
    """Query, keys and values as slices of one projection, caches as halves of one buffer."""
    batch = Batch([random_tree(9, 2)], [70], heads=4, kv_heads=2, dim=64)
    expected = batch.run()
    merged = torch.cat([batch.q, batch.k, batch.v], dim=1).to(DEVICE)
    batch.q, batch.k, batch.v = merged[:, :4], merged[:, 4:6], merged[:, 6:]
    both = torch.stack([batch.k_cache, batch.v_cache], dim=1).to(DEVICE)
    batch.k_cache, batch.v_cache = both[:, 0], both[:, 1]
    torch.testing.assert_close(batch.run(), expected, rtol=0, atol=0, equal_nan=True)


# --- Options ------------------------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("logit_cap", (0.5, 30.0))
def test_logit_cap(logit_cap):
    batch = Batch([TREES["binary"], [-1]], [130, 2])
    capped = batch.check(scaling=0.7, logit_cap=logit_cap)
    assert (capped - batch.run(scaling=0.7))[: batch.tokens].abs().max() > 0.01


@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
@on_device
@pytest.mark.parametrize("window", (0, 4, 100) if INTERPRETED else (0, 1, 4, 64, 100, 1000))
def test_sliding_window_counts_depth(window, logit_cap):
    batch = Batch([TREES["random"], star(5), [-1]], [130, 3, 0], seed=window)
    batch.check(sliding_window=window, logit_cap=logit_cap)


@on_device
@pytest.mark.parametrize("window", (1, 40))
def test_sliding_window_over_its_last_tokens(window):
    """SGLang lists only what any node can see; the result is that of the whole prefix."""
    batch = Batch([TREES["random"], star(5), chain(4)], [130, 3, 41], seed=window)
    expected = batch.expected(sliding_window=window)
    kept = [range(max(begin, end - window), end) for begin, end in itertools.pairwise(batch.kv_indptr.tolist())]
    batch.kv_indices = batch.kv_indices[list(itertools.chain(*kept))]
    batch.kv_indptr = torch.tensor([0, *itertools.accumulate(map(len, kept))], dtype=torch.int32)
    actual = batch.run(sliding_window=window)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.float32], equal_nan=True)


@on_device
@pytest.mark.parametrize("extra_splits", (0, 4))
def test_scales_are_of_the_cache_alone(extra_splits):
    Batch([TREES["binary"]], [200]).check(extra_splits, k_scale=0.5, v_scale=3.0)


@on_device
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_cache(cache):
    if not INTERPRETED and cache == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no such type on this GPU")
    Batch([TREES["binary"]], [130], dtype=torch.float16, cache=cache).check(k_scale=0.5, v_scale=0.25)


@on_device
def test_a_cache_of_another_dtype_is_read_in_the_querys():
    Batch([TREES["binary"]], [130], cache=torch.bfloat16).check()


@on_device
@pytest.mark.parametrize("extra_splits", (0, 4))
def test_sinks_take_weight_and_have_no_value(extra_splits):
    batch = Batch([TREES["binary"], [-1]], [200, 0], heads=4, kv_heads=2)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 8.0])
    actual = batch.run(extra_splits, sinks=sinks.to(DEVICE))
    for b, (part, parents) in enumerate(zip(batch.parts(), batch.trees, strict=True)):
        slots = batch.kv_indices[batch.kv_indptr[b] : batch.kv_indptr[b + 1]]
        key = torch.cat([batch.k_cache[slots], batch.k[part]]).repeat_interleave(2, 1).double()
        value = torch.cat([batch.v_cache[slots], batch.v[part]]).repeat_interleave(2, 1).double()
        logits = torch.einsum("nhd,shd->nhs", batch.q[part].double(), key) * 0.125
        hidden = ~torch.cat([torch.ones(len(parents), len(slots), dtype=torch.bool), visible_of(parents)], 1)
        logits = logits.masked_fill(hidden[:, None], -math.inf)
        weights = torch.softmax(torch.cat([logits, sinks.double().expand(len(parents), -1)[..., None]], -1), -1)
        expected = torch.einsum("nhs,shd->nhd", weights[..., :-1], value)
        torch.testing.assert_close(actual[part].double(), expected, rtol=0, atol=TOLERANCE[torch.float32])


# --- What must not happen -----------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize("extra_splits", (0, 4))
def test_requests_without_tokens_touch_nothing(extra_splits):
    """Padding: first, in the middle and last, with and without a context."""
    batch = Batch([[], [-1], [], TREES["random"], [], []], [5, 70, 200, 130, 0, 3])
    actual = batch.check(extra_splits)
    assert bool(actual[: batch.tokens].isfinite().all()) and bool(actual[batch.tokens :].isnan().all())


@on_device
@pytest.mark.parametrize("bs", [0, 2])
def test_a_batch_without_any_token(bs):
    batch = Batch([[-1]], [3])
    batch.trees, batch.contexts = [[]] * bs, [0] * bs
    batch.qo_indptr = batch.kv_indptr = torch.zeros(bs + 1, dtype=torch.int32)
    out = m.tree_attention(
        *(x.to(DEVICE) for x in (batch.q, batch.k, batch.v, batch.k_cache, batch.v_cache)),
        *(x.to(DEVICE) for x in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.bits)),
        max_nodes=1,
        scaling=1.0,
        out=torch.full_like(batch.q, math.nan).to(DEVICE),
    )
    assert bool(out.isnan().all())


@on_device
@pytest.mark.parametrize("context", [0, 70])
def test_a_token_without_any_bit_is_finite(context):
    batch = Batch([chain(3)], [context])
    batch.bits[1] = 0
    actual = batch.run()[: batch.tokens]
    assert bool(actual.isfinite().all())
    assert bool((actual[1] == 0).all()) == (context == 0)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_the_same_bits(dtype):
    contexts = [200, 3, 0] if INTERPRETED else [4097, 65, 130]
    batch = Batch([TREES["random"], [-1], star(4)], contexts, dtype=dtype)
    first, second = batch.run(4), batch.run(4)
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(first.view(kind), second.view(kind))


@on_device
@pytest.mark.parametrize("nodes", [5, 66])
def test_a_wrong_mask_bit_changes_its_row_and_no_other(nodes):
    """One request per bit that is wrong, set or cleared, at both sides of a word's end; the first is right."""
    parents = random_tree(nodes, 8)
    cells = list(itertools.permutations(range(nodes), 2))
    if nodes > 5:
        cells = [(row, column) for row in (63, 65) for column in (0, 63, 64) if row != column]
    count = len(cells) + 1
    batch = Batch([parents] * count, [3] * count, heads=2, kv_heads=1, dim=16)
    # The same query, keys and values everywhere.
    for name in ("q", "k", "v"):
        x = getattr(batch, name)
        x[: batch.tokens] = x[:nodes].repeat(count, 1, 1)
    batch.kv_indices = batch.kv_indices[:3].repeat(count)
    right = batch.check()
    for request, (row, column) in enumerate(cells, start=1):
        batch.bits[request * nodes + row, column // 64] ^= torch.tensor(1) << (column % 64)
    wrong = batch.run()
    changed = (wrong - right)[: batch.tokens].abs().amax((1, 2)).view(count, nodes)
    for request, (row, column) in enumerate(cells, start=1):
        assert changed[request, row] > 1e-3, (row, column)
        changed[request, row] = 0
    assert bool((changed == 0).all())


# --- The plan -----------------------------------------------------------------------------------------

# What 32 query heads of 8 KV heads have beside tiles of 64 rows: 64 nodes are two tiles, each worth two of those.
WEIGHTS = m.Weights(few_nodes=16, tile_nodes=32, tile_weight=2)


def check_plan(lengths, nodes, extra_splits, min_split, weights=m.ALIKE):
    """Every key of every prefix once, in order; no more parts and slots than promised."""
    bs = len(lengths)
    indptrs = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=DEVICE) for x in (nodes, lengths)]
    buffers = m.allocate_plan(bs + 2, extra_splits, DEVICE, weights)
    buffers.items.fill_(-77)
    buffers.requests.fill_(-77)
    buffers.merges.fill_(-77)
    plan = m.plan_splits(*indptrs, extra_splits, min_split=min_split, weights=weights, out=buffers.head(bs))
    items, requests = plan.items.tolist(), plan.requests.tolist()
    assert len(items) == bs + extra_splits and bool((buffers.items[bs + extra_splits :] == -77).all())
    assert bool((buffers.requests[bs:] == -77).all())
    parts = [[item for item in items if item[0] == b] for b in range(bs)]
    assert all(item[0] == -1 for item in items[sum(map(len, parts)) :])
    large = [nodes[item[0]] > weights.few_nodes for item in items if item[0] >= 0]
    assert large == sorted(large, reverse=True)
    assert sum(large) <= plan.most_items(sum(nodes), weights.few_nodes)
    slots = []
    for b, mine in enumerate(parts):
        length = lengths[b] if nodes[b] else 0
        assert requests[b][1] == len(mine) >= 1
        assert [item[1] for item in mine] == [0, *(item[2] for item in mine[:-1])] and mine[-1][2] == length
        assert all(begin < end for _, begin, end, _ in mine) or length == 0
        if len(mine) == 1:
            assert mine[0][3] == -1
        else:
            assert [item[3] for item in mine] == list(range(requests[b][0], requests[b][0] + len(mine)))
            slots += [item[3] for item in mine]
            # Rounding a part up to 64 keys may make the last one short, never another.
            assert all(end - begin >= min(min_split, length // len(mine)) for _, begin, end, _ in mine[:-1])
    assert slots == list(range(len(slots)))
    assert len(slots) <= m.scratch_numel(bs, extra_splits, 1, 1, 0)
    merged = [b for b in range(bs) if requests[b][1] > 1]
    assert plan.merges.tolist() == merged + [-1] * (len(plan.merges) - len(merged))
    assert bool((buffers.merges[len(plan.merges) :] == -77).all())


@on_device
@pytest.mark.parametrize("seed", range(5 if INTERPRETED else 30))
def test_a_plan_covers_every_prefix_once(seed):
    rng = random.Random(seed)
    bs = rng.choice([1, 2, 7, 33, 300])
    longest = rng.choice([1, 100, 5000, 200_000])
    lengths = [rng.choice([0, 1, longest, rng.randrange(longest + 1)]) for _ in range(bs)]
    nodes = [rng.choice([0, 1, 16, 17, 64]) for _ in range(bs)]
    for extra_splits in (0, 1, 5, 33):
        check_plan(lengths, nodes, extra_splits, rng.choice([1, 64, 128, 100_000]), rng.choice([m.ALIKE, WEIGHTS]))


@on_device
def test_one_long_request_uses_every_split():
    indptrs = [torch.tensor([0, x], dtype=torch.int32, device=DEVICE) for x in (16, 32768)]
    plan = m.plan_splits(*indptrs, 32)
    assert plan.requests.tolist() == [[0, 32]]


@on_device
def test_equal_requests_are_cut_only_where_programs_are_left():
    """33 extra splits, as 8 KV heads and 132 multiprocessors ask for: about two programs for each of these."""
    for bs, parts in ((32, 1), (16, 2), (8, 4), (4, 8)):
        indptrs = [torch.arange(bs + 1, dtype=torch.int32, device=DEVICE) * x for x in (16, 2048)]
        assert m.plan_splits(*indptrs, 33).requests[:, 1].tolist() == [parts] * bs


@on_device
def test_requests_of_few_nodes_are_cut_into_more_parts():
    """Eight requests of 16 nodes have two programs per multiprocessor, of 64 nodes one, whichever tiles there are."""
    assert m.weigh(32, 8, m.Tiles(128, 64, 8, 5), m.Tiles(64, 64, 4, 5)) == WEIGHTS
    lengths = torch.arange(9, dtype=torch.int32, device=DEVICE) * 8192
    for nodes, parts in ((1, 4), (16, 4), (17, 2), (32, 2), (33, 1), (64, 1)):
        indptr = torch.arange(9, dtype=torch.int32, device=DEVICE) * nodes
        assert m.plan_splits(indptr, lengths, 33, weights=WEIGHTS).requests[:, 1].tolist() == [parts] * 8, nodes
    # A request of many nodes leaves the others their share of the device.
    nodes = torch.tensor([0, 64, 80], dtype=torch.int32, device=DEVICE)
    assert m.plan_splits(nodes, lengths[:3], 33, weights=WEIGHTS).requests[:, 1].tolist() == [7, 7]


def test_scratch_depends_on_shapes_alone():
    tiles = m.choose_tiles(64, 128, 128, torch.bfloat16)
    extra = m.choose_extra_splits(16, 32, 8, tiles, 132)
    # 33 x 8 programs: two for each of 132 multiprocessors.
    assert extra == 33
    few, many = (m.scratch_numel(bs, extra, 16, 32, 128) for bs in (extra, 1000))
    assert few == many == 44 * 16 * 32 * 129
    assert m.allocate_scratch(1, extra, 16, 32, 128, "cpu").numel() == 34 * 16 * 32 * 129


@pytest.mark.parametrize("shared_memory", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tiles_are_what_the_kernel_can_run(dtype, shared_memory):
    for rows, dim in itertools.product((1, 16, 64, 257 * 8), (16, 64, 80, 96, 128, 192, 256)):
        tiles = m.choose_tiles(rows, dim, dim, dtype, shared_memory)
        assert 16 <= tiles.block_m <= 128 and tiles.block_n in (16, 32, 64) and 1 <= tiles.num_stages <= 5


# --- Refusals -----------------------------------------------------------------------------------------


def test_refusals():
    batch = Batch([chain(3)], [4], heads=4, kv_heads=2, dim=16)
    names = ("q", "k_tree", "v_tree", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "ancestor_bits")
    tensors = (batch.q, batch.k, batch.v, batch.k_cache, batch.v_cache)
    tensors += (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.bits)
    good = dict(zip(names, tensors, strict=True)) | {"max_nodes": 3, "scaling": 1.0}
    good["plan"] = m.allocate_plan(1, 1, "cpu")
    q, bits = batch.q, batch.bits
    for options, message in (
        ({"q": q[0]}, "q must have 3 dimensions"),
        ({"q": q.transpose(1, 2)}, "q must have 3 dimensions, the last contiguous"),
        ({"q": q[:, :3]}, "query heads must be a multiple of the KV heads, got 3 and 2"),
        ({"q": q.double()}, "must all be bfloat16, float16 or float32, got torch.float64"),
        ({"k_tree": batch.k.half()}, "must all be"),
        ({"k_tree": batch.k[1:]}, r"k_tree must have the shape \[5, 2, 16\], got \[4, 2, 16\]"),
        (
            {"k_cache": batch.k_cache.to(torch.int8)},
            "k_cache must be bfloat16, float16, float32 or fp8, got torch.int8",
        ),
        ({"v_cache": batch.v_cache[:, :1]}, "v_cache must have the shape"),
        ({"kv_indptr": batch.kv_indptr.float()}, r"kv_indptr must be contiguous int32 or int64 \[2\]"),
        ({"qo_indptr": batch.qo_indptr[:1]}, r"qo_indptr must be contiguous int32 or int64 \[2\], got \[1\]"),
        ({"kv_indices": batch.kv_indices.float()}, "kv_indices must be contiguous int32 or int64"),
        ({"ancestor_bits": bits.int()}, "ancestor_bits must be contiguous torch.int64"),
        ({"ancestor_bits": bits[:4]}, "ancestor_bits must have a row for each of 5 tokens"),
        ({"max_nodes": 0}, "max_nodes must be from 1 to 64, the bits of a node, got 0"),
        ({"max_nodes": 65}, "max_nodes must be from 1 to 64"),
        ({"sliding_window": 3}, "sliding_window 3 counts positions: depths are needed, got None"),
        ({"sliding_window": 3, "depths": batch.depths.float()}, "depths must be contiguous torch.int32 or torch.int64"),
        ({"sinks": torch.zeros(3)}, r"sinks must be contiguous \[4\]"),
        ({"out": torch.empty(5, 4, 15)}, r"out must be \[5, 4, 16\] torch.float32"),
        ({"plan": m.allocate_plan(2, 1, "cpu")}, "plan must be made for 1 requests"),
        ({"scratch": torch.empty(7)}, "scratch must hold [0-9]+ float32 on cpu, got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            m.tree_attention(**(good | options))
    wide = torch.zeros(5, 4, 288)
    with pytest.raises(ValueError, match="head dimensions must be from 1 to 256, got 288 and 16"):
        m.tree_attention(**(good | {"q": wide, "k_tree": wide[:, :2], "k_cache": wide[:, :2]}))
    with pytest.raises(ValueError, match="extra_splits must be >= 0 and min_split >= 1, got -1 and 128"):
        m.plan_splits(batch.qo_indptr, batch.kv_indptr, -1)
    with pytest.raises(ValueError, match="out was made for 2 extra splits, got 1"):
        m.plan_splits(batch.qo_indptr, batch.kv_indptr, 1, out=m.allocate_plan(1, 2, "cpu"))
    with pytest.raises(ValueError, match="out was made for Weights"):
        m.plan_splits(batch.qo_indptr, batch.kv_indptr, 1, weights=WEIGHTS, out=m.allocate_plan(1, 1, "cpu"))


if not INTERPRETED:
    # --- CUDA graphs ----------------------------------------------------------------------------------

    @pytest.mark.gpu
    def test_a_captured_attention_follows_its_inputs():
        """Lengths, slots, trees and values change under a graph of fixed shapes."""
        batches = [
            Batch(best_first_trees(3, 15, seed), [[65, 0, 4097], [900, 1, 64]][seed % 2], seed=seed)
            for seed in range(4)
        ]
        room = max(len(batch.kv_indices) for batch in batches)
        slots = max(len(batch.k_cache) for batch in batches)
        first = batches[0]
        names = ("q", "k", "v", "qo_indptr", "kv_indptr", "bits")
        fixed = {name: getattr(first, name).cuda() for name in names}
        fixed["kv_indices"] = torch.zeros(room, dtype=torch.int64, device="cuda")
        for name in ("k_cache", "v_cache"):
            x = getattr(first, name)
            fixed[name] = torch.full((slots, *x.shape[1:]), math.nan, device="cuda")
        out = torch.empty_like(fixed["q"])
        plan, scratch = m.allocate_plan(3, 8, "cuda"), m.allocate_scratch(3, 8, 16, 4, 64, "cuda")

        def run():
            m.plan_splits(fixed["qo_indptr"], fixed["kv_indptr"], 8, out=plan)
            order = ("q", "k", "v", "k_cache", "v_cache", "qo_indptr", "kv_indptr", "kv_indices", "bits")
            args = [fixed[name] for name in order]
            m.tree_attention(*args, max_nodes=16, scaling=0.125, out=out, plan=plan, scratch=scratch)

        # Compiles; a capture must not.
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for batch in batches:
            for name, x in fixed.items():
                value = getattr(batch, name)
                x[: len(value)].copy_(value)
            out.fill_(math.nan)
            graph.replay()
            expected = batch.expected()
            torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=TOLERANCE[torch.float32], equal_nan=True)

    @pytest.mark.gpu
    def test_nothing_waits_for_the_host():
        batch = Batch([TREES["random"]], [4097])
        args = [x.cuda() for x in (batch.q, batch.k, batch.v, batch.k_cache, batch.v_cache)]
        args += [x.cuda() for x in (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.bits)]
        m.tree_attention(*args, max_nodes=17, scaling=0.125)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            m.tree_attention(*args, max_nodes=17, scaling=0.125)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    # --- Without a GPU --------------------------------------------------------------------------------

    # Bytes that one program may use.
    SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
    TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float8_e5m2: "*fp8e5"}
    TYPES[torch.float8_e4m3fn] = "*fp8e4nv"
    POINTERS = {
        "kv_indices": "*i64",
        "bits": "*i64",
        "depths": "*i64",
        "qo_indptr": "*i64",
        "kv_indptr": "*i32",
        "items": "*i32",
        "requests": "*i32",
        "merges": "*i32",
        "partial": "*fp32",
        "partial_lse": "*fp32",
    }
    SCALES = ("scaling", "logit_cap", "k_scale", "v_scale")

    def compile_aligned(arch, kernel, constants, pointers, **options):
        """With the alignment that SGLang's tensors have."""

        def type_of(arg):
            return pointers.get(arg, "fp32" if arg in SCALES else "i32")

        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, arg in enumerate(kernel.arg_names)
            if arg not in constants and (type_of(arg).startswith("*") or arg.endswith("stride"))
        }
        return compile_for(arch, kernel, constants, type_of, aligned, **options)

    def attention_cases(arch):
        """Rows, head dimensions, dtype, the cache's dtype, window, cap, sinks."""
        # 80 and 96 are padded to 128, 192 to 256.
        for dim in (64, 80, 128, 256):
            yield 64, dim, dim, torch.bfloat16, None, False, False, False
        yield 512, 128, 128, torch.bfloat16, None, False, False, False
        yield 64, 128, 128, torch.float32, None, False, False, False
        yield 64, 128, 128, torch.float16, None, True, True, True
        if arch != 90:
            return
        # What differs little between GPUs, once.
        for dim in (96, 192):
            yield 64, dim, dim, torch.bfloat16, None, False, False, False
        yield 16, 256, 256, torch.float32, None, False, False, False
        yield 64, 192, 128, torch.bfloat16, None, True, False, False
        yield 64, 128, 128, torch.bfloat16, torch.float8_e5m2, False, False, False
        yield 64, 128, 128, torch.bfloat16, torch.float8_e4m3fn, False, False, False

    @pytest.mark.parametrize("arch", SHARED_MEMORY)
    def test_kernels_compile_ahead_of_time(arch, tmp_path, monkeypatch):
        # An own cache, or an earlier compilation would be found.
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        limit = SHARED_MEMORY[arch]
        for rows, dim, v_dim, dtype, cache, window, cap, sinks in attention_cases(arch):
            tiles = m.choose_tiles(rows, dim, v_dim, dtype, limit)
            constants = dict(HEADS=8, GROUP=4, D=dim, DV=v_dim, BLOCK_D=m._padded(dim), BLOCK_DV=m._padded(v_dim))
            constants |= dict(BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n)
            constants |= dict(HAS_WINDOW=window, HAS_CAP=cap, HAS_SINKS=sinks)
            constants["PRECISION"] = "ieee" if dtype == torch.float32 else "tf32"
            constants |= {} if window else {"depths": None}
            constants |= {} if sinks else {"sinks": None}
            pointers = POINTERS | dict.fromkeys(("q_at", "k_tree", "v_tree", "out", "sinks"), TYPES[dtype])
            pointers |= dict.fromkeys(("k_cache", "v_cache"), TYPES[cache or dtype])
            options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
            compiled = compile_aligned(arch, m._attention_kernel, constants, pointers, **options)
            case = f"{rows} rows, {dim}/{v_dim}, {dtype}, cache {cache}, {tiles}"
            assert compiled.asm["cubin"], case
            assert compiled.metadata.shared <= limit, f"{case}: {compiled.metadata.shared} bytes"
            ptx = compiled.asm["ptx"]
            # The cache is prefetched; a product of float32 is exact, one of 16 bits is the tensor cores'.
            assert "cp.async" in ptx, case
            product = {80: "mma.sync", 90: "mma", 100: "mma", 120: "mma.sync"}[arch]
            assert (product in ptx) == (dtype != torch.float32), case
        for rows in (1, 16):
            constants = dict(GROUP=4, DV=128, BLOCK_DV=128, ROWS=rows, SPLITS=16 // rows)
            pointers = POINTERS | {"out": "*bf16"}
            assert compile_aligned(arch, m._merge_kernel, constants, pointers, num_warps=4).asm["cubin"]
        # SGLang's qo_indptr is of 64 bits under CUDA graphs and of 32 eagerly.
        for block, kind in itertools.product((32, 64, 256), ("*i64", "*i32")):
            pointers = POINTERS | {"qo_indptr": kind}
            assert compile_aligned(arch, m._plan_kernel, dict(BLOCK=block, ITEMS=16), pointers, num_warps=4).asm[
                "cubin"
            ]

    def test_the_kernels_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
