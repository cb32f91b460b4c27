"""Counter-based Gumbel and normal numbers, and soft choices by them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_nm.functional import fold_seed
from lightning_nm.functional.soft import (
    gumbel_noise,
    normal_noise,
    soft_choice,
    soft_choice_gradient,
)


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
    one, cold = torch.tensor(1.0), torch.tensor(0.01)
    choice = soft_choice(logits, gumbel_noise(logits.numel(), fold_seed(3)), one, cold)
    assert choice.sum(-1).allclose(torch.ones(()), atol=1e-5)
    shares = torch.bincount(choice.argmax(-1), minlength=3) / len(logits)
    torch.testing.assert_close(shares, logits[0].softmax(0), atol=0.008, rtol=0)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0.1, 5), st.floats(0.5, 20))
def test_the_gradient_is_autograds(seed, temperature, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64).requires_grad_()
    noise = torch.randn(72, generator=generator, dtype=torch.float64)
    grad = torch.randn(3, 4, 6, generator=generator, dtype=torch.float64)
    temperature, scale = torch.tensor([temperature, scale], dtype=torch.float64)
    choice = soft_choice(logits, noise, scale, temperature)
    choice.backward(grad)
    found = soft_choice_gradient(choice.detach(), grad, scale, temperature)
    torch.testing.assert_close(found, logits.grad, rtol=1e-9, atol=1e-12)
