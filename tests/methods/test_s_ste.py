"""S-STE: the soft threshold of the weights, with a factor that is computed once."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import SSTE, NMSparsifier
from lightning_nm import functional as nmf
from tests.methods.plain_loop import sgd_steps


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def attach(model, method=None, **options):
    options = {"skip_first_last": False, "planned_steps": 20} | options
    return NMSparsifier(model, "2:4", method or SSTE(), **options).attach()


def scale_of(weight):
    """The factor by which the soft threshold of a weight comes closest to it, of sums in float64."""
    weight, shrunk = weight.double(), nmf.soft_threshold_nm(weight, "2:4").double()
    return ((weight * shrunk).sum() / shrunk.square().sum()).float()


def expected(layer, scale):
    return scale * nmf.soft_threshold_nm(layer.weight.detach(), "2:4")


def test_the_forward_weight_follows_and_its_factor_stays():
    model = network()
    weight = model[0].weight.detach()
    scale = scale_of(weight)
    sparsifier = attach(model)
    layer = sparsifier.layers["0"]
    torch.testing.assert_close(layer.forward_weight(), expected(layer, scale))
    for _ in sgd_steps(model, sparsifier, 5, (16, 16)):
        assert torch.equal(layer.buffers["scale"], scale[None])
        torch.testing.assert_close(layer.forward_weight(), expected(layer, scale))
        assert torch.equal(model.state_dict()["0.weight"], layer.forward_weight())
        assert sparsifier.violations() == 0
    trained = layer.weight.detach()
    now = scale_of(trained)
    assert not torch.isclose(now, scale), "the test would pass with a factor that follows"


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.floats(-2.0, 2.0))
def test_no_other_factor_is_closer(seed, other):
    module = nn.Linear(32, 1, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        module.weight.copy_(torch.randn(1, 32, generator=generator, dtype=torch.float64))
    (layer,) = attach(module).layers.values()
    weight, closest = layer.weight.detach(), layer.forward_weight()
    shrunk = nmf.soft_threshold_nm(weight, "2:4")
    assert (weight - closest).square().sum() <= (weight - other * shrunk).square().sum() + 1e-12
    assert float(layer.buffers["scale"]) >= 1, "what is shrunk must be enlarged"


def test_the_factor_of_a_half_is_single():
    (layer,) = attach(nn.Linear(16, 4, dtype=torch.bfloat16)).layers.values()
    assert layer.buffers["scale"].dtype == torch.float32


def test_after_a_dense_start_the_factor_is_that_of_the_first_masks():
    model = network()
    sparsifier = attach(model, SSTE(dense_start=3, dense_end=5))
    layer = sparsifier.layers["0"]
    assert "scale" not in layer.buffers
    scale = None
    for step in sgd_steps(model, sparsifier, 18, (16, 16)):
        weight = layer.weight.detach()
        if step == 2:
            scale = scale_of(weight)
        sparse = 2 <= step < 14
        found = layer.forward_weight()
        torch.testing.assert_close(found, expected(layer, scale) if sparse else weight)


def test_other_weights_get_another_factor():
    model = network()
    sparsifier = attach(model)
    first = sparsifier.layers["0"].buffers["scale"].clone()
    state = {key: value**3 for key, value in network().state_dict().items()}
    model.load_state_dict(state)
    layer = sparsifier.layers["0"]
    scale = scale_of(state["0.weight"])
    assert not torch.isclose(scale, first)
    torch.testing.assert_close(layer.forward_weight(), expected(layer, scale))


def test_zeros_and_ties_are_nm():
    model = network()
    with torch.no_grad():
        model[0].weight.zero_()
        model[2].weight.copy_(model[2].weight.sign())
    sparsifier = attach(model)
    for layer in sparsifier.layers.values():
        assert float(layer.buffers["scale"]) == 1
        assert not layer.forward_weight().any()
    assert sparsifier.violations() == 0


def test_the_whole_weight_gets_the_gradient_of_the_forward_weight():
    model = network()
    sparsifier = attach(model)
    plain = copy.deepcopy(model.state_dict())
    twin = network()
    twin.load_state_dict(plain)  # W_F
    x = torch.randn(8, 16)
    for each in (model, twin):
        each(x).square().mean().backward()
    torch.testing.assert_close(model[0].weight.grad, twin[0].weight.grad)
    assert (model[0].weight.grad != 0).all(), "pruned entries, too"
    assert sparsifier.layers["0"].masks.has_forward


def test_the_papers_setting_has_two_sparse_products():
    """Forward and wgrad; dgrad uses the same weight, which is not N:M along its outputs."""
    model = network()
    sparsifier = attach(model, "s-ste", preset="paper", skip_first_last=None)
    assert list(sparsifier.layers) == ["0"], "the last linear layer is dense"
    layer = sparsifier.layers["0"]
    assert [gemm.label for gemm in layer.gemms()] == ["2:4", "masked", "2:4"]
    assert layer.gemms().dgrad.reason == "not N:M along out"
    densities = layer.gemms().densities()
    assert densities["eligible"] == nmf.GemmDensity(0.5, 1.0, 0.5)
    assert densities["paper"] == nmf.GemmDensity(0.5, 1.0, 0.5)
    assert densities["arithmetic"] == nmf.GemmDensity(0.5, 0.5, 0.5)
    assert layer.spec.estimator.__class__.__name__ == "ApproxMVUE"
    before = model[0].weight.detach().clone()
    for _ in sgd_steps(model, sparsifier, 3, (16, 16)):
        assert sparsifier.violations() == 0
    assert not torch.equal(model[0].weight, before)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["mvue", "approx-mvue"])
def test_its_gradient_estimate_is_unbiased(estimator):
    """The mean of many estimates of one gradient approaches it as the root of their number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8).double())
    sparsifier = attach(model, SSTE(), grad_estimator=estimator)
    x = torch.randn(16, 16, dtype=torch.float64)
    layer = sparsifier.layers["0"]
    used = layer.forward_weight().requires_grad_()
    (nn.functional.linear(x, used, model[0].bias).square().mean()).backward()
    total = torch.zeros_like(used)
    squares = torch.zeros_like(used)
    draws = 400
    for draw in range(draws):
        layer.draw_noise(draw)
        model.zero_grad()
        model(x).square().mean().backward()
        total += model[0].weight.grad
        squares += model[0].weight.grad.square()
    mean = total / draws
    deviation = (squares / draws - mean.square()).sqrt()
    assert (deviation > 0).any(), "an estimate is not the gradient itself"
    errors = (mean - used.grad) / (deviation / draws**0.5 + 1e-12)
    assert errors.abs().max() < 5
