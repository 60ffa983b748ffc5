"""SGLang's verify kernels of recurrent layers over our trees: every node must start from its parent's state.

Gated delta rule (Qwen3-Next, Qwen3.5, Qwen3.6) and Mamba2 with the short convolution before them, node by node against
a float64 recurrence that follows parents. Run like test_triton_tree_mask.py: interpreted on the CPU, else on a GPU.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from _kernels import DEVICE, INTERPRETED, assert_passes_in_the_interpreter
from _load import load_ddtree_utils

pytest.importorskip("triton")

from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (  # noqa: E402
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update  # noqa: E402
from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update  # noqa: E402

u = load_ddtree_utils()

SLOTS = 5
# Slots of the requests in the state pool, and in the pool of the nodes' states.
STATES, NODE_STATES = [3, 1], [0, 2]
TOLERANCE = dict(rtol=1e-4, atol=1e-5)


def on_device(test):
    """Where Triton compiles, a test of kernels needs a GPU."""
    return test if INTERPRETED else pytest.mark.gpu(test)


if not INTERPRETED:

    def test_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)


def index(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def drafts(seed, budget):
    """Trees of two requests: random best-first ones; with a large budget the second has fewer nodes than room."""
    generator = torch.Generator().manual_seed(seed)
    logprobs, ids = torch.log_softmax(2 * torch.randn(2, 4, 6, generator=generator), -1).topk(3, dim=-1)
    logprobs[1, :, 1:] = -torch.inf if budget > 10 else logprobs[1, :, 1:]
    return u.build_trees(torch.zeros(2, dtype=torch.int64), ids, logprobs, budget)


def chains(nodes):
    """The same links, for a chain."""
    logprobs = torch.zeros(2, nodes - 1, 1)
    return u.build_trees(torch.zeros(2, dtype=torch.int64), logprobs.long(), logprobs, nodes - 1)


def roots():
    """The same of a round that drafts nothing."""
    none = torch.full((2, 1), -1, dtype=torch.int64)
    return SimpleNamespace(parents=none, first_child=none, next_sibling=none, num_nodes=torch.ones(2))


TREES = [drafts(0, 9), drafts(1, 9), drafts(2, 16), chains(5)]
NAMES = ["9 nodes", "9 others", "fewer than 16", "chain"]
# With whether a state that is handed from node to node would be wrong.
CASES = list(zip(TREES, [True, True, True, False], strict=True))
# With nodes that the pool of their states has room for beyond those of the round, as uniform rounds under auto have.
ROOMY = [(*case, 0) for case in CASES] + [(TREES[0], True, 7), (roots(), False, 15)]
ROOMY_NAMES = [*NAMES, "9 nodes of 16", "root of 16"]


def real_nodes(tree):
    """(request, node, parent) in order; a root's parent is None."""
    for b in range(len(tree.parents)):
        for node in range(int(tree.num_nodes[b])):
            yield b, node, int(tree.parents[b, node]) if node else None


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def largest(x):
    """The largest absolute value; a NaN, which no comparison would notice, fails."""
    assert bool(x.isfinite().all())
    return float(x.abs().max())


def on(x):
    return x.to(DEVICE, torch.float32)


def conv(tree, x, state, weight, bias, spare):
    """SGLang's kernel; returns outputs [2, N, dim], the window behind every node, and the parents it found."""
    bs, n, dim = x.shape
    windows = torch.full((SLOTS, n + spare, dim, weight.shape[1] - 1), torch.nan, device=DEVICE)
    parents = torch.full((bs, n), -7, dtype=torch.int64, device=DEVICE)
    out = causal_conv1d_update(
        on(x).transpose(1, 2),
        on(state),
        on(weight),
        on(bias),
        "silu",
        conv_state_indices=index(STATES),
        intermediate_conv_window=windows,
        intermediate_state_indices=index(NODE_STATES),
        retrieve_next_token=tree.first_child.to(DEVICE),
        retrieve_next_sibling=tree.next_sibling.to(DEVICE),
        retrieve_parent_token=parents,
    )
    return out.transpose(1, 2).cpu(), windows.cpu(), parents


@on_device
@pytest.mark.parametrize("tree, forks, spare", ROOMY, ids=ROOMY_NAMES)
def test_convolution(tree, forks, spare):
    """Its window holds a node's ancestors, and it tells the recurrence who the parents are."""
    n, dim, width = tree.parents.shape[1], 20, 4
    x, state, weight, bias = draw(2, n, dim), draw(SLOTS, dim, width - 1), draw(dim, width), draw(dim)
    out, windows, parents = conv(tree, x, state, weight, bias, spare)
    expected, sequential = {}, dict(enumerate(state[STATES]))
    differs = False
    for b, node, parent in real_nodes(tree):
        before = state[STATES[b]] if parent is None else expected[b, parent]
        full = torch.cat([before, x[b, node, :, None]], 1)
        expected[b, node] = full[:, 1:]
        value = torch.nn.functional.silu((full * weight).sum(1) + bias)
        torch.testing.assert_close(out[b, node].double(), value, **TOLERANCE)
        torch.testing.assert_close(windows[NODE_STATES[b], node].double(), full[:, 1:], **TOLERANCE)
        assert parent is None or int(parents[b, node]) == parent
        sequential[b] = torch.cat([sequential[b][:, 1:], x[b, node, :, None]], 1)
        differs |= bool((sequential[b] - full[:, 1:]).abs().max() > 0.1)
    assert differs == forks, "the trees must show a state that was forked wrongly"


@on_device
@pytest.mark.parametrize("follow", [True, False], ids=["parents", "one after the other"])
@pytest.mark.parametrize("tree, forks, spare", ROOMY, ids=ROOMY_NAMES)
def test_gated_delta_rule(tree, forks, spare, follow):
    """Without the parents it runs from node to node, which only a chain survives."""
    n, heads, v_heads, k_dim, v_dim = tree.parents.shape[1], 1, 2, 16, 8
    q, k, v = draw(2, n, heads, k_dim), draw(2, n, heads, k_dim, seed=1), draw(2, n, v_heads, v_dim, seed=2)
    a, b = draw(2, n, v_heads, seed=3), draw(2, n, v_heads, seed=4)
    decay, dt_bias, state = draw(v_heads, seed=5), draw(v_heads, seed=6), draw(SLOTS, v_heads, v_dim, k_dim, seed=7)
    node_states = torch.full((SLOTS, n + spare, v_heads, v_dim, k_dim), torch.nan, device=DEVICE)
    pool = on(state)
    out = fused_sigmoid_gating_delta_rule_update(
        A_log=on(decay),
        a=on(a).view(2 * n, v_heads),
        dt_bias=on(dt_bias),
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=on(q).view(1, 2 * n, heads, k_dim),
        k=on(k).view(1, 2 * n, heads, k_dim),
        v=on(v).view(1, 2 * n, v_heads, v_dim),
        b=on(b).view(2 * n, v_heads),
        initial_state_source=pool,
        initial_state_indices=index(STATES),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=index([0, n, 2 * n]),
        disable_state_update=True,
        intermediate_states_buffer=node_states,
        intermediate_state_indices=index(NODE_STATES),
        cache_steps=n,
        retrieve_parent_token=tree.parents.to(DEVICE) if follow else None,
    )
    out = out.view(2, n, v_heads, v_dim).cpu().double()
    norm = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    worst, states = 0.0, {}
    for request, node, parent in real_nodes(tree):
        before = state[STATES[request]] if parent is None else states[request, parent]
        gate = -decay.exp() * torch.nn.functional.softplus(a[request, node] + dt_bias)
        h = before * gate.exp()[:, None, None]
        key, query = norm(k[request, node]), norm(q[request, node]) * k_dim**-0.5
        got = node_states[NODE_STATES[request], node].cpu().double()
        delta = (v[request, node] - (h * key[:, None]).sum(-1)) * b[request, node].sigmoid()[:, None]
        states[request, node] = h = h + delta[:, :, None] * key[:, None]
        off = torch.cat([(got - h).flatten(), (out[request, node] - (h * query[:, None]).sum(-1)).flatten()])
        worst = max(worst, largest(off))
    assert (worst < 1e-4) if follow or not forks else (worst > 0.1), worst
    assert torch.equal(pool, on(state)), "verify must not write the committed state"


def mamba2_error(tree, follow, monkeypatch, spare=0):
    """The largest error of outputs and nodes' states."""
    if INTERPRETED:
        monkeypatch.setattr(torch.cpu, "device", lambda i: contextlib.nullcontext(), raising=False)
    n, heads, dim, d_state = tree.parents.shape[1], 2, 8, 16
    x, dt, b, c = (
        draw(2, n, heads, dim),
        draw(2, n, heads, seed=1),
        draw(2, n, 1, d_state, seed=2),
        draw(2, n, 1, d_state),
    )
    decay, dt_bias, skip = -draw(heads, seed=3).exp(), draw(heads, seed=4), draw(heads, seed=5)
    state = draw(SLOTS, heads, dim, d_state, seed=6)
    node_states = torch.full((SLOTS, n + spare, heads, dim, d_state), torch.nan, device=DEVICE)
    pool, out = on(state), torch.full((2, n, heads, dim), torch.nan, device=DEVICE)
    selective_state_update(
        pool,
        on(x),
        on(dt)[..., None].expand(-1, -1, -1, dim),
        on(decay)[:, None, None].expand(-1, dim, d_state),
        on(b),
        on(c),
        on(skip)[:, None].expand(-1, dim),
        z=None,
        dt_bias=on(dt_bias)[:, None].expand(-1, dim),
        dt_softplus=True,
        state_batch_indices=index(STATES),
        out=out,
        disable_state_update=True,
        intermediate_states_buffer=node_states,
        cache_steps=n,
        retrieve_parent_token=tree.parents.to(DEVICE) if follow else None,
        intermediate_state_indices=index(NODE_STATES),
    )
    worst, states = 0.0, {}
    for request, node, parent in real_nodes(tree):
        before = state[STATES[request]] if parent is None else states[request, parent]
        step = torch.nn.functional.softplus(dt[request, node] + dt_bias)[:, None, None]
        h = before * (decay[:, None, None] * step).exp()
        h = h + step * x[request, node][:, :, None] * b[request, node][:, None]
        states[request, node] = h
        y = (h * c[request, node][:, None]).sum(-1) + skip[:, None] * x[request, node]
        got = node_states[NODE_STATES[request], node].cpu().double()
        off = torch.cat([(got - h).flatten(), (out[request, node].cpu().double() - y).flatten()])
        worst = max(worst, float(off.abs().nan_to_num(torch.inf).max()))
    assert torch.equal(pool, on(state)), "verify must not write the committed state"
    return worst


@on_device
@pytest.mark.parametrize("follow", [True, False], ids=["parents", "one after the other"])
@pytest.mark.parametrize("tree, forks", CASES, ids=NAMES)
def test_mamba2(tree, forks, follow, monkeypatch):
    worst = mamba2_error(tree, follow, monkeypatch)
    assert (worst < 1e-4) if follow or not forks else (0.1 < worst < torch.inf), worst


@on_device
def test_mamba2_has_states_elsewhere_if_a_round_is_narrower_than_the_pool(monkeypatch):
    """Which is why the budget auto is refused there."""
    assert mamba2_error(TREES[0], True, monkeypatch, spare=7) > 0.1
