"""verify() of ONNX files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

onnx = pytest.importorskip("onnx")
from onnx import helper  # noqa: E402
from onnx.helper import make_node as node  # noqa: E402
from onnx.numpy_helper import from_array  # noqa: E402

from lightning_nm.cli import main  # noqa: E402
from lightning_nm.export import verify  # noqa: E402
from lightning_nm.functional import nm_prune  # noqa: E402


def pruned():
    """2:4, of -1, 0 and 1."""
    return nm_prune(torch.randn(8, 16), "2:4").sign().numpy()


FULL = np.ones((8, 16), np.float32)


def verify_graph(nodes, tensors, **options):
    graph = helper.make_graph(nodes, "g", [], [], tensors)
    onnx.save(helper.make_model(graph, **options), "a.onnx")
    return verify("a.onnx", "2:4")


# ------------------------------------------------------------------------------------------------ where constants are


def with_initializer(array):
    return [], [from_array(array, "w")], {}


def constant(array):
    return node("Constant", [], ["w"], value=from_array(array, ""))


def with_constant(array):
    return [constant(array)], [], {}


def with_branch(array):
    inside = helper.make_graph([], "b", [], [], [from_array(array, "w")])
    empty = helper.make_graph([], "e", [], [], [])
    return [node("If", ["c"], ["y"], then_branch=inside, else_branch=empty)], [], {}


def with_function(array):
    function = helper.make_function("own", "f", [], ["w"], [constant(array)], [])
    return [], [], {"functions": [function]}


@pytest.mark.parametrize("place", [with_initializer, with_constant, with_branch, with_function])
def test_every_place_of_a_constant(place):
    for array, expected in ((pruned(), True), (FULL, False)):
        nodes, tensors, options = place(array)
        first = from_array(pruned(), "first")
        result = verify_graph(nodes, [first, *tensors], **options)
        assert (result.ok, len(result.matrices)) == (expected, 2)


def test_constants_in_another_file():
    model = helper.make_model(helper.make_graph([], "g", [], [], [from_array(pruned(), "first")]))
    onnx.save(model, "a.onnx", save_as_external_data=True, location="b", size_threshold=0)
    assert verify("a.onnx", "2:4").ok
    Path("b").unlink()
    with pytest.raises(ValueError, match="'first'"):
        verify("a.onnx", "2:4")


@pytest.mark.parametrize(
    "name", ["FLOAT16", "BFLOAT16", "DOUBLE", "FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "INT8"]
)
def test_every_type_of_onnx(name):
    dtype = getattr(onnx.TensorProto, name)
    for values, verdict in ((pruned(), "N:M"), (FULL, "dense")):
        tensor = helper.make_tensor("w", dtype, values.shape, values.reshape(-1))
        assert [v.verdict for v in verify_graph([], [tensor]).verdicts] == [verdict]


# ---------------------------------------------------------------------------------------------------- quantised weights


def integers_of(zero, dtype, axis=None, block=0):
    """Integers of an N:M weight [8, 16] whose pruned entries are the zero points."""
    zeros = np.asarray(zero)
    if block:
        zeros = zeros.repeat(block, axis)
    elif zeros.ndim:
        zeros = np.expand_dims(zeros, 1 - axis)
    return (pruned().astype(np.int64) + zeros).astype(dtype)


# Zero points, type, axis, and entries in a block.
ZERO_POINTS = {
    "symmetric": (0, np.int8),
    "int8": (-3, np.int8),
    "uint8": (128, np.uint8),
    "uint16": (40_000, np.uint16),
    "rows": (np.arange(100, 108), np.uint8, 0),
    "columns": (np.arange(100, 116), np.uint8, 1),
    "blocks": (np.arange(100, 132).reshape(8, 4), np.uint8, 1, 4),
}


@pytest.mark.parametrize("kind", ZERO_POINTS)
def test_integers_are_judged_by_their_zero_points(kind):
    zero, dtype, *place = ZERO_POINTS[kind]
    right = integers_of(zero, dtype, *place)
    wrong = right.copy()
    wrong[3, 4:8] += 3  # no entry of this block is its zero point now
    attributes = dict(zip(("axis", "block_size"), place, strict=False))
    if place:
        attributes["axis"] -= 2
    reader = node("DequantizeLinear", ["w", "s", "z"], ["y"], **attributes)
    zeros = from_array(np.asarray(zero).astype(dtype), "z")
    scales = from_array(np.ones_like(zero, np.float32), "s")
    # The integer 0 is the zero point of symmetric weights alone.
    of_integer_0 = 0.0 if kind == "symmetric" else 1.0
    for array, verdict, density in (
        (right, "N:M", 0.5),
        (wrong, "broken", 66 / 128),
        (np.zeros_like(right), "dense", of_integer_0),
    ):
        result = verify_graph([reader], [from_array(array, "w"), zeros, scales])
        assert [(v.verdict, v.density) for v in result.verdicts] == [(verdict, density)]
        assert result.ok == (verdict == "N:M")


SCALE = from_array(np.float32(0.1), "s")
ZERO = from_array(np.uint8(128), "z")
ZEROS = from_array(np.full(16, 128, np.uint8), "z")
READ = node("DequantizeLinear", ["m", "s", "z"], ["y"])
TRANSPOSE = node("Transpose", ["w"], ["m"])


def shifted(name="w"):
    return from_array(integers_of(128, np.uint8), name)


@pytest.mark.parametrize(
    "nodes",
    [
        [TRANSPOSE],
        [node("Gather", ["w", "rows"], ["m"])],
        [node("Slice", ["w", "first", "last"], ["m"])],
        [node("Split", ["w"], ["n", "m"])],
        [node("Concat", ["u", "w"], ["m"], axis=0)],
    ],
    ids=lambda nodes: nodes[0].op_type,
)
def test_a_weight_that_is_moved_before_it_is_read(nodes):
    tensors = [shifted(), SCALE, ZERO]
    if nodes[0].op_type == "Concat":
        tensors.append(shifted("u"))
    assert verify_graph([*nodes, READ], tensors).ok


@pytest.mark.parametrize("inputs", [["w", "s"], ["w", "s", ""]])
def test_a_weight_without_a_zero_point(inputs):
    plain = from_array(integers_of(0, np.int8), "w")
    assert verify_graph([node("DequantizeLinear", inputs, ["y"])], [plain, SCALE]).ok


def test_floats_that_the_graph_quantises():
    quantise = node("QuantizeLinear", ["w", "s", "z"], ["m"])
    assert verify_graph([quantise, READ], [from_array(pruned(), "w"), SCALE, ZERO]).ok


def two_branches():
    """Two zero points of one name."""
    branches = [
        helper.make_graph([], name, [], [], [from_array(np.uint8(zero), "z")])
        for name, zero in (("a", 127), ("b", 128))
    ]
    return node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])


@pytest.mark.parametrize(
    ("nodes", "tensors", "message"),
    [
        (
            [node("DequantizeLinear", ["w", "s", "elsewhere"], ["y"])],
            [SCALE],
            "'elsewhere', which is no con",
        ),
        (
            [two_branches(), node("DequantizeLinear", ["w", "s", "z"], ["y"])],
            [],
            "the zero point 'z', which is no constant",
        ),
        ([TRANSPOSE, READ], [SCALE, ZEROS], "its weight is moved before DequantizeLinear"),
        *(
            (
                [node(operator, ["w", "scale", "zero"], ["y"])],
                [],
                f"the operator {operator} reads a quantised weight",
            )
            for operator in ("QGemm", "MatMulInteger", "MatMulNBits")
        ),
    ],
)
def test_quantised_weights_that_are_refused(nodes, tensors, message):
    with pytest.raises(ValueError, match=message):
        verify_graph(nodes, [shifted(), *tensors])


def test_a_circle_of_operators():
    circle = [node("Identity", ["m"], ["n"]), node("Identity", ["n"], ["m"]), READ]
    assert not verify_graph(circle, [shifted(), SCALE, ZERO]).ok


QUANTISE = node("QuantizeLinear", ["x", "w"], ["q"])


@pytest.mark.parametrize(
    ("nodes", "keys"),
    [
        ([QUANTISE], ["u"]),
        ([QUANTISE, node("MatMul", ["y", "w"], ["z"])], ["u", "w"]),
        ([node("QuantizeLinear", ["w", "w"], ["q"])], ["u", "w"]),
    ],
)
def test_a_scale_that_is_also_a_weight_is_judged(nodes, keys):
    """Only what is read as a scale alone is no weight."""
    result = verify_graph(nodes, [from_array(pruned(), "u"), from_array(FULL, "w")])
    assert list(result.matrices) == keys
    assert result.ok == (keys == ["u"])


# -------------------------------------------------------------------------------------------------------------- hostile


def of_size(*sizes):
    tensor = from_array(FULL, "w")
    del tensor.dims[:]
    tensor.dims.extend(sizes)
    return tensor


def outside():
    tensor = from_array(FULL, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = tensor.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/hostname")
    return tensor


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([from_array(FULL, "w"), from_array(FULL, "w")], "'w' is defined twice"),
        ([of_size(1 << 40, 1 << 40)], "'w'"),
        ([outside()], "'w'"),
    ],
)
def test_hostile_constants(tensors, message):
    with pytest.raises(ValueError, match=message):
        verify_graph([], tensors)


def test_sparse_initialisers_are_refused():
    array = pruned()
    places = np.flatnonzero(array)
    values = from_array(array.reshape(-1)[places], "sparse")
    sparse = helper.make_sparse_tensor(values, from_array(places, "places"), array.shape)
    graph = helper.make_graph([], "g", [], [], [], sparse_initializer=[sparse])
    onnx.save(helper.make_model(graph), "a.onnx")
    with pytest.raises(ValueError, match="sparse initialisers, which are not read"):
        verify("a.onnx", "2:4")


def test_truncated_files():
    assert verify_graph([], [from_array(pruned(), "w")]).ok
    path = Path("a.onnx")
    whole = path.read_bytes()
    for length in range(1, len(whole), 7):
        path.write_bytes(whole[:length])
        assert main(["verify", "a.onnx", "--pattern", "2:4", "-q"]) in (1, 2)


@pytest.mark.slow
def test_files_of_our_export():
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    from lightning_nm.export.graphs import export_onnx

    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    model[0].weight.data = nm_prune(model[0].weight.data, "2:4")
    export_onnx(model, (torch.randn(2, 16),), "a.onnx")
    torch.save(model.state_dict(), "a.pt")
    assert verify("a.onnx", "2:4", base="a.pt").ok
    assert not verify("a.onnx", "2:4").ok
