"""The pages on export run as they stand, and name what is there."""

import glob
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

from lightning_nm import NMSparsityCallback, QuantizationAwareTraining
from lightning_nm.cli import main
from lightning_nm.export import PackedFile, pack, save_packed
from lightning_nm.functional import nm_prune, pack_nm
from lightning_nm.functional.nm_format import position_bits
from lightning_nm.kernels.cpu import library
from lightning_nm.pattern import NMPattern
from tests.docs.blocks import ROOT, blocks, read
from tests.support.packed_models import small

EXPORT = read("export.md")
FORMAT = read("format.md")
SHORT = ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--data.init_args.batch_size=1"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a training without validation
def test_from_a_checkpoint_to_a_packed_model(tmp_path, monkeypatch):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    commands, code = blocks("", EXPORT)[0].splitlines(), blocks("python", EXPORT)[0]
    assert len(commands) + sum(map(bool, code.splitlines())) == 6
    for line in commands:
        words = [
            found
            for word in shlex.split(line, comments=True)[1:]
            for found in (glob.glob(word) if "*" in word else [word])
        ]
        assert main([*words, *(SHORT if words[0] == "fit" else [])]) == 0
    names = {}
    exec(code, names)
    assert names["logits"].shape == (1, 64, 256)
    packed = PackedFile("gpt.safetensors").packed
    assert {str(entry.pattern) for entry in packed.values()} == {"1:16"}
    assert len(packed) == 8


def test_the_summary(capsys):
    _, code = blocks("python", EXPORT)
    exec(code, {})
    (printed,) = blocks("text", EXPORT)
    assert capsys.readouterr().out == printed


def test_quantisation_aware_training():
    """The YAML of the page makes the callbacks that it describes."""
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback])
    (text,) = blocks("yaml", EXPORT)
    given = yaml.safe_load(text)["trainer"]["callbacks"]
    parsed = parser.parse_object({"callbacks": given})
    first, second = parser.instantiate_classes(parsed).callbacks
    assert isinstance(first, QuantizationAwareTraining)
    assert first.last == 0.1
    assert isinstance(second, NMSparsityCallback)


def test_the_command_for_more_in_int8(tmp_path, monkeypatch, capsys):
    (line,) = blocks("", EXPORT)[1].splitlines()
    monkeypatch.chdir(tmp_path)
    weights = {
        "embed.weight": torch.randn(8, 16),
        "mlp.experts.up": nm_prune(torch.randn(2, 8, 16), "2:4"),
        "fc.weight": nm_prune(torch.randn(8, 16), "2:4"),
    }
    torch.save(weights, "model.ckpt")
    assert main(shlex.split(line)[1:]) == 0
    assert "not in int8" not in capsys.readouterr().out
    assert all(entry.int8 for entry in PackedFile("model.safetensors").packed.values())


def test_other_commands_parse():
    words = [shlex.split(line) for line in blocks("", EXPORT)[2].splitlines()]
    assert {word[word.index("--to") + 1] for word in words} == {"torch", "pt2", "packed"}
    for word in words:
        assert (
            main([*word[1:2], "none.ckpt", *word[3:]]) == 2
        )  # a checkpoint that is not there, no other error


def test_sizes_of_the_format():
    rows = re.findall(
        r"^\| (\d+:\d+) \| (\d+) \((\w+)\) \| ([\d.]+) \| ([\d.]+) \|$", FORMAT, re.MULTILINE
    )
    assert len(rows) == 5
    for text, bits, _, half, single in rows:
        pattern = NMPattern.parse(text)
        assert position_bits(pattern) == int(bits)
        for size, share in ((2, half), (4, single)):
            exact = pattern.density + int(bits) / 8 / size / pattern.m
            assert float(share) == pytest.approx(exact, abs=6e-4)


def test_sizes_in_int8():
    rows = re.findall(r"^\| (\d+:\d+) \| ([\d.]+) \| ([\d.]+) \|$", FORMAT, re.MULTILINE)
    assert [text for text, *_ in rows] == ["2:4", "1:4", "1:8", "1:16"]
    for text, half, single in rows:
        pattern = NMPattern.parse(text)
        bytes_of_entry = pattern.density + position_bits(pattern) / 8 / pattern.m
        assert float(half) == pytest.approx(bytes_of_entry / 2, abs=6e-4)
        assert float(single) == pytest.approx(bytes_of_entry / 4, abs=6e-4)


def test_what_int8_layers_hold():
    """The rows of int8 in the table of bytes for each dense byte, without scales and their offsets."""
    numbers = r"[^|]*\| ([\d.]+) / ([\d.]+) " * 3
    rows = re.findall(rf"^\| (packed int8|`cpu-int8`) of{numbers}\|$", EXPORT, re.MULTILINE)
    assert [row[0] for row in rows] == ["packed int8", "`cpu-int8`"]
    for (_, *shown), kernels in zip(rows, ("reference", "sparse"), strict=True):
        for pattern, single, half in zip(
            ("2:4", "1:4", "1:16"), shown[::2], shown[1::2], strict=True
        ):
            for dtype, share in ((torch.float32, single), (torch.bfloat16, half)):
                layer = torch.nn.Linear(256, 128, bias=False, dtype=dtype)
                layer.weight.data = nm_prune(layer.weight.data, pattern)
                dense = layer.weight.nbytes
                weight = pack(layer, pattern, dtype="int8", kernels=kernels).weight
                tensors = weight.packed()[:2]
                if weight.operand is not None:
                    tensors = weight.operand.tensors[:2]
                held = sum(tensor.nbytes for tensor in tensors)
                assert float(share) == pytest.approx(held / dense, abs=6e-3)


def test_the_example_of_the_format():
    values, positions = pack_nm(torch.tensor([[0.0, 5, 0, 7], [0, 0, 2, 0]]), "2:4")
    shown = re.search(r"has the values `(.*?)`.*`0b(\d+)`, (\d+)", FORMAT, re.DOTALL)
    assert values.tolist() == json.loads(shown[1])
    assert positions.tolist() == [int(shown[2], 2)] == [int(shown[3])]


def test_fields_of_the_format(tmp_path):
    save_packed(pack(small("1:16")), tmp_path / "a")
    metadata = PackedFile(tmp_path / "a").metadata
    names = re.findall(r"^\| `(\w+)` \|", FORMAT, re.MULTILINE)
    assert set(metadata) == set(names[:5])
    assert set(json.loads(metadata["packed"])["4.weight"]) == set(names[5:9])
    save_packed(pack(small("1:16"), dtype="int8"), tmp_path / "b")
    in_int8 = json.loads(PackedFile(tmp_path / "b").metadata["packed"])["4.weight"]
    assert set(in_int8) == set(names[5:10])
    assert set(names[10:13]) == {"plain", "flat", "transposed"}
    assert Path(tmp_path / "a").stat().st_size < 20_000


def test_what_packed_layers_hold():
    """The table of bytes for each dense byte, in float32: packed, and in the layout of a kernel if this CPU has it."""
    numbers = r"[^|]*\| ([\d.]+)[^|]*" * 3
    forms = r"packed, float32|`cpu-permute`, float32 with AVX-512|`cpu-permute`, float32 with AVX2"
    rows = re.findall(rf"^\| ({forms}){numbers}", EXPORT, re.MULTILINE)
    packed, avx_512, avx_2 = rows
    assert "|".join(row[0] for row in rows) == forms
    # A block of 1:16 is one register of AVX-512, and two of AVX2, of which one is empty.
    has_8_lanes = not library.unavailable() and library.load().nm_lanes(library.level()) == 8
    cases = ((packed, "reference"), (avx_2 if has_8_lanes else avx_512, "sparse"))
    for (form, *shown), kernels in cases:
        for pattern, share in zip(("2:4", "1:4", "1:16"), shown, strict=True):
            layer = torch.nn.Linear(256, 128, bias=False)
            layer.weight.data = nm_prune(layer.weight.data, pattern)
            dense = layer.weight.nbytes
            weight = pack(layer, pattern, kernels=kernels).weight
            if kernels == "sparse" and (
                weight.operand is None or weight.operand.kernel != "cpu-permute"
            ):
                pytest.skip("this CPU has no such kernel")
            tensors = weight.packed()[:2] if weight.operand is None else weight.operand.tensors
            assert float(share) == pytest.approx(
                sum(tensor.nbytes for tensor in tensors) / dense, abs=6e-3
            ), form
