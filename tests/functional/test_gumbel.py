"""Counter-based Gumbel and normal numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_nm.functional import fold_seed
from lightning_nm.functional.soft import gumbel_noise, normal_noise


def test_moments():
    count = 200_000
    gumbel = gumbel_noise(count, fold_seed("gumbel")).double()
    normal = normal_noise(count, fold_seed("normal")).double()
    assert gumbel.isfinite().all()
    assert normal.isfinite().all()
    # Five standard errors of the mean; of the variance about as many.
    assert gumbel.mean() == pytest.approx(0.57722, abs=5 * math.pi / 6**0.5 / count**0.5)
    assert gumbel.var() == pytest.approx(math.pi**2 / 6, rel=0.03)
    assert normal.mean() == pytest.approx(0, abs=5 / count**0.5)
    assert normal.var() == pytest.approx(1, rel=0.02)
    # P(g < x) = exp(-exp(-x)).
    for x in (-1.0, 0.0, 2.0):
        assert (gumbel < x).double().mean() == pytest.approx(math.exp(-math.exp(-x)), abs=0.006)


def test_extreme_numbers_stay_finite(monkeypatch):
    ends = torch.tensor([0.0, 2.0**-24, 1 - 2.0**-24])
    monkeypatch.setattr(
        "lightning_nm.functional.soft.counter_uniform", lambda count, seed: ends.repeat(2)
    )
    assert gumbel_noise(6, fold_seed(0)).isfinite().all()
    assert normal_noise(3, fold_seed(0)).isfinite().all()


@given(st.integers(1, 50), st.integers(0, 99))
def test_a_seed_gives_the_same_numbers(count, seed):
    for noise in (gumbel_noise, normal_noise):
        numbers = noise(count, fold_seed(seed))
        assert numbers.shape == (count,)
        assert torch.equal(numbers, noise(count, fold_seed(seed)))
        assert not torch.equal(numbers, noise(count, fold_seed(seed, 1)))


def test_choices_have_the_probabilities_of_the_logits():
    """The largest of logits with Gumbel noise is p with the probability softmax(logits)[p]."""
    logits = torch.tensor([0.0, 1.0, 2.0]).expand(100_000, 3)
    noise = gumbel_noise(logits.numel(), fold_seed(3)).view(logits.shape)
    shares = torch.bincount((logits + noise).argmax(-1), minlength=3) / len(logits)
    torch.testing.assert_close(shares, logits[0].softmax(0), atol=0.008, rtol=0)
