"""``lightning-nm export`` from every kind of checkpoint, and what it says of those that are not N:M."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, load_packed, pack, save_packed, unpacked_state_dict
from lightning_nm.export import PackedFile
from lightning_nm.export.graphs import export_onnx, export_pt2
from lightning_nm.export.packed_file import write_safetensors
from lightning_nm.export.patterns import pattern_of
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.functional import nm_prune
from lightning_nm.pattern import NMPattern
from tests.support.experts import Experts, TransposedExperts
from tests.support.lightning_models import Data, Net, callback, make_trainer, new_model
from tests.support.packed_models import Tied, assert_equal_states, copied, small

NET = "--model tests.support.lightning_models.Net"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "a.ckpt"
    trainer = make_trainer(path.parent, [callback()], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint(path)
    return path


@pytest.fixture
def checkpoint(trained):
    """The checkpoint "a.ckpt" of a Lightning training: its state dict."""
    Path("a.ckpt").symlink_to(trained)
    return torch.load("a.ckpt", weights_only=True)["state_dict"]


def load(name):
    return torch.load(name, weights_only=True)


def test_a_lightning_checkpoint_has_its_patterns(checkpoint, command):
    said = command("export a.ckpt -o a.safetensors")
    assert re.search(r"net.6.weight +2:4 +plain", said)
    assert re.search(r"net.8.weight +dense .*not masked", said)
    assert "2 of 13 tensors packed, at 0.531 of their dense size" in said
    assert list(PackedFile("a.safetensors").packed) == ["net.3.weight", "net.6.weight"]
    model = load_packed(Net(), "a.safetensors")
    assert_equal_states(unpacked_state_dict(model), checkpoint)
    command("export a.ckpt -o a.safetensors --prefix net.")
    load_packed(Net().net, "a.safetensors")
    command("export a.safetensors --to torch -o b.pt --prefix 6.")
    assert list(load("b.pt")) == ["bias", "weight"]
    command("export a.ckpt -o layer.safetensors --prefix net.3.")
    assert list(PackedFile("layer.safetensors").packed) == ["weight"]
    assert sorted(os.listdir()) == ["a.ckpt", "a.safetensors", "b.pt", "layer.safetensors"]


def test_a_folder_of_transformers_whose_weights_are_transposed(command):
    """GPT-2's Conv1D has weights [in, out]."""
    transformers = pytest.importorskip("transformers")
    settings = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    names = [name for name, weight in model.named_parameters() if ".c_" in name and weight.ndim > 1]
    for name in names:
        weight = model.get_parameter(name)
        weight.data = nm_prune(weight.data, "1:16", 0)
    model.save_pretrained("in")
    command("export in -o a.safetensors")
    assert sorted(PackedFile("a.safetensors").packed) == sorted(names)
    x = torch.arange(8)[None]
    loaded = load_packed(transformers.GPT2LMHeadModel(config), "a.safetensors", kernels="sparse")
    torch.testing.assert_close(loaded(x).logits, model(x).logits, rtol=1e-5, atol=1e-5)
    command("export in --to torch -o out")
    again = transformers.AutoModelForCausalLM.from_pretrained("out")
    assert torch.equal(again(x).logits, model(x).logits)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_plain_state_dict(command, suffix):
    state = small("1:16").state_dict()
    if suffix == "pt":
        torch.save(state, "in.pt")
    else:
        write_safetensors("in.safetensors", state, {})
    said = command(f"export in.{suffix} -o a.safetensors")
    # 1/16, and 4 bits in 16 x 32.
    assert "3 of 12 tensors packed, at 0.070 of their dense size" in said
    assert_equal_states(unpacked_state_dict(load_packed(small(seed=1), "a.safetensors")), state)
    for name in ("b.pt", "b.safetensors"):
        command(f"export a.safetensors --to torch -o {name}")
        assert_equal_states(read_checkpoint(name).weights, state)


@pytest.mark.parametrize(
    ("weight", "pattern", "layout"),
    [
        (nm_prune(torch.randn(8, 32), "2:4"), "2:4", "plain"),
        (nm_prune(torch.randn(32, 8), "1:16", 0), "1:16", "transposed"),
        (nm_prune(torch.randn(8, 48), "1:8").view(8, 16, 3), "1:8", "flat"),
        (nm_prune(torch.randn(8, 16, 3), "1:8", 1), "1:8", "plain"),
        (torch.zeros(4, 4), "1:4", "plain"),
    ],
)
def test_the_pattern_of_a_weight(weight, pattern, layout):
    found = pattern_of(weight)
    assert (str(found.pattern), found.layout) == (pattern, layout)


@pytest.mark.parametrize(
    ("weight", "pattern", "reason"),
    [
        (torch.ones(8, 32), None, "64 of 64 blocks hold more than 2 of 4"),
        (torch.ones(7, 7), None, "no axis is a multiple of 4"),
        (nm_prune(torch.ones(8, 32), "7:8"), None, "56 of 64 blocks hold more than 2 of 4"),
        (torch.ones(32), None, "float32 of shape [32]"),
        (torch.ones(4, 4).int(), None, "int32 of shape [4, 4]"),
        (torch.zeros(8, 512), NMPattern(1, 512), "blocks of more than 256 are not packed"),
    ],
)
def test_why_a_weight_has_no_pattern(weight, pattern, reason):
    found = pattern_of(weight, pattern)
    assert found.pattern is None
    assert found.reason == reason


def test_a_pattern_that_is_given():
    weight = nm_prune(torch.randn(8, 32), "2:4")
    assert pattern_of(weight, NMPattern(4, 8)).pattern == NMPattern(4, 8)


def test_partly_sparse(command):
    state = small("2:4").state_dict()
    state["5.weight"][0, :4] = 1
    torch.save(state, "in.pt")
    said = command("export in.pt --pattern 2:4 -o a.safetensors")
    assert re.search(r"5.weight +dense.*1 of 512 blocks", said)
    assert list(PackedFile("a.safetensors").packed) == ["0.weight", "4.weight"]


def save_inputs():
    """Files for :func:`test_what_is_refused`."""
    torch.save(small("1:16").state_dict(), "in.pt")
    torch.save(small(), "pickle.pt")
    torch.save(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6)).state_dict(), "dense.pt")
    torch.save({"weight": small()[4].weight.half()}, "half.pt")
    weights = {f"{n}.weight": nm_prune(torch.randn(8, 16), "2:4") for n in range(3)}
    torch.save({**weights, "head.weight": torch.randn(8, 16)}, "two_four.pt")
    torch.save({"words.weight": torch.full((4, 8), torch.nan), **weights}, "nan.pt")
    os.mkdir("folder.safetensors")


PACKED = "in.pt -o a.safetensors"
DENSE = "'0.weight': 16 of 16 blocks hold more than 2 of 4; '1.weight': 12 of 12 blocks hold more"
INT8 = "nan.pt -o a.safetensors --dtype int8"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("none.ckpt -o a.safetensors", "neither a file nor a folder"),
        ("pickle.pt -o a.safetensors", "as tensors alone"),
        ("in.pt -o a.pt", "--to packed writes .safetensors, not 'a.pt'"),
        ("in.pt --to torch -o a", "--to torch writes .pt or .pth or .bin or .safetensors"),
        ("in.pt --to torch -o a.pt --pattern 2:4", "--pattern is for --to packed"),
        ("in.pt --to torch -o a.pt --dtype int8", "--dtype is for --to packed"),
        (f"{PACKED} --precision float16", "--precision is for --to coreml"),
        (f"{PACKED} --model x.Y", "--model is for --to onnx, pt2"),
        ("in.pt --to onnx -o a.onnx", "--to onnx needs the model's class: --model train.Net"),
        ("in.pt --to coreml -o a.mlpackage", "--to coreml needs the model's class"),
        ("in.pt --to pt2 -o a.x --model torch.nn.Linear", "--to pt2 writes .pt2"),
        ("in.pt --to pt2 -o a.pt2 --model no.Net", "--model no.Net: No module named 'no'"),
        ("in.pt --to pt2 -o a.pt2 --model torch.nn.Flatten", "Unexpected key"),
        (f"in.pt --to pt2 -o a.pt2 {NET}", "Missing key"),
        (f"{PACKED} --prefix x.", "no key of 'in.pt' begins with 'x.': they are '0.weight'"),
        (f"{PACKED} --pattern 5:4", "prunes nothing"),
        ("in.pt -o folder.safetensors", "is a folder: name a file"),
        *(
            (
                f"in.pt --to {to} -o nodir/a.{suffix} {more}",
                f"there is no folder 'nodir' for 'a.{suffix}': make it first",
            )
            for to, suffix, more in (
                ("packed", "safetensors", ""),
                ("torch", "pt", ""),
                ("onnx", "onnx", NET),
                ("pt2", "pt2", NET),
                ("coreml", "mlpackage", NET),
            )
        ),
        ("dense.pt -o a.safetensors", DENSE),
        ("dense.pt -o a.safetensors --pattern 2:4", DENSE),
        ("two_four.pt -o a.safetensors --pattern 1:4", "is 1:4 sparse: '0.weight': "),
        (
            "two_four.pt -o a.safetensors --pattern 1:4",
            ". 3 of 4 matrices are 2:4: give that pattern\n",
        ),
        ("half.pt -o a.safetensors --dtype int8", "has no int8 form: float16"),
        (f"{PACKED} --int8-embeddings words", "are for --dtype int8"),
        (f"{PACKED} --int8-experts words", "are for --dtype int8"),
        (f"{INT8} --int8-embeddings 0.*", "'0.*' matches no matrix that is not N:M"),
        (f"{INT8} --int8-experts *", "--int8-experts '*' matches no N:M weight of three axes"),
        (f"{INT8} --int8-embeddings *", "'words.weight' of"),
    ],
)
def test_what_is_refused(command, words, message):
    save_inputs()
    there = sorted(os.listdir())
    said = command(f"export {words}", 2)
    assert message in said
    assert len(said.splitlines()) == 1 or "key" in message
    assert sorted(os.listdir()) == there


def test_masked_layers_that_are_not_sparse(checkpoint, command):
    content = load("a.ckpt")
    for value in content["state_dict"].values():
        value.fill_(1)
    torch.save(content, "dense.ckpt")
    said = command("export dense.ckpt -o a.safetensors", 2)
    assert "no weight of" in said
    assert "'net.6.weight': 2048 of 2048 blocks hold more than 2 of 4" in said


def test_a_folder_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setattr("lightning_nm.export.atomic_write.os.access", lambda *_: False)
    with pytest.raises(PermissionError, match=r"nothing can be written into the folder '\.'"):
        save_packed(pack(small()), "x.safetensors")


def test_a_folder_of_transformers(command):
    state = small("1:16").state_dict()
    folder, index = Path("in"), Path("in/model.safetensors.index.json")
    folder.mkdir()
    places = {key: f"{'ab'[number % 2]}.safetensors" for number, key in enumerate(state)}
    for name in ("a.safetensors", "b.safetensors"):
        part = {key: state[key] for key, place in places.items() if place == name}
        write_safetensors(folder / name, part, {})
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "vocab.txt").write_text("a")
    index.write_text(json.dumps({"weight_map": places}))
    command("export in -o a.safetensors")
    load_packed(small("1:16", seed=1), "a.safetensors")
    command("export in --to torch -o out")
    assert sorted(os.listdir("out")) == ["config.json", "model.safetensors", "vocab.txt"]
    assert_equal_states(read_checkpoint("out").weights, state)
    assert "exists" in command("export in --to torch -o out", 2)
    assert sorted(os.listdir()) == ["a.safetensors", "in", "out"]


@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_experts_of_a_state_are_packed_and_loaded(command, kind):
    model = kind()
    sparsifier = NMSparsifier(model, "1:4", "ste").attach()
    callbacks = {"NMSparsityCallback": sparsifier.state_dict()}
    torch.save({"state_dict": model.state_dict(), "callbacks": callbacks}, "a.ckpt")
    command("export a.ckpt -o a.safetensors")
    packed = PackedFile("a.safetensors").packed
    patterns = {key: str(tensor.pattern) for key, tensor in packed.items()}
    assert patterns == {"up": "1:4", "down": "1:4"}
    loaded = load_packed(kind(), "a.safetensors")
    assert_equal_states(unpacked_state_dict(loaded), model.state_dict())


def test_a_tied_weight_is_packed_once_and_stays_tied(command):
    model = Tied()
    sparsifier = NMSparsifier(model, "2:4", "ste", include="embed", skip_first_last=False).attach()
    callbacks = {"NMSparsityCallback": sparsifier.state_dict()}
    torch.save({"state_dict": model.state_dict(), "callbacks": callbacks}, "a.ckpt")
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    command("export a.ckpt -o a.safetensors")
    command("export a.safetensors -o b.safetensors")
    for path in ("a.safetensors", "b.safetensors"):
        file = PackedFile(path)
        assert "embed.weight" in file.packed
        assert file.aliases == {"head.weight": "embed.weight"}
        assert_equal_states(unpacked_state_dict(load_packed(Tied(), path)), expected)


# -------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.slow
def test_a_program_of_torch(checkpoint, command):
    command(f"export a.ckpt -o a.pt2 --to pt2 {NET} --input 2x1x8x8")
    assert sorted(os.listdir()) == ["a.ckpt", "a.pt2"]
    model = Net().eval()
    model.load_state_dict(checkpoint)
    program = torch.export.load("a.pt2").module()
    for batch in (2, 5):
        x = torch.randn(batch, 1, 8, 8)
        assert torch.allclose(program(x), model(x), atol=1e-6)


@pytest.mark.slow
def test_a_packed_program_is_small():
    dense = small("1:16")
    x = (torch.randn(2, 16, 4, 4),)
    for kernels in ("reference", "sparse"):
        export_pt2(pack(copied(dense), kernels=kernels), x, "a.pt2")
        program = torch.export.load("a.pt2")
        assert torch.allclose(program.module()(*x), dense(*x), rtol=1e-4, atol=1e-5)
        dense_bytes = sum(p.nbytes for p in dense.parameters())
        assert Path("a.pt2").stat().st_size < 130_000 < dense_bytes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the exporter's own packages
def test_onnx(checkpoint, command):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    command(f"export a.ckpt -o a.onnx --to onnx {NET} --input 2x1x8x8")
    assert sorted(os.listdir()) == ["a.ckpt", "a.onnx"]
    session = onnxruntime.InferenceSession("a.onnx", providers=["CPUExecutionProvider"])
    model = Net().eval()
    model.load_state_dict(checkpoint)
    x = torch.randn(5, 1, 8, 8)
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(found), model(x), atol=1e-5)
    assert export_onnx(nn.Linear(4, 4), (torch.randn(2, 4),), "b.onnx") < 1e-5


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ("", "give the shape of each input, for example --input 2x3x32x32"),
        ("--input 2xx8", "a shape is written 2x3x32x32"),
        ("--input 2x1x9x9", "Net does not take --input 2x1x9x9: .*shapes cannot be multiplied"),
        ("--input 2x1x8x8:int64", "Net does not take --input 2x1x8x8:int64: "),
        ("--input 2x1x8x8 --input 2", "x8 --input 2: .* takes 2 positional arguments"),
    ],
)
@pytest.mark.parametrize("to", ["onnx", "pt2", "coreml"])
def test_inputs_that_the_model_does_not_take_are_one_line(checkpoint, command, to, inputs, said):
    output = "a.mlpackage" if to == "coreml" else f"a.{to}"
    found = command(f"export a.ckpt -o {output} --to {to} {NET} {inputs}", 2)
    assert re.search(f"^lightning-nm export: .*{said}", found)
    assert len(found.splitlines()) == 1
    assert os.listdir() == ["a.ckpt"]


def test_without_onnx(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[onnx\]'"):
        export_onnx(nn.Linear(4, 4), (torch.randn(2, 4),), "a.onnx")
