"""Sharded checkpoints are refused with the command that makes one file of them, and nothing in them is run."""

import os
import pickle
import re
import runpy
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_nm import functional as nmf
from lightning_nm.cli import main
from lightning_nm.export import read_checkpoint, verify

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own writer and reader


class Runs:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("lightning", [False, True])
def test_the_command_of_the_message_makes_one_file(tmp_path, monkeypatch, capsys, lightning):
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    model.weight.data = nmf.nm_prune(model.weight.data, "2:4")
    folder = tmp_path / "saved"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    if lightning:
        torch.save({"epoch": 3}, folder / "meta.pt")
    assert main(["verify", str(folder), "--pattern", "2:4"]) == 2
    assert main(["export", str(folder), "-o", str(tmp_path / "a.safetensors")]) == 2
    said = capsys.readouterr()
    assert said.out.replace("verify", "export") == said.err
    module, *words = re.search(r"`python -m (.*)`", said.err)[1].split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *words])
    monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_module(module, run_name="__main__")
    weights = read_checkpoint(words[-1]).weights
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert verify(words[-1], "2:4").ok
    assert ("epoch" in torch.load(words[-1])) == lightning


def test_nothing_is_unpickled(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(ValueError, match="is a sharded checkpoint, whose index is a pickle"):
        verify(tmp_path / "saved", "2:4")
    assert os.listdir(tmp_path) == ["saved"]
