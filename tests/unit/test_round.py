"""Pieces of the worker that only a GPU server would reach otherwise, against stand-ins."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang_ddtree import overlay  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig  # noqa: E402

overlay.lay()

from sglang.srt.layers.attention.triton_tree_backend import (  # noqa: E402
    TritonTreeMaskAttnBackend,
    reads_ancestor_bits,
)
from sglang.srt.speculative import ddtree_graph_runner  # noqa: E402
from sglang.srt.speculative.ddtree_graph_runner import DDTreeVerifyGraphRunner  # noqa: E402
from sglang.srt.speculative.ddtree_round import TorchRound  # noqa: E402
from sglang.srt.speculative.ddtree_worker import DDTreeWorker  # noqa: E402


def make_round():
    """Two requests with trees of five nodes: a path 0, 2, 4 and a path of the root alone."""
    ids = torch.tensor([[[5, 6], [7, 8]], [[5, 6], [7, 8]]])
    logprobs = torch.log(torch.tensor([[[0.6, 0.4], [0.7, 0.3]]])).expand(2, 2, 2)
    steps = TorchRound()
    seq_lens = torch.tensor([10, 20])
    tree = steps.build(torch.tensor([1, 2]), ids, logprobs, 4, seq_lens)
    assert tree.tree.tokens[0].tolist() == [1, 5, 7, 6, 7]
    choices = torch.tensor([[6, 0, 0, 7, 9], [3, 0, 0, 0, 0]])
    slots = torch.tensor([[100, 101, 102, 103, 104], [200, 201, 202, 203, 204]])
    walk, plan = steps.commit(tree, choices, 2, seq_lens, slots)
    assert walk.accept_index.tolist() == [[0, 3, 4], [0, -1, -1]]
    return slots, walk, plan


@pytest.mark.parametrize("shadow", [False, True])
def test_a_commit_moves_within_the_rounds_own_slots(shadow: bool) -> None:
    """Never through ``req_to_token``, whose rows the overlap scheduler may be rewriting: here there is none."""
    slots, walk, plan = make_round()
    moved, fed, published = [], [], []
    kv_cache = SimpleNamespace(move_kv_cache=lambda to, source: moved.append((to.tolist(), source.tolist())))
    worker = SimpleNamespace(
        _need_mamba_verify_commit=False,
        config=SimpleNamespace(shadow_linear=shadow),
        model_runner=SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kv_cache)),
        _feed_drafter=lambda hidden, plan: fed.append(hidden),
        _move_kv=lambda plan: DDTreeWorker._move_kv(worker, plan),
        _movable_pool=None,
    )
    logits_output = SimpleNamespace(hidden_states=torch.arange(10.0)[:, None])
    batch = SimpleNamespace(out_cache_loc=slots.view(-1))
    DDTreeWorker._commit(worker, batch, logits_output, walk, plan, published.append)
    # Behind the accepted nodes a slot moves onto itself.
    assert moved == ([] if shadow else [([100, 101, 102, 200, 201, 202], [100, 103, 104, 200, 201, 202])])
    assert fed[0][:, 0].tolist() == [0, 3, 4, 5, 6, 7]
    assert logits_output.hidden_states is None
    assert published[0].tolist() == [13, 21] and plan.accept_lens.tolist() == [3, 1]
    assert plan.next_tokens.tolist() == [[6, 7, 9, 0, 0], [3, 0, 0, 0, 0]]
    assert plan.positions.tolist() == [[10, 11, 12], [20, 21, 22]]


def test_the_hosts_bound_of_the_lengths() -> None:
    """Committed lengths if the scheduler copied them, else what was reserved."""
    reserved, known = torch.tensor([64, 80]), torch.tensor([10, 20])
    batch = SimpleNamespace(seq_lens_cpu=known, spec_info=SimpleNamespace(reserved_seq_lens_cpu=reserved))
    assert DDTreeWorker._host_bound(None, batch) is known
    batch.seq_lens_cpu = None
    assert DDTreeWorker._host_bound(None, batch) is reserved


def capture(monkeypatch: pytest.MonkeyPatch, shadow: bool, bits: bool):
    monkeypatch.setattr(ddtree_graph_runner, "reads_ancestor_bits", lambda backend: bits)
    config = DDTreeConfig(budget=70, block_size=8, shadow_linear=shadow)
    runner = object.__new__(DDTreeVerifyGraphRunner)
    runner.model_runner = SimpleNamespace(server_args=SimpleNamespace(_ddtree_config=config))
    runner.buffers = SimpleNamespace(custom_mask=torch.ones(3, dtype=torch.bool))
    runner.attn_backend, runner.device, runner.captured_req_width = None, "cpu", config.verify_width
    return runner.get_spec_info(71 * 2), runner.buffers.custom_mask


@pytest.mark.parametrize("bits", [False, True])
def test_graphs_are_captured_with_a_tree(monkeypatch: pytest.MonkeyPatch, bits: bool) -> None:
    """SGLang captures DFLASH's verify without a mask: a tree would then be verified causally, and silently."""
    info, mask = capture(monkeypatch, False, bits)
    assert info.draft_token_num == info.num_tokens_per_req == 71
    assert info.topk == 2
    assert info.custom_mask is (None if bits else mask)
    assert info.ancestor_bits.shape == (1, 71, 2)


@pytest.mark.parametrize("bits", [False, True])
def test_a_chain_is_captured_without_a_mask(monkeypatch: pytest.MonkeyPatch, bits: bool) -> None:
    info, _ = capture(monkeypatch, True, bits)
    assert info.draft_token_num == 8 and info.topk == 1
    assert info.custom_mask is None and info.ancestor_bits is None


def test_which_backends_need_no_mask() -> None:
    tree = object.__new__(TritonTreeMaskAttnBackend)
    other = SimpleNamespace()
    for prefill, decode, expected in ((tree, tree, True), (tree, other, False), (other, tree, False)):
        assert reads_ancestor_bits(SimpleNamespace(prefill_backend=prefill, decode_backend=decode)) is expected
    assert reads_ancestor_bits(SimpleNamespace(full_attn_backend=tree, linear_attn_backend=other))
    assert reads_ancestor_bits(tree) and not reads_ancestor_bits(other)
