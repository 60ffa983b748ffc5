"""The device kernels against `ddtree_utils`, bit for bit.

Whether Triton compiles or interprets is decided when it is imported. So with TRITON_INTERPRET=1 this file
tests the kernels on the CPU; without, it starts itself once with that variable, compiles the kernels ahead
of time for several GPUs, and tests them on a CUDA device (marker `gpu`).
"""

import math
import sys
from dataclasses import fields

import numpy as np
import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter, compile_for
from _load import load, load_ddtree_utils
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

on_device = [] if INTERPRETED else [pytest.mark.gpu]
GARBAGE = -0x5A5A5A5A
UTILS_NAME = "sglang.srt.speculative.ddtree_utils"

u = load_ddtree_utils()


def load_ddtree_kernels():
    """The kernels with the `ddtree_utils` loaded by path, which stays out of SGLang's own package."""
    before = sys.modules.get(UTILS_NAME)
    sys.modules[UTILS_NAME] = u
    try:
        return load("ddtree_kernels", "python/sglang/srt/speculative/ddtree_kernels.py")
    finally:
        if before is None:
            del sys.modules[UTILS_NAME]
        else:
            sys.modules[UTILS_NAME] = before


k = load_ddtree_kernels()


def draw_candidates(seed, bs, levels, topk, kind):
    """Distinct ids int64 and log-probabilities float32, best first, both [bs, levels, topk]."""
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(topk + 3), (bs, levels, 1)), axis=-1)[..., :topk]
    if kind == "grid":
        # Steps of 1/4 add up exactly: equal scores at different depths and under different parents.
        lp = -0.25 * rng.integers(0, 5, size=(bs, levels, topk))
    elif kind == "rounding":
        # Both zeros, sums absorbed by rounding (-1 + -1e-9 == -1), a sum that overflows, probability zero.
        lp = rng.choice([0.0, -0.0, -1e-9, -1.0, -1.0000001, -3e38, -math.inf], size=(bs, levels, topk))
    elif kind == "softmax":
        logits = rng.normal(size=(bs, levels, topk)) * 3
        lp = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) - 1e-3
    elif kind == "confident":
        lp = -rng.exponential(size=(bs, levels, topk)) * np.where(np.arange(topk) == 0, 1e-4, 10.0)
    elif kind == "subnormal":
        # Flushed to zero, these would all tie.
        lp = -1e-45 * rng.integers(0, 9, size=(bs, levels, topk))
    else:
        lp = np.full((bs, levels, topk), float(kind))
    lp = -np.sort(-lp.astype(np.float32), axis=-1)
    return torch.from_numpy(ids), torch.from_numpy(lp)


def fill_with_garbage(buffers):
    for field in fields(buffers):
        x = getattr(buffers, field.name)
        if x is not None:
            x.fill_(True if x.dtype == torch.bool else math.nan if x.dtype == torch.float32 else GARBAGE)
    return buffers


def assert_untouched(buffers, row):
    for field in fields(buffers):
        x = getattr(buffers, field.name)
        if x is not None:
            x = x[row]
            same = x.isnan() if x.dtype == torch.float32 else x if x.dtype == torch.bool else x == GARBAGE
            assert bool(same.all()), f"{field.name} was written behind the batch"


def assert_same(got, expected, name):
    assert got.dtype == expected.dtype and got.shape == expected.shape, name
    got = got.cpu()
    if got.dtype == torch.float32:
        # As bits, so that 0.0 and -0.0 differ.
        got, expected = got.view(torch.int32), expected.view(torch.int32)
    wrong = (got != expected).nonzero()
    if len(wrong):
        first = tuple(wrong[0].tolist())
        pytest.fail(f"{name}: {len(wrong)} cells differ, first at {first}: {got[first]}, expected {expected[first]}")


def assert_tree(got, ids, lp, budget, roots, seq_lens):
    expected = u.build_trees(roots, ids, lp, budget)
    for field in fields(expected):
        if getattr(got, field.name) is not None:
            assert_same(getattr(got, field.name), getattr(expected, field.name), field.name)
    assert_same(got.ancestor_bits, u.bit_mask(expected.visible), "ancestor_bits")
    if seq_lens is not None:
        assert_same(got.positions, u.tree_positions(expected.depths, seq_lens), "positions")
    return expected


def build_and_compare(ids, lp, budget, *, visible=True, lens_dtype=torch.int64):
    bs = ids.shape[0]
    roots = torch.arange(bs) + 7
    seq_lens = (torch.arange(bs) * 1000 + 3).to(lens_dtype)
    # One request more than asked for: it must stay as it is.
    buffers = fill_with_garbage(k.allocate_tree(bs + 1, budget, DEVICE, visible=visible))
    out = buffers.head(bs)
    result = k.build_trees(
        roots.to(DEVICE), ids.to(DEVICE), lp.to(DEVICE), budget, seq_lens=seq_lens.to(DEVICE), out=out
    )
    assert result is out
    assert_tree(out, ids, lp, budget, roots, seq_lens)
    assert_untouched(buffers, bs)


# (bs, D - 1, K, budget); the interpreter takes about 8 ms per node.
SMALL = [
    (5, 15, 8, 1),
    (3, 15, 8, 7),
    (2, 15, 8, 15),
    (1, 15, 8, 31),
    (1, 15, 8, 63),
    (1, 15, 1, 31),  # a chain that ends before the budget
    (2, 1, 8, 15),  # D = 2: the root's children alone, fewer than the budget
    (1, 1, 1, 1),
    (1, 3, 2, 64),  # 14 nodes exist
    (1, 16, 3, 33),
    (3, 4, 40, 5),  # more candidates than the budget can select
]
LARGE = [
    (1, 15, 8, 255, "softmax"),
    (1, 16, 64, 256, "grid"),
    (1, 2, 15, 256, "grid"),  # 240 nodes exist
]
FULL_SHAPES = [(bs, levels, topk) for bs in (1, 5) for levels, topk in ((15, 8), (16, 64), (1, 64), (15, 1), (3, 5))]
FULL_BUDGETS = [1, 2, 3, 7, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 200, 255, 256]


@pytest.mark.parametrize("kind", ["grid", "rounding", "softmax"])
@pytest.mark.parametrize("bs, levels, topk, budget", [pytest.param(*case, marks=on_device) for case in SMALL])
def test_build_trees_equals_the_reference(bs, levels, topk, budget, kind):
    build_and_compare(*draw_candidates(budget, bs, levels, topk, kind), budget)


@pytest.mark.parametrize("bs, levels, topk, budget, kind", [pytest.param(*case, marks=on_device) for case in LARGE])
def test_build_trees_equals_the_reference_at_the_limits(bs, levels, topk, budget, kind):
    build_and_compare(*draw_candidates(budget, bs, levels, topk, kind), budget)


@pytest.mark.parametrize("kind", [0.0, -0.0, -1.0, -math.inf, "subnormal", "confident"])
@pytest.mark.parametrize("lens_dtype", [pytest.param(torch.int32, marks=on_device)])
def test_build_trees_with_one_value_or_tiny_steps(kind, lens_dtype):
    build_and_compare(*draw_candidates(3, 2, 4, 3, kind), 20, lens_dtype=lens_dtype, visible=False)


if INTERPRETED:

    @settings(max_examples=20, deadline=None)
    @given(
        seed=st.integers(0, 2**32 - 1),
        bs=st.integers(1, 2),
        levels=st.integers(1, 6),
        topk=st.integers(1, 9),
        budget=st.integers(1, 20),
        kind=st.sampled_from(["grid", "rounding", "softmax", "confident"]),
    )
    def test_build_trees_equals_the_reference_on_random_shapes(seed, bs, levels, topk, budget, kind):
        build_and_compare(*draw_candidates(seed, bs, levels, topk, kind), budget)

else:

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", ["grid", "rounding", "softmax", "confident"])
    @pytest.mark.parametrize("bs, levels, topk", FULL_SHAPES)
    def test_build_trees_equals_the_reference_at_every_budget(bs, levels, topk, kind):
        for budget in FULL_BUDGETS:
            build_and_compare(*draw_candidates(budget, bs, levels, topk, kind), budget)

    @pytest.mark.gpu
    @pytest.mark.parametrize("kind", ["grid", "softmax"])
    @pytest.mark.parametrize("budget", [15, 63, 255])
    def test_build_trees_equals_the_reference_for_many_requests(budget, kind):
        build_and_compare(*draw_candidates(budget, 200, 15, 8, kind), budget, visible=False)


@pytest.mark.parametrize("budget", [pytest.param(9, marks=on_device)])
def test_build_trees_of_strided_inputs_into_new_tensors(budget):
    ids, lp = draw_candidates(4, 2, 3, 5, "grid")
    roots, seq_lens = torch.tensor([4, 0, 5, 0])[::2], torch.tensor([9, 0, 8, 0])[::2]
    wide_ids = ids.transpose(0, 1).contiguous().to(DEVICE).transpose(0, 1)
    same_lp = lp[:1].expand(2, 3, 5)
    args = (roots.to(DEVICE), wide_ids, lp[:1].to(DEVICE).expand(2, 3, 5), budget)
    plain = k.build_trees(*args)
    assert plain.visible is None and plain.positions is None
    assert_tree(plain, ids, same_lp, budget, roots, None)
    everything = k.build_trees(*args, seq_lens=seq_lens.to(DEVICE), visible=True)
    assert everything.visible is not None
    assert_tree(everything, ids, same_lp, budget, roots, seq_lens)
    assert isinstance(everything, u.DraftTree)


@pytest.mark.parametrize("budget", [pytest.param(12, marks=on_device)])
def test_build_trees_reads_nan_as_probability_zero(budget):
    ids, lp = draw_candidates(5, 3, 3, 4, "softmax")
    lp[0, 0, 2:] = math.nan
    lp[1, 1, 3:] = math.nan
    lp[2] = math.nan
    roots = torch.zeros(3, dtype=torch.int64)
    tree = k.build_trees(roots.to(DEVICE), ids.to(DEVICE), lp.to(DEVICE), budget)
    assert_tree(tree, ids, lp.nan_to_num(nan=-math.inf), budget, roots, None)


def test_an_empty_batch_launches_nothing():
    ids, lp = torch.zeros(0, 3, 2, dtype=torch.int64), torch.zeros(0, 3, 2)
    none, lens = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    tree = k.build_trees(none, ids, lp, 5, seq_lens=lens, visible=True)
    assert tree.tokens.shape == (0, 6) and tree.ancestor_bits.shape == (0, 6, 1)
    walk = k.walk_trees(tree.tokens, tree.parents, tree.tokens, 3, seq_lens=lens)
    assert walk.accept_index.shape == (0, 4) and walk.new_seq_lens.dtype == torch.int32
    k.full_mask(tree.ancestor_bits, lens, out=torch.zeros(1, dtype=torch.bool))


def _valid_inputs(**changed):
    inputs = {
        "root_tokens": torch.zeros(2, dtype=torch.int64),
        "candidate_ids": torch.zeros(2, 3, 4, dtype=torch.int64),
        "candidate_logprobs": torch.zeros(2, 3, 4),
        "budget": 5,
    }
    return inputs | changed


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"budget": 0}, "budget must be from 1 to 256, got 0"),
        ({"budget": 257}, "budget must be from 1 to 256, got 257"),
        ({"root_tokens": torch.zeros(2, dtype=torch.int32)}, "root_tokens must be torch.int64, got torch.int32"),
        ({"root_tokens": torch.zeros(3, dtype=torch.int64)}, r"root_tokens must have the shape \[2\], got \[3\]"),
        ({"candidate_ids": torch.zeros(2, 3, dtype=torch.int64)}, r"candidate_ids must .* got \[2, 3\]"),
        ({"candidate_logprobs": torch.zeros(2, 3, 3)}, r"shape \[2, 3, 4\], got \[2, 3, 3\]"),
        ({"candidate_logprobs": torch.zeros(2, 3, 4, device="meta")}, "must be on cpu .*, got meta"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens must be torch.int32 or torch.int64, got torch.float32"),
        ({"seq_lens": torch.zeros(1, dtype=torch.int32)}, r"seq_lens must have the shape \[2\], got \[1\]"),
        ({"out": k.allocate_tree(2, 5, "cpu")}, "out.positions and seq_lens must be given together"),
        ({"out": k.allocate_tree(3, 5, "cpu")}, r"out.tokens must have the shape \[2, 6\], got \[3, 6\]"),
        ({"out": k.allocate_tree(2, 5, "meta")}, "out.tokens must be on cpu .*, got meta"),
    ],
)
def test_build_trees_refuses(changed, message):
    with pytest.raises(ValueError, match=message):
        k.build_trees(**_valid_inputs(**changed))


def test_build_trees_refuses_what_a_key_cannot_hold():
    for shape, message in (((1, 1, 65), "at most 64, got min.* = 65"), ((1, 128, 1), "at most 128, got 129")):
        ids = torch.zeros(shape, dtype=torch.int64)
        with pytest.raises(ValueError, match=message):
            k.build_trees(ids[:, 0, 0], ids, torch.zeros(shape), 100)


# --- masks ----------------------------------------------------------------------------------------


def random_parents(rng, n, real):
    return [-1] + [int(rng.integers(0, i)) if i < real else -1 for i in range(1, n)]


def full_mask_by_loops(parents, seq_lens, prefix):
    cells = []
    for row, length in zip(parents.tolist(), seq_lens, strict=True):
        for i in range(len(row)):
            sees = [False] * len(row)
            j = i
            while j >= 0:
                sees[j] = True
                j = row[j]
            cells += [prefix] * length + sees
    return cells


@pytest.mark.parametrize(
    "n, seq_lens, dtype",
    [
        pytest.param(1, [3, 0, 1030], torch.int32, marks=on_device),
        pytest.param(4, [3, 0, 1030, 1024], torch.int64, marks=on_device),
        pytest.param(17, [1, 40], torch.int32, marks=on_device),
        pytest.param(66, [5], torch.int64, marks=on_device),
    ],
)
def test_full_mask_decoded_by_loops(n, seq_lens, dtype):
    rng = np.random.default_rng(n)
    parents = torch.tensor([random_parents(rng, n, max(1, n - b)) for b in range(len(seq_lens))])
    visible = u.ancestor_mask(parents, n)
    bits = u.bit_mask(visible).to(DEVICE)
    lens = torch.tensor(seq_lens, dtype=dtype, device=DEVICE)
    for prefix in (True, False):
        expected = full_mask_by_loops(parents, seq_lens, prefix)
        # What was there before shows where nothing is written: behind the mask, and in a skipped prefix.
        for before in (False, True):
            out = torch.full((len(expected) + 9,), before, device=DEVICE)
            assert k.full_mask(bits, lens, out=out, fill_prefix=prefix) is out
            skipped = expected if prefix else full_mask_by_loops(parents, seq_lens, before)
            assert out.tolist() == skipped + [before] * 9
    assert_same(k.visible_mask(bits), visible, "visible")


@pytest.mark.parametrize("bs", [pytest.param(131, marks=on_device)])
def test_full_mask_sums_the_lengths_of_many_requests(bs):
    lens = torch.arange(bs) % 5
    visible = u.ancestor_mask(torch.tensor([[-1, 0]]).expand(bs, 2), 1)
    expected = u.full_mask(visible, lens)
    out = torch.zeros(expected.numel(), dtype=torch.bool, device=DEVICE)
    k.full_mask(u.bit_mask(visible).to(DEVICE), lens.to(DEVICE), out=out)
    assert_same(out, expected, "mask")


@pytest.mark.parametrize("cut", [pytest.param(cut, marks=on_device) for cut in (8, 20, 33)])
def test_full_mask_is_cut_at_the_end_of_the_buffer(cut):
    lens = torch.tensor([6, 5])
    visible = u.ancestor_mask(torch.tensor([[-1, 0]]).expand(2, 2), 1)
    expected = u.full_mask(visible, lens)
    memory = torch.zeros(cut + 40, dtype=torch.bool, device=DEVICE)
    k.full_mask(u.bit_mask(visible).to(DEVICE), lens.to(DEVICE), out=memory[:cut])
    assert memory[:cut].tolist() == expected[:cut].tolist() + [False] * max(0, cut - expected.numel())
    assert not bool(memory[cut:].any())


def test_full_mask_refuses_a_wrong_buffer():
    bits, lens = torch.ones(2, 3, 1, dtype=torch.int64), torch.tensor([4, 5])
    for out, message in (
        (torch.zeros(45, dtype=torch.uint8), r"contiguous 1-D bool tensor, got \[45\] torch.uint8"),
        (torch.zeros(90, dtype=torch.bool)[::2], "contiguous 1-D bool tensor"),
        (torch.zeros(17, dtype=torch.bool), "at least 18 cells, got 17"),
        (torch.zeros(45, dtype=torch.bool, device="meta"), "must be on cpu .*, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            k.full_mask(bits, lens, out=out)
    with pytest.raises(ValueError, match=r"ancestor_bits must have the shape .*, got \[2, 65, 1\]"):
        k.visible_mask(torch.ones(2, 65, 1, dtype=torch.int64))


# --- walking --------------------------------------------------------------------------------------


def walk_and_compare(tokens, parents, choices, max_depth, lens_dtype=torch.int64):
    bs, n = tokens.shape
    expected = u.walk_trees(tokens, parents, choices, max_depth)
    seq_lens = (torch.arange(bs) * 10).to(lens_dtype)
    with_slots = max_depth < n
    slots = torch.randperm(bs * n, generator=torch.Generator().manual_seed(n)).view(bs, n) if with_slots else None
    buffers = k.allocate_walk(bs + 1, n, max_depth, DEVICE, seq_lens_dtype=lens_dtype, slots=with_slots)
    out = fill_with_garbage(buffers).head(bs)
    args = [x.to(DEVICE) for x in (tokens, parents, choices)]
    device_slots = slots.to(DEVICE) if with_slots else None
    assert k.walk_trees(*args, max_depth, seq_lens=seq_lens.to(DEVICE), slots=device_slots, out=out) is out
    for field in fields(expected):
        assert_same(getattr(out, field.name), getattr(expected, field.name), field.name)
    if with_slots:
        plan = u.plan_commit(expected, choices, seq_lens, slots)
        for field in fields(plan):
            assert_same(getattr(out, field.name), getattr(plan, field.name), field.name)
    for b in range(bs):
        path = [i for i in expected.accept_index[b].tolist() if i >= 0]
        committed = [int(choices[b, i]) for i in path]
        assert out.next_tokens[b].tolist() == committed + [0] * (n - len(path))
        assert int(out.accept_lens[b]) == len(path)
        assert int(out.new_seq_lens[b]) == int(seq_lens[b]) + len(path)
    assert out.accept_lens.dtype == torch.int32 and out.new_seq_lens.dtype == lens_dtype
    assert_untouched(buffers, bs)
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("n", [pytest.param(n, marks=on_device) for n in (1, 2, 16, 33, 64, 257)])
def test_walk_equals_the_reference(n, seed):
    # A small vocabulary makes siblings of one token common too: the first must win. Token 0 is also padding's.
    rng = np.random.default_rng(1000 * n + seed)
    bs, vocab, max_depth = seed + 1, [1, 2, 3, 6][seed], [15, 16, 3, 0][seed]
    parents = torch.tensor([random_parents(rng, n, int(rng.integers(1, n + 1))) for _ in range(bs)])
    tokens = torch.from_numpy(rng.integers(0, vocab, size=(bs, n)))
    tokens[:, 1:][parents[:, 1:] < 0] = 0
    choices = torch.from_numpy(rng.integers(0, vocab, size=(bs, n)))
    walk_and_compare(tokens, parents, choices, max_depth, torch.int32 if seed % 2 else torch.int64)


@pytest.mark.parametrize("n", [pytest.param(n, marks=on_device) for n in (17, 64)])
def test_walk_accepts_a_whole_chain_and_no_padding(n):
    # Rank 0 of every position, to the end; behind it and behind a lone root only padding has the choice's token.
    chain = torch.tensor([*range(-1, 16)] + [-1] * (n - 17))
    parents = torch.stack([chain, torch.full((n,), -1)])
    tokens = torch.where(torch.arange(n) < 17, torch.arange(n) + 5, 0).repeat(2, 1)
    choices = torch.where(torch.arange(n) < 16, torch.arange(n) + 6, 0).repeat(2, 1)
    choices[1] = 0
    out = walk_and_compare(tokens, parents, choices, 16)
    assert out.num_accepted_drafts.tolist() == [16, 0] and out.bonus.tolist() == [0, 0]


@pytest.mark.parametrize("n", [pytest.param(3, marks=on_device)])
def test_walk_without_lengths_into_new_tensors(n):
    tokens, parents = torch.tensor([[1, 2, 3]], device=DEVICE), torch.tensor([[-1, 0, 1]], device=DEVICE)
    walk = k.walk_trees(tokens, parents, tokens + 1, 2)
    assert walk.new_seq_lens is None and isinstance(walk, u.WalkResult)
    assert walk.accept_index.tolist() == [[0, 1, 2]] and walk.next_tokens.tolist() == [[2, 3, 4]]


def test_walk_refuses():
    x, lens = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for args, options, message in (
        ((x, x, x, -1), {}, "max_depth must be at least 0, got -1"),
        ((x, x[:, :2], x, 1), {}, r"parents must have the shape \[2, 3\], got \[2, 2\]"),
        ((x, x, x.int(), 1), {}, "choices must be torch.int64, got torch.int32"),
        ((x, x.T.contiguous().T, x, 1), {}, "parents must be contiguous"),
        ((x[0], x, x, 1), {}, r"tokens must have the shape \[bs, N\], .* got \[3\]"),
        ((x, x, x, 1), {"seq_lens": lens[:1]}, r"seq_lens must have the shape \[2\], got \[1\]"),
        ((x, x, x, 1), {"slots": x}, "slots need seq_lens and max_depth < N"),
        ((x, x, x, 3), {"slots": x, "seq_lens": lens}, "slots need .* got max_depth 3 and N = 3"),
        ((x, x, x, 1), {"slots": x.int(), "seq_lens": lens}, "slots must be torch.int64, got torch.int32"),
        (
            (x, x, x, 1),
            {"slots": x, "seq_lens": lens, "out": k.allocate_walk(2, 3, 1, "cpu")},
            "out.rows and slots must be given together",
        ),
        ((x, x, x, 1), {"out": k.allocate_walk(2, 3, 1, "cpu")}, "new_seq_lens and seq_lens must be given together"),
        (
            (x, x, x, 1),
            {"seq_lens": lens, "out": k.allocate_walk(2, 3, 2, "cpu")},
            r"out.accept_index must have the shape \[2, 2\], got \[2, 3\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            k.walk_trees(*args, **options)


# --- a round on a GPU -----------------------------------------------------------------------------


class Round:
    """One round over fixed buffers, as a CUDA graph holds it."""

    def __init__(self, bs, levels, topk, budget):
        self.budget, self.max_depth = budget, levels
        ids, lp = draw_candidates(0, bs, levels, topk, "softmax")
        self.roots = torch.zeros(bs, dtype=torch.int64, device="cuda")
        self.ids, self.lp = ids.cuda(), lp.cuda()
        self.lens = torch.ones(bs, dtype=torch.int64, device="cuda")
        self.choices = torch.zeros(bs, budget + 1, dtype=torch.int64, device="cuda")
        self.tree = k.allocate_tree(bs, budget, "cuda", visible=True)
        self.walk = k.allocate_walk(bs, budget + 1, levels, "cuda")
        self.mask = torch.zeros(bs * (budget + 1) * (budget + 1 + 40), dtype=torch.bool, device="cuda")

    def run(self):
        tree = self.tree
        k.build_trees(self.roots, self.ids, self.lp, self.budget, seq_lens=self.lens, out=tree)
        k.full_mask(tree.ancestor_bits, self.lens, out=self.mask)
        k.walk_trees(tree.tokens, tree.parents, self.choices, self.max_depth, seq_lens=self.lens, out=self.walk)

    def fill(self, seed):
        bs, levels, topk = self.ids.shape
        ids, lp = draw_candidates(seed, bs, levels, topk, ["grid", "softmax", "rounding"][seed % 3])
        generator = torch.Generator().manual_seed(seed)
        self.ids.copy_(ids)
        self.lp.copy_(lp)
        self.lens.copy_(torch.randint(0, 40, (bs,), generator=generator))
        # Mostly the likeliest child, so that walks of all lengths occur.
        depths = u.build_trees(self.roots.cpu(), ids, lp, self.budget).depths
        likeliest = ids[:, :, 0].gather(1, depths.clamp(max=levels - 1))
        other = torch.randint(0, topk + 3, depths.shape, generator=generator)
        self.choices.copy_(torch.where(torch.rand(depths.shape, generator=generator) < 0.75, likeliest, other))

    def check(self):
        expected = u.build_trees(self.roots.cpu(), self.ids.cpu(), self.lp.cpu(), self.budget)
        assert_tree(self.tree, self.ids.cpu(), self.lp.cpu(), self.budget, self.roots.cpu(), self.lens.cpu())
        mask = u.full_mask(expected.visible, self.lens.cpu())
        assert_same(self.mask[: mask.numel()], mask, "mask")
        walk = u.walk_trees(expected.tokens, expected.parents, self.choices.cpu(), self.max_depth)
        for field in fields(walk):
            assert_same(getattr(self.walk, field.name), getattr(walk, field.name), field.name)


if not INTERPRETED:

    @pytest.mark.gpu
    @pytest.mark.parametrize("bs, budget", [(1, 63), (8, 15), (32, 63), (3, 256)])
    def test_a_captured_round_follows_its_inputs(bs, budget):
        fixed = Round(bs, 15, 8, budget)
        # Compiles; a capture must not.
        fixed.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fixed.run()
        for seed in range(4):
            fixed.fill(seed)
            fill_with_garbage(fixed.tree)
            fill_with_garbage(fixed.walk)
            graph.replay()
            fixed.check()

    @pytest.mark.gpu
    @pytest.mark.parametrize("new_buffers", [False, True])
    def test_a_round_does_not_wait_for_the_host(new_buffers):
        fixed = Round(8, 15, 8, 63)
        fixed.run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                if new_buffers:
                    tree = k.build_trees(fixed.roots, fixed.ids, fixed.lp, 63, seq_lens=fixed.lens, visible=True)
                    k.walk_trees(tree.tokens, tree.parents, fixed.choices, 15, seq_lens=fixed.lens)
                else:
                    fixed.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        fixed.check()

    # --- without a GPU --------------------------------------------------------------------------------

    TYPES = {
        "logprobs": "*fp32",
        "scores_out": "*fp32",
        "out": "*u8",
        "accept_lens_out": "*i32",
        "bits": "*i64",
        **{name: "*i64" for name in ("root_tokens", "ids", "tokens", "parents", "choices", "slots")},
    }

    def kernel_cases():
        for budget in (15, 63, 256):
            sizes = {"BLOCK": max(32, triton.next_power_of_2(budget)), "WORDS": -(-(budget + 1) // 64)}
            yield f"build-{budget}", k._build_kernel, {**sizes, "HAS_POSITIONS": True}, 1
        absent = {"HAS_POSITIONS": False, "seq_lens": None, "positions_out": None}
        yield "build-without-positions", k._build_kernel, {"BLOCK": 32, "WORDS": 1, **absent}, 1
        for n in (16, 257):
            block = max(32, triton.next_power_of_2(n))
            sizes = {"BLOCK": block, "PATH_BLOCK": block, "HAS_SEQ_LENS": True, "HAS_SLOTS": True}
            yield f"walk-{n}", k._walk_kernel, sizes, 1
        absent = {"HAS_SEQ_LENS": False, "seq_lens": None, "new_seq_lens_out": None}
        absent |= {"HAS_SLOTS": False, "slots": None}
        absent |= {name: None for name in ("rows_out", "kv_from_out", "kv_to_out", "positions_out")}
        yield "walk-without-lengths", k._walk_kernel, {"BLOCK": 64, "PATH_BLOCK": 64, **absent}, 1
        for fill in (True, False):
            yield f"mask-{fill}", k._full_mask_kernel, {"BLOCK": 64, "CELLS": 1024, "FILL_PREFIX": fill}, 4
        yield "visible", k._visible_kernel, {"CELLS": 1024}, 4

    @pytest.mark.parametrize("arch", [80, 90, 100, 120])
    def test_kernels_compile_ahead_of_time(arch, tmp_path, monkeypatch):
        # An own cache, or an earlier compilation would be found.
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))

        def type_of(arg):
            return TYPES.get(arg, "*i64" if arg.endswith("_out") or arg == "seq_lens" else "i32")

        for name, kernel, constants, warps in kernel_cases():
            compiled = compile_for(arch, kernel, constants, type_of, num_warps=warps)
            assert compiled.asm["cubin"], name
            # A flushed subnormal would make scores tie that do not.
            assert ".ftz" not in compiled.asm["ptx"], name
            if name.startswith("build"):
                # One instruction per minimum, not a ladder of shuffles: the speed of a step depends on it.
                assert compiled.asm["ptx"].count("redux.sync.min.s32") == 2, name

    def test_the_kernels_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
