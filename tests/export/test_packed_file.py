"""Files of packed models: what they hold, how they load, and what is refused."""

import json
import os
import signal
import weakref

import pytest
import torch
from torch import nn

from lightning_nm import load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.export import PackedFile, packed_file
from lightning_nm.export.packed_file import DTYPES, SafetensorsFile, write_packed, write_safetensors
from lightning_nm.functional import nm_prune
from lightning_nm.packed.module import packed_weights, put
from lightning_nm.packed.tensor import PackedTensor
from lightning_nm.pattern import NMPattern
from tests.support.packed_models import (
    ARGUMENTS,
    assert_equal_states,
    clones,
    copied,
    header_of,
    held,
    small,
)

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def saved(tmp_path):
    """A model, packed, and its file."""
    dense = small("1:16")
    save_packed(pack(copied(dense)), tmp_path / "model.safetensors")
    return dense, tmp_path / "model.safetensors"


def octets(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


# -------------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_loads_into_a_model(saved, device, kernels):
    dense, path = saved
    x = torch.randn(2, 16, 4, 4)
    with torch.device(device):
        model = nn.Sequential(
            *[type(layer)(*args) for layer, args in zip(dense, ARGUMENTS, strict=True)]
        )
    assert load_packed(model, path, kernels=kernels) is model
    assert_equal_states(unpacked_state_dict(model), dense.state_dict())
    assert torch.allclose(model(x), dense(x), rtol=1e-4, atol=1e-5)
    assert not model.training
    assert held(model) < 0.2 * held(dense)
    assert list(dict(packed_weights(model))) == ["0.weight", "4.weight", "5.weight"]


def test_dense_weights_are_freed_one_by_one(saved, monkeypatch):
    _, path = saved
    model, alive = small("1:16", seed=1), []
    weights = [weakref.ref(model[number].weight) for number in (0, 4, 5)]

    def counting(*arguments):
        put(*arguments)
        alive.append(sum(each() is not None for each in weights))

    monkeypatch.setattr("lightning_nm.export.packed_model.put", counting)
    load_packed(model, path)
    assert alive == [2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tensors_have_the_dtype_of_the_file(tmp_path, dtype):
    dense = small("2:4", dtype)
    save_packed(pack(copied(dense)), tmp_path / "a.safetensors")
    model = load_packed(small("2:4", seed=1), tmp_path / "a.safetensors")
    assert_equal_states(unpacked_state_dict(model), dense.state_dict())
    x = torch.randn(2, 16, 4, 4, dtype=dtype)
    assert model(x).dtype == dtype


def test_other_readers_agree(saved):
    dense, path = saved
    found, header = (
        safetensors.load_file(path),
        json.loads(header_of(path)[0]["__metadata__"]["packed"]),
    )
    assert header["4.weight"] == {
        "pattern": "1:16",
        "layout": "plain",
        "shape": [64, 512],
        "dtype": "F32",
    }
    values, positions = found["4.weight.values"], found["4.weight.positions"]
    assert (values.shape, positions.shape) == ((64, 32, 1), (64 * 32 // 2,))
    # docs/format.md, by hand: four bits for each position, the lower half of a byte first.
    places = torch.stack([positions & 15, positions >> 4], 1).view(64, 32, 1).long()
    matrix = torch.zeros(64, 32, 16).scatter_(2, places, values).view(64, 512)
    assert torch.equal(matrix, dense[4].weight)
    assert torch.equal(found["6.weight"], dense[6].weight)


def test_files_are_those_of_the_package(tmp_path):
    known = DTYPES.keys() & safetensors._TYPES.keys()  # older versions know fewer
    tensors = {name: torch.randint(0, 2, (3, 2)).to(DTYPES[name]) for name in sorted(known)}
    tensors |= {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "view": torch.randn(4, 6).t()[1:],
    }
    write_safetensors(tmp_path / "a", tensors, {"x": "é"})
    found = safetensors.load_file(tmp_path / "a")
    safetensors.save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "b", {"x": "é"}
    )
    file = SafetensorsFile(tmp_path / "b")
    assert file.metadata == {"x": "é"}
    for key, tensor in tensors.items():
        for other in (found[key], file.read_stored(key)):
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), key
            assert torch.equal(octets(other), octets(tensor)), key


def test_shared_tensors_are_written_once(tmp_path):
    weight = nm_prune(torch.randn(32, 64), "1:4")
    tensors = dict.fromkeys("ab", PackedTensor.of(weight, NMPattern(1, 4)))
    dense = torch.randn(3)
    write_packed(tmp_path / "a", {**tensors, "c": dense, "d": dense})
    file = PackedFile(tmp_path / "a")
    assert file.aliases == {"b": "a", "d": "c"}
    assert torch.equal(file.read("b").unpack(), weight)
    assert torch.equal(file.read("d"), dense)
    assert (tmp_path / "a").stat().st_size < 32 * 64 * 1.2 + 900


def test_a_tied_weight_loads(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(8, 32)
            self.middle = nn.Linear(32, 32)
            self.head = nn.Linear(32, 8, bias=False)
            self.head.weight = self.embedding.weight

    model = Tied()
    model.middle.weight.data = nm_prune(model.middle.weight.data, "1:8")
    state = clones(model)
    save_packed(pack(model), tmp_path / "a")
    for device in ("cpu", "meta"):
        with torch.device(device):
            other = Tied()
        load_packed(other, tmp_path / "a")
        assert other.head.weight is other.embedding.weight
        assert_equal_states(unpacked_state_dict(other), state)
    # A file that has the tied weight once, as transformers writes it, and packed.
    state["head.weight"] = nm_prune(state["head.weight"], "1:8")
    del state["embedding.weight"]
    tensors = {
        key: PackedTensor.of(value, NMPattern(1, 8)) if value.dim() > 1 else value
        for key, value in state.items()
    }
    write_packed(tmp_path / "b", tensors)
    with pytest.raises(ValueError, match="Tied is packed already"):
        load_packed(other, tmp_path / "b")
    other = load_packed(Tied(), tmp_path / "b")
    assert torch.equal(other.embedding.weight, state["head.weight"])
    assert other.head.weight is other.embedding.weight


# ----------------------------------------------------------------------------------------------------- what is refused


def test_a_model_that_does_not_fit(saved):
    dense, path = saved
    for change, message in (
        (lambda m: m.append(nn.Linear(3, 3)), "the file lacks '7.weight', '7.bias'"),
        (lambda m: m.pop(6), "the model lacks '6.weight', '6.bias'"),
        (
            lambda m: m.__setitem__(5, nn.Linear(64, 16, False)),
            r"'5.weight' is \(16, 64\) in the model and \(32, 64\) in",
        ),
    ):
        model = copied(dense)
        change(model)
        before, kinds = clones(model), [type(layer) for layer in model]
        with pytest.raises(
            ValueError, match=rf"the model Sequential does not fit '.*model.safetensors': {message}"
        ):
            load_packed(model, path)
        assert_equal_states(clones(model), before)
        assert [type(layer) for layer in model] == kinds


def test_a_meta_buffer_without_values(saved):
    _, path = saved
    with torch.device("meta"):
        model = nn.Sequential(
            *[type(layer)(*args) for layer, args in zip(small(), ARGUMENTS, strict=True)]
        )
        model[2].register_buffer("table", torch.zeros(3), persistent=False)
    with pytest.raises(
        ValueError, match=r"'2.table' of Sequential on the meta device has no values"
    ):
        load_packed(model, path)


def test_damaged_positions_change_nothing(saved):
    dense, path = saved
    for key, part in (("0.weight", 2), ("5.weight", -1)):
        pattern = NMPattern(2, 4)
        packed = PackedTensor.of(nm_prune(dense[5].weight.detach(), pattern), pattern)
        packed.positions[part] = 0
        tensors = {k: v for k, v in dense.state_dict().items() if k != "5.weight"}
        write_packed(path, {**tensors, "5.weight": packed})
        model = small("2:4", seed=3)
        before = clones(model)
        with pytest.raises(
            ValueError,
            match=r"is damaged: '5.weight': block .* does not have 2 different ascending",
        ):
            load_packed(model, path)
        assert_equal_states(clones(model), before), key


def test_what_is_not_written(tmp_path):
    weight = nm_prune(torch.randn(4, 8), "2:4")
    target = tmp_path / "a"
    target.write_text("old")
    for tensors, message in (
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "hold no torch.complex128"),
        (
            {"a": PackedTensor.of(weight, NMPattern(2, 4)), "a.values": torch.zeros(2)},
            "'a.values', which another",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            write_packed(target, tensors)
        assert target.read_text() == "old"
        assert os.listdir(tmp_path) == ["a"]
    with pytest.raises(ValueError, match="has no packed layer"):
        save_packed(nn.Linear(4, 4), target)
    with pytest.raises(FileNotFoundError):
        write_packed(tmp_path / "none" / "a", {"a": weight})


def test_what_is_no_file(tmp_path):
    expected = "a packed model is one file, which `lightning-nm export --to packed` or save_packed"
    with pytest.raises(
        FileNotFoundError, match=f"there is no file '.*none.safetensors': {expected}"
    ):
        load_packed(nn.Linear(8, 4), tmp_path / "none.safetensors")
    with pytest.raises(IsADirectoryError, match=f"is a folder: {expected}"):
        load_packed(nn.Linear(8, 4), tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_an_interrupted_export_leaves_the_old_file(tmp_path, monkeypatch):
    """The process is killed while it writes."""
    target = tmp_path / "a.safetensors"
    target.write_text("old")

    own = packed_file.bytes_of

    def killed(tensor):
        if any(name.startswith(".") for name in os.listdir(tmp_path)):
            os.kill(os.getpid(), signal.SIGKILL)
        return own(tensor)

    monkeypatch.setattr(packed_file, "bytes_of", killed)
    child = os.fork()
    if not child:
        write_packed(target, {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert target.read_text() == "old"
    assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == ["a.safetensors"]
    assert len(os.listdir(tmp_path)) == 2, "it was writing beside the old file"


@pytest.mark.parametrize("values", [None, "int8"])
def test_a_model_in_another_dtype_than_the_file(tmp_path, values):
    path = tmp_path / "model.safetensors"
    save_packed(pack(small("1:16"), dtype=values, kernels="reference"), path)
    model = small("1:16", torch.bfloat16)
    before = clones(model)
    with pytest.raises(
        ValueError, match=r"'0.bias' is torch.bfloat16 in .* torch.float32 in .*to\(torch.fl"
    ):
        load_packed(model, path)
    assert_equal_states(clones(model), before)
    # As the message says.
    loaded = load_packed(model.float(), path, kernels="reference").to(torch.bfloat16)
    assert loaded(torch.randn(2, 16, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    # A model in the default dtype takes that of the file.
    save_packed(loaded, path)
    assert load_packed(small("1:16"), path)[6].bias.dtype == torch.bfloat16
