"""Core ML packages: what is written, what is read back from it without a Mac, and what is refused."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier, pack
from lightning_nm.commands.export import _coreml_report
from lightning_nm.export import CoreMLPackage, CoreMLReport, CoreMLWritten, export_coreml, verify
from lightning_nm.functional import is_nm, nm_prune
from tests.support.experts import Experts
from tests.support.lightning_models import Data, callback, make_trainer, new_model
from tests.support.mil import Program
from tests.support.packed_models import Tied, copied, small

FILE = Path("a.mlpackage")
WEIGHTS = FILE / "Data/com.apple.CoreML/weights/weight.bin"
X = torch.randn(2, 32)
IMAGES = torch.randn(2, 16, 4, 4)  # an input of small()


@pytest.fixture(scope="module")
def coremltools():
    return pytest.importorskip(
        "coremltools", reason="coremltools is not installed: the extra coreml"
    )


def with_coremltools(test):
    """Marks of a test that converts."""
    for mark in (
        pytest.mark.slow,
        pytest.mark.filterwarnings("ignore"),
        pytest.mark.usefixtures("coremltools"),
    ):
        test = mark(test)
    return test


class Layer(nn.Linear):
    """One N:M layer; the command makes it without arguments."""

    def __init__(self, pattern="2:4", rows=16, columns=32):
        super().__init__(columns, rows, bias=False)
        self.weight.data = nm_prune(self.weight.data, pattern)


# Without coremltools.


def test_without_coremltools(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "coremltools", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[coreml\]'"):
        export_coreml(Layer(), (X,), FILE)
    torch.save(Layer().state_dict(), "a.pt")
    words = f"export a.pt --to coreml -o {FILE} --model tests.export.test_coreml.Layer"
    assert "pip install -e '.[coreml]'" in command(f"{words} --input 1x32", 2)
    assert os.listdir() == ["a.pt"]
    FILE.mkdir()
    with pytest.raises(ValueError, match=r"a.mlpackage'.*pip install -e '\.\[coreml\]'"):
        verify(FILE)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ("a.mlmodel", ValueError, "--to coreml writes .mlpackage, not 'a.mlmodel'"),
        ("a", ValueError, "--to coreml writes .mlpackage, not 'a'"),
        ("there.mlpackage", ValueError, "'there.mlpackage' exists: give a package that does not"),
        ("no/a.mlpackage", FileNotFoundError, "there is no folder 'no' for 'a.mlpackage'"),
    ],
)
def test_outputs_that_are_refused(command, output, error, message):
    os.mkdir("there.mlpackage")
    with pytest.raises(error, match=message):
        export_coreml(Layer(), (X,), output)
    # The command says it before it reads the checkpoint.
    assert message in command(f"export none.ckpt --to coreml -o {output} --model a.B", 2)
    assert os.listdir() == ["there.mlpackage"]


def test_an_unknown_precision():
    with pytest.raises(ValueError, match="precision='int8' is unknown: use 'float32' or 'float16'"):
        export_coreml(Layer(), (X,), FILE, precision="int8")


def test_what_is_printed():
    written = [
        CoreMLWritten("a", "2:4", "p_a", ("linear",), True, 0.5, 60, 100),
        CoreMLWritten("b", "1:4", "p_b", ("conv", "linear"), True, 0.25, 30, 100),
        CoreMLWritten("c", "2:4", "p_c", ("linear",), False, 0.0, 100, 100),
        CoreMLWritten("d", "2:4"),
    ]
    table, *sentences = _coreml_report(CoreMLReport(600, 1000, written), FILE)
    text = " ".join(sentences)
    assert "2 of 4 N:M weights as nonzeros and a bit mask (2 linear, 1 conv)" in text
    assert "600 bytes, 0.600 of the dense package's 1000" in text
    assert "not run: that needs macOS, and no speed is claimed" in text
    names = ["p_a", "p_b", "dense: p_c", "not in the program"]
    assert list(table.columns[5].cells) == names
    assert list(table.columns[4].cells) == ["0.600", "0.300", "1.000", ""]


# Packages are read back as the model was.


@with_coremltools
@pytest.mark.parametrize("precision", ["float32", "float16"])
@pytest.mark.parametrize(
    ("pattern", "rows", "columns"), [("2:4", 2, 32), ("5:16", 9, 64), ("1:32", 3, 96)]
)
def test_values_are_those_of_the_model(pattern, rows, columns, precision):
    layer = Layer(pattern, rows, columns)
    x = torch.randn(1, columns)
    (written,) = export_coreml(layer, (x,), FILE, pattern, precision=precision).weights
    assert written.is_sparse
    expected = layer.weight.detach().to(getattr(torch, precision))
    assert torch.equal(CoreMLPackage(FILE).read(written.name), expected)
    # A value of each nonzero, and one bit of each entry.
    nonzeros = int(torch.count_nonzero(expected))
    assert written.bytes == nonzeros * expected.itemsize + -(-expected.numel() // 8)
    assert written.dense_bytes == expected.nbytes
    assert verify(FILE).ok


@with_coremltools
@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
def test_layers_of_all_kinds(pattern):
    model = small(pattern)
    # Without training a batch norm is nearly the identity.
    generator = torch.Generator().manual_seed(1)
    for tensor in (*model[1].parameters(), *model[1].buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5, generator=generator)
    before = copied(model.state_dict())
    report = export_coreml(model.train(), (IMAGES,), FILE)
    assert model.training
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert os.listdir() == [FILE.name]
    assert report.operators == {"conv": 1, "linear": 2}
    assert report.bytes < {"2:4": 0.6, "1:16": 0.3}[pattern] * report.dense_bytes
    package = CoreMLPackage(FILE)
    found = {written.key: package.read(written.name) for written in report.weights}
    assert all(is_nm(weight, pattern, dim=1) for weight in found.values())
    # The converter multiplies the batch norm into the convolution, and no other weight changes.
    scale = model[1].weight / (model[1].running_var + model[1].eps).sqrt()
    folded = model[0].weight * scale[:, None, None, None]
    assert torch.allclose(found["0.weight"], folded, rtol=1e-5, atol=1e-7)
    assert torch.equal(found["4.weight"], model[4].weight)
    dense = [name for name, weight in package.weights.items() if not weight.is_sparse]
    assert [tuple(package.read(name).shape) for name in dense] == [(3, 32)]
    # As the operators are defined: they are run by torch, from the weights in the file.
    expected = model.eval()(IMAGES)
    assert torch.allclose(Program(FILE)(IMAGES), expected, rtol=1e-4, atol=1e-4)


class Transposed(nn.Module):
    """A weight [in, out], and one of experts."""

    def __init__(self):
        super().__init__()
        self.left = nn.Parameter(nm_prune(torch.randn(32, 16), "1:4", 0))
        self.up = nn.Parameter(nm_prune(torch.randn(3, 16, 24), "1:8", 1))
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x):
        return torch.bmm(torch.addmm(self.bias, x, self.left).expand(3, -1, -1), self.up)


class Differences(Layer):
    """An operator that is taken apart."""

    def forward(self, x):
        return super().forward(torch.diff(x, prepend=x[:, :1]))


class Unused(nn.Module):
    """A weight that the program lacks."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = Layer(), Layer("1:4", 24)

    def forward(self, x):
        return self.used(x)


def two_layers():
    return nn.Sequential(Layer(rows=32), Layer(rows=32))


def with_zeros():
    model = two_layers()
    model[0].weight.data.zero_()
    return model


def tied():
    model = Tied()
    model.embed.weight.data = nm_prune(model.embed.weight.data, "1:4")
    return model


@with_coremltools
@pytest.mark.parametrize(
    ("make", "x", "written"),
    [
        (
            Transposed,
            X,
            {"left": ("1:4", ("linear",), True), "up": ("1:8", ("matmul",), True)},
        ),
        (Differences, X, {"weight": ("2:4", ("linear",), True)}),
        (
            Unused,
            X,
            {"used.weight": ("2:4", ("linear",), True), "unused.weight": ("1:4", (), False)},
        ),
        (
            with_zeros,
            X,
            {"0.weight": ("1:32", ("linear",), False), "1.weight": ("2:4", ("linear",), True)},
        ),
        (
            tied,
            torch.zeros(1, 4, dtype=torch.int64),
            {"embed.weight": ("1:4", ("gather", "linear"), True)},
        ),
    ],
)
def test_what_is_sparse_in_the_file(make, x, written):
    report = export_coreml(make(), (x,), FILE)
    found = {each.key: (each.pattern, each.operators, each.is_sparse) for each in report.weights}
    assert found == written
    result = verify(FILE)
    assert result.ok
    in_program = {key for key, (_, operators, _) in written.items() if operators}
    assert {verdict.key for verdict in result.verdicts} == in_program


@with_coremltools
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_exported_in_float32(dtype):
    model = Layer().to(dtype)
    (written,) = export_coreml(model, (X,), FILE).weights
    found = CoreMLPackage(FILE).read(written.name)
    assert found.dtype == torch.float32
    assert torch.equal(found, model.weight.float())
    assert model.weight.dtype == dtype


@with_coremltools
def test_values_beyond_float16_stay_float32():
    model = two_layers()
    model[0].weight.data *= 1e7
    report = export_coreml(model, (X,), FILE, precision="float16")
    first, second = (CoreMLPackage(FILE).read(each.name) for each in report.weights)
    assert torch.equal(first, model[0].weight)
    assert torch.equal(second, model[1].weight.half())


# The command, and ``lightning-nm verify`` of what it wrote.


@with_coremltools
def test_a_lightning_checkpoint(command):
    trainer = make_trainer(Path(), [callback()], max_epochs=1)
    trainer.fit(new_model(), Data())
    trainer.save_checkpoint("a.ckpt")
    model = "--model tests.support.lightning_models.Net --input 1x1x8x8"
    said = command(f"export a.ckpt --to coreml -o {FILE} {model}")
    assert re.search(r"net.6.weight +2:4 +linear", said)
    # The masked layers alone, although the head might be N:M, too.
    assert "2 of 2 N:M weights as nonzeros and a bit mask (1 conv, 1 linear)" in said
    assert sorted(os.listdir()) == ["a.ckpt", FILE.name]
    (found,) = json.loads(command(f"verify {FILE} --json"))["checkpoints"]
    patterns = {each["key"]: each["pattern"] for each in found["weights"]}
    assert patterns == {"net.3.weight": "2:4", "net.6.weight": "2:4"}


@with_coremltools
def test_a_pattern_and_a_precision(command):
    torch.save(Layer("1:4").state_dict(), "a.pt")
    model = "--model tests.export.test_coreml.Layer --input 1x32 --precision float16"
    command(f"export a.pt --to coreml {model} -o {FILE} --pattern 2:4")
    (verdict,) = verify(FILE).verdicts
    assert (verdict.key, verdict.pattern, verdict.density) == ("weight", "2:4", 0.25)
    (weight,) = CoreMLPackage(FILE).weights.values()
    assert CoreMLPackage(FILE).read(weight.name).dtype == torch.float16


@with_coremltools
def test_a_decoder_of_transformers(command):
    transformers = pytest.importorskip("transformers")
    settings = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        if ".c_" in name and parameter.dim() == 2:
            parameter.data = nm_prune(parameter.data, "1:16", 0)
    model.save_pretrained("in")
    words = "--model transformers.GPT2LMHeadModel --input 1x8:int64"
    command(f"export in --to coreml -o {FILE} {words}")
    verdicts = [(each.verdict, each.density) for each in verify(FILE).verdicts]
    assert verdicts == [("N:M", 1 / 16)] * 4


# Models that Core ML does not take are named, and nothing is written.


class Branches(nn.Module):
    """Python decides by a value."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class Selects(nn.Module):
    """The shape of the output depends on values."""

    def forward(self, x):
        return x[x > 0]


class Unknown(nn.Module):
    """An operator that Core ML does not have, and torch does not take apart."""

    def forward(self, x):
        return torch.linalg.svd(x)[1]


def masked():
    model = two_layers()
    NMSparsifier(model, "2:4", "ste", skip_first_last=False).attach()
    return model


@with_coremltools
@pytest.mark.parametrize(
    ("make", "inputs", "message"),
    [
        (lambda: nn.Sequential(Layer(), Branches()), (X,), "cannot trace Sequential: "),
        (
            lambda: nn.Sequential(Layer(), Selects()),
            (X,),
            "the shapes of Sequential depend on values|cannot trace Sequential",
        ),
        (
            lambda: nn.Sequential(Layer(), Unknown()),
            (X,),
            "coremltools cannot convert the operator '.*svd.*' of Sequential",
        ),
        # Routing depends on values: no fixed shapes.
        (
            lambda: copied(Experts()).apply(prune_experts),
            (torch.randn(5, 16), torch.arange(5) % 4),
            "Experts",
        ),
        (lambda: nn.Linear(32, 16), (X,), "no weight of Linear is N:M sparse: 'weight': 128 of"),
        (
            lambda: pack(small("1:16"), kernels="reference"),
            (IMAGES,),
            "Sequential has packed layers",
        ),
        (masked, (X,), "is masked by a sparsifier"),
        (lambda: Layer().to("meta"), (X,), "Layer has no values, it is on the meta device"),
        (Layer, (X, 3), "input 1 is 3: Core ML takes tensors"),
        (Layer, (torch.randn(2, 31),), r"torch\.export cannot trace Layer"),
    ],
)
def test_models_that_are_refused(make, inputs, message):
    with pytest.raises(ValueError, match=message):
        export_coreml(make(), inputs, FILE)
    assert not os.listdir()


def prune_experts(model):
    for parameter in model.parameters():
        parameter.data = nm_prune(parameter.data, "1:4", 2)


# Damaged packages are named; those of other programs are read by a pattern.


@pytest.fixture(scope="module")
def written(coremltools, tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / FILE
    export_coreml(Layer(), (X,), path)
    return path


@pytest.fixture
def package(written):
    """A copy that a test may damage: where the bit mask begins in its file of weights."""
    shutil.copytree(written, FILE)
    (weight,) = CoreMLPackage(FILE).weights.values()
    return WEIGHTS.read_bytes().index(weight.constant.mask.val.tobytes())


@with_coremltools
def test_a_moved_bit_breaks_the_pattern(package):
    content = bytearray(WEIGHTS.read_bytes())
    bits = content[package]
    kept = next(bit for bit in range(4) if bits >> bit & 1)
    pruned = next(bit for bit in range(4, 8) if not bits >> bit & 1)
    # One entry of the first block goes to the second, which then holds three.
    content[package] ^= 1 << kept | 1 << pruned
    WEIGHTS.write_bytes(content)
    assert verify(FILE).problems[0] == "'weight' is not 2:4: 1 of 128 blocks hold more"


def flipped(content, place, bit):
    content = bytearray(content)
    content[place] ^= 1 << bit
    return content


@with_coremltools
def test_damage_is_named(package, command):
    content = WEIGHTS.read_bytes()
    link = Path("weight.bin")
    link.write_bytes(content)
    for damage, message in (
        (
            lambda: WEIGHTS.write_bytes(flipped(content, package, 7)),
            "Number of set bits in mask needs to be equal",
        ),
        # Of the first record.
        (lambda: WEIGHTS.write_bytes(flipped(content, 64, 0)), "entinel"),
        (lambda: WEIGHTS.write_bytes(content[: package - 8]), ""),
        (lambda: WEIGHTS.write_bytes(b""), ""),
        (WEIGHTS.unlink, ""),
        (lambda: WEIGHTS.symlink_to(link.absolute()), r"weights/weight\.bin' is a link"),
        (lambda: (FILE / "Manifest.json").write_text("{"), ""),
    ):
        damage()
        with pytest.raises(
            ValueError, match=f"cannot read '{FILE}' as a Core ML package.*{message}"
        ):
            verify(FILE)
    command(f"verify {FILE}", 2)


@with_coremltools
@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (".*", "[]", "its metadata 'lightning_nm'"),
        (".*", "{", "its metadata 'lightning_nm'"),
        (".*", '{"schema": 9, "weights": {}}', "its metadata 'lightning_nm'"),
        ("p_weight", "p_other", "it has no weight 'p_other_sparsified'"),
        *(
            (old, new, r"of shape \[16, 32\] has no blocks .* in the layout")
            for old, new in (
                ('"plain"', '"sideways"'),
                ('"plain"', '"experts"'),
                ('"2:4"', '"2:5"'),
                ('"2:4"', '"x"'),
            )
        ),
    ],
)
def test_metadata_that_is_damaged(coremltools, old, new, message):
    model = coremltools.models.MLModel(str(FILE), skip_model_load=True)
    noted = model.user_defined_metadata["lightning_nm"]
    changed = re.sub(old, new, noted, count=1)
    assert changed != noted
    model.user_defined_metadata["lightning_nm"] = changed
    model.save("b.mlpackage")
    with pytest.raises(ValueError, match=message):
        verify("b.mlpackage")


def converted(coremltools, layer, target):
    program = torch.export.export(layer, (X,)).run_decompositions({})
    return coremltools.convert(program, minimum_deployment_target=target, skip_model_load=True)


@with_coremltools
def test_a_package_of_another_program(coremltools):
    converted(coremltools, Layer(), coremltools.target.iOS16).save(str(FILE))
    with pytest.raises(ValueError, match=r"does not tell which weights are N:M.*--pattern 2:4"):
        verify(FILE)
    (verdict,) = verify(FILE, "2:4").verdicts
    assert (verdict.verdict, verdict.note) == ("N:M", "along dim 1, dense, linear")
    assert not verify(FILE, "1:4").ok


@with_coremltools
def test_later_forms_are_read(coremltools):
    from coremltools.optimize import coreml as optimize

    model = converted(coremltools, Layer(rows=128), coremltools.target.iOS18)
    exact = optimize.OpThresholdPrunerConfig(threshold=0.0, minimum_sparsity_percentile=0.1)
    rounded = optimize.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0)
    for change, config, held in (
        (optimize.prune_weights, exact, "nonzeros and bit mask"),
        (optimize.linear_quantize_weights, rounded, "constexpr_blockwise_shift_scale"),
    ):
        shutil.rmtree(FILE, ignore_errors=True)
        change(model, optimize.OptimizationConfig(config)).save(str(FILE))
        (verdict,) = verify(FILE, "2:4").verdicts
        assert (verdict.verdict, verdict.note) == ("N:M", f"along dim 1, {held}, linear")
