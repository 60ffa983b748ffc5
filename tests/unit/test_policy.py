"""The policy of `--speculative-ddtree-budget auto`: gains, calibration, the choice, and the loop around it."""

import math
from collections import deque

import numpy as np
import pytest
from _load import load
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

gain = load("ddtree_gain", "python/sglang/srt/speculative/ddtree_gain.py")
cost = load("ddtree_cost", "python/sglang/srt/speculative/ddtree_cost.py")
calibration = load("ddtree_calibration", "python/sglang/srt/speculative/ddtree_calibration.py")
policy = load("ddtree_policy", "python/sglang/srt/speculative/ddtree_policy.py")

POINTS = gain.grid(63)
BUCKETS = tuple(sorted({w << s for w in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) for s in range(9)}))
CERTAIN, HOPELESS = np.minimum(POINTS, 15.0), np.zeros(len(POINTS))


def curve(values: np.ndarray | None = None, widths: tuple[int, ...] = (16,), **others) -> "gain.GainCurve":
    """A curve that holds ``values`` per request, or the prior."""
    made = gain.GainCurve(63, widths, **others)
    if values is not None:
        made = gain.GainCurve(63, widths, prior_weight=1e-30, **others)
        assert made.observe(1, {width: values for width in widths})
    return made


def table(plain=0.005, plain_slope=0.0, fixed=0.006, per_request=0.0, per_token=0.0, step=0) -> "cost.CostTable":
    def seconds(requests: int, tokens: int) -> float:
        paid = step * math.ceil(tokens / step) if step else tokens
        return fixed + per_request * requests + per_token * paid

    loads = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    cells = {(r, t): seconds(r, t) for r in loads for t in BUCKETS if r <= t <= 64 * r}
    return cost.CostTable({}, {r: plain + plain_slope * r for r in loads}, {16: cells})


# --- Gains.


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_the_delivered_vector_is_the_sum_of_the_best_nodes(requests, max_nodes, seed):
    probabilities = np.random.default_rng(seed).random((requests, max_nodes))
    points = gain.grid(max_nodes)
    vector = gain.gain_vector(probabilities, points)
    best = sorted(probabilities.flatten().tolist(), reverse=True)
    for point, got in zip(points, vector, strict=True):
        whole = int(point * requests)
        rest = point * requests - whole
        expected = sum(best[:whole]) + (rest * best[whole] if rest else 0.0)
        assert got * requests == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_requests_of_equally_many_nodes_take_their_own_best(requests, max_nodes, seed):
    probabilities = np.random.default_rng(seed).random((requests, max_nodes))
    best = [sorted(row, reverse=True) for row in probabilities.tolist()]
    worth = [sum(row[place] for row in best) for place in range(max_nodes)]
    points = gain.grid(max_nodes)
    uniform = gain.uniform_gain(np.array(worth), points, requests)
    for point, got in zip(points, uniform, strict=True):
        whole = int(point)
        rest = sum(row[whole] for row in best) * (point - whole) if point > whole else 0.0
        assert got * requests == pytest.approx(sum(sum(row[:whole]) for row in best) + rest)
    # Sharing the nodes is never worse.
    assert (uniform <= gain.gain_vector(probabilities, points) + 1e-9).all()


def test_the_grid_ends_at_the_largest_tree():
    assert gain.grid(63).tolist() == list(gain.GRID)
    assert gain.grid(10).tolist() == [0, 0.25, 0.5, 1, 2, 3, 5, 7, 10]
    assert gain.grid(1).tolist() == [0, 0.25, 0.5, 1] and gain.grid(100)[-2:].tolist() == [63, 100]
    with pytest.raises(ValueError, match="max_nodes"):
        gain.grid(0)


def test_before_any_data_the_recorded_drafts_speak():
    both = curve(widths=(8, 12, 16))
    assert [float(1 + both.at(1, b, 16)) for b in (7, 15, 63)] == pytest.approx([3.531, 4.014, 4.607])
    # As many nodes of a shorter draft give less where trees are large; between two widths it lies between.
    narrow, middle, wide = (float(both.at(1, 63, width)) for width in (8, 12, 16))
    assert narrow < middle < wide and float(both.at(1, 3, 8)) == float(both.at(1, 3, 16))
    # The longest path bounds it.
    assert float(curve(widths=(2,)).at(1, 63, 2)) == 1


def test_the_curve_scales_with_requests():
    c = curve()
    for requests in (1, 7, 256):
        assert float(c.at(requests, 7 * requests, 16)) == pytest.approx(2.531 * requests)
        assert float(c.at(requests, 10**6, 16)) == pytest.approx(3.607 * requests)
        assert float(c.at(requests, 0, 16)) == 0


def test_many_rounds_of_one_request_or_a_few_of_many_replace_the_prior():
    target = 0.5 * np.array(gain.PRIOR[16])
    one, many = curve(), curve()
    for _ in range(400):
        one.observe(1, {16: target})
    for _ in range(25):
        many.observe(256, {16: target})
    for c in (one, many):
        assert c.at(1, POINTS, 16) == pytest.approx(target, rel=0.02)


def test_a_change_of_load_lets_new_rounds_decide_sooner():
    low, high = 0.5 * np.array(gain.PRIOR[16]), np.array(gain.PRIOR[16])

    def rounds_to_learn(before: int, after: int) -> int:
        c = curve()
        for _ in range(500):
            c.observe(before, {16: low})
        for done in range(1, 1000):
            c.observe(after, {16: high})
            if float(c.at(1, 15, 16)) > 0.9 * high[9]:
                return done
        raise AssertionError("never")

    assert rounds_to_learn(1, 32) == 1 and rounds_to_learn(32, 32) > 20
    assert rounds_to_learn(32, 1) < 0.7 * rounds_to_learn(1, 1)


def test_a_narrow_draft_moves_the_wider_curve_in_proportion():
    c = curve(widths=(8, 16))
    ratio = c.at(1, POINTS[1:], 16) / c.at(1, POINTS[1:], 8)
    for _ in range(300):
        c.observe(8, {8: 0.5 * np.array(gain.PRIOR[8])})
    assert c.at(1, POINTS[1:], 16) / c.at(1, POINTS[1:], 8) == pytest.approx(ratio)
    assert float(c.at(1, 63, 8)) == pytest.approx(0.5 * gain.PRIOR[8][-1], rel=0.01)


def test_a_wide_draft_moves_the_narrower_curve_in_proportion():
    c = curve(widths=(4, 8, 16))
    ratio = c.at(1, POINTS[1:], 8) / c.at(1, POINTS[1:], 16)
    for _ in range(300):
        c.observe(8, {16: 0.5 * np.array(gain.PRIOR[16])})
    assert c.at(1, POINTS[1:], 8) / c.at(1, POINTS[1:], 16) == pytest.approx(ratio)
    assert float(c.at(1, 63, 16)) == pytest.approx(0.5 * gain.PRIOR[16][-1], rel=0.01)
    # Up to what its own length allows.
    for _ in range(300):
        c.observe(8, {16: CERTAIN})
    assert [float(c.at(1, 63, width)) for width in (4, 8, 16)] == pytest.approx([3, 7, 15], rel=0.01)


@pytest.mark.parametrize("every", [2, 16])
def test_how_two_widths_compare_is_learnt_once_both_are_drafted(every):
    """Far from the prior, where half a block is worth nearly as much as the whole; the wider one is drafted rarely."""
    truth = {8: 0.4 * np.array(gain.PRIOR[8]), 16: 0.8 * np.array(gain.PRIOR[16])}
    c = curve(widths=(8, 16))
    for i in range(200 * every):
        width = 16 if i % every == 0 else 8
        c.observe(64, {width: truth[width]})
    for width in (8, 16):
        assert c.at(1, POINTS, width) == pytest.approx(truth[width], rel=0.08)


def test_a_width_follows_another_the_less_the_more_it_was_drafted_itself():
    def follows(own: int, others: int) -> float:
        """By how much the wide curve falls beside the narrow one, as a share of the logarithms."""
        c = curve(widths=(8, 16))
        for width, rounds in ((16, own), (8, others)):
            for _ in range(rounds):
                c.observe(64, {width: np.array(gain.PRIOR[width])})
        before = {width: float(c.at(1, 7, width)) for width in (8, 16)}
        c.observe(64, {8: 0.2 * np.array(gain.PRIOR[8])})
        fallen = {width: math.log(float(c.at(1, 7, width)) / before[width]) for width in (8, 16)}
        assert fallen[8] < -0.01
        return fallen[16] / fallen[8]

    assert follows(0, 1) == pytest.approx(1) == follows(0, 200)
    # A single round says more of its own width than of the other, which is known well.
    assert follows(100, 1) < 0.1 < follows(100, 10) < 0.5 < follows(100, 50) < 0.9 < follows(100, 200)


def test_a_width_not_drafted_for_long_learns_from_its_next_rounds():
    c, low = curve(widths=(8, 16)), 0.5 * np.array(gain.PRIOR[16])
    for _ in range(100):
        c.observe(64, {16: np.array(gain.PRIOR[16])})
    for _ in range(200):
        c.observe(64, {8: np.array(gain.PRIOR[8])})
    c.observe(64, {16: low})
    assert float(c.at(1, 7, 16)) < 0.75 * gain.PRIOR[16][7]
    # Which says little of the one that was drafted all the time.
    assert float(c.at(1, 7, 8)) > 0.95 * gain.PRIOR[8][7]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_vectors_that_are_no_gains_are_ignored_or_refused(bad):
    c, before = curve(), curve().at(1, POINTS, 16)
    vector = np.ones(len(POINTS))
    vector[3] = bad
    assert not c.observe(4, {16: vector}) and not c.observe(0, {16: np.ones(len(POINTS))}) and not c.observe(4, {})
    assert c.at(1, POINTS, 16).tolist() == before.tolist()
    with pytest.raises(ValueError, match="one float per grid point"):
        c.observe(4, {16: np.ones(3)})
    with pytest.raises(KeyError, match="draft width 8"):
        c.observe(4, {8: np.ones(len(POINTS))})


@given(st.lists(st.floats(-5, 500), min_size=len(POINTS), max_size=len(POINTS)), st.integers(1, 256))
def test_the_curve_stays_within_what_nodes_can_give(values, requests):
    c = curve(widths=(8, 16))
    for width in (16, 8):
        c.observe(requests, {width: np.array(values)})
    for width in (8, 16):
        got = c.at(1, POINTS, width)
        assert (got >= 0).all() and (got <= np.minimum(POINTS, width - 1) + 1e-12).all()
        assert (np.diff(got) >= -1e-12).all()


@pytest.mark.parametrize("arguments", [{"draft_widths": ()}, {"draft_widths": (1,)}, {"memory": 0}, {"max_nodes": 0}])
def test_a_curve_that_cannot_be_is_refused(arguments):
    with pytest.raises(ValueError):
        gain.GainCurve(**arguments)


# --- Calibration.


def test_temperature_classes():
    names = [calibration.temperature_class(t) for t in (0.0, 0.01, 0.7, 0.71, 1.1, 1.11)]
    assert names == ["greedy", "low", "low", "middle", "middle", "high"]


def test_a_ratio_is_learnt_slowly_per_class_and_stays_within_bounds():
    c = calibration.Calibration()
    assert c.factor() == c.factor({}) == c.factor({"greedy": 3, "high": 1}) == 1
    for _ in range(40):
        assert c.observe("high", 100.0, 60.0)
    assert c.ratio("high") == pytest.approx(0.6, abs=0.05) and c.ratio("greedy") == 1
    assert c.factor({"greedy": 3, "high": 1}) == pytest.approx((3 + c.ratio("high")) / 4)
    one = calibration.Calibration()
    one.observe("low", 20.0, 0.0)
    assert 0.9 < one.ratio("low") < 1
    for _ in range(200):
        c.observe("low", 100.0, 0.0)
        c.observe("middle", 100.0, 10000.0)
    assert (c.ratio("low"), c.ratio("middle")) == (0.25, 1.5)


def test_numbers_that_are_no_drafts_are_ignored():
    c = calibration.Calibration()
    for expected, observed in ((0.0, 0.0), (-1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, -1.0)):
        assert not c.observe("greedy", expected, observed)
    assert c.ratio("greedy") == 1
    with pytest.raises(KeyError):
        c.observe("tepid", 1.0, 1.0)
    for arguments in ({"memory": 0}, {"low": 2.0}, {"high": 0.5}):
        with pytest.raises(ValueError):
            calibration.Calibration(**arguments)


# --- The choice.


def brute_force(requests, c, t, buckets, widths, plain, factor, context) -> float:
    """The best rate, from plain loops."""
    rates = [requests / t.plain_seconds(requests, context)] if plain else []
    for width in widths:
        for bucket in buckets:
            if bucket >= requests:
                nodes = min(bucket - requests, 63 * requests)
                committed = requests + min(factor * float(c.at(requests, nodes, width)), requests * (width - 1))
                rates.append(committed / float(t.seconds(width, requests, bucket, context)))
    return max(rates)


@st.composite
def situations(draw):
    times = st.floats(1e-3, 1e-1)
    loads = sorted(draw(st.sets(st.integers(1, 256), min_size=1, max_size=4)))
    widths = (8, 16)
    cells = {w: {(r, r * n): draw(times) for r in loads for n in (1, 4, 16, 64)} for w in widths}
    t = cost.CostTable({}, {r: draw(times) for r in loads}, cells, {0: 1e-9, 16: 1e-8})
    c = curve(widths=widths)
    for _ in range(draw(st.integers(0, 3))):
        shares = draw(st.lists(st.floats(0, 1), min_size=63, max_size=63))
        vector = gain.gain_vector(np.array([shares]), POINTS)
        c.observe(draw(st.integers(1, 64)), {8: np.minimum(vector, 7), 16: vector})
    buckets = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=12))
    return draw(st.integers(1, 256)), c, t, buckets, widths, draw(st.floats(0.25, 1.5)), draw(st.floats(0, 1e6))


@given(situations(), st.booleans())
@hypothesis_settings(max_examples=150, deadline=None)
def test_the_choice_is_the_best_of_all_and_one_of_the_buckets(situation, plain):
    requests, c, t, buckets, widths, factor, context = situation
    if not plain and max(buckets) < requests:
        with pytest.raises(ValueError, match="no bucket holds"):
            policy.choose(requests, c, t, buckets, draft_widths=widths, plain=False)
        return
    arguments = {"draft_widths": widths, "plain": plain, "factor": factor, "context_tokens": context}
    choice = policy.choose(requests, c, t, buckets, **arguments)
    assert choice.rate == pytest.approx(brute_force(requests, c, t, buckets, widths, plain, factor, context))
    if choice.draft_width:
        assert choice.tokens in buckets and requests <= choice.tokens
        assert choice.nodes == min(choice.tokens - requests, 63 * requests)
    else:
        assert plain and (choice.tokens, choice.nodes, choice.committed) == (requests, 0, requests)
    assert policy.choose(requests, c, t, list(reversed(buckets)), **arguments) == choice


@given(situations(), st.sampled_from([(0, 1), (16, 64), (8, 7), (16, 999)]))
@hypothesis_settings(max_examples=100, deadline=None)
def test_with_a_current_choice_it_gives_up_no_more_than_the_margins(situation, before):
    requests, c, t, buckets, widths, factor, context = situation
    current = policy.Choice(before[0], before[1], 0, 1.0, 1.0)
    choice = policy.choose(requests, c, t, buckets, current, draft_widths=widths, factor=factor, context_tokens=context)
    best = brute_force(requests, c, t, buckets, widths, True, factor, context)
    assert choice.draft_width == 0 or choice.tokens in buckets
    assert best / ((1 + policy.DEFAULT.mode_margin) * (1 + policy.DEFAULT.bucket_margin)) <= choice.rate * (1 + 1e-9)


def test_one_request_where_width_costs_nothing_takes_all_there_is():
    choice = policy.choose(1, curve(), table(), BUCKETS)
    # More than the largest tree's 64 tokens is padding: the smaller bucket of equal rate.
    assert (choice.draft_width, choice.tokens, choice.nodes) == (16, 64, 63)


def test_more_requests_get_smaller_trees_and_at_last_none():
    t, c = table(fixed=0.005, per_request=2e-5, per_token=2.5e-5, plain=0.0045, plain_slope=2e-5), curve()
    choices = [policy.choose(n, c, t, BUCKETS) for n in (1, 4, 16, 64, 256)]
    each = [choice.nodes / n for choice, n in zip(choices, (1, 4, 16, 64, 256), strict=True)]
    assert each == sorted(each, reverse=True) and each[0] > 10
    assert choices[-1].draft_width == 0 and choices[-1].tokens == 256


def test_256_requests_where_drafts_pay():
    choice = policy.choose(256, curve(), table(plain=0.02, fixed=0.02, per_token=1e-5), BUCKETS)
    assert choice.draft_width == 16 and 256 < choice.tokens < 256 * 64 and choice.tokens in BUCKETS


def test_a_step_is_filled_up_and_not_crossed():
    t = table(plain=0.05, step=128, per_token=2e-4)
    # Within a step more nodes are free; the step behind it costs 25.6 ms more.
    assert policy.choose(8, curve(), t, BUCKETS).tokens == 128


def test_drafts_that_are_certain_are_taken_to_the_end():
    choice = policy.choose(1, curve(CERTAIN), table(per_token=1e-4), BUCKETS)
    # 15 nodes are all that can be accepted: more is no gain.
    assert choice.tokens == 16 and choice.committed == pytest.approx(16)
    many = policy.choose(64, curve(CERTAIN), table(per_token=1e-5), BUCKETS)
    assert many.tokens == 64 * 16


def test_drafts_that_are_hopeless_are_not_verified():
    assert policy.choose(8, curve(HOPELESS), table(), BUCKETS).draft_width == 0
    # Where plain rounds cannot be run: the roots alone.
    choice = policy.choose(8, curve(HOPELESS), table(), BUCKETS, plain=False)
    assert (choice.draft_width, choice.tokens, choice.nodes, choice.committed) == (16, 8, 0, 8)


def test_calibration_and_context_move_the_choice():
    t = table(plain=0.004, fixed=0.006, per_token=1e-4)
    full = policy.choose(8, curve(), t, BUCKETS)
    halved = policy.choose(8, curve(), t, BUCKETS, factor=0.3)
    assert full.nodes > halved.nodes
    cells = {16: {(1, 16): 0.006, (1, 64): 0.012}}
    tight = cost.CostTable({}, {}, cells, {16: 1e-6}, context_base=128)
    assert policy.choose(1, curve(), tight, (16, 64), context_tokens=128).tokens == 16
    # A long prefix is read whatever the tree's size, so that the tree weighs less.
    assert policy.choose(1, curve(), tight, (16, 64), context_tokens=100_000).tokens == 64


def test_a_drafters_share_of_the_context_makes_plain_rounds_worth_while():
    cells = {16: {(1, n): 0.006 for n in (4, 16, 64)}}
    light, heavy = (cost.CostTable({}, {1: 0.004}, cells, {0: 1e-8, 16: 1e-8 + own}) for own in (1e-9, 1e-7))
    tried = [
        policy.Policy(curve(), t, calibration.Calibration(), (4, 16, 64)).next_round(1, context)
        for t in (light, heavy)
        for context in (100, 1_000_000)
    ]
    assert [choice.draft_width for choice in tried] == [16, 16, 16, 0]
    assert tried[3].seconds == pytest.approx(0.014)


def test_a_shorter_draft_is_taken_where_it_pays():
    cells = {width: {(1, n): 0.004 + 2e-4 * width + 1e-4 * n for n in (2, 8, 16, 64)} for width in (8, 16)}
    t = cost.CostTable({}, {1: 0.01}, cells)
    assert policy.choose(1, curve(widths=(8, 16)), t, (8, 16, 64), draft_widths=(8, 16)).draft_width == 8
    assert policy.choose(1, curve(CERTAIN, (8, 16)), t, (8, 16, 64), draft_widths=(8, 16)).draft_width == 16
    # Equal in everything: the narrower one.
    same = cost.CostTable({}, {}, {width: {(1, 4): 0.004} for width in (8, 16)})
    assert policy.choose(1, curve(widths=(8, 16)), same, (4,), draft_widths=(16, 8)).draft_width == 8


@pytest.mark.parametrize("t", [None, cost.CostTable({}, {}, {}), cost.CostTable({}, {1: 0.005}, {})])
def test_without_times_every_request_gets_the_default_budget(t):
    for requests, tokens in ((1, 16), (4, 64), (5, 96), (256, 4096)):
        choice = policy.choose(requests, curve(), t, BUCKETS)
        assert (choice.draft_width, choice.tokens) == (16, tokens) and math.isnan(choice.seconds)
    # The largest bucket there is, or a plain round if none holds the roots.
    assert policy.choose(5, curve(), t, (4, 8, 12)).tokens == 12
    none = policy.choose(5, curve(), t, (4,))
    assert (none.draft_width, none.tokens, none.nodes) == (0, 5, 0)


def test_times_of_some_draft_widths_leave_the_others_out():
    t = cost.CostTable({}, {}, {8: {(1, 8): 0.004}})
    assert policy.choose(1, curve(widths=(8, 16)), t, (8, 16), draft_widths=(8, 16)).draft_width == 8


@pytest.mark.parametrize("requests, widths", [(0, (16,)), (1, ())])
def test_a_choice_of_nothing_is_refused(requests, widths):
    with pytest.raises(ValueError, match="needs a request and a draft width"):
        policy.choose(requests, curve(), table(), BUCKETS, draft_widths=widths)


def test_the_current_choice_holds_within_its_margin_alone():
    def at(better: float, current: policy.Choice) -> policy.Choice:
        t = cost.CostTable({}, {1: 0.005}, {16: {(1, 16): 0.008, (1, 64): 0.008}})
        g = np.minimum(POINTS, 3.0)
        g[POINTS > 15] = 4 * better - 1
        return policy.choose(1, curve(g), t, (16, 64), current)

    sixteen, sixty_four = policy.Choice(16, 16, 15, 4.0, 0.008), policy.Choice(16, 64, 63, 4.0, 0.008)
    assert at(1.004, sixteen) == at(1.004, sixteen) and at(1.004, sixteen).tokens == 16
    assert at(1.004, sixty_four).tokens == 64 and at(1.02, sixteen).tokens == 64
    # A gain cannot fall, so that equal rates are the least: the current one stays either way.
    assert at(1.0, sixteen).tokens == 16 and at(1.0, sixty_four).tokens == 64


WIDTHS = (4, 8, 16)


def uniform_policy(t, widths=WIDTHS, **others):
    return policy.Policy(gain.GainCurve(15, (16,)), t, calibration.Calibration(), (), widths=widths, **others)


@pytest.mark.parametrize("requests", [1, 2, 3, 7, 8, 12, 64, 100])
def test_uniform_rounds_have_as_many_nodes_for_every_request(requests):
    chosen = set()
    for per_token in (0.0, 2e-5, 1e-4, 1e-3):
        of = uniform_policy(table(per_token=per_token))
        for _ in range(40):
            choice = of.next_round(requests)
            nodes = choice.tokens // requests
            chosen.add(nodes)
            assert choice.tokens == requests * nodes and choice.nodes == requests * (nodes - 1)
            assert nodes in WIDTHS if choice.draft_width else nodes == 1
            if not choice.probe:
                rates = [
                    policy.choose(requests, of.gain, of.cost, (requests * width,), plain=False).rate for width in WIDTHS
                ]
                margins = (1 + policy.DEFAULT.mode_margin) * (1 + policy.DEFAULT.bucket_margin)
                assert choice.rate * margins >= max(rates)
    assert len(chosen) > 1


def test_a_uniform_choice_holds_when_requests_join():
    """Eight nodes are hardly better than sixteen, or the reverse: it stays as it was, for any number of requests."""
    widths = (8, 16)
    for held in widths:
        of = uniform_policy(table(), widths, plain=False)
        worth = np.interp(of.gain.points, [0, 7, 15], [0.0, 2.0, 2.0 + (0.003 if held == 8 else 0.0)])
        of.gain = gain.GainCurve(15, (16,), prior_weight=1e-30)
        of.gain.observe(1, {16: worth})
        of.current = policy.Choice(16, 4 * held, 4 * (held - 1), 12.0, 0.006)
        assert [of.next_round(requests).tokens for requests in (4, 5, 3, 9)] == [held * r for r in (4, 5, 3, 9)]


def test_without_times_uniform_rounds_have_the_default_budget():
    of = uniform_policy(None)
    assert [of.next_round(requests).tokens for requests in (1, 5, 300)] == [16, 80, 4800]


# --- Round after round.


class World:
    """Rounds with a true gain per request and true times, both noisy; what they tell arrives late."""

    DELAY = 3

    def __init__(self, times: "cost.CostTable", seed: int = 0, share: float = 1.0) -> None:
        self.truth, self.share = times, share
        self.rng = np.random.default_rng(seed)
        believed = cost.CostTable.from_json(times.to_json())
        self.policy = policy.Policy(curve(), believed, calibration.Calibration(), BUCKETS)
        self._late: deque = deque()

    def gain(self) -> np.ndarray:
        return self.share * np.array(gain.PRIOR[16])

    def rate(self, requests: int, choice: "policy.Choice") -> float:
        """The true tokens per second of a choice."""
        if choice.draft_width == 0:
            return requests / self.truth.plain_seconds(requests)
        committed = requests * (1 + float(np.interp(choice.nodes / requests, POINTS, self.gain())))
        return committed / float(self.truth.seconds(16, requests, choice.tokens))

    def best(self, requests: int) -> float:
        choices = [policy.Choice(0, requests, 0, 0.0, 0.0)]
        choices += [policy.Choice(16, t, min(t - requests, 63 * requests), 0.0, 0.0) for t in BUCKETS if t >= requests]
        return max(self.rate(requests, choice) for choice in choices)

    def round(self, requests: int) -> "policy.Choice":
        choice = self.policy.next_round(requests)
        vector = None
        if choice.draft_width:
            # Requests differ a lot from each other, rounds of many requests hardly.
            noise = self.rng.gamma(2.0, 0.5, requests).mean()
            vector = np.minimum(noise * self.gain(), CERTAIN)
            seconds = float(self.truth.seconds(16, requests, choice.tokens))
        else:
            seconds = self.truth.plain_seconds(requests)
        seconds *= math.exp(self.rng.normal(0, 0.05)) * (20 if self.rng.random() < 0.01 else 1)
        self._late.append((requests, choice, vector, seconds))
        if len(self._late) > self.DELAY:
            then, run, told, took = self._late.popleft()
            if told is not None:
                self.policy.gain.observe(then, {16: told})
            self.policy.cost.observe(run.draft_width, then, run.tokens, took)
        return choice

    def rounds(self, requests: int, count: int) -> list["policy.Choice"]:
        return [self.round(requests) for _ in range(count)]


# Drafts pay up to a few requests; at 64 a tree costs more than it brings.
DEAR = {"plain": 0.005, "plain_slope": 1e-5, "fixed": 0.0065, "per_request": 5e-5, "per_token": 1e-4}
CHEAP = {"plain": 0.005, "plain_slope": 1e-5, "fixed": 0.0065, "per_request": 5e-5, "per_token": 1e-5}


def modes(choices) -> list[int]:
    """The modes entered one after another, probes aside."""
    seen = [choice.draft_width for choice in choices if not choice.probe]
    return [mode for i, mode in enumerate(seen) if i == 0 or seen[i - 1] != mode]


@pytest.mark.parametrize("costs, at_64", [(DEAR, 0), (CHEAP, 16)])
@pytest.mark.parametrize("seed", range(5))
def test_a_load_that_jumps_settles_within_50_rounds(costs, at_64, seed):
    world = World(table(**costs), seed)
    for requests, mode in ((1, 16), (64, at_64), (1, 16)):
        world.rounds(requests, 50)
        settled = world.rounds(requests, 400)
        assert modes(settled) == [mode]
        rates = [world.rate(requests, choice) for choice in settled]
        # Probes counted; the mean time per token, since that is what throughput is.
        assert len(rates) / sum(1 / rate for rate in rates) > 0.96 * world.best(requests)


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_make_it_flap_where_both_modes_are_equal(seed):
    times = table(**DEAR)
    # A share of the recorded gain at which plain and drafting rounds are worth the same at 16 requests.
    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        probe = policy.choose(16, curve(middle * np.array(gain.PRIOR[16])), times, BUCKETS, plain=False)
        low, high = (middle, high) if probe.rate < 16 / times.plain_seconds(16) else (low, middle)
    world = World(times, seed, share=low)
    choices = world.rounds(16, 2000)
    assert len(modes(choices)) <= 4
    assert 0 < sum(choice.probe for choice in choices) <= 2000 / policy.DEFAULT.probe_first or len(modes(choices)) == 1


@pytest.mark.parametrize("requests", [1, 16])
def test_drafts_that_recover_are_noticed(requests):
    world = World(table(**DEAR), seed=1, share=0.02)
    world.rounds(requests, 600)
    assert modes(world.rounds(requests, 100)) == [0]
    world.share = 1.5
    resumed = next(
        i for i, choice in enumerate(world.rounds(requests, 2000)) if choice.draft_width and not choice.probe
    )
    assert resumed < 400
    assert modes(world.rounds(requests, 500)) == [16]


def test_probes_are_rarer_the_clearer_it_is_and_begin_anew_at_another_load():
    world = World(table(**DEAR), share=0.01)
    choices = world.rounds(64, 1000)
    at = [i for i, choice in enumerate(choices) if choice.probe]
    waits = np.diff([at[0] - 16, *at]).tolist()
    assert waits[:4] == [16, 32, 64, 128] and set(waits[4:]) == {128}
    assert all(choices[i].draft_width == 16 and choices[i].tokens >= 64 for i in at)
    again = world.rounds(16, 100)
    assert sum(choice.probe for choice in again) >= 2


def two_widths(half: float, whole: float, **others) -> "cost.CostTable":
    """As `table`, of drafts that take so long per request at half a block and at a whole one."""
    parts = [table(per_request=each, **others).to_json() for each in (half, whole)]
    cells = [{(r, t): s for r, t, s in part["drafted"]["16"]} for part in parts]
    return cost.CostTable({}, dict(parts[0]["plain"]), {8: cells[0], 16: cells[1]})


class Widths(World):
    """Rounds that draft half a block or a whole one, each with its own true gain."""

    def __init__(self, times: "cost.CostTable", shares: dict[int, float], seed: int = 0) -> None:
        super().__init__(times, seed)
        self.shares = shares
        believed = cost.CostTable.from_json(times.to_json())
        self.policy = policy.Policy(
            curve(widths=(8, 16)), believed, calibration.Calibration(), BUCKETS, draft_widths=(8, 16)
        )

    def rate(self, requests: int, choice: "policy.Choice") -> float:
        if choice.draft_width == 0:
            return requests / self.truth.plain_seconds(requests)
        width = choice.draft_width
        gained = self.shares[width] * np.array(gain.PRIOR[width])
        committed = requests * (1 + float(np.interp(choice.nodes / requests, POINTS, gained)))
        return committed / float(self.truth.seconds(width, requests, choice.tokens))

    def best_of(self, requests: int, width: int) -> float:
        totals = [t for t in BUCKETS if requests <= t <= 64 * requests]
        return max(self.rate(requests, policy.Choice(width, t, t - requests, 0.0, 0.0)) for t in totals)

    def best(self, requests: int) -> float:
        plain = requests / self.truth.plain_seconds(requests)
        return max(plain, *(self.best_of(requests, width) for width in (8, 16)))

    def round(self, requests: int) -> "policy.Choice":
        choice = self.policy.next_round(requests)
        width, told, seconds = choice.draft_width, None, self.truth.plain_seconds(requests)
        if width:
            noise = self.rng.gamma(2.0, 0.5, requests).mean()
            told = {width: np.minimum(noise * self.shares[width] * np.array(gain.PRIOR[width]), CERTAIN)}
            seconds = float(self.truth.seconds(width, requests, choice.tokens))
        seconds *= math.exp(self.rng.normal(0, 0.05))
        self._late.append((requests, choice, told, seconds))
        if len(self._late) > self.DELAY:
            then, run, vectors, took = self._late.popleft()
            if vectors is not None:
                self.policy.gain.observe(then, vectors)
            self.policy.cost.observe(run.draft_width, then, run.tokens, took)
        return choice

    def mean_rate(self, requests: int, choices: list["policy.Choice"]) -> float:
        """Tokens per second of all of them, probes counted."""
        return len(choices) / sum(1 / self.rate(requests, choice) for choice in choices)


# At 256 requests the drafter is a third of a round, and half a block costs half of that.
THIRD = {"fixed": 0.008, "per_token": 1e-5, "plain": 0.006, "plain_slope": 2e-5}


@pytest.mark.parametrize("seed", range(3))
def test_the_half_is_drafted_where_the_drafter_costs_much(seed):
    world = Widths(two_widths(1.5e-5, 3e-5, **THIRD), {8: 1.0, 16: 1.0}, seed)
    world.rounds(256, 200)
    choices = world.rounds(256, 1000)
    assert {choice.draft_width for choice in choices if not choice.probe} == {8}
    probes = [i for i, choice in enumerate(choices) if choice.probe]
    assert 2 <= len(probes) <= 1000 / (policy.DEFAULT.probe_narrow * policy.DEFAULT.probe_first)
    assert {choices[i].draft_width for i in probes} == {16}
    # What learning costs.
    assert world.mean_rate(256, choices) > 0.99 * world.best(256)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 0.9, 0.97, 1.0])
def test_probes_for_the_whole_block_cost_less_than_a_percent(share):
    """However much worse the whole block is."""
    world = Widths(two_widths(1e-5, 4e-5, **THIRD), {8: 1.0, 16: share}, seed=1)
    world.rounds(256, 300)
    choices = world.rounds(256, 2000)
    assert {choice.draft_width for choice in choices if not choice.probe} == {8} and any(c.probe for c in choices)
    assert world.mean_rate(256, choices) > 0.99 * world.mean_rate(256, [c for c in choices if not c.probe])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
def test_a_drafter_that_is_bad_at_half_its_block_drafts_the_whole(share):
    world = Widths(two_widths(1.5e-5, 3e-5, **THIRD), {8: share, 16: 1.0}, seed=2)
    world.rounds(256, 300)
    choices = world.rounds(256, 2000)
    assert {choice.draft_width for choice in choices if not choice.probe} == {16}
    assert 2 <= sum(choice.probe for choice in choices) <= 2000 / policy.DEFAULT.probe_last
    assert world.mean_rate(256, choices) > 0.99 * world.best(256)


def test_a_half_that_recovers_is_noticed():
    world = Widths(two_widths(1.5e-5, 3e-5, **THIRD), {8: 0.3, 16: 1.0}, seed=3)
    world.rounds(256, 1000)
    world.shares[8] = 1.0
    choices = world.rounds(256, 1500)
    assert {choice.draft_width for choice in choices[-300:] if not choice.probe} == {8}


def test_a_half_that_cannot_pay_is_not_tried():
    """It would be no better if its nodes were worth as much, because it takes longer."""
    world = Widths(two_widths(4e-5, 3e-5, **THIRD), {8: 0.5, 16: 1.0})
    world.rounds(256, 300)
    assert {choice.draft_width for choice in world.rounds(256, 1000)} == {16}


@pytest.mark.parametrize("seed", range(3))
def test_traffic_that_changes_is_followed_at_both_widths(seed):
    """Drafts that become worth little and then much again: neither width is left behind."""
    world = Widths(two_widths(1.5e-5, 3e-5, **THIRD), {8: 1.0, 16: 1.0}, seed)
    for share in (1.0, 0.3, 1.0, 0.1, 1.2):
        world.shares = {8: share, 16: share}
        world.rounds(256, 600)
        choices = world.rounds(256, 200)
        assert world.mean_rate(256, choices) > 0.97 * world.best(256)


class Texts(Widths):
    """One request after another, each with a text of its own: drafts are worth more or less for many rounds."""

    ROUNDS = 25

    def __init__(self, times: "cost.CostTable", seed: int) -> None:
        super().__init__(times, {8: 1.0, 16: 1.0}, seed)
        self._done = 0

    def round(self, requests: int) -> "policy.Choice":
        if self._done % self.ROUNDS == 0:
            share = self.rng.uniform(0.3, 1.7)
            self.shares = {8: share, 16: share}
        self._done += 1
        return super().round(requests)


@pytest.mark.parametrize("seed", range(4))
def test_texts_that_differ_do_not_speak_for_the_half(seed):
    """Half a block takes 1 % less and gives 3 % less; texts differ by more than that from each other."""
    world = Texts(two_widths(1e-6, 8e-5, **THIRD), seed)
    world.rounds(1, 200)
    choices = world.rounds(1, 2000)
    assert np.mean([choice.draft_width == 8 for choice in choices]) < 0.02


@pytest.mark.parametrize("own", [8, 16])
def test_a_whole_block_is_worth_at_least_its_half(own):
    c, truth = curve(widths=(8, 16)), {width: np.array(gain.PRIOR[width]) for width in (8, 16)}
    for _ in range(100):
        c.observe(64, {16: truth[16]})
    # Their own texts were easier, or harder.
    for _ in range(100):
        c.observe(64, {own: 1.3 * truth[own]})
    wide, narrow = c.at_least(1, POINTS, 16), c.at_least(1, POINTS, 8)
    assert narrow == pytest.approx(c.at(1, POINTS, 8)) and (wide >= c.at(1, POINTS, 16)).all()
    assert (wide >= narrow * truth[16] / np.maximum(truth[8], 1e-9) - 1e-9).all()
    assert (wide <= np.minimum(POINTS, 15.0) + 1e-9).all()
    if own == 8:
        assert (wide > c.at(1, POINTS, 16))[5:].all()


def test_the_same_rounds_give_the_same_choices():
    a, b = (World(table(**DEAR), seed=3) for _ in range(2))
    for requests in (1, 64, 16, 1):
        assert a.rounds(requests, 100) == b.rounds(requests, 100)


def test_times_may_come_later_and_batches_may_outgrow_the_buckets():
    p = policy.Policy(curve(), None, calibration.Calibration(), BUCKETS)
    assert [p.next_round(4).tokens for _ in range(100)] == [64] * 100
    p.cost = table()
    assert p.next_round(4).tokens == 256
    small = policy.Policy(curve(), table(), calibration.Calibration(), (4, 8))
    assert {small.next_round(9).draft_width for _ in range(300)} == {0}


def test_a_context_weighs_in():
    t = cost.CostTable({}, {1: 0.1}, {16: {(1, 16): 0.006, (1, 64): 0.012}}, {16: 1e-6}, context_base=128)
    tokens = [
        policy.Policy(curve(), t, calibration.Calibration(), (16, 64)).next_round(1, context).tokens
        for context in (128, 100_000)
    ]
    assert tokens == [16, 64]


def test_temperatures_weigh_in():
    p = policy.Policy(curve(), table(per_token=1e-4, plain=0.004), calibration.Calibration(), BUCKETS)
    greedy = p.next_round(8, classes={"greedy": 8})
    for _ in range(300):
        p.calibration.observe("high", 100.0, 20.0)
    assert p.next_round(8, classes={"high": 8}).nodes < greedy.nodes
