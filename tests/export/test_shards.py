"""Sharded checkpoints are refused with the command that makes one file of them, and nothing in them is run."""

import os
import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_nm.export import read_checkpoint, verify
from lightning_nm.functional import nm_prune
from tests.support.packed_models import assert_equal_states

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own writer and reader


class Runs:
    """Creates a folder when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


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
