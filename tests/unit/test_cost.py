"""The cost table: interpolation, corrections from timings, and what is on disk."""

import json
import logging
import math

import numpy as np
import pytest
from _load import load
from hypothesis import given, settings
from hypothesis import strategies as st

cost = load("ddtree_cost", "python/sglang/srt/speculative/ddtree_cost.py")

ME = cost.identity("a/model", "a GPU", 2, sglang="0.5.17", torch="2.11")
WIDTHS, REQUESTS = (2, 4, 16, 64), (1, 4, 16)


def affine(requests: float, tokens: float) -> float:
    return 4e-3 + 2e-5 * requests + 1e-5 * tokens


def table(drafted=affine, **others) -> "cost.CostTable":
    cells = {(r, r * w): drafted(r, r * w) for r in REQUESTS for w in WIDTHS}
    return cost.CostTable(ME, {1: 2e-3, 4: 2.2e-3, 16: 3e-3}, {16: cells}, **others)


def steps(requests: float, tokens: float) -> float:
    return 4e-3 + 1e-3 * math.ceil(tokens / 128)


positive = st.floats(1e-4, 1.0)


@given(st.lists(positive, min_size=1, max_size=12))
def test_isotonic_is_the_nearest_monotone_sequence(values):
    fitted = cost.isotonic(np.array(values))
    assert len(fitted) == len(values) and (np.diff(fitted) >= 0).all()
    # Its block means stay, and what was monotone is left alone.
    assert fitted.sum() == pytest.approx(sum(values))
    assert cost.isotonic(np.sort(values)).tolist() == sorted(values)
    # The optimum by min-max of means, from plain loops.
    n = len(values)
    oracle = [max(min(float(np.mean(values[a : b + 1])) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]
    assert fitted == pytest.approx(np.array(oracle))


def test_measured_points_come_back_and_a_plane_is_met_exactly_between_them():
    t = table()
    for r in REQUESTS:
        for w in WIDTHS:
            assert float(t.seconds(16, r, r * w)) == pytest.approx(affine(r, r * w))
    for r, tokens in ((2, 12), (3, 100), (9, 333), (16, 200)):
        assert float(t.seconds(16, r, tokens)) == pytest.approx(affine(r, tokens))
    assert t.plain_seconds(1) == pytest.approx(2e-3) and t.plain_seconds(10) == pytest.approx(2.6e-3)


def test_a_step_stays_a_step():
    t = table(steps)
    assert float(t.seconds(16, 16, 64)) == float(t.seconds(16, 16, 32)) < float(t.seconds(16, 16, 256))


def test_beyond_what_was_measured():
    t = table()
    # Twice the largest batch and its tokens: twice its time. Fewer tokens than measured: as the fewest.
    assert float(t.seconds(16, 32, 512)) == pytest.approx(2 * affine(16, 256))
    assert t.plain_seconds(32) == pytest.approx(6e-3)
    assert float(t.seconds(16, 4, 4)) == pytest.approx(affine(4, 8))
    assert float(t.seconds(16, 1, 128)) == pytest.approx(2 * affine(1, 64))


@given(
    st.lists(positive, min_size=12, max_size=12),
    st.integers(1, 300),
    st.lists(st.integers(1, 20000), min_size=2, max_size=20),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 2000), positive), max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_never_cheaper_for_more_tokens_whatever_was_measured_or_observed(times, requests, tokens, observed):
    cells = {(r, r * w): times[len(WIDTHS) * i + j] for i, r in enumerate(REQUESTS) for j, w in enumerate(WIDTHS)}
    t = cost.CostTable(ME, {}, {16: cells})
    for r, n, seconds in observed:
        t.observe(16, r, n, seconds)
    seconds = t.seconds(16, requests, np.array(sorted(tokens)))
    assert (seconds > 0).all() and (np.diff(seconds) >= -1e-12).all()


def test_context_adds_per_token_beyond_the_measured_prompts():
    t = table(context={0: 1e-8, 16: 3e-8}, context_base=128)
    assert float(t.seconds(16, 4, 64, 4 * 128)) == float(t.seconds(16, 4, 64)) == pytest.approx(affine(4, 64))
    assert float(t.seconds(16, 4, 64, 4 * 1128)) == pytest.approx(affine(4, 64) + 4000 * 3e-8)
    assert t.plain_seconds(4, 4 * 1128) == pytest.approx(2.2e-3 + 4000 * 1e-8)


# --- Corrections.


def test_observations_move_the_table_slowly_towards_the_truth():
    t, before = table(), float(table().seconds(16, 4, 64))
    assert t.observe(16, 4, 64, 1.2 * before)
    assert 1 < float(t.seconds(16, 4, 64)) / before < 1.02
    for _ in range(200):
        t.observe(16, 4, 64, 1.2 * before)
    assert float(t.seconds(16, 4, 64)) == pytest.approx(1.2 * before, rel=0.01)
    # A part is taken for the machine's: everything became dearer, but less so.
    elsewhere = float(t.seconds(16, 16, 32)) / affine(16, 32)
    assert 1.02 < elsewhere < 1.15
    assert 1.02 < t.plain_seconds(16) / 3e-3 < 1.15


def test_a_round_that_stands_for_others_counts_for_some_of_them():
    def after(rounds: int, **others: int) -> float:
        t = table()
        for _ in range(rounds):
            assert t.observe(16, 4, 64, 1.1 * affine(4, 64), **others)
        return float(t.seconds(16, 4, 64)) / affine(4, 64)

    assert 1 < after(1) < after(1, stands_for=2) < after(1, stands_for=3) == after(1, stands_for=8)
    assert after(1, stands_for=3) == pytest.approx(after(3), rel=0.01)


def test_a_point_alone_is_corrected_once_others_contradict():
    t = table()
    for _ in range(400):
        t.observe(16, 4, 64, 1.3 * affine(4, 64))
        t.observe(16, 16, 256, affine(16, 256))
        t.observe(0, 16, 16, 3e-3)
    assert float(t.seconds(16, 4, 64)) == pytest.approx(1.3 * affine(4, 64), rel=0.02)
    assert float(t.seconds(16, 16, 256)) == pytest.approx(affine(16, 256), rel=0.02)
    assert t.plain_seconds(16) == pytest.approx(3e-3, rel=0.02)


def test_noise_and_outliers_hardly_matter():
    t, rng = table(), np.random.default_rng(0)
    for i in range(500):
        slow = 30.0 if i % 10 == 0 else 1.0
        assert t.observe(16, 4, 64, slow * affine(4, 64) * math.exp(rng.normal(0, 0.05))) == (slow == 1)
    assert float(t.seconds(16, 4, 64)) == pytest.approx(affine(4, 64), rel=0.02)


def test_a_machine_that_stays_three_times_slower_is_believed_after_a_while():
    t = table()
    counted = [t.observe(16, 4, 64, 3 * affine(4, 64)) for _ in range(400)]
    assert not any(counted[:15]) and all(counted[15:])
    assert float(t.seconds(16, 4, 64)) == pytest.approx(3 * affine(4, 64), rel=0.05)


def test_what_the_host_takes_is_a_bound_for_every_round_of_so_many_requests():
    t = table()
    for _ in range(30):
        t.observe(0, 16, 16, 20e-3, host_bound=True)
    # Whatever is verified; but what the device is known to take longer for stays.
    assert t.plain_seconds(16) == pytest.approx(20e-3) and float(t.seconds(16, 16, 32)) == pytest.approx(20e-3)
    big = float(table().seconds(16, 16, 10_000))
    assert big > 20e-3 and float(t.seconds(16, 16, 10_000)) == pytest.approx(big)
    # More requests take the host no less; of fewer nothing is known.
    assert t.plain_seconds(32) >= 20e-3 and t.plain_seconds(4) < 20e-3
    # Drafting rounds were seen: a plain one may be shorter, but not by much.
    only = table()
    only.observe(16, 16, 64, 15e-3, host_bound=True)
    assert only.plain_seconds(16) == pytest.approx(9e-3)
    # A round that was shorter refutes it, whatever it was.
    t.observe(16, 32, 32, 5e-3)
    assert t.plain_seconds(16) == pytest.approx(5e-3, rel=0.1)


def test_a_pause_is_not_taken_for_the_hosts_time():
    t = table()
    before = t.plain_seconds(16)
    assert not t.observe(0, 16, 16, 10.0, host_bound=True)
    assert t.plain_seconds(16) == before


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_are_ignored(seconds):
    t = table()
    assert not t.observe(16, 4, 64, seconds) and not t.observe(0, 4, 4, seconds)
    assert not t.observe(8, 4, 64, 1e-3) and not cost.CostTable(ME, {}, {}).observe(0, 1, 1, 1e-3)
    assert float(t.seconds(16, 4, 64)) == pytest.approx(affine(4, 64))


# What 4 requests of 64 tokens take, and what their contexts add to it, mostly and hardly.
LONG, SHORT = 4 * 100_000, 4 * 100


def with_context(slope: float) -> "cost.CostTable":
    return table(context={0: slope, 16: slope})


def test_a_long_context_is_not_taken_for_a_slower_table():
    t = with_context(4e-8)
    for _ in range(300):
        assert t.observe(16, 4, 64, affine(4, 64) + 4e-8 * LONG, LONG)
        assert t.observe(0, 4, 4, 2.2e-3 + 4e-8 * LONG, LONG)
    assert float(t.seconds(16, 4, 64, SHORT)) == pytest.approx(affine(4, 64) + 4e-8 * SHORT)
    assert t.plain_seconds(4) == pytest.approx(2.2e-3)
    # The same times without a word about contexts would have been believed of the table.
    deaf = with_context(4e-8)
    for _ in range(300):
        deaf.observe(16, 4, 64, affine(4, 64) + 4e-8 * LONG)
    assert float(deaf.seconds(16, 4, 64)) > 1.5 * affine(4, 64)


def test_what_a_context_adds_is_corrected_where_it_is_most_of_the_round():
    t = with_context(4e-8)
    for _ in range(400):
        assert t.observe(16, 4, 64, affine(4, 64) + 6e-8 * LONG, LONG)
    assert float(t.seconds(16, 4, 64, LONG)) == pytest.approx(affine(4, 64) + 6e-8 * LONG, rel=0.02)
    # The table took its share of it, until rounds with short contexts tell.
    assert 1 < float(t.seconds(16, 4, 64)) / affine(4, 64) < 1.25
    for _ in range(400):
        t.observe(16, 4, 64, affine(4, 64) + 6e-8 * LONG, LONG)
        t.observe(16, 4, 64, affine(4, 64) + 6e-8 * SHORT, SHORT)
    for context in (SHORT, LONG):
        assert float(t.seconds(16, 4, 64, context)) == pytest.approx(affine(4, 64) + 6e-8 * context, rel=0.02)
    # What was measured goes to disk.
    assert t.context == {0: 4e-8, 16: 4e-8}


def test_a_context_is_corrected_by_no_more_than_a_factor_of_two():
    t = with_context(4e-8)
    for _ in range(2000):
        t.observe(16, 4, 64, 40 * 4e-8 * LONG, LONG)
    assert t._context(16, 4, LONG) == pytest.approx(2 * 4e-8 * LONG)
    assert t._context(16, 4, 0.0) == 0.0


# --- On disk.


def test_round_trip_keeps_what_was_measured_and_not_what_was_corrected(tmp_path):
    t = table(context={16: 3e-8}, context_base=128)
    path = cost.cache_path(tmp_path / "not/yet/there", ME)
    t.observe(16, 4, 64, 1.3 * affine(4, 64))
    t.save(path)
    again = cost.load(path, ME)
    assert again is not None and again.to_json() == t.to_json()
    assert float(again.seconds(16, 4, 64, 4 * 200)) == pytest.approx(affine(4, 64) + 4 * 72 * 3e-8)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_every_identity_has_its_own_file(tmp_path):
    other = cost.identity("a/model", "a GPU", 4, sglang="0.5.17", torch="2.11")
    assert cost.cache_path(tmp_path, ME) != cost.cache_path(tmp_path, other)
    assert cost.cache_path(tmp_path, ME) == cost.cache_path(tmp_path, dict(reversed(ME.items())))


def test_no_table_is_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        assert cost.load(tmp_path / "none.json", ME) is None
    assert "no cost table" in caplog.text


def test_a_stale_table_is_refused_and_says_what_differs(tmp_path, caplog):
    table().save(tmp_path / "table.json")
    assert cost.load(tmp_path / "table.json", {**ME, "sglang": "0.5.18"}) is None
    assert "is stale: sglang '0.5.17', now '0.5.18'." in caplog.text


def _broken(**changes) -> str:
    return json.dumps({**table().to_json(), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "\x00\x01",
        _broken(format=0),
        _broken(plain=[[1, -2e-3]]),
        _broken(plain=[[1, math.nan]]),
        _broken(plain=[[math.inf, 2e-3]]),
        _broken(plain=[[0, 2e-3]]),
        _broken(plain=3),
        _broken(drafted={"16": [[1, 2]]}),
        _broken(drafted={"x": []}),
        _broken(drafted={"1": [[1, 2, 3e-3]]}),
        _broken(drafted=[]),
        _broken(context={"16": -1.0}),
        table().save.__doc__,
        json.dumps(table().to_json())[:-40],
    ],
)
def test_a_corrupt_table_is_measured_anew_and_replaced(tmp_path, caplog, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    measured = table()
    assert cost.load_or_measure(path, ME, lambda: measured) is measured
    assert "cannot be read" in caplog.text

    def never() -> None:
        raise AssertionError("the new table is on disk")

    assert cost.load_or_measure(path, ME, never).to_json() == measured.to_json()


def test_a_table_on_disk_that_knows_no_context_says_so(tmp_path, caplog):
    def never():
        raise AssertionError("a table is on disk")

    caplog.set_level(logging.INFO)
    for name, context in (("with", {0: 1e-9}), ("without", None)):
        table(context=context).save(tmp_path / name)
        cost.load_or_measure(tmp_path / name, ME, never)
    said = [record.getMessage() for record in caplog.records]
    assert ["knows no context's cost" in line for line in said] == [False, True]


def test_bytes_that_are_no_text_are_corrupt(tmp_path, caplog):
    (tmp_path / "table.json").write_bytes(b"\xff\xfe\x80")
    assert cost.load(tmp_path / "table.json", ME) is None
    assert "cannot be read" in caplog.text


def test_what_a_busy_device_took_is_served_and_not_kept(tmp_path, caplog):
    path = tmp_path / "table.json"
    measured = table()
    measured.quiet = False
    assert cost.load_or_measure(path, ME, lambda: measured) is measured
    assert not path.exists() and "something else ran" in caplog.text


def test_a_disk_that_cannot_be_written_costs_the_cache_alone(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    measured = table()
    assert cost.load_or_measure(tmp_path / "file" / "table.json", ME, lambda: measured) is measured
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    "plain, drafted, named",
    [
        ({1: 0.0}, {}, "seconds must be positive"),
        ({0: 1.0}, {}, "at least 1"),
        ({}, {16: {(1, 0): 1.0}}, "at least 1"),
        ({}, {1: {(1, 1): 1.0}}, "draft width"),
    ],
)
def test_what_is_no_table_is_refused(plain, drafted, named):
    with pytest.raises(ValueError, match=named):
        cost.CostTable(ME, plain, drafted)


def test_an_empty_table_has_nothing_to_offer():
    t = cost.CostTable(ME, {}, {16: {}})
    assert not t.has_plain and t.draft_widths == ()
    with pytest.raises(KeyError):
        t.seconds(16, 1, 16)
