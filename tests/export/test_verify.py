"""verify() as a function; tests/test_cli.py has the subcommand."""

import pytest
import torch

from lightning_nm.cli import main
from lightning_nm.export import Verification, pack, save_packed, verification, verify
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
    with pytest.warns(UserWarning, match=r"will be dense, .* N:M: 'net.3': in 6 % 4 != 0 "):
        trainer.fit(new_model(width=6), Data())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    result = verify(tmp_path / "a.ckpt")
    assert result.ok
    notes = {verdict.key: (verdict.verdict, verdict.note) for verdict in result.verdicts}
    why = "trained dense: in 6 % 4 != 0 (M = 2, 3, 6 would fit), so only GEMMs of the backward pass were N:M"
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
                "blocks.[0-7].up.weight",
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


# ------------------------------------------------------------------------ tensors of other types, and where they lie

DENSE = torch.arange(1, 65).reshape(8, 8)
FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
]


def quantised(weight):
    return torch.quantize_per_channel(
        weight, torch.full((8,), 0.02), torch.arange(8) - 4, axis=0, dtype=torch.qint8
    )


KINDS = {
    **{str(dtype): (lambda w, dtype=dtype: w.to(dtype)) for dtype in FLOAT8},
    "int8": lambda w: (w * 20).to(torch.int8),
    "complex": lambda w: torch.complex(torch.zeros_like(w), w),
    "float16": lambda w: w.half(),
    "coo": lambda w: w.to_sparse(),
    "csr": lambda w: w.to_sparse_csr(),
    "quantised": quantised,
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these types beta or deprecated
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_matrix_is_checked(tmp_path, kind):
    """Right, dense, and with one broken block, next to a weight in float32 that is right."""
    torch.manual_seed(0)
    weight = nm_prune(torch.randn(8, 16), "2:4")
    weight = torch.where(weight == 0, 0.0, weight.sign() * (weight.abs() + 0.5))
    path = tmp_path / "a.pt"
    make = KINDS[kind]

    def verdict_of(values):
        torch.save({"right": weight, "x": make(values)}, path)
        result = verify(path, "2:4", allow_dense=True)
        assert result.matrices == {"right": 128, "x": 128}
        return result.verdicts[1]

    assert (verdict_of(weight).verdict, verdict_of(weight).density) == ("N:M", 0.5)
    assert verdict_of(torch.ones(8, 16)).verdict == "dense"
    assert not verify(path, "2:4").ok
    broken = weight.clone()
    broken[3, 4:7] = 1
    assert (verdict_of(broken).verdict, verdict_of(broken).violations) == ("broken", 1)


def test_a_type_that_torch_cannot_compare_is_named(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"right": nm_prune(torch.randn(8, 8), "2:4")}, path)
    assert verify(path, "2:4").ok
    torch.save({"x": torch.empty(8, 8, device="meta")}, path)
    with pytest.raises(
        ValueError, match=r"'x' \(torch.float32, .* cannot be read: it has no values"
    ):
        verify(path, "2:4")
    huge = torch.sparse_coo_tensor([[0], [0]], [1.0], (1 << 30, 1 << 30), check_invariants=True)
    torch.save({"x": huge}, path)
    with pytest.raises(ValueError, match=r"'x' .*torch.sparse_coo.* cannot be read"):
        verify(path, "2:4")


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_with_indices_outside_are_refused(tmp_path):
    """torch loads them, and would write outside of the dense tensor."""
    coo = torch.sparse_coo_tensor([[0], [10**7]], [1.0], (8, 8), check_invariants=False)
    row = torch.tensor([0, 1, 1])
    csr = torch.sparse_csr_tensor(
        row, torch.tensor([10**7]), torch.ones(1), (2, 8), check_invariants=False
    )
    for hostile in (coo, csr):
        torch.save({"x": hostile}, tmp_path / "a.pt")
        with pytest.raises(ValueError, match=r"cannot read .*a\.pt"):
            verify(tmp_path / "a.pt", "2:4")


def test_the_zero_of_uint8_is_unknown(tmp_path):
    right = nm_prune(torch.randn(8, 8), "2:4")
    torch.save({"right": right, "x": (right != 0).byte()}, tmp_path / "a.pt")
    result = verify(tmp_path / "a.pt", "2:4")
    assert not result.ok
    assert [v.verdict for v in result.verdicts] == ["N:M", "dense"]
    assert "does not tell which value stands for zero" in result.verdicts[1].note


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"b": {"w": DENSE.float()}}, "b.w"),
        ({"b": [torch.ones(3), DENSE.float()]}, "b.1"),
        ({"b": ({"c": (DENSE.double(),)},)}, "b.0.c.0"),
        ({"x._packed_params": (DENSE.to(torch.int8), None)}, "x._packed_params.0"),
        ({"b": DENSE.to(torch.int8)}, "b"),
    ],
)
@pytest.mark.parametrize("within", ["", "state_dict", "model"])
def test_dense_matrices_in_dictionaries_and_lists(tmp_path, content, key, within):
    right = {"a": nm_prune(torch.randn(8, 8), "2:4")}
    found = {**right, **content}
    torch.save({within: found} if within else found, tmp_path / "a.pt")
    result = verify(tmp_path / "a.pt", "2:4")
    assert result.problems[0].startswith(f"1 of 2 matrices are dense: '{key}'; allow")
    assert result.matrices == {"a": 64, key: 64}


def test_what_else_a_file_holds_is_no_weight(tmp_path):
    """States of optimizers; and containers that hold themselves, or two tensors of one name."""
    right = nm_prune(torch.randn(8, 8), "2:4")
    around = [DENSE.float()]
    around.append(around)
    content = {"a": right, "optimizer": {0: {"exp_avg": DENSE}}, "more": {"optim_d": [DENSE]}}
    torch.save(content, tmp_path / "a.pt")
    assert list(verify(tmp_path / "a.pt", "2:4").matrices) == ["a"]
    torch.save({**content, "b": around, "c": around}, tmp_path / "a.pt")
    assert list(verify(tmp_path / "a.pt", "2:4").matrices) == ["a", "b.0"]
    torch.save({"g": {"w": right}, "g.w": DENSE.float()}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"two tensors of the name 'g\.w'"):
        verify(tmp_path / "a.pt", "2:4")
    torch.save([right, right], tmp_path / "a.pt")
    assert list(verify(tmp_path / "a.pt", "2:4").matrices) == ["0", "1"]


def test_the_pattern_that_weights_have_is_named(tmp_path, capsys):
    torch.manual_seed(0)
    weights = {f"{k}.weight": nm_prune(torch.randn(32, 64), "2:4") for k in range(3)}
    weights["in.weight"] = nm_prune(torch.randn(64, 32), "2:4", dim=0)
    weights["head.weight"] = torch.randn(8, 64)
    # As many zeros without a structure: the blocks of 32 happen to be of some pattern, which says nothing.
    weights["random.weight"] = torch.randn(8, 64) * (torch.rand(8, 64) < 0.45)
    path = tmp_path / "a.pt"
    torch.save(weights, path)
    assert main(["verify", str(path), "--pattern", "1:4", "--allow-dense", "-q"]) == 1
    said = capsys.readouterr().out
    assert "FAILED: 4 weights are 2:4, not 1:4: --pattern 2:4 checks that" in said
    assert said.count("checks that") == 1
    # Most blocks of two hold at most one.
    assert "4 weights are 2:4, not 1:2" in verify(path, "1:2").problems[-1]
    del weights["random.weight"]
    torch.save(weights, path)
    assert main(["verify", str(path), "--pattern", "2:4", "--allow-dense", "-q"]) == 0
    assert "checks that" not in capsys.readouterr().out
    linear = torch.nn.Linear(64, 32)
    linear.weight.data = weights["0.weight"]
    save_packed(pack(linear), tmp_path / "a.safetensors")
    result = verify(tmp_path / "a.safetensors", "1:4")
    assert result.problems[1] == "1 weight is 2:4, not 1:4: --pattern 2:4 checks that"


def test_the_exit_status(tmp_path, capsys, monkeypatch):
    """1 says that weights are not N:M, and nothing else."""
    for name, weight in (("right", nm_prune(torch.randn(8, 8), "2:4")), ("dense", DENSE.float())):
        torch.save({"w": weight}, tmp_path / f"{name}.pt")
    (tmp_path / "noise.pt").write_bytes(bytes(range(128, 256)))
    (tmp_path / "program.pte").write_bytes(b"\x18\0\0\0ET12" + bytes(range(128, 256)))
    names = ("right.pt", "dense.pt", "noise.pt", "program.pte", "missing")
    statuses = [main(["verify", str(tmp_path / name), "--pattern", "2:4", "-q"]) for name in names]
    assert statuses == [0, 1, 2, 2, 2]
    assert "it is a program of ExecuTorch" in capsys.readouterr().out

    def fails(*args, **kwargs):
        raise OSError("the disk is gone")

    monkeypatch.setattr(verification, "read_checkpoint", fails)
    assert main(["verify", str(tmp_path / "right.pt"), "--pattern", "2:4"]) == 2
    assert "right.pt': OSError: the disk is gone" in capsys.readouterr().out
