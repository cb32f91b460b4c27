"""S-STE: the factor of the soft threshold, which is computed once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import SSTE, NMSparsifier
from lightning_nm import functional as nmf
from tests.support.method_loop import Loop, mlp


def scale_of(weight):
    """The factor by which the soft threshold of a weight comes closest to it, of sums in float64."""
    weight, shrunk = weight.double(), nmf.soft_threshold_nm(weight, "2:4").double()
    return ((weight * shrunk).sum() / shrunk.square().sum()).float()


def check(layer, scale):
    expected = scale * nmf.soft_threshold_nm(layer.weight.detach(), "2:4")
    torch.testing.assert_close(layer.forward_weight(), expected)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.floats(-2.0, 2.0))
def test_no_other_factor_is_closer(seed, other):
    module = mlp(32, 1, dtype=torch.float64, seed=seed)
    (layer,) = NMSparsifier(module, "2:4", SSTE(), skip_first_last=False).attach().layers.values()
    weight, closest = layer.weight.detach(), layer.forward_weight()
    shrunk = nmf.soft_threshold_nm(weight, "2:4")
    assert (weight - closest).square().sum() <= (weight - other * shrunk).square().sum() + 1e-12
    assert float(layer.buffers["scale"]) >= 1, "what is shrunk must be enlarged"


def test_the_factor_is_that_of_the_first_masks_and_stays():
    run = Loop(SSTE(dense_start=3, dense_end=5))
    assert "scale" not in run.layer.buffers
    for step in run.steps(18):
        weight = run.layer.weight.detach()
        if step == 3:
            scale = scale_of(weight)
        if 3 <= step < 15:
            check(run.layer, scale)
            assert run.sparsifier.violations() == 0
        else:
            assert torch.equal(run.layer.forward_weight(), weight)
    assert not torch.isclose(scale_of(weight), scale), "it would also pass with one that follows"


def test_other_weights_get_another_factor():
    run = Loop(SSTE())
    first = run.layer.buffers["scale"].clone()
    state = {key: value**3 for key, value in mlp(16, 32, 16).state_dict().items()}
    run.model.load_state_dict(state)
    scale = scale_of(state["0.weight"])
    assert not torch.isclose(scale, first)
    check(run.layer, scale)


def test_zeros_and_ties_are_nm_and_a_factor_of_halves_is_single():
    model = mlp(16, 32, 16, dtype=torch.bfloat16)
    model[0].weight.data.zero_()
    model[2].weight.data.sign_()
    run = Loop(SSTE(), model=model)
    for layer in run.layers.values():
        assert layer.buffers["scale"] == 1
        assert layer.buffers["scale"].dtype == torch.float32
        assert not layer.forward_weight().any()
    assert run.sparsifier.violations() == 0


def test_the_papers_setting_has_two_sparse_products():
    """Forward and wgrad; dgrad uses the same weight, which is not N:M along its outputs."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    layers = NMSparsifier(model, "2:4", "s-ste", preset="paper").attach().layers
    assert list(layers) == ["0"], "the last linear layer is dense"
    gemms = layers["0"].gemms()
    assert [gemm.label for gemm in gemms] == ["2:4", "masked", "2:4"]
    assert gemms.dgrad.reason == "not N:M along out"
    densities = gemms.densities()
    assert densities["eligible"] == densities["paper"] == nmf.GemmDensity(0.5, 1.0, 0.5)
    assert densities["arithmetic"] == nmf.GemmDensity(0.5, 0.5, 0.5)
    assert type(layers["0"].spec.estimator).__name__ == "ApproxMVUE"
