"""Wanda and SparseGPT against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm import functional as nmf
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.pattern import NMPattern

PATTERNS = st.sampled_from(["1:2", "2:4", "1:4", "3:4", "1:8", "4:8"])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def by_definition(weight, moment, pattern, damping):
    """One row at a time; each inverse is computed again."""
    pattern = NMPattern.parse(pattern)
    moment = moment.double() + damping * moment.diagonal().mean().double() * torch.eye(len(moment))
    result = weight.double().clone()
    for row in result:
        for j in range(len(row)):
            if j % pattern.m == 0:
                places = range(j, j + pattern.m)
                errors = [row[k] ** 2 / torch.linalg.inv(moment[k:, k:])[0, 0] for k in places]
                kept = nmf.nm_mask(torch.stack(errors), pattern)
            if not kept[j % pattern.m]:
                inverse = torch.linalg.inv(moment[j:, j:])
                row[j:] -= row[j] * inverse[0] / inverse[0, 0]
                row[j] = 0
    return result


def compare(weight, inputs, pattern):
    moment = inputs.t() @ inputs
    found = sparsegpt(weight, moment, pattern)
    assert nmf.is_nm(found, pattern)
    assert found.dtype == weight.dtype
    expected = by_definition(weight, moment, pattern, 0.01)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=30)
@given(pattern=PATTERNS, blocks=st.integers(1, 3), rows=st.integers(1, 4), seed=st.integers(0, 99))
def test_sparsegpt_by_definition(pattern, blocks, rows, seed):
    width, generator = blocks * NMPattern.parse(pattern).m, seeded(seed)
    inputs = torch.randn(3 * width, width, generator=generator)
    mixed = inputs @ torch.randn(width, width, generator=generator)
    compare(torch.randn(rows, width, generator=generator), mixed, pattern)


def test_many_columns_are_corrected_across_blocks():
    generator = seeded()
    compare(
        torch.randn(3, 160, generator=generator), torch.randn(400, 160, generator=generator), "2:4"
    )


@settings(max_examples=30)
@given(pattern=PATTERNS, seed=st.integers(0, 99))
def test_independent_features_of_equal_size_leave_magnitudes(pattern, seed):
    weight = torch.randn(4, 16, generator=seeded(seed))
    mask = nmf.magnitude_mask(weight, pattern, dim=1)
    assert torch.equal(sparsegpt(weight, torch.eye(16), pattern), torch.where(mask, weight, 0))
    assert torch.equal(wanda_mask(weight, torch.ones(16), pattern), mask)


def test_the_output_error_is_below_that_of_magnitudes():
    generator = seeded()
    weight = torch.randn(32, 64, generator=generator)
    inputs = torch.randn(512, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    inputs *= torch.rand(64, generator=generator)

    def error(pruned):
        return (inputs @ (weight - pruned).t()).norm()

    by_wanda = error(torch.where(wanda_mask(weight, inputs.norm(dim=0), "2:4"), weight, 0))
    by_sparsegpt = error(sparsegpt(weight, inputs.t() @ inputs, "2:4"))
    assert by_sparsegpt < 0.9 * by_wanda < 0.9 * error(nmf.nm_prune(weight, "2:4", dim=1))


def test_features_that_are_always_zero_get_no_weight():
    inputs = torch.randn(64, 8, generator=seeded())
    inputs[:, [1, 6]] = 0
    pruned = sparsegpt(torch.ones(2, 8), inputs.t() @ inputs, "2:4")
    assert not pruned[:, [1, 6]].any()
    assert pruned.isfinite().all()
    assert not sparsegpt(torch.ones(2, 8), torch.zeros(8, 8), "2:4").any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_half_precision_are_compared_in_single(dtype):
    """The values are those of half precision, the scores are not: a product of two of them would tie or overflow."""
    weight = (4 * torch.randn(64, 64, generator=seeded())).to(dtype)
    norms = torch.logspace(2, 4.5, 64).to(dtype)
    mask = wanda_mask(weight, norms, "2:4")
    assert torch.equal(mask, wanda_mask(weight.double(), norms.double(), "2:4"))
    assert not torch.equal(mask, nmf.nm_mask(weight.abs() * norms, "2:4"))


@pytest.mark.parametrize(
    ("prune", "weight", "statistics", "message"),
    [
        (sparsegpt, (2, 8), torch.eye(4), r"\(4, 4\) do not belong to a weight \(2, 8\)"),
        (sparsegpt, (2, 6), torch.eye(6), "M=4 does not divide size 6 of dim=1"),
        (sparsegpt, (2, 4), torch.full((4, 4), torch.nan), "not finite"),
        (sparsegpt, (2, 4), -torch.eye(4), "raise it"),
        (wanda_mask, (2, 8), torch.ones(4), r"\(4,\) do not belong to a weight \(2, 8\)"),
    ],
)
def test_bad_statistics(prune, weight, statistics, message):
    with pytest.raises(ValueError, match=message):
        prune(torch.ones(weight), statistics, "2:4")
