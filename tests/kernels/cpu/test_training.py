"""Trainings and single passes on the CPU kernels against dense ones."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_nm import BAME, NMPattern, NMSparsifier
from lightning_nm.kernels import GemmKey, KernelRegistry, Router, routing
from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.kernels.tuner import DeviceTimer, check, dense_ms, sparse_ms
from tests.support.cpu_products import DTYPES, LEVELS, at_level, needs_library, trained
from tests.support.fake_kernels import FakeKernel
from tests.support.pairs import pairwise_cases
from tests.support.routed import METHODS, assert_equal, attach, gradients, ran

pytestmark = needs_library


def layers():
    return nn.Sequential(
        nn.Linear(48, 72), nn.GELU(), nn.Linear(72, 48), nn.GELU(), nn.Linear(48, 10)
    )


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 3, padding=1, groups=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 16, 1),
        nn.Flatten(),
        nn.Linear(16 * 36, 10),
    )


FORMS = {
    "linear": (layers, [CpuPermuteKernel, CpuCsrKernel], "channels", torch.contiguous_format),
    "linear by csr": (layers, [CpuCsrKernel], "channels", torch.contiguous_format),
    "conv": (convolutions, [CpuCsrKernel], "channels", torch.contiguous_format),
    "flat conv": (convolutions, [CpuCsrKernel], "flat", torch.contiguous_format),
    "conv, channels last": (convolutions, [CpuCsrKernel], "channels", torch.channels_last),
}
SETTINGS = [
    (None, "2:4", torch.float32),
    ("mvue", "1:8", torch.float32),
    (None, "1:8", torch.bfloat16),
    ("mvue", "2:4", torch.bfloat16),
]
DGRAD = {
    "asp": "masked",
    "bame": "masked",
    "sr-ste": "masked",
    "transposable": "n:m",
    "bi-mask": "n:m",
}
"""What is sparse in the dgrad of each method."""


def train(method, form, setting, router, steps=6):
    make, _, conv_layout, memory = FORMS[form]
    estimator, pattern, dtype = setting
    torch.manual_seed(0)
    model = make()
    sparsifier = NMSparsifier(
        model,
        pattern,
        BAME(every=2) if method == "bame" else method,
        estimator,
        seed=0,
        planned_steps=steps,
        conv_layout=conv_layout,
    ).attach()
    model.to(memory_format=memory)
    shape = (20, 3, 12, 12) if make is convolutions else (40, 48)
    x = [torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(steps)]
    if make is convolutions:
        x = [each.to(memory_format=memory) for each in x]
    return trained(model, sparsifier, router, x, dtype)


@pytest.mark.parametrize(("method", "form", "setting"), pairwise_cases(DGRAD, FORMS, SETTINGS))
def test_a_training_is_the_dense_one_at_every_level(method, form, setting):
    make, backends, _, _ = FORMS[form]
    estimator, _, dtype = setting
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    expected = train(method, form, setting, None)
    for level in LEVELS:
        with at_level(level):
            router = Router("sparse", [kernel() for kernel in backends])
            found = train(method, form, setting, router)
        assert_equal(found, expected, rtol=tolerance, atol=tolerance / 10)
        assert not router.registry.failures
        sparse = {
            (u.product.key.gemm, u.product.key.sparsity)
            for u in router.used()
            if u.kernel.startswith("cpu-") and (u.product.key.conv is None) == (make is layers)
        }
        wanted = {("forward", "n:m"), ("dgrad", DGRAD[method])}
        if estimator is not None and make is layers:
            wanted.add(("wgrad", "n:m"))
        elif estimator is None and method in ("asp", "bame"):
            wanted.add(("wgrad", "outputs"))
        assert sparse == wanted
        permuting = form == "linear" and level != "baseline"
        assert (("forward", "cpu-permute") in ran(router)) == permuting


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
    sparse = {"forward", "dgrad"} | ({"wgrad"} if (method, estimator) == ("asp", None) else set())
    if kind is nn.Conv3d or method == "soft-threshold":
        sparse = set()
    assert {gemm for gemm, kernel in ran(router) if kernel == "cpu-csr"} == sparse
    reasons = {u.product.key.gemm: u.product.reason for u in router.used()}
    if kind is nn.Conv3d:
        assert set(reasons.values()) == {"a convolution that no kernel takes"}
    elif estimator is not None and sparse:
        assert reasons["wgrad"] == "no kernel takes an estimated dY of a convolution"


def test_second_derivatives_of_convolutions():
    torch.manual_seed(0)
    module = nn.Conv2d(8, 8, 3, padding=1)
    attach(module, "2:8", "asp")
    x = torch.randn(2, 8, 6, 6, requires_grad=True)
    found = []
    for router in (Router("sparse"), None):
        with routing(router):
            y = module(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x))
    assert_equal(*found, rtol=1e-4, atol=1e-4)


def test_flops_are_those_of_the_dense_convolution():
    module = nn.Conv2d(16, 24, 3, padding=1)
    x = torch.randn(3, 16, 7, 7, requires_grad=True)
    attach(module, "2:8", "asp")
    for router in (None, Router("sparse")):
        with routing(router), FlopCounterMode(display=False) as counter:
            module(x).sum().backward()
        assert counter.get_total_flops() == 3 * 2 * 3 * 49 * 24 * 16 * 9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("conv", "out", "width", "tokens"),
    [
        (Convolution(12, 20, (11, 9), (3, 3), (2, 1), (1, 1), (1, 2)), 20, 108, 3 * 6 * 7),
        (Convolution(12, 16, (1, 30), (1, 5), groups=2), 16, 30, 26),
    ],
)
def test_keys_of_convolutions(conv, out, width, tokens, dtype):
    kernel, other, timer = CpuCsrKernel(), FakeKernel("other"), DeviceTimer(1, 1, 1)
    for gemm, size, sparsity in (
        ("forward", (out, width, tokens), "n:m"),
        ("dgrad", (width, out, tokens), "masked"),
        ("wgrad", (out, tokens, width), "outputs"),
    ):
        key = GemmKey(gemm, *size, dtype, NMPattern(1, 8), "cpu", sparsity=sparsity, conv=conv)
        assert check(kernel, key) == ""
        assert dense_ms(key, timer) > 0
        assert sparse_ms(kernel, key, timer)[0] > 0
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
    first, again = (Router("auto", file=tmp_path / "kernels.json") for _ in range(2))
    gradients(module, x, first)
    assert_equal(gradients(module, x, first), gradients(module, x, None), rtol=1e-4, atol=1e-4)
    decisions = [used.decision for used in first.used() if used.decision is not None]
    assert len(decisions) >= 3
    assert all(decision.source == "measured" for decision in decisions)
    gradients(module, x, again)
    assert dict(again.tuner.decisions) == dict(first.tuner.decisions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "memory"),
    [
        (lambda: (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.contiguous_format),
        (
            lambda: (nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 3, stride=2)),
            torch.channels_last,
        ),
    ],
    ids=["linear", "conv"],
)
@pytest.mark.parametrize(
    ("method", "estimator"), [("asp", None), ("asp", "mvue"), ("bi-mask", "mvue")]
)
def test_compiled_code_calls_the_kernels(make, memory, method, estimator):
    torch.manual_seed(0)
    module, is_conv = nn.Sequential(*make()), memory is torch.channels_last
    attach(module, "2:8", METHODS[method](), estimator)

    def batch(size):
        x = torch.randn(size, 32, 9, 9) if is_conv else torch.randn(size, 32)
        return x.contiguous(memory_format=memory)

    def calls():
        return {used.product: used.calls for used in router.used() if not used.product.reason}

    x, router = batch(8), Router("sparse")
    eager = gradients(module, x, router)
    before = calls()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, x, router), eager, rtol=1e-5, atol=1e-5)
    assert calls() == {key: 2 * number for key, number in before.items()}
    sparse = {gemm for gemm, kernel in ran(router) if kernel.startswith("cpu-")}
    assert sparse == {"forward", "dgrad", "wgrad"} - ({"wgrad"} if is_conv and estimator else set())
    assert not router.registry.failures
    x = batch(17)  # another number of tokens
    assert_equal(gradients(compiled, x, router), gradients(module, x, router), rtol=1e-5, atol=1e-5)
