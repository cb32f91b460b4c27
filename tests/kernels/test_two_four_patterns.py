import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm import NMPattern
from lightning_nm.functional import is_nm, nm_prune
from lightning_nm.kernels import two_four_reason
from lightning_nm.kernels.gpu.two_four import two_four_violation


def worst_group(pattern, depth):
    """The most nonzeros that an N:M row of this depth can put into an aligned group of four."""
    groups = (range(start, start + 4) for start in range(0, depth, 4))
    counts = ([entry // pattern.m for entry in group] for group in groups)
    return max(
        sum(min(pattern.n, blocks.count(block)) for block in set(blocks)) for blocks in counts
    )


def test_a_pattern_fits_if_no_group_can_hold_three():
    for pattern in (NMPattern(n, m) for m in range(2, 20) for n in range(1, m)):
        assert (not two_four_reason(pattern)) == (worst_group(pattern, depth=4 * pattern.m) <= 2), (
            pattern
        )


def test_the_reason_names_the_pattern_and_the_way_out():
    assert "4:8" in two_four_reason("4:8")
    assert "2:M with 4 dividing M" in two_four_reason("2:6")
    assert "an axis of 30" in two_four_reason("1:2", depth=30)
    assert two_four_reason("1:2", depth=32) == ""


@pytest.mark.parametrize("pattern", ["1:2", "1:4", "2:4", "1:8", "2:8", "1:16", "2:16", "1:3"])
def test_matrices_of_patterns_that_fit_are_two_four(pattern):
    matrix = nm_prune(torch.randn(32, 48, generator=torch.Generator().manual_seed(0)), pattern)
    assert is_nm(matrix, "2:4")
    assert two_four_violation(matrix != 0) == ""


@given(
    st.lists(st.integers(0, 15), min_size=2, max_size=12).filter(lambda codes: len(codes) % 2 == 0)
)
def test_violations_are_counted_and_the_first_is_named(codes):
    nonzero = (
        torch.tensor([[code >> entry & 1 for entry in range(4)] for code in codes])
        .bool()
        .view(2, -1)
    )
    crowded = [index for index, code in enumerate(codes) if code.bit_count() > 2]
    text = two_four_violation(nonzero)
    if not crowded:
        assert text == ""
    else:
        row, group = divmod(crowded[0], len(codes) // 2)
        assert text.startswith(f"{len(crowded)} of {len(codes)} groups")
        assert text.endswith(f"row {row}, columns {4 * group} to {4 * group + 3}")


def test_every_pair_of_positions_fits():
    for pair in itertools.combinations(range(4), 2):
        nonzero = torch.zeros(1, 4, dtype=torch.bool)
        nonzero[0, list(pair)] = True
        assert two_four_violation(nonzero) == ""
