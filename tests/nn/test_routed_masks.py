"""Products on kernels that take weights and masks, after the masks moved in unusual ways, beside dense ones."""

import warnings

import pytest
import torch
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMPattern, NMSparsifier
from lightning_nm.estimators import GradientEstimator
from lightning_nm.kernels import GemmKey, Router, routing
from lightning_nm.kernels.api import attempt
from lightning_nm.kernels.cpu import library
from lightning_nm.methods import ASP, STE
from tests.support.kinds import hugging_face_conv1d

pytestmark = pytest.mark.skipif(
    bool(library.unavailable()), reason=library.unavailable() or "a library"
)


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


def masked(model, pattern, method, estimator=None):
    torch.manual_seed(0)
    return NMSparsifier(
        model, pattern, method, estimator, skip_first_last=False, planned_steps=1000
    ).attach()


def products(model, router, x):
    model.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    with routing(router):
        y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, model.weight.grad.clone()


def compare(model, router, x):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for found, expected in zip(
            products(model, router, x), products(model, None, x), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def kernels_of(router):
    return {used.product.key.gemm: used.kernel for used in router.used()}


@pytest.mark.parametrize("method", ["asp", "ste", "bame"])
@pytest.mark.parametrize(("out", "width"), [(32, 32), (256, 256), (96, 384)])
@pytest.mark.parametrize("reuse", [1, 4])
def test_layouts_are_those_of_the_masks_after_other_weights_were_loaded(method, out, width, reuse):
    model = nn.Linear(width, out)
    masked(model, "1:8", method)
    router, x = Router("sparse", reuse=reuse), torch.randn(16, width)
    compare(model, router, x)
    for seed in range(4):  # new masks may take the memory of the old ones
        torch.manual_seed(seed)
        model.load_state_dict({"weight": torch.randn(out, width), "bias": torch.zeros(out)})
        compare(model, router, x)
    assert kernels_of(router)["forward"].startswith("cpu-")


def test_a_backward_weight_beyond_the_forward_mask():
    model = nn.Linear(64, 64)
    masked(model, "1:8", DenseBackward())
    router = Router("sparse")
    compare(model, router, torch.randn(32, 64))
    found = kernels_of(router)
    assert found.pop("forward").startswith("cpu-")
    assert found == {"dgrad": "reference", "wgrad": "reference"}


@pytest.mark.parametrize("mode", ["reference", "sparse"])
def test_an_estimator_without_a_pattern_works(mode):
    model = nn.Linear(64, 64)
    masked(model, "1:8", "asp", Clip())
    compare(model, Router(mode), torch.randn(32, 64))


def test_a_method_that_reads_gradients_gets_those_of_pruned_entries():
    model, method = nn.Linear(64, 64), Watching()
    masked(model, "1:8", method)
    x = torch.randn(32, 64)
    products(model, None, x)
    dense = method.seen
    products(model, Router("sparse"), x)
    assert method.seen == pytest.approx(dense)
    assert dense > 0


@pytest.mark.parametrize("method", ["bi-mask", "transposable", "asp"])
@pytest.mark.parametrize("kind", ["transposed", "channels last"])
def test_other_memory_orders(method, kind):
    x = torch.randn(32, 64)
    if kind == "transposed":
        model = hugging_face_conv1d()(96, 64)
    else:
        model = nn.Conv2d(64, 96, 1).to(memory_format=torch.channels_last)
        x = x.view(2, 64, 4, 4).to(memory_format=torch.channels_last)
    masked(model, "2:8", method)
    router = Router("sparse")
    compare(model, router, x)
    assert kernels_of(router)["dgrad"].startswith("cpu-")


def test_masks_of_inference_mode():
    model = nn.Linear(64, 64)
    router, x = Router("sparse"), torch.randn(8, 64)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        masked(model, "1:8", "asp")
        with routing(router):
            found = model(x)
        torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)


def test_a_forward_weight_is_computed_once_for_a_pack():
    calls = []

    class Scaled(STE):
        selects_entries = False

        def forward_weight(self, layer, weight):
            calls.append(layer)
            return 2 * super().forward_weight(layer, weight)

    model = nn.Linear(64, 64)
    masked(model, "2:4", Scaled())
    router, x = Router("sparse", [SimulatedSparseKernel()], reuse=4), torch.randn(16, 64)
    with routing(router):
        model(x), model(x)
    assert len(calls) == 1


def test_short_memory_concerns_one_product():
    router = Router("sparse")
    kernel = router.registry.backends[-1]
    key = GemmKey("forward", 8, 16, 4, torch.float32, NMPattern(1, 8), "cpu")

    def short():
        raise MemoryError

    failures = router.registry.failures
    assert attempt(kernel, key, failures, short, lambda: torch.zeros(4, 8)).shape == (4, 8)
    assert not failures
