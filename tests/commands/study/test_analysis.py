"""Paired differences against scipy, brute force and simulation."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lightning_nm.commands.study.analysis import (
    Interval,
    best_settings,
    by_seed,
    compare,
    smallest_detectable,
)

VALUES = st.floats(-1e3, 1e3).map(lambda value: round(value, 3))


def row(variant, seed, value, state="complete", **more):
    return {"variant": variant, "seed": seed, "state": state, "m": value, **more}


def rows(variant, values):
    return [row(variant, seed, value) for seed, value in enumerate(values)]


@given(st.lists(VALUES, min_size=2, max_size=12))
def test_the_interval_is_scipys(values):
    found = Interval.of(values)
    assert found.mean == pytest.approx(statistics.fmean(values))
    if found.sd > 0:
        low, high = stats.t.interval(0.95, len(values) - 1, found.mean, stats.sem(values))
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6, abs=1e-6)
    else:
        assert (found.low, found.high) == (found.mean, found.mean)


def test_the_verdict_is_that_of_the_paired_t_test():
    generator = np.random.default_rng(0)
    seen = set()
    for _ in range(200):
        a, b = generator.normal(size=(2, 6))
        a = a + generator.choice([-1.5, 0.0, 1.5])
        found = compare(rows("a", a) + rows("b", b), "m", "a", "b")
        p = stats.ttest_rel(a, b).pvalue
        assert found.verdict == (
            "undecided" if p >= 0.05 else "better" if a.mean() < b.mean() else "worse"
        )
        opposite = compare(rows("a", a) + rows("b", b), "m", "a", "b", minimize=False)
        assert {found.verdict, opposite.verdict} in ({"undecided"}, {"better", "worse"})
        seen.add(found.verdict)
    assert seen == {"better", "worse", "undecided"}


@given(st.data())
def test_pairs_are_the_seeds_that_both_completed(data):
    values = {
        name: data.draw(st.dictionaries(st.integers(0, 8), VALUES), label=name) for name in "ab"
    }
    states = st.sampled_from(["complete", "failed", "running"])
    given_rows = [
        row(n, seed, value, data.draw(states))
        for n, found in values.items()
        for seed, value in found.items()
    ]
    shuffled = data.draw(st.permutations(given_rows))
    found = compare(shuffled, "m", "a", "b")
    complete = {(r["variant"], r["seed"]): r["m"] for r in given_rows if r["state"] == "complete"}
    expected = {
        s: complete["a", s] - complete["b", s]
        for s in range(9)
        if ("a", s) in complete and ("b", s) in complete
    }
    assert dict(zip(found.seeds, found.differences, strict=True)) == expected
    back = compare(shuffled, "m", "b", "a")
    assert back.differences == tuple(-difference for difference in found.differences)
    assert back.detectable == pytest.approx(found.detectable, nan_ok=True)
    if len(expected) < 2:
        assert found.verdict == "undecided"
        assert math.isnan(found.detectable)


@pytest.mark.parametrize("count", [2, 3, 6, 20])
@pytest.mark.parametrize("sd", [0.3, 2.0])
def test_the_smallest_detectable_difference_is_seen_in_80_per_cent(count, sd):
    generator = np.random.default_rng(count)
    differences = smallest_detectable(sd, count) + sd * generator.standard_normal((100_000, count))
    seen = stats.ttest_1samp(differences, 0, axis=1).pvalue < 0.05
    assert seen.mean() == pytest.approx(0.8, abs=0.006)  # 5 standard errors


def test_one_pair_and_equal_pairs():
    assert compare(rows("a", [1.0]) + rows("b", [2.0]), "m", "a", "b").verdict == "undecided"
    equal = compare(rows("a", [1.0, 2.0]) + rows("b", [1.0, 2.0]), "m", "a", "b")
    assert (equal.verdict, equal.detectable) == ("undecided", 0.0)
    assert compare([], "m", "a", "b").difference is None


def test_failed_rows_have_no_values():
    found = by_seed([row("a", 0, 1.0), {"variant": "a", "seed": 1, "state": "failed"}], "m", "a")
    assert found == {0: 1.0}


def test_the_best_settings_are_those_of_the_best_mean_over_all_seeds():
    found = [row("a", seed, 3.0, trial=0, lr=0.1) for seed in (0, 1)]
    found += [row("a", seed, value, trial=1, lr=0.2) for seed, value in ((0, 1.0), (1, 4.0))]
    found += [row("a", 0, 0.0, trial=2, lr=0.3), row("a", 1, None, "failed", trial=2, lr=0.3)]
    assert {r["lr"] for r in best_settings(found, "m", ["lr"])} == {0.2}
    assert {r["lr"] for r in best_settings(found, "m", ["lr"], minimize=False)} == {0.1}
