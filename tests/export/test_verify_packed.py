"""verify() of packed models: the patterns of the header, and of the entries that are dense."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_nm import pack, save_packed
from lightning_nm.export import verify
from lightning_nm.functional import nm_prune
from tests.support.packed_models import Tied, copied, prune, small

FILE = "a.safetensors"


@pytest.fixture
def model():
    """A convolution and two linear layers 1:16, and a dense one, which are in the file FILE, too."""
    found = small("1:16")
    save_packed(pack(copied(found)), FILE)
    return found


def test_the_header_has_the_patterns(model, command):
    result = verify(FILE, include="4")
    assert result.ok
    assert [(v.key, v.blocks) for v in result.verdicts] == [
        ("0.weight", 32 * 9),
        ("4.weight", 64 * 32),
        ("5.weight", 32 * 4),
    ]
    of_all = {(v.verdict, v.pattern, v.violations, v.note, v.density) for v in result.verdicts}
    assert of_all == {("N:M", "1:16", 0, "packed, plain", 1 / 16)}
    assert (result.count("N:M"), result.count("dense"), result.count("broken")) == (3, 1, 0)
    sparse = 32 * 16 * 9 + 64 * 512 + 32 * 64
    assert result.share == sparse / (sparse + 3 * 32)
    assert verify(FILE, include=["6", "7"]).problems == [
        "`include` '6' matches no weight",
        "`include` '7' matches no weight",
    ]
    assert "less than 99.9%" in verify(FILE, min_share=0.999).problems[0]
    said = command("verify a.safetensors")
    assert "3 of 4 matrices are N:M, with 99.8% of all entries; 1 is dense" in said
    (document,) = json.loads(command("verify a.safetensors --json"))["checkpoints"]
    assert (document["ok"], document["matrices"]) == (True, {"N:M": 3, "dense": 1, "broken": 0})
    assert document["weights"] == [asdict(verdict) for verdict in result.verdicts]


def test_another_pattern(model):
    """The weights are unpacked, and checked as those of a dense file are: along every axis."""
    assert verify(FILE, "2:32", allow_dense=True).ok  # two blocks of 1:16
    assert [v.verdict for v in verify(FILE, "1:16").verdicts].count("N:M") == 3
    conv, linear, *others = sorted(verify(FILE, "1:32").verdicts, key=lambda verdict: verdict.key)
    assert {each.verdict for each in (conv, linear, *others)} == {"dense"}
    note = "packed, shape (32, 16, 3, 3) has no axis of blocks, stored as 1:16"
    assert conv.note == note
    # By rows every block of 32 holds two entries of its blocks of 16; down the columns fewer blocks have two.
    counts = (model[4].weight.t().reshape(-1, 32) != 0).sum(1)
    assert linear.violations == int((counts > 1).sum()) < 64 * 16
    assert linear.blocks == len(counts) == 64 * 16
    assert linear.note == "packed, along dim 0, stored as 1:16"


def test_zeros_do_not_count():
    layer = nn.Linear(16, 4, bias=False)
    layer.weight.data = nm_prune(layer.weight.data, "1:4")
    layer.weight.data[:2] = 0
    save_packed(pack(layer, "1:4"), FILE)
    assert verify(FILE).verdicts[0].density == 1 / 8


def test_weights_that_are_all_zero(command):
    """They are of every pattern, so they prove nothing: each is told, and a file of them alone fails."""
    model = prune(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "2:4")
    warning = "is all zero, which is N:M in every pattern: its layer was not loaded, or died"
    for layer, keys, problems in (
        (model[0], "'0.weight'", []),
        (model[1], "'{0,1}.weight' (2)", ["every weight that is N:M is all zero"]),
    ):
        layer.weight.data.zero_()
        save_packed(pack(copied(model), "2:4", kernels="reference"), FILE)
        result = verify(FILE)
        assert result.warnings == [f"{keys} {warning}"]
        assert result.problems == problems
        assert f"WARNING: {keys} {warning}" in command("verify a.safetensors", len(problems))
        assert result.verdicts[0].note == "packed, plain, all zero"
    (found,) = json.loads(command("verify a.safetensors --json", 1))["checkpoints"]
    assert found["warnings"] == result.warnings


def test_tied_weights(command):
    model = prune(Tied(), "1:8")
    model.embed.weight.data = nm_prune(model.embed.weight.data, "1:8")
    torch.save(model.state_dict(), "a.pt")
    command("export a.pt -o a.safetensors")
    result = verify("a.safetensors", include="head")
    assert result.ok
    assert {v.key: v.note for v in result.verdicts} == {
        "embed.weight": "packed, plain",
        "middle.weight": "packed, plain",
        "head.weight": "packed, plain, the same tensor as 'embed.weight'",
    }
    assert result.share == 1


def test_a_truncated_file(model):
    path = Path(FILE)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        verify(path)
