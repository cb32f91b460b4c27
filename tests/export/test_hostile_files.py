"""Damaged and hostile files are refused with a reason, before anything is allocated or changed."""

import json
import math
import os
import random
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lightning_nm import load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.export import PackedFile, verify
from lightning_nm.export.packed_file import bytes_of
from lightning_nm.export.patterns import count_nonfinite
from lightning_nm.export.sources import read_checkpoint
from tests.support.packed_models import (
    Embeddings,
    assert_equal_states,
    clones,
    copied,
    edit_header,
    header_of,
    mutated,
    on_meta,
    prune,
    small,
    small_layers,
    with_length,
    without_checksums,
)

FILE = Path("model.safetensors")
INT8 = {"dtype": "int8"}
KINDS = {
    "float": (lambda: small("1:16"), {}, small_layers),
    "int8": (lambda: small("2:4", torch.bfloat16), INT8, small_layers),
    "rows": (
        lambda: prune(Embeddings(), "2:4"),
        INT8 | {"int8_embeddings": ["words", "embed"]},
        Embeddings,
    ),
}
"""A model, the options of pack(), and the model without values."""


def saved(kind):
    """A model, packed into a file."""
    torch.manual_seed(0)
    make, options, _ = KINDS[kind]
    model = make()
    save_packed(pack(copied(model), kernels="reference", **options), FILE)
    return model


def assert_refused(model, message):
    """The file is not loaded, and the model is as it was."""
    before = clones(model)
    with pytest.raises(ValueError, match=message) as raised:
        load_packed(model, FILE)
    assert str(FILE) in str(raised.value)
    assert_equal_states(clones(model), before)


# By kind of file, and by what is changed: an entry of the header, or of what it tells of packed weights. The key of an
# entry, and its new fields (None: without the field), its new key, or None to take it away.
HOSTILE = {
    ("float", "packed"): [
        ("4.weight", {"pattern": "5:4"}, "prunes nothing"),
        ("4.weight", {"pattern": 76}, "is no text"),
        ("4.weight", {"pattern": "1:512"}, "more than 256"),
        ("4.weight", {"pattern": "1:8"}, r"is torch.float32 \(64, 32, 1\), not"),
        ("4.weight", {"layout": "x"}, "layout 'x', none of plain"),
        ("4.weight", {"layout": []}, r"layout \[\]"),
        ("0.weight", {"layout": "transposed"}, "has no layout 'transposed'"),
        ("4.weight", {"dtype": "U8"}, "'U8', which is not packed"),
        ("4.weight", {"dtype": 7}, "7, which is not packed"),
        ("4.weight", {"dtype": "F64"}, r"float32 \(64, 32, 1\), not torch.float64"),
        ("4.weight", {"shape": [1 << 60, 512]}, "is of shape"),
        ("4.weight", {"shape": [0, 512]}, "is of shape"),
        ("4.weight", {"shape": [True, 512]}, "is of shape"),
        ("4.weight", {"shape": [1] * 1000}, "is of shape"),
        ("4.weight", {"shape": [64 * 512]}, "has no layout 'plain'"),
        ("4.weight", {"shape": None}, "does not have exactly pattern"),
        ("4.weight", "x", "there is no tensor 'x.values'"),
    ],
    ("float", "header"): [
        ("6.weight", "4.weight", "'4.weight' is both dense and packed"),
        ("6.bias", {"data_offsets": [0, 10**10], "shape": [10**10 // 4]}, "is damaged"),
        ("6.bias", {"dtype": "F4"}, "is damaged"),
        ("6.bias", None, "is damaged"),
        ("__metadata__", {"version": "4"}, "version '4', .* reads '1', '2' and '3': update it"),
        ("__metadata__", {"format": None}, "holds no packed model: make one by"),
        ("__metadata__", {"aliases": '{"a": []}'}, r"'a' is an alias of \[\]"),
        ("__metadata__", {"aliases": '{"6.bias": "6.bias"}'}, "is an alias of '6.bias'"),
        ("__metadata__", {"aliases": '{"a":"6.bias","a":"6.bias"}'}, "'a' occurs twice"),
        ("__metadata__", {"aliases": None}, "are not objects"),
        ("__metadata__", {"crc32": "[]"}, "`crc32` is no object of texts"),
        ("__metadata__", {"crc32": '{"6.bias": 1}'}, "`crc32` is no object of texts"),
        ("__metadata__", {"crc32": '{"6.bias": "0"}'}, "is not both a tensor and a name in"),
    ],
    ("int8", "packed"): [
        ("4.weight", {"values": "U8"}, "has values in 'U8', not I8"),
        ("4.weight", {"values": None}, r"is torch.int8 .*, not torch.bfloat16"),
        ("0.weight", {"dtype": "F16"}, "'0.weight' in F16 has int8 values, which weights"),
        ("0.weight", {"shape": [32, 16, 9, 3]}, "'0.weight.values' is .*int8 .*, not torch.int8"),
    ],
    ("int8", "header"): [
        ("__metadata__", {"version": "1"}, "does not have exactly pattern"),
        ("0.weight.scales", {"shape": [8, 4]}, r"'0.weight.scales' is .*float32 \(8, 4\), not"),
        ("4.weight.scales", {"dtype": "I32"}, "'4.weight.scales' is torch.int32"),
        ("4.weight.scales", "4.weight.other", "there is no tensor '4.weight.scales'"),
    ],
    ("rows", "packed"): [
        ("words.weight", {"layout": "transposed"}, "a dense matrix is not"),
        ("words.weight", {"shape": [40, 8, 4]}, "a dense matrix is not"),
        ("words.weight", {"values": None}, "a dense matrix is not"),
        ("words.weight", {"shape": [32, 40]}, r"int8 \(40, 32, 1\), not torch.int8 \(32, 40, 1\)"),
        ("words.weight", {"pattern": "2:4"}, r"words.weight.values' is .*int8 \(40, 32, 1\), not"),
        ("middle.weight", {"pattern": "dense"}, r"int8 \(32, 8, 2\), not torch.int8 \(32, 32, 1\)"),
    ],
    ("rows", "header"): [
        ("__metadata__", {"version": "2"}, "'dense' as an N:M pattern"),
        ("words.weight.scales", {"shape": [20, 2]}, r"scales' is .*float32 \(20, 2\), not"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "part", "key", "change", "message"),
    [(*place, *row) for place, rows in HOSTILE.items() for row in rows],
)
def test_hostile_headers(kind, part, key, change, message):
    model = saved(kind)

    def edit(header, packed):
        entries = header if part == "header" else packed
        entry = entries.pop(key)
        if isinstance(change, str):
            entries[change] = entry
        elif change:
            fields = entry | change
            entries[key] = {name: value for name, value in fields.items() if value is not None}

    edit_header(FILE, edit)
    assert_refused(model, message)


HEADERS = [
    b"[]",
    b"{]",
    b"\xff\xff",
    b"[" * 10**5,
    b'{"a":' + b"9" * 10**4,
    b'{"a": {}, "a":{}}',
]
NO_HEADERS = [
    b"",
    b"\xff" * 7,
    b"\xff" * 64,
    (1 << 40).to_bytes(8, "little") + b"{}" * 9,
    with_length(b"{}") + b"more",
]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((content, "damaged") for content in [*NO_HEADERS, *map(with_length, HEADERS)]),
        (with_length(b"{}"), "holds no packed model"),
    ],
)
def test_what_is_no_packed_file(content, message):
    FILE.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PackedFile(FILE)


def test_duplicate_names_of_tensors():
    saved("float")
    header, content = header_of(FILE)
    text = f'{json.dumps(header)[:-1]}, "6.bias": {json.dumps(header["6.bias"])}}}'
    FILE.write_bytes(with_length(text.encode()) + content)
    load_file(FILE)  # the library takes the last one
    with pytest.raises(ValueError, match=r"'6\.bias' occurs twice in its header"):
        PackedFile(FILE)


def test_a_file_that_becomes_shorter():
    saved("float")
    file = PackedFile(FILE)
    os.truncate(FILE, FILE.stat().st_size - 5)
    with pytest.raises(ValueError, match="it ends within"):
        [file.read(name) for name in file.names()]


def test_a_checkpoint_is_named():
    torch.save({"weight": torch.ones(2, 2)}, FILE)
    assert_refused(torch.nn.Linear(2, 2), "is a checkpoint of torch.*`lightning-nm export model.s")


# ------------------------------------------------------------------------------------------------------------- content


def places():
    """Where the bytes of each tensor of the file are."""
    header, content = header_of(FILE)
    start = FILE.stat().st_size - len(content)
    del header["__metadata__"]
    return {
        name: [start + offset for offset in entry["data_offsets"]] for name, entry in header.items()
    }


def overwrite(place, content):
    with FILE.open("r+b") as file:
        file.seek(place)
        file.write(content)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("values", torch.tensor([-128], dtype=torch.int8), "an int8 value is -128"),
        ("scales", torch.tensor([torch.nan]), "a scale is not between"),
        ("scales", torch.tensor([torch.inf]), "a scale is not between"),
        ("scales", torch.tensor([-1.0]), "a scale is not between"),
        ("scales", torch.tensor([1e-42]), "a scale is not between"),
        ("positions", torch.zeros(1, dtype=torch.uint8), "block 0 does not have 2 different asc"),
    ],
)
def test_content_that_is_damaged(command, part, value, message):
    """Without checksums, which would tell it first."""
    model = saved("int8")
    without_checksums(FILE)
    overwrite(places()[f"4.weight.{part}"][0], value.numpy().tobytes())
    assert_refused(model, f"'4.weight': {message}")
    assert message in command(f"verify {FILE}", 2)


@pytest.fixture(params=["float", "int8"])
def model(request):
    """A model whose file is there."""
    return saved(request.param)


def test_checksums_are_those_of_the_bytes(model):
    content = FILE.read_bytes()
    expected = {
        name: f"{zlib.crc32(content[begin:end]):08x}" for name, (begin, end) in places().items()
    }
    assert json.loads(header_of(FILE)[0]["__metadata__"]["crc32"]) == expected


def test_one_bit_of_any_tensor(model, command):
    """Whatever reads the file refuses it, and names the file and the tensor; the model is unchanged."""
    content, rng = FILE.read_bytes(), random.Random(0)
    for name, (begin, end) in places().items():
        damaged = bytearray(content)
        damaged[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)
        FILE.write_bytes(damaged)
        message = f"'{FILE}' is damaged: the bytes of '{name}' have the CRC-32 "
        assert_refused(model, f"^{message}[0-9a-f]{{8}}, and were written with [0-9a-f]{{8}}: copy")
        for read in (read_checkpoint, verify, lambda path: verify(path, "2:4")):
            with pytest.raises(ValueError, match=f"^{message}"):
                read(FILE)
        for words in (f"verify {FILE}", f"export {FILE} --to torch -o a.pt"):
            assert message in command(words, 2)
    FILE.write_bytes(content)
    assert verify(FILE).warnings == []
    load_packed(model.float(), FILE)


def test_each_byte_is_summed_once(model, monkeypatch):
    """A packed weight is read before the model is changed, and again to load it: the second time it is known."""
    summed = []
    crc32 = zlib.crc32
    monkeypatch.setattr(
        zlib, "crc32", lambda data, *start: summed.append(len(data)) or crc32(data, *start)
    )
    load_packed(on_meta(), FILE)
    assert sorted(summed) == sorted(end - begin for begin, end in places().values())


def test_files_of_older_versions_have_no_checksums(model, command):
    content = FILE.read_bytes()
    expected = unpacked_state_dict(load_packed(on_meta(), FILE, kernels="reference"))
    without_checksums(FILE)
    message = f"'{FILE}' was written by lightning_nm 0.3 or older and has no checksums"
    with pytest.warns(UserWarning, match=message) as warned:
        loaded = load_packed(on_meta(), FILE, kernels="reference")
    assert [warning.filename for warning in warned] == [__file__]
    assert_equal_states(unpacked_state_dict(loaded), expected)
    assert verify(FILE).ok
    said = command(f"verify {FILE}")
    assert said.count("WARNING") == 1
    assert f"WARNING: {message[:40]}" in said
    # As the message says.
    save_packed(loaded, FILE)
    assert FILE.read_bytes() == content


def test_what_is_not_finite_is_told(command):
    """Of files with checksums, too: the model itself had such values. A buffer may be a mask of -inf."""
    dense = small("2:4")
    dense[4].weight.data[3, 4:8] = torch.tensor([0, torch.nan, -torch.inf, 0])
    dense[6].bias.data[1] = torch.inf
    for layer in (dense[0], dense[2]):
        layer.register_buffer("bias_mask", torch.full((2, 2), -torch.inf))
    dense[2].bias_mask[0] = torch.nan
    save_packed(pack(copied(dense), "2:4", kernels="reference"), FILE)
    message = (
        rf"tensors of '{FILE}' have entries that are NaN or infinite, so outputs of the model may be NaN: "
        r"'2.bias_mask' \(2\), '4.weight' \(2\), '6.bias' \(1\)$"
    )
    with pytest.warns(UserWarning, match=message):
        load_packed(copied(dense), FILE)
    torch.save(dense.state_dict(), "model.pt")
    for path, pattern in ((FILE, None), (FILE, "2:4"), ("model.pt", "2:4")):
        result = verify(path, pattern, allow_dense=pattern is not None)
        assert result.ok
        assert "'4.weight' has entries that are NaN or infinite" in result.warnings
        nonfinite = {v.key: v.nonfinite for v in result.verdicts if v.nonfinite}
        assert nonfinite.pop("4.weight") == 2
        # A mask is a matrix, too, where a pattern is given.
        assert nonfinite.keys() <= {"0.bias_mask", "2.bias_mask"}
    assert "WARNING: '4.weight' has entries that are NaN" in command(
        "verify model.pt --pattern 2:4 --allow-dense"
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e5m2])
def test_counts_of_what_is_not_finite(dtype):
    values = torch.tensor([-2.0, math.nan, 0.0, -math.inf, 3.0]).to(dtype)
    assert count_nonfinite(values) == 2
    assert count_nonfinite(values, infinite=False) == 1
    assert count_nonfinite(values[::2]) == count_nonfinite(values[:0]) == 0


# -------------------------------------------------------------------------------------------------------------- fuzzing


@pytest.mark.slow
@pytest.mark.parametrize("has_checksums", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:tensors of .* NaN or infinite")
def test_mutated_files(kind, has_checksums, monkeypatch):
    """They are refused by a ValueError, or load: with the same bytes if they have checksums, else with these shapes."""
    dense = saved(kind)
    if not has_checksums:
        without_checksums(FILE)
    content = FILE.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    template = on_meta(KINDS[kind][2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = unpacked_state_dict(load_packed(copied(template), FILE, kernels="reference"))
    rng, refused, loaded, sizes = random.Random(0), [], 0, []
    empty = torch.empty

    def noted(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", noted)
    for _ in range(500):
        FILE.write_bytes(mutated(rng, content, start))
        model = copied(template)
        try:
            with warnings.catch_warnings():
                # A mutation may take the checksums away.
                warnings.filterwarnings(
                    "error" if has_checksums else "ignore", message=".*has no checksums"
                )
                load_packed(model, FILE, kernels="reference")
        except (ValueError, UserWarning) as fault:
            refused.append(str(fault))
            continue
        loaded += 1
        found = unpacked_state_dict(model)
        assert {key: value.shape for key, value in found.items()} == {
            key: value.shape for key, value in expected.items()
        }
        if has_checksums:
            for key, value in expected.items():
                assert torch.equal(bytes_of(found[key]), bytes_of(value))
    assert loaded > 0
    assert len(refused) > 200
    assert all(str(FILE) in message for message in refused)
    # What a header claims is not allocated.
    assert max(sizes) <= max(tensor.numel() * 4 for tensor in dense.state_dict().values())
