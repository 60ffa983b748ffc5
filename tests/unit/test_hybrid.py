"""Hybrid targets without a GPU: what states cost, and which node's state a round commits and tracks."""

import logging
from types import SimpleNamespace

import pytest
import torch
from _load import load_ddtree_utils
from sglang.srt.plugins import load_plugins

load_plugins()

import sglang.srt.mem_cache.kv_cache_configurator as sizing  # noqa: E402
import sglang.srt.speculative.spec_utils as spec_utils  # noqa: E402
from sglang_ddtree import activation, state_memory  # noqa: E402
from sglang_ddtree.flags import DDTreeConfig, FlagError  # noqa: E402
from sglang_ddtree.state_memory import StateMemory  # noqa: E402

u = load_ddtree_utils()

# --- Memory -----------------------------------------------------------------------------------------


def pool_states(requests, nodes, slots):
    """States that SGLang's pool holds: of requests and their nodes, each with one to spare."""
    return (requests * slots + 1) + (requests + 1) * nodes


@pytest.mark.parametrize("slots", [1, 3, 5])
@pytest.mark.parametrize("nodes", [1, 4, 16, 64])
@pytest.mark.parametrize("share", [0, 50, 99, 1000, 12345])
def test_what_fits_is_the_most_that_fits(share, nodes, slots):
    memory = StateMemory(state_bytes=7, nodes=nodes, slots=slots, share_bytes=7 * share + 3)
    fitting = memory.fitting_requests()
    assert fitting == 0 or pool_states(fitting, nodes, slots) <= share
    assert pool_states(fitting + 1, nodes, slots) > share
    for requests in (1, 8, 48):
        most = memory.fitting_nodes(requests)
        assert most == 0 or pool_states(requests, most, slots) <= share
        assert pool_states(requests, most + 1, slots) > share


def test_a_line_that_says_what_a_request_costs():
    # Qwen3.6-27B: 48 layers of 48 heads x 128 x 128 in float32, and windows of 10240 x 3 in bfloat16.
    state = 48 * (48 * 128 * 128 * 4 + 10240 * 3 * 2)
    line = state_memory.describe(StateMemory(state, nodes=16, slots=5, share_bytes=0), 12)
    assert (
        "take 0.15 GB each: 2.46 GB for the 16 nodes of a request and 0.77 GB for up to 5 more; 12 requests fit."
        in line
    )


STATE = 1000


def configurator(asked, given=True, ratio=3, **flags):
    """The part of SGLang's configurator that is read; a state takes a kilobyte."""
    server_args = SimpleNamespace(
        speculative_algorithm="DDTREE",
        _ddtree_config=DDTreeConfig(block_size=8, **flags),
        _ddtree_requests_given=given,
    )
    params = SimpleNamespace(mamba_cache_per_req=STATE)
    return SimpleNamespace(
        server_args=server_args,
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        ps=SimpleNamespace(tp_rank=0),
        _calculate_mamba_ratio=lambda: ratio,
        asked=asked,
    )


def size(monkeypatch, found, free_states, cache_size=None):
    """Run the hook around a stand-in that sizes as SGLang does; half of the memory may become states."""
    schedule = SimpleNamespace(
        max_running_requests=found.asked, max_mamba_cache_size=cache_size, mamba_full_memory_ratio=1.0
    )
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    nodes, slots = found.server_args._ddtree_config.verify_width, found._calculate_mamba_ratio()

    def original(self, free):
        states = round(free * (1 << 30) / STATE)
        if schedule.max_mamba_cache_size is None:
            budget = states // 2
            schedule.max_mamba_cache_size = int((budget - 1 - nodes) // (1 + nodes / slots))
        if schedule.max_mamba_cache_size <= 0:
            raise RuntimeError("no state fits")
        requests = min(found.asked, schedule.max_mamba_cache_size // slots)
        left = states - (schedule.max_mamba_cache_size + 1) - (requests + 1) * nodes
        return left * STATE / (1 << 30)

    return activation._state_memory_hook(original, found, free_states * STATE / (1 << 30))


def test_enough_memory_is_told_and_nothing_else(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    # 8 x (16 + 3) + 17 states, twice.
    assert size(monkeypatch, configurator(8), 2 * 169) > 0
    (record,) = caplog.records
    assert "0.02 MB for the 16 nodes of a request" in record.getMessage()
    assert "8 requests fit" in record.getMessage()


def test_one_state_less_names_a_budget_that_fits(monkeypatch):
    with pytest.raises(FlagError) as error:
        size(monkeypatch, configurator(8), 2 * 168)
    message = str(error.value)
    assert message.startswith("DDTREE: --max-running-requests 8 does not fit.") and "7 requests fit" in message
    assert "--speculative-ddtree-budget 14 would fit; or lower --max-running-requests" in message
    assert size(monkeypatch, configurator(8, budget=14), 2 * 168) > 0
    with pytest.raises(FlagError):
        size(monkeypatch, configurator(8, budget=14), 2 * 159)


def test_under_auto_it_is_the_largest_budget_that_is_named(monkeypatch):
    with pytest.raises(FlagError, match="--speculative-ddtree-max-budget 14 would fit; or lower"):
        size(monkeypatch, configurator(8, auto=True, uniform=True), 2 * 168)


def test_a_number_that_nobody_asked_for_is_lowered_as_sglang_does(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    size(monkeypatch, configurator(48, given=False), 2 * 169)
    assert "8 requests fit" in caplog.text


def test_a_chains_width_is_not_the_budgets(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert size(monkeypatch, configurator(48, shadow_linear=True), 2 * 169) > 0
    assert "the 8 nodes" in caplog.text


@pytest.mark.parametrize("free", [20, 2 * 30])
def test_no_request_fits(monkeypatch, free):
    with pytest.raises(FlagError, match="0 requests fit.*No budget would fit"):
        size(monkeypatch, configurator(8), free)


def test_a_pool_of_a_given_size(monkeypatch):
    with pytest.raises(FlagError, match="--max-mamba-cache-size 21 holds 3 states for each of 7; give 24 or drop it"):
        size(monkeypatch, configurator(8), 10000, cache_size=21)
    assert size(monkeypatch, configurator(8), 10000, cache_size=24) > 0
    # Large enough, but nothing is left for keys and values.
    with pytest.raises(FlagError, match="--speculative-ddtree-budget 5 would fit"):
        size(monkeypatch, configurator(8), 2 * 80, cache_size=24)
    size(monkeypatch, configurator(8, budget=5), 2 * 80, cache_size=24)


def test_other_algorithms_are_left_alone():
    found = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm="DFLASH"))
    assert activation._state_memory_hook(lambda self, free: free - 1, found, 3.0) == 2.0


def test_sglang_has_the_ratios_that_the_arithmetic_assumes():
    """States per request: its own, the tree's parent being read while the next is written, and those of prefixes."""
    assert sizing.MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO == 3
    assert sizing.MAMBA_CACHE_V2_ADDITIONAL_RATIO_OVERLAP == 2


# --- Which node's state ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_last_accepted_node_is_committed_and_the_right_one_tracked(seed, monkeypatch):
    """SGLang's own choice of states, from what a round hands it: of a path, not of as many first nodes."""
    interval, bs, positions, budget = 8, 16, 5, 12
    monkeypatch.setattr(
        spec_utils, "get_exec", lambda: SimpleNamespace(mamba=SimpleNamespace(mamba_track_interval=interval))
    )
    generator = torch.Generator().manual_seed(seed)
    logprobs, ids = torch.log_softmax(torch.randn(bs, positions, 9, generator=generator), -1).topk(4, dim=-1)
    tree = u.build_trees(torch.zeros(bs, dtype=torch.int64), ids, logprobs, budget)
    nodes = budget + 1
    # The target says the token of a child wherever there is one, the last if it is among the few.
    choices = torch.full((bs, nodes), -1)
    for b in range(bs):
        for node in range(1, int(tree.num_nodes[b])):
            choices[b, tree.parents[b, node]] = tree.tokens[b, node]
    seq_lens = torch.randint(1, 40, (bs,), generator=generator)
    walk = u.walk_trees(tree.tokens, tree.parents, choices, positions)
    plan = u.plan_commit(walk, choices, seq_lens, torch.zeros((bs, nodes), dtype=torch.int64))
    # As the worker does.
    accepted = torch.where(walk.accept_index >= 0, plan.rows, -1).to(torch.int32)
    batch = SimpleNamespace(seq_lens=seq_lens, mamba_track_indices=torch.zeros(bs))
    last, tracked = spec_utils._verify_commit_step_indices(
        batch=batch, accept_index=accepted, accept_lens=plan.accept_lens, draft_token_num=nodes
    )
    not_in_a_row = 0
    for b in range(bs):
        path, node = [0], 0
        while True:
            children = [
                n
                for n in range(1, int(tree.num_nodes[b]))
                if tree.parents[b, n] == node and tree.tokens[b, n] == choices[b, node]
            ]
            if not children:
                break
            (node,) = children
            path.append(node)
        assert int(last[b]) == path[-1]
        not_in_a_row += path != list(range(len(path)))
        # The state after n tokens is that of the node which is the n-th of the sequence.
        ends = {int(seq_lens[b]) + 1 + place: node for place, node in enumerate(path)}
        boundary = [length for length in ends if length % interval == 0]
        assert int(tracked[b]) == (ends[boundary[-1]] if boundary else -1)
    assert not_in_a_row
