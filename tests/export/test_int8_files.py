"""Files of weights in int8: version 2, their bytes, what reads them, and damage that is refused."""

import json
import random

import pytest
import torch
from torch import nn

from lightning_nm import (
    NMPattern,
    load_packed,
    pack,
    packed_summary,
    save_packed,
    unpacked_state_dict,
)
from lightning_nm.commands import verify
from lightning_nm.commands.export import main as export
from lightning_nm.export import PackedFile
from lightning_nm.export.packed_file import write_packed
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.functional import quantise_weight, unpack_nm
from lightning_nm.packed.tensor import PackedTensor
from tests.support.packed_models import (
    assert_equal_states,
    clones,
    copied,
    header_of,
    mutated,
    on_meta,
    prune,
    small,
    without_checksums,
)


@pytest.fixture
def saved(tmp_path):
    """A model, packed in int8, and its file."""
    dense = small("2:4", torch.bfloat16)
    path = tmp_path / "model.safetensors"
    save_packed(pack(copied(dense), dtype="int8", kernels="reference"), path)
    return dense, path


def metadata_of(path):
    return header_of(path)[0]["__metadata__"]


def changed(path, change):
    header, content = header_of(path)
    packed = json.loads(header["__metadata__"]["packed"])
    change(header, packed)
    header["__metadata__"]["packed"] = json.dumps(packed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
def test_a_file_loads(saved, kernels):
    dense, path = saved
    by_file = load_packed(on_meta(dense), path, kernels=kernels)
    in_memory = pack(copied(dense), dtype="int8", kernels=kernels)
    assert_equal_states(clones(by_file), clones(in_memory))
    x = torch.randn(3, 16, 4, 4).bfloat16()
    if kernels != "auto":  # which measures
        assert torch.equal(by_file(x), in_memory(x))
    assert_equal_states(unpacked_state_dict(by_file), unpacked_state_dict(in_memory))


@pytest.mark.parametrize("kernels", ["sparse", "reference"])
def test_files_do_not_depend_on_what_is_held(saved, tmp_path, kernels):
    dense, path = saved
    other = tmp_path / "other.safetensors"
    save_packed(pack(copied(dense), dtype="int8", kernels=kernels), other)
    assert other.read_bytes() == path.read_bytes()
    save_packed(load_packed(on_meta(dense), path, kernels=kernels), other)
    assert other.read_bytes() == path.read_bytes()


def test_what_the_file_holds(saved):
    dense, path = saved
    assert metadata_of(path)["version"] == "2"
    file = PackedFile(path)
    assert file.entry("4.weight").dtype == torch.bfloat16
    assert all(file.packed[key].int8 for key in ("0.weight", "4.weight", "5.weight"))
    entries = file.entries
    assert entries["4.weight.values"].dtype == torch.int8
    assert entries["4.weight.scales"].dtype == torch.float32
    assert entries["4.weight.scales"].shape == (64,)
    # By the reference reader of the format: integers of each block, and a scale for each row.
    found = file.read("4.weight")
    matrix = unpack_nm(found.values, found.positions, "2:4", (64, 512))
    integers, scale = quantise_weight(dense[4].weight)
    assert torch.equal(matrix, integers)
    assert torch.equal(found.scales, scale)


def test_files_without_int8_stay_of_version_1(tmp_path):
    save_packed(pack(small(), kernels="reference"), tmp_path / "a.safetensors")
    assert metadata_of(tmp_path / "a.safetensors")["version"] == "1"


@pytest.mark.parametrize(("pattern", "share"), [("2:4", 0.32), ("1:4", 0.165), ("1:16", 0.06)])
def test_sizes(tmp_path, pattern, share):
    torch.manual_seed(0)
    dense = prune(nn.Linear(1024, 512, bias=False).bfloat16(), pattern)
    path = tmp_path / "model.safetensors"
    save_packed(pack(copied(dense), dtype="int8", kernels="reference"), path)
    assert path.stat().st_size <= share * dense.weight.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_command_writes_what_pack_and_save_do(tmp_path, capsys, dtype):
    dense = small("1:16", dtype)
    checkpoint, path, other = (
        tmp_path / name for name in ("a.pt", "a.safetensors", "b.safetensors")
    )
    torch.save(dense.state_dict(), checkpoint)
    assert export([str(checkpoint), "-o", str(path), "--dtype", "int8"]) == 0
    assert "int8" in capsys.readouterr().out
    save_packed(pack(copied(dense), dtype="int8", kernels="reference"), other)
    first, second = PackedFile(path), PackedFile(other)
    for key in second.packed:
        ours, theirs = first.read(key), second.read(key)
        for name in ("values", "positions", "scales"):
            a, b = getattr(ours, name), getattr(theirs, name)
            assert (a is None and b is None) or torch.equal(a, b)
    assert first.packed == second.packed
    assert sorted(first.names()) == sorted(second.names())
    assert (
        export(
            [str(checkpoint), "-o", str(tmp_path / "a.onnx"), "--to", "torch", "--dtype", "int8"]
        )
        == 2
    )
    assert "--dtype is for --to packed" in capsys.readouterr().err


def test_the_command_refuses_other_dtypes(tmp_path, capsys):
    torch.save({"weight": small()[4].weight.half()}, tmp_path / "a.pt")
    arguments = [str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.safetensors"), "--dtype", "int8"]
    assert export(arguments) == 2
    assert "'weight' of" in (error := capsys.readouterr().err)
    assert "has no int8 form: float16" in error
    assert not (tmp_path / "a.safetensors").exists()


def test_verify_and_reading_as_a_checkpoint(saved, capsys):
    dense, path = saved
    assert verify.main([str(path)]) == 0
    assert "packed, plain, int8" in " ".join(capsys.readouterr().out.split())
    weights = read_checkpoint(path).weights
    reference = unpacked_state_dict(pack(copied(dense), dtype="int8", kernels="reference"))
    assert_equal_states(weights, reference)


def test_the_summary_of_a_loaded_model(saved):
    dense, path = saved
    summary = packed_summary(load_packed(on_meta(dense), path, kernels="reference"))
    assert [weight.form for weight in summary.weights] == ["packed int8"] * 3
    assert summary.not_int8 == ()


def test_a_weight_that_no_packed_layer_takes_is_unpacked(saved):
    dense, path = saved

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model = copied(dense)
    model[4] = Own(512, 64).bfloat16()
    load_packed(model, path)
    integers, scale = quantise_weight(dense[4].weight)
    assert torch.equal(model[4].weight, (integers.float() * scale[:, None]).bfloat16())


HOSTILE = {
    "version 1": (
        lambda h, p: h["__metadata__"].update(version="1"),
        "does not have exactly pattern",
    ),
    "version 4": (lambda h, p: h["__metadata__"].update(version="4"), "reads '1', '2' and '3'"),
    "values": (lambda h, p: p["4.weight"].update(values="U8"), "has values in 'U8', not I8"),
    "values list": (lambda h, p: p["4.weight"].update(values=[]), r"has values in \[\], not I8"),
    "no int8": (lambda h, p: p["4.weight"].pop("values"), r"is torch.int8 .*, not torch.bfloat16"),
    "of half": (
        lambda h, p: p["0.weight"].update(dtype="F16"),
        r"'0.weight' in F16 has int8 values, which weights",
    ),
    "taps of a convolution": (
        lambda h, p: p["0.weight"].update(shape=[32, 16, 9, 3]),
        r"'0.weight.values' is torch.int8 .*, not torch.int8",
    ),
    "scales of experts": (
        lambda h, p: h["0.weight.scales"].update(shape=[8, 4]),
        r"'0.weight.scales' is torch.float32 \(8, 4\), not",
    ),
    "no scales": (
        lambda h, p: h.update({"4.weight.other": h.pop("4.weight.scales")}),
        "there is no tensor '4.weight.scales'",
    ),
    "scales of another weight": (
        lambda h, p: h["4.weight.scales"].update(shape=[8, 8]),
        r"'4.weight.scales' is torch.float32 \(8, 8\), not",
    ),
    "integer scales": (
        lambda h, p: h["4.weight.scales"].update(dtype="I32"),
        "'4.weight.scales' is torch.int32",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_headers(saved, fault):
    dense, path = saved
    change, message = HOSTILE[fault]
    changed(path, change)
    model = copied(dense)
    before = clones(model)
    with pytest.raises(ValueError, match=message) as raised:
        load_packed(model, path)
    assert str(path) in str(raised.value)
    assert_equal_states(clones(model), before)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("values", torch.tensor([-128], dtype=torch.int8), "an int8 value is -128"),
        ("scales", torch.tensor([torch.nan]), "a scale is not between"),
        ("scales", torch.tensor([torch.inf]), "a scale is not between"),
        ("scales", torch.tensor([-1.0]), "a scale is not between"),
        ("scales", torch.tensor([1e-42]), "a scale is not between"),
    ],
)
def test_values_and_scales_that_are_damaged(saved, capsys, part, value, message):
    dense, path = saved
    without_checksums(path)
    header, _ = header_of(path)
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    place = start + header[f"4.weight.{part}"]["data_offsets"][0]
    content = bytearray(path.read_bytes())
    content[place : place + value.nbytes] = value.numpy().tobytes()
    path.write_bytes(content)
    model = copied(dense)
    before = clones(model)
    with pytest.raises(ValueError, match=f"'4.weight': {message}"):
        load_packed(model, path)
    assert_equal_states(clones(model), before)
    assert verify.main([str(path)]) == 2
    assert message in capsys.readouterr().out


def test_a_name_that_is_taken(tmp_path):
    packed = PackedTensor.of(small()[4].weight, NMPattern(2, 4), int8=True)
    for name in ("w.values", "w.positions", "w.scales"):
        with pytest.raises(ValueError, match=f"needs the name '{name}', which another tensor has"):
            write_packed(tmp_path / "a.safetensors", {"w": packed, name: torch.ones(1)})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no checksums", "ignore:tensors of .* NaN or infinite")
def test_mutated_files(saved):
    """Every mutated file is refused by a ValueError, or loads as a model of the same shapes."""
    dense, path = saved
    without_checksums(path)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    rng, loaded, refused = random.Random(0), 0, []
    template = on_meta(dense)
    for _ in range(1200):
        path.write_bytes(mutated(rng, content, start))
        model = copied(template)
        try:
            load_packed(model, path, kernels="reference")
        except ValueError as error:
            refused.append(str(error))
            continue
        loaded += 1
        shapes = {key: value.shape for key, value in unpacked_state_dict(model).items()}
        assert shapes == {key: value.shape for key, value in dense.state_dict().items()}
    assert 0 < loaded < 700
    assert all(str(path) in message for message in refused)
