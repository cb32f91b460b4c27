"""``lightning-nm export`` from every kind of checkpoint, and what it says of those that are not N:M."""

import json
import os
import re

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.cli import main
from lightning_nm.export import PackedFile
from lightning_nm.export.graphs import export_onnx, export_pt2
from lightning_nm.export.packed_file import write_safetensors
from lightning_nm.export.patterns import pattern_of
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.functional import nm_prune
from lightning_nm.pattern import NMPattern
from tests.support.experts import Experts, TransposedExperts
from tests.support.lightning_models import Data, Net, callback, make_trainer, new_model
from tests.support.packed_models import assert_equal_states, copied, small


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "a.ckpt"
    trainer = make_trainer(path.parent, [callback()], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(path)
    return path


def run(*words):
    return main(["export", *map(str, words)])


def test_a_lightning_checkpoint_has_its_patterns(checkpoint, tmp_path, capsys):
    output = tmp_path / "a.safetensors"
    assert run(checkpoint, "-o", output) == 0
    said = capsys.readouterr().out
    assert re.search(r"net.6.weight +2:4 +plain", said)
    assert re.search(r"net.8.weight +dense .*not masked", said)
    assert "2 of 13 tensors packed, at 0.531 of their dense size" in said
    assert list(PackedFile(output).packed) == ["net.3.weight", "net.6.weight"]
    model = load_packed(Net(), output)
    assert_equal_states(
        unpacked_state_dict(model), torch.load(checkpoint, weights_only=True)["state_dict"]
    )
    assert os.listdir(tmp_path) == ["a.safetensors"]
    assert run(checkpoint, "--to", "packed", "-o", output, "--prefix", "net.") == 0
    load_packed(Net().net, output)
    assert run(output, "--to", "torch", "-o", tmp_path / "b.pt", "--prefix", "6.") == 0
    assert list(torch.load(tmp_path / "b.pt", weights_only=True)) == ["bias", "weight"]


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_plain_state_dict(tmp_path, suffix, capsys):
    dense, source = small("1:16"), tmp_path / f"in.{suffix}"
    state = dense.state_dict()
    if suffix == "pt":
        torch.save(state, source)
    else:
        write_safetensors(source, state, {})
    assert run(source, "-o", tmp_path / "a.safetensors") == 0
    assert (
        "3 of 12 tensors packed, at 0.070 of their dense size" in capsys.readouterr().out
    )  # 1/16 + 4 bits in 16 x 32
    assert_equal_states(
        unpacked_state_dict(load_packed(small("1:16", seed=1), tmp_path / "a.safetensors")), state
    )
    for name in ("b.pt", "b.safetensors"):
        assert run(tmp_path / "a.safetensors", "--to", "torch", "-o", tmp_path / name) == 0
        assert_equal_states(read_checkpoint(tmp_path / name).weights, state)


def test_patterns_are_found_for_each_weight(tmp_path):
    weights = {
        "a": nm_prune(torch.randn(8, 32), "2:4"),
        "b": nm_prune(torch.randn(32, 8), "1:16", 0),
    }
    weights |= {
        "c": torch.randn(8, 32),
        "d": nm_prune(torch.randn(8, 48), "1:8").view(8, 16, 3).contiguous(),
    }
    weights |= {
        "e": nm_prune(torch.randn(8, 16, 3), "1:8", 1),
        "f": torch.zeros(4, 4),
        "g": torch.randn(7, 7),
    }
    weights |= {
        "h": nm_prune(torch.randn(8, 32), "7:8"),
        "i": torch.randn(32),
        "j": torch.ones(4, 4).int(),
    }
    found = {key: pattern_of(weight) for key, weight in weights.items()}
    assert {
        key: (str(each.pattern), each.layout) for key, each in found.items() if each.pattern
    } == {
        "a": ("2:4", "plain"),
        "b": ("1:16", "transposed"),
        "d": ("1:8", "flat"),
        "e": ("1:8", "plain"),
        "f": ("1:4", "plain"),
    }
    assert found["c"].reason == "64 of 64 blocks hold more than 2 of 4"
    assert found["g"].reason == "no axis is a multiple of 4"
    assert pattern_of(weights["a"], NMPattern(4, 8)).pattern == NMPattern(4, 8)
    assert (
        pattern_of(weights["a"], NMPattern(1, 512)).reason
        == "blocks of more than 256 are not packed"
    )


def test_partly_sparse(tmp_path, capsys):
    state = small("2:4").state_dict()
    state["5.weight"] = state["5.weight"].clone()
    state["5.weight"][0, :4] = 1
    torch.save(state, tmp_path / "in.pt")
    assert run(tmp_path / "in.pt", "--pattern", "2:4", "-o", tmp_path / "a.safetensors") == 0
    said = capsys.readouterr().out
    assert re.search(r"5.weight +dense.*1 of 512 blocks", said)
    assert list(PackedFile(tmp_path / "a.safetensors").packed) == ["0.weight", "4.weight"]


def test_another_pattern_than_the_weights_have(tmp_path, capsys):
    """It is named."""
    weights = {f"{n}.weight": nm_prune(torch.randn(8, 16), "2:4") for n in range(3)}
    torch.save({**weights, "head.weight": torch.randn(8, 16)}, tmp_path / "a.pt")
    words = ["export", str(tmp_path / "a.pt"), "-o", str(tmp_path / "a.safetensors"), "--pattern"]
    assert main([*words, "1:4"]) == 2
    message = capsys.readouterr().err
    assert "no weight of" in message
    assert re.search(
        r"is 1:4 sparse: '0.weight': \d+ of 32 blocks hold more than 1 of 4; ", message
    )
    assert message.endswith(". 3 of 4 matrices are 2:4: give that pattern\n")
    assert not (tmp_path / "a.safetensors").exists()
    assert main([*words, "2:4"]) == 0


def test_nothing_sparse(checkpoint, tmp_path, capsys):
    torch.save(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)).state_dict(), tmp_path / "in.pt")
    for words in ((), ("--pattern", "2:4")):
        assert run(tmp_path / "in.pt", "-o", tmp_path / "a.safetensors", *words) == 2
        said = capsys.readouterr().err
        assert (
            "'0.weight': 16 of 16 blocks hold more than 2 of 4; '1.weight': 12 of 12 blocks hold more"
            in said
        )
    content = torch.load(checkpoint, weights_only=True)
    for value in content["state_dict"].values():
        value.fill_(1)
    torch.save(content, tmp_path / "dense.ckpt")
    assert run(tmp_path / "dense.ckpt", "-o", tmp_path / "a.safetensors") == 2
    said = capsys.readouterr().err
    assert "no weight of" in said
    assert "'net.6.weight': 2048 of 2048 blocks hold more than 2 of 4" in said
    assert not (tmp_path / "a.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.ckpt", "-o", "a.safetensors"), "neither a file nor a folder"),
        (("in.pt", "-o", "a.pt"), "--to packed writes .safetensors, not 'a.pt'"),
        (
            ("in.pt", "--to", "torch", "-o", "a"),
            "--to torch writes .pt or .pth or .bin or .safetensors",
        ),
        (
            ("in.pt", "--to", "torch", "-o", "a.pt", "--pattern", "2:4"),
            "--pattern is for --to packed",
        ),
        (
            ("in.pt", "--to", "onnx", "-o", "a.onnx"),
            "--to onnx needs the model's class: --model train.Net",
        ),
        (
            ("in.pt", "--to", "pt2", "-o", "a.x", "--model", "torch.nn.Linear"),
            "--to pt2 writes .pt2",
        ),
        (("in.pt", "--model", "x.Y", "-o", "a.safetensors"), "--model is for --to onnx, pt2"),
        (
            ("in.pt", "--prefix", "x.", "-o", "a.safetensors"),
            "no key of 'in.pt' begins with 'x.': they are '0.weight'",
        ),
        (("in.pt", "--pattern", "5:4", "-o", "a.safetensors"), "prunes nothing"),
        (("in.pt", "-o", "none/a.safetensors"), "there is no folder 'none' for 'a.safetensors'"),
        (
            ("in.pt", "--to", "pt2", "-o", "a.pt2", "--model", "no.Net"),
            "--model no.Net: No module named 'no'",
        ),
        (("in.pt", "--to", "pt2", "-o", "a.pt2", "--model", "torch.nn.Flatten"), "Unexpected key"),
        (("pickle.pt", "-o", "a.safetensors"), "as tensors alone"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    torch.save(small("1:16").state_dict(), "in.pt")
    torch.save(small(), "pickle.pt")
    assert run(*words) == 2
    assert message in capsys.readouterr().err
    assert sorted(os.listdir()) == ["in.pt", "pickle.pt"]


def test_a_folder_of_transformers(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    state = dict(small("1:16").state_dict())
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (key, value) in enumerate(state.items()):
        parts[sorted(parts)[number % 2]][key] = value
    for name, part in parts.items():
        write_safetensors(folder / name, part, {})
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "vocab.txt").write_text("a")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert run(folder, "-o", tmp_path / "a.safetensors") == 0
    load_packed(small("1:16", seed=1), tmp_path / "a.safetensors")
    assert run(folder, "--to", "torch", "-o", tmp_path / "out") == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "vocab.txt"]
    assert_equal_states(read_checkpoint(tmp_path / "out").weights, state)
    assert run(folder, "--to", "torch", "-o", tmp_path / "out") == 2
    assert "exists" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "in", "out"]
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "../in/a.safetensors"}}'
    )
    assert run(folder, "-o", tmp_path / "b.safetensors") == 2
    assert "which is not a file in its folder" in capsys.readouterr().err
    (folder / "model.safetensors.index.json").write_text("[]")
    assert run(folder, "-o", tmp_path / "b.safetensors") == 2
    assert "it is no index with a `weight_map`" in capsys.readouterr().err
    (folder / "model.safetensors.index.json").unlink()
    assert run(folder, "-o", tmp_path / "b.safetensors") == 2
    assert "holds no model: expected one of" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings)).eval()
    for name, parameter in model.named_parameters():
        if ".c_" in name and parameter.dim() == 2:
            parameter.data = nm_prune(parameter.data, "1:16", 0)
    model.save_pretrained(tmp_path / "in")
    x = torch.randint(0, 64, (2, 8))
    expected = model(x).logits
    assert run(tmp_path / "in", "-o", tmp_path / "a.safetensors") == 0
    new = transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings))
    assert torch.allclose(
        load_packed(new, tmp_path / "a.safetensors", kernels="sparse")(x).logits,
        expected,
        atol=1e-5,
    )
    assert len(PackedFile(tmp_path / "a.safetensors").packed) == 4
    assert run(tmp_path / "in", "--to", "torch", "-o", tmp_path / "out") == 0
    assert torch.equal(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(x).logits, expected
    )


@pytest.mark.slow
def test_a_program_of_torch(checkpoint, tmp_path, capsys):
    words = ("--to", "pt2", "--model", "tests.support.lightning_models.Net", "--input", "2x1x8x8")
    assert run(checkpoint, "-o", tmp_path / "a.pt2", *words) == 0
    assert os.listdir(tmp_path) == ["a.pt2"]
    model = Net().eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    program = torch.export.load(tmp_path / "a.pt2").module()
    for batch in (2, 5):
        x = torch.randn(batch, 1, 8, 8)
        assert torch.allclose(program(x), model(x), atol=1e-6)
    assert run(checkpoint, "-o", tmp_path / "b.pt2", *words[:4]) == 2
    assert "--input 2x3x32x32" in capsys.readouterr().err
    assert run(checkpoint, "-o", tmp_path / "b.pt2", *words[:4], "--input", "2xx8") == 2
    assert "a shape is written 2x3x32x32" in capsys.readouterr().err


@pytest.mark.slow
def test_a_packed_program_is_small(tmp_path):
    from lightning_nm import pack

    dense = small("1:16")
    x = (torch.randn(2, 16, 4, 4),)
    for kernels in ("reference", "sparse"):
        model = pack(copied(dense), kernels=kernels)
        export_pt2(model, x, tmp_path / "a.pt2")
        program = torch.export.load(tmp_path / "a.pt2")
        assert torch.allclose(program.module()(*x), dense(*x), rtol=1e-4, atol=1e-5)
        assert (
            (tmp_path / "a.pt2").stat().st_size
            < 130_000
            < sum(p.nbytes for p in dense.parameters())
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter's own packages
def test_onnx(checkpoint, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    words = ("--to", "onnx", "--model", "tests.support.lightning_models.Net", "--input", "2x1x8x8")
    assert run(checkpoint, "-o", tmp_path / "a.onnx", *words) == 0
    assert os.listdir(tmp_path) == ["a.onnx"]
    session = onnxruntime.InferenceSession(tmp_path / "a.onnx", providers=["CPUExecutionProvider"])
    model = Net().eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    x = torch.randn(5, 1, 8, 8)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), model(x), atol=1e-5)
    linear = nn.Linear(4, 4).eval()
    assert export_onnx(linear, (torch.randn(2, 4),), tmp_path / "b.onnx") < 1e-5


@pytest.mark.parametrize("to", ["onnx", "pt2", "coreml"])
def test_inputs_that_the_model_does_not_take_are_one_line(checkpoint, tmp_path, capsys, to):
    output = tmp_path / f"a.{'mlpackage' if to == 'coreml' else to}"
    words = [checkpoint, "-o", output, "--to", to, "--model", "tests.support.lightning_models.Net"]
    for inputs, reason in [
        (["--input", "2x1x9x9"], "shapes cannot be multiplied"),
        (["--input", "2x1x8x8:int64"], ""),
        (["--input", "2x1x8x8", "--input", "2"], "takes 2 positional arguments"),
    ]:
        assert run(*words, *inputs) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"lightning-nm export: Net does not take {' '.join(inputs)}: ")
        assert reason in said
    assert os.listdir(tmp_path) == []


def test_without_onnx(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[onnx\]'"):
        export_onnx(nn.Linear(4, 4), (torch.randn(2, 4),), tmp_path / "a.onnx")


@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_experts_of_a_state_are_packed_and_loaded(tmp_path, kind):
    torch.manual_seed(0)
    model = kind()
    sparsifier = NMSparsifier(model, "1:4", "ste").attach()
    state = {
        "state_dict": model.state_dict(),
        "callbacks": {"NMSparsityCallback": sparsifier.state_dict()},
    }
    torch.save(state, tmp_path / "last.ckpt")
    assert run(tmp_path / "last.ckpt", "-o", tmp_path / "packed.safetensors") == 0
    file = PackedFile(tmp_path / "packed.safetensors")
    assert {key: str(tensor.pattern) for key, tensor in file.packed.items()} == {
        "up": "1:4",
        "down": "1:4",
    }
    loaded = kind()
    load_packed(loaded, tmp_path / "packed.safetensors")
    assert_equal_states(unpacked_state_dict(loaded), model.state_dict())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def test_a_tied_weight_is_packed_once_and_stays_tied(tmp_path):
    model = Tied()
    sparsifier = NMSparsifier(model, "2:4", "ste", include="embed", skip_first_last=False).attach()
    state = sparsifier.state_dict()
    sparsifier.bake()
    sparsifier.detach()
    torch.save(
        {"state_dict": model.state_dict(), "callbacks": {"NMSparsityCallback": state}},
        tmp_path / "a.ckpt",
    )
    first, again = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert run(tmp_path / "a.ckpt", "-o", first) == 0
    assert run(first, "-o", again) == 0
    for path in (first, again):
        file = PackedFile(path)
        assert list(file.packed) == ["embed.weight"]
        assert file.aliases == {"head.weight": "embed.weight"}
        assert_equal_states(unpacked_state_dict(load_packed(Tied(), path)), model.state_dict())


@pytest.mark.parametrize("to", ["packed", "torch", "onnx", "pt2"])
def test_a_folder_that_is_not_there_is_named(tmp_path, capsys, to):
    suffix = {"packed": "safetensors", "torch": "pt", "onnx": "onnx", "pt2": "pt2"}[to]
    target = tmp_path / "nodir" / f"x.{suffix}"
    more = ["--model", "train.Net"] if to in ("onnx", "pt2") else []
    assert main(["export", "none.ckpt", "--to", to, "-o", str(target), *more]) == 2
    said = capsys.readouterr().err
    assert (
        said
        == f"lightning-nm export: there is no folder '{tmp_path / 'nodir'}' for '{target.name}': make it first\n"
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_nm.export.atomic_write.os.access", lambda *_: False)
    with pytest.raises(
        PermissionError, match=f"nothing can be written into the folder '{tmp_path}'"
    ):
        save_packed(pack(small()), tmp_path / "x.safetensors")
