"""A round's numbers against a slow reference: trees of the heap, walks by plain loops."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.plugins import load_plugins
from torch._subclasses.fake_tensor import FakeTensorMode

load_plugins()

from sglang_ddtree import hybrid, metrics, overlay, requirements  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig  # noqa: E402
from sglang_ddtree.round_stats import (  # noqa: E402
    SHADOW_COLUMNS,
    TREE_COLUMNS,
    complete_meta_info,
    layout_of,
    row_of,
    summary,
)

overlay.lay()

from sglang.srt.speculative.ddtree_stats import shadow_stats, tree_stats  # noqa: E402
from sglang.srt.speculative.ddtree_utils import build_tree_heap, build_trees, walk_trees  # noqa: E402

VOCABULARY = 12


def rows_of(numbers, **config):
    """The rows of a round as the scheduler makes them of the device's numbers."""
    assert numbers.dtype == torch.int64 and numbers.shape[1] == 4
    return [row_of(DDTreeConfig(**config), row) for row in numbers.tolist()]


many = settings(max_examples=150, deadline=None)


def draw(seed, bs, levels, topk, kind):
    """Distinct ids and log-probabilities, best first, [bs, levels, topk]; the target's choice of a path, [bs, levels].

    Few values of a log-probability make ties; a target that follows rank 0 often walks deep.
    """
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(VOCABULARY), (bs, levels, 1)), axis=-1)[..., :topk]
    if kind == "tied":
        logprobs = rng.choice(-np.array([0.0, 0.5, 1.0, 2.0, np.inf]), size=(bs, levels, topk))
    else:
        logprobs = -rng.exponential(size=(bs, levels, topk)) * np.where(np.arange(topk) == 0, 0.2, 2.0)
    logprobs = -np.sort(-logprobs.astype(np.float32), axis=-1)
    ranks = rng.choice(topk, size=(bs, levels), p=[0.8, *[0.2 / (topk - 1)] * (topk - 1)] if topk > 1 else [1.0])
    path = np.take_along_axis(ids, ranks[..., None], axis=-1)[..., 0]
    path = np.where(rng.random((bs, levels)) < 0.1, VOCABULARY, path)
    return torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(path)


cases = given(
    seed=st.integers(0, 2**32 - 1),
    levels=st.integers(1, 8),
    topk=st.integers(1, 8),
    budget=st.sampled_from([1, 2, 3, 5, 8, 15, 31, 70]),
    kind=st.sampled_from(["tied", "confident"]),
)


@many
@cases
def test_numbers_of_a_verified_tree(seed, levels, topk, budget, kind):
    ids, logprobs, path = draw(seed, 3, levels, topk, kind)
    tree = build_trees(torch.zeros(3, dtype=torch.int64), ids, logprobs, budget)
    # The target's next token depends on the depth alone; it has one for the deepest node too.
    said = torch.cat([path, torch.full((3, 1), VOCABULARY)], dim=1)
    choices = said.gather(1, tree.depths)
    numbers = tree_stats(tree, walk_trees(tree.tokens, tree.parents, choices, levels))
    rows = rows_of(numbers, budget=budget, block_size=levels + 1)
    for b in range(3):
        heap = build_tree_heap(0, ids[b], logprobs[b], budget)
        node, left = 0, False
        while True:
            wanted = int(said[b, heap.depths[node]])
            child = [i for i, p in enumerate(heap.parents) if p == node and heap.tokens[i] == wanted]
            if not child:
                break
            node = child[0]
            left |= heap.ranks[node] > 0
        assert dict(zip(TREE_COLUMNS, rows[b], strict=True)) == {
            "committed_tokens": heap.depths[node] + 1,
            "tree_nodes": len(heap.tokens) - 1,
            "tree_depth": max(heap.depths),
            "side_branch": left,
        }


@many
@cases
def test_numbers_of_a_chain_and_the_tree_beside_it(seed, levels, topk, budget, kind):
    ids, logprobs, path = draw(seed, 3, levels, topk, kind)
    roots = torch.zeros(3, dtype=torch.int64)
    said = torch.cat([path, torch.full((3, 1), VOCABULARY)], dim=1)
    chain = build_trees(roots, ids[..., :1], logprobs[..., :1], levels)
    walk = walk_trees(chain.tokens, chain.parents, said.gather(1, chain.depths), levels)
    numbers = shadow_stats(build_trees(roots, ids, logprobs, budget), walk)
    rows = rows_of(numbers, budget=budget, block_size=levels + 1, shadow_linear=True)
    for b in range(3):
        accepted = 0
        while accepted < levels and said[b, accepted] == ids[b, accepted, 0]:
            accepted += 1
        heap = build_tree_heap(0, ids[b], logprobs[b], budget)
        # What the target would have said is known at the chain's nodes: at a node whose ranks are all 0, and not
        # deeper than the chain that was accepted.
        node, committed, rescue = 0, 1, False
        while not rescue and heap.depths[node] <= accepted:
            wanted = int(said[b, heap.depths[node]])
            child = [i for i, p in enumerate(heap.parents) if p == node and heap.tokens[i] == wanted]
            if not child:
                break
            node = child[0]
            committed += 1
            rescue = heap.ranks[node] > 0
        held = heap.depths[node] - rescue
        assert dict(zip(SHADOW_COLUMNS, rows[b], strict=True)) == {
            "committed_tokens": accepted + 1,
            "tree_nodes": len(heap.tokens) - 1,
            "tree_depth": max(heap.depths),
            "mismatch": accepted < levels,
            "rescue": rescue,
            "pruned": held < accepted,
            "tree_committed_tokens": committed,
        }


@many
@cases
def test_the_bound_is_one_and_exact_without_a_rescue(seed, levels, topk, budget, kind):
    """Against the walk of the tree itself, verified with the same choices."""
    ids, logprobs, path = draw(seed, 3, levels, topk, kind)
    roots = torch.zeros(3, dtype=torch.int64)
    said = torch.cat([path, torch.full((3, 1), VOCABULARY)], dim=1)
    chain, tree = build_trees(roots, ids[..., :1], logprobs[..., :1], levels), build_trees(roots, ids, logprobs, budget)
    served = walk_trees(chain.tokens, chain.parents, said.gather(1, chain.depths), levels)
    verified = walk_trees(tree.tokens, tree.parents, said.gather(1, tree.depths), levels)
    rows = rows_of(shadow_stats(tree, served), budget=budget, block_size=levels + 1, shadow_linear=True)
    for row, drafts in zip(rows, verified.num_accepted_drafts.tolist(), strict=True):
        named = dict(zip(SHADOW_COLUMNS, row, strict=True))
        bound = named["tree_committed_tokens"]
        assert bound <= drafts + 1 if named["rescue"] else bound == drafts + 1


def test_nothing_waits_for_the_device():
    """Fake tensors have no values: whatever would read one on the host fails."""
    ids, logprobs, path = draw(3, 3, 5, 4, "confident")
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        ids, logprobs, path = (mode.from_tensor(x) for x in (ids, logprobs, path))
        roots = ids[:, 0, 0].clone()
        tree = build_trees(roots, ids, logprobs, 9, validate=False)
        walk = walk_trees(tree.tokens, tree.parents, tree.tokens, 5)
        assert tree_stats(tree, walk).shape == shadow_stats(tree, walk).shape == (3, 4)


# --- Totals -----------------------------------------------------------------------------------------

TREE = DDTreeConfig(budget=15, block_size=8)
SHADOW = DDTreeConfig(budget=15, block_size=8, shadow_linear=True)


def totals(config, rows):
    layout, sums = layout_of(config), []
    for row in rows:
        layout.add(sums, row)
    return sums


def test_summary_of_a_tree():
    assert summary(TREE, totals(TREE, [(8, 15, 7, 0), (3, 15, 5, 1), (3, 15, 6, 1), (1, 15, 4, 0)])) == {
        "rounds": 4,
        "committed_tokens": 15,
        "committed_tokens_per_round": 3.75,
        "committed_tokens_histogram": [0, 1, 0, 2, 0, 0, 0, 0, 1],
        "accepted_depth_histogram": [1, 0, 2, 0, 0, 0, 0, 1],
        "tree_nodes_per_round": 15.0,
        "tree_depth_per_round": 5.5,
        "side_branch_rounds": 2,
        "side_branch_share": 0.5,
    }


def test_summary_of_a_shadow_chain():
    rows = [(2, 15, 3, 1, 1, 0, 3), (8, 15, 2, 0, 0, 1, 3), (1, 15, 4, 1, 0, 0, 1)]
    assert summary(SHADOW, totals(SHADOW, rows)) == {
        "rounds": 3,
        "committed_tokens": 11,
        "committed_tokens_per_round": 11 / 3,
        "committed_tokens_histogram": [0, 1, 1, 0, 0, 0, 0, 0, 1],
        "tree_nodes_per_round": 15.0,
        "tree_depth_per_round": 3.0,
        "mismatch_rounds": 2,
        "rescued_rounds": 1,
        "rescue_share": 0.5,
        "pruned_rounds": 1,
        "tree_committed_tokens": 7,
        "tree_committed_tokens_per_round": 7 / 3,
        "tree_committed_tokens_histogram": [0, 1, 0, 2, 0, 0, 0, 0, 0],
    }
    assert summary(SHADOW, totals(SHADOW, [(8, 15, 7, 0, 0, 0, 8)]))["rescue_share"] == 0.0


@pytest.mark.parametrize("config", [TREE, SHADOW])
def test_every_place_of_the_totals_is_read_once(config):
    layout = layout_of(config)
    rounds, sums, histograms = layout.read(list(range(layout.length)))
    read = [rounds, *sums.values(), *itertools.chain.from_iterable(histograms.values())]
    assert sorted(read) == list(range(layout.length))


def test_meta_info_is_completed():
    meta_info = {
        "spec_accept_rate": 11 / 60,
        "spec_num_correct_drafts": 11,
        "spec_verify_ct": 4,
        "spec_cap_lens_histogram": totals(TREE, [(4, 15, 7, 0)] * 4),
    }
    complete_meta_info(TREE, meta_info)
    # At most 7 drafts of 15 lie on one path.
    assert meta_info["spec_accept_rate"] == 11 / 28
    assert meta_info["ddtree"]["rounds"] == 4
    assert "spec_cap_lens_histogram" not in meta_info
    # A request that ended with its first token has seen no round.
    empty = {"completion_tokens": 1}
    complete_meta_info(TREE, empty)
    assert empty == {"completion_tokens": 1}


def make_request(*, finished=False, retracted=False):
    return SimpleNamespace(finished=lambda: finished, is_retracted=retracted, spec_cap_lens_histogram=[])


def test_a_round_that_a_request_no_longer_needs_is_not_counted():
    """Under overlap scheduling the next round of a request is under way when its end becomes known."""
    reqs = [make_request(), make_request(finished=True), make_request(retracted=True), make_request()]
    processor = SimpleNamespace(
        server_args=SimpleNamespace(_ddtree_config=TREE),
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=False),
        metrics_collector=None,
    )
    numbers = torch.tensor([[7, 16, 7, 0], [0, 16, 7, 0], [1, 16, 7, 0], [2, 16, 7, 1]])
    metrics.count_rounds(processor, SimpleNamespace(round_stats=numbers), SimpleNamespace(reqs=reqs))
    assert [bool(req.spec_cap_lens_histogram) for req in reqs] == [True, False, False, True]
    assert summary(TREE, reqs[3].spec_cap_lens_histogram)["committed_tokens"] == 3
    # A prefill has no numbers.
    metrics.count_rounds(processor, SimpleNamespace(), SimpleNamespace(reqs=reqs))
    assert summary(TREE, reqs[0].spec_cap_lens_histogram)["rounds"] == 1


@pytest.mark.parametrize("config", [TREE, SHADOW])
def test_prometheus_metrics(config):
    import prometheus_client

    registry = prometheus_client.CollectorRegistry()

    def registered(kind):
        return lambda *args, **kwargs: kind(*args, registry=registry, **kwargs)

    collector = SimpleNamespace(
        _counter_cls=registered(prometheus_client.Counter),
        _histogram_cls=registered(prometheus_client.Histogram),
        labels={"model_name": "tiny", "tp_rank": 0},
    )
    rows = [(2, 15, 3, 1, 1, 0, 3), (8, 15, 2, 0, 0, 1, 3)] if config.shadow_linear else [(2, 15, 3, 1), (8, 15, 2, 0)]
    shown = metrics.RoundMetrics(collector, config)
    shown.observe(rows)
    shown.observe(rows[:1])

    def value(name, **labels):
        return registry.get_sample_value(f"sglang:ddtree_{name}", {"model_name": "tiny", "tp_rank": "0", **labels})

    assert value("rounds_total") == 3 and value("tree_nodes_total") == 45
    assert value("committed_tokens_sum") == 12 and value("committed_tokens_count") == 3
    assert [value("committed_tokens_bucket", le=f"{n}.0") for n in (1, 2, 7, 8)] == [0, 2, 2, 3]
    assert value("tree_depth_sum") == 8
    if config.shadow_linear:
        names = ("mismatch_rounds_total", "rescued_rounds_total", "pruned_rounds_total")
        assert [value(name) for name in names] == [2, 2, 1]
        assert value("shadow_committed_tokens_sum") == 9
        assert value("side_branch_rounds_total") is None
    else:
        assert value("side_branch_rounds_total") == 2
        assert value("mismatch_rounds_total") is None


# --- What the server says about itself ---------------------------------------------------------------


@pytest.mark.parametrize(
    "unproven, unsafe, shadow, exact",
    [
        (False, False, False, True),
        (False, True, False, True),
        (True, True, False, False),
        (True, True, True, True),
        (True, False, True, True),
    ],
)
def test_exact_is_false_for_a_tree_over_unproven_states_alone(unproven, unsafe, shadow, exact, monkeypatch):
    monkeypatch.setattr(hybrid, "unproven", lambda *_: "why" if unproven else None)
    config = DDTreeConfig(budget=7, block_size=8, allow_hybrid_unsafe=unsafe, shadow_linear=shadow)
    described = requirements.describe(config, "arguments", "target")
    assert described["exact"] is exact
    assert described["budget"] == 7 and described["block_size"] == 8 and described["verify_width"] == 8
