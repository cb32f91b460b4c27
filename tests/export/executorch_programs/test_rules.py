"""Which weights an Ethos-U85 stores as 2:4, by shape, by pattern and by value; test_ethos_u85.py asks the compiler."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_nm.export.executorch.targets import (
    fits_two_of_four,
    is_depthwise,
    reason_of_layer,
    reason_of_weight,
)
from lightning_nm.functional.pattern import NMPattern


def densest(pattern, start):
    """The most nonzeros that four entries from `start` on can hold."""
    entries = range(start, start + 4)
    blocks = {entry // pattern.m for entry in entries}
    return sum(
        min(pattern.n, sum(entry // pattern.m == block for entry in entries)) for block in blocks
    )


@pytest.mark.parametrize("m", range(2, 17))
def test_patterns_by_their_densest_block_of_four(m):
    for n in range(1, m):
        pattern = NMPattern(n, m)
        starts = range(0, math.lcm(4, m), 4)
        expected = max(densest(pattern, start) for start in starts) <= 2
        assert fits_two_of_four(pattern) == expected, pattern


@given(st.data())
def test_weights_by_counting(data):
    out, depth, taps = (data.draw(st.integers(1, top)) for top in (3, 9, 2))
    values = st.sampled_from([0, 0, 1, -127, 5])
    entries = data.draw(st.lists(values, min_size=out * depth * taps, max_size=out * depth * taps))
    weight = torch.tensor(entries, dtype=torch.int8).reshape(out, depth, taps)
    faults = 0
    for row in range(out):
        for tap in range(taps):
            for start in range(0, depth, 4):
                block = [
                    int(weight[row, i, tap]) if i < depth else 0 for i in range(start, start + 4)
                ]
                faults += block.count(0) < 2
    reason = reason_of_weight(weight)
    assert bool(reason) == bool(faults)
    if faults:
        assert reason.startswith(f"{faults} of ")
        assert ("no multiple of 4" in reason) == (depth % 4 != 0)


def test_the_lowest_int8_value_is_not_sparse():
    weight = torch.tensor([[-128, 0, 0, 0]], dtype=torch.int8)
    assert "-128" in reason_of_weight(weight)


@pytest.mark.parametrize(
    ("module", "pattern", "layout", "says"),
    [
        (nn.Conv2d(8, 8, 3), "2:4", "plain", ""),
        (nn.Conv2d(8, 8, 3, groups=2), "2:4", "plain", ""),
        (nn.Linear(8, 8), "1:16", "plain", ""),
        (nn.Conv2d(8, 8, 3, groups=8), "2:4", "plain", "depthwise"),
        (nn.Conv2d(8, 8, 3), "2:4", "flat", 'conv_layout="channels"'),
        (nn.ConvTranspose2d(8, 8, 3), "2:4", "plain", "transposed"),
        (nn.Linear(8, 8), "4:8", "plain", "N <= 2"),
    ],
)
def test_layers_by_their_shapes(module, pattern, layout, says):
    reason = reason_of_layer(module, NMPattern.parse(pattern), layout)
    assert says in reason
    assert bool(says) == bool(reason)


def test_one_channel_in_one_group_is_not_depthwise():
    assert not is_depthwise(nn.Conv2d(1, 8, 3))
