"""NMTrainerCallback under DDP, in two processes."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lightning_nm import functional as nmf
from tests.support.hf_ranks import differing_masks, trained
from tests.support.processes import in_processes

pytestmark = pytest.mark.slow


def test_ranks_train_one_sparse_model(tmp_path):
    """And resume it exactly."""
    whole = in_processes(2, tmp_path / "a", trained, str(tmp_path / "whole"), None)
    part = in_processes(
        2, tmp_path / "b", trained, str(tmp_path / "part"), str(tmp_path / "whole" / "checkpoint-2")
    )
    for rank in (0, 1):
        for name, value in whole[0].items():
            assert torch.equal(value, whole[rank][name]), name
            assert torch.equal(value, part[rank][name]), name
    assert nmf.is_nm(whole[0]["model.layers.1.mlp.up_proj.weight"], "2:4")
    assert not (tmp_path / "part" / "checkpoint-3" / ".nm_sparsifier.pt.new").exists()


def test_masks_that_differ_end_the_training_everywhere(tmp_path):
    for message in in_processes(2, tmp_path / "a", differing_masks, str(tmp_path / "run")):
        assert "model.layers.0.self_attn.q_proj" in message
