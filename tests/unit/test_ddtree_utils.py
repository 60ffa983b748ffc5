"""The DDTree algorithm against independent oracles: plain loops and brute force, never the tested code."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from _load import load_ddtree_utils
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

u = load_ddtree_utils()

# Few values make many ties: probability one (both zeros), sums absorbed by rounding (-1 + -1e-9 == -1), a sum
# that overflows to -inf, and probability zero.
TIED_LOGPROBS = [0.0, -0.0, -1e-9, -0.25, -0.5, -1.0, -1.0000001, -3e38, -math.inf]
BUDGETS = [1, 2, 3, 4, 7, 8, 15, 16, 31, 63, 64, 65, 100, 255, 256]

small = settings(max_examples=60, deadline=None)


def draw_candidates(seed, bs, levels, topk, kind):
    """Distinct ids int64 and log-probabilities float32, best first, both [bs, levels, topk]."""
    rng = np.random.default_rng(seed)
    vocab = topk + int(rng.integers(0, 5))
    ids = rng.permuted(np.tile(np.arange(vocab), (bs, levels, 1)), axis=-1)[..., :topk]
    if kind == "tied":
        few = rng.choice(TIED_LOGPROBS, size=int(rng.integers(1, 5)))
        lp = rng.choice(few, size=(bs, levels, topk))
    elif kind == "softmax":
        logits = rng.normal(size=(bs, levels, topk)) * rng.choice([0.1, 1.0, 5.0, 30.0])
        lp = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) - 1e-3
    else:
        # One confident position after another, as real drafts are: most mass on rank 0.
        lp = -rng.exponential(size=(bs, levels, topk)) * np.where(np.arange(topk) == 0, 1e-4, 10.0)
    lp = -np.sort(-lp.astype(np.float32), axis=-1)
    return torch.from_numpy(ids), torch.from_numpy(lp)


def random_parents(rng, n, real=None):
    """One tree's parents as a list: node 0 the root, nodes from `real` on padding."""
    real = n if real is None else real
    return [-1] + [int(rng.integers(0, i)) if i < real else -1 for i in range(1, n)]


def chain_parents(n):
    return list(range(-1, n - 1))


def star_parents(n):
    return [-1] + [0] * (n - 1)


def parents_batches():
    batches = []
    rng = np.random.default_rng(5)
    for n in (1, 2, 5, 17, 63, 64, 65, 130):
        rows = [
            chain_parents(n),
            star_parents(n),
            random_parents(rng, n),
            random_parents(rng, n, real=max(1, n // 2)),
        ]
        batches.append(torch.tensor(rows))
    return batches


def visible_by_loops(parents):
    rows = parents.tolist()
    n = len(rows[0])
    expected = [[[False] * n for _ in range(n)] for _ in rows]
    for b, row in enumerate(rows):
        for i in range(n):
            j = i
            while j >= 0:
                expected[b][i][j] = True
                j = row[j]
    return expected


# --- building -------------------------------------------------------------------------------------


def assert_equals_heap(root_tokens, ids, lp, budget):
    tree = u.build_trees(root_tokens, ids, lp, budget)
    n = budget + 1
    for b in range(ids.shape[0]):
        heap = u.build_tree_heap(int(root_tokens[b]), ids[b], lp[b], budget)
        real = len(heap.tokens)
        pad = n - real
        assert int(tree.num_nodes[b]) == real
        assert tree.tokens[b].tolist() == heap.tokens + [0] * pad
        assert tree.parents[b].tolist() == heap.parents + [-1] * pad
        assert tree.depths[b].tolist() == heap.depths + [0] * pad
        assert tree.ranks[b].tolist() == heap.ranks + [-1] * pad
        expected = torch.tensor(heap.scores + [-math.inf] * pad, dtype=torch.float32)
        # As bits, so that 0.0 and -0.0 differ.
        assert torch.equal(tree.scores[b].view(torch.int32), expected.view(torch.int32))
        children = {i: [j for j in range(real) if heap.parents[j] == i] for i in range(real)}
        assert tree.first_child[b].tolist() == [min(children.get(i, []), default=-1) for i in range(n)]
        following = {a: c for siblings in children.values() for a, c in itertools.pairwise(siblings)}
        assert tree.next_sibling[b].tolist() == [following.get(i, -1) for i in range(n)]
    assert tree.visible.tolist() == visible_by_loops(tree.parents)
    return tree


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bs=st.integers(1, 4),
    levels=st.integers(1, 16),
    topk=st.integers(1, 16),
    budget=st.sampled_from([b for b in BUDGETS if b <= 65]),
    kind=st.sampled_from(["tied", "tied", "softmax", "confident"]),
)
@example(seed=0, bs=1, levels=1, topk=1, budget=1, kind="tied")
@example(seed=1, bs=2, levels=16, topk=1, budget=65, kind="tied")
@example(seed=2, bs=2, levels=1, topk=16, budget=65, kind="softmax")
def test_build_trees_equals_heap(seed, bs, levels, topk, budget, kind):
    ids, lp = draw_candidates(seed, bs, levels, topk, kind)
    assert_equals_heap(torch.arange(bs), ids, lp, budget)


@pytest.mark.parametrize("kind", ["tied", "softmax", "confident"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_build_trees_equals_heap_at_every_budget(budget, kind):
    bs = 2 if budget > 100 else 9
    ids, lp = draw_candidates(budget, bs, 15, 8, kind)
    assert_equals_heap(torch.arange(bs), ids, lp, budget)


@pytest.mark.parametrize("levels, topk, budget", [(1, 64, 256), (3, 64, 256), (15, 64, 7), (2, 5000, 3)])
def test_build_trees_equals_heap_with_many_candidates(levels, topk, budget):
    for kind in ("tied", "softmax"):
        ids, lp = draw_candidates(topk, 2, levels, topk, kind)
        assert_equals_heap(torch.zeros(2, dtype=torch.int64), ids, lp, budget)


@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, -math.inf])
def test_build_trees_equals_heap_when_all_candidates_tie(value):
    ids = torch.arange(4).expand(2, 5, 4)
    tree = assert_equals_heap(torch.tensor([0, 3]), ids, torch.full((2, 5, 4), value), 40)
    assert tree.num_nodes.tolist() == [41, 41]
    if value in (0.0, -math.inf):
        # Scores tie at every depth, so shallower first makes it breadth-first.
        assert tree.depths[0].tolist() == [0] + [1] * 4 + [2] * 16 + [3] * 20


def test_build_trees_root_only_siblings_and_chain():
    ids = torch.tensor([[[5, 0], [7, 0]]])
    lp = torch.log(torch.tensor([[[0.75, 0.25], [0.5, 0.25]]]))
    tree = u.build_trees(torch.tensor([9]), ids, lp, 3)
    # 0.75, then 0.75 * 0.5 = 0.375, then 0.25 before 0.75 * 0.25 = 0.1875.
    assert tree.tokens.tolist() == [[9, 5, 7, 0]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0]]
    assert tree.depths.tolist() == [[0, 1, 2, 1]]
    assert tree.first_child.tolist() == [[1, 2, -1, -1]]
    assert tree.next_sibling.tolist() == [[-1, 3, -1, -1]]


@small
@given(
    seed=st.integers(0, 2**32 - 1),
    levels=st.integers(1, 4),
    topk=st.integers(1, 4),
    budget=st.integers(1, 50),
    kind=st.sampled_from(["tied", "tied", "softmax"]),
)
def test_heap_is_the_definition(seed, levels, topk, budget, kind):
    ids, lp = draw_candidates(seed, 1, levels, topk, kind)
    lps = lp[0].numpy()

    def score(node):
        total = np.float32(0)
        with np.errstate(over="ignore"):
            for depth, rank in enumerate(node):
                total = np.float32(total + lps[depth, rank])
        return total

    def compare(a, b):
        if a == b:
            return 0
        if score(a) != score(b):
            return -1 if score(a) > score(b) else 1
        if len(a) != len(b):
            return len(a) - len(b)
        # Selected earlier is this same order, of the parents.
        return compare(a[:-1], b[:-1]) or a[-1] - b[-1]

    nodes = [p for d in range(1, levels + 1) for p in itertools.product(range(topk), repeat=d)]
    selected = [(), *sorted(nodes, key=functools.cmp_to_key(compare))[:budget]]
    heap = u.build_tree_heap(3, ids[0], lp[0], budget)
    assert heap.parents == [-1] + [selected.index(p[:-1]) for p in selected[1:]]
    assert heap.ranks == [-1] + [p[-1] for p in selected[1:]]
    assert heap.depths == [len(p) for p in selected]
    assert heap.tokens == [3] + [int(ids[0, len(p) - 1, p[-1]]) for p in selected[1:]]
    assert heap.scores == [float(score(p)) for p in selected]
    assert all(parent < child for child, parent in enumerate(heap.parents))
    assert len(selected) - 1 == u.max_tree_nodes(levels + 1, topk, budget)


@small
@given(seed=st.integers(0, 2**32 - 1), budget=st.sampled_from(BUDGETS), topk=st.integers(1, 12))
def test_parents_precede_children_and_scores_fall(seed, budget, topk):
    ids, lp = draw_candidates(seed, 3, 15, topk, "tied")
    tree = u.build_trees(torch.zeros(3, dtype=torch.int64), ids, lp, budget)
    assert bool((tree.parents < torch.arange(budget + 1)).all())
    assert bool((tree.scores[:, 1:] <= tree.scores[:, :-1]).all())


def test_chain_of_first_ranks_with_one_candidate():
    ids, lp = draw_candidates(0, 2, 15, 1, "softmax")
    tree = u.build_trees(torch.tensor([1, 2]), ids, lp, 15)
    assert torch.equal(tree.tokens[:, 1:], ids[:, :, 0])
    assert torch.equal(tree.parents, torch.arange(-1, 15).expand(2, 16))


def test_a_request_does_not_depend_on_its_batch():
    ids, lp = draw_candidates(11, 5, 15, 8, "tied")
    roots = torch.arange(5)
    together = u.build_trees(roots, ids, lp, 31)
    alone = u.build_trees(roots[3:4], ids[3:4], lp[3:4], 31)
    for name in vars(together):
        assert torch.equal(getattr(together, name)[3:4], getattr(alone, name)), name


def test_empty_batch():
    tree = u.build_trees(torch.zeros(0, dtype=torch.int64), *draw_candidates(0, 0, 3, 2, "softmax"), 5)
    assert tree.tokens.shape == (0, 6) and tree.visible.shape == (0, 6, 6)


@pytest.mark.parametrize(
    "block_size, topk, limit, expected",
    [(2, 3, 100, 3), (4, 2, 100, 14), (4, 2, 14, 14), (4, 2, 13, 13), (16, 1, 64, 15), (10**6, 8, 64, 64)],
)
def test_max_tree_nodes(block_size, topk, limit, expected):
    assert u.max_tree_nodes(block_size, topk, limit) == expected


def test_max_tree_nodes_names_the_bad_argument():
    for args, message in (
        ((1, 2, 3), "block_size must be at least 2, got 1"),
        ((2, 0, 3), "topk must be at least 1, got 0"),
        ((2, 1, -1), "limit must be at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            u.max_tree_nodes(*args)


def _valid_inputs():
    return {
        "root_tokens": torch.zeros(2, dtype=torch.int64),
        "candidate_ids": torch.arange(4).expand(2, 3, 4),
        "candidate_logprobs": torch.tensor([-1.0, -2.0, -3.0, -4.0]).repeat(2, 3, 1),
        "budget": 5,
    }


def _with_value(value):
    lp = _valid_inputs()["candidate_logprobs"].clone()
    lp[1, 2, 0] = value
    return lp


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("budget", 0, "budget must be at least 1, got 0"),
        (
            "root_tokens",
            torch.zeros(2, dtype=torch.int32),
            "root_tokens must be torch.int64, got torch.int32",
        ),
        ("root_tokens", torch.zeros(2, 1, dtype=torch.int64), r"root_tokens .* \[bs\], got \[2, 1\]"),
        (
            "root_tokens",
            torch.zeros(3, dtype=torch.int64),
            "root_tokens must have one token per request, 2, got 3",
        ),
        (
            "candidate_ids",
            torch.zeros(2, 3, dtype=torch.int64),
            r"candidate_ids .* \[bs, D-1, K\], got \[2, 3\]",
        ),
        (
            "candidate_logprobs",
            torch.zeros(2, 3, 4, dtype=torch.float16),
            "candidate_logprobs must be torch.float32",
        ),
        ("candidate_logprobs", torch.zeros(2, 3, 3), r"shape of candidate_ids, \[2, 3, 4\], got \[2, 3, 3\]"),
        (
            "candidate_logprobs",
            torch.zeros(2, 3, 4, device="meta"),
            "candidate_logprobs must be on cpu .* got meta",
        ),
        ("candidate_logprobs", _with_value(math.nan), "candidate_logprobs must not be NaN, got 1 NaN of 24"),
        ("candidate_logprobs", _with_value(1e-7), "candidate_logprobs must be at most 0, got 1 positive"),
        (
            "candidate_logprobs",
            _with_value(-2.5),
            "candidate_logprobs must be sorted best first .* got 1 rising",
        ),
    ],
)
def test_build_trees_refuses(name, value, message):
    with pytest.raises(ValueError, match=message):
        u.build_trees(**{**_valid_inputs(), name: value})


def test_build_trees_refuses_no_candidates():
    inputs = _valid_inputs()
    inputs["candidate_ids"] = inputs["candidate_ids"][:, :, :0]
    inputs["candidate_logprobs"] = inputs["candidate_logprobs"][:, :, :0]
    with pytest.raises(ValueError, match="candidate_ids must have at least one position and one candidate"):
        u.build_trees(**inputs)


def test_heap_refuses_budget_zero():
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        u.build_tree_heap(0, [[1]], [[0.0]], 0)


# --- links, masks, positions ----------------------------------------------------------------------


@pytest.mark.parametrize("parents", parents_batches(), ids=lambda p: f"N{p.shape[1]}")
def test_links_and_masks_match_plain_loops(parents):
    bs, n = parents.shape
    rows = parents.tolist()
    first_child, next_sibling = u.link_children(parents)
    for b in range(bs):
        for i in range(n):
            children = [j for j in range(n) if rows[b][j] == i]
            assert int(first_child[b, i]) == (children[0] if children else -1)
            later = [j for j in range(i + 1, n) if rows[b][i] >= 0 and rows[b][j] == rows[b][i]]
            assert int(next_sibling[b, i]) == (later[0] if later else -1)

    expected = visible_by_loops(parents)
    visible = u.ancestor_mask(parents, n)
    assert visible.tolist() == expected
    assert u.qlen_only_mask(visible).tolist() == [x for request in expected for row in request for x in row]

    words = u.bit_mask(visible)
    assert words.dtype == torch.int64 and words.shape == (bs, n, math.ceil(n / 64))
    for b in range(bs):
        for i in range(n):
            decoded = [bool((w % 2**64) >> j & 1) for w in words[b, i].tolist() for j in range(64)]
            assert decoded == expected[b][i] + [False] * (len(decoded) - n)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 7, 8, 15])
def test_ancestor_mask_with_the_tightest_depth_limit(depth):
    parents = torch.tensor([chain_parents(depth + 1)])
    assert u.ancestor_mask(parents, depth).tolist() == visible_by_loops(parents)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", [1, 4, 17])
def test_full_mask_decoded_by_loops(n, dtype):
    rng = np.random.default_rng(n)
    seq_lens = [3, 0, 11, 1, 64]
    parents = torch.tensor([random_parents(rng, n, real=max(1, n - b)) for b in range(len(seq_lens))])
    expected = []
    for request, seq_len in zip(visible_by_loops(parents), seq_lens, strict=True):
        for row in request:
            expected += [True] * seq_len + row
    visible = u.ancestor_mask(parents, n)
    lens = torch.tensor(seq_lens, dtype=dtype)
    total = len(expected)

    assert u.full_mask(visible, lens).tolist() == expected
    assert u.full_mask(visible, lens, total=total).tolist() == expected

    out = torch.zeros(total + 7, dtype=torch.bool)
    assert u.full_mask(visible, lens, out=out) is out
    assert out.tolist() == expected + [True] * 7

    out = torch.zeros(total + 7, dtype=torch.bool)
    result = u.full_mask(visible, lens, out=out, total=total)
    assert result.tolist() == expected and result.data_ptr() == out.data_ptr()
    assert not bool(out[total:].any())


def test_full_mask_refuses_a_wrong_buffer():
    visible, lens = torch.ones(2, 3, 3, dtype=torch.bool), torch.tensor([4, 5])
    with pytest.raises(ValueError, match=r"out must be a 1-D bool tensor, got \[45\] torch.uint8"):
        u.full_mask(visible, lens, out=torch.zeros(45, dtype=torch.uint8))
    with pytest.raises(ValueError, match="out must hold at least 18 cells, got 17"):
        u.full_mask(visible, lens, out=torch.zeros(17, dtype=torch.bool))
    with pytest.raises(ValueError, match="out must hold at least 45 cells, got 44"):
        u.full_mask(visible, lens, out=torch.zeros(44, dtype=torch.bool), total=45)


def test_tree_positions():
    depths = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 0]])
    positions = u.tree_positions(depths, torch.tensor([10, 0], dtype=torch.int32))
    assert positions.dtype == torch.int64
    assert positions.tolist() == [[10, 11, 11, 12], [0, 1, 2, 0]]


# --- walking --------------------------------------------------------------------------------------


def walk_by_recursion(tokens, first_child, next_sibling, choices, node, depth_left):
    """The path from `node` on and the bonus, along the links as SGLang's own kernel walks them."""
    child = int(first_child[node])
    while depth_left and child >= 0:
        if int(tokens[child]) == int(choices[node]):
            path, bonus = walk_by_recursion(tokens, first_child, next_sibling, choices, child, depth_left - 1)
            return [node, *path], bonus
        child = int(next_sibling[child])
    return [node], int(choices[node])


@small
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 40),
    bs=st.integers(1, 5),
    vocab=st.integers(1, 6),
    max_depth=st.integers(0, 16),
)
def test_walk_matches_recursion_over_links(seed, n, bs, vocab, max_depth):
    # A small vocabulary makes siblings of one token common too: the first must win.
    rng = np.random.default_rng(seed)
    parents = torch.tensor([random_parents(rng, n, real=int(rng.integers(1, n + 1))) for _ in range(bs)])
    tokens = torch.from_numpy(rng.integers(0, vocab, size=(bs, n)))
    tokens[:, 1:][parents[:, 1:] < 0] = 0
    choices = torch.from_numpy(rng.integers(0, vocab, size=(bs, n)))
    links = u.link_children(parents)
    result = u.walk_trees(tokens, parents, choices, max_depth)
    assert result.accept_index.shape == (bs, max_depth + 1)
    for b in range(bs):
        path, bonus = walk_by_recursion(tokens[b], links[0][b], links[1][b], choices[b], 0, max_depth)
        assert result.accept_index[b].tolist() == path + [-1] * (max_depth + 1 - len(path))
        assert int(result.num_accepted_drafts[b]) == len(path) - 1
        assert int(result.bonus[b]) == bonus


def test_padding_is_never_accepted_though_its_token_is_zero():
    ids, lp = torch.tensor([[[5], [6]]]), torch.tensor([[[-0.5], [-0.5]]])
    tree = u.build_trees(torch.tensor([0]), ids, lp, 8)
    assert tree.num_nodes.tolist() == [3]
    choices = torch.zeros_like(tree.tokens)
    result = u.walk_trees(tree.tokens, tree.parents, choices, 2)
    assert result.num_accepted_drafts.tolist() == [0] and result.bonus.tolist() == [0]
    # Behind a leaf as well, where a padding node would be the only candidate.
    choices[0, :2] = torch.tensor([5, 6])
    result = u.walk_trees(tree.tokens, tree.parents, choices, 2)
    assert result.accept_index.tolist() == [[0, 1, 2]] and result.bonus.tolist() == [0]


def test_a_real_node_of_token_zero_is_accepted():
    tree = u.build_trees(torch.tensor([0]), torch.tensor([[[0, 1]]]), torch.tensor([[[-1.0, -2.0]]]), 2)
    result = u.walk_trees(tree.tokens, tree.parents, torch.tensor([[0, 1, 1]]), 1)
    assert result.accept_index.tolist() == [[0, 1]] and result.bonus.tolist() == [1]


def _tiny_target(seed, vocab=3, depth=3):
    """A tree of budget 5 and the target's distribution at any prefix, one of whose tokens is impossible."""
    rng = np.random.default_rng(seed)
    law = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            p = rng.exponential(size=vocab)
            p[rng.integers(0, vocab)] *= rng.integers(0, 2)
            law[prefix] = (p / p.sum()).astype(np.float32)
    ids, lp = draw_candidates(seed, 1, depth - 1, 2, "softmax")
    tree = u.build_trees(torch.tensor([0]), ids % vocab, lp, 5)
    prefixes = [()]
    for i in range(1, 6):
        prefixes.append((*prefixes[int(tree.parents[0, i])], int(tree.tokens[0, i])))
    return tree, prefixes, law


def _committed(tree, choices):
    """The committed tokens of every row of choices [R, N] over one tree."""
    rows = choices.shape[0]
    tokens = tree.tokens.expand(rows, -1)
    walk = u.walk_trees(tokens, tree.parents.expand(rows, -1), choices, 2)
    for row in range(rows):
        path = [i for i in walk.accept_index[row].tolist() if i > 0]
        yield (*(int(tokens[row, i]) for i in path), int(walk.bonus[row]))


def _target_probability(law, sequence):
    return math.prod(float(law[sequence[:i]][t]) for i, t in enumerate(sequence))


@pytest.mark.parametrize("seed", range(4))
def test_committed_sequences_have_exactly_the_targets_probabilities(seed):
    tree, prefixes, law = _tiny_target(seed)
    draws = list(itertools.product(range(3), repeat=len(prefixes)))
    got = {}
    for draw, sequence in zip(draws, _committed(tree, torch.tensor(draws)), strict=True):
        weight = math.prod(float(law[p][t]) for p, t in zip(prefixes, draw, strict=True))
        got[sequence] = got.get(sequence, 0.0) + weight
    for sequence, probability in got.items():
        # The laws' float32 rows sum to 1 within 1e-7; nodes off the path contribute such sums.
        assert probability == pytest.approx(_target_probability(law, sequence), rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_sampled_walks_follow_the_target(seed):
    tree, prefixes, law = _tiny_target(seed)
    rows = 20_000
    generator = torch.Generator().manual_seed(seed)
    probs = torch.from_numpy(np.stack([law[p] for p in prefixes]))
    coins = torch.rand((rows, len(prefixes)), generator=generator)
    choices = u.sample_choices(probs.repeat(rows, 1), coins.flatten()).reshape(rows, -1)
    counts = {}
    for sequence in _committed(tree, choices):
        counts[sequence] = counts.get(sequence, 0) + 1
    expected = {sequence: rows * _target_probability(law, sequence) for sequence in counts}
    # No sequence of positive probability is missing, and none of probability zero is there.
    assert sum(expected.values()) == pytest.approx(rows, rel=1e-3) and min(expected.values()) > 0
    scale = rows / sum(expected.values())
    p_value = stats.chisquare(list(counts.values()), [x * scale for x in expected.values()]).pvalue
    assert p_value > 1e-3


# --- choices --------------------------------------------------------------------------------------


def test_sample_choices_follows_the_distribution():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    coins = torch.rand(50_000, generator=torch.Generator().manual_seed(0))
    drawn = u.sample_choices(probs.expand(50_000, 6), coins)
    counts = torch.bincount(drawn, minlength=6)
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    assert stats.chisquare(counts[[1, 3, 4]].numpy(), [25_000, 10_000, 15_000]).pvalue > 1e-3


# https://github.com/sgl-project/sglang/issues/35771: a coin of exactly 0.0 accepted an impossible token.
@pytest.mark.parametrize("scale", [1.0, 0.9, 1.1, 1e-30])
def test_sample_choices_never_draws_probability_zero(scale):
    probs = scale * torch.tensor([[0.0, 0.0, 0.6, 0.0, 0.4, 0.0]])
    edge = 0.6
    coins = [0.0, 1e-45, edge - 1e-6, edge + 1e-6, 1 - 2**-24, 1.0]
    drawn = u.sample_choices(probs.expand(len(coins), 6), torch.tensor(coins))
    assert drawn.tolist() == [2, 2, 2, 4, 4, 4]


def test_sample_choices_on_a_boundary_passes_over_the_gap():
    # The coin lies exactly on the distribution function's step, which is 0.5 at tokens 0, 1 and 2.
    drawn = u.sample_choices(torch.tensor([[0.5, 0.0, 0.0, 0.5]]), torch.tensor([0.5]))
    assert drawn.tolist() == [3]


@small
@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(1, 300))
def test_sample_choices_stays_in_the_support(seed, vocab):
    rng = np.random.default_rng(seed)
    probs = torch.from_numpy(rng.exponential(size=(8, vocab)) * (rng.random((8, vocab)) < 0.3)).float()
    probs[:, int(rng.integers(0, vocab))] = 1e-38
    coins = torch.tensor([0.0, 1 - 2**-24, 1.0, *rng.random(5)], dtype=torch.float32)
    drawn = u.sample_choices(probs, coins)
    assert bool((probs.gather(1, drawn[:, None]) > 0).all())


def test_greedy_choices_takes_the_first_maximum():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-math.inf, -math.inf, -math.inf, -math.inf], [0.0, 0.0, 1.0, 1.0]])
    assert u.greedy_choices(logits).tolist() == [1, 0, 2]


# --- no host synchronisation ----------------------------------------------------------------------


class NoHostSync(TorchDispatchMode):
    """Raises at an operator that reads the device's data back, or copies the host's data to it."""

    FORBIDDEN = {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::is_nonzero",
        "aten::equal",
        "aten::masked_select",
        "aten::unique_dim",
        "aten::_unique2",
        "aten::unique_consecutive",
        "aten::repeat_interleave",
        # torch.tensor(list): from pageable memory such a copy waits, and no graph can capture it.
        "aten::lift_fresh",
        "aten::lift_fresh_copy",
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        boolean_index = name.startswith("aten::index") and any(
            isinstance(i, torch.Tensor) and i.dtype == torch.bool
            for arg in args
            if isinstance(arg, (list, tuple))
            for i in arg
        )
        if name in self.FORBIDDEN or boolean_index:
            raise AssertionError(f"{name} synchronises with the host")
        return func(*args, **(kwargs or {}))


def _one_round(ids, lp, seq_lens, probs, coins, buffer):
    tree = u.build_trees(ids[:, 0, 0], ids, lp, 15, validate=False)
    u.full_mask(tree.visible, seq_lens, out=buffer)
    u.full_mask(tree.visible, seq_lens, out=buffer, total=buffer.numel())
    u.full_mask(tree.visible, seq_lens, total=buffer.numel())
    u.qlen_only_mask(tree.visible)
    u.bit_mask(tree.visible)
    u.tree_positions(tree.depths, seq_lens)
    for choices in (u.sample_choices(probs, coins), u.greedy_choices(probs)):
        choices = choices.reshape(tree.tokens.shape)
        walk = u.walk_trees(tree.tokens, tree.parents, choices, 7)
        u.plan_commit(walk, choices, seq_lens, torch.zeros_like(choices))


def _round_inputs(bs=3):
    ids, lp = draw_candidates(1, bs, 7, 8, "softmax")
    n, seq_lens = 16, torch.tensor([5, 0, 9], dtype=torch.int32)
    buffer = torch.zeros(n * 14 + bs * n * n, dtype=torch.bool)
    return [ids, lp, seq_lens, torch.rand(bs * n, 12), torch.rand(bs * n), buffer]


def test_a_round_calls_no_operator_that_synchronises():
    inputs = _round_inputs()
    with NoHostSync():
        _one_round(*inputs)


def test_a_round_needs_no_data_at_all():
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        _one_round(*(mode.from_tensor(x) for x in _round_inputs()))


def test_the_two_checks_above_notice_a_synchronisation():
    ids, lp, seq_lens, _, _, _ = _round_inputs()
    visible = torch.ones(3, 16, 16, dtype=torch.bool)
    synchronising = [
        lambda ids, lp, seq_lens, visible: u.build_trees(ids[:, 0, 0], ids, lp, 15, validate=True),
        lambda ids, lp, seq_lens, visible: u.full_mask(visible, seq_lens),
        lambda ids, lp, seq_lens, visible: lp[lp < -1],
    ]
    for function in synchronising:
        with pytest.raises(AssertionError, match="synchronises"), NoHostSync():
            function(ids, lp, seq_lens, visible)
        with (
            FakeTensorMode(allow_non_fake_inputs=False) as mode,
            pytest.raises((DataDependentOutputException, DynamicOutputShapeException)),
        ):
            function(*(mode.from_tensor(x) for x in (ids, lp, seq_lens, visible)))
