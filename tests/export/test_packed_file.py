"""Files of packed models: what they hold, what their weights become in a model, and what is refused."""

import json
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.export import PackedFile, packed_file
from lightning_nm.export.packed_file import DTYPES, SafetensorsFile, write_packed, write_safetensors
from lightning_nm.functional import nm_prune, quantise_weight, unpack_nm
from lightning_nm.packed.module import put
from lightning_nm.packed.tensor import PackedTensor
from lightning_nm.pattern import NMPattern
from tests.support.experts import Experts, TransposedExperts
from tests.support.packed_models import (
    Embeddings,
    assert_equal_states,
    clones,
    copied,
    on_meta,
    prune,
    small,
)

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def dense():
    """A model, which is in the file "a", too."""
    model = small("1:16")
    save_packed(pack(copied(model)), "a")
    return model


def octets(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def packed(weight, **options):
    pattern = NMPattern(1, 8)
    return PackedTensor.of(nm_prune(weight, pattern), pattern, **options)


# ------------------------------------------------------------------------------------------------------ what it holds


def test_other_readers_agree(dense):
    found, header = safetensors.load_file("a"), json.loads(PackedFile("a").metadata["packed"])
    fields = {"pattern": "1:16", "layout": "plain", "shape": [64, 512], "dtype": "F32"}
    assert header["4.weight"] == fields
    values, positions = found["4.weight.values"], found["4.weight.positions"]
    assert (values.shape, positions.shape) == ((64, 32, 1), (64 * 32 // 2,))
    # docs/format.md, by hand: four bits for each position, the lower half of a byte first.
    places = torch.stack([positions & 15, positions >> 4], 1).view(64, 32, 1).long()
    matrix = torch.zeros(64, 32, 16).scatter_(2, places, values).view(64, 512)
    assert torch.equal(matrix, dense[4].weight)
    assert torch.equal(found["6.weight"], dense[6].weight)


def test_integers_and_scales():
    """By the reference reader of the format: integers of each block, and a scale for each row."""
    dense = small("2:4", torch.bfloat16)
    save_packed(pack(copied(dense), dtype="int8"), "a")
    file = PackedFile("a")
    assert file.entry("4.weight").dtype == torch.bfloat16
    assert file.entries["4.weight.values"].dtype == torch.int8
    found = file.read("4.weight")
    integers, scale = quantise_weight(dense[4].weight)
    assert torch.equal(unpack_nm(found.values, found.positions, "2:4", (64, 512)), integers)
    assert torch.equal(found.scales, scale)


@pytest.mark.parametrize(
    ("options", "version"),
    [({}, "1"), ({"dtype": "int8"}, "2"), ({"dtype": "int8", "int8_embeddings": "words"}, "3")],
)
def test_versions(options, version):
    """Older readers refuse what they do not read, and read the rest."""
    save_packed(pack(prune(Embeddings(), "2:4"), **options), "a")
    assert PackedFile("a").metadata["version"] == version


def test_files_are_those_of_the_package():
    known = DTYPES.keys() & safetensors._TYPES.keys()  # older versions know fewer
    tensors = {name: torch.randint(0, 2, (3, 2)).to(DTYPES[name]) for name in sorted(known)}
    tensors["empty"], tensors["scalar"] = torch.empty(0, 3), torch.tensor(3)
    tensors["view"] = torch.randn(4, 6).t()[1:]
    write_safetensors("a", tensors, {"x": "é"})
    found = safetensors.load_file("a")
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    safetensors.save_file(contiguous, "b", {"x": "é"})
    file = SafetensorsFile("b")
    assert file.metadata == {"x": "é"}
    for key, tensor in tensors.items():
        for other in (found[key], file.read_stored(key)):
            assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), key
            assert torch.equal(octets(other), octets(tensor)), key


def test_shared_tensors_are_written_once():
    weight, dense = packed(torch.randn(32, 64)), torch.randn(3)
    write_packed("a", {"a": weight, "b": weight, "c": dense, "d": dense})
    file = PackedFile("a")
    assert file.aliases == {"b": "a", "d": "c"}
    assert torch.equal(file.read("b").unpack(), weight.unpack())
    assert torch.equal(file.read("d"), dense)
    assert Path("a").stat().st_size < weight.nbytes + 900


EXPERTS = "--int8-experts up --int8-experts down"
WORDS = "--int8-embeddings words --int8-embeddings em*.weight"


@pytest.mark.parametrize(
    ("make", "dtype", "options", "words"),
    [
        (small, torch.float32, {}, ""),
        (small, torch.float32, {"dtype": "int8"}, "--dtype int8"),
        (small, torch.bfloat16, {"dtype": "int8"}, "--dtype int8"),
        (
            Embeddings,
            torch.float32,
            {"dtype": "int8", "int8_embeddings": ["words", "embed"]},
            f"--dtype int8 {WORDS}",
        ),
        (Experts, torch.float32, {"dtype": "int8"}, "--dtype int8 --int8-experts *"),
        (TransposedExperts, torch.bfloat16, {"dtype": "int8"}, f"--dtype int8 {EXPERTS}"),
    ],
)
def test_the_command_writes_what_pack_and_save_do(command, make, dtype, options, words):
    model = prune(make().to(dtype), "2:4")
    torch.save(model.state_dict(), "a.pt")
    command(f"export a.pt -o a.safetensors {words}")
    save_packed(pack(copied(model), kernels="reference", **options), "b")
    ours, theirs = PackedFile("a.safetensors"), PackedFile("b")
    assert ours.metadata["version"] == theirs.metadata["version"]
    assert ours.packed == theirs.packed
    assert ours.aliases == theirs.aliases
    assert sorted(ours.names()) == sorted(theirs.names())
    for key in theirs.entries:
        assert torch.equal(ours.read_stored(key), theirs.read_stored(key)), key
    loaded = [
        unpacked_state_dict(load_packed(copied(model), name)) for name in ("a.safetensors", "b")
    ]
    assert_equal_states(*loaded)


# ---------------------------------------------------------------------------------------------- what a model gets of it


def test_dense_weights_are_freed_one_by_one(dense, monkeypatch):
    weights, alive = [weakref.ref(dense[number].weight) for number in (0, 4, 5)], []

    def counting(*arguments):
        put(*arguments)
        alive.append(sum(each() is not None for each in weights))

    monkeypatch.setattr("lightning_nm.export.packed_model.put", counting)
    load_packed(dense, "a")
    assert alive == [2, 1, 0]


def test_a_weight_that_no_packed_layer_takes_is_unpacked():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    dense = small("2:4", torch.bfloat16)
    save_packed(pack(copied(dense), dtype="int8"), "a")
    model = copied(dense)
    model[4] = Own(512, 64).bfloat16()
    load_packed(model, "a")
    integers, scale = quantise_weight(dense[4].weight)
    assert torch.equal(model[4].weight, (integers.float() * scale[:, None]).bfloat16())


@pytest.mark.parametrize("values", [None, "int8"])
def test_a_model_in_another_dtype_than_the_file(values):
    save_packed(pack(small("1:16"), dtype=values, kernels="reference"), "a")
    model = small("1:16", torch.bfloat16)
    message = r"'0.bias' is torch.bfloat16 in .* torch.float32 in .*to\(torch.fl"
    assert_not_loaded(model, ValueError, message)
    # As the message says.
    loaded = load_packed(model.float(), "a", kernels="reference").to(torch.bfloat16)
    assert loaded(torch.randn(2, 16, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    # A model in the default dtype takes that of the file.
    save_packed(loaded, "a")
    assert load_packed(small("1:16"), "a")[6].bias.dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------------------- what is refused


def assert_not_loaded(model, error, message):
    before, kinds = clones(model), [type(layer) for layer in model.modules()]
    with pytest.raises(error, match=message):
        load_packed(model, "a")
    assert [type(layer) for layer in model.modules()] == kinds
    assert before.keys() == model.state_dict().keys()
    assert all(
        each.is_meta or torch.equal(each, model.state_dict()[k]) for k, each in before.items()
    )


def with_table():
    model = on_meta()
    model[2].register_buffer("table", torch.zeros(3, device="meta"), persistent=False)
    return model


def changed(change):
    model = small("1:16")
    change(model)
    return model


FITS = "the model Sequential does not fit 'a': "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: changed(lambda m: m.append(nn.Linear(3, 3))),
            f"{FITS}the file lacks '7.weight', '7.bias'",
        ),
        (lambda: changed(lambda m: m.pop(6)), f"{FITS}the model lacks '6.weight', '6.bias'"),
        (
            lambda: changed(lambda m: m.__setitem__(5, nn.Linear(64, 16, False))),
            rf"{FITS}'5.weight' is \(16, 64\) in the model and \(32, 64\) in",
        ),
        (with_table, "'2.table' of Sequential on the meta device has no values"),
        (lambda: pack(small("1:16"), kernels="reference"), "Sequential is packed already"),
        (
            lambda: changed(lambda m: NMSparsifier(m, "1:16", "bi-mask").attach()),
            "is masked by a sparsifier",
        ),
    ],
)
def test_models_that_do_not_fit(dense, make, message):
    assert_not_loaded(make(), ValueError, message)


def test_what_is_no_file():
    expected = "a packed model is one file, which `lightning-nm export --to packed` or save_packed"
    assert_not_loaded(small(), FileNotFoundError, f"there is no file 'a': {expected}")
    os.mkdir("a")
    assert_not_loaded(small(), IsADirectoryError, f"is a folder: {expected}")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "hold no torch.complex128"),
        *(
            (
                {"a": packed(torch.randn(4, 8), int8=True), f"a.{part}": torch.zeros(2)},
                f"needs the name 'a.{part}', which another tensor has",
            )
            for part in ("values", "positions", "scales")
        ),
    ],
)
def test_what_is_not_written(tensors, message):
    Path("a").write_text("old")
    with pytest.raises(ValueError, match=message):
        write_packed("a", tensors)
    assert Path("a").read_text() == "old"
    assert os.listdir() == ["a"]


def test_models_and_places_that_are_not_written():
    with pytest.raises(ValueError, match="has no packed layer"):
        save_packed(nn.Linear(4, 4), "a")
    with pytest.raises(FileNotFoundError):
        write_packed("none/a", {"a": torch.zeros(2)})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*use of fork")
def test_an_interrupted_export_leaves_the_old_file(monkeypatch):
    """The process is killed while it writes."""
    Path("a.safetensors").write_text("old")
    own = packed_file.bytes_of

    def killed(tensor):
        if any(name.startswith(".") for name in os.listdir()):
            os.kill(os.getpid(), signal.SIGKILL)
        return own(tensor)

    monkeypatch.setattr(packed_file, "bytes_of", killed)
    child = os.fork()
    if not child:
        write_packed("a.safetensors", {"a": torch.zeros(1000), "b": torch.zeros(1000)})
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert Path("a.safetensors").read_text() == "old"
    hidden, name = sorted(os.listdir())
    assert hidden.startswith("."), "it was writing next to the old file"
    assert name == "a.safetensors"
