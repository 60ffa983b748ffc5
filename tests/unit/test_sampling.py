"""The target's choice at every node: what the sampler is given, and what SGLang's own sampler draws."""

import dataclasses
import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.environ import envs  # noqa: E402
from sglang.srt.layers import sampler as sglang_sampler  # noqa: E402
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # noqa: E402
from sglang_ddtree import overlay  # noqa: E402

overlay.lay()

from sglang.srt.speculative.ddtree_sampling import choose_tokens  # noqa: E402

TOP_K_ALL = 1 << 30
# A draw of the right distribution fails a chi-square test once in 10,000 seeds; ours are fixed.
ALPHA = 1e-4


def make_info(requests, vocabulary=6, **extra):
    """SGLang's batch info of requests given as dicts; greedy is what SamplingParams makes of temperature 0."""
    defaults = dict(temperature=1.0, top_p=1.0, top_k=TOP_K_ALL, min_p=0.0)
    rows = [defaults | request for request in requests]
    return SamplingBatchInfo(
        temperatures=torch.tensor([r["temperature"] for r in rows]).view(-1, 1),
        top_ps=torch.tensor([r["top_p"] for r in rows]),
        top_ks=torch.tensor([r["top_k"] for r in rows], dtype=torch.int32),
        min_ps=torch.tensor([r["min_p"] for r in rows]),
        is_all_greedy=all(r["top_k"] <= 1 for r in rows),
        is_any_greedy=any(r["top_k"] <= 1 for r in rows),
        need_top_p_sampling=any(r["top_p"] != 1.0 for r in rows),
        need_top_k_sampling=any(r["top_k"] != TOP_K_ALL for r in rows),
        need_min_p_sampling=any(r["min_p"] > 0 for r in rows),
        vocab_size=vocabulary,
        device="cpu",
        **extra,
    )


def choose(logits, info, sampler, num_nodes, **options):
    """Choices [bs, num_nodes]; the logits are copied, since they are overwritten."""
    output = SimpleNamespace(next_token_logits=logits.clone())
    options = {"positions": torch.arange(len(logits)), **options}
    return choose_tokens(logits_output=output, sampling_info=info, num_nodes=num_nodes, sampler=sampler, **options)


class FakeSampler:
    """Records what it is given and answers with fixed tokens, int32 as SGLang's does."""

    def __init__(self, answer):
        self.answer, self.calls = answer, []

    def __call__(self, logits_output, sampling_info, **options):
        self.calls.append((logits_output, sampling_info, options, logits_output.next_token_logits.clone()))
        # As the real one, it leaves probabilities where the logits were.
        logits_output.next_token_logits.fill_(float("nan"))
        return torch.tensor(self.answer, dtype=torch.int32)


@pytest.fixture
def real_sampler(monkeypatch):
    """SGLang's Sampler as on the CPU, without a distributed environment."""
    execution = SimpleNamespace(
        deterministic=SimpleNamespace(rl_on_policy_target=None, enable_deterministic_inference=False),
        kernel=SimpleNamespace(sampling_backend="pytorch"),
    )
    monkeypatch.setattr(sglang_sampler, "get_tp_group", lambda: SimpleNamespace(device_group=None))
    monkeypatch.setattr(sglang_sampler, "is_dp_attention_enabled", lambda: False)
    monkeypatch.setattr(sglang_sampler, "get_exec", lambda: execution)
    return sglang_sampler.Sampler()


def never(*args, **kwargs):
    raise AssertionError("must not be called")


# --- What the sampler is given ----------------------------------------------------------------------


def test_all_greedy_takes_the_first_maximum_and_asks_no_sampler():
    logits = torch.zeros(6, 5)
    logits[1, [2, 4]] = 1.0
    logits[3, 3] = 2.0
    logits[4, [0, 1]] = -5.0
    info = make_info([{"top_k": 1}, {"top_k": 1}])
    choices = choose(logits, info, never, 3)
    assert choices.tolist() == [[0, 2, 0], [3, 2, 0]]
    assert choices.dtype == torch.int64


def test_every_parameter_is_repeated_for_every_node():
    requests = [
        dict(temperature=0.5, top_p=0.9, top_k=3, min_p=0.1),
        dict(temperature=2.0, top_p=0.7, top_k=7, min_p=0.2),
        dict(temperature=1.5, top_p=1.0, top_k=TOP_K_ALL, min_p=0.0),
    ]
    info = make_info(
        requests,
        sampling_seed=torch.tensor([11, 22, 33]),
        grammars=[object(), None, None],
        penalizer_orchestrator=object(),
        logit_bias=torch.zeros(3, 6),
        return_sampling_masks=[True, False, False],
    )
    before = dict(vars(info))
    sampler = FakeSampler([1] * 12)
    positions = torch.tensor([5, 6, 6, 7, 90, 91, 91, 91, 0, 1, 2, 3])
    logits = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    choose(logits, info, sampler, 4, positions=positions)
    ((output, given, options, seen),) = sampler.calls
    each = [request for request in requests for _ in range(4)]
    assert given.temperatures.shape == (12, 1)
    assert given.temperatures[:, 0].tolist() == [request["temperature"] for request in each]
    assert given.top_ps.tolist() == torch.tensor([request["top_p"] for request in each]).tolist()
    assert given.top_ks.tolist() == [request["top_k"] for request in each]
    assert given.min_ps.tolist() == torch.tensor([request["min_p"] for request in each]).tolist()
    assert given.sampling_seed.tolist() == [11] * 4 + [22] * 4 + [33] * 4
    for flag in ("is_all_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"):
        assert getattr(given, flag) == getattr(info, flag)
    assert given.is_any_greedy is False and given.vocab_size == 6
    # A second application, or a per-request list over per-node rows, would be wrong.
    for name in ("grammars", "grammar_mask", "logit_bias", "penalizer_orchestrator", "return_sampling_masks"):
        assert getattr(given, name) is None
    assert options["return_logprob"] is False and options["positions"] is positions
    assert torch.equal(seen, logits)
    # The batch's own info is left as it was.
    assert all(getattr(info, name) is value for name, value in before.items())


def test_a_row_of_a_packed_round_is_its_owners():
    """One request of a single node, a greedy one of three, one of two; parameters, bias and greediness go along."""
    bias = torch.zeros(3, 6)
    bias[0, 0], bias[1, 1], bias[2, 2] = 10.0, 20.0, 30.0
    requests = [dict(temperature=0.5, top_p=0.9, min_p=0.1), dict(top_k=1), dict(temperature=2.0, top_k=7)]
    info = make_info(requests, sampling_seed=torch.tensor([11, 22, 33]), logit_bias=bias)
    owners = [0, 1, 1, 1, 2, 2]
    sampler = FakeSampler([5, 5, 5, 5, 4, 3])
    choices = choose(torch.zeros(6, 6), info, sampler, 1, owners=torch.tensor(owners))
    assert choices.tolist() == [[5], [1], [1], [1], [4], [3]]
    ((_, given, _, seen),) = sampler.calls
    assert torch.equal(seen, bias[owners])
    assert given.temperatures.shape == (6, 1) and given.sampling_seed.tolist() == [11, 22, 22, 22, 33, 33]
    for name in ("temperatures", "top_ps", "top_ks", "min_ps"):
        assert torch.equal(getattr(given, name), getattr(info, name)[owners])
    # Requests of equal numbers of nodes: as a uniform round.
    logits, same = torch.randn(6, 6, generator=torch.Generator().manual_seed(9)), torch.tensor([0, 0, 1, 1, 2, 2])
    for greedy in (make_info([{"top_k": 1}] * 3, logit_bias=bias), make_info([{"top_k": 1}] * 3)):
        packed = choose(logits, greedy, never, 1, owners=same)
        assert packed.flatten().tolist() == choose(logits, greedy, never, 2).flatten().tolist()


def test_no_tensor_of_the_batch_info_is_left_per_request():
    """A tensor that a new SGLang adds per request would be read per node: this fails until it is looked at."""
    tensors = {field.name for field in dataclasses.fields(SamplingBatchInfo) if "torch.Tensor" in str(field.type)}
    expanded = {"temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"}
    applied_before = {"logit_bias"}
    # Of penalties and processors, which are refused per request, and of disaggregated serving.
    unused = {"acc_additive_penalties", "acc_scaling_penalties", "custom_logit_processor"}
    unused |= {"rids_int", "bootstrap_room_ids_int"}
    assert tensors == expanded | applied_before | unused


def test_greedy_rows_of_a_mixed_batch_ignore_the_sampler():
    logits = torch.zeros(6, 5)
    logits[2, [1, 3]] = 4.0
    info = make_info([{"temperature": 1.0, "top_k": 1}, {}])
    choices = choose(logits, info, FakeSampler([4, 4, 3, 4, 2, 0]), 3)
    assert choices.tolist() == [[0, 0, 1], [4, 2, 0]]


def test_logit_bias_is_each_requests_own():
    bias = torch.zeros(2, 4)
    bias[0, 3] = 10.0
    bias[1, 1] = -10.0
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]]).repeat(4, 1)
    greedy = make_info([{"top_k": 1}] * 2, logit_bias=bias)
    assert choose(logits, greedy, never, 2).tolist() == [[3, 3], [2, 2]]
    sampler = FakeSampler([0] * 4)
    choose(logits, make_info([{}] * 2, logit_bias=bias), sampler, 2)
    expected = [[0, 3, 2, 11], [0, 3, 2, 11], [0, -7, 2, 1], [0, -7, 2, 1]]
    assert sampler.calls[0][3].tolist() == expected


class AllowOne:
    """A grammar mask that leaves one token per row."""

    def __init__(self, tokens):
        self.tokens = tokens

    def apply(self, logits):
        for row, token in zip(logits, self.tokens, strict=True):
            kept = float(row[token])
            row.fill_(float("-inf"))
            row[token] = kept


@pytest.mark.parametrize("greedy", [True, False])
def test_a_grammar_decides_last(greedy, real_sampler):
    allowed = [3, 1, 0, 2]
    bias = torch.full((2, 4), 100.0)
    bias[:, 2] = 500.0
    info = make_info([{"top_k": 1 if greedy else TOP_K_ALL}] * 2, logit_bias=bias)
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    choices = choose(logits, info, real_sampler, 2, grammar_mask=AllowOne(allowed))
    assert choices.flatten().tolist() == allowed


def test_nan_logits_are_sanitised_if_sglang_is_told_to(real_sampler):
    logits = torch.full((2, 4), float("nan"))
    logits[1, 2] = 1.0
    with envs.SGLANG_SANITIZE_NAN_LOGITS.override(True):
        for request in ({"top_k": 1}, {}):
            choices = choose(logits, make_info([request]), real_sampler, 2)
            assert 0 <= choices[0, 0] < 4 and choices[0, 1] == 2


class Group:
    """Two ranks; this one receives what rank 0 drew."""

    world_size = 2

    def __init__(self, received):
        self.received, self.sent = received, []

    def broadcast(self, tensor, src):
        assert src == 0 and tensor.is_contiguous() and tensor.dtype == torch.int64
        self.sent.append(tensor.tolist())
        tensor.copy_(torch.tensor(self.received))


def test_ranks_agree_on_what_was_drawn():
    group = Group([3, 2, 1, 0])
    logits = torch.zeros(4, 5)
    choices = choose(logits, make_info([{}, {}]), FakeSampler([4, 4, 4, 4]), 2, tp_group=group)
    assert group.sent == [[4, 4, 4, 4]]
    assert choices.tolist() == [[3, 2], [1, 0]]
    # An argmax is the same everywhere: no message.
    group = Group([9])
    choose(logits, make_info([{"top_k": 1}] * 2), never, 2, tp_group=group)
    assert group.sent == []


# --- What SGLang's sampler draws --------------------------------------------------------------------

LOGITS = [2.0, 1.3, 0.4, 0.0, -0.9, -2.5]


def exact_probabilities(temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """Plain loops: softmax, then of the best-first list the top k, the nucleus, and the tokens near the best."""
    weights = [np.exp(logit / temperature) for logit in LOGITS]
    probabilities = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(LOGITS)), key=lambda token: -probabilities[token])
    kept, mass = set(), 0.0
    for rank, token in enumerate(order):
        inside = (top_k is None or rank < top_k) and mass <= top_p
        if inside and probabilities[token] >= min_p * probabilities[order[0]]:
            kept.add(token)
        mass += probabilities[token]
    total = sum(probabilities[token] for token in kept)
    return np.array([probabilities[t] / total if t in kept else 0.0 for t in range(len(LOGITS))])


def assert_drawn_from(tokens, expected):
    counts = np.bincount(tokens.flatten().numpy(), minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    if possible.sum() > 1:
        result = stats.chisquare(counts[possible], expected[possible] * counts.sum())
        assert result.pvalue > ALPHA, (counts, expected * counts.sum())


REQUESTS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"temperature": 1.4, "top_k": 2},
    {"top_p": 0.75},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.8, "min_p": 0.15},
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_each_node_samples_the_targets_distribution(request_, real_sampler):
    torch.manual_seed(1)
    nodes = 9000
    choices = choose(torch.tensor([LOGITS]).repeat(nodes, 1), make_info([request_]), real_sampler, nodes)
    expected = exact_probabilities(**request_)
    assert_drawn_from(choices, expected)
    # The test can tell: a colder distribution does not pass for it.
    colder = 0.7 * request_.get("temperature", 1.0)
    with pytest.raises(AssertionError):
        assert_drawn_from(choices, exact_probabilities(**(request_ | {"temperature": colder})))


def test_a_mixed_batch_samples_every_request_by_its_own_rules(real_sampler):
    torch.manual_seed(2)
    requests = [*REQUESTS, {"top_k": 1}]
    nodes = 3000
    logits = torch.tensor([LOGITS]).repeat(nodes * len(requests), 1)
    choices = choose(logits, make_info(requests), real_sampler, nodes)
    assert choices.shape == (len(requests), nodes)
    for row, request in zip(choices, requests, strict=True):
        assert_drawn_from(row, exact_probabilities(**request))


def test_nodes_draw_independently(real_sampler):
    torch.manual_seed(3)
    pairs = 6000
    logits = torch.tensor([LOGITS]).repeat(2 * pairs, 1)
    choices = choose(logits, make_info([{}] * pairs), real_sampler, 2)
    table = np.zeros((6, 6))
    for first, second in choices.tolist():
        table[first, second] += 1
    assert stats.chi2_contingency(table).pvalue > ALPHA


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_a_one_hot_target_never_yields_another_token(request_, real_sampler):
    # sglang #35771: a coin of exactly 0 accepted a draft of probability zero.
    torch.manual_seed(4)
    nodes = 500
    expected = [node % 6 for node in range(nodes)]
    logits = torch.zeros(nodes, 6)
    logits[torch.arange(nodes), expected] = 1000.0
    choices = choose(logits, make_info([request_]), real_sampler, nodes)
    assert choices[0].tolist() == expected


def test_tied_greedy_rows_of_a_mixed_batch_take_the_first_maximum(real_sampler):
    """The sampler alone draws among tied maxima in a mixed batch; a greedy request may not notice its neighbours."""
    torch.manual_seed(5)
    nodes = 40
    logits = torch.full((2 * nodes, 6), -3.0)
    logits[:, [2, 3, 5]] = 1.0
    choices = choose(logits, make_info([{"top_k": 1}, {}]), real_sampler, nodes)
    assert choices[0].tolist() == [2] * nodes
    assert set(choices[1].tolist()) > {2, 3}


@pytest.mark.parametrize("request_", [{}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}], ids=str)
def test_a_seeded_node_draws_what_plain_decoding_draws_there(request_, real_sampler, monkeypatch):
    def hash_by_loops(seeds, positions, columns):
        rows = [
            [hash((int(s), int(p), int(c))) % (2**32 - 2) + 1 for c in columns]
            for s, p in zip(seeds, positions, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64)

    # SGLang's hash is a Triton kernel; any function of (seed, position, token) shows who gets which.
    monkeypatch.setattr(sglang_sampler, "murmur_hash32", hash_by_loops)
    seeds, nodes = [5, 99, 5], 4
    positions = torch.tensor([10, 11, 11, 12, 10, 11, 12, 13, 40, 41, 41, 42])
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(12, 6, generator=generator)
    info = make_info([request_] * 3, sampling_seed=torch.tensor(seeds))
    # Compiling it takes longer than this whole file.
    eager = inspect.unwrap(sglang_sampler.multinomial_with_seed)
    monkeypatch.setattr(sglang_sampler, "multinomial_with_seed", eager)
    choices = choose(logits, info, real_sampler, nodes, positions=positions).flatten()
    plain = []
    for row in range(12):
        alone = make_info([request_], sampling_seed=torch.tensor([seeds[row // nodes]]))
        output = SimpleNamespace(next_token_logits=logits[row : row + 1].clone())
        at = positions[row : row + 1]
        plain.append(int(real_sampler(output, alone, False, [], [], at)))
    assert choices.tolist() == plain
    # The seed matters: with the others' it is another text.
    other = make_info([request_] * 3, sampling_seed=torch.tensor([6, 98, 7]))
    assert choose(logits, other, real_sampler, nodes, positions=positions).flatten().tolist() != plain
