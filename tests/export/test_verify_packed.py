"""verify() of packed models: the patterns of the header, checked positions, the entries that are dense."""

import json

import pytest
import torch
from torch import nn

from lightning_nm import load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.cli import main
from lightning_nm.export import verify
from lightning_nm.functional import nm_prune
from tests.support.packed_models import copied, small, without_checksums
from tests.test_readme import ROOT


@pytest.fixture
def saved(tmp_path):
    """A convolution and two linear layers 1:16, and a dense one."""
    save_packed(pack(small("1:16")), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_the_header_has_the_patterns(saved):
    result = verify(saved, include="4")
    assert result.ok
    assert [(v.key, v.verdict, v.pattern, v.violations, v.note) for v in result.verdicts] == [
        ("0.weight", "N:M", "1:16", 0, "packed, plain"),
        ("4.weight", "N:M", "1:16", 0, "packed, plain"),
        ("5.weight", "N:M", "1:16", 0, "packed, plain"),
    ]
    assert [v.blocks for v in result.verdicts] == [32 * 9, 64 * 32, 32 * 4]
    assert {v.density for v in result.verdicts} == {1 / 16}
    assert (result.count("N:M"), result.count("dense"), result.count("broken")) == (3, 1, 0)
    sparse = 32 * 16 * 9 + 64 * 512 + 32 * 64
    assert result.share == sparse / (sparse + 3 * 32)
    assert verify(saved, include=["6", "7"]).problems == [
        "`include` '6' matches no weight",
        "`include` '7' matches no weight",
    ]
    assert "less than 99.9%" in verify(saved, min_share=0.999).problems[0]


def test_another_pattern(saved):
    """The weights are unpacked, and checked as those of a dense file are: along every axis."""
    assert verify(saved, "2:32", allow_dense=True).problems == []  # two blocks of 1:16
    verdicts = {v.key: v for v in verify(saved, "1:32").verdicts}
    assert {key: v.verdict for key, v in verdicts.items()} == {
        "0.weight": "dense",
        "4.weight": "dense",
        "5.weight": "dense",
        "6.weight": "dense",
    }
    assert verdicts["0.weight"].note == (
        "packed, shape (32, 16, 3, 3) has no axis of blocks, stored as 1:16"
    )
    dense = unpacked_state_dict(load_packed(small("1:16"), saved))["4.weight"]
    # By rows every block of 32 holds two entries of its blocks of 16; down the columns fewer blocks have two.
    counts = (dense.t().reshape(-1, 32) != 0).sum(1)
    assert verdicts["4.weight"].violations == int((counts > 1).sum()) < 64 * 16
    assert verdicts["4.weight"].blocks == len(counts) == 64 * 16
    assert verdicts["4.weight"].note == "packed, along dim 0, stored as 1:16"
    assert [v.key for v in verify(saved, "1:16").verdicts if v.verdict == "N:M"] == [
        "0.weight",
        "4.weight",
        "5.weight",
    ]


def test_zeros_do_not_count(tmp_path):
    layer = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(nm_prune(layer.weight, "1:4"))
        layer.weight[:2] = 0
    save_packed(pack(layer, "1:4"), tmp_path / "a.safetensors")
    assert verify(tmp_path / "a.safetensors").verdicts[0].density == 1 / 8


def test_weights_that_are_all_zero(tmp_path, capsys):
    """They are of every pattern, so they prove nothing: each is told, and a file of them alone fails."""
    path = tmp_path / "a.safetensors"
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for layer in model:
        layer.weight.data = nm_prune(layer.weight.data, "2:4")
    warnings, results = [], []
    for layer in model:
        layer.weight.data.zero_()
        save_packed(pack(copied(model), "2:4", kernels="reference"), path)
        results.append(verify(path))
        warnings.append(results[-1].warnings)
        assert main(["verify", str(path)]) == (not results[-1].ok)
        assert f"WARNING: {warnings[-1][-1]}" in capsys.readouterr().out
    first = (
        "'0.weight' is all zero, which is N:M in every pattern: its layer was not loaded, or died"
    )
    assert warnings == [[first], [first.replace("'0.weight'", "'{0,1}.weight' (2)")]]
    assert [result.problems for result in results] == [[], ["every weight that is N:M is all zero"]]
    assert [v.note for v in results[0].verdicts] == ["packed, plain, all zero", "packed, plain"]
    assert main(["verify", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["checkpoints"][0]["warnings"] == warnings[-1]


def test_tied_weights(tmp_path):
    torch.manual_seed(0)
    embedding = nn.Embedding(32, 16)
    model = nn.ModuleDict(
        {"embed": embedding, "up": nn.Linear(16, 32), "head": nn.Linear(16, 32, bias=False)}
    )
    model["head"].weight = embedding.weight
    for weight in (embedding.weight, model["up"].weight):
        weight.data = nm_prune(weight.data, "1:8")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert main(["export", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.safetensors")]) == 0
    result = verify(tmp_path / "a.safetensors", include="head")
    assert result.ok
    assert {v.key: v.note for v in result.verdicts} == {
        "embed.weight": "packed, plain",
        "up.weight": "packed, plain",
        "head.weight": "packed, plain, the same tensor as 'embed.weight'",
    }
    assert result.share == 1


def test_damaged_positions(saved, capsys):
    without_checksums(saved)
    content = bytearray(saved.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + length])["4.weight.positions"]["data_offsets"]
    content[8 + length + begin : 8 + length + end] = bytes(end - begin)
    saved.write_bytes(content)
    assert verify(saved).ok, "with N = 1 every position is one of a block"
    other = saved.parent / "other.safetensors"
    save_packed(pack(small("2:4")), other)
    without_checksums(other)
    content = bytearray(other.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + length])["4.weight.positions"]["data_offsets"]
    content[8 + length + begin + 5] = 0
    other.write_bytes(content)
    with pytest.raises(
        ValueError,
        match=r"'4.weight': block 10 does not have 2 different ascending positions below 4",
    ):
        verify(other)
    assert main(["verify", str(other), str(saved), "--json"]) == 2
    said = capsys.readouterr()
    document = json.loads(said.out)
    assert [each["ok"] for each in document["checkpoints"]] == [False, True]
    assert "block 10 does not have 2" in document["checkpoints"][0]["error"]
    other.write_bytes(content[:-9])
    with pytest.raises(ValueError, match="truncated"):
        verify(other)


def test_the_command(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    assert (
        "3 of 4 matrices are N:M, with 99.8% of all entries; 1 is dense" in capsys.readouterr().out
    )
    assert main(["verify", str(saved), "--json"]) == 0
    (document,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (document["ok"], document["matrices"]) == (True, {"N:M": 3, "dense": 1, "broken": 0})
    assert document["weights"][1] == {
        **{"key": "4.weight", "verdict": "N:M", "pattern": "1:16", "blocks": 2048, "violations": 0},
        **{
            "density": 0.0625,
            "note": "packed, plain",
            "stage": "",
            "nonfinite": 0,
            "own_pattern": "",
        },
    }


def test_the_page_names_the_command():
    assert "lightning-nm verify gpt.safetensors" in (ROOT / "docs" / "export.md").read_text()
