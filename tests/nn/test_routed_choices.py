"""What a router chooses, measures, keeps and gives up."""

import pytest
import torch
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm.kernels import Router, routing
from lightning_nm.nn import products as routed_ops
from tests.support.fake_kernels import FakeKernel
from tests.support.routed import (
    assert_equal,
    attach,
    compare,
    gradients,
    masked,
    ran,
    simulated,
    timed,
)


@pytest.fixture
def layer():
    """A masked linear layer and an input."""
    return masked()


def of_forward():
    return FakeKernel(supports=lambda key: "only forward" if key.gemm != "forward" else "")


def test_auto_is_dense_until_tuned_and_then_takes_what_was_measured(layer, tmp_path):
    module, x = layer
    file = tmp_path / "new folder" / "kernels.json"
    router = timed(of_forward(), file=file)
    times = router.timer.timed
    state = torch.random.get_rng_state()
    with routing(router):
        y = module(x)
    assert ran(router) == {("forward", "reference")}
    assert not times
    y.sum().backward()
    measured = len(times)
    assert measured
    assert torch.equal(torch.random.get_rng_state(), state)
    gradients(module, x, router)
    router.tune()
    assert len(times) == measured
    assert {("forward", "fast"), ("dgrad", "reference"), ("wgrad", "reference")} <= ran(router)
    # Two batches: 9 ms for each of five GEMMs, dX of the first not needed, but for the second forward's 1 ms.
    assert router.sparse_share() == (pytest.approx(1 / 37), "measured times")

    again = timed(of_forward(), dense=1.0, fast=9.0, file=file)
    for _ in range(2):
        gradients(module, x, again)
    assert not again.timer.timed, "what the file knows is not measured"
    assert ("forward", "fast") in ran(again)


@pytest.mark.parametrize("content", ["my notes", '{"schema": 1, "environments": []}'])
@pytest.mark.parametrize("name", ["", "below.json"])
def test_a_file_that_cannot_be_used_ends_no_training(layer, tmp_path, content, name):
    (tmp_path / "kernels.json").write_text(content)
    router = timed(FakeKernel(), file=tmp_path / "kernels.json" / name)
    with pytest.warns(RuntimeWarning, match="not kept and will be measured again"):
        gradients(*layer, router)
    gradients(*layer, router)
    assert ("forward", "fast") in ran(router)
    assert (tmp_path / "kernels.json").read_text() == content


def test_what_is_measured_later_is_kept_in_the_end(layer, tmp_path):
    module, x = layer
    file = tmp_path / "kernels.json"
    router = timed(FakeKernel(), file=file)
    gradients(module, x, router)
    first = file.read_text()
    gradients(module, torch.cat([x] * 9), router)
    assert file.read_text() == first
    router.release()
    assert len(file.read_text()) > len(first)


def test_a_training_without_gradients_needs_forward_products_alone(layer):
    module, x = layer
    router = timed(FakeKernel())
    with routing(router), torch.no_grad():
        module(x)
    assert [product.key.gemm for product in router._recorded] == ["forward"]


@pytest.mark.parametrize(("fails", "warnings"), [("linear", 2), ("matmul", 1), ("pack", 3)])
def test_a_kernel_that_fails_is_replaced_with_one_warning(fails, warnings):
    def failing(*args):
        raise RuntimeError("no such algorithm")

    module, x = masked(estimator="mvue")
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    gradients(module, x, router)
    setattr(kernel, fails, failing)
    with pytest.warns(RuntimeWarning, match="no such algorithm") as warned:
        compare(module, x, router)
    assert len(warned) == warnings
    compare(module, x, router)  # a warning would be an error


class Flickers(FakeKernel):
    """Rounds otherwise in every second GEMM."""

    def linear(self, packed, x, bias=None):
        y = super().linear(packed, x, bias)
        return y * (1 + 1e-6) if len(self.calls) % 2 else y


def test_deterministic_algorithms_are_asked_for_later():
    module, x = masked(dtype=torch.float32)
    router = Router("sparse", [Flickers()])
    gradients(module, x, router)

    def calls():
        return {used.product: used.calls for used in router.used() if used.kernel == "fast"}

    before = calls()
    assert {product.key.gemm for product in before} >= {"forward"}
    torch.use_deterministic_algorithms(True)
    try:
        gradients(module, x, router)
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls() == before


def test_a_reset_lets_kernels_try_again(layer):
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    gradients(*layer, router)
    linear, kernel.linear = kernel.linear, lambda *args: torch.zeros(3)
    with pytest.warns(RuntimeWarning, match=r"it returned \(3,\)"):
        gradients(*layer, router)
    gradients(*layer, router)
    decisions = [used.decision for used in router.used() if used.kernel == "reference"]
    reasons = [decision.reason for decision in decisions if decision]
    assert reasons
    assert all("it failed" in reason for reason in reasons)
    kernel.linear = linear
    router.reset()
    gradients(*layer, router)
    assert ("forward", "fast") in ran(router)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_short_memory_switches_no_kernel_off(layer, error):
    def short(*args):
        raise error("40 GB wanted")

    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    gradients(*layer, router)
    linear, kernel.linear = kernel.linear, short
    compare(*layer, router)
    kernel.linear = linear
    kernel.calls.clear()
    compare(*layer, router)
    assert kernel.calls.count("linear") == 2


def test_operands_at_odd_addresses_are_copied_and_switch_no_kernel_off():
    module = nn.Linear(32, 64, dtype=torch.float64)  # no rounding moves a draw
    attach(module, estimator="mvue")
    odd = torch.randn(16 * 32 + 1, dtype=torch.float64)[1:].view(16, 32)
    module.bias = nn.Parameter(torch.zeros(65, dtype=torch.float64)[1:])
    router = simulated()
    compare(module, odd, router)
    assert ("forward", "simulated") in ran(router)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backends": "cusparselt"}, ValueError, "a list of GemmKernel objects, not 'cusparselt'"),
        ({"backends": SimulatedSparseKernel()}, ValueError, "a list of GemmKernel objects, not "),
        (
            {"backends": [SimulatedSparseKernel]},
            ValueError,
            "not the class SimulatedSparseKernel: write SimulatedSparseK",
        ),
        ({"backends": ["cusparselt"]}, ValueError, "hold GemmKernel objects, not 'cusparselt'"),
        ({"budget_s": -1}, ValueError, "must be a number of seconds"),
        ({"budget_s": "x"}, ValueError, "must be a number of seconds"),
        ({"kernels": "fast"}, ValueError, "kernels='fast' is unknown: use 'auto'"),
        ({"kernels": []}, ValueError, "pass a list of kernels as backends="),
        ({"budget": 3}, TypeError, "'budget'"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        Router(**arguments)


@pytest.mark.parametrize(("dense", "inactive"), [(1.0, True), (9.0, False)])
def test_a_router_without_a_faster_kernel_goes_inactive_after_a_step(layer, dense, inactive):
    """Not before: a checkpointed forward pass is recomputed as it was made."""
    router = timed(of_forward(), dense=dense, fast=5.0)
    router.deactivate_if_all_dense()
    gradients(*layer, router)
    assert router.active_or_none() is router
    router.deactivate_if_all_dense()
    assert (router.active_or_none() is None) == inactive
    router.reset()
    assert router.active_or_none() is router


def test_other_modes_stay_active(layer):
    router = Router("sparse", [FakeKernel(supports=lambda key: "nothing")])
    gradients(*layer, router)
    router.deactivate_if_all_dense()
    assert router.active_or_none() is router


def test_a_product_that_no_kernel_takes_has_the_kernels_reason():
    module, x = masked(method="asp")
    router = Router("sparse", [FakeKernel(probe="the device is too old")])
    gradients(module, x, router)
    forward, dgrad, wgrad = router.used()
    assert forward.decision.reason == "fast: the device is too old"
    assert dgrad.decision is wgrad.decision is None
    assert dgrad.product.reason == "masked; not N:M along out"
    assert wgrad.product.reason == "dense; dW at kept entries alone"


@pytest.mark.parametrize("kind", ["linear", "hugging-face-conv1d"])
@pytest.mark.parametrize("method", ["sr-ste", "transposable", "bi-mask"])
def test_dense_products_mask_in_one_pass_where_a_kernel_does(method, kind, monkeypatch):
    module, x = masked(kind, method=method)
    router = Router("sparse", [])
    expected = gradients(module, x, router)
    asked, packable = [], routed_ops.packable
    monkeypatch.setattr(routed_ops, "in_one_pass", lambda weight: True)
    monkeypatch.setattr(
        routed_ops, "packable", lambda *args: asked.append(args[1]) or packable(*args)
    )
    assert_equal(gradients(module, x, router), expected)
    (layer,) = module.nm_layers.values()
    permuted = layer.masks.permutation is not None
    assert asked == ["forward", "dgrad"][: 2 - permuted]
