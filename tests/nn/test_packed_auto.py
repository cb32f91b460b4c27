"""kernels="auto" of packed layers: no product is slower than the dense one, and no layer takes more memory."""

import copy
import gc
import json
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_nm import pack, packed_summary, unpacked_state_dict
from lightning_nm.functional import nm_prune
from lightning_nm.kernels import tuner
from lightning_nm.kernels.cpu import CpuPermuteKernel, library
from lightning_nm.kernels.cpu.kernels import dense_matrix
from lightning_nm.packed import kernel_choice
from tests.support.cpu_products import REASON
from tests.support.fake_kernels import without_home
from tests.support.kinds import make
from tests.support.packed_models import held, prune

needs_kernel = pytest.mark.skipif(
    bool(REASON) or not library.level(), reason="this CPU has no cpu-permute kernel"
)


@pytest.fixture(autouse=True)
def _decisions(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    kernel_choice._tuner.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    """Milliseconds of the dense product, by the number of tokens that is measured; a kernel takes 3."""
    asked = []
    times = {}

    def dense_ms(key, timer):
        asked.append(key.columns)
        found = times.get(key.columns, 5.0)
        return found.pop(0) if isinstance(found, list) else found

    monkeypatch.setattr(tuner, "dense_ms", dense_ms)
    monkeypatch.setattr(tuner, "sparse_ms", lambda *_: (3.0, 0.0))
    times["asked"] = asked
    return times


def linear(pattern="1:16", **options):
    return prune(nn.Linear(64, 96, **options), pattern)


@needs_kernel
@pytest.mark.parametrize(
    ("dense_ms", "form"), [(2.9, "dense"), (3.1, "cpu-permute"), (5.0, "cpu-permute")]
)
def test_the_faster_of_kernel_and_dense_product(clock, tmp_path, dense_ms, form):
    clock[8] = dense_ms
    for run in range(2):
        dense = linear()
        model, x = pack(copy.deepcopy(dense)), torch.randn(5, 64)
        assert model.weight.form == "cpu-permute", "nothing is measured before the first product"
        for _ in range(2):
            y = model(x)
            assert (
                torch.equal(y, dense(x))
                if form == "dense"
                else torch.allclose(y, dense(x), atol=1e-5)
            )
        assert model.weight.form == form
        # before and after the kernel, twice if dense seems faster; in the second run the file has it
        assert len(clock["asked"]) == (4 if form == "dense" else 2), run
        kernel_choice._tuner.cache_clear()
    kept = json.loads((tmp_path / "packed.json").read_text())["environments"]
    ((name, decision),) = next(iter(kept.values())).items()
    key = json.loads(name)
    assert [key[size] for size in ("rows", "depth", "columns")] == [96, 64, 8]
    assert decision["kernel"] == ("reference" if form == "dense" else form)
    assert "hysteresis 0;" in decision["terms"] + ";"


@needs_kernel
def test_a_disturbed_measurement_is_repeated(clock):
    clock[8] = [1.0, 1.0, 5.0, 5.0]
    model = pack(linear())
    model(torch.randn(5, 64))
    assert model.weight.form == "cpu-permute"
    assert len(clock["asked"]) == 4


@needs_kernel
def test_one_size_at_which_the_kernel_is_slower_decides(clock):
    """The layer keeps one form: 4096 tokens are faster dense, so it is dense for one token, too."""
    clock[2048] = 1.0
    dense = linear()
    model = pack(copy.deepcopy(dense))
    model(torch.randn(1, 64))
    assert model.weight.form == "cpu-permute"
    small = model.weight.nbytes
    model(torch.randn(2048, 64))
    assert model.weight.form == "dense"
    assert model.weight.nbytes == dense.weight.nbytes > small
    seen, x = len(clock["asked"]), torch.randn(7, 64)
    assert torch.equal(model(x), dense(x))
    assert len(clock["asked"]) == seen, "a dense weight measures nothing"
    assert torch.equal(unpacked_state_dict(model)["weight"], dense.weight)
    assert model.state_dict()["weight.values"].shape == (96, 4, 1)
    copied = copy.deepcopy(model)
    assert copied.weight.form == "cpu-permute", "a copy begins anew"
    assert model.double().weight.form == "dense", "no kernel takes float64"
    assert model.float().weight.form == "cpu-permute"


@needs_kernel
def test_empty_products_decide_nothing(clock):
    model = pack(linear())
    assert model(torch.randn(0, 64)).shape == (0, 96)
    assert model.weight.form == "cpu-permute"
    assert not clock["asked"]


@needs_kernel
@pytest.mark.parametrize("why", ["autocast", "gradient", "failure"])
def test_products_without_a_kernel(clock, monkeypatch, why):
    dense = linear()
    x = torch.randn(4, 64, requires_grad=why == "gradient")
    for kernels, form in (("sparse", "cpu-permute"), ("auto", "dense")):
        model = pack(copy.deepcopy(dense), kernels=kernels)
        if why == "failure":
            model(x)
            assert model.weight.form == "cpu-permute"
            with monkeypatch.context() as patch:
                patch.setattr(
                    CpuPermuteKernel,
                    "linear",
                    lambda *_: torch.zeros(1),
                )
                with pytest.warns(RuntimeWarning, match="'cpu-permute' is switched off"):
                    y = model(x)
                assert torch.equal(y, dense(x))
            kernel_choice.registry_of.cache_clear()
        else:
            with torch.autocast("cpu", torch.bfloat16, enabled=why == "autocast"):
                assert torch.equal(model(x), dense(x))
        assert model.weight.form == form
        if why == "gradient":
            (found,), (expected,) = (
                torch.autograd.grad(f(x).square().sum(), x) for f in (model, dense)
            )
            assert torch.allclose(found, expected, atol=1e-5)


@needs_kernel
def test_a_dense_weight_that_inference_mode_made_has_gradients_of_inputs(clock):
    clock[4] = 1.0
    model, x = pack(linear()), torch.randn(4, 64)
    with torch.inference_mode():
        model(x)
    assert model.weight.form == "dense"
    x.requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


@needs_kernel
def test_wrong_inputs_change_nothing(clock):
    model = pack(linear())
    for x in (torch.randn(4, 60), torch.randn(4, 64, dtype=torch.float64), torch.tensor(1.0)):
        with pytest.raises(RuntimeError):
            model(x)
    assert model.weight.form == "cpu-permute"


@needs_kernel
@pytest.mark.parametrize("kind", ["conv2d", "conv1d", "conv2d-groups", "conv3d"])
def test_convolutions_that_take_too_much_are_dense(kind):
    module, x = make(kind, torch.float32)
    prune(module, "2:4")
    expected = module(x).detach()
    size = held(module)
    model = pack(module)
    assert {each.form for each in packed_summary(model).weights} == {"dense"}
    assert held(model) == size
    assert torch.equal(model(x), expected)


@needs_kernel
def test_parts_of_a_projection(clock):
    """Query, key and value are rows of one weight: all of it becomes dense."""
    module, x = make("cross-attention", torch.float32)
    prune(module, "1:16")
    expected = module(x)
    model = pack(module)
    weight = model.mha.in_proj_weight
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert weight.form == "cpu-permute"
    assert len(weight.operand._parts) == 3
    weight.hold_dense()
    assert weight.form == "dense"
    assert weight.operand is None
    assert torch.allclose(model(x), expected, atol=1e-5)


@needs_kernel
def test_the_layout_is_freed(clock):
    clock[4] = 1.0
    model = pack(linear())
    kept = [weakref.ref(tensor) for tensor in model.weight.operand.tensors]
    gc.disable()
    try:
        model(torch.randn(4, 64))
        assert not any(ref() is not None for ref in kept)
        weight = weakref.ref(model.weight)
        del model
        assert weight() is None
    finally:
        gc.enable()


@given(st.data())
def test_never_more_memory_than_dense(data):
    pattern = data.draw(st.sampled_from(["2:4", "3:4", "1:4", "1:16", "7:8", "1:2"]))
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    )
    sizes = [data.draw(st.integers(1, 6)) * 16 for _ in range(2)]
    if data.draw(st.booleans()):
        dense = nn.Linear(*sizes, bias=False)
    else:
        dense = nn.Conv2d(*sizes, data.draw(st.integers(1, 3)), bias=False)
    with torch.no_grad():
        dense.weight.copy_(nm_prune(dense.weight, pattern, 1))
    dense = dense.to(dtype)
    model = pack(copy.deepcopy(dense), pattern)
    (weight,) = packed_summary(model).weights
    assert weight.bytes == held(model) <= weight.dense_bytes == held(dense)
    if weight.form != "dense":
        model.weight.hold_dense()
    (weight,) = packed_summary(model).weights
    assert weight.bytes == held(model) == weight.dense_bytes
    assert torch.equal(unpacked_state_dict(model)["weight"], dense.weight)


def test_the_summary():
    model = pack(
        nn.Sequential(linear("1:16", bias=False).half(), linear("2:4")), kernels="reference"
    )
    summary = packed_summary(model)
    assert [each[:3] for each in summary.weights] == [
        ("0.weight", "1:16", "packed"),
        ("1.weight", "2:4", "packed"),
    ]
    assert (summary.bytes, summary.dense_bytes) == (held(model) - 96 * 4, 64 * 96 * (2 + 4))
    assert str(summary).splitlines()[-1].split() == [
        "2",
        "weights",
        f"{summary.bytes}",
        f"{summary.bytes / 36864:.3f}",
    ]
    with pytest.raises(
        ValueError, match=r"Linear has no packed layer: call lightning_nm.pack\(model\) first"
    ):
        packed_summary(nn.Linear(4, 4))


@needs_kernel
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "hugging-face-conv1d", "conv1d", "cross-attention"])
def test_a_compiled_model_becomes_dense(clock, kind):
    """A graph that was compiled on the kernel runs on when the layer becomes dense, within it or before it."""
    torch._dynamo.reset()
    module, x = make(kind, torch.float32)
    model = pack(prune(module, "1:16"))
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    weights = [part for part in model.modules() if type(part).__name__ == "PackedWeight"]
    forms = {weight.form for weight in weights}
    assert forms <= {"cpu-permute", "cpu-csr"}
    assert torch.allclose(compiled(x), expected, atol=1e-5)
    assert {weight.form for weight in weights} == forms
    for weight in weights:
        weight.hold_dense()
    assert torch.allclose(compiled(x), expected, atol=1e-5)
    assert {weight.form for weight in weights} == {"dense"}


@needs_kernel
@pytest.mark.slow
def test_a_compiled_graph_in_which_the_layer_becomes_dense(clock):
    torch._dynamo.reset()
    clock[8] = 1.0
    dense = linear()
    model = pack(copy.deepcopy(dense))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(6, 64)
    for _ in range(2):
        assert torch.allclose(compiled(x), dense(x), atol=1e-5)
        assert model.weight.form == "dense"


@needs_kernel
def test_without_a_home_directory_choices_are_not_kept(clock, monkeypatch, tmp_path):
    clock[8] = 1.0
    with monkeypatch.context() as patch:
        patch.setattr(kernel_choice, "DECISIONS", "~/.cache/lightning_nm/packed.json")
        without_home(patch)
        model = pack(linear())
        model(torch.randn(5, 64))
        assert model.weight.form == "dense"
    assert not list(tmp_path.iterdir())


@needs_kernel
def test_a_layer_that_becomes_dense_while_its_weight_is_read(monkeypatch):
    """As another thread does: here, between the two reads of one call."""
    dense = linear()
    weight = pack(copy.deepcopy(dense)).weight
    made = dense_matrix

    def meanwhile(*arguments):
        monkeypatch.undo()
        weight.hold_dense()
        return made(*arguments)

    monkeypatch.setattr("lightning_nm.packed.module.dense_matrix", meanwhile)
    assert torch.equal(weight.product_matrix(), dense.weight)
    assert weight.form == "dense"
