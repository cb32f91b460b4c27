"""Folders of models, and files and folders that cannot be read: nothing in them is run."""

import json
import os
import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from lightning_nm.export import read_checkpoint, verify
from lightning_nm.functional import nm_prune
from tests.support.packed_models import assert_equal_states

INDEX = Path("model/model.safetensors.index.json")
PART = Path("model/model-2.safetensors")


def weights():
    found = {f"layers.{n}.weight": nm_prune(torch.randn(16, 16), "2:4") for n in range(3)}
    return {**found, "embed.weight": torch.randn(16, 16), "norm.weight": torch.ones(16)}


def save_folder(parts=1, name="model.safetensors", save=save_file):
    """A folder of transformers: one file, or several and their index."""
    folder = Path("model")
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    stem, _, suffix = name.partition(".")
    files = [name] if parts == 1 else [f"{stem}-{n + 1}.{suffix}" for n in range(parts)]
    places = {key: files[number % parts] for number, key in enumerate(weights())}
    for file in files:
        found = {key: weight for key, weight in weights().items() if places[key] == file}
        save(found, folder / file)
    if parts > 1:
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)]
)
def test_model_folders(parts, name, save):
    save_folder(parts, name, save)
    result = verify("model", "2:4", allow_dense=True)
    assert result.ok
    verdicts = {v.key: v.verdict for v in result.verdicts}
    assert verdicts.pop("embed.weight") == "dense"
    assert verdicts == dict.fromkeys([f"layers.{n}.weight" for n in range(3)], "N:M")
    assert result.share == 0.75
    assert (result.count("N:M"), result.count("dense"), result.count("broken")) == (3, 1, 0)


def test_the_least_share(command):
    save_folder()
    for share, expected, words in (
        ("0.75", 0, "3 of 4 matrices are N:M, with 75.0% of all entries; 1 is dense"),
        ("0.8", 1, "only 75.0% of the matrices' entries are in N:M matrices, less than 80.0%"),
        ("75", 2, "min_share=75.0 must be a fraction from 0 to 1"),
    ):
        assert words in command(f"verify model --pattern 2:4 --min-share {share}", expected)


def drop_a_weight():
    kept = load_file(PART)
    del kept["layers.1.weight"]
    save_file(kept, PART)


def name_another_folder():
    INDEX.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))


NO_INDEX = "cannot read 'model/model.safetensors.index.json': it is no index with a `weight_map`"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_a_weight, "lacks the weight 'layers.1.weight' that the index"),
        (PART.unlink, r"'model' is incomplete: 1 of 2 files are missing: \['model-2.safetensors'"),
        (name_another_folder, r"names '\.\./model\.safetensors', which is not a file in its fold"),
        (INDEX.unlink, "holds no model: expected one of model.safetensors, model.safetensors.ind"),
        *(
            (lambda text=text: INDEX.write_text(text), NO_INDEX)
            for text in ("", "[]", "{}", '{"weight_map": 3}', "\x00")
        ),
    ],
)
def test_what_a_folder_lacks(command, damage, message):
    save_folder(parts=2)
    damage()
    with pytest.raises(ValueError, match=message):
        verify("model", "2:4")
    command("export model -o a.safetensors", 2)


def test_folders_that_hold_other_folders_or_an_adapter():
    save_folder()
    for step in (2, 4):
        Path(f"checkpoint-{step}").symlink_to("model")
    with pytest.raises(ValueError, match="but folders that may: checkpoint-2, checkpoint-4"):
        verify(".", "2:4")
    Path("adapter").mkdir()
    Path("adapter/adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="holds an adapter"):
        verify("adapter", "2:4")


@pytest.mark.parametrize("path", ["file.ckpt", "file.safetensors"])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (
            b"<!DOCTYPE html>\n<html>" + b"x" * 900,
            "it is text, not a checkpoint, and begins with '<!DOCTYPE html>'",
        ),
        ("ä".encode() * 300, "it is text, not a checkpoint"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
            "a Git LFS pointer .* `git lfs pull`",
        ),
    ],
)
def test_why_a_file_cannot_be_read(path, content, reason):
    Path(path).write_bytes(content)
    with pytest.raises(ValueError, match=f"cannot read '{path}': .*{reason}"):
        verify(path)


@pytest.mark.parametrize(("name", "save"), [("a.pt", torch.save), ("a.safetensors", save_file)])
def test_truncated_files(name, save):
    """At every length between the format's first bytes and the last but one."""
    save(weights(), name)
    path = Path(name)
    whole = path.read_bytes()
    for length in [3, 8, 9, 100, *range(200, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            verify(path, "2:4")
    path.write_bytes(whole)
    assert verify(path, "2:4", allow_dense=True).ok


class Own:
    """An object that is no tensor."""


def test_objects_of_a_program_are_named():
    torch.save({"own": Own()}, "a.pt")
    message = r"holds a [\w.]*test_folders.Own, .* save model.state_dict\(\)"
    with pytest.raises(ValueError, match=message):
        verify("a.pt")


# ------------------------------------------------------------------------------------------------- sharded checkpoints


class Runs:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.filterwarnings("ignore")  # of torch's own writer and reader
@pytest.mark.parametrize("lightning", [False, True])
def test_the_command_of_the_message_makes_one_file(command, monkeypatch, lightning):
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    model.weight.data = nm_prune(model.weight.data, "2:4")
    dcp.save({"model": model.state_dict()}, checkpoint_id="saved")
    if lightning:
        torch.save({"epoch": 3}, "saved/meta.pt")
    said = command("export saved -o a.safetensors", 2)
    assert command("verify saved --pattern 2:4", 2).replace("verify", "export") == said
    module, *words = re.search(r"`python -m (.*)`", said)[1].split()
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")
    assert_equal_states(read_checkpoint(words[-1]).weights, model.state_dict())
    assert verify(words[-1], "2:4").ok
    assert ("epoch" in torch.load(words[-1])) == lightning


def test_nothing_is_unpickled():
    Path("saved").mkdir()
    Path("saved/.metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(ValueError, match="is a sharded checkpoint, whose index is a pickle"):
        verify("saved", "2:4")
    assert os.listdir() == ["saved"]
