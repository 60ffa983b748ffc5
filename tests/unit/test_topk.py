"""The drafter's candidates against float64 log-softmax and plain sorting."""

from types import SimpleNamespace

import pytest
import torch
from _load import load

topk = load("ddtree_topk", "python/sglang/srt/speculative/ddtree_topk.py")


def make_head(weight, *, start=0, real=None, added=0):
    """A stand-in for ParallelLMHead; `real` rows of the weight are vocabulary, the others padding."""
    shard = SimpleNamespace(
        num_org_elements=weight.shape[0] if real is None else real,
        org_vocab_start_index=start,
        num_added_elements=added,
    )
    return SimpleNamespace(weight=weight, shard_indices=shard)


def draw(seed, rows, vocabulary, hidden=24):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, hidden, generator=generator),
        torch.randn(vocabulary, hidden, generator=generator),
    )


def identity(logits):
    """Hidden states and a head whose product is exactly `logits` (a matmul with ones and zeros is exact)."""
    return logits, SimpleNamespace(weight=torch.eye(logits.shape[1]))


def expected_logprobs(logits):
    values = logits.to(torch.float64)
    return values - torch.log(torch.exp(values - values.amax(1, True)).sum(1, True)) - values.amax(1, True)


# --- One rank ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, vocabulary, k", [(1, 7, 1), (5, 7, 7), (3, 97, 1), (13, 301, 8), (2, 301, 301)])
def test_equals_float64_log_softmax(rows, vocabulary, k):
    hidden, weight = draw(vocabulary + k, rows, vocabulary)
    ids, logprobs = topk.topk_logprobs(hidden, SimpleNamespace(weight=weight), k)
    assert ids.shape == logprobs.shape == (rows, k)
    assert ids.dtype == torch.int64 and logprobs.dtype == torch.float32
    exact = expected_logprobs(hidden.double() @ weight.double().T)
    order = [sorted(range(vocabulary), key=row.__getitem__, reverse=True)[:k] for row in exact.tolist()]
    assert ids.tolist() == order
    # A float32 matmul of 24 terms, values up to 25: some ten roundings of 2e-6.
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), rtol=0, atol=2e-5)


def test_all_candidates_have_all_the_probability():
    hidden, weight = draw(3, 4, 65)
    _, logprobs = topk.topk_logprobs(hidden, SimpleNamespace(weight=weight), 65)
    torch.testing.assert_close(logprobs.double().exp().sum(1), torch.ones(4, dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("maximum_at", [[0, 1], [3, 8, 9], [9], [0, 9], list(range(10))])
@pytest.mark.parametrize("k", [1, 4, 10])
def test_rank_0_is_the_first_maximum(maximum_at, k):
    logits = torch.full((3, 10), -1.0)
    logits[1, maximum_at] = 2.5
    ids, _ = topk.topk_logprobs(*identity(logits), k)
    assert ids[:, 0].tolist() == [0, min(maximum_at), 0]
    # Whatever the order of the other ties, the tied maxima come first and no token comes twice.
    few = min(k, len(maximum_at))
    assert set(ids[1, :few].tolist()) <= set(maximum_at)
    assert all(len(set(row)) == k for row in ids.tolist())


def test_bfloat16_weights_and_their_ties():
    """Rounding to bfloat16 makes ties: the first of the rounded maxima counts, as for DFLASH's argmax."""
    hidden, weight = draw(11, 6, 5000, hidden=8)
    head = SimpleNamespace(weight=weight.bfloat16())
    ids, logprobs = topk.topk_logprobs(hidden, head, 8)
    rounded = (hidden.bfloat16() @ head.weight.T).double()
    first_maximum = [row.index(max(row)) for row in rounded.tolist()]
    assert ids[:, 0].tolist() == first_maximum
    exact = expected_logprobs(rounded)
    # The logits are given, only float32's log-sum-exp of 5000 terms is rounded.
    torch.testing.assert_close(logprobs.double(), exact.gather(1, ids), rtol=0, atol=1e-5)
    best = exact.sort(1, descending=True).values[:, :8]
    torch.testing.assert_close(logprobs.double(), best, rtol=0, atol=1e-5)
    unrounded = expected_logprobs(hidden.double() @ weight.double().T)
    # Two factors rounded to 8 bits and the result too: 3 x 2^-9 of a logit of up to 15, and a term's rest.
    torch.testing.assert_close(logprobs.double(), unrounded.gather(1, ids), rtol=0, atol=0.15)


def test_probability_one_is_not_exceeded():
    logits = torch.full((1, 40), -200.0)
    logits[0, 17] = 90.0
    ids, logprobs = topk.topk_logprobs(*identity(logits), 3)
    assert ids[0, 0] == 17 and logprobs[0, 0] == 0.0
    assert (logprobs <= 0).all()
    assert logprobs[0, 1:].tolist() == [-290.0, -290.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_undefined_distribution_is_never_accepted(bad):
    hidden, weight = draw(5, 3, 31)
    logits = hidden @ weight.T
    clean_ids, clean = topk.topk_logprobs(*identity(logits), 6)
    logits[1, 20] = bad
    ids, logprobs = topk.merge_topk(*(part[None] for part in topk.shard_topk(logits, 6, 0)), 6)
    assert not torch.isnan(logprobs).any()
    assert torch.isneginf(logprobs[1]).all()
    assert ((ids >= 0) & (ids < 31)).all()
    for row in (0, 2):
        assert torch.equal(ids[row], clean_ids[row]) and torch.equal(logprobs[row], clean[row])


def test_padding_rows_are_cut_off():
    hidden, weight = draw(7, 4, 50)
    padded = torch.cat([weight, 100.0 * weight[:14]])
    ids, logprobs = topk.topk_logprobs(hidden, make_head(padded, real=50), 9)
    plain_ids, plain = topk.topk_logprobs(hidden, SimpleNamespace(weight=weight), 9)
    assert torch.equal(ids, plain_ids)
    torch.testing.assert_close(logprobs, plain, rtol=0, atol=1e-5)
    # The padding would have won.
    assert (topk.topk_logprobs(hidden, SimpleNamespace(weight=padded), 1)[0] >= 50).any()


def test_refused_heads():
    hidden, weight = draw(9, 1, 12)
    with pytest.raises(ValueError, match="added vocabulary"):
        topk.topk_logprobs(hidden, make_head(weight, added=1), 2)
    with pytest.raises(ValueError, match="unquantised lm_head"):
        topk.topk_logprobs(hidden, make_head(weight.to(torch.int8)), 2)


@pytest.mark.parametrize("kind", ["float8", "packed"])
def test_refused_quantised_heads(kind):
    hidden, weight = draw(9, 1, 12)
    head = make_head(weight.to(torch.float8_e4m3fn))
    if kind == "packed":
        head = SimpleNamespace(qweight=weight.to(torch.int32), shard_indices=head.shard_indices)
    with pytest.raises(ValueError, match="unquantised lm_head"):
        topk.topk_logprobs(hidden, head, 2)


# --- Several ranks ----------------------------------------------------------------------------------


class Recorder:
    """A tp_group that records what a rank contributes; its answers are thrown away."""

    def __init__(self, world_size):
        self.world_size, self.parts = world_size, []

    def all_gather(self, part, dim):
        assert dim == 0 and part.is_contiguous()
        self.parts.append(part)
        return torch.cat([part] * self.world_size)


class Replay:
    """A tp_group that answers with the concatenation of what all ranks contributed."""

    def __init__(self, recorders):
        self.world_size = len(recorders)
        self.answers = [torch.cat(parts) for parts in zip(*(r.parts for r in recorders), strict=True)]

    def all_gather(self, part, dim):
        return self.answers.pop(0)


def on_ranks(hidden, weight, sizes, k, padding=0):
    """What every rank returns when the vocabulary is split into shards of `sizes`."""
    assert sum(sizes) == weight.shape[0]
    heads, start = [], 0
    for size in sizes:
        shard = weight[start : start + size]
        # Padding rows that would win if they were not cut off.
        rows = torch.cat([shard, 100.0 * weight[:padding]])
        heads.append(make_head(rows, start=start, real=size))
        start += size
    recorders = [Recorder(len(sizes)) for _ in sizes]
    for head, recorder in zip(heads, recorders, strict=True):
        topk.topk_logprobs(hidden, head, k, recorder)
    return [topk.topk_logprobs(hidden, head, k, Replay(recorders)) for head in heads]


SPLITS = [(50, 51), (7, 94), (34, 34, 33), (1, 99, 1), (26, 25, 25, 25), (2, 3, 90, 6)]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("k", [1, 8, 40])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_ranks_merge_to_the_whole(sizes, k, padding):
    hidden, weight = draw(sum(sizes[:-1]), 6, sum(sizes))
    ids, logprobs = topk.topk_logprobs(hidden, SimpleNamespace(weight=weight), k)
    exact = expected_logprobs(hidden.double() @ weight.double().T)
    results = on_ranks(hidden, weight, sizes, k, padding)
    for rank_ids, rank_logprobs in results:
        assert torch.equal(rank_ids, ids)
        # The same values; only the log-normaliser is summed in another order.
        torch.testing.assert_close(rank_logprobs, logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(rank_logprobs.double(), exact.gather(1, ids), rtol=0, atol=2e-5)
        assert torch.equal(rank_logprobs, results[0][1])


@pytest.mark.parametrize("sizes", [(5, 5), (1, 9), (3, 4, 3), (2, 3, 3, 2)], ids=str)
@pytest.mark.parametrize("tied", [[0, 9], [4, 5], [1, 2, 3, 4, 5, 6], [9], [2, 7, 8]], ids=str)
def test_ties_across_ranks_fall_the_same_way_everywhere(sizes, tied):
    logits = torch.linspace(-3, -1, 10).repeat(2, 1)
    logits[:, tied] = 1.5
    hidden, head = identity(logits)
    k = 6
    results = on_ranks(hidden, head.weight, sizes, k)
    single_ids, single = topk.topk_logprobs(hidden, head, k)
    for ids, logprobs in results:
        assert torch.equal(ids, results[0][0]) and torch.equal(logprobs, results[0][1])
        assert ids[:, 0].tolist() == single_ids[:, 0].tolist() == [tied[0]] * 2
        torch.testing.assert_close(logprobs, single, rtol=0, atol=1e-6)
        # Behind the ties nothing is left open.
        assert torch.equal(ids[:, len(tied) :], single_ids[:, len(tied) :])
        few = min(k, len(tied))
        assert set(ids[0, :few].tolist()) <= set(tied)
        assert all(len(set(row)) == k for row in ids.tolist())


def test_merge_is_stable_and_normalises_over_all_ranks():
    values = torch.tensor([[[2.0, 1.0, 1.0]], [[2.0, 2.0, -1.0]], [[1.0, 0.0, float("-inf")]]])
    ids = torch.tensor([[[4, 0, 3]], [[12, 17, 11]], [[23, 20, 0]]])
    lse = torch.tensor([[2.5], [3.0], [1.25]])
    merged, logprobs = topk.merge_topk(values, ids, lse, 8)
    assert merged.tolist() == [[4, 12, 17, 0, 3, 23, 20, 11]]
    total = torch.logsumexp(lse.double(), 0)
    expected = torch.tensor([[2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 0.0, -1.0]]).double() - total
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-6)


def test_every_rank_contributes_the_same_shape():
    """A gather needs equal shapes; what fills a small shard up is never a candidate."""
    hidden, weight = draw(2, 3, 12)
    small, large = Recorder(2), Recorder(2)
    topk.topk_logprobs(hidden, make_head(weight[:2], start=0), 5, small)
    topk.topk_logprobs(hidden, make_head(weight[2:], start=2), 5, large)
    assert [p.shape for p in small.parts] == [p.shape for p in large.parts] == [(3, 5), (3, 5), (3,)]
    assert torch.isneginf(small.parts[0][:, 2:]).all()
    (ids, _), _ = on_ranks(hidden, weight, (2, 10), 5)
    assert all(len(set(row)) == 5 for row in ids.tolist())


def test_a_group_of_one_is_not_asked():
    hidden, weight = draw(4, 2, 30)
    lonely = SimpleNamespace(world_size=1)
    ids, logprobs = topk.topk_logprobs(hidden, SimpleNamespace(weight=weight), 4, lonely)
    plain_ids, plain = topk.topk_logprobs(hidden, SimpleNamespace(weight=weight), 4)
    assert torch.equal(ids, plain_ids) and torch.equal(logprobs, plain)
