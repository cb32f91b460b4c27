"""Damaged and hostile files are refused with a reason, before anything is allocated or changed."""

import json
import math
import os
import random
import warnings
import zlib

import pytest
import torch
from safetensors.torch import load_file

from lightning_nm import load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.cli import main
from lightning_nm.export import PackedFile, verify
from lightning_nm.export.patterns import count_nonfinite
from lightning_nm.export.sources import read_checkpoint
from tests.support.packed_models import (
    assert_equal_states,
    clones,
    copied,
    header_of,
    mutated,
    on_meta,
    small,
    without_checksums,
)


@pytest.fixture
def saved(tmp_path):
    """A model, packed, and its file."""
    dense = small("1:16")
    save_packed(pack(copied(dense)), tmp_path / "model.safetensors")
    return dense, tmp_path / "model.safetensors"


def rewrite(path, header, content):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


def changed(path, change):
    """Change the header, or the part of it that describes packed weights."""
    header, content = header_of(path)
    packed = json.loads(header["__metadata__"]["packed"])
    change(header, packed)
    header["__metadata__"]["packed"] = json.dumps(packed)
    rewrite(path, header, content)


HOSTILE = {
    "pattern": (lambda h, p: p["4.weight"].update(pattern="5:4"), "prunes nothing"),
    "pattern text": (lambda h, p: p["4.weight"].update(pattern=76), "is no text"),
    "pattern long": (lambda h, p: p["4.weight"].update(pattern="1:512"), "more than 256"),
    "other pattern": (
        lambda h, p: p["4.weight"].update(pattern="1:8"),
        r"is torch.float32 \(64, 32, 1\), not",
    ),
    "layout": (lambda h, p: p["4.weight"].update(layout="x"), "layout 'x', none of plain"),
    "layout list": (lambda h, p: p["4.weight"].update(layout=[]), r"layout \[\]"),
    "other layout": (
        lambda h, p: p["0.weight"].update(layout="transposed"),
        "has no layout 'transposed'",
    ),
    "dtype": (lambda h, p: p["4.weight"].update(dtype="U8"), "'U8', which is not packed"),
    "dtype none": (lambda h, p: p["4.weight"].update(dtype=None), "None, which is not packed"),
    "other dtype": (
        lambda h, p: p["4.weight"].update(dtype="F64"),
        r"torch.float32 \(64, 32, 1\), not torch.float64",
    ),
    "10 GB": (
        lambda h, p: p["4.weight"].update(shape=[1 << 22, 512]),
        r"not torch.float32 \(4194304, 32, 1\)",
    ),
    "huge": (lambda h, p: p["4.weight"].update(shape=[1 << 60, 512]), "is of shape"),
    "negative": (lambda h, p: p["4.weight"].update(shape=[-64, 512]), "is of shape"),
    "zero": (lambda h, p: p["4.weight"].update(shape=[0, 512]), "is of shape"),
    "flag": (lambda h, p: p["4.weight"].update(shape=[True, 512]), "is of shape"),
    "one axis": (lambda h, p: p["4.weight"].update(shape=[64 * 512]), "has no layout 'plain'"),
    "field": (lambda h, p: p["4.weight"].pop("shape"), "does not have exactly pattern"),
    "missing part": (lambda h, p: p.update({"x": p["4.weight"]}), "there is no tensor 'x.values'"),
    "both": (
        lambda h, p: h.update({"4.weight": h.pop("6.weight")}),
        "'4.weight' is both dense and packed",
    ),
    "data offsets": (lambda h, p: h["6.bias"].update(data_offsets=[0, 12]), "is damaged"),
    "claimed data": (
        lambda h, p: h["6.bias"].update(data_offsets=[0, 10**10], shape=[10**10 // 4]),
        "is damaged",
    ),
    "overflow": (
        lambda h, p: h["6.bias"].update(shape=[1 << 47, 1 << 47]),
        "is damaged",
    ),
    "axes": (lambda h, p: p["4.weight"].update(shape=[1] * 10**6), "is of shape"),
    "tensor dtype": (lambda h, p: h["6.bias"].update(dtype="F4"), "is damaged"),
    "gone": (lambda h, p: h.pop("6.bias"), "is damaged"),
    "version": (
        lambda h, p: h["__metadata__"].update(version="4"),
        "is of version '4', and this lightning_nm reads '1', '2' and '3': update it",
    ),
    "format": (lambda h, p: h["__metadata__"].pop("format"), "holds no packed model: make one by"),
    "metadata": (lambda h, p: h["__metadata__"].update(x=1), "is damaged"),
    "aliases": (
        lambda h, p: h["__metadata__"].update(aliases='{"a": "b"}'),
        "'a' is an alias of 'b'",
    ),
    "alias list": (
        lambda h, p: h["__metadata__"].update(aliases='{"a": []}'),
        r"'a' is an alias of \[\]",
    ),
    "own alias": (
        lambda h, p: h["__metadata__"].update(aliases='{"6.bias": "6.bias"}'),
        "is an alias of '6.bias'",
    ),
    "checksums": (
        lambda h, p: h["__metadata__"].update(crc32="[]"),
        "`crc32` is no object of texts",
    ),
    "checksum number": (
        lambda h, p: h["__metadata__"].update(
            crc32=h["__metadata__"]["crc32"].replace('"6.bias": "', '"6.bias": 1, "x": "')
        ),
        "`crc32` is no object of texts",
    ),
    "checksum of another tensor": (
        lambda h, p: h["__metadata__"].update(
            crc32=h["__metadata__"]["crc32"].replace("6.bias", "7.bias")
        ),
        "'[67].bias' is not both a tensor and a name in `crc32`",
    ),
    "checksum": (
        lambda h, p: h["__metadata__"].update(
            crc32=h["__metadata__"]["crc32"].replace('"6.bias": "', '"6.bias": "0')
        ),
        "is damaged: the bytes of '6.bias' have the CRC-32 [0-9a-f]{8}, and were written with 0[0-9a-f]{8}: copy",
    ),
    "no aliases": (lambda h, p: h["__metadata__"].pop("aliases"), "are not objects"),
    "aliases twice": (
        lambda h, p: h["__metadata__"].update(aliases='{"a":"6.bias","a":"6.bias"}'),
        "'a' occurs twice",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_headers(saved, fault):
    _, path = saved
    change, message = HOSTILE[fault]
    changed(path, change)
    model = small("1:16", seed=2)
    before = clones(model)
    with pytest.raises(ValueError, match=message) as raised:
        load_packed(model, path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 10**7
    assert_equal_states(clones(model), before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"\xff" * 7, "damaged"),
        (b"\xff" * 64, "damaged"),
        ((1 << 40).to_bytes(8, "little") + b"{}" * 9, "damaged"),
        ((2).to_bytes(8, "little") + b"[]", "damaged"),
        ((2).to_bytes(8, "little") + b"{]", "damaged"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "damaged"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "damaged"),
        ((10**4 + 5).to_bytes(8, "little") + b'{"a":' + b"9" * 10**4, "damaged"),
        ((17).to_bytes(8, "little") + b'{"a": {}, "a":{}}', "damaged"),
        ((2).to_bytes(8, "little") + b"{}more", "damaged"),
        ((2).to_bytes(8, "little") + b"{}", "holds no packed model"),
    ],
)
def test_what_is_no_file(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PackedFile(tmp_path / "a")


def test_duplicate_names_of_tensors(saved):
    _, path = saved
    header, content = header_of(path)
    text = json.dumps(header)
    rewrite(
        path, (text[:-1] + ', "6.bias": ' + json.dumps(header["6.bias"]) + "}").encode(), content
    )
    load_file(path)  # the library takes the last one
    with pytest.raises(ValueError, match=r"'6.bias' occurs twice in its header"):
        PackedFile(path)


def test_a_file_that_becomes_shorter(saved):
    _, path = saved
    file = PackedFile(path)
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(ValueError, match="it ends within"):
        [file.read(name) for name in file.names()]


# ------------------------------------------------------------------------------------------------------------ checksums


@pytest.fixture(params=[None, "int8"])
def kind(request, tmp_path):
    """A model, its packed file and the places of the file's tensors."""
    dense = small("2:4")
    path = tmp_path / "model.safetensors"
    save_packed(pack(copied(dense), dtype=request.param, kernels="reference"), path)
    header, content = header_of(path)
    start = path.stat().st_size - len(content)
    places = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            places[name] = start + begin, start + end
    return dense, path, places


def test_checksums_are_those_of_the_bytes(kind):
    _, path, places = kind
    content = path.read_bytes()
    expected = {
        name: f"{zlib.crc32(content[begin:end]):08x}" for name, (begin, end) in places.items()
    }
    assert json.loads(header_of(path)[0]["__metadata__"]["crc32"]) == expected


def test_one_bit_of_any_tensor(kind, capsys):
    """Whatever reads the file refuses it, and names the file and the tensor; the model is unchanged."""
    dense, path, places = kind
    content, rng = path.read_bytes(), random.Random(0)
    model = copied(dense)
    before = clones(model)
    for name, (begin, end) in places.items():
        damaged = bytearray(content)
        damaged[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        message = f"'{path}' is damaged: the bytes of '{name}' have the CRC-32 "
        for read in (lambda: load_packed(model, path), lambda: read_checkpoint(path)):
            with pytest.raises(ValueError, match="is damaged") as raised:
                read()
            assert str(raised.value).startswith(message)
        for pattern in (None, "2:4"):
            with pytest.raises(ValueError, match="is damaged") as raised:
                verify(path, pattern)
            assert str(raised.value).startswith(message)
        assert main(["verify", str(path)]) == 2
        assert message in capsys.readouterr().out
    assert_equal_states(clones(model), before)
    path.write_bytes(content)
    assert verify(path).warnings == []
    load_packed(model, path)


def test_each_byte_is_summed_once(kind, monkeypatch):
    """A packed weight is read before the model is changed, and again to load it: the second time it is known."""
    dense, path, places = kind
    summed = []
    crc32 = zlib.crc32
    monkeypatch.setattr(
        zlib, "crc32", lambda data, *start: summed.append(len(data)) or crc32(data, *start)
    )
    load_packed(on_meta(dense), path)
    assert sum(summed) == sum(end - begin for begin, end in places.values())
    assert len(summed) == len(places)


def test_files_of_older_versions_have_none(kind, capsys):
    dense, path, _ = kind
    expected = unpacked_state_dict(load_packed(on_meta(dense), path, kernels="reference"))
    content = path.read_bytes()
    without_checksums(path)
    message = r"model.safetensors' was written by lightning_nm 0.3 or older and has no checksums"
    with pytest.warns(UserWarning, match=message) as warned:
        model = load_packed(on_meta(dense), path, kernels="reference")
    assert [warning.filename for warning in warned] == [__file__]
    assert_equal_states(unpacked_state_dict(model), expected)
    result = verify(path)
    assert result.ok
    assert len(result.warnings) == 1
    assert main(["verify", str(path)]) == 0
    assert f"WARNING: '{path}' was written by lightning_nm 0.3" in capsys.readouterr().out
    # As the message says.
    save_packed(model, path)
    assert path.read_bytes() == content


def test_what_is_not_finite_is_told(tmp_path, capsys):
    """Of files with checksums, too: the model itself had such values. A buffer may be a mask of -inf."""
    dense = small("2:4")
    dense[4].weight.data[3, 5:7] = dense[4].weight.data[3, 5:7].new_tensor([torch.nan, -torch.inf])
    dense[4].weight.data[3, 4] = dense[4].weight.data[3, 7] = 0
    dense[6].bias.data[1] = torch.inf
    for layer in (dense[0], dense[2]):
        layer.register_buffer("bias_mask", torch.full((2, 2), -torch.inf))
    dense[2].bias_mask[0] = torch.nan
    path = tmp_path / "model.safetensors"
    save_packed(pack(copied(dense), "2:4", kernels="reference"), path)
    model = copied(dense)
    message = (
        r"tensors of '.*model.safetensors' have entries that are NaN or infinite, so outputs of the model may be NaN: "
        r"'2.bias_mask' \(2\), '4.weight' \(2\), '6.bias' \(1\)$"
    )
    with pytest.warns(UserWarning, match=message):
        load_packed(model, path)
    assert not model[4].weight.training
    for pattern in (None, "2:4"):
        result = verify(path, pattern, allow_dense=pattern is not None)
        assert result.ok
        assert "'4.weight' has entries that are NaN or infinite" in result.warnings
        assert [v.nonfinite for v in result.verdicts if v.key == "4.weight"] == [2]
    torch.save(dense.state_dict(), tmp_path / "model.pt")
    assert main(["verify", str(tmp_path / "model.pt"), "--pattern", "2:4", "--allow-dense"]) == 0
    assert "WARNING: '4.weight' has entries that are NaN" in capsys.readouterr().out
    # Not of a matrix that is finite.
    assert verify(tmp_path / "model.pt", "2:4", allow_dense=True).verdicts[0].nonfinite == 0


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8],
)
@pytest.mark.parametrize(
    "special", [[], [math.nan], [math.inf], [-math.inf], [math.nan, -math.inf]]
)
def test_counts_of_what_is_not_finite(dtype, special):
    if not dtype.is_floating_point:
        special = []
    values = torch.tensor([-2.0, 0.0, 3.0] * 5)
    values[[3, 11][: len(special)]] = torch.tensor(special)
    given = values.to(dtype)
    assert count_nonfinite(given) == len(special)
    assert count_nonfinite(given, infinite=False) == sum(map(math.isnan, special))
    assert count_nonfinite(given[:0]) == 0


# -------------------------------------------------------------------------------------------------------------- fuzzing


def content_of(state):
    return {key: value.contiguous().view(-1).view(torch.uint8) for key, value in state.items()}


@pytest.mark.slow
def test_mutated_files_with_checksums(kind):
    """A mutated file is refused by a ValueError, or has lost its checksums, or loads with the same bytes."""
    dense, path, _ = kind
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    template = on_meta(dense)
    expected = content_of(unpacked_state_dict(load_packed(copied(template), path)))
    rng, faults, loaded = random.Random(0), [], 0
    for _ in range(1500):
        path.write_bytes(mutated(rng, content, start))
        model = copied(template)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                load_packed(model, path, kernels="reference")
        except (ValueError, UserWarning) as fault:
            faults.append(fault)
            continue
        loaded += 1
        found = content_of(unpacked_state_dict(model))
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    for fault in faults:
        assert str(path) in str(fault)
        assert isinstance(fault, ValueError) or "has no checksums" in str(fault)
    assert 0 < loaded < 500 < len(faults)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no checksums", "ignore:tensors of .* NaN or infinite")
def test_mutated_files(saved, monkeypatch):
    """Every mutated file is refused by a ValueError, or loads as a model of the same shapes; little is allocated."""
    dense, path = saved
    without_checksums(path)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    rng, loaded, refused, most = random.Random(0), 0, [], []
    empty = torch.empty

    def counting(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        most.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    template = on_meta(dense)
    for _ in range(2500):
        path.write_bytes(mutated(rng, content, start))
        model = copied(template)
        try:
            load_packed(model, path, kernels="reference")
        except ValueError as error:
            refused.append(str(error))
            continue
        loaded += 1
        state = unpacked_state_dict(model)
        assert {key: value.shape for key, value in state.items()} == {
            k: v.shape for k, v in dense.state_dict().items()
        }
    assert 0 < loaded < 1500
    assert all(str(path) in message for message in refused)
    assert max(most) <= math.prod(dense[4].weight.shape) * 4


def test_a_checkpoint_is_named(tmp_path):
    torch.save({"weight": torch.ones(2, 2)}, tmp_path / "a.ckpt")
    with pytest.raises(
        ValueError, match=r"a.ckpt' is a checkpoint of torch.*`lightning-nm export .*a.ckpt -o"
    ):
        load_packed(torch.nn.Linear(2, 2), tmp_path / "a.ckpt")
