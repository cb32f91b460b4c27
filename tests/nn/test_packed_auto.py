"""kernels="auto" of packed layers: no GEMM is slower than the dense one, no layer takes more memory, and measuring has
a budget."""

import copy
import gc
import json
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_nm import (
    NMPattern,
    load_packed,
    pack,
    packed_summary,
    save_packed,
    unpacked_state_dict,
    warm_up,
)
from lightning_nm.kernels import GemmKey, tuner
from lightning_nm.kernels.cpu import CpuPermuteKernel, library
from lightning_nm.kernels.cpu.kernels import dense_matrix
from lightning_nm.packed import kernel_choice
from tests.support.cpu_products import REASON
from tests.support.kinds import make
from tests.support.packed_models import held, prune

pytestmark = pytest.mark.skipif(
    bool(REASON) or not library.level(), reason="this CPU has no cpu-permute kernel"
)


def linear(out=96, pattern="1:16", **options):
    return prune(nn.Linear(64, out, **options), pattern)


def run(model, *tokens):
    for number in tokens:
        model(torch.randn(number, 64))


def forms(model):
    return [each.form for each in packed_summary(model).weights]


@pytest.mark.parametrize(
    ("dense_ms", "form"), [(2.9, "dense"), (3.1, "cpu-permute"), (5.0, "cpu-permute")]
)
def test_the_faster_of_kernel_and_dense_product(clock, tmp_path, dense_ms, form):
    clock.dense[8] = dense_ms
    for _ in range(2):
        dense = linear()
        model, x = pack(copy.deepcopy(dense)), torch.randn(5, 64)
        assert model.weight.form == "cpu-permute", "nothing is measured before the first GEMM"
        for _ in range(2):
            torch.testing.assert_close(model(x), dense(x))
            assert model.weight.form == form
        # before and after the kernel, twice if dense seems faster; in the second run the file has it
        assert len(clock.asked) == (4 if form == "dense" else 2)
        kernel_choice._tuner.cache_clear()
    kept = json.loads((tmp_path / "packed.json").read_text())["environments"]
    ((name, decision),) = next(iter(kept.values())).items()
    key = json.loads(name)
    assert [key[size] for size in ("rows", "depth", "columns")] == [96, 64, 8]
    assert decision["kernel"] == ("reference" if form == "dense" else form)
    assert "hysteresis 0;" in decision["terms"] + ";"


def test_a_disturbed_measurement_is_repeated(clock):
    clock.dense[8] = [1.0, 1.0, 5.0, 5.0]
    model = pack(linear())
    run(model, 5)
    assert model.weight.form == "cpu-permute"
    assert len(clock.asked) == 4


def test_one_size_at_which_the_kernel_is_slower_decides(clock):
    """The layer keeps one form: 2048 tokens are faster dense, so it is dense for one token, too."""
    clock.dense[2048] = 1.0
    dense = linear()
    model = pack(copy.deepcopy(dense), budget_s=9)
    run(model, 0, 1)
    assert clock.measured == [(96, 1)], "an empty GEMM decides nothing"
    assert model.weight.form == "cpu-permute"
    small = model.weight.nbytes
    run(model, 2048)
    assert model.weight.form == "dense"
    assert model.weight.nbytes == dense.weight.nbytes > small
    seen, x = len(clock.asked), torch.randn(7, 64)
    assert torch.equal(model(x), dense(x))
    assert len(clock.asked) == seen, "a dense weight measures nothing"
    assert torch.equal(unpacked_state_dict(model)["weight"], dense.weight)
    assert model.state_dict()["weight.values"].shape == (96, 4, 1)
    assert copy.deepcopy(model).weight.form == "cpu-permute", "a copy begins again"
    assert model.double().weight.form == "dense", "no kernel takes float64"
    assert model.float().weight.form == "cpu-permute"


def test_the_layout_is_freed(clock):
    clock.dense[4] = 1.0
    model = pack(linear())
    layout = [weakref.ref(tensor) for tensor in model.weight.operand.tensors]
    gc.disable()
    try:
        run(model, 4)
        assert not any(ref() is not None for ref in layout)
    finally:
        gc.enable()


@pytest.mark.parametrize("why", ["autocast", "gradient", "failure"])
def test_products_without_a_kernel(clock, monkeypatch, why):
    dense = linear()
    x = torch.randn(4, 64, requires_grad=why == "gradient")
    for kernels, form in (("sparse", "cpu-permute"), ("auto", "dense")):
        model = pack(copy.deepcopy(dense), kernels=kernels)
        if why == "failure":
            model(x)
            with monkeypatch.context() as patch:
                patch.setattr(CpuPermuteKernel, "linear", lambda *_: torch.zeros(1))
                with pytest.warns(RuntimeWarning, match="'cpu-permute' is switched off"):
                    assert torch.equal(model(x), dense(x))
            kernel_choice.registry_of.cache_clear()
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
                assert torch.equal(model(x), dense(x))
        assert model.weight.form == form
        if why == "gradient":
            found, expected = (torch.autograd.grad(f(x).square().sum(), x) for f in (model, dense))
            torch.testing.assert_close(found, expected)


def test_a_dense_weight_that_inference_mode_made_has_gradients_of_inputs(clock):
    clock.dense[4] = 1.0
    model, x = pack(linear()), torch.randn(4, 64)
    with torch.inference_mode():
        model(x)
    assert model.weight.form == "dense"
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("x", [torch.randn(4, 60), torch.randn(4, 64).double(), torch.tensor(1.0)])
def test_wrong_inputs_change_nothing(clock, x):
    model = pack(linear())
    with pytest.raises(RuntimeError):
        model(x)
    assert model.weight.form == "cpu-permute"


@pytest.mark.parametrize("kind", ["conv2d", "conv1d", "conv2d-groups", "conv3d"])
def test_convolutions_that_take_too_much_are_dense(kind):
    module, x = make(kind, torch.float32)
    prune(module, "2:4")
    expected, size = module(x).detach(), held(module)
    model = pack(module)
    assert set(forms(model)) == {"dense"}
    assert held(model) == size
    assert torch.equal(model(x), expected)


def test_parts_of_a_projection(clock):
    """Query, key and value are rows of one weight: all of it becomes dense."""
    module, x = make("cross-attention", torch.float32)
    prune(module, "1:16")
    expected = module(x)
    model = pack(module)
    weight = model.mha.in_proj_weight
    torch.testing.assert_close(model(x), expected)
    operand = weight.operand
    assert weight.form == "cpu-permute"
    assert len(operand._parts) == 3
    storages = {part.tensors[0].untyped_storage().data_ptr() for part in operand._parts.values()}
    assert storages == {operand.tensors[0].untyped_storage().data_ptr()}
    assert operand.part((8, 32)) is None
    weight.hold_dense()
    assert weight.form == "dense"
    assert weight.operand is None
    torch.testing.assert_close(model(x), expected)


@given(st.data())
def test_never_more_memory_than_dense(data):
    pattern = data.draw(st.sampled_from(["2:4", "3:4", "1:4", "1:16", "7:8", "1:2"]))
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    sizes = [data.draw(st.integers(1, 6)) * 16 for _ in range(2)]
    if data.draw(st.booleans()):
        dense = nn.Linear(*sizes, bias=False)
    else:
        dense = nn.Conv2d(*sizes, data.draw(st.integers(1, 3)), bias=False)
    dense = prune(dense, pattern).to(data.draw(st.sampled_from(dtypes)))
    model = pack(copy.deepcopy(dense), pattern)
    (weight,) = packed_summary(model).weights
    assert weight.bytes == held(model) <= weight.dense_bytes == held(dense)
    if weight.form != "dense":
        model.weight.hold_dense()
    (weight,) = packed_summary(model).weights
    assert weight.bytes == held(model) == weight.dense_bytes
    assert torch.equal(unpacked_state_dict(model)["weight"], dense.weight)


def test_the_summary():
    layers = linear(bias=False).half(), linear(pattern="2:4", bias=False)
    model = pack(nn.Sequential(*layers), kernels="reference")
    summary = packed_summary(model)
    assert [each[:3] for each in summary.weights] == [
        ("0.weight", "1:16", "packed"),
        ("1.weight", "2:4", "packed"),
    ]
    assert (summary.bytes, summary.dense_bytes) == (held(model), 64 * 96 * (2 + 4))
    last = ["2", "weights", f"{summary.bytes}", f"{summary.bytes / 36864:.3f}"]
    assert str(summary).splitlines()[-1].split() == last


@pytest.mark.slow
@pytest.mark.parametrize("dense_ms", [1.0, 5.0])
def test_a_compiled_graph_runs_on_when_the_layer_becomes_dense(clock, dense_ms):
    """Within the graph, where the dense GEMM is faster, and between two runs of it."""
    torch._dynamo.reset()
    clock.dense[8] = dense_ms
    dense, x = linear(), torch.randn(6, 64)
    model = pack(copy.deepcopy(dense))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for form in ("dense" if dense_ms == 1.0 else "cpu-permute", "dense"):
        torch.testing.assert_close(compiled(x), dense(x))
        assert model.weight.form == form
        model.weight.hold_dense()


def test_a_layer_that_becomes_dense_while_its_weight_is_read(monkeypatch):
    """As another thread does: here, between the two reads of one call."""
    dense = linear()
    weight = pack(copy.deepcopy(dense)).weight

    def meanwhile(*arguments):
        monkeypatch.undo()
        weight.hold_dense()
        return dense_matrix(*arguments)

    monkeypatch.setattr("lightning_nm.packed.module.dense_matrix", meanwhile)
    assert torch.equal(weight.product_matrix(), dense.weight)
    assert weight.form == "dense"


# ------------------------------------------------------------------------------------------------------------- budget


def test_sizes_are_powers_of_two(clock):
    model = pack(linear(), budget_s=1000)
    run(model, *range(6, 30))
    assert clock.measured == [(96, 8), (96, 16), (96, 32)]
    run(model, 3000, 4096, 5000, 9000)
    assert clock.measured[3:] == [(96, 4096)], "longer GEMMs are as fast by the token"


def test_images_are_powers_of_two(clock):
    model = pack(prune(nn.Conv2d(16, 32, 3, padding=1), "1:16"), budget_s=1000)
    assert model.weight.form == "cpu-csr"
    for images in (1, 3, 4, 5, 100):
        model(torch.randn(images, 16, 8, 8))
    assert [columns // 64 for _, columns in clock.measured] == [1, 4, 8, 64], "4096 positions"


def test_the_budget_is_that_of_the_model(clock):
    first = pack(nn.Sequential(linear(), nn.Linear(96, 64), linear()), exclude="1", budget_s=2)
    run(first, 1, 2, 4, 8, 16)
    assert clock.measured == [(96, 1), (96, 2)], "the layers are equal, and the budget is used up"
    assert set(forms(first)) == {"cpu-permute"}
    run(pack(linear(32), budget_s=1), 4, 8)
    assert clock.measured[2:] == [(32, 4)], "another model has a budget of its own"
    run(pack(linear(160), budget_s=0), 4)
    assert len(clock.measured) == 3


def test_known_products_take_no_budget(clock):
    dense = linear()
    run(pack(copy.deepcopy(dense), budget_s=3), 1, 2, 4)
    kernel_choice._tuner.cache_clear()  # as a new process, which reads the file
    run(pack(dense, budget_s=1), 1, 2, 4, 8)
    assert clock.measured == [(96, 1), (96, 2), (96, 4), (96, 8)]


def test_the_nearest_measured_product_decides(clock):
    """The same matrix at the nearest size; without one, the nearest matrix; else the smaller weight stays."""
    clock.dense |= {(96, 512): 1.0, (160, 4): 1.0}
    run(pack(linear(), budget_s=9), 4, 512)
    run(pack(linear(160), budget_s=9), 4)
    seen = len(clock.measured)
    for out, tokens, pattern, form in (
        (96, 8, "1:16", "cpu-permute"),
        (96, 256, "1:16", "dense"),
        (176, 4, "1:16", "dense"),
        (80, 4, "1:16", "cpu-permute"),
        (160, 4, "1:8", "cpu-permute"),
    ):
        model = pack(linear(out, pattern), budget_s=0)
        run(model, tokens)
        assert model.weight.form == form, (out, tokens)
    assert len(clock.measured) == seen


def test_a_loaded_model_has_a_budget(clock, tmp_path):
    path = tmp_path / "a.safetensors"
    save_packed(pack(linear(), kernels="sparse"), path)
    run(load_packed(nn.Linear(64, 96), path, budget_s=1), 1, 2, 4)
    assert clock.measured == [(96, 1)]
    for wrong in (-1.0, float("nan")):
        model = nn.Linear(64, 96)
        with pytest.raises(ValueError, match=r"budget_s=.* must be 0 or more seconds"):
            load_packed(model, path, budget_s=wrong)
        assert isinstance(model.weight, nn.Parameter)
        with pytest.raises(ValueError, match=r"budget_s=.* must be 0 or more seconds"):
            pack(linear(), budget_s=wrong)


def test_packing_is_not_timed(monkeypatch):
    """A packed layer packs its weight once, before its first GEMM."""
    timed = []

    def time(self, function, device):
        with monkeypatch.context() as patch:
            for method in ("layout", "pack", "pack_masked"):
                patch.setattr(CpuPermuteKernel, method, None)
            function()
        timed.append(function)
        return 1e-3

    monkeypatch.setattr(tuner.DeviceTimer, "time", time)
    run(pack(linear()), 4)
    assert len(timed) == 3, "the dense GEMM, that of the kernel, and the dense one again"


def test_threads(clock):
    """They have one tuner, and none waits for the measurement of another."""
    model = pack(linear(), budget_s=9)
    with kernel_choice._MEASURING:
        threads = [threading.Thread(target=run, args=(model, 4)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not clock.measured
    run(model, 4)
    assert clock.measured == [(96, 4)], "it is asked again"
    assert kernel_choice._tuner.cache_info().misses == 1


def test_warm_up(clock):
    clock.dense[32, 256] = 1.0
    model = nn.Sequential(linear(), nn.Linear(96, 64), linear(32))
    pack(model, exclude="1", budget_s=0)
    run(model, 2)
    assert not clock.measured
    assert warm_up(model, batch=[1, 8], tokens=[1, 30]) is model
    assert {tokens for rows, tokens in clock.measured if rows == 96} == {1, 8, 32, 256}
    assert forms(model) == ["cpu-permute", "dense"]
    seen = len(clock.measured)
    run(model, 1, 8, 30, 240, 2)
    assert model[0].weight.choice.left_s == 0, "the budget of requests stays"
    warm_up(pack(linear(48), kernels="sparse"), batch=[4])
    assert len(clock.measured) == seen, "nothing is chosen without `auto`"


def test_warm_up_by_an_example(clock):
    convolution = prune(nn.Conv2d(16, 32, 3, padding=1), "1:16")
    head = prune(nn.Linear(2048, 32), "1:16")
    model = pack(nn.Sequential(convolution, nn.Flatten(), head), budget_s=0)
    for options, message in (
        ({"batch": [2]}, r"'0.weight' is of a convolution, .*: pass example=image\[None\]"),
        (
            {"example": torch.randn(3, 16, 8, 8)},
            r"the shape \[3, 16, 8, 8\]: it must be one input",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            warm_up(model, **options)
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


@pytest.mark.parametrize("function", [warm_up, packed_summary])
def test_a_packed_model_is_needed(function):
    with pytest.raises(ValueError, match=r"Linear has no packed layer: call lightning_nm.pack\(m"):
        function(nn.Linear(4, 4))


def test_copies_share_no_budget_with_other_models(clock):
    model = pack(nn.Sequential(linear(), linear(64)), budget_s=2)
    copied = copy.deepcopy(model)
    assert copied[0].weight.choice is copied[1].weight.choice
    assert copied[0].weight.choice is not model[0].weight.choice
    run(model[0], 1, 2, 4)
    assert copied[0].weight.choice.left_s == 2


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, operator, kinds, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        given = [each.untyped_storage().data_ptr() for each in args if torch.is_tensor(each)]
        for tensor in found if isinstance(found, (tuple, list)) else [found]:
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (lambda: nn.Linear(256, 1024, bias=False), torch.randn(2, 256)),
        (lambda: nn.Conv2d(32, 1024, 3, bias=False), torch.randn(1, 32, 4, 4)),
    ],
)
def test_no_dense_copy_is_made_while_a_product_is_measured(monkeypatch, module, x):
    monkeypatch.setattr(tuner, "PANEL_BYTES", 1)
    monkeypatch.setattr(
        kernel_choice.DeviceTimer, "time", lambda self, function, device: function() is None or 1e-3
    )
    # 64 of 1024 rows, and values that the kernel is faster with: it is not measured twice, and does not become dense.
    measured = []
    monkeypatch.setattr(tuner, "sparse_ms", lambda *given: measured.append(given) or (1e-3, 0.0))
    model = pack(prune(module(), "1:16"), budget_s=1000)
    (weight,) = packed_summary(model).weights
    with Largest() as largest, torch.no_grad():
        model(x)
    assert len(measured) == 1
    assert largest.bytes < weight.dense_bytes / 4


@given(st.integers(1, 9000), st.integers(1, 9000), st.sampled_from([torch.float32, torch.bfloat16]))
def test_few_rows_of_a_large_weight(rows, depth, dtype):
    key = GemmKey("forward", rows, depth, 16, dtype, NMPattern(2, 4), "cpu")
    few = tuner.few_rows(key)
    assert replace(few, rows=rows) == key
    assert few.rows == rows or (few.rows < rows and few.rows % 64 == 0)
    most = max(tuner.PANEL_BYTES, 64 * depth * 4)
    assert few.rows <= 64 or few.rows * depth * dtype.itemsize <= most


def test_a_time_of_few_rows_is_scaled(clock, monkeypatch):
    monkeypatch.setattr(tuner, "PANEL_BYTES", 1)
    monkeypatch.setattr(tuner, "dense_ms", lambda key, timer: key.rows / 64)
    run(pack(linear(640), budget_s=1000), 4)
    (decision,) = kernel_choice._tuner("cpu-permute", torch.get_num_threads()).decisions.values()
    assert decision.dense_ms == pytest.approx(10)
