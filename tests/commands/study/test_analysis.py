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
    compare,
    report,
    sections,
    write,
)
from lightning_nm.commands.study.spec import Spec

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
        opposite = compare(rows("a", a) + rows("b", b), "m", "a", "b", "maximize")
        assert {found.verdict, opposite.verdict} in ({"undecided"}, {"better", "worse"})
        seen.add(found.verdict)
    assert seen == {"better", "worse", "undecided"}


def test_pairs_are_the_seeds_that_both_completed():
    own = [row("a", seed, float(seed**2)) for seed in (3, 1, 2, 0)]
    other = [row("b", 0, 9.0, "failed"), *(row("b", seed, 1.0) for seed in (1, 2, 4))]
    (section,) = sections(spec_of(baselines=["b", "a"]), own + other)
    found = [each.differences for each in section.comparisons]
    assert found == [{1: 0.0, 2: 3.0}, {1: 0.0, 2: -3.0}]


@pytest.mark.parametrize(
    ("pairs", "mean", "detectable"),
    [([], math.nan, math.nan), ([1.0], 1.0, math.nan), ([0.0, 0.0], 0.0, 0.0)],
)
def test_no_pair_one_pair_and_equal_pairs_are_undecided(pairs, mean, detectable):
    found = compare(rows("a", pairs) + rows("b", [0.0] * len(pairs)), "m", "a", "b")
    assert found.verdict == "undecided"
    seen = (found.difference.mean, found.difference.detectable)
    assert seen == pytest.approx((mean, detectable), nan_ok=True)


def spec_of(**changes):
    return Spec("s", {}, "m", {"a": {}, "b": {"x": 1}}, **changes)


@pytest.mark.parametrize(("direction", "lr"), [("minimize", 0.2), ("maximize", 0.1)])
def test_the_best_settings_are_those_of_the_best_mean_over_all_seeds(direction, lr):
    found = [row("a", seed, 3.0, trial=0, lr=0.1) for seed in (0, 1)]
    found += [row("a", seed, value, trial=1, lr=0.2) for seed, value in ((0, 1.0), (1, 4.0))]
    found += [row("a", 0, 0.0, trial=2, lr=0.3), row("a", 1, None, "failed", trial=2, lr=0.3)]
    (section,) = sections(
        spec_of(search={"lr": [0.1]}, seeds=[0, 1], direction=direction, sampler="tpe", trials=4),
        found,
    )
    assert [each["lr"] for each in section.rows] == [lr, lr]


FACTS = {"torch": "2", "lightning_nm": "1", "threads": 1, "device": "cpu", "fit_seconds": 1.0}


def test_a_report_says_what_a_reader_must_know():
    spec = spec_of(baselines=["b"], grid={"pattern": ["1:4", "2:4"]}, seeds=[0, 1, 2])
    found = [
        row("a", seed, 1.25 + seed, pattern="2:4", flops_paper=0.5, **FACTS) for seed in range(3)
    ]
    found += [
        row("b", seed, 1.1 * seed, pattern="2:4", **FACTS | {"threads": 2}) for seed in range(2)
    ]
    found.append(
        {"variant": "b", "pattern": "2:4", "seed": 2, "state": "failed", "error": "it|broke"}
    )
    found.append({"variant": "a", "pattern": "1:4", "seed": 0, "state": "missing"})
    text = report(spec, found, sections(spec, found))
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["a", "3", "2.25", "[-0.23, 4.73]", "-", "-", "0.500", "1.0"] in cells
    assert ["b", "2", "0.55", "[-6.44, 7.54]", "-", "-", "-", "1.0"] in cells
    assert ["a - b", "2", "+1.20", "[+0.56, +1.84]", "0.82", "worse", "-", "-"] in cells
    assert ["a - b", "0", "-", "[-, -]", "-", "undecided", "-"] in cells
    assert "Not finished: 1 of 7" in text
    assert "Failed: variant b, pattern 2:4, seed 2, state failed, error it|broke" in text
    assert "- Ran with threads 1 and 2." in text


def test_files_of_a_report(tmp_path):
    spec = spec_of(baselines=["a", "b"], seeds=[0])
    found = [
        {"variant": "b", "seed": 0, "state": "failed", "error": "e"},
        row("a", 0, 1.0, **FACTS),
    ]
    text = write(tmp_path, spec, found)
    assert (tmp_path / "report.md").read_text() == text
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "results.csv").read_text().splitlines() == [
        "variant,seed,state,error,m,torch,lightning_nm,threads,device,fit_seconds",
        "b,0,failed,e,,,,,,",
        "a,0,complete,,1.0,2,1,1,cpu,1.0",
    ]
