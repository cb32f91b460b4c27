"""Folders of transformers whose experts have other names in the file than in the model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from lightning_nm import load_packed, unpacked_state_dict
from lightning_nm.export import PackedFile, verify
from lightning_nm.functional import nm_prune
from lightning_nm.integrations import NMTrainerCallback
from tests.support.hf_models import mixtral, new, trainer
from tests.support.packed_models import assert_equal_states

EXPERTS = {
    f"model.layers.{i}.mlp.experts.{name}"
    for i in range(2)
    for name in ("gate_up_proj", "down_proj")
}
WEIGHTS, CONFIG = Path("in/model.safetensors"), Path("in/config.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint folder of a Trainer, with the state that names masked experts, and the model after it."""
    path, model = tmp_path_factory.mktemp("mixtral"), new(mixtral)
    callback = NMTrainerCallback("2:4", "sr-ste", show_tables=False)
    trainer(model, path, [callback], save_strategy="steps", save_steps=1, max_steps=1).train()
    return path / "checkpoint-1", model


@pytest.fixture
def model(trained):
    """The model; its folder is "in"."""
    folder, model = trained
    shutil.copytree(folder, "in")
    return model.eval()


def test_masked_experts_are_found(model):
    assert set(model.state_dict()) >= EXPERTS
    assert not EXPERTS & set(load_file(WEIGHTS)), "their names differ"
    result = verify("in")
    assert result.ok
    assert {v.verdict for v in result.verdicts if v.key in EXPERTS} == {"N:M"}
    assert {v.key for v in result.verdicts} > EXPERTS
    by_pattern = verify("in", "2:4", allow_dense=True)
    assert by_pattern.ok
    single = [v for v in by_pattern.verdicts if ".experts." in v.key and v.verdict == "N:M"]
    assert len(single) >= 2 * 4 * 3


def test_broken_experts_are_found(model):
    weights = load_file(WEIGHTS)
    key = next(key for key in weights if ".experts.1." in key)
    weights[key][3, :4] = 1
    save_file(weights, WEIGHTS, {"format": "pt"})
    (problem,) = verify("in").problems
    assert problem.endswith("is not 2:4: 1 of 1024 blocks hold more")
    assert problem.split("'")[1] in EXPERTS


def test_a_model_that_transformers_does_not_know(model):
    config = json.loads(CONFIG.read_text())
    CONFIG.write_text(json.dumps({**config, "architectures": ["Unknown"]}))
    message = (
        "has masks for '.*' under another name than its weight has, and .*: it has no class Unknown"
    )
    with pytest.raises(ValueError, match=message):
        verify("in")


def test_experts_are_packed_under_the_names_of_the_model(model, command):
    command("export in -o a.safetensors")
    assert set(PackedFile("a.safetensors").packed) > EXPERTS
    loaded = load_packed(new(mixtral), "a.safetensors")
    assert_equal_states(unpacked_state_dict(loaded), model.state_dict())
    tokens = torch.arange(8)[None]
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)


def test_a_folder_without_a_state(command):
    model = new(mixtral).bfloat16()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key in EXPERTS:
                weight.copy_(nm_prune(weight, "1:4", -1))
    model.save_pretrained("in")
    command("export in -o a.safetensors")
    assert set(PackedFile("a.safetensors").packed) == EXPERTS
    loaded = load_packed(new(mixtral), "a.safetensors")
    assert_equal_states(unpacked_state_dict(loaded), model.state_dict())
    command("export in --to torch -o dense")
    again = type(model).from_pretrained("dense", dtype="auto")
    assert_equal_states(again.state_dict(), model.state_dict())
