"""Sharded checkpoints are read as they were saved, and nothing in them is run."""

import os
import pathlib
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from lightning_nm import functional as nmf
from lightning_nm.commands.verify import main
from lightning_nm.export import verify
from lightning_nm.export.checkpoint import read_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # torch 2.6's own writer
]


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def save(folder, **others):
    """A model and its optimizer, as Lightning nests them."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    model.weight.data = nmf.nm_prune(model.weight.data, "2:4")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    model.weight.grad[model.weight == 0] = 0
    optimizer.step()
    content = {"state_dict": model.state_dict(), "optimizer_0": optimizer.state_dict(), **others}
    dcp.save(content, checkpoint_id=folder)
    return model


@pytest.mark.parametrize("lightning", [False, True])
def test_weights_come_as_they_were_saved(tmp_path, lightning):
    model = save(tmp_path / "saved")
    if lightning:
        torch.save({"callbacks": {}, "epoch": 3}, tmp_path / "saved" / "meta.pt")
    weights, states = read_checkpoint(tmp_path / "saved")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert states == []
    assert verify(tmp_path / "saved", pattern="2:4").ok


def test_a_plain_state_dict_comes_as_it_was_saved(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "saved")
    weights, _ = read_checkpoint(tmp_path / "saved")
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


def test_an_object_in_the_shards_is_not_unpickled(tmp_path):
    save(tmp_path / "saved", another=Runs(tmp_path / "ran"))
    read_checkpoint(tmp_path / "saved")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("whole", [False, True])
def test_metadata_that_would_run_code_is_refused(tmp_path, capsys, whole):
    save(tmp_path / "saved")
    path, runs = tmp_path / "saved" / ".metadata", Runs(tmp_path / "ran")
    found = pickle.loads(path.read_bytes())
    if not whole:
        found.planner_data["state_dict.weight"] = runs
    path.write_bytes(pickle.dumps(runs if whole else found))
    with pytest.raises(
        ValueError, match=r"cannot read the sharded checkpoint.*names (posix|nt)\.mkdir"
    ):
        read_checkpoint(tmp_path / "saved")
    assert main([str(tmp_path / "saved")]) == 2
    assert "it may be an attack" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"x", pickle.dumps({"state_dict_metadata": {}}), pickle.dumps(torch.float16)],
    ids=["empty", "text", "dictionary", "dtype"],
)
def test_metadata_that_is_none_is_refused(tmp_path, content):
    save(tmp_path / "saved")
    (tmp_path / "saved" / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match="cannot read the sharded checkpoint"):
        read_checkpoint(tmp_path / "saved")


def test_another_process_metadata_are_not_read(tmp_path):
    """torch reads that file without a check if reading the first one fails."""
    save(tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    found = pickle.loads(path.read_bytes())
    found.storage_meta = torch.Size([])
    path.write_bytes(pickle.dumps(found))
    (tmp_path / "saved" / "__0.metadata").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    assert verify(tmp_path / "saved", "2:4").ok
    assert not (tmp_path / "ran").exists()


def test_a_pickle_changes_no_class(tmp_path):
    save(tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    change = b"cpathlib\nPosixPath\n(N}X\x04\x00\x00\x00evilI1\nstb0"
    path.write_bytes(change + pickle.dumps(pickle.loads(path.read_bytes()), protocol=0))
    with pytest.raises(ValueError, match="cannot read the sharded checkpoint"):
        verify(tmp_path / "saved", "2:4")
    assert not hasattr(pathlib.PosixPath, "evil")


@pytest.mark.parametrize("change", ["larger", "none", "twice", "outside"])
def test_chunks_that_do_not_make_up_the_tensor_are_refused(tmp_path, change):
    save(tmp_path / "saved")
    path = tmp_path / "saved" / ".metadata"
    found = pickle.loads(path.read_bytes())
    weight = found.state_dict_metadata["state_dict.weight"]
    if change == "larger":
        weight.size = torch.Size([8, 8])
    elif change == "none":
        weight.chunks = []
    elif change == "twice":
        weight.size, weight.chunks = torch.Size([8, 8]), weight.chunks * 2
    else:
        for info in found.storage_data.values():
            info.relative_path = f"../saved/{info.relative_path}"
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(
        ValueError, match=r"do not make up a tensor|is not read: outside the folder"
    ):
        verify(tmp_path / "saved", "2:4")
