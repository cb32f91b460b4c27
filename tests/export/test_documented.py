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
from lightning_nm.export import PackedFile, pack, save_packed
from lightning_nm.functional import nm_prune, pack_nm
from lightning_nm.functional.nm_format import position_bits
from lightning_nm.kernels.cpu import library
from lightning_nm.packed.tensor import PackedTensor
from lightning_nm.pattern import NMPattern
from tests.docs.blocks import ROOT, blocks, read
from tests.support.packed_models import small

EXPORT = read("export.md")
FORMAT = read("format.md")
SHORT = " --trainer.max_steps=1 --trainer.limit_val_batches=0 --data.init_args.batch_size=1"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a training without validation
def test_from_a_checkpoint_to_a_packed_model(command):
    Path("configs").symlink_to(ROOT / "configs")
    commands, code = blocks("", EXPORT)[0].splitlines(), blocks("python", EXPORT)[0]
    assert len(commands) + sum(map(bool, code.splitlines())) == 6
    for line in commands:
        # As a shell does.
        words = [" ".join(glob.glob(word) or [word]) for word in shlex.split(line, comments=True)]
        command(" ".join(words[1:]) + SHORT * (words[1] == "fit"))
    names = {}
    exec(code, names)
    assert names["logits"].shape == (1, 64, 256)
    packed = PackedFile("gpt.safetensors").packed
    assert [str(entry.pattern) for entry in packed.values()] == ["1:16"] * 8


def test_the_page_on_verifying_names_the_packed_file():
    assert "lightning-nm verify gpt.safetensors" in EXPORT


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


def test_the_command_for_more_in_int8(command):
    (line,) = blocks("", EXPORT)[1].splitlines()
    weights = {
        "embed.weight": torch.randn(8, 16),
        "mlp.experts.up": nm_prune(torch.randn(2, 8, 16), "2:4"),
        "fc.weight": nm_prune(torch.randn(8, 16), "2:4"),
    }
    torch.save(weights, "model.ckpt")
    assert "not in int8" not in command(" ".join(shlex.split(line)[1:]))
    assert all(entry.int8 for entry in PackedFile("model.safetensors").packed.values())


def test_other_commands_parse(command):
    words = [shlex.split(line) for line in blocks("", EXPORT)[2].splitlines()]
    assert {word[word.index("--to") + 1] for word in words} == {"torch", "pt2", "packed"}
    for word in words:
        # A checkpoint that is not there, and no other error.
        said = command(" ".join([word[1], "none.ckpt", *word[3:]]), 2)
        assert "'none.ckpt' is neither a file nor a folder" in said


NUMBERS = r"[^|]*\| ([\d.]+) \| ([\d.]+) \|$"


@pytest.mark.parametrize(
    ("row", "patterns", "int8"),
    [
        (rf"^\| (\d+:\d+) \| \d+ {NUMBERS}", "2:4 1:4 1:8 4:8 1:16", False),
        (rf"^\| (\d+:\d+) {NUMBERS}", "2:4 1:4 1:8 1:16", True),
    ],
)
def test_sizes_of_the_format(row, patterns, int8):
    rows = re.findall(row, FORMAT, re.MULTILINE)
    assert [text for text, *_ in rows] == patterns.split()
    for text, *shown in rows:
        for dtype, share in zip((torch.bfloat16, torch.float32), shown, strict=True):
            pattern = NMPattern.parse(text)
            weight = nm_prune(torch.randn(32, 64), pattern).to(dtype)
            packed = PackedTensor.of(weight, pattern, int8=int8)
            held = packed.values.nbytes + packed.positions.nbytes
            assert float(share) == pytest.approx(held / weight.nbytes, abs=6e-4)


def test_bits_of_the_format():
    rows = re.findall(r"^\| (\d+:\d+) \| (\d+) \(", FORMAT, re.MULTILINE)
    assert rows
    for text, bits in rows:
        assert position_bits(NMPattern.parse(text)) == int(bits)


def test_the_example_of_the_format():
    values, positions = pack_nm(torch.tensor([[0.0, 5, 0, 7], [0, 0, 2, 0]]), "2:4")
    shown = re.search(r"has the values `(.*?)`.*`0b(\d+)`, (\d+)", FORMAT, re.DOTALL)
    assert values.tolist() == json.loads(shown[1])
    assert positions.tolist() == [int(shown[2], 2)] == [int(shown[3])]


def test_fields_of_the_format():
    names = re.findall(r"^\| `(\w+)` \|", FORMAT, re.MULTILINE)
    for dtype, last in ((None, 9), ("int8", 10)):
        save_packed(pack(small("1:16"), dtype=dtype), "a")
        metadata = PackedFile("a").metadata
        assert set(metadata) == set(names[:5])
        assert set(json.loads(metadata["packed"])["4.weight"]) == set(names[5:last])
    assert set(names[10:13]) == {"plain", "flat", "transposed"}
    assert Path("a").stat().st_size < 20_000


def avx():
    """The instruction set by which the page tells layouts."""
    # A block of 1:16 is one register of AVX-512, and two of AVX2, of which one is empty.
    has_8_lanes = not library.unavailable() and library.load().nm_lanes(library.level()) == 8
    return "AVX2" if has_8_lanes else "AVX-512"


PAIRS = r"[^|]*\| ([\d.]+) / ([\d.]+) " * 3
SINGLE = r"[^|]*\| ([\d.]+) " * 3


@pytest.mark.parametrize(
    ("form", "numbers", "int8", "kernel"),
    [
        ("packed, float32 / bfloat16", PAIRS, None, None),
        (f"`cpu-permute`, float32 with {avx()}", SINGLE, None, "cpu-permute"),
        ("packed int8 of float32 / bfloat16", PAIRS, "int8", None),
        ("`cpu-int8` of float32 / bfloat16", PAIRS, "int8", "cpu-int8"),
    ],
)
def test_what_layers_hold(form, numbers, int8, kernel):
    """The table of bytes for each dense byte, without scales and their offsets."""
    (shown,) = re.findall(rf"^\| {form}{numbers}\|$", EXPORT, re.MULTILINE)
    dtypes = (torch.float32, torch.bfloat16)[: len(shown) // 3]
    cases = [(pattern, dtype) for pattern in ("2:4", "1:4", "1:16") for dtype in dtypes]
    for (pattern, dtype), share in zip(cases, shown, strict=True):
        layer = torch.nn.Linear(256, 128, bias=False, dtype=dtype)
        layer.weight.data = nm_prune(layer.weight.data, pattern)
        dense = layer.weight.nbytes
        weight = pack(
            layer, pattern, dtype=int8, kernels="sparse" if kernel else "reference"
        ).weight
        if kernel and (weight.operand is None or weight.operand.kernel != kernel):
            pytest.skip("this CPU has no such kernel")
        tensors = weight.operand.tensors if kernel else weight.packed()[:2]
        held = sum(tensor.nbytes for tensor in tensors[:2] if tensor is not None)
        assert float(share) == pytest.approx(held / dense, abs=6e-3)
