"""Trainings on the CPU kernels against dense ones."""

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from lightning_nm.kernels import Router
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel, library
from tests.support.cpu_products import LEVELS, at_level, needs_library, trained
from tests.support.routed import METHODS, assert_equal, attach, gradients, ran

pytestmark = needs_library

# The method, its products besides the forward: with dense output gradients, and with estimated ones.
PRODUCTS = {
    "asp": ({("dgrad", "masked"), ("wgrad", "outputs")}, {("dgrad", "masked"), ("wgrad", "n:m")}),
    "bame": ({("dgrad", "masked"), ("wgrad", "outputs")}, {("dgrad", "masked"), ("wgrad", "n:m")}),
    "sr-ste": ({("dgrad", "masked")}, {("dgrad", "masked"), ("wgrad", "n:m")}),
    "transposable": ({("dgrad", "n:m")}, {("dgrad", "n:m"), ("wgrad", "n:m")}),
    "bi-mask": ({("dgrad", "n:m")}, {("dgrad", "n:m"), ("wgrad", "n:m")}),
}


def backends(kind):
    return {"both": [CpuPermuteKernel(), CpuCsrKernel()], "csr": [CpuCsrKernel()]}[kind]


def train(method, estimator, router, pattern, dtype, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(48, 72), nn.GELU(), nn.Linear(72, 48), nn.GELU(), nn.Linear(48, 10)
    )
    method = BAME(every=2) if method == "bame" else method
    sparsifier = NMSparsifier(
        model, pattern, method, estimator, seed=0, planned_steps=steps
    ).attach()
    x = [
        torch.randn(40, 48, generator=torch.Generator().manual_seed(step)) for step in range(steps)
    ]
    return trained(model, sparsifier, router, x, dtype)


@pytest.mark.parametrize("kind", ["both", "csr"])
@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", PRODUCTS)
def test_a_training_is_the_dense_one(method, estimator, kind):
    router = Router("sparse", backends(kind))
    found = train(method, estimator, router, "1:8", torch.float32)
    assert_equal(found, train(method, estimator, None, "1:8", torch.float32), rtol=1e-5, atol=1e-5)
    assert not router.registry.failures
    sparse = {
        (u.product.key.gemm, u.product.key.sparsity)
        for u in router.used()
        if u.kernel.startswith("cpu-")
    }
    assert sparse >= {("forward", "n:m")} | PRODUCTS[method][estimator is not None]
    permuting = kind == "both" and LEVELS[library.level()] != "baseline"
    assert (("forward", "cpu-permute") in ran(router)) == permuting


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["2:4", "1:8", "1:3"])
@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_a_training_is_the_dense_one_at_every_level(level, dtype, method, estimator, pattern):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    with at_level(level):
        router = Router("sparse", backends("both"))
        found = train(method, estimator, router, pattern, dtype, steps=4)
    expected = train(method, estimator, None, pattern, dtype, steps=4)
    assert_equal(found, expected, rtol=tolerance, atol=tolerance)
    assert not router.registry.failures


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["both", "csr"])
@pytest.mark.parametrize(
    ("method", "estimator"), [("asp", None), ("asp", "mvue"), ("bi-mask", "mvue")]
)
def test_compiled_code_calls_the_kernels(kind, method, estimator):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    attach(module, "2:8", METHODS[method](), estimator)
    x = torch.randn(24, 32)
    router = Router("sparse", backends(kind))
    eager = gradients(module, x, router)
    before = {used.product: used.calls for used in router.used()}
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, x, router), eager, rtol=1e-5, atol=1e-5)
    assert {used.product: used.calls for used in router.used()} == {
        key: 2 * calls for key, calls in before.items()
    }
    assert {gemm for gemm, kernel in ran(router) if kernel.startswith("cpu-")} == {
        "forward",
        "dgrad",
        "wgrad",
    }
    assert not router.registry.failures
    x = torch.randn(17, 32)  # another number of tokens
    assert_equal(gradients(compiled, x, router), gradients(module, x, router), rtol=1e-5, atol=1e-5)
