"""Masked layers on the kernels of a router: the same numbers, in every shape, layout and dtype."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import MVUE, NMSparsifier
from lightning_nm.kernels import routing
from tests.support import contract, places
from tests.support.kinds import KINDS, make
from tests.support.pairs import pairwise_cases
from tests.support.routed import METHODS, attach, compare, gradients, masked, ran, simulated

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize(
    ("method", "kind", "pattern"), pairwise_cases(METHODS, KINDS, ["2:4", "1:2", "1:16", "3:8"])
)
def test_the_same_numbers(method, kind, pattern):
    module, x = make(kind)
    attach(module, pattern, METHODS[method](), MVUE(pattern))
    router = simulated()
    compare(module, x, router, **EXACT)
    if contract.KERNEL is SimulatedSparseKernel:
        linear = not kind.startswith("conv")
        sparse = linear and method not in ("dense", "soft-threshold") and pattern != "3:8"
        assert (("forward", "simulated") in ran(router)) == sparse


@pytest.mark.parametrize(
    ("method", "estimator", "sparse"),
    [
        ("dense", None, set()),
        ("ste", None, {"forward"}),
        ("bi-mask", None, {"forward", "dgrad"}),
        ("transposable", None, {"forward", "dgrad"}),
        ("ste", "top-n", {"forward", "wgrad"}),
        ("dense", "mvue", {"wgrad"}),
        ("bi-mask", "approx-mvue", {"forward", "dgrad", "wgrad"}),
    ],
)
def test_each_product_that_can_be_sparse_is(method, estimator, sparse):
    module, x = masked(method=method, estimator=estimator)
    router = simulated()
    gradients(module, x, router)
    assert {gemm for gemm, kernel in ran(router) if kernel == "simulated"} == sparse
    dense = {used.product.key.gemm for used in router.used() if used.product.reason}
    assert dense == {"forward", "dgrad", "wgrad"} - sparse
    assert router.sparse_share() == (pytest.approx(len(sparse) / 3), "dense multiply-adds")


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 6), max_size=3),
    layout=st.sampled_from(["dense", "transposed", "every second"]),
    estimator=st.sampled_from([None, "mvue", "top-n"]),
)
def test_any_number_of_tokens_in_any_layout(tokens, layout, estimator):
    torch.manual_seed(0)
    module = nn.Linear(32, 64, dtype=torch.float64)
    attach(module, estimator=estimator)
    x = torch.randn(*tokens, 64, dtype=torch.float64)[..., :32]
    if layout == "transposed":
        x = x.mT.contiguous().mT if tokens else x.contiguous()
    elif layout == "dense":
        x = x.contiguous()
    router = simulated()
    compare(module, x, router, **EXACT)
    assert ("dgrad", "simulated") in ran(router)


def test_an_empty_batch_and_an_expanded_gradient():
    module, _ = masked(estimator="mvue")
    with routing(simulated()):
        empty = module(torch.zeros(0, 32, dtype=torch.float64, requires_grad=True))
        empty.sum().backward()
    assert empty.shape == (0, 64)
    results = []
    for router in (None, simulated()):
        module.zero_grad()
        with routing(router):
            module(torch.ones(8, 32).double()).sum().backward()  # a gradient of strides 0
        results.append(module.weight.grad.clone())
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    module, x = masked(dtype=torch.float32, estimator="mvue")
    # Of a given dY: two outputs may round otherwise in 16 bits, and of a dY made of them another sample may be drawn.
    grad = torch.randn(len(x), 64, dtype=dtype)
    found = []
    for router in (None, simulated()):
        with torch.autocast("cpu", dtype):
            found.append(dict(places.results(module, x, grad, router).items()))
    assert found[0]["y"].dtype == dtype
    torch.testing.assert_close(*found, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("conv_layout", ["channels", "flat"])
def test_convolutions_of_one_tap_with_channels_last_are_matrix_products(kind, conv_layout):
    torch.manual_seed(0)
    module = kind(16, 32, 1).double()
    options = {"conv_layout": conv_layout, "skip_first_last": False}
    NMSparsifier(module, "2:4", "bi-mask", "mvue", **options).attach()
    shape = (2, 4, 5, 6)[: module.weight.dim() - 1]
    x = torch.randn(*shape, 16).double().movedim(-1, 1)
    router = simulated()
    compare(module, x, router, **EXACT)
    assert ran(router) == {(gemm, "simulated") for gemm in ("forward", "dgrad", "wgrad")}
    first = simulated()
    gradients(module, x.contiguous(), first)
    assert {used.product.reason for used in first.used()} == {"a convolution that no kernel takes"}


@pytest.mark.parametrize("options", [{"stride": 2}, {"padding": 1}, {"groups": 2}], ids=str)
def test_convolutions_that_are_none_stay_convolutions(options):
    module = nn.Conv2d(16, 16, 1, **options).double()
    attach(module)
    router = simulated()
    compare(module, torch.randn(2, 6, 6, 16).double().movedim(-1, 1), router, **EXACT)
    assert {kernel for _, kernel in ran(router)} == {"reference"}


@pytest.mark.parametrize("shape", [(8, 32), (32,)])
def test_outputs_may_be_changed_in_place(shape):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True))
    attach(module)
    compare(module, torch.randn(shape), simulated())


@pytest.mark.parametrize("x", [torch.randint(0, 5, (8, 32)), torch.randn(8, 32).double()])
@pytest.mark.parametrize("router", [None, simulated()])
def test_products_of_other_dtypes_are_the_dense_ones_to_refuse(x, router):
    module, _ = masked(dtype=torch.float32)
    with routing(router), pytest.raises(RuntimeError, match="dtype"):
        module(x)


def test_a_router_may_go_before_the_backward_pass():
    module, x = masked()
    with routing(simulated()):
        y = module(x.requires_grad_())
    gc.collect()
    y.sum().backward()
    assert x.grad is not None


def test_only_products_that_run_are_counted():
    module = nn.Conv2d(16, 16, 3)
    attach(module)
    router = simulated()
    with routing(router):
        y = module(torch.randn(2, 16, 5, 5))
    assert {used.product.key.gemm for used in router.used()} == {"forward"}
    y.sum().backward()
    assert {used.product.key.gemm for used in router.used()} == {"forward", "wgrad"}
