"""GEMMs on kernels that take weights and masks, after the masks moved in unusual ways, next to dense ones."""

import pytest
import torch
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMSparsifier
from lightning_nm.estimators import GradientEstimator
from lightning_nm.kernels import Router, routing
from lightning_nm.methods import ASP, STE
from tests.support.cpu_products import needs_library
from tests.support.kinds import hugging_face_conv1d
from tests.support.routed import compare, gradients

pytestmark = [needs_library, pytest.mark.filterwarnings("error")]
CLOSE = {"rtol": 1e-4, "atol": 1e-3}


class DenseBackward(STE):
    selects_entries = False

    def backward_weight(self, layer, weight):
        return weight


class Clip(GradientEstimator):
    def estimate(self, layer, grad, seed):
        return grad.clamp(-0.1, 0.1)


class Watching(ASP):
    def gradient_at_pruned(self, layer):
        return True

    def weight_gradient(self, layer, weight, grad):
        mask = layer.masks.forward_view
        self.seen = 0.0 if mask is None else float(grad[~mask].abs().sum())
        return super().weight_gradient(layer, weight, grad)


def masked(method, estimator=None, model=None, pattern="1:8"):
    torch.manual_seed(0)
    model = nn.Linear(64, 64) if model is None else model
    options = {"skip_first_last": False, "planned_steps": 1000}
    NMSparsifier(model, pattern, method, estimator, **options).attach()
    return model


def kernels_of(router):
    return {used.product.key.gemm: used.kernel.partition("-")[0] for used in router.used()}


@pytest.mark.parametrize("method", ["asp", "bame"])
def test_layouts_are_those_of_the_masks_after_other_weights_were_loaded(method):
    model = masked(method)
    router, x = Router("sparse", reuse=4), torch.randn(16, 64)
    for seed in range(4):  # new masks may take the memory of the old ones
        torch.manual_seed(seed)
        compare(model, x, router, **CLOSE)
        model.load_state_dict({"weight": torch.randn(64, 64), "bias": torch.zeros(64)})
    assert kernels_of(router)["forward"] == "cpu"


def test_a_backward_weight_beyond_the_forward_mask():
    model, router = masked(DenseBackward()), Router("sparse")
    compare(model, torch.randn(32, 64), router, **CLOSE)
    assert kernels_of(router) == {"forward": "cpu", "dgrad": "reference", "wgrad": "reference"}


@pytest.mark.parametrize("mode", ["reference", "sparse"])
def test_an_estimator_without_a_pattern_works(mode):
    compare(masked("asp", Clip()), torch.randn(32, 64), Router(mode), **CLOSE)


def test_a_method_that_reads_gradients_gets_those_of_pruned_entries():
    method, seen = Watching(), []
    model, x = masked(method), torch.randn(32, 64)
    for router in (None, Router("sparse")):
        gradients(model, x, router)
        seen.append(method.seen)
    assert seen[1] == pytest.approx(seen[0])
    assert seen[0] > 0


@pytest.mark.parametrize("method", ["bi-mask", "transposable", "asp"])
@pytest.mark.parametrize("kind", ["transposed", "channels last"])
def test_other_memory_orders(method, kind):
    x = torch.randn(32, 64)
    if kind == "transposed":
        model = hugging_face_conv1d()(96, 64)
    else:
        model = nn.Conv2d(64, 96, 1).to(memory_format=torch.channels_last)
        x = x.view(2, 64, 4, 4).to(memory_format=torch.channels_last)
    router = Router("sparse")
    compare(masked(method, model=model, pattern="2:8"), x, router, **CLOSE)
    assert kernels_of(router)["dgrad"] == "cpu"


@torch.inference_mode()
def test_masks_of_inference_mode():
    model, x = masked("asp"), torch.randn(8, 64)
    with routing(Router("sparse")):
        found = model(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)


def test_a_forward_weight_is_computed_once_for_a_pack():
    calls = []

    class Scaled(STE):
        selects_entries = False

        def forward_weight(self, layer, weight):
            calls.append(layer)
            return 2 * super().forward_weight(layer, weight)

    model, x = masked(Scaled(), pattern="2:4"), torch.randn(16, 64)
    with routing(Router("sparse", [SimulatedSparseKernel()], reuse=4)):
        model(x), model(x)
    assert len(calls) == 1
