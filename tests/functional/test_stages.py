"""Schedules: which stage each training step has, against a search over the definition, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.schedule import DENSE, FINAL, Schedule, ScheduleSpec, stage_at

RAMPS = st.lists(st.integers(2, 15), unique=True, max_size=4).map(
    lambda counts: tuple(NMPattern(n, 16) for n in sorted(counts, reverse=True))
)


@given(RAMPS, st.integers(0, 20), st.integers(0, 20), st.integers(60, 200))
def test_equal_shares(ramp, start, end, steps):
    schedule = Schedule(dense_start=start, ramp=ramp, dense_end=end)
    stages = schedule.stages(steps)
    of_steps = [stage_at(stages, clock) for clock in range(steps)]
    assert of_steps[:start] == [DENSE] * start
    assert of_steps[steps - end :] == [DENSE] * end
    masked = of_steps[start : steps - end]
    names = [*map(str, ramp), FINAL]
    assert list(dict.fromkeys(masked)) == names
    lengths = [masked.count(name) for name in names]
    assert max(lengths) - min(lengths) <= 1


@given(RAMPS, st.data(), st.integers(60, 200))
def test_given_ends_as_steps_and_as_shares(ramp, data, steps):
    ends = data.draw(
        st.lists(st.integers(1, steps - 1), unique=True, min_size=len(ramp), max_size=len(ramp))
    )
    ends.sort()
    as_steps = Schedule(ramp=ramp, ramp_ends=tuple(ends)).stages(steps)
    # A step needs no planned length.
    assert Schedule(ramp=ramp, ramp_ends=tuple(ends)).stages(None) == as_steps
    shares = tuple(end / steps for end in ends)
    assert Schedule(ramp=ramp, ramp_ends=shares).stages(steps) == as_steps
    for clock in range(steps):
        passed = sum(end <= clock for end in ends)
        assert stage_at(as_steps, clock) == [*map(str, ramp), FINAL][passed]


def test_a_method_with_dense_phases_of_its_own_has_stages_between_them():
    schedule = Schedule(dense_start=5, ramp=(NMPattern(2, 4),), dense_end=10)
    assert schedule.stages(100, (20, 80)) == ((0, "2:4"), (50, FINAL))
    assert Schedule(dense_start=5).stages(100, (5,)) == ()


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ([0.1], TypeError, r"schedule=\[0.1\] must be a mapping with the keys dense_start, ramp"),
        ({"dense_strat": 3}, ValueError, "no key 'dense_strat' .*; did you mean 'dense_start'"),
        ({"dense_start": "3"}, TypeError, "dense_start='3' must be an integer"),
        ({"dense_end": 1.5}, ValueError, r"dense_end=1.5 is not a fraction"),
        ({"dense_start": 0.6, "dense_end": 0.4}, ValueError, "make the whole training dense"),
        ({"ramp": "8:16"}, TypeError, "ramp='8:16' must be a list"),
        ({"ramp": ["8:16", "9:16"]}, ValueError, "from 8:16 to 9:16.*must keep fewer"),
        ({"ramp": ["8:16", "2:8"]}, ValueError, "from 8:16 to 2:8.*blocks of the same length"),
        ({"ramp": ["8:16"], "ramp_ends": [3, 5]}, ValueError, "1 patterns.*2 moments"),
        ({"ramp": ["8:16"], "ramp_ends": [True]}, TypeError, "ramp_ends=True must be"),
        ({"ramp": ["8:16", "4:16"], "ramp_ends": [9, 5]}, ValueError, r"=\[9, 5\] must increase"),
        ({"ramp": ["8:16", "4:16"], "ramp_ends": [0.5, 0.5]}, ValueError, "must increase"),
        ({"ramp": ["16:16"]}, ValueError, "ramp has '16:16'.*dense phase.*is `dense_start`"),
    ],
)
def test_what_is_refused_at_once(spec, error, words):
    with pytest.raises(error, match=words):
        Schedule.parse(spec)


@pytest.mark.parametrize(
    ("spec", "steps", "words"),
    [
        ({"ramp": ["8:16"]}, None, "number is not known: give ramp_ends as integers"),
        ({"ramp": ["8:16"], "ramp_ends": [0.5]}, None, "ramp_ends=0.5 is a fraction"),
        ({"dense_end": 5}, None, "leave dense_end out"),
        ({"ramp": ["8:16", "4:16"]}, 2, "leaves a pattern no step"),
        ({"ramp": ["8:16", "4:16"], "ramp_ends": [5, 0.5]}, 10, "no step.*use other moments"),
        ({"ramp": ["8:16"], "ramp_ends": [3], "dense_start": 4}, 10, "masks come at step 4"),
        ({"ramp": ["8:16"], "ramp_ends": [8], "dense_end": 3}, 10, "ends at step 7"),
        ({"dense_start": 12}, 10, "would never be sparse"),
    ],
)
def test_what_does_not_fit_the_training_is_refused(spec, steps, words):
    with pytest.raises(ValueError, match=words):
        Schedule.parse(spec).stages(steps)


def test_an_empty_schedule_is_none():
    assert Schedule.parse(None) is Schedule.parse({}) is Schedule.parse({"ramp": []}) is None
    assert set(ScheduleSpec.__annotations__) == set(Schedule.__dataclass_fields__)
