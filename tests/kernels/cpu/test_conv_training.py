"""Trainings of convolutions on the CPU kernels against dense ones."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_nm import BAME, NMPattern, NMSparsifier
from lightning_nm.kernels import GemmKey, KernelRegistry, Router, routing
from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu import CpuCsrKernel
from lightning_nm.kernels.tuner import DeviceTimer, check, dense_ms, sparse_ms
from tests.support.cpu_products import needs_library, trained
from tests.support.fake_kernels import FakeKernel
from tests.support.routed import METHODS, assert_equal, attach, gradients, ran

pytestmark = needs_library

ALL = {("forward", "cpu-csr"), ("dgrad", "cpu-csr"), ("wgrad", "cpu-csr")}
PRODUCTS = {"asp": ALL, "bame": ALL, "sr-ste": ALL - {("wgrad", "cpu-csr")}}


def train(
    method, router, dtype=torch.float32, channels_last=False, conv_layout="channels", steps=6
):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(24, 32, 3, padding=1, groups=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 16, 1),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    )
    method = BAME(every=2) if method == "bame" else method
    sparsifier = NMSparsifier(
        model, "1:8", method, seed=0, planned_steps=steps, conv_layout=conv_layout
    ).attach()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    form = torch.channels_last if channels_last else torch.contiguous_format
    x = [
        torch.randn(20, 3, 12, 12, generator=torch.Generator().manual_seed(step))
        for step in range(steps)
    ]
    return trained(model, sparsifier, router, [each.to(memory_format=form) for each in x], dtype)


@pytest.mark.parametrize("conv_layout", ["channels", "flat"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("method", PRODUCTS)
def test_a_training_of_convolutions_is_the_dense_one(method, channels_last, conv_layout):
    router = Router("sparse", [CpuCsrKernel()])
    found = train(method, router, channels_last=channels_last, conv_layout=conv_layout)
    expected = train(method, None, channels_last=channels_last, conv_layout=conv_layout)
    assert_equal(found, expected, rtol=1e-4, atol=1e-5)
    assert not router.registry.failures
    convolutions = {
        (u.product.key.gemm, u.kernel) for u in router.used() if u.product.key.conv is not None
    }
    assert convolutions >= PRODUCTS[method]


def test_a_training_of_convolutions_in_bfloat16():
    router = Router("sparse", [CpuCsrKernel()])
    found, expected = (train("asp", each, torch.bfloat16, steps=4) for each in (router, None))
    assert_equal(found, expected, rtol=3e-2, atol=3e-2)
    assert ran(router) >= ALL


@pytest.mark.parametrize("method", ["asp", "bi-mask", "transposable", "soft-threshold"])
@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_gradients_of_convolutions(kind, estimator, method):
    torch.manual_seed(0)
    module = kind(16, 24, 3, stride=2, padding=1, groups=2)
    attach(module, "2:8", METHODS[method](), estimator)
    x = torch.randn(3, 16, *(9, 7, 5)[: module.weight.dim() - 2])
    router = Router("sparse")
    assert_equal(gradients(module, x, router), gradients(module, x, None), rtol=1e-4, atol=1e-4)
    sparse = kind is not nn.Conv3d and method != "soft-threshold"
    assert (
        (("forward", "cpu-csr") in ran(router)) == (("dgrad", "cpu-csr") in ran(router)) == sparse
    )
    assert (("wgrad", "cpu-csr") in ran(router)) == (
        sparse and method == "asp" and estimator is None
    )
    if estimator is not None and sparse:
        reasons = {u.product.reason for u in router.used() if u.product.key.gemm == "wgrad"}
        assert reasons == {"no kernel takes an estimated dY of a convolution"}
    if kind is nn.Conv3d:
        assert {u.product.reason for u in router.used()} == {"a convolution that no kernel takes"}


def test_second_derivatives_of_convolutions():
    torch.manual_seed(0)
    module = nn.Conv2d(8, 8, 3, padding=1).double().float()
    attach(module, "2:8", "asp")
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    found = []
    for router in (Router("sparse"), None):
        with routing(router):
            y = module(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x))
    assert_equal(*found, rtol=1e-4, atol=1e-4)


KEYS = [
    GemmKey(gemm, *size, dtype, NMPattern(1, 8), "cpu", sparsity=sparsity, conv=conv)
    for conv, (out, width, tokens) in {
        Convolution(12, 20, (11, 9), (3, 3), (2, 1), (1, 1), (1, 2)): (20, 108, 3 * 6 * 7),
        Convolution(12, 16, (1, 30), (1, 5), groups=2): (16, 30, 26),
    }.items()
    for gemm, size, sparsity in (
        ("forward", (out, width, tokens), "n:m"),
        ("dgrad", (width, out, tokens), "masked"),
        ("wgrad", (out, tokens, width), "outputs"),
    )
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_keys_of_convolutions(key):
    kernel = CpuCsrKernel()
    assert check(kernel, key) == ""
    timer = DeviceTimer()
    assert dense_ms(key, timer) > 0
    assert sparse_ms(kernel, key, timer)[0] > 0
    other = FakeKernel("other")
    assert KernelRegistry([other]).reason(other, key) == "it takes no convolutions"


def test_a_kernel_that_fails_is_replaced_by_the_dense_convolution():
    class Fails(CpuCsrKernel):
        broken = False

        def conv_input(self, packed, grad, conv):
            if self.broken:
                raise RuntimeError("broken")
            return super().conv_input(packed, grad, conv)

    torch.manual_seed(0)
    module = nn.Conv2d(16, 24, 3)
    attach(module, "2:8", "asp")
    kernel, x = Fails(), torch.randn(3, 16, 7, 7)
    router = Router("sparse", [kernel])
    gradients(module, x, router)
    kernel.broken = True
    with pytest.warns(RuntimeWarning, match="broken"):
        found = gradients(module, x, router)
    assert_equal(found, gradients(module, x, None), rtol=1e-4, atol=1e-4)


def test_auto_measures_convolutions(tmp_path):
    torch.manual_seed(0)
    module = nn.Conv2d(64, 64, 3, padding=1)
    attach(module, "1:16", "asp")
    x = torch.randn(4, 64, 16, 16)
    router = Router("auto", file=tmp_path / "kernels.json")
    gradients(module, x, router)
    assert_equal(gradients(module, x, router), gradients(module, x, None), rtol=1e-4, atol=1e-4)
    decisions = [used.decision for used in router.used() if used.decision is not None]
    assert len(decisions) >= 3
    assert all(decision.source == "measured" for decision in decisions)
    again = Router("auto", file=tmp_path / "kernels.json")
    gradients(module, x, again)
    assert dict(again.tuner.decisions) == dict(router.tuner.decisions)


def test_flops_are_those_of_the_dense_convolution():
    module = nn.Conv2d(16, 24, 3, padding=1)
    x = torch.randn(3, 16, 7, 7, requires_grad=True)
    counts = []
    attach(module, "2:8", "asp")
    for router in (None, Router("sparse")):
        with routing(router), FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 3 * 49 * 24 * 16 * 9


@pytest.mark.slow
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_compiled_code_calls_the_convolutions(estimator, channels_last):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, stride=2)
    )
    attach(module, "2:8", "asp", estimator)
    x = torch.randn(3, 16, 9, 9)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    router = Router("sparse", [CpuCsrKernel()])
    eager = gradients(module, x, router)
    before = {used.product: used.calls for used in router.used() if not used.product.reason}
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, x, router), eager, rtol=1e-5, atol=1e-5)
    after = {used.product: used.calls for used in router.used() if not used.product.reason}
    assert after == {key: 2 * calls for key, calls in before.items()}
    assert ran(router) >= ALL - ({("wgrad", "cpu-csr")} if estimator else set())
    x = torch.randn(5, 16, 9, 9)
    assert_equal(gradients(compiled, x, router), gradients(module, x, router), rtol=1e-5, atol=1e-5)
