"""SGLang's Triton backend with the tree kernel, on a fake model runner.

As in test_triton_tree_mask.py: with TRITON_INTERPRET=1 on the CPU, which a plain run starts once; else on a GPU.
"""

import itertools
import math
import os
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter
from test_torch_tree_mask import binary, chain, depths_of, random_tree, star, visible_of
from test_torch_tree_mask import bits_of as row_bits

pytest.importorskip("triton")
# SGLang's kernels leave the precision of float32 products to Triton, which rounds them to TF32 on a GPU.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")

import sglang.srt.layers.attention.triton_backend as parent_module  # noqa: E402
from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend  # noqa: E402
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend  # noqa: E402
from sglang.srt.layers.attention.torch_tree_mask import tree_attention as reference  # noqa: E402
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.attention.triton_tree_backend import (  # noqa: E402
    TreeForwardMetadata,
    TritonTreeMaskAttnBackend,
)
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

HEADS, KV_HEADS, DIM, NODES = 4, 2, 64, 7
CONTEXT, ROWS, SLOTS = 400, 6, 1200
SCALING = 0.125
TREES = [chain(NODES), star(NODES), binary(NODES), random_tree(NODES, 11)]
# The first is long enough to be split.
LENGTHS = [300, 7, 1, 33]
# Float32 sums of at most 400 terms of size 1.
FLOAT32 = dict(rtol=0, atol=3e-5)


class Pool:
    """A KV pool of one layer whose slots are NaN until written, but for slot 0, where SGLang writes padding."""

    def __init__(self):
        self.key = torch.full((SLOTS, KV_HEADS, DIM), math.nan, device=DEVICE)
        self.value = self.key.clone()
        self.key[0], self.value[0] = 1.0, 1.0

    def set_kv_buffer(self, layer, location, key, value):
        self.key[location.loc], self.value[location.loc] = key, value

    def get_key_buffer(self, layer_id):
        return self.key

    def get_value_buffer(self, layer_id):
        return self.value

    def get_kv_buffer(self, layer_id):
        return self.key, self.value


def make_runner(pool, table, *, window=None, draft=False, arch=AttentionArch.MHA, deterministic=False):
    return SimpleNamespace(
        device=DEVICE,
        dtype=torch.float32,
        gpu_id=0,
        page_size=1,
        is_draft_worker=draft,
        sliding_window_size=window,
        kv_cache_dtype=torch.float32,
        req_to_token_pool=SimpleNamespace(req_to_token=table, size=ROWS),
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=SimpleNamespace(),
        model_config=SimpleNamespace(
            attention_arch=arch,
            context_len=CONTEXT,
            head_dim=DIM,
            v_head_dim=DIM,
            swa_v_head_dim=DIM,
            is_encoder_decoder=False,
            get_max_num_attention_heads=lambda: HEADS,
            get_num_kv_heads=lambda tp_size: KV_HEADS,
        ),
        server_args=SimpleNamespace(
            triton_attention_num_kv_splits=2,
            triton_attention_split_tile_size=None,
            chunked_prefill_size=512,
            enable_deterministic_inference=deterministic,
            speculative_attention_mode="decode",
            speculative_algorithm="DDTREE",
        ),
    )


def make_layer(window=-1, attn_type=AttentionType.DECODER, xai=-1):
    return SimpleNamespace(
        layer_id=3,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        tp_v_head_num=KV_HEADS,
        qk_head_dim=DIM,
        v_head_dim=DIM,
        scaling=SCALING,
        logit_cap=0.0,
        logit_capping_method="tanh",
        sliding_window_size=window,
        attn_type=attn_type,
        is_cross_attention=False,
        xai_temperature_len=xai,
        k_scale=None,
        v_scale=None,
        k_scale_float=None,
        v_scale_float=None,
    )


def bits_of(trees):
    """int64 [bs, N, 1] of trees of at most 63 nodes."""
    nodes = torch.arange(len(trees[0]))
    return torch.stack([(visible_of(parents) * (1 << nodes)).sum(-1, keepdim=True) for parents in trees]).to(DEVICE)


def dense_mask(trees, lengths):
    """SGLang's full mask, bool, flattened."""
    parts = [
        torch.cat([torch.ones(NODES, n, dtype=torch.bool), visible_of(p)], 1)
        for p, n in zip(trees, lengths, strict=True)
    ]
    return torch.cat([part.flatten() for part in parts]).to(DEVICE)


@pytest.fixture
def world(monkeypatch):
    return World(monkeypatch)


class World:
    """A pool with requests in scattered slots, and the backend under test."""

    def __init__(self, monkeypatch):
        nothing = lambda *args: None  # noqa: E731
        for name in ("hybrid_gdn_config", "kimi_linear_config", "linear_attn_model_spec"):
            monkeypatch.setattr(parent_module, name, nothing)
        monkeypatch.setattr(parent_module, "cuda_graph_fully_disabled", lambda: False)
        monkeypatch.setattr(parent_module, "check_cuda_graph_backend", lambda phase, backend: False)
        self.parallel = SimpleNamespace(attn_dcp_size=1, attn_dcp_rank=0, attn_tp_size=1)
        monkeypatch.setattr(parent_module, "get_parallel", lambda: self.parallel)
        spec = SimpleNamespace(speculative_num_draft_tokens=NODES, speculative_num_steps=1, speculative_eagle_topk=2)
        monkeypatch.setattr(parent_module, "get_spec", lambda: spec)
        self.rng = random.Random(0)
        self.generator = torch.Generator().manual_seed(0)
        self.pool = Pool()
        # What no request owns points at slot 0.
        self.table = torch.zeros((ROWS, CONTEXT + 20), dtype=torch.int32, device=DEVICE)

    def backend(self, cls=TritonTreeMaskAttnBackend, **options):
        return cls(make_runner(self.pool, self.table, **options))

    def requests(self, lengths, sizes=None):
        """Give the first rows fresh slots and contexts; returns out_cache_loc of N new tokens each, or ``sizes``."""
        self.lengths = lengths
        slots = self.rng.sample(range(1, SLOTS), SLOTS - 1)
        self.pool.key[1:], self.pool.value[1:] = math.nan, math.nan
        out_cache_loc, self.prefixes = [], []
        for row, length in enumerate(lengths):
            own = torch.tensor([slots.pop() for _ in range(length + (sizes[row] if sizes else NODES))])
            # Row 0 is where padding points.
            self.table[row + 1, : len(own)] = own.to(self.table)
            out_cache_loc.append(own[length:])
            self.prefixes.append(own[:length].to(DEVICE))
            for buffer in (self.pool.key, self.pool.value):
                buffer[own[:length].to(DEVICE)] = self.draw(length, KV_HEADS, DIM)
        return torch.cat(out_cache_loc).to(DEVICE)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def batch(self, lengths, mode=ForwardMode.TARGET_VERIFY, sizes=None, tail=0, **spec):
        """A forward batch of `lengths`, and new query, keys and values."""
        bs = len(lengths)
        out_cache_loc = torch.nn.functional.pad(self.requests(lengths, sizes), (0, tail))
        total = len(out_cache_loc)
        self.q = self.draw(total, HEADS * DIM)
        self.k, self.v = self.draw(total, KV_HEADS, DIM), self.draw(total, KV_HEADS, DIM)
        defaults = {"draft_token_num": NODES, "custom_mask": None, "positions": None}
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=bs,
            req_pool_indices=torch.arange(1, bs + 1, device=DEVICE),
            seq_lens=torch.tensor(lengths, device=DEVICE),
            seq_lens_sum=sum(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            out_cache_loc=out_cache_loc,
            encoder_lens=None,
            positions=None,
            spec_info=SimpleNamespace(**(defaults | spec)),
        )

    def expected(self, trees, window=-1):
        """Row by row of the reference, from what the pool holds and the round's own keys."""
        out, end = [], 0
        for b, parents in enumerate(trees):
            part, slots = slice(end, end + len(parents)), self.prefixes[b]
            end = part.stop
            key, value = (
                torch.cat([self.pool.key[slots], self.k[part]]),
                torch.cat([self.pool.value[slots], self.v[part]]),
            )
            tensors = (self.q[part].view(-1, HEADS, DIM), key, value, visible_of(parents), depths_of(parents))
            out.append(reference(*(x.cpu() for x in tensors), scaling=SCALING, sliding_window=window))
        return torch.cat(out).flatten(1)


def spy(backend, monkeypatch):
    """Counts of calls that reach the parent's kernel and the tree's."""
    import sglang.srt.layers.attention.triton_tree_backend as module

    calls = {"parent": 0, "tree": 0}
    inner, tree = backend._extend_attention, module.tree_attention

    def count(name, function):
        def call(*args, **options):
            calls[name] += 1
            return function(*args, **options)

        return call

    backend._extend_attention = count("parent", inner)
    monkeypatch.setattr(module, "tree_attention", count("tree", tree))
    return calls


def run_eagerly(world, backend, batch, layer=None, **options):
    backend.init_forward_metadata(batch)
    return backend.forward_extend(world.q, world.k, world.v, layer or make_layer(), batch, **options).cpu()


def on_device(test):
    """Where Triton compiles, a test of kernels needs a GPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


# --- Eager --------------------------------------------------------------------------------------------


@on_device
def test_a_verify_with_bits_honours_its_trees(world, monkeypatch):
    backend = world.backend()
    calls = spy(backend, monkeypatch)
    batch = world.batch(LENGTHS, ancestor_bits=bits_of(TREES))
    actual = run_eagerly(world, backend, batch)
    torch.testing.assert_close(actual, world.expected(TREES), **FLOAT32)
    assert calls == {"parent": 0, "tree": 1}
    # The round is in the cache, where the commit moves it from.
    assert torch.equal(world.pool.key[batch.out_cache_loc], world.k)
    assert torch.equal(world.pool.value[batch.out_cache_loc], world.v)


@on_device
def test_bits_go_before_a_dense_mask(world):
    batch = world.batch(LENGTHS, ancestor_bits=bits_of(TREES))
    batch.spec_info.custom_mask = torch.zeros_like(dense_mask(TREES, LENGTHS))
    torch.testing.assert_close(run_eagerly(world, world.backend(), batch), world.expected(TREES), **FLOAT32)


@on_device
def test_keys_of_another_layer_are_read_from_the_cache(world):
    """Layers that share a cache bring no keys of their own."""
    backend = world.backend()
    batch = world.batch(LENGTHS, ancestor_bits=bits_of(TREES))
    first = run_eagerly(world, backend, batch)
    second = backend.forward_extend(world.q, None, None, make_layer(), batch)
    assert torch.equal(first, second.cpu())


@on_device
@pytest.mark.parametrize("mask", [False, True])
def test_without_bits_the_parent_verifies(mask, world, monkeypatch):
    """Causally, or by SGLang's dense mask."""
    backend = world.backend()
    calls = spy(backend, monkeypatch)
    trees = TREES if mask else [chain(NODES)] * 4
    batch = world.batch(LENGTHS, custom_mask=dense_mask(TREES, LENGTHS) if mask else None)
    # What other backends would see; nothing here.
    batch.spec_info.ancestor_bits = None
    torch.testing.assert_close(run_eagerly(world, backend, batch), world.expected(trees), **FLOAT32)
    assert calls == {"parent": 1, "tree": 0} and not isinstance(backend.forward_metadata, TreeForwardMetadata)


@on_device
def test_other_forwards_are_the_parents(world, monkeypatch):
    """A prefill right after a tree round, with the same backend."""
    backend = world.backend()
    calls = spy(backend, monkeypatch)
    run_eagerly(world, backend, world.batch(LENGTHS, ancestor_bits=bits_of(TREES)))
    batch = world.batch(LENGTHS, ForwardMode.EXTEND)
    batch.extend_prefix_lens, batch.extend_prefix_lens_cpu = batch.seq_lens, LENGTHS
    batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.full_like(batch.seq_lens, NODES), [NODES] * 4
    torch.testing.assert_close(run_eagerly(world, backend, batch), world.expected([chain(NODES)] * 4), **FLOAT32)
    assert calls == {"parent": 1, "tree": 1}


@pytest.fixture
def all_seen(monkeypatch):
    """What the reference sees in a drafter's block, whatever the tree."""
    monkeypatch.setattr(sys.modules[__name__], "visible_of", lambda parents: torch.ones(NODES, NODES, dtype=torch.bool))


BLOCK_LAYER = make_layer(attn_type=AttentionType.ENCODER_ONLY)


@on_device
@pytest.mark.parametrize("for_chains", [False, True])
def test_a_drafters_block(for_chains, world, all_seen, monkeypatch):
    """Bidirectional, without a mask."""
    backend = world.backend(draft=True)
    backend.tree_for_chains = for_chains
    calls = spy(backend, monkeypatch)
    actual = run_eagerly(world, backend, world.batch(LENGTHS), BLOCK_LAYER)
    torch.testing.assert_close(actual, world.expected(TREES), **FLOAT32)
    assert calls == {"parent": 0, "tree": 1}


@on_device
def test_a_drafters_blocks_of_several_widths(world):
    """In turn, as of a drafter without graphs; every token of a block sees all of it."""
    backend = world.backend(draft=True)
    for nodes in (8, 4, 70, 8):
        bits = backend._bits(SimpleNamespace(draft_token_num=nodes), 3)
        assert bits.shape == (3, nodes, -(-nodes // 64))
        seen = [[(int(row[column // 64]) >> (column % 64)) & 1 for column in range(nodes)] for row in bits[2]]
        assert seen == [[1] * nodes] * nodes


@on_device
def test_a_drafters_block_in_fixed_buffers(world, all_seen):
    _, (four, two) = captured(world, 4, 2, bits=False, draft=True)
    for lengths, graph in ((LENGTHS, four), ([5, 64, 90], four), ([200], two)):
        actual = graph.replay(lengths, BLOCK_LAYER)
        real = len(lengths) * NODES
        torch.testing.assert_close(actual[:real], world.expected(TREES[: len(lengths)]), **FLOAT32)
        assert bool(actual.isfinite().all())


@on_device
@pytest.mark.parametrize("layer", [make_layer(), make_layer(20)], ids=["causal", "window"])
def test_a_drafters_other_layers_are_the_parents(layer, world, monkeypatch):
    backend = world.backend(draft=True, window=20)
    calls = spy(backend, monkeypatch)
    actual = run_eagerly(world, backend, world.batch([9, 2]), layer)
    torch.testing.assert_close(actual, world.expected([chain(NODES)] * 2), **FLOAT32)
    assert calls == {"parent": 1, "tree": 0}


@on_device
def test_a_drafter_whose_layers_the_kernel_lacks_is_the_parents(world, monkeypatch):
    backend = world.backend(draft=True, deterministic=True)
    backend.init_forward_metadata(world.batch([9, 2]))
    assert getattr(backend.forward_metadata, "tree", None) is None


@on_device
def test_chains_by_the_tree_kernel(world, monkeypatch):
    backend = world.backend()
    backend.tree_for_chains = True
    calls = spy(backend, monkeypatch)
    actual = run_eagerly(world, backend, world.batch(LENGTHS))
    torch.testing.assert_close(actual, world.expected([chain(NODES)] * 4), **FLOAT32)
    assert calls == {"parent": 0, "tree": 1}
    run_eagerly(world, backend, world.batch(LENGTHS, custom_mask=dense_mask(TREES, LENGTHS)))
    assert calls == {"parent": 1, "tree": 1}


@on_device
@pytest.mark.parametrize("source", ["depths", "positions"])
def test_windows_count_depth(source, world):
    """Layers with and without a window in one model."""
    window = 20
    backend = world.backend(window=window)
    depths = torch.stack([depths_of(parents) for parents in TREES]).to(DEVICE)
    batch = world.batch(LENGTHS, ancestor_bits=bits_of(TREES))
    positions = (batch.seq_lens[:, None] + depths).view(-1)
    setattr(batch.spec_info, source, depths if source == "depths" else positions)
    actual = run_eagerly(world, backend, batch, make_layer(window))
    torch.testing.assert_close(actual, world.expected(TREES, window), **FLOAT32)
    actual = backend.forward_extend(world.q, world.k, world.v, make_layer(), batch).cpu()
    torch.testing.assert_close(actual, world.expected(TREES), **FLOAT32)


def packed_batch(world, trees, lengths, tail):
    """A packed round of trees of any sizes, whose output is full of NaN until written."""
    sizes = [len(parents) for parents in trees]
    layout = dict(
        draft_token_num=max(sizes),
        qo_indptr=torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=DEVICE),
        ancestor_bits=torch.nn.functional.pad(torch.cat([row_bits(p) for p in trees]), (0, 0, 0, tail)).to(DEVICE),
        depths=torch.nn.functional.pad(torch.cat([depths_of(p) for p in trees]), (0, tail)).to(DEVICE),
    )
    batch = world.batch(lengths, sizes=sizes, tail=tail, **layout)
    batch._attn_output = torch.full_like(world.q, math.nan)
    return batch


# Requests of one node and of 64 side by side, the widest also with the longest context.
PACKED = [
    ([random_tree(64, 5), [-1], star(7), chain(5)], LENGTHS),
    ([[-1], chain(64), [-1], binary(9)], LENGTHS),
    ([[-1]] * 4, LENGTHS),
    ([random_tree(20, 7)], [65]),
]


@on_device
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("trees, lengths", PACKED)
def test_a_packed_round(trees, lengths, tail, world, monkeypatch):
    backend = world.backend()
    calls = spy(backend, monkeypatch)
    batch = packed_batch(world, trees, lengths, tail)
    actual, expected = run_eagerly(world, backend, batch), world.expected(trees)
    torch.testing.assert_close(actual[: len(expected)], expected, **FLOAT32)
    assert len(actual) == len(expected) + tail and not actual[len(expected) :].any()
    assert calls == {"parent": 0, "tree": 1}
    # A uniform round after it, with the same backend.
    actual = run_eagerly(world, backend, world.batch(LENGTHS, ancestor_bits=bits_of(TREES)))
    torch.testing.assert_close(actual, world.expected(TREES), **FLOAT32)


@on_device
def test_windows_in_a_packed_round(world):
    window, (trees, lengths) = 20, PACKED[0]
    backend = world.backend(window=window)
    batch = packed_batch(world, trees, lengths, 2)
    for layer, seen in ((make_layer(window), window), (make_layer(), -1)):
        batch._attn_output.fill_(math.nan)
        actual, expected = run_eagerly(world, backend, batch, layer), world.expected(trees, seen)
        torch.testing.assert_close(actual[: len(expected)], expected, **FLOAT32)
        assert not actual[len(expected) :].any()


@on_device
def test_reached_through_the_hybrid_backends(world):
    backend = world.backend()
    hybrid = HybridAttnBackend(make_runner(world.pool, world.table), world.backend(), backend)
    linear = SimpleNamespace(
        init_forward_metadata=lambda batch: None, needs_cpu_seq_lens=False, init_cuda_graph_state=lambda *sizes: None
    )
    for wrapper in (hybrid, HybridLinearAttnBackend(backend, linear, [3])):
        batch = world.batch(LENGTHS, ancestor_bits=bits_of(TREES))
        wrapper.init_forward_metadata(batch)
        actual = wrapper.forward(
            q=world.q, k=world.k, v=world.v, layer=make_layer(), forward_batch=batch, save_kv_cache=True
        )
        torch.testing.assert_close(actual.cpu(), world.expected(TREES), **FLOAT32)
        wrapper.init_cuda_graph_state(4, 4 * NODES)
        assert wrapper.verify_mask is None


# --- Fixed buffers ------------------------------------------------------------------------------------


class Graph:
    """The captured batch of one size: its inputs' addresses and the metadata that its kernels were given."""

    def __init__(self, world, backend, bs, **spec):
        self.world, self.backend, self.bs = world, backend, bs
        self.rows = torch.zeros(bs, dtype=torch.int64, device=DEVICE)
        self.lengths = torch.ones(bs, dtype=torch.int64, device=DEVICE)
        self.slots = torch.zeros(bs * NODES, dtype=torch.int64, device=DEVICE)
        self.q, self.k, self.v = (torch.zeros(bs * NODES, h, DIM, device=DEVICE) for h in (HEADS, KV_HEADS, KV_HEADS))
        self.q = self.q.view(bs * NODES, -1)
        backend.init_forward_metadata_out_graph(self.view(bs, **spec), in_capture=True)
        self.metadata = backend.forward_metadata

    def view(self, real, **spec):
        defaults = {"draft_token_num": NODES, "custom_mask": None, "positions": None}
        return SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=self.bs,
            req_pool_indices=self.rows,
            seq_lens=self.lengths,
            seq_lens_sum=None,
            seq_lens_cpu=None,
            out_cache_loc=self.slots[: real * NODES],
            encoder_lens=None,
            positions=None,
            spec_info=SimpleNamespace(**(defaults | spec)),
        )

    def forward(self, layer=None):
        batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, out_cache_loc=self.slots)
        return self.backend.forward_extend(self.q, self.k, self.v, layer or make_layer(), batch)

    def load(self, lengths, **spec):
        """What SGLang's graph runner does before a replay: pad into the fixed inputs, then plan."""
        world, real = self.world, len(lengths)
        batch = world.batch(lengths, **spec)
        self.rows.zero_()
        self.rows[:real] = batch.req_pool_indices
        self.lengths.fill_(1)
        self.lengths[:real] = batch.seq_lens
        self.slots.zero_()
        self.slots[: real * NODES] = batch.out_cache_loc
        for fixed, new in ((self.q, world.q), (self.k, world.k), (self.v, world.v)):
            fixed.fill_(0.5)
            fixed[: len(new)] = new
        view = self.view(real, **spec)
        view.spec_info.positions = batch.spec_info.positions
        self.backend.init_forward_metadata_out_graph(view)

    def replay(self, lengths, layer=None, **spec):
        """The kernels read what they were captured with, wherever the backend's own attribute points now."""
        self.load(lengths, **spec)
        self.backend.forward_metadata = self.metadata
        return self.forward(layer).cpu()


def captured(world, *sizes, bits=True, **options):
    backend = world.backend(**options)
    backend.init_cuda_graph_state(max(sizes), max(sizes) * NODES)
    spec = {"ancestor_bits": torch.zeros(1, NODES, 1, dtype=torch.int64, device=DEVICE)} if bits else {}
    return backend, [Graph(world, backend, bs, **spec) for bs in sorted(sizes, reverse=True)]


def addresses(metadata):
    tree = metadata.tree
    tensors = [metadata.kv_indptr, metadata.kv_indices, metadata.qo_indptr, tree.ancestor_bits, tree.scratch]
    tensors += [x for plan in (tree.plan, tree.window_plan) if plan is not None for x in (plan.items, plan.requests)]
    return [x.data_ptr() for x in tensors]


@on_device
def test_rounds_of_all_sizes_in_fixed_buffers(world):
    """Full, padded, and full again; what a larger round left in the buffers does not matter."""
    backend, (four, two) = captured(world, 4, 2)
    before = addresses(four.metadata)
    for lengths, trees, graph in (
        (LENGTHS, TREES, four),
        ([5, 64, 90], TREES[1:], four),
        ([200, 3], TREES[2:], two),
        ([65], TREES[3:], two),
        (LENGTHS[::-1], TREES[::-1], four),
    ):
        real = len(lengths) * NODES
        actual = graph.replay(lengths, ancestor_bits=bits_of(trees))
        torch.testing.assert_close(actual[:real], world.expected(trees), **FLOAT32)
        assert bool(actual.isfinite().all())
        # Nobody's context is written by padding.
        assert bool(world.pool.key[1:].isnan().any()) and torch.equal(world.pool.key[graph.slots[:real]], world.k)
    assert addresses(four.metadata) == before
    assert backend.forward_metadata is four.metadata


class PackedGraph(Graph):
    """The captured packed round of ``total`` tokens and at most ``bs`` requests."""

    def __init__(self, world, backend, bs, total):
        super().__init__(world, backend, bs)
        self.slots = torch.zeros(total, dtype=torch.int64, device=DEVICE)
        self.q, self.k, self.v = (torch.zeros(total, h, DIM, device=DEVICE) for h in (HEADS, KV_HEADS, KV_HEADS))
        self.q = self.q.view(total, -1)
        spec = dict(
            draft_token_num=min(64, total),
            qo_indptr=torch.arange(bs + 1, dtype=torch.int32, device=DEVICE),
            ancestor_bits=torch.ones(total, 1, dtype=torch.int64, device=DEVICE),
            depths=torch.zeros(total, dtype=torch.int64, device=DEVICE),
        )
        backend.init_forward_metadata_out_graph(self.view(bs, **spec), in_capture=True)
        self.metadata, self.total = backend.forward_metadata, total

    def replay(self, trees, lengths, layer=None):
        world, real = self.world, len(lengths)
        batch = packed_batch(world, trees, lengths, self.total - sum(map(len, trees)))
        self.rows.zero_()
        self.rows[:real] = batch.req_pool_indices
        self.lengths.fill_(1)
        self.lengths[:real] = batch.seq_lens
        self.slots.zero_()
        self.slots[: len(batch.out_cache_loc)] = batch.out_cache_loc
        for fixed, new in ((self.q, world.q), (self.k, world.k), (self.v, world.v)):
            fixed.fill_(0.5)
            fixed[: len(new)] = new.view(-1, *fixed.shape[1:])
        self.backend.init_forward_metadata_out_graph(self.view(real, **vars(batch.spec_info)))
        self.backend.forward_metadata = self.metadata
        return self.forward(layer).cpu()


@on_device
@pytest.mark.parametrize("window", [None, 20])
def test_packed_rounds_in_fixed_buffers(world, window):
    """Rounds of all shapes in graphs by tokens, whatever a wider or a fuller one left behind."""
    backend = world.backend(window=window)
    backend.init_cuda_graph_state(4, 100)
    wide, narrow = (PackedGraph(world, backend, 4, total) for total in (100, 24))
    layers = [(make_layer(), -1)] + ([(make_layer(window), window)] if window else [])
    for graph, trees, lengths in (
        (wide, *PACKED[0]),
        (narrow, *PACKED[3]),
        (narrow, *PACKED[2]),
        (wide, *PACKED[1]),
        (narrow, [chain(5), star(7)], [64, 90]),
        (wide, *PACKED[3]),
        (wide, *PACKED[0]),
    ):
        for layer, seen in layers:
            actual, expected = graph.replay(trees, lengths, layer), world.expected(trees, seen)
            torch.testing.assert_close(actual[: len(expected)], expected, **FLOAT32)
            assert len(actual) == graph.total and not actual[len(expected) :].any()


@on_device
def test_a_packed_round_without_its_graph(world):
    backend, (graph,) = captured(world, 4)
    packed = packed_batch(world, *PACKED[0], 0).spec_info
    with pytest.raises(RuntimeError, match="no CUDA graph of 4 requests verifies 4 requests and"):
        backend.init_forward_metadata_out_graph(graph.view(4, **vars(packed)))


@on_device
def test_windows_in_fixed_buffers(world):
    window = 20
    _, (graph,) = captured(world, 4, window=window)
    for lengths, trees in ((LENGTHS, TREES), ([64, 90], TREES[2:])):
        depths = torch.stack([depths_of(parents) for parents in trees]).to(DEVICE)
        actual = graph.replay(lengths, make_layer(window), ancestor_bits=bits_of(trees), depths=depths)
        torch.testing.assert_close(actual[: len(lengths) * NODES], world.expected(trees, window), **FLOAT32)
        assert bool(actual.isfinite().all())
        actual = graph.forward().cpu()
        torch.testing.assert_close(actual[: len(lengths) * NODES], world.expected(trees), **FLOAT32)


@on_device
def test_a_graph_with_a_tree_verifies_a_chain(world):
    _, (graph,) = captured(world, 4)
    graph.replay(LENGTHS, ancestor_bits=bits_of(TREES))
    actual = graph.replay([70, 3])
    torch.testing.assert_close(actual[: 2 * NODES], world.expected([chain(NODES)] * 2), **FLOAT32)


@on_device
def test_a_graph_without_a_tree_refuses_one(world):
    """The silent fault: a graph that ignores the mask still writes fluent text."""
    _, (graph,) = captured(world, 2, bits=False)
    actual = graph.replay([70, 3])
    torch.testing.assert_close(actual, world.expected([chain(NODES)] * 2), **FLOAT32)
    with pytest.raises(RuntimeError, match="the CUDA graph of 2 requests was captured without ancestor bits"):
        graph.load([70, 3], ancestor_bits=bits_of(TREES[:2]))


@on_device
def test_a_graph_of_another_width_is_refused(world):
    _, (graph,) = captured(world, 2)
    with pytest.raises(RuntimeError, match=r"ancestor_bits \[1, 9, 1\] do not fit the CUDA graph's 2 requests"):
        graph.load([3], ancestor_bits=torch.zeros(1, 9, 1, dtype=torch.int64, device=DEVICE))


@on_device
def test_a_dense_mask_is_refused_under_a_graph(world):
    backend, (graph,) = captured(world, 2)
    mask = dense_mask(TREES[:2], [70, 3])
    with pytest.raises(ValueError, match="no buffer for a dense custom_mask"):
        graph.load([70, 3], custom_mask=mask)
    actual = graph.replay([70, 3], custom_mask=mask, ancestor_bits=bits_of(TREES[:2]))
    torch.testing.assert_close(actual, world.expected(TREES[:2]), **FLOAT32)


@on_device
def test_no_buffer_grows_with_context_and_nodes(world):
    ours, parents = world.backend(), world.backend(TritonAttnBackend)
    for backend in (ours, parents):
        backend.init_cuda_graph_state(4, 4 * NODES)
    assert parents.verify_mask is not None and ours.verify_mask is None and not ours.is_draft_runner
    assert ours.cuda_graph_kv_indices.numel() == 4 * world.table.shape[1] < parents.cuda_graph_kv_indices.numel()
    drafter = world.backend(draft=True)
    drafter.init_cuda_graph_state(4, 4 * NODES)
    assert drafter.verify_mask is None and drafter.is_draft_runner
    assert drafter.cuda_graph_kv_indices.shape == ours.cuda_graph_kv_indices.shape


# --- Refusals -----------------------------------------------------------------------------------------


@on_device
@pytest.mark.parametrize(
    "options, what",
    [
        ({"arch": AttentionArch.MLA}, r"multi-head latent attention \(MLA\)"),
        ({"deterministic": True}, "--enable-deterministic-inference"),
        ({}, "--dcp-size above 1"),
    ],
)
def test_what_would_bypass_the_tree_is_refused(options, what, world):
    if not options:
        world.parallel.attn_dcp_size = 2
    backend = world.backend(**options)
    with pytest.raises(NotImplementedError, match=f"does not verify trees with {what}"):
        backend.init_forward_metadata(world.batch(LENGTHS, ancestor_bits=bits_of(TREES)))


@on_device
def test_layers_that_the_kernel_does_not_know_are_refused(world):
    backend = world.backend()
    batch = world.batch(LENGTHS, ancestor_bits=bits_of(TREES))
    for layer, options, message in (
        (make_layer(attn_type=AttentionType.ENCODER_ONLY), {}, "not causal"),
        (make_layer(xai=100), {}, "xai_temperature_len"),
        (make_layer(), {"score_mod": lambda *args: None}, "score_mod"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            run_eagerly(world, backend, batch, layer, **options)


if not INTERPRETED:

    @pytest.mark.gpu
    def test_a_cuda_graph_follows_its_rounds(world):
        _, (graph,) = captured(world, 4)
        # Compiles; a capture must not.
        graph.load(LENGTHS, ancestor_bits=bits_of(TREES))
        graph.backend.forward_metadata = graph.metadata
        graph.forward()
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            out = graph.forward()
        for lengths, trees in ((LENGTHS, TREES), ([64, 90], TREES[2:]), (LENGTHS[::-1], TREES[::-1])):
            graph.load(lengths, ancestor_bits=bits_of(trees))
            recorded.replay()
            torch.testing.assert_close(out[: len(lengths) * NODES].cpu(), world.expected(trees), **FLOAT32)
            assert bool(out.isfinite().all())

    def test_the_backend_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
