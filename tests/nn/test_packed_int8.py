"""pack(dtype="int8"): what layers hold, and that every form of one weight has the same integers."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import (
    NMPattern,
    load_packed,
    pack,
    packed_summary,
    save_packed,
    unpacked_state_dict,
)
from lightning_nm.export.packed_file import write_packed
from lightning_nm.functional import (
    dequantise_weight,
    nm_prune,
    quantise_weight,
)
from lightning_nm.kernels import tuner
from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu import CpuInt8Kernel, int8
from lightning_nm.kernels.cpu.kernels import Packed
from lightning_nm.packed import kernel_choice
from lightning_nm.packed.module import packed_weights
from lightning_nm.packed.tensor import PackedTensor
from tests.support.cpu_int8 import int8_conv2d, int8_linear
from tests.support.cpu_products import LEVELS, REASON, at_level, needs_library
from tests.support.experts import WIDTH, Experts, LinearExperts, TransposedExperts
from tests.support.kinds import make
from tests.support.packed_models import assert_equal_states, clones, copied, held, prune, small


@pytest.fixture(autouse=True)
def _decisions(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    kernel_choice._tuner.cache_clear()


@pytest.fixture
def clock(monkeypatch):
    """Milliseconds of the dense product; the kernel takes 3."""
    times = {"dense": 5.0, "asked": []}

    def dense_ms(key, timer):
        times["asked"].append((key.dtype, key.columns))
        return times["dense"]

    monkeypatch.setattr(tuner, "dense_ms", dense_ms)
    monkeypatch.setattr(tuner, "sparse_ms", lambda *_: (3.0, 0.0))
    return times


def linear(pattern="2:4", dtype=torch.float32):
    torch.manual_seed(0)
    return prune(nn.Linear(64, 96).to(dtype), pattern)


def twin(dense, x):
    """The product of a dense layer in int8, by torch."""
    y = int8_linear(x.flatten(0, -2), *quantise_weight(dense.weight), dense.bias)
    return y.view(*x.shape[:-1], -1)


def near(found, expected, steps):
    """Within so many times 1/127 of the largest output."""
    found, expected = found.detach(), expected.detach()
    assert float((found - expected).abs().max()) <= steps / 127 * float(expected.abs().max())


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["2:4", "1:16", "1:32", "3:8"])
def test_a_layer_computes_the_product_of_the_twin(level, dtype, pattern):
    dense = linear(pattern, dtype)
    kernel_choice.registry_of.cache_clear()
    with at_level(level):
        model = pack(copied(dense), dtype="int8", kernels="sparse")
        assert model.weight.form == "cpu-int8"
        for tokens in (1, 2, 3, 4, 5, 13):
            x = torch.randn(2, tokens, 64).to(dtype)
            x[..., 0] = 4  # the largest, so that the quotients are not near halves by chance alone
            found, expected = model(x).float(), twin(dense, x).float()
            torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-6)
    kernel_choice.registry_of.cache_clear()


def test_dtype_of_the_inputs_decides_nothing_else():
    """Weights that are packed in both dtypes have the same integers."""
    first = pack(linear(dtype=torch.float32).bfloat16(), dtype="int8", kernels="sparse")
    second = copied(first).float()
    assert torch.equal(first.weight.packed().values, second.weight.packed().values)
    assert torch.equal(first.weight.packed().scales, second.weight.packed().scales)
    assert (first.weight.dtype, second.weight.dtype) == (torch.bfloat16, torch.float32)
    assert second.weight.scales.dtype == torch.float32


@pytest.mark.parametrize(
    "kind",
    [
        *("linear-3d-no-bias", "hugging-face-conv1d", "attention", "attention-kdim"),
        *("encoder-layer", "conv1d", "conv2d", "conv2d-unbatched", "conv3d"),
    ],
)
def test_kinds(kind):
    module, x = make(kind, torch.float32)
    prune(module, "2:4")
    expected = module(x).detach()
    model = pack(copied(module), dtype="int8", kernels="sparse")
    assert all(weight.is_int8 for _, weight in packed_weights(model))
    near(model(x), expected, steps=4)
    unpacked = unpacked_state_dict(model)
    for name, weight in packed_weights(model):
        moved = (unpacked[name] - module.state_dict()[name]).abs()
        assert float(moved.max()) <= 0.51 * float(weight.scales.max())


@needs_library
def test_every_form_has_the_same_integers(clock):
    forms = {}
    clock["dense"] = 1.0
    for dtype in (torch.float32, torch.bfloat16):
        dense, x = linear(dtype=dtype), torch.randn(3, 64).to(dtype)
        for kernels in ("auto", "sparse", "reference"):
            model = pack(copied(dense), dtype="int8", kernels=kernels)
            state = clones(model)
            assert state["weight.values"].dtype == torch.int8
            model(x)
            forms[kernels] = model.weight.form
            assert_equal_states(clones(model), state)
            for other in (copied(model), pickle.loads(pickle.dumps(model))):
                assert_equal_states(clones(other), state)
                assert torch.equal(other(x), model(x))
            integers, scale = quantise_weight(dense.weight)
            exact = (integers.float() * scale[:, None]).to(dtype)
            assert torch.equal(unpacked_state_dict(model)["weight"], exact)
    assert forms == {"auto": "dense, of int8", "sparse": "cpu-int8", "reference": "packed int8"}


@needs_library
@pytest.mark.parametrize(("dense_ms", "form"), [(2.9, "dense, of int8"), (3.1, "cpu-int8")])
def test_the_faster_of_kernel_and_dense_product(clock, tmp_path, dense_ms, form):
    clock["dense"] = dense_ms
    for _ in range(2):
        model = pack(linear(dtype=torch.bfloat16), dtype="int8")
        assert model.weight.form == "cpu-int8", "nothing is measured before the first product"
        model(torch.randn(5, 64).bfloat16())
        assert model.weight.form == form
        kernel_choice._tuner.cache_clear()  # the second time the choice is that of the file
    # The dense product is that of the weight in the dtype of the inputs, and is measured once; again if it wins.
    assert set(clock["asked"]) == {(torch.bfloat16, 8)}
    assert len(clock["asked"]) == (4 if form.startswith("dense") else 2)
    assert (tmp_path / "packed-int8.json").exists()


@needs_library
def test_choices_of_other_kernels_stay(clock, tmp_path):
    """The product of one shape in int8 and in its own dtype: each has a file."""
    for _ in range(2):
        for dtype in (None, "int8"):
            pack(linear(), dtype=dtype)(torch.randn(8, 64))
        kernel_choice._tuner.cache_clear()
    assert len(clock["asked"]) <= 4  # two of each, none of the second time
    assert {file.name for file in tmp_path.iterdir()} >= {"packed-int8.json"}


def test_the_summary_names_what_is_not_int8():
    model = small("2:4", torch.bfloat16)
    pack(model[0], kernels="reference")
    pack(model[1:], dtype="int8", kernels="reference")
    summary = packed_summary(model)
    assert [weight.form for weight in summary.weights] == ["packed", "packed int8", "packed int8"]
    assert summary.not_int8 == (("0.weight", "it was packed in bfloat16"),)
    assert "0.weight  not int8: it was packed in bfloat16" in str(summary)
    assert packed_summary(pack(small(), kernels="reference")).not_int8 == ()


@st.composite
def convolutions(draw):
    """Arguments of a convolution whose blocks lie along the inputs of a tap, and the size of its images."""
    groups = draw(st.sampled_from([1, 1, 2]))

    def pair(low, high):
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    taps, stride, padding, dilation = pair(1, 3), pair(1, 3), pair(0, 2), pair(1, 2)
    size = [d * (k - 1) + 1 + draw(st.integers(0, 4)) for d, k in zip(dilation, taps, strict=True)]
    outputs = 16 * groups if groups > 1 else draw(st.integers(12, 20))
    channels = 64 * groups, outputs
    return (*channels, taps, stride, padding, dilation, groups), size


@settings(max_examples=60)
@given(
    arguments=convolutions(),
    pattern=st.sampled_from(["2:4", "1:16", "3:8"]),
    flat=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    channels_last=st.booleans(),
    at_a_time=st.sampled_from([1, 500, 1 << 20]),
    seed=st.integers(0, 100),
)
def test_convolutions_compute_the_product_of_the_twin(
    arguments, pattern, flat, dtype, channels_last, at_a_time, seed
):
    geometry, size = arguments
    torch.manual_seed(seed)
    dense = nn.Conv2d(*geometry).to(dtype).eval()
    with torch.no_grad():
        weight = dense.weight.flatten(1) if flat else dense.weight
        dense.weight.copy_(nm_prune(weight, pattern, 1).view_as(dense.weight))
    # Of 0 and one absolute value, which are rounded to themselves, whatever a patch reads.
    x = torch.randint(-1, 2, (3, geometry[0], *size)).to(dtype)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    integers, scale = quantise_weight(dense.weight)
    _, _, _, stride, padding, dilation, groups = geometry
    expected = int8_conv2d(x, integers, scale, dense.bias, stride, padding, dilation, groups)
    matrix = (integers.double().flatten(1) * scale.double()[:, None]).view_as(dense.weight)
    exact = F.conv2d(x.double(), matrix, dense.bias.double(), stride, padding, dilation, groups)
    tolerance = {"rtol": 2.0**-7 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(expected.double(), exact, **tolerance)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(int8, "PATCHES", at_a_time)
        model = pack(copied(dense), pattern, dtype="int8", kernels="sparse")
        found = model(x)
    if not REASON:
        assert model.weight.form == "cpu-int8"
    torch.testing.assert_close(found.double(), exact, **tolerance)
    if not x.is_contiguous():  # images of one pixel are in both orders
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight.packed().unpack(), model.weight.unpack())
    assert torch.equal(model.weight.unpack(), dequantise_weight(integers, scale, dtype))


@needs_library
def test_convolutions_that_no_kernel_takes_unpack_their_weight():
    grouped = prune(nn.Conv2d(32, 16, 3, groups=2), "2:4")
    volume = prune(nn.Conv3d(16, 16, 2), "2:4")
    for dense, x in ((grouped, torch.randn(2, 32, 5, 5)), (volume, torch.randn(2, 16, 3, 3, 3))):
        model = pack(copied(dense), dtype="int8", kernels="sparse")
        weight = unpacked_state_dict(model)["weight"]
        held_dense = copied(dense)
        held_dense.load_state_dict({"weight": weight, "bias": dense.bias})
        torch.testing.assert_close(model(x), held_dense(x))


@needs_library
def test_convolutions_of_other_weights_are_refused():
    model = pack(prune(nn.Conv2d(16, 32, 3), "2:4"), dtype="int8", kernels="sparse")
    operand = model.weight.operand
    kernel, packed = CpuInt8Kernel(), Packed(operand.layout, operand.values)
    conv = Convolution(16, 32, (5, 5), (3, 3))
    x = torch.randn(1, 16, 5, 5)
    assert kernel.conv(packed, x, conv).shape == (1, 32, 3, 3)
    with pytest.raises(ValueError, match="is not one of the convolution"):
        kernel.conv(packed, x, conv._replace(kernel=(3, 2)))
    with pytest.raises(ValueError, match="does not exist in int8"):
        kernel.conv(packed, x, conv._replace(dilation=(5, 5)))
    with pytest.raises(ValueError, match="operand"):
        kernel.conv(packed, x.double(), conv)


@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
def test_experts(tmp_path, kind, kernels):
    torch.manual_seed(0)
    dense = kind().eval()
    axis = 1 if dense.transposed else 2
    with torch.no_grad():
        for name in ("up", "down"):
            weight = getattr(dense, name)
            weight.copy_(nm_prune(weight, "2:4", axis))
            weight[1] *= 10  # each expert has scales of its own
    model = pack(copied(dense), dtype="int8", kernels=kernels)
    x, experts = torch.randn(11, WIDTH), torch.randint(0, 4, (11,))
    near(model(x, experts), dense(x, experts), steps=4)
    for name in ("up", "down"):
        rows = getattr(dense, name).movedim(axis, 2).flatten(0, 1)  # [experts * out, in]
        integers, scales = quantise_weight(rows)
        packed = getattr(model, name).packed()
        assert packed.scales.shape == (4, len(rows) // 4)
        assert torch.equal(packed.scales.flatten(), scales)
        exact = dequantise_weight(integers, scales, torch.float32)
        unpacked = getattr(model, name).unpack().movedim(axis, 2).flatten(0, 1)
        assert torch.equal(unpacked, exact)
    save_packed(model, tmp_path / "a.safetensors")
    loaded = load_packed(kind(), tmp_path / "a.safetensors", kernels=kernels)
    assert_equal_states(clones(loaded), clones(model))
    for other in (copied(model), pickle.loads(pickle.dumps(model))):
        assert_equal_states(clones(other), clones(model))
    if kernels == "sparse" and not REASON:
        assert packed_summary(model).weights[0].form == "cpu-int8"


def test_blocks_do_not_lie_across_the_rows_of_an_expert():
    """One entry of each pair of rows of 16 is 1:32 in memory, but 1:16 of each expert's matrix."""
    dense = LinearExperts()
    with torch.no_grad():
        dense.weight.view(-1, 32)[:, 1:] = 0
    model = pack(copied(dense), kernels="reference")
    assert str(model.weight.pattern) == "1:16"
    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(model(x), dense(x))


def test_scales_of_experts_and_of_layers_do_not_pass_for_each_other(tmp_path):
    conv = nn.Conv1d(16, 32, 4).eval()
    conv.weight.data = nm_prune(conv.weight.data, "2:4", 2)  # so are [experts, out, in], too
    as_experts = PackedTensor.of(conv.weight, NMPattern(2, 4), "flat", int8=True, experts=True)
    write_packed(tmp_path / "a.safetensors", {"weight": as_experts, "bias": conv.bias})
    before = clones(conv)
    with pytest.raises(ValueError, match=r"'weight' of .* does not fit the model: scales of shape"):
        load_packed(conv, tmp_path / "a.safetensors")
    assert_equal_states(clones(conv), before)
    model = pack(copied(conv), dtype="int8", kernels="reference")
    state = clones(model)
    state["weight.scales"] = state["weight.scales"][:, None].expand(32, 16).contiguous()
    with pytest.raises(RuntimeError, match="'weight': scales"):
        model.load_state_dict(state)


@pytest.mark.parametrize(("pattern", "share"), [("2:4", 0.32), ("1:4", 0.165), ("1:16", 0.055)])
def test_memory_of_int8_over_that_of_dense_bfloat16(pattern, share):
    torch.manual_seed(0)
    dense = prune(nn.Linear(1024, 64, bias=False).bfloat16(), pattern)
    size = held(dense)
    for kernels in ("sparse", "reference"):
        model = pack(copied(dense), dtype="int8", kernels=kernels)
        assert held(model) <= share * size
        assert packed_summary(model).bytes == held(model)


@needs_library
def test_a_pattern_without_a_kernel():
    dense = prune(nn.Linear(48, 32), "1:3")
    for kernels, form in (("sparse", "packed int8"), ("auto", "dense, of int8")):
        model = pack(copied(dense), "1:3", dtype="int8", kernels=kernels)
        assert model.weight.form == form
        near(model(torch.ones(2, 48)), dense(torch.ones(2, 48)), steps=2)


@needs_library
def test_a_kernel_that_fails_gives_way_to_the_dense_product(monkeypatch):
    def fail(self, packed, x, bias=None):
        raise RuntimeError("no")

    dense = linear()
    model = pack(copied(dense), dtype="int8", kernels="sparse")
    x = torch.randn(3, 64)
    expected = pack(copied(dense), dtype="int8", kernels="reference")(x)
    model(x)
    monkeypatch.setattr(CpuInt8Kernel, "linear", fail)
    try:
        with pytest.warns(RuntimeWarning, match="kernel 'cpu-int8' is switched off"):
            assert torch.equal(model(x), expected)
    finally:
        kernel_choice.registry_of.cache_clear()


def test_gradients_of_inputs_are_those_of_the_dense_product():
    dense = linear()
    model = pack(copied(dense), dtype="int8", kernels="sparse")
    x = torch.randn(3, 64, requires_grad=True)
    model(x).sum().backward()
    expected = unpacked_state_dict(model)["weight"].sum(0).expand(3, 64)
    torch.testing.assert_close(x.grad, expected)


def test_conversions():
    model = pack(linear(), dtype="int8", kernels="sparse")
    values = model.weight.packed().values
    for change in ("bfloat16", "float", "bfloat16"):
        model = getattr(model, change)()
        assert torch.equal(model.weight.packed().values, values)
        dtype = torch.bfloat16 if change == "bfloat16" else torch.float32
        assert model.weight.dtype == dtype
        assert model(torch.randn(2, 64, dtype=dtype)).dtype == dtype
    for change in ("half", "double"):
        with pytest.raises(TypeError, match=r"'weight' is packed in int8, and cannot be converted"):
            getattr(model, change)()
    assert torch.equal(model.weight.packed().values, values)
    model.type(torch.float32)
    assert torch.equal(model.weight.packed().values, values)


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
def test_state_dicts(kernels):
    first = pack(linear(), dtype="int8", kernels=kernels)
    torch.manual_seed(1)
    other = prune(nn.Linear(64, 96), "2:4")
    second = pack(other, dtype="int8", kernels=kernels)
    second.load_state_dict(first.state_dict())
    assert_equal_states(clones(second), clones(first))
    x = torch.randn(2, 64)
    assert torch.equal(second(x), first(x))
    damaged = clones(first)
    damaged["weight.scales"][3] = torch.nan
    with pytest.raises(RuntimeError, match="'weight': a scale is not between"):
        second.load_state_dict(damaged)
    damaged = clones(first)
    del damaged["weight.scales"]
    with pytest.raises(RuntimeError, match=r"Missing key.*weight\.scales"):
        second.load_state_dict(damaged)
    with pytest.raises(RuntimeError, match="int8 values have scales, and there are none"):
        pack(linear(), kernels=kernels).load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*weight\.scales"):
        second.load_state_dict(pack(linear(), kernels=kernels).state_dict())
    assert torch.equal(second(x), first(x))


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
@pytest.mark.slow
def test_convolutions_compiled_and_exported(kernels):
    torch.manual_seed(0)
    dense = prune(nn.Conv2d(64, 32, 3, padding=1), "2:4")
    model, x = pack(dense, dtype="int8", kernels=kernels), torch.randn(2, 64, 5, 5)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    weight = unpacked_state_dict(model)["weight"]
    program = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(program(x), F.conv2d(x, weight, model.bias, padding=1))


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
@pytest.mark.slow
def test_compiled_and_exported(kernels):
    model, x = pack(linear(), dtype="int8", kernels=kernels), torch.randn(5, 64)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    exported = torch.export.export(model, (x,))
    assert not [node for node in exported.graph.nodes if "lightning" in str(node.target)]
    program = exported.module()
    dense = nn.functional.linear(x, unpacked_state_dict(model)["weight"], model.bias)
    torch.testing.assert_close(program(x), dense)


@needs_library
def test_parts_of_a_projection():
    torch.manual_seed(0)
    dense = prune(nn.MultiheadAttention(32, 4, batch_first=True), "2:4")
    model = pack(copied(dense), dtype="int8", kernels="sparse")
    weight = model.in_proj_weight
    assert weight.operand.part((0, 20)) is None, "rows that are no whole tiles"
    query, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    near(model(query, memory, memory)[0], dense(query, memory, memory)[0], steps=4)
    matrix = weight.unpack()
    for first, end in ((0, 32), (32, 64), (64, 96), (16, 96)):
        part = weight.operand.part((first, end))
        places, _ = part.layout.tensors
        integers = int8.int8_matrix(part.values, places, end - first, 32, part.pattern)
        found = dequantise_weight(integers, part.layout.scale, torch.float32)
        assert torch.equal(found, matrix[first:end])


def test_what_is_refused():
    def refused(message, model, **options):
        before = clones(model)
        with pytest.raises(ValueError, match=message):
            pack(model, dtype="int8", **options)
        assert_equal_states(clones(model), before)

    refused(
        r"'weight' has no int8 form, float16 is not .*model.to\(torch.bfloat16\)", linear().half()
    )
    refused("'weight' has no int8 form, float64 is not", linear().double())
    infinite = linear()
    with torch.no_grad():
        infinite.weight[3, infinite.weight[3].abs().argmax()] = torch.inf
    refused(
        r"'weight' has no int8 form, a weight with NaN.* to int8: leave the layer out", infinite
    )
    conv = prune(nn.Conv2d(16, 16, 3), "2:4")
    refused("'weight' has no int8 form, float16 is not", conv.half())
    with pytest.raises(ValueError, match="dtype='int4' is unknown: use 'int8'"):
        pack(linear(), dtype="int4")
