import copy
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.pattern import NMPattern


@pytest.mark.parametrize(
    "value", ["2:4", " 2 : 4 ", {"n": 2, "m": 4}, {"m": 4, "n": 2}, 124, NMPattern(2, 4)]
)
def test_every_spelling(value):
    assert NMPattern.parse(value) == NMPattern(n=2, m=4)


@pytest.mark.parametrize(
    ("number", "text"), [(124, "2:4"), (76, "1:16"), (496, "8:16"), (992, "16:32"), (62, "1:2")]
)
def test_what_yaml_makes_of_it(number, text):
    assert str(NMPattern.parse(number)) == text


@given(m=st.integers(2, 1000), data=st.data())
def test_the_text_comes_back(m, data):
    pattern = NMPattern(data.draw(st.integers(1, m - 1)), m)
    assert NMPattern.parse(str(pattern)) == pattern
    if m < 60:
        assert NMPattern.parse(60 * pattern.n + pattern.m) == pattern


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("5:4", "prunes nothing.*exclude"),
        ("4:4", "prunes nothing"),
        ("2:0", "prunes nothing"),
        ("0:4", "keeps nothing.*'1:4'"),
        (120, "prunes nothing"),  # 2:0
        (59, "cannot read 59"),
        (-124, "cannot read -124"),
        ("2-4", "cannot read '2-4'.*for example '2:4'"),
        ("2:4:8", "cannot read"),
        ("-2:4", "cannot read"),
        ("", "cannot read"),
        (True, "cannot read True"),
        (3.5, "cannot read 3.5"),
        (None, "cannot read None"),
        ((2, 4), "cannot read"),
        ({"n": 2}, "exactly the keys 'n' and 'm'"),
        ({"n": 2, "m": 4, "k": 1}, "exactly the keys"),
        ({"n": "2", "m": 4}, "n='2' is not an integer"),
        ({"n": 2, "m": 4.0}, "m=4.0 is not an integer"),
        ({"n": True, "m": 4}, "n=True is not an integer"),
    ],
)
def test_errors_say_what_to_write(value, message):
    with pytest.raises(ValueError, match=message):
        NMPattern.parse(value)


def test_a_value():
    pattern = NMPattern(2, 4)
    assert pattern.density == 0.5
    assert hash(pattern) == hash(NMPattern.parse("2:4"))
    assert len({pattern, NMPattern(2, 4), NMPattern(1, 4)}) == 2
    assert pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern) == pattern
    with pytest.raises(dataclasses.FrozenInstanceError):
        pattern.n = 1
