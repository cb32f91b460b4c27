"""verify() as a function; tests/test_cli.py has the subcommand."""

import zipfile

import pytest
import torch

from lightning_nm.cli import main
from lightning_nm.export import Verification, verify
from lightning_nm.export.graphs import export_pt2
from lightning_nm.functional import nm_prune
from tests.support.lightning_models import Data, SaveAt, callback, make_trainer, new_model


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


def test_a_weight_that_was_trained_dense_has_the_reason(tmp_path):
    """Its input gradient alone was N:M; the fit warns of it by name."""
    trainer = make_trainer(tmp_path, [callback("bi-mask")], max_epochs=1)
    with pytest.warns(UserWarning, match=r"will be dense, .* N:M: 'net.3': in 6 % 4 != 0\."):
        trainer.fit(new_model(width=6), Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    result = verify(tmp_path / "a.ckpt")
    assert result.ok
    notes = {verdict.key: (verdict.verdict, verdict.note) for verdict in result.verdicts}
    why = "trained dense: in 6 % 4 != 0, so only GEMMs of the backward pass were N:M"
    assert notes == {"net.3.weight": ("dense", why), "net.6.weight": ("N:M", "plain")}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_stage_of_a_schedule_is_told_of_weights_that_are_not_n_m(tmp_path):
    schedule = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [3], "dense_end": 2}
    saves = [SaveAt(tmp_path / f"{batch}.ckpt", batch) for batch in (2, 3)]
    masks = callback("asp", schedule=schedule)
    # It is saved before the end of the batch, with the masks of its forward pass.
    first = SaveAt(tmp_path / "1.ckpt", 1)
    trainer = make_trainer(tmp_path, [first, masks, *saves], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(tmp_path / "6.ckpt")
    stages = {
        1: "the dense start of its schedule: weights are 2:4 from training step 3",
        2: "the stage 3:4 of its schedule: weights are 2:4 from training step 3",
        6: "the dense end of its schedule: weights were 2:4 before training step 4",
    }
    for batch, words in stages.items():
        assert words in verify(tmp_path / f"{batch}.ckpt").problems[-1]
    assert verify(tmp_path / "3.ckpt").problems == []


def test_a_state_dict_is_classified(tmp_path):
    torch.save(
        {"a.weight": nm_prune(torch.randn(8, 8), "2:4"), "b.weight": torch.randn(8, 8)},
        tmp_path / "a.pt",
    )
    with pytest.raises(
        ValueError, match="no sparsifier state that names its masked layers: give a pattern"
    ):
        verify(tmp_path / "a.pt")
    result = verify(tmp_path / "a.pt", "2:4", "a")
    assert result.problems == [
        "1 of 2 matrices are dense: 'b.weight'; allow that by --allow-dense (allow_dense=True), or say how much must "
        "be N:M by --min-share (min_share)"
    ]
    result = verify(tmp_path / "a.pt", "2:4", "a", allow_dense=True)
    assert result.ok
    assert verify(tmp_path / "a.pt", "2:4", min_share=0.0).ok
    assert not verify(tmp_path / "a.pt", "2:4", min_share=0.6).ok
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
    assert (
        verify(tmp_path / "a.pt", "2:4").problems[0]
        == "'experts.up' is not 2:4: 16 of 48 blocks hold more"
    )


def test_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        verify(tmp_path / "missing.ckpt")


def test_equal_layers_share_a_line(tmp_path, capsys):
    torch.manual_seed(0)
    weights = {
        f"blocks.{k}.{part}.weight": torch.randn(64, 64)
        for k in range(8)
        for part in ("up", "down")
    }
    for k in range(8):
        weights[f"blocks.{k}.up.weight"] = nm_prune(weights[f"blocks.{k}.up.weight"], "2:4")
    torch.save(weights, tmp_path / "a.pt")
    assert main(["verify", str(tmp_path / "a.pt"), "--pattern", "2:4"]) == 1
    said = capsys.readouterr().out
    assert "FAILED: 8 of 16 matrices are dense: 'blocks.{0..7}.down.weight' (8); allow" in said
    assert "OK" not in said
    assert len([line for line in said.splitlines() if "blocks" in line]) < 14
    assert (
        main(["verify", str(tmp_path / "a.pt"), "--pattern", "2:4", "--allow-dense", "--quiet"])
        == 0
    )
    said = capsys.readouterr().out
    assert "blocks" not in said
    assert "OK: 8 weights" in said
    printed = "blocks.{0..7}.up.weight x8"
    assert (
        main(
            [
                "verify",
                str(tmp_path / "a.pt"),
                "--pattern",
                "2:4",
                "--allow-dense",
                "-q",
                "--include",
                printed,
            ]
        )
        == 0
    )
    for weight in weights.values():
        weight[0, :4] = 1
    torch.save({key: weight for key, weight in weights.items() if "up" in key}, tmp_path / "a.pt")
    assert verify(tmp_path / "a.pt", "2:4").problems == [
        "'blocks.{0..7}.up.weight' (8) is not 2:4: 1 of 1024 blocks hold more",
        "no weight is N:M sparse",
    ]


def test_every_matrix_that_the_base_has_n_m_must_stay_so(tmp_path):
    weights = {f"{k}.weight": nm_prune(torch.randn(8, 8), "2:4") for k in range(4)} | {
        "head.weight": torch.randn(8, 8)
    }
    torch.save(weights, tmp_path / "base.pt")
    assert verify(tmp_path / "base.pt", "2:4", base=tmp_path / "base.pt").ok
    weights |= {"1.weight": torch.randn(8, 8), "2.weight": torch.randn(8, 8)}
    del weights["3.weight"]
    torch.save(weights, tmp_path / "merged.pt")
    assert verify(tmp_path / "merged.pt", "2:4", min_share=0.2).ok
    assert verify(
        tmp_path / "merged.pt", "2:4", min_share=0.2, base=tmp_path / "base.pt"
    ).problems == [
        "only 1 of the base's 4 N:M matrices are N:M",
        "'{1,2}.weight' (2) is N:M in the base, but dense here",
        "'3.weight' is N:M in the base, but not in the file",
    ]
    arguments = ["verify", str(tmp_path / "merged.pt"), "--base", str(tmp_path / "base.pt")]
    assert main([*arguments, "--pattern", "2:4"]) == 1
    assert main(arguments) == 2
    torch.save({"1.weight": torch.randn(8, 8)}, tmp_path / "base.pt")
    with pytest.raises(ValueError, match=r"no matrix of the base .* is N:M"):
        verify(tmp_path / "merged.pt", "2:4", base=tmp_path / "base.pt")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.pt2", "a program of torch.export"), ("a.pt", "a program"), ("a.onnx", "an ONNX graph")],
)
def test_graphs_are_told_from_damaged_files(tmp_path, name, kind):
    path = tmp_path / name
    if name == "a.onnx":
        path.write_bytes(b"\x08\x0a\x12\x07pytorch\x1a\x062.13.0")
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/archive_format", "pt2")
    with pytest.raises(
        ValueError,
        match=rf"it is {kind}.*, not a checkpoint: give the checkpoint that it was exported",
    ):
        verify(path, "2:4")


def test_a_written_program_is_told_from_damaged_files(tmp_path):
    export_pt2(torch.nn.Linear(4, 4), (torch.randn(2, 4),), tmp_path / "a.pt2")
    with pytest.raises(ValueError, match=r"it is a program of torch\.export"):
        verify(tmp_path / "a.pt2", "2:4")
