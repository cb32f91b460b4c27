"""verify() of checkpoints and state dicts; tests/test_cli.py has the subcommand."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_nm import pack, save_packed
from lightning_nm.export import Verification, verification, verify
from lightning_nm.functional import nm_prune
from tests.support.lightning_models import Data, SaveAt, callback, make_trainer, new_model
from tests.support.packed_models import Tied, copied, prune, small


def pruned(*shape, dim=1):
    """2:4, and no other value is zero."""
    weight = nm_prune(torch.randn(shape), "2:4", dim)
    return torch.where(weight == 0, 0.0, weight.sign() + weight)


def check(tensors, pattern="2:4", *args, **options):
    torch.save(tensors, "a.pt")
    return verify("a.pt", pattern, *args, **options)


# --------------------------------------------------------------------------------------- checkpoints of a sparsifier


def fit(*callbacks, **options):
    trainer = make_trainer(Path(), callbacks, max_epochs=1)
    trainer.fit(new_model(**options), Data())
    trainer.save_checkpoint("a.ckpt")


def test_a_checkpoint_names_its_masked_layers():
    fit(callback())
    result = verify("a.ckpt")
    assert isinstance(result, Verification)
    assert result.ok
    assert {v.key: v.density for v in result.verdicts} == {"net.3.weight": 0.5, "net.6.weight": 0.5}
    checkpoint = torch.load("a.ckpt", weights_only=True)
    checkpoint["state_dict"]["net.6.weight"][0, :4] = 1
    problems = check(checkpoint, None).problems
    assert problems == ["'net.6.weight' is not 2:4: 1 of 2048 blocks hold more"]


def test_a_weight_that_was_trained_dense_has_the_reason():
    """Its input gradient alone was N:M; the fit warns of it by name."""
    with pytest.warns(UserWarning, match=r"will be dense, .* N:M: 'net.3': in 6 % 4 != 0 "):
        fit(callback("bi-mask"), width=6)
    result = verify("a.ckpt")
    assert result.ok
    why = "trained dense: in 6 % 4 != 0 (M = 2, 3, 6 would fit), so only GEMMs of the backward pass were N:M"
    assert {verdict.key: (verdict.verdict, verdict.note) for verdict in result.verdicts} == {
        "net.3.weight": ("dense", why),
        "net.6.weight": ("N:M", "plain"),
    }


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_stage_of_a_schedule_is_told_of_weights_that_are_not_n_m():
    schedule = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [3], "dense_end": 2}
    first, *saves = (SaveAt(f"{batch}.ckpt", batch) for batch in (1, 2, 3))
    # The first is saved before the end of the batch, with the masks of its forward pass.
    fit(first, callback("asp", schedule=schedule), *saves)
    for name, words in (
        ("1", "the dense start of its schedule: weights are 2:4 from training step 3"),
        ("2", "the stage 3:4 of its schedule: weights are 2:4 from training step 3"),
        ("a", "the dense end of its schedule: weights were 2:4 before training step 4"),
    ):
        assert words in verify(f"{name}.ckpt").problems[-1]
    assert verify("3.ckpt").ok


# ----------------------------------------------------------------------------------------- state dicts and a pattern


DENSE = (
    "1 of 2 matrices are dense: 'b.weight'; allow that by --allow-dense (allow_dense=True), or say how much must be "
    "N:M by --min-share (min_share)"
)


@pytest.mark.parametrize(
    ("options", "problems"),
    [
        ({"include": "a"}, [DENSE]),
        ({"include": "a", "allow_dense": True}, []),
        ({"min_share": 0.0}, []),
        (
            {"min_share": 0.6},
            [
                "only 50.0% of the matrices' entries are in N:M matrices, less than 60.0%",
            ],
        ),
        (
            {"include": ["b", "c"]},
            ["'b.weight' is named by `include` but is dense", "`include` 'c' matches no weight"],
        ),
    ],
)
def test_a_state_dict_is_classified(options, problems):
    result = check({"a.weight": pruned(8, 8), "b.weight": torch.randn(8, 8)}, **options)
    assert result.problems == problems
    assert [verdict.verdict for verdict in result.verdicts] == ["N:M", "dense"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verify("a.pt"), "no sparsifier state that names its masked layers: give a patt"),
        (lambda: verify("a.pt", "5:4"), "5:4"),
        (lambda: verify("a.pt", "2:4", min_share=75), "must be a fraction from 0 to 1"),
        (lambda: verify("a.pt", base="a.pt"), "the base 'a.pt' is compared with a pattern"),
        (lambda: verify("b.pt", "2:4", base="a.pt"), "no matrix of the base .* is N:M"),
        (lambda: verify("none", "2:4"), "neither a file nor a folder"),
    ],
)
def test_calls_that_are_refused(call, message):
    for name in ("a", "b"):
        torch.save({"w": torch.randn(8, 8)}, f"{name}.pt")
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("dim", [1, 2])
def test_a_3d_weight_is_one_matrix_for_each_expert(dim):
    weight = nm_prune(torch.randn(3, 8, 8), "2:4", dim=dim)
    up, down = check({"experts.up": weight, "experts.down": torch.randn(3, 8, 8)}).verdicts
    assert (up.verdict, up.note, down.verdict) == ("N:M", f"along dim {dim}", "dense")
    weight[1] = 1
    problems = check({"experts.up": weight}).problems
    assert problems[0] == "'experts.up' is not 2:4: 16 of 48 blocks hold more"


def test_equal_layers_share_a_line(command):
    weights = {f"blocks.{k}.up.weight": pruned(64, 64) for k in range(8)}
    weights |= {f"blocks.{k}.down.weight": torch.randn(64, 64) for k in range(8)}
    torch.save(weights, "a.pt")
    said = command("verify a.pt --pattern 2:4", 1)
    assert "FAILED: 8 of 16 matrices are dense: 'blocks.{0..7}.down.weight' (8); allow" in said
    assert "OK" not in said
    assert len([line for line in said.splitlines() if "blocks" in line]) < 14
    for more in ("--quiet", "-q --include blocks.[0-7].up.weight"):
        said = command(f"verify a.pt --pattern 2:4 --allow-dense {more}")
        assert "blocks" not in said
        assert "OK: 8 weights" in said
    for weight in weights.values():
        weight[0, :4] = 1
    assert check({key: weight for key, weight in weights.items() if "up" in key}).problems == [
        "'blocks.{0..7}.up.weight' (8) is not 2:4: 1 of 1024 blocks hold more",
        "no weight is N:M sparse",
    ]


def test_every_matrix_that_the_base_has_n_m_must_stay_so(command):
    weights = {f"{k}.weight": pruned(8, 8) for k in range(4)}
    weights["head.weight"] = torch.randn(8, 8)
    torch.save(weights, "base.pt")
    assert check(weights, base="base.pt").ok
    weights |= {"1.weight": torch.randn(8, 8), "2.weight": torch.randn(8, 8)}
    del weights["3.weight"]
    assert check(weights, min_share=0.2).ok
    assert check(weights, min_share=0.2, base="base.pt").problems == [
        "only 1 of the base's 4 N:M matrices are N:M",
        "'{1,2}.weight' (2) is N:M in the base, but dense here",
        "'3.weight' is N:M in the base, but not in the file",
    ]
    command("verify a.pt --base base.pt --pattern 2:4", 1)


def test_the_pattern_that_weights_have_is_named(command):
    torch.manual_seed(0)
    weights = {f"{k}.weight": pruned(32, 64) for k in range(3)}
    weights["in.weight"] = pruned(64, 32, dim=0)
    weights["head.weight"] = torch.randn(8, 64)
    # As many zeros without a structure: the blocks of 32 happen to be of some pattern, which says nothing.
    weights["random.weight"] = torch.randn(8, 64) * (torch.rand(8, 64) < 0.45)
    # Most blocks of two hold at most one.
    assert "4 weights are 2:4, not 1:2" in check(weights, "1:2").problems[-1]
    said = command("verify a.pt --pattern 1:4 --allow-dense -q", 1)
    assert "FAILED: 4 weights are 2:4, not 1:4: --pattern 2:4 checks that" in said
    assert said.count("checks that") == 1
    del weights["random.weight"]
    assert check(weights, allow_dense=True).ok
    linear = torch.nn.Linear(64, 32)
    linear.weight.data = weights["0.weight"]
    save_packed(pack(linear), "a.safetensors")
    problems = verify("a.safetensors", "1:4").problems
    assert problems[1] == "1 weight is 2:4, not 1:4: --pattern 2:4 checks that"


# ------------------------------------------------------------------------ tensors of other types, and where they lie


def to_dtype(name):
    return lambda weight: weight.to(getattr(torch, name))


KINDS = {
    **{
        name: to_dtype(name)
        for name in (
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float16",
        )
    },
    "int8": lambda w: (w * 20).to(torch.int8),
    "complex": lambda w: torch.complex(torch.zeros_like(w), w),
    "coo": lambda w: w.to_sparse(),
    "csr": lambda w: w.to_sparse_csr(),
    "quantised": lambda w: torch.quantize_per_channel(
        w, torch.full((8,), 0.02), torch.arange(8) - 4, axis=0, dtype=torch.qint8
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of these types beta or deprecated
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_matrix_is_checked(kind):
    """Right, dense, and with one broken block, next to a weight in float32 that is right."""
    weight = pruned(8, 16)
    broken = weight.clone()
    broken[3, 4:8] = 1
    for values, verdict, violations in (
        (weight, "N:M", 0),
        (torch.ones(8, 16), "dense", 32),
        (broken, "broken", 1),
    ):
        result = check({"right": weight, "x": KINDS[kind](values)})
        assert result.matrices == {"right": 128, "x": 128}
        _, found = result.verdicts
        assert (found.verdict, found.violations) == (verdict, violations)
        assert result.ok == (verdict == "N:M")
    assert found.density == 66 / 128


def sparse(index, shape, is_csr=False):
    if is_csr:
        row, values = torch.tensor([0, 1, 1]), torch.ones(1)
        return torch.sparse_csr_tensor(row, index, values, shape, check_invariants=False)
    return torch.sparse_coo_tensor([[0], [index]], [1.0], shape, check_invariants=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.empty(8, 8, device="meta"),
            r"'x' \(torch.float32, .* cannot be read: it has no values",
        ),
        (lambda: sparse(0, (1 << 30, 1 << 30)), "'x' .*torch.sparse_coo.* cannot be read"),
        # torch loads the next two, and would write outside the dense tensor.
        (lambda: sparse(10**7, (8, 8)), r"cannot read .*a\.pt"),
        (lambda: sparse(torch.tensor([10**7]), (2, 8), is_csr=True), r"cannot read .*a\.pt"),
    ],
)
def test_a_tensor_that_cannot_be_compared_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        check({"x": make()})


def test_the_zero_of_uint8_is_unknown():
    result = check({"right": pruned(8, 8), "x": (pruned(8, 8) != 0).byte()})
    assert not result.ok
    assert [v.verdict for v in result.verdicts] == ["N:M", "dense"]
    assert "does not tell which value stands for zero" in result.verdicts[1].note


FULL = torch.arange(1.0, 65).reshape(8, 8)


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"b": {"w": FULL}}, "b.w"),
        ({"b": [torch.ones(3), FULL]}, "b.1"),
        ({"b": ({"c": (FULL.double(),)},)}, "b.0.c.0"),
        ({"x._packed_params": (FULL.to(torch.int8), None)}, "x._packed_params.0"),
        ({"b": FULL.to(torch.int8)}, "b"),
    ],
)
@pytest.mark.parametrize("within", ["", "state_dict", "model"])
def test_dense_matrices_in_dictionaries_and_lists(content, key, within):
    found = {"a": pruned(8, 8), **content}
    result = check({within: found} if within else found)
    assert result.problems[0].startswith(f"1 of 2 matrices are dense: '{key}'; allow")
    assert result.matrices == {"a": 64, key: 64}


def test_what_else_a_file_holds_is_no_weight():
    """States of optimizers; and containers that hold themselves, or two tensors of one name."""
    right, around = pruned(8, 8), [FULL]
    around.append(around)
    content = {"a": right, "optimizer": {0: {"exp_avg": FULL}}, "more": {"optim_d": [FULL]}}
    assert list(check(content).matrices) == ["a"]
    assert list(check({**content, "b": around, "c": around}).matrices) == ["a", "b.0"]
    assert list(check([right, right]).matrices) == ["0", "1"]
    with pytest.raises(ValueError, match=r"two tensors of the name 'g\.w'"):
        check({"g": {"w": right}, "g.w": FULL})


def test_the_exit_status(command, monkeypatch):
    """1 says that weights are not N:M, and nothing else."""
    torch.save({"w": pruned(8, 8)}, "right.pt")
    torch.save({"w": FULL}, "dense.pt")
    Path("noise.pt").write_bytes(bytes(range(128, 256)))
    Path("program.pte").write_bytes(b"\x18\0\0\0ET12" + bytes(range(128, 256)))
    names = ("right.pt", "dense.pt", "noise.pt", "program.pte", "missing")
    for name, status in zip(names, (0, 1, 2, 2, 2), strict=True):
        said = command(f"verify {name} --pattern 2:4 -q", status)
        assert ("it is a program of ExecuTorch" in said) == (name == "program.pte")

    def fails(*args, **kwargs):
        raise OSError("the disk is gone")

    monkeypatch.setattr(verification, "read_checkpoint", fails)
    assert "right.pt': OSError: the disk is gone" in command("verify right.pt --pattern 2:4", 2)


def test_several_checkpoints(command):
    """Each is listed, and the worst decides on the status."""
    for name in ("a", "b"):
        torch.save({"w": pruned(16, 16), "v": torch.randn(16, 16)}, f"{name}.pt")
    said = command("verify a.pt b.pt --pattern 2:4 --allow-dense")
    assert said.index("a.pt:") < said.index("b.pt:") < said.index("2 of 2 checkpoints OK")
    command("verify a.pt b.pt --pattern 1:4", 1)
    assert "0 of 3 checkpoints OK" in command("verify a.pt none b.pt --pattern 1:4", 2)
    said = command("verify a.pt none b.pt --pattern 2:4 --allow-dense --json", 2)
    found, end = json.JSONDecoder().raw_decode(said)
    first, missing, second = found["checkpoints"]
    assert [found["ok"], first["ok"], missing["ok"], second["ok"]] == [False, True, False, True]
    assert "neither a file nor a folder" in missing["error"]
    assert "neither a file nor a folder" in said[end:], "on stderr"
    assert first["matrices"] == {"N:M": 1, "dense": 1, "broken": 0}
    assert first["share"] == 0.5


# ------------------------------------------------------------------------------------------------------- packed models


FILE = "a.safetensors"


@pytest.fixture
def model():
    """A convolution and two linear layers 1:16, and a dense one, which are in the file FILE, too."""
    found = small("1:16")
    save_packed(pack(copied(found)), FILE)
    return found


def test_the_header_has_the_patterns(model, command):
    result = verify(FILE, include="4")
    assert result.ok
    assert [(v.key, v.blocks) for v in result.verdicts] == [
        ("0.weight", 32 * 9),
        ("4.weight", 64 * 32),
        ("5.weight", 32 * 4),
    ]
    of_all = {(v.verdict, v.pattern, v.violations, v.note, v.density) for v in result.verdicts}
    assert of_all == {("N:M", "1:16", 0, "packed, plain", 1 / 16)}
    assert (result.count("N:M"), result.count("dense"), result.count("broken")) == (3, 1, 0)
    sparse = 32 * 16 * 9 + 64 * 512 + 32 * 64
    assert result.share == sparse / (sparse + 3 * 32)
    assert verify(FILE, include=["6", "7"]).problems == [
        "`include` '6' matches no weight",
        "`include` '7' matches no weight",
    ]
    assert "less than 99.9%" in verify(FILE, min_share=0.999).problems[0]
    said = command("verify a.safetensors")
    assert "3 of 4 matrices are N:M, with 99.8% of all entries; 1 is dense" in said
    (document,) = json.loads(command("verify a.safetensors --json"))["checkpoints"]
    assert (document["ok"], document["matrices"]) == (True, {"N:M": 3, "dense": 1, "broken": 0})
    assert document["weights"] == [asdict(verdict) for verdict in result.verdicts]


def test_another_pattern(model):
    """The weights are unpacked, and checked as those of a dense file are: along every axis."""
    assert verify(FILE, "2:32", allow_dense=True).ok  # two blocks of 1:16
    assert [v.verdict for v in verify(FILE, "1:16").verdicts].count("N:M") == 3
    conv, linear, *others = sorted(verify(FILE, "1:32").verdicts, key=lambda verdict: verdict.key)
    assert {each.verdict for each in (conv, linear, *others)} == {"dense"}
    note = "packed, shape (32, 16, 3, 3) has no axis of blocks, stored as 1:16"
    assert conv.note == note
    # By rows every block of 32 holds two entries of its blocks of 16; down the columns fewer blocks have two.
    counts = (model[4].weight.t().reshape(-1, 32) != 0).sum(1)
    assert linear.violations == int((counts > 1).sum()) < 64 * 16
    assert linear.blocks == len(counts) == 64 * 16
    assert linear.note == "packed, along dim 0, stored as 1:16"


def test_zeros_do_not_count():
    layer = nn.Linear(16, 4, bias=False)
    layer.weight.data = nm_prune(layer.weight.data, "1:4")
    layer.weight.data[:2] = 0
    save_packed(pack(layer, "1:4"), FILE)
    assert verify(FILE).verdicts[0].density == 1 / 8


def test_weights_that_are_all_zero(command):
    """They are of every pattern, so they prove nothing: each is told, and a file of them alone fails."""
    model = prune(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "2:4")
    warning = "is all zero, which is N:M in every pattern: its layer was not loaded, or died"
    for layer, keys, problems in (
        (model[0], "'0.weight'", []),
        (model[1], "'{0,1}.weight' (2)", ["every weight that is N:M is all zero"]),
    ):
        layer.weight.data.zero_()
        save_packed(pack(copied(model), "2:4", kernels="reference"), FILE)
        result = verify(FILE)
        assert result.warnings == [f"{keys} {warning}"]
        assert result.problems == problems
        assert f"WARNING: {keys} {warning}" in command("verify a.safetensors", len(problems))
        assert result.verdicts[0].note == "packed, plain, all zero"
    (found,) = json.loads(command("verify a.safetensors --json", 1))["checkpoints"]
    assert found["warnings"] == result.warnings


def test_tied_weights(command):
    model = prune(Tied(), "1:8")
    model.embed.weight.data = nm_prune(model.embed.weight.data, "1:8")
    torch.save(model.state_dict(), "a.pt")
    command("export a.pt -o a.safetensors")
    result = verify("a.safetensors", include="head")
    assert result.ok
    assert {v.key: v.note for v in result.verdicts} == {
        "embed.weight": "packed, plain",
        "middle.weight": "packed, plain",
        "head.weight": "packed, plain, the same tensor as 'embed.weight'",
    }
    assert result.share == 1


def test_a_truncated_file(model):
    path = Path(FILE)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        verify(path)
