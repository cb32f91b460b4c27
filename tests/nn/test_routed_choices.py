"""What a router chooses, measures, keeps and gives up."""

import pytest
import torch
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm.kernels import Router, routing
from lightning_nm.nn import products as routed_ops
from tests.support.fake_kernels import FakeKernel, FakeTimer
from tests.support.kinds import make
from tests.support.routed import assert_equal, attach, gradients, ran, simulated

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def test_auto_is_dense_until_tuned_and_then_takes_what_was_measured(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel(supports=lambda key: "only forward" if key.gemm != "forward" else "")
    timer = FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
    file = tmp_path / "new folder" / "kernels.json"
    router = Router("auto", [fast], file=file, timer=timer)
    with routing(router):
        y = module(x)
    assert ran(router) == {("forward", "reference")}
    assert not timer.timed
    y.sum().backward()
    assert timer.timed
    timed = len(timer.timed)
    gradients(module, x, router)
    router.tune()
    assert len(timer.timed) == timed
    assert {("forward", "fast"), ("dgrad", "reference"), ("wgrad", "reference")} <= ran(router)
    share, basis = router.sparse_share()
    # Two batches: 9 ms for each of five products, dX of the first not needed, but for the second forward's 1 ms.
    assert share == pytest.approx(1 / 37)
    assert basis == "measured times"

    again = Router(
        "auto", [fast], file=file, timer=(second := FakeTimer([fast], dense=1.0, fast=(9.0, 0.0)))
    )
    gradients(module, x, again)
    again.tune()
    gradients(module, x, again)
    assert not second.timed, "what the file knows is not measured"
    assert ("forward", "fast") in ran(again)


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    (tmp_path / "kernels.json").write_text("my notes")
    for file in (tmp_path / "kernels.json", tmp_path / "kernels.json" / "below.json"):
        router = Router(
            "auto", [fast], file=file, timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
        )
        with pytest.warns(RuntimeWarning, match="not kept and will be measured again"):
            gradients(module, x, router)
        gradients(module, x, router)
        assert ("forward", "fast") in ran(router)
    assert (tmp_path / "kernels.json").read_text() == "my notes"


def test_a_training_without_gradients_needs_forward_products_alone():
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    router = Router("auto", [fast], timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    with routing(router), torch.no_grad():
        module(x)
    assert [product.key.gemm for product in router._recorded] == ["forward"]


@pytest.mark.parametrize("fails", ["linear", "matmul", "pack"])
def test_a_kernel_that_fails_is_replaced_with_one_warning(fails):
    def failing(*args):
        raise RuntimeError("no such algorithm")

    module, x = make("linear")
    attach(module, estimator="mvue")
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    router.tune()
    gradients(module, x, router)
    setattr(kernel, fails, failing)
    expected = gradients(module, x, None)
    with pytest.warns(RuntimeWarning, match="no such algorithm") as warned:
        assert_equal(gradients(module, x, router), expected)
    assert len(warned) == {"linear": 2, "matmul": 1, "pack": 3}[fails]
    assert_equal(gradients(module, x, router), expected)  # a warning would be an error


class Flickers(FakeKernel):
    """Rounds otherwise in every second product."""

    def linear(self, packed, x, bias=None):
        y = super().linear(packed, x, bias)
        return y * (1 + 1e-6) if len(self.calls) % 2 else y


def test_deterministic_algorithms_are_asked_for_later():
    module, x = make("linear", torch.float32)
    attach(module)
    router = Router("sparse", [Flickers()])
    gradients(module, x, router)
    assert ("forward", "fast") in ran(router)
    before = {used.product: used.calls for used in router.used() if used.kernel == "fast"}
    torch.use_deterministic_algorithms(True)
    try:
        gradients(module, x, router)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {used.product: used.calls for used in router.used() if used.kernel == "fast"} == before


def test_a_reset_lets_kernels_try_again():
    module, x = make("linear")
    attach(module)
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    gradients(module, x, router)
    linear, kernel.linear = kernel.linear, lambda *args: torch.zeros(3)
    with pytest.warns(RuntimeWarning, match=r"it returned \(3,\)"):
        gradients(module, x, router)
    gradients(module, x, router)
    reasons = [
        used.decision.reason
        for used in router.used()
        if used.kernel == "reference" and used.decision
    ]
    assert all("it failed" in reason for reason in reasons)
    assert reasons
    kernel.linear = linear
    router.reset()
    gradients(module, x, router)
    assert ("forward", "fast") in ran(router)


def test_short_memory_switches_no_kernel_off():
    module, x = make("linear")
    attach(module)
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    expected = gradients(module, x, router)
    linear = kernel.linear

    def short(*args):
        raise torch.OutOfMemoryError("40 GB wanted")

    kernel.linear = short
    assert_equal(gradients(module, x, router), expected)
    kernel.linear = linear
    kernel.calls.clear()
    assert_equal(gradients(module, x, router), expected)
    assert kernel.calls.count("linear") == 2


def test_operands_at_odd_addresses_are_copied_and_switch_no_kernel_off():
    module = nn.Linear(32, 64, dtype=torch.float64)  # no rounding moves a draw
    attach(module, estimator="mvue")
    odd = torch.randn(16 * 32 + 1, dtype=torch.float64)[1:].view(16, 32)
    module.bias = nn.Parameter(torch.zeros(65, dtype=torch.float64)[1:])
    router = simulated()
    assert_equal(gradients(module, odd, router), gradients(module, odd, None))
    with routing(router):
        module(odd)
    assert ("forward", "simulated") in ran(router)


def test_measuring_draws_no_random_numbers():
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    router = Router("auto", [fast], timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    state = torch.random.get_rng_state()
    gradients(module, x, router)
    assert len(router.timer.timed) == 8, "two products, of which that of dgrad is permuted"
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("cusparselt", "must be a list of GemmKernel objects, not 'cusparselt'"),
        (SimulatedSparseKernel(), "must be a list of GemmKernel objects, not "),
        ([SimulatedSparseKernel], r"not the class SimulatedSparseKernel: write SimulatedSparseK"),
        (["cusparselt"], "must hold GemmKernel objects, not 'cusparselt'"),
    ],
)
def test_kernels_are_objects_in_a_list(kernels, message):
    with pytest.raises(ValueError, match=message):
        Router("sparse", kernels)


@pytest.mark.parametrize("budget", [-1, "x"])
def test_budgets(budget):
    with pytest.raises(ValueError, match="must be a number of seconds"):
        Router(budget_s=budget)


def test_a_damaged_file_ends_no_training(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    file = tmp_path / "kernels.json"
    file.write_text('{"schema": 1, "environments": []}')
    router = Router("auto", [fast], file=file, timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    with pytest.warns(RuntimeWarning, match="does not hold decisions"):
        gradients(module, x, router)


def test_what_is_measured_later_is_kept_in_the_end(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    file = tmp_path / "kernels.json"
    router = Router("auto", [fast], file=file, timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    gradients(module, x, router)
    first = file.read_text()
    gradients(module, torch.cat([x] * 9), router)
    assert file.read_text() == first
    router.release()
    assert len(file.read_text()) > len(first)


def test_bad_arguments_are_named():
    for arguments, error, words in (
        ({"kernels": "fast"}, ValueError, "kernels='fast' is unknown: use 'auto'"),
        ({"kernels": []}, ValueError, "pass a list of kernels as backends="),
        ({"budget": 3}, TypeError, "'budget'"),
    ):
        with pytest.raises(error, match=words):
            Router(**arguments)


@pytest.mark.parametrize(("dense", "inactive"), [(1.0, True), (9.0, False)])
def test_a_router_without_a_faster_kernel_goes_inactive_after_a_step(dense, inactive):
    """Not before: a checkpointed forward pass is recomputed as it was made."""
    module, x = make("linear")
    attach(module)
    fast = FakeKernel(supports=lambda key: "only forward" if key.gemm != "forward" else "")
    router = Router("auto", [fast], timer=FakeTimer([fast], dense=dense, fast=(5.0, 0.0)))
    router.deactivate_if_all_dense()
    gradients(module, x, router)
    assert router.active_or_none() is router
    router.deactivate_if_all_dense()
    assert (router.active_or_none() is None) == inactive
    router.reset()
    assert router.active_or_none() is router


def test_other_modes_stay_active():
    module, x = make("linear")
    attach(module)
    router = Router("sparse", [FakeKernel(supports=lambda key: "nothing")])
    gradients(module, x, router)
    router.deactivate_if_all_dense()
    assert router.active_or_none() is router


def test_a_product_that_no_kernel_takes_has_the_kernels_reason():
    module, x = make("linear")
    attach(module, method="asp")
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
    module, x = make(kind)
    attach(module, method=method)
    router = Router("sparse", [])
    expected = gradients(module, x, router)
    calls = []
    monkeypatch.setattr(routed_ops, "in_one_pass", lambda weight: calls.append(weight) or True)
    packable = routed_ops.packable

    def noted(layer, which, weight, dtype):
        calls.append(which)
        return packable(layer, which, weight, dtype)

    monkeypatch.setattr(routed_ops, "packable", noted)
    assert_equal(gradients(module, x, router), expected)
    (layer,) = module.nm_layers.values()
    permuted = layer.masks.permutation is not None
    names = [call for call in calls if isinstance(call, str)]
    assert names == ["forward", "dgrad"][: 2 - permuted]
