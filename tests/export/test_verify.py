"""verify() as a function; tests/test_cli.py has the subcommand."""

import pytest
import torch

from lightning_nm.export import Verification, verify
from lightning_nm.functional import nm_prune
from tests.lightning_models import Data, callback, make_trainer, new_model


def test_a_checkpoint_names_its_masked_layers(tmp_path):
    trainer = make_trainer(tmp_path, [callback()], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    result = verify(tmp_path / "a.ckpt")
    assert isinstance(result, Verification)
    assert result.ok
    assert {verdict.key for verdict in result.verdicts} == {"net.3.weight", "net.6.weight"}
    assert {verdict.density for verdict in result.verdicts} == {0.5}

    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["state_dict"]["net.6.weight"][0, :4] = 1
    torch.save(checkpoint, tmp_path / "broken.ckpt")
    result = verify(tmp_path / "broken.ckpt")
    assert not result.ok
    assert result.problems == ["'net.6.weight' is not 2:4: 1 of 2048 blocks hold more"]


def test_a_state_dict_is_classified(tmp_path):
    torch.save({"a.weight": nm_prune(torch.randn(8, 8), "2:4"), "b.weight": torch.randn(8, 8)}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="no sparsifier state that names its masked layers: give a pattern"):
        verify(tmp_path / "a.pt")
    result = verify(tmp_path / "a.pt", "2:4", "a")
    assert result.ok
    assert [verdict.verdict for verdict in result.verdicts] == ["N:M", "dense"]
    assert verify(tmp_path / "a.pt", "2:4", ["b", "c"]).problems == [
        "'b.weight' is named by `include` but is dense",
        "`include` 'c' matches no weight",
    ]
    with pytest.raises(ValueError, match="5:4"):
        verify(tmp_path / "a.pt", "5:4")


@pytest.mark.parametrize("dim", [1, 2])
def test_a_3d_weight_is_one_matrix_for_each_expert(tmp_path, dim):
    weight = nm_prune(torch.randn(3, 8, 8), "2:4", dim=dim)
    torch.save({"experts.up": weight, "experts.down": torch.randn(3, 8, 8)}, tmp_path / "a.pt")
    result = verify(tmp_path / "a.pt", "2:4")
    assert (result.verdicts[0].verdict, result.verdicts[0].note) == ("N:M", f"along dim {dim}")
    assert [v.verdict for v in result.verdicts] == ["N:M", "dense"]
    weight[1] = 1
    torch.save({"experts.up": weight}, tmp_path / "a.pt")
    assert verify(tmp_path / "a.pt", "2:4").problems[0] == "'experts.up' is not 2:4: 16 of 48 blocks hold more"


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        verify(tmp_path / "missing.ckpt")
