"""How many products of a packed model are measured: coarse sizes, within a budget, or before the first request."""

import copy
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nm import NMPattern, load_packed, pack, packed_summary, save_packed, warm_up
from lightning_nm.kernels import GemmKey, tuner
from lightning_nm.kernels.cpu import CpuPermuteKernel, library
from lightning_nm.packed import kernel_choice
from tests.support.cpu_products import REASON
from tests.support.packed_models import prune

pytestmark = pytest.mark.skipif(
    bool(REASON) or not library.level(), reason="this CPU has no cpu-permute kernel"
)


class Clock:
    """Times of products, and a clock that a measurement of a dense product advances by one second."""

    def __init__(self):
        self.now = 0.0
        self.measured = []  # rows and tokens
        self.slow = set()  # of them, at which the kernel is slower

    def dense_ms(self, key, timer):
        size = key.rows, key.columns
        if not self.measured or self.measured[-1] != size:
            self.measured.append(size)
            self.now += 1
        return 1.0 if size in self.slow else 5.0


@pytest.fixture(autouse=True)
def clock(tmp_path, monkeypatch):
    made = Clock()
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    monkeypatch.setattr(tuner, "dense_ms", made.dense_ms)
    monkeypatch.setattr(tuner, "sparse_ms", lambda *_: (3.0, 0.0))
    monkeypatch.setattr(kernel_choice, "perf_counter", lambda: made.now)
    kernel_choice._tuner.cache_clear()
    yield made
    kernel_choice._tuner.cache_clear()


def linear(out=96):
    return prune(nn.Linear(64, out), "1:16")


def run(model, *tokens):
    for number in tokens:
        model(torch.randn(number, 64))


def test_sizes_are_powers_of_two(clock):
    model = pack(linear(), budget_s=1000)
    run(model, *range(6, 30))
    assert clock.measured == [(96, 8), (96, 16), (96, 32)]
    run(model, 3000, 4096, 5000, 9000)
    assert clock.measured[3:] == [(96, 4096)], (
        "longer products are taken to be as fast by the token"
    )


def test_images_are_powers_of_two(clock):
    model = pack(prune(nn.Conv2d(16, 32, 3, padding=1), "1:16"), budget_s=1000)
    assert model.weight.form == "cpu-csr"
    for images in (1, 3, 4, 5, 100):
        model(torch.randn(images, 16, 8, 8))
    assert [columns // 64 for _, columns in clock.measured] == [1, 4, 8, 64], (
        "at most 4096 positions"
    )


def test_the_budget_is_that_of_the_model(clock):
    first = pack(nn.Sequential(linear(), nn.Linear(96, 64), linear()), exclude="1", budget_s=2)
    run(first, 1, 2)
    assert clock.measured == [(96, 1), (96, 2)], "the layers are equal"
    run(first, 4, 8, 16)
    assert len(clock.measured) == 2, "the budget is used up"
    assert {each.form for each in packed_summary(first).weights} == {"cpu-permute"}
    second = pack(linear(32), budget_s=1)
    run(second, 4, 8)
    assert clock.measured[2:] == [(32, 4)], "another model has a budget of its own"
    run(pack(linear(160), budget_s=0), 4)
    assert len(clock.measured) == 3


def test_known_products_take_no_budget(clock):
    dense = linear()
    run(pack(copy.deepcopy(dense), budget_s=3), 1, 2, 4)
    kernel_choice._tuner.cache_clear()  # as a new process, which reads the file
    model = pack(dense, budget_s=1)
    run(model, 1, 2, 4, 8)
    assert clock.measured == [(96, 1), (96, 2), (96, 4), (96, 8)]


def test_the_nearest_measured_product_decides(clock):
    """The same matrix at the nearest size; without one, the nearest matrix."""
    clock.slow = {(96, 512), (160, 4)}
    run(pack(linear(), budget_s=9), 4, 512)
    run(pack(linear(160), budget_s=9), 4)
    seen = len(clock.measured)
    for out, tokens, form in (
        (96, 8, "cpu-permute"),
        (96, 256, "dense"),
        (176, 4, "dense"),
        (80, 4, "cpu-permute"),
    ):
        model = pack(linear(out), budget_s=0)
        run(model, tokens)
        assert model.weight.form == form, (out, tokens)
    other = pack(prune(nn.Linear(64, 160), "1:8"), budget_s=0)
    run(other, 4)
    assert other.weight.form == "cpu-permute", (
        "nothing of its pattern was measured: the smaller weight stays"
    )
    assert len(clock.measured) == seen


def test_a_loaded_model_has_a_budget(clock, tmp_path):
    save_packed(pack(linear(), kernels="sparse"), tmp_path / "a.safetensors")
    run(load_packed(nn.Linear(64, 96), tmp_path / "a.safetensors", budget_s=1), 1, 2, 4)
    assert clock.measured == [(96, 1)]
    for wrong in (-1.0, float("nan")):
        model = nn.Linear(64, 96)
        with pytest.raises(ValueError, match=r"budget_s=.* must be 0 or more seconds"):
            load_packed(model, tmp_path / "a.safetensors", budget_s=wrong)
        assert isinstance(model.weight, nn.Parameter)
        with pytest.raises(ValueError, match=r"budget_s=.* must be 0 or more seconds"):
            pack(linear(), budget_s=wrong)


def test_packing_is_not_timed(monkeypatch, tmp_path):
    """A packed layer packs its weight once, before its first product."""
    timed = []

    def time(self, function, device):
        with monkeypatch.context() as patch:
            for method in ("layout", "pack", "pack_masked"):
                patch.setattr(CpuPermuteKernel, method, refuse)
            function()
        timed.append(function)
        return 1e-3

    def refuse(*_):
        raise AssertionError("packing was timed")

    monkeypatch.undo()
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    kernel_choice._tuner.cache_clear()
    monkeypatch.setattr(tuner.DeviceTimer, "time", time)
    run(pack(linear()), 4)
    assert len(timed) == 3, "the dense product, that of the kernel, and the dense one again"


def test_a_thread_does_not_wait_for_the_measurement_of_another(clock):
    model, other = pack(linear(), budget_s=9), pack(linear(32), budget_s=9)
    kernel_choice._MEASURING.acquire()
    try:
        thread = threading.Thread(target=run, args=(model, 4))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert not clock.measured
    finally:
        kernel_choice._MEASURING.release()
    run(model, 4)
    assert clock.measured == [(96, 4)], "it is asked again"
    run(other, 4)
    assert len(clock.measured) == 2


def test_warm_up(clock):
    clock.slow = {(32, 256)}
    model = nn.Sequential(linear(), nn.Linear(96, 64), linear(32))
    pack(model, exclude="1", budget_s=0)
    run(model, 2)
    assert not clock.measured
    assert warm_up(model, batch=[1, 8], tokens=[1, 30]) is model
    assert {tokens for rows, tokens in clock.measured if rows == 96} == {1, 8, 32, 256}
    assert [each.form for each in packed_summary(model).weights] == ["cpu-permute", "dense"]
    seen = len(clock.measured)
    run(model, 1, 8, 30, 240, 2)
    assert len(clock.measured) == seen
    assert model[0].weight.choice.left_s == 0, "the budget of requests stays"
    warm_up(pack(linear(48), kernels="sparse"), batch=[4])
    assert len(clock.measured) == seen, "nothing is chosen without `auto`"


def test_warm_up_by_an_example(clock):
    convolution = prune(nn.Conv2d(16, 32, 3, padding=1), "1:16")
    model = pack(
        nn.Sequential(convolution, nn.Flatten(), prune(nn.Linear(2048, 32), "1:16")), budget_s=0
    )
    with pytest.raises(
        ValueError, match=r"'0.weight' is of a convolution, .*: pass example=image\[None\]"
    ):
        warm_up(model, batch=[2])
    with pytest.raises(ValueError, match=r"the shape \[3, 16, 8, 8\]: it must be one input"):
        warm_up(model, example=torch.randn(3, 16, 8, 8))
    assert not clock.measured
    warm_up(model, batch=[1, 4], example=torch.randn(1, 16, 8, 8))
    assert {columns for _, columns in clock.measured} == {64, 4 * 64, 1, 4}


@pytest.mark.parametrize(
    ("option", "value"), [("batch", []), ("batch", [0]), ("tokens", [1.5]), ("tokens", [-1])]
)
def test_warm_up_refuses_sizes(clock, option, value):
    with pytest.raises(ValueError, match=rf"{option}=.* must be positive integers"):
        warm_up(pack(linear()), **{option: value})
    assert not clock.measured


def test_warm_up_needs_a_packed_model():
    with pytest.raises(
        ValueError, match=r"Linear has no packed layer: call lightning_nm.pack\(model\) first"
    ):
        warm_up(nn.Linear(4, 4))


def test_copies_share_no_budget_with_other_models(clock):
    model = pack(nn.Sequential(linear(), linear(64)), budget_s=2)
    copied = copy.deepcopy(model)
    assert copied[0].weight.choice is copied[1].weight.choice
    assert copied[0].weight.choice is not model[0].weight.choice
    run(model[0], 1, 2, 4)
    assert copied[0].weight.choice.left_s == 2


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        given = {
            tensor.untyped_storage().data_ptr()
            for tensor in args
            if isinstance(tensor, torch.Tensor)
        }
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.untyped_storage().data_ptr() not in given
            ):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_no_dense_copy_is_made_while_a_product_is_measured(tmp_path, monkeypatch, kind):
    monkeypatch.undo()
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    monkeypatch.setattr(tuner, "PANEL_BYTES", 1)
    kernel_choice._tuner.cache_clear()
    monkeypatch.setattr(
        kernel_choice.DeviceTimer, "time", lambda self, function, device: function() is None or 1e-3
    )
    # 64 of 1024 rows, and values that the kernel is faster with: it is not measured twice, and does not become dense.
    monkeypatch.setattr(tuner, "sparse_ms", lambda *given: measured.append(given) or (1e-3, 0.0))
    measured = []
    if kind == "linear":
        module, x = nn.Linear(256, 1024, bias=False), torch.randn(2, 256)
    else:
        module, x = nn.Conv2d(32, 1024, 3, bias=False), torch.randn(1, 32, 4, 4)
    dense_bytes = module.weight.nbytes
    model = pack(prune(module, "1:16"), budget_s=1000)
    with Largest() as largest, torch.no_grad():
        model(x)
    assert len(measured) == 1
    assert largest.bytes < dense_bytes / 4
    kernel_choice._tuner.cache_clear()


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([torch.float32, torch.bfloat16]))
def test_few_rows_of_a_large_weight(rows, depth, dtype):
    key = GemmKey("forward", rows, depth, 16, dtype, NMPattern(2, 4), "cpu")
    few = tuner.few_rows(key)
    assert replace(few, rows=rows) == key
    assert few.rows == rows or (few.rows < rows and few.rows % 64 == 0)
    assert few.rows <= 64 or few.rows * depth * dtype.itemsize <= max(
        tuner.PANEL_BYTES, 64 * depth * 4
    )


def test_a_time_of_few_rows_is_scaled(clock, monkeypatch):
    monkeypatch.setattr(tuner, "PANEL_BYTES", 1)
    monkeypatch.setattr(tuner, "dense_ms", lambda key, timer: key.rows / 64)
    run(pack(linear(640), budget_s=1000), 4)
    (decision,) = kernel_choice._tuner("cpu-permute", torch.get_num_threads()).decisions.values()
    assert decision.dense_ms == pytest.approx(10)


def test_threads_have_one_tuner(clock):
    model = pack(linear(64), budget_s=0)
    threads = [threading.Thread(target=run, args=(model, 4)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert kernel_choice._tuner.cache_info().misses == 1


def test_a_file_that_cannot_be_written_is_told_once(clock, tmp_path, monkeypatch):
    (tmp_path / "packed.json").write_text("{ cut")
    model = pack(linear(), budget_s=1000)
    with pytest.warns(
        RuntimeWarning,
        match=r"not kept and will be measured again.*packed\.json does not hold decisions",
    ):
        run(model, 4)
    run(model, 4, 8, 16)
    assert len(clock.measured) == 3
