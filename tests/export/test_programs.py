"""verify() of programs of torch.export, which are data: nothing in them runs."""

import json
import os
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_nm.export import pack, read_checkpoint, verify
from lightning_nm.export.graphs import export_pt2
from lightning_nm.functional import nm_prune
from tests.support.packed_models import prune

FILE = Path("a.pt2")


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


def export(model):
    export_pt2(model, (torch.randn(2, 8, 5, 5),), FILE)


@pytest.fixture
def model():
    """A model that is N:M but for the buffer and the constant, and its program in the file."""
    found = prune(Constants(), "2:4")
    export(found)
    return found


def test_the_weights_of_a_program(model):
    result = verify(FILE, "2:4", allow_dense=True)
    assert result.ok
    assert {v.key: v.verdict for v in result.verdicts} == {
        "conv.weight": "N:M",
        "linear.weight": "N:M",
        "table": "dense",
        "constant": "dense",
    }
    assert not verify(FILE, "2:4").ok
    model.conv.weight.data[1, :4, 2, 1] = 1
    export(model)
    assert verify(FILE, "2:4").problems == ["'conv.weight' is not 2:4: 1 of 72 blocks hold more"]
    with pytest.raises(ValueError, match=r"no sparsifier state .*: give a pattern"):
        verify(FILE)


def test_views_of_one_storage_are_read():
    """Tied, transposed and in parts."""
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8))
    whole = nm_prune(model[0].weight.detach(), "2:4")
    model[0].weight = model[2].weight = nn.Parameter(whole)
    model[1].weight = nn.Parameter(whole.t())
    export_pt2(model, (torch.randn(2, 16),), FILE)
    verdicts = {v.key: (v.verdict, v.note) for v in verify(FILE, "2:4").verdicts}
    assert verdicts.pop("1.weight") == ("N:M", "along dim 0")
    assert set(verdicts.values()) == {("N:M", "along dim 1")}


@pytest.mark.parametrize("kernels", ["reference", "sparse"])
def test_a_program_of_a_packed_model_is_refused(kernels):
    model = pack(prune(nn.Sequential(nn.Linear(64, 32)), "1:16"), kernels=kernels)
    export_pt2(model, (torch.randn(2, 64),), FILE)
    if kernels == "sparse" and "serialized_state_dict.pt" in zipfile.ZipFile(FILE).namelist():
        # The form of torch 2.6 has nothing of a kernel's layout: there is no weight to be judged.
        assert not verify(FILE, "1:16").ok
        return
    with pytest.raises(ValueError, match=r"a weight as pack\(\) of lightning_nm packs it"):
        verify(FILE, "1:16")


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def edited(part, value):
    """A change of what a program says of the tensor of its convolution."""

    def change(records):
        name = next(name for name in records if name.endswith("weights_config.json"))
        content = json.loads(records[name])
        entry = content["config"]["conv.weight"]
        (entry if part in entry else entry["tensor_meta"])[part] = value
        records[name] = json.dumps(content)

    return change


def attack(records):
    edited("use_pickle", True)(records)
    for name in records:
        if "/weights/weight_" in name or name.endswith("sample_inputs/model.pt"):
            records[name] = pickle.dumps(Attack())


def keep_nothing(records):
    records.clear()
    records["a/archive_format"] = b"pt2"


needs_records = pytest.mark.skipif(
    torch.__version__ < "2.9", reason="older programs hold one pickled state dict"
)


@needs_records
@pytest.mark.usefixtures("model")
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
        (keep_nothing, "holds no weights"),
    ],
)
def test_hostile_programs(command, change, message):
    with zipfile.ZipFile(FILE) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(FILE, "w") as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=message):
        verify(FILE, "2:4")
    command(f"verify {FILE} --pattern 2:4", 2)
    assert os.listdir() == [FILE.name]


@needs_records
@pytest.mark.usefixtures("model")
def test_damaged_programs():
    """Each byte of a weight is covered by a checksum; a truncated file is named."""
    whole = FILE.read_bytes()
    with zipfile.ZipFile(FILE) as archive:
        place = archive.getinfo("archive/data/weights/weight_0").header_offset + 2000
    for content, message in (
        (whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :], "CRC"),
        (whole[:5000], "truncated"),
    ):
        FILE.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            verify(FILE, "2:4")


def test_programs_of_torch_2_6():
    """One pickled state dict, which is read as tensors alone."""
    torch.save({"a.weight": nm_prune(torch.randn(8, 16), "2:4")}, "state.pt")
    with zipfile.ZipFile(FILE, "w") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
        archive.write("state.pt", "serialized_state_dict.pt")
    assert verify(FILE, "2:4").ok
    with zipfile.ZipFile(FILE, "a") as archive:
        archive.writestr("serialized_constants.pt", pickle.dumps(Attack()))
    with pytest.raises(ValueError, match=r"cannot read .* as a program of torch\.export"):
        verify(FILE, "2:4")
    assert not os.path.exists("attacked")


def save_onnx():
    """The first bytes of an ONNX file."""
    Path("a.onnx").write_bytes(b"\x08\x0a\x12\x07pytorch\x1a\x062.13.0")


@pytest.mark.usefixtures("model")
def test_graphs_are_told_from_damaged_files_where_a_checkpoint_is_needed():
    save_onnx()
    for path, kind in (("a.onnx", "an ONNX graph"), (FILE, "a program of torch")):
        with pytest.raises(ValueError, match=f"it is {kind}.*, not a checkpoint: give the checkp"):
            read_checkpoint(path)


def test_onnx_is_asked_for_by_name(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    save_onnx()
    assert "needs the package `onnx`: pip install -e '.[onnx]' in a checkout" in command(
        "verify a.onnx --pattern 2:4", 2
    )
