"""verify() of ONNX files and of programs of torch.export."""

import json
import os
import pickle
import zipfile

import numpy as np
import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.cli import main
from lightning_nm.export import pack, read_checkpoint, verify
from lightning_nm.export.graphs import export_pt2
from lightning_nm.functional import nm_prune
from lightning_nm.nn import NMLinear, nm_linear, register_adapter
from lightning_nm.nn.adapters import base


def pruned(*shape, dim=1):
    dense = nm_prune(torch.randn(shape), "2:4", dim=dim)
    return torch.where(dense == 0, 0.0, dense.sign() + dense)


class Constants(nn.Module):
    """Weights, a buffer that no state dict holds, and a constant."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 3, padding=1)
        self.linear = nn.Linear(8, 12, dtype=torch.bfloat16)
        self.register_buffer("table", torch.randn(4, 8), persistent=False)
        self.constant = torch.randn(4, 8)

    def forward(self, x):
        y = self.conv(x).mean(dim=(2, 3)) @ self.table + self.constant.sum()
        return self.linear(y.bfloat16())


@pytest.fixture
def program(tmp_path):
    model = Constants()
    model.conv.weight.data = pruned(4, 8, 3, 3)
    model.linear.weight.data = pruned(12, 8).bfloat16()
    export_pt2(model, (torch.randn(2, 8, 5, 5),), tmp_path / "a.pt2")
    return model, tmp_path / "a.pt2"


def test_the_weights_of_a_program(program):
    model, path = program
    result = verify(path, "2:4", allow_dense=True)
    assert result.ok
    verdicts = {v.key: v.verdict for v in result.verdicts}
    assert verdicts == {
        **{"conv.weight": "N:M", "linear.weight": "N:M"},
        **{"table": "dense", "constant": "dense"},
    }
    assert not verify(path, "2:4").ok
    model.conv.weight.data[1, :4, 2, 1] = 1
    export_pt2(model, (torch.randn(2, 8, 5, 5),), path)
    assert verify(path, "2:4").problems == ["'conv.weight' is not 2:4: 1 of 72 blocks hold more"]
    with pytest.raises(ValueError, match=r"no sparsifier state .*: give a pattern"):
        verify(path)


def test_views_of_one_storage_are_read(tmp_path):
    """Tied, transposed and in parts."""
    whole = pruned(8, 16)
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8))
    model[0].weight = nn.Parameter(whole)
    model[1].weight = nn.Parameter(whole.t())
    model[2].weight = model[0].weight
    export_pt2(model, (torch.randn(2, 16),), tmp_path / "a.pt2")
    verdicts = {v.key: (v.verdict, v.note) for v in verify(tmp_path / "a.pt2", "2:4").verdicts}
    assert verdicts.pop("1.weight") == ("N:M", "along dim 0")
    assert set(verdicts.values()) == {("N:M", "along dim 1")}


def test_a_program_of_a_packed_model_is_refused(tmp_path):
    for kernels in ("reference", "sparse"):
        linear = nn.Linear(64, 32)
        linear.weight.data = nm_prune(torch.randn(32, 64), "1:16")
        model = pack(nn.Sequential(linear), kernels=kernels)
        export_pt2(model, (torch.randn(2, 64),), tmp_path / "a.pt2")
        archive = zipfile.ZipFile(tmp_path / "a.pt2").namelist()
        if kernels == "sparse" and "serialized_state_dict.pt" in archive:
            # The form of torch 2.6 has nothing of a kernel's layout: there is no weight to be judged.
            assert not verify(tmp_path / "a.pt2", "1:16").ok
            continue
        with pytest.raises(ValueError, match=r"a weight as pack\(\) of lightning_nm packs it"):
            verify(tmp_path / "a.pt2", "1:16")


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def rewritten(path, change):
    """The file with other records."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)


def edited(part, value):
    """A change of what a program says of the tensor of its convolution."""

    def change(records):
        name = next(name for name in records if name.endswith("weights_config.json"))
        content = json.loads(records[name])
        entry = content["config"]["conv.weight"]
        (entry if part in entry else entry["tensor_meta"])[part] = value
        records[name] = json.dumps(content).encode()

    return change


def attack(records):
    edited("use_pickle", True)(records)
    for name in records:
        if "/weights/weight_" in name or name.endswith("sample_inputs/model.pt"):
            records[name] = pickle.dumps(Attack())


needs_records = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="older programs hold one pickled state dict"
)


@needs_records
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (attack, "weights_only|Unsupported|Weights only|invalid magic"),
        (edited("sizes", [{"as_int": 1 << 20}] * 4), "storage|bytes|overflow"),
        (edited("strides", [{"as_int": 1 << 40}] * 4), "storage|stride|bytes"),
        (edited("storage_offset", {"as_int": 9}), "storage|bytes"),
        (edited("dtype", 99), "not a tensor of a known dtype"),
        (edited("path_name", "elsewhere"), "elsewhere"),
        (edited("tensor_meta", None), "not a tensor of a known dtype"),
        (
            lambda records: records.clear() or records.update({"a/archive_format": b"pt2"}),
            "no weig",
        ),
    ],
)
def test_hostile_programs(program, monkeypatch, tmp_path, capsys, change, message):
    """They are refused, and nothing of them runs."""
    _, path = program
    monkeypatch.chdir(tmp_path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=message):
        verify(path, "2:4")
    assert main(["verify", str(path), "--pattern", "2:4"]) == 2
    assert not (tmp_path / "attacked").exists()


@needs_records
def test_damaged_programs(program):
    """Each byte of a weight is covered by a checksum; a truncated file is named."""
    _, path = program
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("archive/data/weights/weight_0").header_offset + 2000
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
    with pytest.raises(ValueError, match="CRC"):
        verify(path, "2:4")
    path.write_bytes(whole[:5000])
    with pytest.raises(ValueError, match="truncated"):
        verify(path, "2:4")


def test_programs_of_torch_2_6(tmp_path):
    """One pickled state dict, which is read as tensors alone."""
    state = tmp_path / "state.pt"
    torch.save({"a.weight": pruned(8, 16)}, state)
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.write(state, "serialized_state_dict.pt")
    assert verify(tmp_path / "a.pt2", "2:4").ok
    with zipfile.ZipFile(tmp_path / "a.pt2", "a") as archive:
        archive.writestr("serialized_constants.pt", pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"cannot read .* as a program of torch\.export"):
        verify(tmp_path / "a.pt2", "2:4")
    assert not os.path.exists("attacked")


def test_export_refuses_graphs(tmp_path, program):
    """Graphs are told from damaged files where a checkpoint is needed."""
    (tmp_path / "a.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch\x1a\x062.13.0")
    for path, kind in ((tmp_path / "a.onnx", "an ONNX graph"), (program[1], "a program of torch")):
        with pytest.raises(ValueError, match=f"it is {kind}.*, not a checkpoint: give the checkp"):
            read_checkpoint(path)


# ----------------------------------------------------------------------------------------------------------------- ONNX


def test_onnx_is_asked_for_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    (tmp_path / "a.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch\x1a\x062.13.0")
    assert main(["verify", str(tmp_path / "a.onnx"), "--pattern", "2:4"]) == 2
    assert (
        "needs the package `onnx`: pip install -e '.[onnx]' in a checkout of lightning_nm"
        in capsys.readouterr().out
    )


def saved(path, nodes, initializers, **kwargs):
    onnx = pytest.importorskip("onnx")
    graph = onnx.helper.make_graph(nodes, "g", [], [], initializers, **kwargs)
    model = onnx.helper.make_model(graph)
    onnx.save(model, path)
    return path


@pytest.fixture
def initializer():
    onnx = pytest.importorskip("onnx")
    return onnx.numpy_helper.from_array


@pytest.fixture
def node():
    return pytest.importorskip("onnx").helper.make_node


@pytest.mark.parametrize("operator", ["QGemm", "MatMulInteger", "MatMulNBits"])
def test_quantised_weights_are_refused(tmp_path, initializer, node, operator):
    weight = initializer(np.zeros((8, 16), np.int8), "w")
    reader = node(operator, ["w", "scale", "zero"], ["y"])
    with pytest.raises(ValueError, match=f"the operator {operator} reads a quantised weight"):
        verify(saved(tmp_path / "a.onnx", [reader], [weight]), "2:4")


def quantised(zero, dtype, axis=None, block=0):
    """Integers of an N:M weight [8, 16] whose pruned entries are the zero points."""
    values = pruned(8, 16).sign().numpy().astype(np.int64)
    zeros = np.asarray(zero)
    if block:
        zeros = zeros.repeat(block, axis)
    elif zeros.ndim:
        zeros = np.expand_dims(zeros, 1 - axis)
    return (values + zeros).astype(dtype)


# Zero points, type, axis, and entries in a block.
ZERO_POINTS = {
    "symmetric": (0, np.int8, None, 0),
    "int8": (-3, np.int8, None, 0),
    "uint8": (128, np.uint8, None, 0),
    "uint16": (40_000, np.uint16, None, 0),
    "rows": (np.arange(100, 108), np.uint8, 0, 0),
    "columns": (np.arange(100, 116), np.uint8, 1, 0),
    "blocks": (np.arange(100, 132).reshape(8, 4), np.uint8, 1, 4),
}


@pytest.mark.parametrize("kind", ZERO_POINTS)
def test_integers_are_judged_by_their_zero_points(tmp_path, initializer, node, kind):
    zero, dtype, axis, block = ZERO_POINTS[kind]
    right = quantised(*ZERO_POINTS[kind])
    wrong = right.copy()
    wrong[3, 4:8] += 3  # no entry of this block is its zero point now
    attributes = {} if axis is None else {"axis": axis - 2}
    attributes |= {"block_size": block} if block else {}
    reader = node("DequantizeLinear", ["w", "s", "z"], ["y"], **attributes)
    known = [
        initializer(np.asarray(zero).astype(dtype), "z"),
        initializer(np.ones_like(zero, np.float32), "s"),
    ]
    # The integer 0 is the zero point of symmetric weights alone.
    of_integer_0 = 0.0 if kind == "symmetric" else 1.0
    for array, verdict, density in (
        (right, "N:M", 0.5),
        (wrong, "broken", 66 / 128),
        (np.zeros_like(right), "dense", of_integer_0),
    ):
        path = saved(tmp_path / "a.onnx", [reader], [initializer(array, "w"), *known])
        result = verify(path, "2:4")
        assert [(v.verdict, v.density) for v in result.verdicts] == [(verdict, density)]
        assert result.ok == (verdict == "N:M")


def test_where_a_quantised_weight_is_read(tmp_path, initializer, node):
    """Without a zero point, moved before it is read, and as floats that the graph quantises."""
    scale = initializer(np.float32(0.1), "s")
    zero = initializer(np.uint8(128), "z")
    zeros = initializer(np.full(16, 128, np.uint8), "z")
    shifted = initializer(quantised(*ZERO_POINTS["uint8"]), "w")
    other = initializer(quantised(*ZERO_POINTS["uint8"]), "u")
    plain = initializer(quantised(*ZERO_POINTS["symmetric"]), "w")
    floats = initializer(pruned(8, 16).numpy(), "w")
    read = node("DequantizeLinear", ["m", "s", "z"], ["y"])
    quantise = node("QuantizeLinear", ["w", "s", "z"], ["m"])
    cases = [
        ([node("DequantizeLinear", ["w", "s"], ["y"])], [plain, scale]),
        ([node("DequantizeLinear", ["w", "s", ""], ["y"])], [plain, scale]),
        ([node("Transpose", ["w"], ["m"]), read], [shifted, scale, zero]),
        ([node("Gather", ["w", "rows"], ["m"]), read], [shifted, scale, zero]),
        ([node("Slice", ["w", "first", "last"], ["m"]), read], [shifted, scale, zero]),
        ([node("Split", ["w"], ["n", "m"]), read], [shifted, scale, zero]),
        ([node("Concat", ["u", "w"], ["m"], axis=0), read], [shifted, other, scale, zero]),
        ([quantise, read], [floats, scale, zero]),
    ]
    for nodes, tensors in cases:
        assert verify(saved(tmp_path / "a.onnx", nodes, tensors), "2:4").ok
    faults = [
        (
            [node("DequantizeLinear", ["w", "s", "elsewhere"], ["y"])],
            "'elsewhere', which is no con",
        ),
        ([node("Transpose", ["w"], ["m"]), read], "its weight is moved before DequantizeLinear"),
    ]
    for nodes, message in faults:
        with pytest.raises(ValueError, match=message):
            verify(saved(tmp_path / "a.onnx", nodes, [shifted, scale, zeros]), "2:4")
    circle = [node("Identity", ["m"], ["n"]), node("Identity", ["n"], ["m"]), read]
    assert not verify(saved(tmp_path / "a.onnx", circle, [shifted, scale, zero]), "2:4").ok


def test_a_scale_that_is_also_a_weight_is_judged(tmp_path, initializer, node):
    """Only what is read as a scale alone is no weight."""
    right, dense = initializer(pruned(8, 16).numpy(), "u"), np.ones((8, 16), np.float32)
    quantise = node("QuantizeLinear", ["x", "w"], ["q"])
    for nodes, keys in (
        ([quantise], ["u"]),
        ([quantise, node("MatMul", ["y", "w"], ["z"])], ["u", "w"]),
        ([node("QuantizeLinear", ["w", "w"], ["q"])], ["u", "w"]),
    ):
        result = verify(saved(tmp_path / "a.onnx", nodes, [right, initializer(dense, "w")]), "2:4")
        assert list(result.matrices) == keys
        assert result.ok == (keys == ["u"])


def test_a_zero_point_of_two_branches_is_refused(tmp_path, initializer, node):
    """Which of the two an operator reads is not known."""
    helper = pytest.importorskip("onnx").helper
    weight = initializer(quantised(*ZERO_POINTS["uint8"]), "w")
    branches = [
        helper.make_graph([], name, [], [], [initializer(np.uint8(zero), "z")])
        for name, zero in (("a", 127), ("b", 128))
    ]
    choice = node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    reader = node("DequantizeLinear", ["w", "s", "z"], ["y"])
    with pytest.raises(ValueError, match="the zero point 'z', which is no constant"):
        verify(saved(tmp_path / "a.onnx", [choice, reader], [weight]), "2:4")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["per_channel_symmetric", "per_tensor_affine"])
def test_fake_quantisation_next_to_moving_masks(tmp_path, initializer, node, monkeypatch, scheme):
    """Of torch.ao: mask and rounding see one weight, and the integers of the trained weights keep every zero."""
    from torch.ao import quantization
    from torch.ao.nn import qat

    monkeypatch.setattr(base, "_ADAPTERS", list(base._ADAPTERS))

    @register_adapter
    class NMFakeQuantised(NMLinear):
        handles = qat.Linear

        def forward(self, x):
            rounded = self.weight_fake_quant(self.weight)
            return nm_linear(x, rounded, self.bias, self.nm_layers["weight"])

    is_symmetric = "symmetric" in scheme
    bounds, dtype = ((-128, 127), torch.qint8) if is_symmetric else ((0, 255), torch.quint8)
    observer = "PerChannelMinMaxObserver" if is_symmetric else "MinMaxObserver"
    rounding = quantization.FakeQuantize.with_args(
        observer=getattr(quantization, observer),
        quant_min=bounds[0],
        quant_max=bounds[1],
        dtype=dtype,
        qscheme=getattr(torch, scheme),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).train()
    model.qconfig = quantization.QConfig(activation=nn.Identity, weight=rounding)
    model = quantization.prepare_qat(model)
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.register(optimizer)
    first = sparsifier.layers["0"].forward_mask.clone()
    for _ in range(20):
        x = torch.randn(32, 16)
        optimizer.zero_grad()
        (model(x) - x[:, :8].sin()).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert not torch.equal(first, sparsifier.layers["0"].forward_mask)
    model.apply(quantization.disable_observer)
    trained = model(x)
    sparsifier.bake()
    sparsifier.detach()
    # Without masks, the same outputs: what was rounded in training is what is rounded now.
    assert torch.equal(model(x), trained)

    for place in (0, 2):
        weight, rounding = model[place].weight.detach(), model[place].weight_fake_quant
        scale, zero = rounding.calculate_qparams()
        rows = scale.view(-1, 1), zero.view(-1, 1)
        steps = ((weight / rows[0]).round() + rows[1]).clamp(*bounds)
        assert torch.allclose((steps - rows[1]) * rows[0], rounding(weight))
        integers = steps.numpy().astype(np.int8 if is_symmetric else np.uint8)
        tensors = [
            initializer(integers, "w"),
            initializer(scale.numpy(), "s"),
            initializer(zero.numpy().astype(integers.dtype), "z"),
        ]
        reader = node("DequantizeLinear", ["w", "s", "z"], ["y"], axis=0)
        (verdict,) = verify(saved(tmp_path / "a.onnx", [reader], tensors), "2:4").verdicts
        assert (verdict.verdict, bool(zero.any())) == ("N:M", not is_symmetric)
        # Rounding makes no zero another value, and some small values zeros.
        assert 0.4 < verdict.density <= 0.5


def test_every_place_of_a_constant(tmp_path, initializer, node):
    """Initialisers, constants, those of branches and functions, and those in another file; sparse ones are refused."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    right, dense = pruned(8, 16).numpy(), np.ones((8, 16), np.float32)

    def sparse(array):
        places = np.flatnonzero(array)
        values = initializer(array.reshape(-1)[np.flatnonzero(array)], "sparse")
        return helper.make_sparse_tensor(values, initializer(places, "places"), array.shape)

    def model_of(array, place):
        nodes, tensors, more, functions = [], [initializer(right, "first")], {}, []
        if place == "initializer":
            tensors.append(initializer(array, "w"))
        elif place == "constant":
            nodes.append(node("Constant", [], ["w"], value=initializer(array, "")))
        elif place == "sparse":
            more["sparse_initializer"] = [sparse(array)]
        elif place == "branch":
            branch = helper.make_graph([], "b", [], [], [initializer(array, "w")])
            nodes.append(node("If", ["c"], ["y"], then_branch=branch, else_branch=branch))
            inner = helper.make_graph([], "e", [], [], [])
            nodes[0].attribute[1].g.CopyFrom(inner)
        elif place == "function":
            constant = node("Constant", [], ["w"], value=initializer(array, ""))
            functions.append(helper.make_function("own", "f", [], ["w"], [constant], []))
        graph = helper.make_graph(nodes, "g", [], [], tensors, **more)
        return helper.make_model(graph, functions=functions)

    onnx.save(model_of(right, "sparse"), tmp_path / "a.onnx")
    with pytest.raises(ValueError, match="sparse initialisers, which are not read"):
        verify(tmp_path / "a.onnx", "2:4")
    for place in ("initializer", "constant", "branch", "function"):
        for array, expected in ((right, True), (dense, False)):
            onnx.save(model_of(array, place), tmp_path / "a.onnx")
            result = verify(tmp_path / "a.onnx", "2:4")
            assert (result.ok, len(result.matrices)) == (expected, 2), place
    model = model_of(right, "initializer")
    onnx.save(
        model, tmp_path / "b.onnx", save_as_external_data=True, location="b", size_threshold=0
    )
    assert verify(tmp_path / "b.onnx", "2:4").ok
    (tmp_path / "b").unlink()
    with pytest.raises(ValueError, match="'first'"):
        verify(tmp_path / "b.onnx", "2:4")


@pytest.mark.parametrize(
    "name", ["FLOAT16", "BFLOAT16", "DOUBLE", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "INT8"]
)
def test_every_type_of_onnx(tmp_path, name, node):
    onnx = pytest.importorskip("onnx")
    dtype = getattr(onnx.TensorProto, name)
    for weight, verdict in ((pruned(8, 16), "N:M"), (torch.ones(8, 16), "dense")):
        values = weight.sign().numpy().reshape(-1)
        tensor = onnx.helper.make_tensor("w", dtype, weight.shape, values)
        result = verify(saved(tmp_path / "a.onnx", [], [tensor]), "2:4", allow_dense=True)
        assert [v.verdict for v in result.verdicts] == [verdict]


def test_hostile_onnx(tmp_path, initializer, node):
    right = initializer(pruned(8, 16).numpy(), "w")
    dense = initializer(np.ones((8, 16), np.float32), "w")
    huge = initializer(np.ones((2, 2), np.float32), "w")
    del huge.dims[:]
    huge.dims.extend([1 << 40, 1 << 40])
    outside = initializer(np.ones((2, 2), np.float32), "w")
    outside.ClearField("raw_data")
    outside.data_location = outside.EXTERNAL
    outside.external_data.add(key="location", value="../../etc/hostname")
    faults = [
        ([], [right, dense], "'w' is defined twice"),
        ([], [huge], "'w'"),
        ([], [outside], "'w'"),
    ]
    for nodes, tensors, message in faults:
        with pytest.raises(ValueError, match=message):
            verify(saved(tmp_path / "a.onnx", nodes, tensors), "2:4")
    assert verify(saved(tmp_path / "a.onnx", [], [right]), "2:4").ok
    whole = (tmp_path / "a.onnx").read_bytes()
    for length in range(1, len(whole), 7):
        (tmp_path / "a.onnx").write_bytes(whole[:length])
        assert main(["verify", str(tmp_path / "a.onnx"), "--pattern", "2:4", "-q"]) in (1, 2)


@pytest.mark.slow
def test_files_of_our_export(tmp_path):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from lightning_nm.export.graphs import export_onnx

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    model[0].weight.data = pruned(32, 16)
    export_onnx(model, (torch.randn(2, 16),), tmp_path / "a.onnx")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert verify(tmp_path / "a.onnx", "2:4", base=tmp_path / "a.pt").ok
    assert not verify(tmp_path / "a.onnx", "2:4").ok
