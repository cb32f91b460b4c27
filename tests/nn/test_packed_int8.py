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
from lightning_nm.functional import dequantise_weight, nm_prune, quantise_weight
from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu import CpuInt8Kernel, int8_kernel
from lightning_nm.kernels.cpu.kernels import Packed
from lightning_nm.packed import kernel_choice
from lightning_nm.packed.module import packed_weights
from lightning_nm.packed.tensor import PackedTensor
from tests.support.cpu_int8 import int8_conv2d, int8_linear
from tests.support.cpu_products import LEVELS, REASON, at_level, needs_library
from tests.support.experts import WIDTH, Experts, LinearExperts, TransposedExperts
from tests.support.kinds import make
from tests.support.packed_models import assert_equal_states, clones, copied, held, prune, small


def linear(pattern="2:4", dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return prune(nn.Linear(64, 96).to(dtype), pattern)


def packed_int8(dense, kernels="sparse", pattern=None):
    return pack(copied(dense), pattern, dtype="int8", kernels=kernels)


def near(found, expected, steps):
    """Within so many times 1/127 of the largest output."""
    found, expected = found.detach(), expected.detach()
    assert (found - expected).abs().max() <= steps / 127 * expected.abs().max()


@needs_library
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", ["2:4", "1:16", "3:8"])
def test_a_layer_computes_the_product_of_the_twin(level, dtype, pattern):
    dense = linear(pattern, dtype)
    with at_level(level):
        model = packed_int8(dense)
        assert model.weight.form == "cpu-int8"
        for tokens in (1, 5, 13):
            x = torch.randn(2, tokens, 64).to(dtype)
            x[..., 0] = 4  # the largest, so that the quotients are not near halves by chance alone
            expected = int8_linear(x.flatten(0, 1), *quantise_weight(dense.weight), dense.bias)
            found = model(x).flatten(0, 1)
            torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-6)
    kernel_choice.registry_of.cache_clear()


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
    model = packed_int8(module)
    near(model(x), expected, steps=4)
    state, unpacked = module.state_dict(), unpacked_state_dict(model)
    for name, weight in packed_weights(model):
        assert weight.is_int8
        assert (unpacked[name] - state[name]).abs().max() <= 0.51 * weight.scales.max()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernels", "form"),
    [("auto", "dense, of int8"), ("sparse", "cpu-int8"), ("reference", "packed int8")],
)
def test_every_form_has_the_same_integers(clock, dtype, kernels, form):
    clock.dense[4] = 1.0
    dense, x = linear(dtype=dtype), torch.randn(3, 64).to(dtype)
    model = packed_int8(dense, kernels)
    state = clones(model)
    assert state["weight.values"].dtype == torch.int8
    model(x)
    assert model.weight.form == form
    integers, scale = quantise_weight(dense.weight)
    exact = (integers.float() * scale[:, None]).to(dtype)
    for other in (model, copied(model), pickle.loads(pickle.dumps(model))):
        assert_equal_states(clones(other), state)
        assert torch.equal(other(x), model(x))
        assert torch.equal(unpacked_state_dict(other)["weight"], exact)


@needs_library
@pytest.mark.parametrize(("dense_ms", "form"), [(2.9, "dense, of int8"), (3.1, "cpu-int8")])
def test_the_faster_of_kernel_and_dense_product(clock, tmp_path, dense_ms, form):
    clock.dense[8] = dense_ms
    for _ in range(2):
        model = packed_int8(linear(dtype=torch.bfloat16), "auto")
        assert model.weight.form == "cpu-int8", "nothing is measured before the first GEMM"
        model(torch.randn(5, 64).bfloat16())
        assert model.weight.form == form
        kernel_choice._tuner.cache_clear()  # the second time the choice is that of the file
    # The dense GEMM is that of the weight in the dtype of the inputs, and is measured once; again if it wins.
    assert {(key.dtype, key.columns) for key in clock.asked} == {(torch.bfloat16, 8)}
    assert len(clock.asked) == (4 if form.startswith("dense") else 2)
    # Those of the weight in its own dtype have another file.
    assert (tmp_path / "packed-int8.json").exists()
    assert not (tmp_path / "packed.json").exists()


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
    return (64 * groups, outputs, taps, stride, padding, dilation, groups), size


@settings(max_examples=60)
@given(
    arguments=convolutions(),
    pattern=st.sampled_from(["2:4", "1:16", "3:8"]),
    flat=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    memory_format=st.sampled_from([torch.contiguous_format, torch.channels_last]),
    at_a_time=st.sampled_from([1, 500, 1 << 20]),
    seed=st.integers(0, 100),
)
def test_convolutions_compute_the_product_of_the_twin(
    arguments, pattern, flat, dtype, memory_format, at_a_time, seed
):
    (*channels, taps, stride, padding, dilation, groups), size = arguments
    geometry = stride, padding, dilation, groups
    torch.manual_seed(seed)
    dense = nn.Conv2d(*channels, taps, *geometry).to(dtype).eval()
    with torch.no_grad():
        weight = dense.weight.flatten(1) if flat else dense.weight
        dense.weight.copy_(nm_prune(weight, pattern, 1).view_as(dense.weight))
    # Of 0 and one absolute value, which are rounded to themselves, whatever a patch reads.
    x = (
        torch.randint(-1, 2, (3, channels[0], *size))
        .to(dtype)
        .contiguous(memory_format=memory_format)
    )
    integers, scale = quantise_weight(dense.weight)
    matrix = (integers.double().flatten(1) * scale.double()[:, None]).view_as(dense.weight)
    exact = F.conv2d(x.double(), matrix, dense.bias.double(), *geometry)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(int8_kernel, "PATCHES", at_a_time)
        model = packed_int8(dense, pattern=pattern)
        found = model(x)
    assert REASON or model.weight.form == "cpu-int8"
    tolerance = {"rtol": 2.0**-7 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    for each in (found, int8_conv2d(x, integers, scale, dense.bias, *geometry)):
        torch.testing.assert_close(each.double(), exact, **tolerance)
    if not x.is_contiguous():  # images of one pixel are in both orders
        assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.weight.packed().unpack(), model.weight.unpack())
    assert torch.equal(model.weight.unpack(), dequantise_weight(integers, scale, dtype))


@needs_library
@pytest.mark.parametrize(
    ("convolution", "x"),
    [
        (lambda: nn.Conv2d(32, 16, 3, groups=2), torch.randn(2, 32, 5, 5)),
        (lambda: nn.Conv3d(16, 16, 2), torch.randn(2, 16, 3, 3, 3)),
    ],
)
def test_convolutions_that_no_kernel_takes_unpack_their_weight(convolution, x):
    dense = prune(convolution(), "2:4")
    model = packed_int8(dense)
    dense.load_state_dict(unpacked_state_dict(model))
    torch.testing.assert_close(model(x), dense(x))


@needs_library
def test_convolutions_of_other_weights_are_refused():
    operand = packed_int8(prune(nn.Conv2d(16, 32, 3), "2:4")).weight.operand
    kernel, packed = CpuInt8Kernel(), Packed(operand.layout, operand.values)
    conv, x = Convolution(16, 32, (5, 5), (3, 3)), torch.randn(1, 16, 5, 5)
    assert kernel.conv(packed, x, conv).shape == (1, 32, 3, 3)
    for inputs, wrong, message in (
        (x, conv._replace(kernel=(3, 2)), "is not one of the convolution"),
        (x, conv._replace(dilation=(5, 5)), "does not exist in int8"),
        (x.double(), conv, "operand"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.conv(packed, inputs, wrong)


@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
def test_experts(tmp_path, kind, kernels):
    torch.manual_seed(0)
    dense = kind().eval()
    axis = 1 if dense.transposed else 2
    with torch.no_grad():
        for weight in dense.parameters():
            weight.copy_(nm_prune(weight, "2:4", axis))
            weight[1] *= 10  # each expert has scales of its own
    model = packed_int8(dense, kernels)
    x, experts = torch.randn(11, WIDTH), torch.randint(0, 4, (11,))
    near(model(x, experts), dense(x, experts), steps=4)
    for name, weight in dense.named_parameters():
        rows = weight.movedim(axis, 2).flatten(0, 1)  # [experts * out, in]
        integers, scales = quantise_weight(rows)
        packed = getattr(model, name).packed()
        assert packed.scales.shape == (4, len(rows) // 4)
        assert torch.equal(packed.scales.flatten(), scales)
        unpacked = getattr(model, name).unpack().movedim(axis, 2).flatten(0, 1)
        assert torch.equal(unpacked, dequantise_weight(integers, scales, torch.float32))
    save_packed(model, tmp_path / "a.safetensors")
    loaded = load_packed(kind(), tmp_path / "a.safetensors", kernels=kernels)
    for other in (loaded, copied(model), pickle.loads(pickle.dumps(model))):
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
    model = packed_int8(conv, "reference")
    state = clones(model)
    state["weight.scales"] = state["weight.scales"][:, None].expand(32, 16).contiguous()
    with pytest.raises(RuntimeError, match="'weight': scales"):
        model.load_state_dict(state)


@pytest.mark.parametrize(("pattern", "most"), [("2:4", 0.32), ("1:4", 0.165), ("1:16", 0.055)])
@pytest.mark.parametrize("kernels", ["sparse", "reference"])
def test_memory_over_that_of_dense_bfloat16(pattern, most, kernels):
    dense = prune(nn.Linear(1024, 64, bias=False).bfloat16(), pattern)
    model = packed_int8(dense, kernels)
    assert packed_summary(model).bytes == held(model) <= most * held(dense)


@needs_library
def test_a_kernel_that_fails_gives_way_to_the_dense_product(monkeypatch):
    model, x = packed_int8(linear()), torch.randn(3, 64)
    model(x)
    monkeypatch.setattr(CpuInt8Kernel, "linear", lambda *_: torch.zeros(1))
    with pytest.warns(RuntimeWarning, match="'cpu-int8' is switched off"):
        assert torch.equal(model(x), packed_int8(linear(), "reference")(x))
    kernel_choice.registry_of.cache_clear()


@needs_library
@pytest.mark.parametrize(
    ("kernels", "form"), [("sparse", "packed int8"), ("auto", "dense, of int8")]
)
def test_a_pattern_without_a_kernel(kernels, form):
    dense = prune(nn.Linear(48, 32), "1:3")
    model = packed_int8(dense, kernels, "1:3")
    assert model.weight.form == form
    near(model(torch.ones(2, 48)), dense(torch.ones(2, 48)), steps=2)


def test_gradients_of_inputs_are_those_of_the_dense_product():
    model, x = packed_int8(linear()), torch.randn(3, 64, requires_grad=True)
    model(x).sum().backward()
    expected = unpacked_state_dict(model)["weight"].sum(0).expand(3, 64)
    torch.testing.assert_close(x.grad, expected)


def test_conversions_leave_the_integers():
    model = packed_int8(linear())
    before = model.weight.packed()

    def unchanged(dtype):
        packed = model.weight.packed()
        assert model.weight.dtype == dtype
        assert torch.equal(packed.values, before.values)
        assert torch.equal(packed.scales, before.scales)

    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        model.to(dtype)
        unchanged(dtype)
        assert model(torch.randn(2, 64, dtype=dtype)).dtype == dtype
    for dtype in (torch.half, torch.double):
        with pytest.raises(TypeError, match=r"'weight' is packed in int8, and cannot be converted"):
            model.to(dtype)
    unchanged(torch.bfloat16)


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
def test_state_dicts(kernels):
    first, second = packed_int8(linear(), kernels), packed_int8(linear(seed=1), kernels)
    in_float = pack(linear(), kernels=kernels)
    second.load_state_dict(first.state_dict())
    assert_equal_states(clones(second), clones(first))
    damaged, without_scales = clones(first), clones(first)
    damaged["weight.scales"][3] = torch.nan
    del without_scales["weight.scales"]
    for model, state, message in (
        (second, damaged, "'weight': a scale is not between"),
        (second, without_scales, r"Missing key.*weight\.scales"),
        (second, in_float.state_dict(), r"Missing key.*weight\.scales"),
        (in_float, first.state_dict(), "int8 values have scales, and there are none"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(state)
    x = torch.randn(2, 64)
    assert torch.equal(second(x), first(x))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["sparse", "reference"])
@pytest.mark.parametrize(
    ("dense", "x"),
    [
        (linear, torch.randn(5, 64)),
        (lambda: prune(nn.Conv2d(64, 32, 3, padding=1), "2:4"), torch.randn(2, 64, 5, 5)),
    ],
)
def test_compiled_and_exported(kernels, dense, x):
    model = packed_int8(dense(), kernels)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    exported = torch.export.export(model, (x,))
    assert not [node for node in exported.graph.nodes if "lightning" in str(node.target)]
    plain = dense()
    plain.load_state_dict(unpacked_state_dict(model))
    torch.testing.assert_close(exported.module()(x), plain(x))


@needs_library
def test_parts_of_a_projection():
    dense = prune(nn.MultiheadAttention(32, 4, batch_first=True), "2:4")
    model = packed_int8(dense)
    weight = model.in_proj_weight
    assert weight.operand.part((0, 20)) is None, "rows that are no whole tiles"
    query, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    near(model(query, memory, memory)[0], dense(query, memory, memory)[0], steps=4)
    for first, end in ((0, 32), (64, 96), (16, 96)):
        part = weight.operand.part((first, end))
        places, _ = part.layout.tensors
        integers = int8_kernel.int8_matrix(part.values, places, end - first, 32, part.pattern)
        found = dequantise_weight(integers, part.layout.scale, torch.float32)
        assert torch.equal(found, weight.unpack()[first:end])


def infinite():
    model = linear()
    with torch.no_grad():
        model.weight[3, model.weight[3].abs().argmax()] = torch.inf
    return model


@pytest.mark.parametrize(
    ("dense", "dtype", "message"),
    [
        (
            lambda: linear().half(),
            "int8",
            r"'weight' has no int8 form, float16 is not .*model.to\(torch.bfloat16\)",
        ),
        (lambda: linear().double(), "int8", "'weight' has no int8 form, float64 is not"),
        (
            infinite,
            "int8",
            "'weight' has no int8 form, a weight with NaN.* to int8: leave the layer out",
        ),
        (
            lambda: prune(nn.Conv2d(16, 16, 3), "2:4").half(),
            "int8",
            "'weight' has no int8 form, float16 is not",
        ),
        (linear, "int4", "dtype='int4' is unknown: use 'int8'"),
    ],
)
def test_what_is_refused(dense, dtype, message):
    model = dense()
    before = clones(model)
    with pytest.raises(ValueError, match=message):
        pack(model, dtype=dtype)
    assert_equal_states(clones(model), before)
