"""Damaged and hostile files are refused with a reason, before anything is allocated or changed."""

import json
import math
import os
import random

import pytest
import torch

from lightning_nm import load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.export import PackedFile, safetensors_file
from tests.support.packed_models import (
    assert_equal_states,
    clones,
    copied,
    header_of,
    mutated,
    on_meta,
    small,
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
    "data offsets": (lambda h, p: h["6.bias"].update(data_offsets=[0, 12]), "begins at 0"),
    "claimed data": (
        lambda h, p: h["6.bias"].update(data_offsets=[0, 10**10], shape=[10**10 // 4]),
        "lies at",
    ),
    "overflow": (
        lambda h, p: h["6.bias"].update(shape=[1 << 47, 1 << 47]),
        "takes .* bytes, not 12",
    ),
    "axes": (lambda h, p: h["6.bias"].update(shape=[1] * 10**6), "is of shape"),
    "tensor dtype": (lambda h, p: h["6.bias"].update(dtype="F4"), "of dtype 'F4', none of"),
    "tensor field": (lambda h, p: h["6.bias"].update(x=1), "does not have exactly dtype"),
    "gone": (lambda h, p: h.pop("6.bias"), "the tensors before it end at|its tensors take"),
    "version": (
        lambda h, p: h["__metadata__"].update(version="3"),
        "is of version '3', and this lightning_nm reads '1' and '2': update it",
    ),
    "format": (lambda h, p: h["__metadata__"].pop("format"), "holds no packed model: make one by"),
    "metadata": (lambda h, p: h["__metadata__"].update(x=1), "its metadata do not map"),
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
        (b"", "its header claims 0 bytes, and the file has 0"),
        (b"\xff" * 7, "claims"),
        (b"\xff" * 64, "claims 18446744073709551615 bytes, and the file has 64"),
        ((1 << 40).to_bytes(8, "little") + b"{}" * 9, "claims 1099511627776 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "no object"),
        ((2).to_bytes(8, "little") + b"{]", "no JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "no JSON"),
        ((10**5).to_bytes(8, "little") + b"[" * 10**5, "no JSON"),
        ((10**4 + 5).to_bytes(8, "little") + b'{"a":' + b"9" * 10**4, "no JSON"),
        ((17).to_bytes(8, "little") + b'{"a": {}, "a":{}}', "'a' occurs twice"),
        ((2).to_bytes(8, "little") + b"{}more", "its tensors take 0 bytes, and it has 4"),
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
    pytest.importorskip("safetensors.torch").load_file(path)  # the package takes the last one
    with pytest.raises(ValueError, match=r"'6.bias' occurs twice in its header"):
        PackedFile(path)


def test_a_file_that_becomes_shorter(saved):
    _, path = saved
    file = PackedFile(path)
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(ValueError, match="it ends within"):
        [file.read(name) for name in file.names()]


# -------------------------------------------------------------------------------------------------------------- fuzzing


@pytest.mark.slow
def test_mutated_files(saved, monkeypatch):
    """Every mutated file is refused by a ValueError, or loads as a model of the same shapes; little is allocated."""
    dense, path = saved
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    rng, loaded, refused, most = random.Random(0), 0, [], []
    empty = torch.empty

    def counting(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        most.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(safetensors_file.torch, "empty", counting)
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
