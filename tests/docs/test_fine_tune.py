"""The page on fine-tuning runs as it stands, with a small model of transformers."""

import re

import lightning.pytorch as pl
import pytest

from lightning_nm import functional as nmf
from lightning_nm.export import PackedFile
from tests.docs.blocks import QuietTrainer, blocks, execute, read, run_commands


@pytest.mark.slow
def test_from_dense_to_a_verified_sparse_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    page, _, _ = read("fine-tune.md").partition("\n## Distil\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pl, "Trainer", QuietTrainer)
    names = execute(page)
    printed = capsys.readouterr().out
    assert re.search(
        r"^14 layers are 2:4, the largest error of an output is 0\.\d\d$", printed, re.MULTILINE
    )
    module = names["module"]
    masked = [module.get_submodule(name) for name in names["result"].layers]
    assert all(
        type(layer).__name__ == "Linear" and nmf.is_nm(layer.weight, "2:4") for layer in masked
    )
    assert "lm_head" not in "".join(names["result"].layers)

    run_commands("".join(blocks("", page)))
    packed = PackedFile("sparse-model.safetensors").packed
    assert {str(entry.pattern) for entry in packed.values()} == {"2:4"}
    assert len(packed) == 14
