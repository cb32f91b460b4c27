"""verify() on model folders and on files that cannot be read; several checkpoints in one call."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_nm.cli import main
from lightning_nm.export import verify
from lightning_nm.functional import nm_prune


def weights(seed=0):
    torch.manual_seed(seed)
    names = [f"layers.{number}.weight" for number in range(3)]
    return {name: nm_prune(torch.randn(16, 16), "2:4") for name in names} | {
        "embed.weight": torch.randn(16, 16),
        "norm.weight": torch.ones(16),
    }


def folder(path, parts=1, save=save_file, name="model.safetensors"):
    path.mkdir()
    (path / "config.json").write_text("{}")
    found = weights()
    if parts == 1:
        save(found, path / name)
        return path
    stem, _, suffix = name.partition(".")
    places = {
        key: f"{stem}-0000{number % parts + 1}-of-0000{parts}.{suffix}"
        for number, key in enumerate(found)
    }
    for part in set(places.values()):
        save({key: found[key] for key, place in places.items() if place == part}, path / part)
    (path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(
    ("name", "save"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)]
)
def test_model_folders(tmp_path, parts, name, save):
    result = verify(folder(tmp_path / "model", parts, save, name), "2:4", allow_dense=True)
    assert result.ok
    assert {v.key: v.verdict for v in result.verdicts} == {
        "layers.0.weight": "N:M",
        "layers.1.weight": "N:M",
        "layers.2.weight": "N:M",
        "embed.weight": "dense",
    }
    assert result.share == 0.75
    assert (result.count("N:M"), result.count("dense"), result.count("broken")) == (3, 1, 0)


def test_the_least_share(tmp_path, capsys):
    path = str(folder(tmp_path / "model"))
    assert main(["verify", path, "--pattern", "2:4", "--min-share", "0.75"]) == 0
    assert (
        "3 of 4 matrices are N:M, with 75.0% of all entries; 1 is dense" in capsys.readouterr().out
    )
    assert main(["verify", path, "--pattern", "2:4", "--min-share", "0.8"]) == 1
    assert (
        "only 75.0% of the matrices' entries are in N:M matrices, less than 80.0%"
        in capsys.readouterr().out
    )
    assert main(["verify", path, "--pattern", "2:4", "--min-share", "75"]) == 2
    assert "min_share=75.0 must be a share from 0 to 1" in capsys.readouterr().out


def test_what_a_folder_lacks(tmp_path):
    path = folder(tmp_path / "model", parts=2)
    part = path / "model-00002-of-00002.safetensors"
    kept = load_file(part)
    save_file({key: value for key, value in kept.items() if key != "layers.1.weight"}, part)
    with pytest.raises(
        ValueError, match=r"00002\.safetensors' lacks the weight 'layers.1.weight' that the index"
    ):
        verify(path, "2:4")
    part.unlink()
    with pytest.raises(
        ValueError, match=r"is incomplete: 1 of 2 files are missing: \['model-00002-of-00002"
    ):
        verify(path, "2:4")
    index = path / "model.safetensors.index.json"
    for text in ("", "[]", "{}", '{"weight_map": 3}', "\x00"):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json': it is no index with a `weight_map`"):
            verify(path, "2:4")
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(
        ValueError, match=r"names '\.\./model\.safetensors', which is not a file in its folder"
    ):
        verify(path, "2:4")


def test_folders_without_a_model(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"expected one of model\.safetensors, model\.safetensors\.index\.json, pyto",
    ):
        verify(tmp_path, "2:4")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="holds an adapter"):
        verify(tmp_path, "2:4")
    for step in (2, 4):
        folder(tmp_path / f"checkpoint-{step}")
    with pytest.raises(
        ValueError, match="no model itself, but folders that may: checkpoint-2, checkpoint-4"
    ):
        verify(tmp_path, "2:4")


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
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
def test_why_a_file_cannot_be_read(tmp_path, suffix, content, reason):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"cannot read '.*file{suffix}': .*{reason}"):
        verify(path)


@pytest.mark.parametrize(("suffix", "save"), [(".pt", torch.save), (".safetensors", save_file)])
def test_truncated_files(tmp_path, suffix, save):
    """At every length between the format's first bytes and the last but one."""
    path = tmp_path / f"file{suffix}"
    save(weights(), path)
    whole = path.read_bytes()
    for length in [3, 8, 9, 100, *range(200, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="truncated"):
            verify(path, "2:4")
    path.write_bytes(whole)
    assert verify(path, "2:4", allow_dense=True).ok


class Own:
    """An object that is no tensor."""


def test_objects_of_a_program_are_named(tmp_path):
    torch.save({"own": Own()}, tmp_path / "a.pt")
    with pytest.raises(
        ValueError, match=r"holds a [\w.]*test_folders.Own, .* save model.state_dict\(\)"
    ):
        verify(tmp_path / "a.pt")


def test_several_checkpoints(tmp_path, capsys):
    """Of which each is listed, and the worst decides on the status."""
    first, second = str(folder(tmp_path / "a")), str(tmp_path / "b.pt")
    torch.save(weights(1), second)
    assert main(["verify", first, second, "--pattern", "2:4", "--allow-dense"]) == 0
    out = capsys.readouterr().out
    assert out.index(f"{first}:") < out.index(f"{second}:") < out.index("2 of 2 checkpoints OK")
    missing = str(tmp_path / "missing")
    assert main(["verify", first, missing, second, "--pattern", "1:4"]) == 2
    assert "0 of 3 checkpoints OK" in capsys.readouterr().out
    assert main(["verify", first, second, "--pattern", "1:4"]) == 1
    capsys.readouterr()
    assert (
        main(["verify", first, missing, second, "--pattern", "2:4", "--allow-dense", "--json"]) == 2
    )
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["schema"], found["ok"]) == (1, False)
    assert [(c["checkpoint"], c["ok"]) for c in found["checkpoints"]] == [
        (first, True),
        (missing, False),
        (second, True),
    ]
    assert "neither a file nor a folder" in found["checkpoints"][1]["error"]
    assert "neither a file nor a folder" in err
    assert found["checkpoints"][0]["matrices"] == {"N:M": 3, "dense": 1, "broken": 0}
    assert found["checkpoints"][0]["share"] == 0.75
    assert len(found["checkpoints"][2]["weights"]) == 4
