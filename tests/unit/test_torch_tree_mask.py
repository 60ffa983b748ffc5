"""Ancestor-mask attention in PyTorch against a float64 loop over (query, key) pairs."""

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.layers.attention.torch_tree_mask import (  # noqa: E402
    TorchTreeMaskAttnBackend,
    tree_attention,
)

# Float32 sums of at most 130 terms of size 1.
FLOAT32 = dict(rtol=0, atol=2e-5)


def chain(n):
    return list(range(-1, n - 1))


def star(n):
    return [-1] + [0] * (n - 1)


def binary(n):
    return [-1] + [(i - 1) // 2 for i in range(1, n)]


def random_tree(n, seed):
    rng = random.Random(seed)
    return [-1] + [rng.randrange(i) for i in range(1, n)]


TREES = {
    "root only": [-1],
    "chain": chain(9),
    "star": star(7),
    "binary": binary(15),
    "random": random_tree(17, 1),
    "large": random_tree(65, 2),
    # An unlinked node that sees only itself (and the prefix), as padding does.
    "padded": [-1, 0, 0, 1, -1, -1],
}


def ancestors(parents, node):
    """The node and all its ancestors."""
    found = []
    while node >= 0:
        found.append(node)
        node = parents[node]
    return found


def visible_of(parents):
    n = len(parents)
    mask = torch.zeros(n, n, dtype=torch.bool)
    for node in range(n):
        for other in ancestors(parents, node):
            mask[node, other] = True
    return mask


def bits_of(parents):
    """int64 [N, 1] of a tree of at most 64 nodes."""
    return (visible_of(parents) * (torch.ones((), dtype=torch.int64) << torch.arange(len(parents)))).sum(-1, True)


def depths_of(parents):
    return torch.tensor([len(ancestors(parents, node)) - 1 for node in range(len(parents))])


def by_loops(query, key, value, seen, scaling, logit_cap=0.0):
    """Float64 attention; `seen(node)` lists the key indices that a node may attend."""
    nodes, heads, _ = query.shape
    group = heads // key.shape[1]
    q, k, v = query.double(), key.double(), value.double()
    out = torch.zeros(nodes, heads, value.shape[2], dtype=torch.float64)
    for node in range(nodes):
        for head in range(heads):
            logits = []
            for index in seen(node):
                logit = float(q[node, head] @ k[index, head // group]) * scaling
                logits.append(logit_cap * math.tanh(logit / logit_cap) if logit_cap else logit)
            weights = [math.exp(logit - max(logits)) for logit in logits]
            for weight, index in zip(weights, seen(node), strict=True):
                out[node, head] += weight / sum(weights) * v[index, head // group]
    return out


def tree_keys(parents, prefix, window=-1):
    """`seen` of a tree: the prefix and the ancestors, of which a window drops what is too far up the path."""

    def seen(node):
        path = ancestors(parents, node)
        position = prefix + len(path) - 1
        where = {index: index for index in range(prefix)}
        where |= {prefix + other: prefix + len(ancestors(parents, other)) - 1 for other in path}
        return [index for index, at in where.items() if window < 0 or position - at <= window]

    return seen


def draw(seed, nodes, prefix, heads, kv_heads, dim, value_dim=None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    total = prefix + nodes
    shapes = ((nodes, heads, dim), (total, kv_heads, dim), (total, kv_heads, value_dim or dim))
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)


def run(parents, prefix, tensors, scaling=0.125, **options):
    return tree_attention(*tensors, visible_of(parents), depths_of(parents), scaling=scaling, **options)


# --- tree_attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [0, 1, 63, 65])
@pytest.mark.parametrize("parents", TREES.values(), ids=TREES)
def test_trees_and_prefixes(parents, prefix):
    tensors = draw(prefix, len(parents), prefix, 2, 1, 16)
    expected = by_loops(*tensors, tree_keys(parents, prefix), 0.125)
    actual = run(parents, prefix, tensors)
    assert actual.dtype == torch.float32 and actual.shape == (len(parents), 2, 16)
    torch.testing.assert_close(actual.double(), expected, **FLOAT32)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (6, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("dim, value_dim", [(64, 64), (80, 80), (128, 128), (64, 48)])
def test_heads_and_head_dims(heads, kv_heads, dim, value_dim):
    parents = random_tree(7, 3)
    tensors = draw(dim, 7, 5, heads, kv_heads, dim, value_dim)
    expected = by_loops(*tensors, tree_keys(parents, 5), dim**-0.5)
    actual = run(parents, 5, tensors, dim**-0.5)
    torch.testing.assert_close(actual.double(), expected, **FLOAT32)


@pytest.mark.parametrize("logit_cap", [0.0, 30.0])
@pytest.mark.parametrize("window", [0, 1, 2, 4, 5, 12, 100])
@pytest.mark.parametrize("name", ["chain", "star", "binary", "random"])
def test_sliding_window_counts_depth(name, window, logit_cap):
    parents, prefix = TREES[name], 6
    tensors = draw(window, len(parents), prefix, 2, 2, 16)
    expected = by_loops(*tensors, tree_keys(parents, prefix, window), 0.3, logit_cap)
    actual = run(parents, prefix, tensors, 0.3, sliding_window=window, logit_cap=logit_cap)
    torch.testing.assert_close(actual.double(), expected, **FLOAT32)


def test_siblings_see_the_same_part_of_the_prefix():
    """Node by node a star's last leaf is far from the prefix; by position it is as near as the first."""
    parents, prefix, window = star(9), 4, 3
    q, k, v = draw(0, 9, prefix, 1, 1, 8)
    # All leaves ask the same, and none of the tree's values counts.
    q[1:] = q[1]
    k[prefix:], v[prefix:] = 0.0, 0.0
    out = run(parents, prefix, (q, k, v), sliding_window=window)
    torch.testing.assert_close(out[1:], out[1:2].expand_as(out[1:]), **FLOAT32)
    by_node = by_loops(q, k, v, lambda node: [i for i in range(4) if i >= 4 + node - window] + [4, 4 + node], 0.125)
    assert (out[8].double() - by_node[8]).abs().max() > 0.01


@pytest.mark.parametrize("logit_cap", [0.5, 20.0])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_logit_cap(heads, kv_heads, logit_cap):
    parents = binary(7)
    tensors = draw(4, 7, 3, heads, kv_heads, 64)
    expected = by_loops(*tensors, tree_keys(parents, 3), 0.7, logit_cap)
    actual = run(parents, 3, tensors, 0.7, logit_cap=logit_cap)
    torch.testing.assert_close(actual.double(), expected, **FLOAT32)
    assert (actual - run(parents, 3, tensors, 0.7)).abs().max() > 0.01


@pytest.mark.parametrize("logit_cap", [0.0, 5.0])
def test_bfloat16(logit_cap):
    parents = random_tree(17, 5)
    tensors = draw(6, 17, 63, 4, 2, 64, dtype=torch.bfloat16)
    expected = by_loops(*tensors, tree_keys(parents, 63), 0.125, logit_cap)
    actual = run(parents, 63, tensors, logit_cap=logit_cap)
    assert actual.dtype == torch.bfloat16
    # Weights and result are rounded to 8 bits, values are up to 4: 2 x 4 x 2^-9.
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=0.016)


def test_a_cache_of_another_dtype_is_read_in_the_querys():
    parents = binary(7)
    q, k, v = draw(7, 7, 4, 2, 2, 16)
    k, v = k.bfloat16(), v.bfloat16()
    expected = by_loops(q, k, v, tree_keys(parents, 4), 0.125)
    actual = run(parents, 4, (q, k, v))
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, **FLOAT32)


def test_a_wrong_mask_bit_changes_its_row_and_no_other():
    parents, prefix = random_tree(9, 8), 5
    tensors = draw(9, 9, prefix, 2, 2, 16)
    right = run(parents, prefix, tensors)
    visible, depths = visible_of(parents), depths_of(parents)
    for row in range(9):
        for column in range(9):
            if row == column:
                continue
            wrong = visible.clone()
            wrong[row, column] ^= True
            out = tree_attention(*tensors, wrong, depths, scaling=0.125)
            changed = (out - right).abs().amax((1, 2))
            assert changed[row] > 1e-3
            assert (changed[torch.arange(9) != row] < 1e-6).all()


# --- The backend ------------------------------------------------------------------------------------

SLOTS = 200
DIM = 16


class Pool:
    """A KV pool of one layer whose slots are NaN until written."""

    def __init__(self, kv_heads, value_dim):
        self.key = torch.full((SLOTS, kv_heads, DIM), math.nan)
        self.value = torch.full((SLOTS, kv_heads, value_dim), math.nan)

    def set_kv_buffer(self, layer, location, key, value):
        assert layer.layer_id == 3
        self.key[location.loc], self.value[location.loc] = key, value

    def get_key_buffer(self, layer_id):
        assert layer_id == 3
        return self.key

    def get_value_buffer(self, layer_id):
        assert layer_id == 3
        return self.value


def make_layer(heads, kv_heads, value_dim=DIM, attn_type=AttentionType.DECODER, window=-1, logit_cap=0.0):
    return SimpleNamespace(
        layer_id=3,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        qk_head_dim=DIM,
        v_head_dim=value_dim,
        scaling=0.2,
        logit_cap=logit_cap,
        sliding_window_size=window,
        attn_type=attn_type,
        is_cross_attention=False,
    )


class Case:
    """A batch of requests of ragged lengths in scattered slots, with `nodes` new tokens each.

    Packed, trees differ in size, and `tail` rows that belong to nobody follow them, with slot 0 as their own.
    """

    def __init__(self, trees, lengths, layer, seed=0, packed=False, tail=0):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.trees, self.lengths, self.layer = trees, lengths, layer
        self.nodes, bs = max(len(parents) for parents in trees), len(trees)
        ends = list(itertools.accumulate(len(parents) for parents in trees))
        self.parts = [slice(end - len(parents), end) for end, parents in zip(ends, trees, strict=True)]
        rows = rng.sample(range(bs + 2), bs)
        slots = rng.sample(range(1, SLOTS), SLOTS - 1)
        # What no request owns points at a NaN slot.
        table = torch.full((bs + 2, 100), slots.pop(), dtype=torch.int32)
        self.pool = Pool(layer.tp_k_head_num, layer.v_head_dim)
        total = ends[-1] + tail
        self.q = torch.randn(total, layer.tp_q_head_num * DIM, generator=generator)
        self.k = torch.randn(total, layer.tp_k_head_num, DIM, generator=generator)
        self.v = torch.randn(total, layer.tp_k_head_num, layer.v_head_dim, generator=generator)
        out_cache_loc, self.prefixes = [], []
        for row, length, parents in zip(rows, lengths, trees, strict=True):
            own = [slots.pop() for _ in range(length + len(parents))]
            table[row, : len(own)] = torch.tensor(own)
            out_cache_loc += own[length:]
            prefix = (
                torch.randn(length, layer.tp_k_head_num, DIM, generator=generator),
                torch.randn(length, layer.tp_k_head_num, layer.v_head_dim, generator=generator),
            )
            self.pool.key[own[:length]], self.pool.value[own[:length]] = prefix
            self.prefixes.append(prefix)
        self.seq_lens = torch.tensor(lengths)
        if packed:
            self.spec_info = SimpleNamespace(
                draft_token_num=self.nodes,
                qo_indptr=torch.tensor([0, *ends], dtype=torch.int32),
                ancestor_bits=torch.cat([*(bits_of(parents) for parents in trees), torch.zeros(tail, 1).long()]),
                depths=torch.cat([*(depths_of(parents) for parents in trees), torch.zeros(tail).long()]),
            )
        else:
            depths = torch.stack([depths_of(parents) for parents in trees])
            self.spec_info = SimpleNamespace(
                draft_token_num=self.nodes,
                custom_mask=torch.stack([visible_of(parents) for parents in trees]).reshape(-1),
                positions=(self.seq_lens[:, None] + depths).reshape(-1),
            )
        self.batch = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            req_pool_indices=torch.tensor(rows),
            seq_lens=self.seq_lens,
            out_cache_loc=torch.tensor(out_cache_loc + [0] * tail),
            spec_info=self.spec_info,
        )
        runner = SimpleNamespace(
            device="cpu", req_to_token_pool=SimpleNamespace(req_to_token=table), token_to_kv_pool=self.pool
        )
        self.backend = TorchTreeMaskAttnBackend(runner)

    def run(self, **options):
        self.backend.init_forward_metadata(self.batch)
        return self.backend.forward_extend(self.q, self.k, self.v, self.layer, self.batch, **options)

    def expected(self, keys_of):
        """By loops, `keys_of(parents, length)` giving `seen`."""
        rows = []
        for b, (parents, length) in enumerate(zip(self.trees, self.lengths, strict=True)):
            part = self.parts[b]
            key = torch.cat([self.prefixes[b][0], self.k[part]])
            value = torch.cat([self.prefixes[b][1], self.v[part]])
            query = self.q[part].view(len(parents), -1, DIM)
            seen = keys_of(parents, length)
            rows.append(by_loops(query, key, value, seen, self.layer.scaling, self.layer.logit_cap))
        return torch.cat(rows).flatten(1)


RAGGED = [0, 7, 1, 33]
FOUR_TREES = [chain(7), star(7), binary(7), random_tree(7, 11)]


@pytest.mark.parametrize("window", [-1, None, 0, 3])
@pytest.mark.parametrize("heads, kv_heads, value_dim", [(2, 2, DIM), (4, 2, 24), (4, 1, DIM)])
def test_backend_serves_a_ragged_batch(heads, kv_heads, value_dim, window):
    layer = make_layer(heads, kv_heads, value_dim, window=window)
    case = Case(FOUR_TREES, RAGGED, layer)
    limit = -1 if window is None else window
    expected = case.expected(lambda parents, length: tree_keys(parents, length, limit))
    actual = case.run()
    assert actual.shape == (28, heads * value_dim)
    torch.testing.assert_close(actual.double(), expected, **FLOAT32)


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("window", [-1, 3])
def test_backend_serves_a_packed_round(window, tail, monkeypatch):
    """Requests of different numbers of nodes, one of a root alone beside one of 64; the tail gets zeros."""
    trees = [random_tree(64, 3), [-1], star(7), chain(5)]
    case = Case(trees, RAGGED, make_layer(4, 2, window=window), packed=True, tail=tail)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **options: empty(*args, **options).fill_(math.nan))
    actual = case.run()
    expected = case.expected(lambda parents, length: tree_keys(parents, length, window))
    torch.testing.assert_close(actual[: len(expected)].double(), expected, **FLOAT32)
    assert actual.shape == (77 + tail, 4 * DIM) and not actual[77:].any()


def test_backend_caps_logits():
    case = Case(FOUR_TREES, RAGGED, make_layer(4, 2, logit_cap=2.0))
    torch.testing.assert_close(case.run().double(), case.expected(tree_keys), **FLOAT32)


@pytest.mark.parametrize("window", [-1, 2])
def test_backend_without_a_mask_is_causal(window):
    case = Case([chain(6)] * 3, [4, 0, 19], make_layer(4, 2, window=window))
    expected = case.expected(lambda parents, length: tree_keys(parents, length, window))
    case.batch.spec_info = SimpleNamespace(draft_token_num=6, custom_mask=None, positions=None)
    torch.testing.assert_close(case.run().double(), expected, **FLOAT32)


@pytest.mark.parametrize("masked", [False, True])
def test_backend_lets_a_bidirectional_layer_see_its_whole_block(masked):
    layer = make_layer(4, 2, attn_type=AttentionType.ENCODER_ONLY)
    case = Case([chain(5)] * 3, [6, 0, 21], layer)
    if not masked:
        case.batch.spec_info.custom_mask = None
    expected = case.expected(lambda parents, length: lambda node: range(length + 5))
    torch.testing.assert_close(case.run().double(), expected, **FLOAT32)


def test_backend_writes_the_round_only_when_asked_to():
    case = Case(FOUR_TREES, RAGGED, make_layer(2, 2))
    loc = case.batch.out_cache_loc
    before = case.pool.key.clone()
    out = case.run(save_kv_cache=False)
    assert out.isnan().any()
    torch.testing.assert_close(case.pool.key, before, equal_nan=True, rtol=0, atol=0)
    out = case.run()
    assert not out.isnan().any()
    assert torch.equal(case.pool.key[loc], case.k) and torch.equal(case.pool.value[loc], case.v)
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[loc] = False
    torch.testing.assert_close(case.pool.key[others], before[others], equal_nan=True, rtol=0, atol=0)


def test_backend_plans_anew_each_round():
    case = Case(FOUR_TREES, RAGGED, make_layer(2, 2))
    first = case.run()
    case.batch.spec_info.custom_mask = torch.stack([visible_of(chain(7))] * 4).reshape(-1)
    second = case.run()
    expected = case.expected(lambda parents, length: tree_keys(chain(7), length))
    torch.testing.assert_close(second.double(), expected, **FLOAT32)
    assert (first - second).abs().max() > 0.01


def test_backend_leaves_a_prefill_to_sglang():
    """No plan from an earlier verify may reach an ordinary extend, which is causal."""
    case = Case([chain(5)] * 2, [3, 0], make_layer(4, 2))
    expected = case.expected(tree_keys)
    case.run()
    lengths = case.seq_lens
    case.batch.spec_info = None
    case.batch.forward_mode = ForwardMode.EXTEND
    case.batch.seq_lens = lengths + 5
    case.batch.extend_prefix_lens = lengths
    case.batch.extend_seq_lens = torch.full_like(lengths, 5)
    case.batch.encoder_lens = None
    torch.testing.assert_close(case.run().double(), expected, **FLOAT32)
    with pytest.raises(AssertionError, match="init_forward_metadata"):
        case.batch.forward_mode = ForwardMode.TARGET_VERIFY
        case.backend.forward_extend(case.q, case.k, case.v, case.layer, case.batch)
