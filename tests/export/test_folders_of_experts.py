"""Folders of transformers whose experts have other names in the file than in the model."""

import json

import pytest
import torch

pytest.importorskip("transformers")

from lightning_nm import load_packed, unpacked_state_dict
from lightning_nm.cli import main
from lightning_nm.export import PackedFile, verify
from lightning_nm.functional import nm_prune
from lightning_nm.integrations import NMTrainerCallback
from tests.support.hf_models import mixtral, new, trainer

EXPERTS = {
    f"model.layers.{i}.mlp.experts.{name}"
    for i in range(2)
    for name in ("gate_up_proj", "down_proj")
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint folder of a Trainer, with the state that names masked experts, and the model after it."""
    path, model = tmp_path_factory.mktemp("mixtral"), new(mixtral)
    callback = NMTrainerCallback("2:4", "sr-ste", show_tables=False)
    trainer(model, path, [callback], save_strategy="steps", save_steps=2, max_steps=2).train()
    return path / "checkpoint-2", model


def test_the_names_differ(trained):
    folder, model = trained
    from safetensors.torch import load_file

    assert set(model.state_dict()) >= EXPERTS
    assert not EXPERTS & set(load_file(folder / "model.safetensors"))


def test_verify_finds_masked_experts(trained):
    folder, _ = trained
    result = verify(folder)
    assert result.ok
    assert {v.key for v in result.verdicts} > EXPERTS
    assert {v.verdict for v in result.verdicts if v.key in EXPERTS} == {"N:M"}
    by_pattern = verify(folder, "2:4", allow_dense=True)
    assert by_pattern.ok
    assert (
        sum(".experts." in v.key and v.verdict == "N:M" for v in by_pattern.verdicts) >= 2 * 4 * 3
    )


def test_verify_finds_broken_experts(trained, tmp_path):
    from safetensors.torch import load_file, save_file

    folder, _ = trained
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    key = next(key for key in weights if ".experts.1." in key)
    weights[key][3, :4] = 1
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (problem,) = verify(tmp_path).problems
    assert problem.endswith("is not 2:4: 1 of 1024 blocks hold more")
    assert problem.split("'")[1] in EXPERTS


def test_export_packs_experts_under_the_names_of_the_model(trained, tmp_path, capsys):
    folder, model = trained
    target = tmp_path / "model.safetensors"
    assert main(["export", str(folder), "-o", str(target)]) == 0
    assert set(PackedFile(target).packed) > EXPERTS
    loaded = load_packed(new(mixtral), target)
    tokens = torch.arange(8)[None]
    assert torch.allclose(loaded(tokens).logits, model.eval()(tokens).logits, atol=1e-5)
    assert verify(target).ok


def test_export_of_a_folder_without_a_state(tmp_path):
    model = new(mixtral).bfloat16()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key in EXPERTS:
                weight.copy_(nm_prune(weight, "1:4", -1))
    model.save_pretrained(tmp_path / "folder")
    target = tmp_path / "model.safetensors"
    assert main(["export", str(tmp_path / "folder"), "-o", str(target)]) == 0
    packed = PackedFile(target).packed
    assert set(packed) == EXPERTS
    assert {entry.dtype for entry in packed.values()} == {torch.bfloat16}
    loaded = load_packed(new(mixtral), target)
    assert all(
        torch.equal(value, model.state_dict()[key])
        for key, value in unpacked_state_dict(loaded).items()
    )
    assert (
        main(["export", str(tmp_path / "folder"), "--to", "torch", "-o", str(tmp_path / "dense")])
        == 0
    )
    again = type(model).from_pretrained(tmp_path / "dense", dtype="auto")
    assert all(
        torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items()
    )


def test_a_model_that_transformers_does_not_know(trained, tmp_path):
    folder, _ = trained
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Unknown"]}))
    message = (
        "has masks for '.*' under another name than its weight has, and .*: it has no class Unknown"
    )
    with pytest.raises(ValueError, match=message):
        verify(tmp_path)
