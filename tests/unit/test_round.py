"""Pieces of the worker that only a GPU server would reach otherwise, against stand-ins."""

import math
from contextlib import contextmanager
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
from sglang.srt.speculative import ddtree_graph_runner, ddtree_simulation  # noqa: E402
from sglang.srt.speculative.ddtree_graph_runner import DDTreeVerifyGraphRunner  # noqa: E402
from sglang.srt.speculative.ddtree_round import (  # noqa: E402
    TorchRound,
    Uniform,
    node_worth,
    root_trees,
)
from sglang.srt.speculative.ddtree_worker import DDTreeWorker  # noqa: E402
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2  # noqa: E402

SEQ_LENS = torch.tensor([10, 20])


def make_trees():
    """Two requests with trees of five nodes: tokens 5, then 7, and 6, then 7; the first path is likelier."""
    ids = torch.tensor([[[5, 6], [7, 8]], [[5, 6], [7, 8]]])
    logprobs = torch.log(torch.tensor([[[0.6, 0.4], [0.7, 0.3]]])).expand(2, 2, 2)
    steps = TorchRound()
    tree = steps.build(torch.tensor([1, 2]), ids, logprobs, 4, SEQ_LENS)
    assert tree.tree.tokens[0].tolist() == [1, 5, 7, 6, 7]
    return steps, tree


def make_round():
    """A path 0, 3, 4 and a path of the root alone."""
    steps, tree = make_trees()
    seq_lens = SEQ_LENS
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


def make_packed(total: int):
    """Of the two trees' best nodes so many; node j of a request has the slot 100 + j or 200 + j."""
    steps, tree = make_trees()
    table = torch.zeros((3, 30), dtype=torch.int32)
    table[1, 10:15] = torch.arange(100, 105)
    table[2, 20:25] = torch.arange(200, 205)
    return steps, steps.pack(tree, total, SEQ_LENS, torch.tensor([1, 2]), table)


def test_a_packed_round() -> None:
    """Four nodes of the first request and three of the second, of trees of five; a tail follows."""
    steps, packed = make_packed(7)
    nodes = packed.nodes
    assert packed.share.qo_indptr.tolist() == [0, 4, 7]
    assert nodes.tokens.tolist() == [1, 5, 7, 6, 2, 5, 7]
    assert nodes.positions.tolist() == [10, 11, 12, 11, 20, 21, 22]
    assert nodes.slots.tolist() == [100, 101, 102, 103, 200, 201, 202]
    assert nodes.ancestor_bits[:, 0].tolist() == [0b1, 0b11, 0b111, 0b1001, 0b1, 0b11, 0b111]
    assert packed.row_owners().tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert packed.dense_rows().tolist() == [0, 1, 2, 3, 5, 6, 7]
    cut = packed.cut()
    assert cut.num_nodes.tolist() == [4, 3]
    # The first request's last node is gone as a child, the second's also as a sibling.
    assert cut.first_child.tolist() == [[1, 2, -1, -1, -1], [1, 2, -1, -1, -1]]
    assert cut.next_sibling.tolist() == [[-1, 3, -1, -1, -1], [-1, -1, -1, -1, -1]]
    # The first walk ends where the unverified node would follow, which would have had the token.
    walk = steps.commit_packed(packed, torch.tensor([6, 0, 0, 7, 5, 7, 9]), 2, SEQ_LENS)
    assert walk.accept_index.tolist() == [[0, 3, -1], [0, 1, 2]]
    assert walk.next_tokens.tolist() == [[6, 7, 0], [5, 7, 9]] and walk.bonus.tolist() == [7, 9]
    # Accepted drafts, nodes, depth, whether the path left the chain.
    assert steps.stats(cut, walk).tolist() == [[1, 4, 2, 1], [2, 3, 2, 0]]


def test_the_tail_of_a_packed_round() -> None:
    """More tokens than there are nodes: it counts as the first request's root wherever a row is looked up."""
    _, packed = make_packed(13)
    assert packed.share.qo_indptr.tolist() == [0, 5, 10] and packed.nodes.slots[10:].tolist() == [0, 0, 0]
    assert packed.row_owners()[10:].tolist() == packed.dense_rows()[10:].tolist() == [0, 0, 0]


def test_a_packed_commit() -> None:
    steps, packed = make_packed(7)
    walk = steps.commit_packed(packed, torch.tensor([6, 0, 0, 7, 5, 7, 9]), 2, SEQ_LENS)
    moved, fed, published = [], [], []
    worker = SimpleNamespace(
        _need_mamba_verify_commit=False,
        config=SimpleNamespace(shadow_linear=False),
        _feed_drafter=lambda hidden, plan: fed.append(hidden),
        _move_kv=lambda plan: moved.append((plan.kv_to.tolist(), plan.kv_from.tolist())),
    )
    logits_output = SimpleNamespace(hidden_states=torch.arange(7.0)[:, None])
    DDTreeWorker._commit(worker, SimpleNamespace(), logits_output, walk, walk, published.append)
    assert moved == [([[100, 101, 102], [200, 201, 202]], [[100, 103, 102], [200, 201, 202]])]
    assert fed[0][:, 0].tolist() == [0, 3, 2, 4, 5, 6]
    assert published[0].tolist() == [12, 23]


def test_a_plain_round() -> None:
    """The roots alone, without a draft: one token each, whose keys and hidden state lie where they belong."""
    steps, tree = TorchRound(), root_trees(torch.tensor([1, 2]), SEQ_LENS)
    table = torch.arange(90, dtype=torch.int32).view(3, 30)
    packed = steps.pack(tree, 2, SEQ_LENS, torch.tensor([1, 2]), table)
    assert packed.nodes.tokens.tolist() == [1, 2] and packed.nodes.positions.tolist() == [10, 20]
    assert packed.nodes.slots.tolist() == [40, 80] and packed.nodes.ancestor_bits.tolist() == [[1], [1]]
    walk = steps.commit_packed(packed, torch.tensor([5, 6]), 0, SEQ_LENS)
    assert walk.next_tokens.tolist() == [[5], [6]] and walk.new_seq_lens.tolist() == [11, 21]
    assert walk.kv_to.tolist() == walk.kv_from.tolist() == [[40], [80]] and walk.rows.tolist() == [[0], [1]]
    assert steps.stats(packed.cut(), walk).tolist() == [[0, 1, 0, 0]] * 2


def test_a_forced_length_in_a_packed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The front nodes, as far as a request has them."""
    monkeypatch.setattr(ddtree_simulation, "_sample_simulated_acc_len", lambda *args: 3)
    steps, packed = make_packed(5)
    assert packed.share.qo_lens.tolist() == [3, 2]
    choices, walk = ddtree_simulation.simulate_packed(steps, packed, 2, SEQ_LENS)
    assert choices.tolist() == [ddtree_simulation.FIXED_TOKEN] * 5
    assert walk.accept_index.tolist() == [[0, 1, 2], [0, 1, -1]] and walk.accept_lens.tolist() == [3, 2]


@pytest.mark.parametrize(
    "config, recurrent, message",
    [
        (DDTreeConfig(budget=64, block_size=8), False, "budget=64"),
        (DDTreeConfig(budget=7, block_size=8, shadow_linear=True), False, "shadow_linear=True"),
        (DDTreeConfig(budget=7, block_size=8), True, "recurrent states"),
        (DDTreeConfig(budget=7, block_size=8), False, "SimpleNamespace knows no packed rounds"),
    ],
)
def test_what_has_no_packed_rounds(config: DDTreeConfig, recurrent: bool, message: str) -> None:
    runner = SimpleNamespace(attn_backend=SimpleNamespace())
    worker = SimpleNamespace(config=config, _need_mamba_verify_commit=recurrent, model_runner=runner, device="cuda")
    with pytest.raises(AssertionError, match=message):
        DDTreeWorker._assert_packable(worker)


@pytest.mark.parametrize("commits", [False, True])
def test_verify_graphs_choose_only_where_a_commit_reads_it(monkeypatch: pytest.MonkeyPatch, commits: bool) -> None:
    monkeypatch.setattr(DFlashWorkerV2, "init_attention_backends", lambda self: None)
    monkeypatch.setattr(DDTreeWorker, "_commits_on_device", lambda self: commits)
    worker, hooks = object.__new__(DDTreeWorker), []
    runner = SimpleNamespace(capture_tail_hooks=hooks)
    monkeypatch.setattr(DDTreeWorker, "target_worker", SimpleNamespace(model_runner=runner))
    worker._verify_tail = object()
    worker.init_attention_backends()
    assert hooks == ([worker._verify_tail] if commits else [])


@pytest.mark.parametrize("sampled", [False, True])
def test_a_replayed_commit_reads_the_choices_that_were_made(sampled: bool) -> None:
    likeliest = torch.arange(6).view(2, 3)
    choices = likeliest + 10 if sampled else likeliest
    expected, read, published = choices.clone(), [], []
    done = SimpleNamespace(new_seq_lens=torch.tensor([4, 5]))

    def replay() -> SimpleNamespace:
        read.append(likeliest.clone())
        return done

    logits_output = SimpleNamespace(hidden_states=torch.ones(6, 2))
    batch = SimpleNamespace(return_logprob=False)
    got = DDTreeWorker._commit_in_graph(None, batch, logits_output, choices, likeliest, replay, published.append)
    assert got is done and torch.equal(read[0], expected)
    assert published == [done.new_seq_lens] and logits_output.hidden_states is None


def packed_runner(auto: bool) -> DDTreeVerifyGraphRunner:
    runner = object.__new__(DDTreeVerifyGraphRunner)
    config = DDTreeConfig(budget=63, block_size=8, auto=auto)
    runner.model_runner = SimpleNamespace(server_args=SimpleNamespace(_ddtree_config=config))
    runner.capture_bs, runner.captured_req_width, runner.max_bs = [1, 2, 4], 16, 4
    return runner


def test_packed_graphs_are_keyed_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = packed_runner(True)
    monkeypatch.setattr(ddtree_graph_runner, "get_cuda_graph_batch_size_alignment", lambda server_args: 4)
    # Where tensor parallelism deals tokens out, in multiples of its size.
    assert set(runner._build_ragged_verify_token_buckets()) >= {4, 8, 64}
    assert all(total % 4 == 0 for total in runner._build_ragged_verify_token_buckets())
    monkeypatch.setattr(ddtree_graph_runner, "get_cuda_graph_batch_size_alignment", lambda server_args: 1)
    assert runner.ragged_verify_mode
    runner.capture_num_tokens = totals = runner._build_ragged_verify_token_buckets()
    # One request's roots up to what SGLang sized its buffers for.
    assert totals[0] == 1 and max(totals) == 64 and 4 in totals
    assert [runner._ragged_capture_slots(total) for total in (1, 3, 4, 64)] == [1, 3, 4, 4]
    assert runner.holds(4, 4) and runner.holds(64, 1)
    # Another total, more requests than tokens, more requests than any graph.
    assert not runner.holds(63, 4) and not runner.holds(2, 3) and not runner.holds(64, 5)
    assert not packed_runner(False).ragged_verify_mode and not packed_runner(False).holds(4, 4)


def test_what_packed_graphs_cannot_run() -> None:
    """A packed round of a total that was not captured, and a uniform one."""
    runner = packed_runner(True)
    runner.capture_num_tokens = [4, 64]
    packed = SimpleNamespace(qo_indptr=torch.tensor([0, 5]), draft_token=torch.zeros(5))
    assert runner.can_run_graph(SimpleNamespace(spec_info=packed, batch_size=1)) is False
    assert runner.can_run_graph(SimpleNamespace(spec_info=SimpleNamespace(), batch_size=1)) is False


def test_what_packed_graphs_are_captured_with() -> None:
    runner = packed_runner(True)
    runner.device = "cpu"
    info = runner.get_spec_info(8)
    assert info.qo_indptr.tolist() == [0, 1, 2, 3, 4] and info.ancestor_bits.shape == (8, 1)
    assert info.depths.shape == (8,) and info.draft_token_num == 8 and info.custom_mask is None
    assert info.ragged_verify_layout.graph_num_tokens == 8


def test_the_hosts_bound_of_the_lengths() -> None:
    """Committed lengths if the scheduler copied them, else what was reserved."""
    reserved, known = torch.tensor([64, 80]), torch.tensor([10, 20])
    batch = SimpleNamespace(seq_lens_cpu=known, spec_info=SimpleNamespace(reserved_seq_lens_cpu=reserved))
    assert DDTreeWorker._host_bound(None, batch) is known
    batch.seq_lens_cpu = None
    assert DDTreeWorker._host_bound(None, batch) is reserved


def test_how_long_contexts_are_roughly():
    reserved = SimpleNamespace(reserved_seq_lens_sum=1000)
    batch = SimpleNamespace(seq_lens=torch.zeros(3), seq_lens_cpu=torch.tensor([100, 200, 7]), spec_info=reserved)
    worker = SimpleNamespace(config=DDTreeConfig(budget=15, block_size=8))
    assert DDTreeWorker._context_tokens(worker, batch) == 307
    # Not known: two rounds of 16 slots are reserved ahead for each, in whole pages.
    batch.seq_lens_cpu = None
    assert DDTreeWorker._context_tokens(worker, batch) == 1000 - 3 * 32
    reserved.reserved_seq_lens_sum = 90
    assert DDTreeWorker._context_tokens(worker, batch) == 3


def test_a_round_is_decided_by_load_and_context(monkeypatch):
    told = []

    def begin_round(requests, context_tokens, classes):
        told.append((requests, context_tokens(), dict(classes())))
        return SimpleNamespace(plain=False, tokens=16)

    req = SimpleNamespace(sampling_params=SimpleNamespace(top_k=1, temperature=1.0))
    batch = SimpleNamespace(seq_lens=torch.zeros(2), seq_lens_cpu=torch.tensor([100, 7]), reqs=[req, req])
    worker = object.__new__(DDTreeWorker)
    worker._auto = SimpleNamespace(begin_round=begin_round)
    worker.config = DDTreeConfig(budget=15, block_size=8, auto=True)
    assert worker._shape_of_round(batch) == 16 and told == [(2, 107, {"greedy": 2})]


def test_a_round_of_a_hybrid_target_is_uniform() -> None:
    batch = SimpleNamespace(seq_lens=torch.zeros(2), reqs=[])
    worker = object.__new__(DDTreeWorker)
    worker.config = DDTreeConfig(budget=15, block_size=8, auto=True, uniform=True)
    for plain, nodes in ((False, 8), (True, 1)):
        decided = SimpleNamespace(plain=plain, tokens=2 * nodes, nodes=nodes)
        worker._auto = SimpleNamespace(begin_round=lambda *args, decided=decided: decided)
        assert worker._shape_of_round(batch) == Uniform(nodes)


@pytest.mark.parametrize("nodes", [1, 4, 16])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_uniform_round_builds_verifies_and_tells(nodes: int, fresh: bool) -> None:
    """A tree of the nodes that are verified, in the target's backend of that width; what it tells is of all nodes."""
    bs, config = 3, DDTreeConfig(budget=15, block_size=8, topk_cap=4, auto=True, uniform=True)
    logprobs = torch.rand(bs, 7, 4).neg().sort(-1, descending=True).values
    ids = torch.arange(4).repeat(bs, 7, 1)
    batch = SimpleNamespace(seq_lens=torch.tensor([5, 6, 7]))
    verified, entered = [], []

    @contextmanager
    def in_place():
        entered.append(nodes)
        yield
        entered.append("left")

    def verify(batch, tree, shadow, on_publish, grammar_barrier, told):
        verified.append((tree, told, list(entered)))

    worker = object.__new__(DDTreeWorker)
    worker.config, worker._round = config, TorchRound()
    worker._auto_round = SimpleNamespace(fresh=fresh, draft_width=8)
    worker._uniform = {width: SimpleNamespace(in_place=in_place) for width in (1, 4)}
    worker._draft = lambda batch, bonus, width: (ids, logprobs)
    worker._verify = verify
    worker._verify_uniform(batch, torch.tensor([7, 8, 9]), nodes, None, None)
    ((tree, told, before),) = verified
    assert tree.tree.tokens.shape == (bs, nodes) and tree.tree.tokens[:, 0].tolist() == [7, 8, 9]
    # The widest trees are the model runner's own.
    assert before == ([] if nodes == 16 else [nodes]) and entered == ([] if nodes == 16 else [nodes, "left"])
    if nodes == 1 or not fresh:
        assert told is None
        return
    whole = TorchRound().build(torch.tensor([7, 8, 9]), ids, logprobs, 15, batch.seq_lens).tree
    assert torch.equal(whole.tokens[:, :nodes], tree.tree.tokens)
    assert torch.allclose(told["worth"], whole.scores[:, 1:].exp().sum(0))
    assert torch.allclose(told["expected"], whole.scores[:, 1:nodes].exp().sum(1))


def test_places_without_a_node_are_worth_nothing() -> None:
    ids, logprobs = torch.zeros((1, 2, 1), dtype=torch.int64), torch.full((1, 2, 1), -1.0)
    tree = TorchRound().build(torch.tensor([7]), ids, logprobs, 5, torch.tensor([3])).tree
    worth, expected = node_worth(tree, 6)
    one, two = math.exp(-1), math.exp(-2)
    assert worth.tolist() == pytest.approx([one, two, 0, 0, 0]) and expected.tolist() == pytest.approx([one + two])


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


def test_graphs_of_another_width_are_captured_as_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddtree_graph_runner, "reads_ancestor_bits", lambda backend: True)
    config = DDTreeConfig(budget=15, block_size=8, auto=True, uniform=True)
    runner = object.__new__(DDTreeVerifyGraphRunner)
    runner.model_runner = SimpleNamespace(server_args=SimpleNamespace(_ddtree_config=config))
    runner.attn_backend, runner.device, runner.captured_req_width = None, "cpu", 4
    assert not runner.ragged_verify_mode
    info = runner.get_spec_info(4 * 2)
    assert info.draft_token_num == info.num_tokens_per_req == 4 and info.ancestor_bits.shape == (1, 4, 1)


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
