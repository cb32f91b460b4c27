"""Core ML packages: what is written, what is read back from it without a Mac, and what is refused."""

import json
import os
import re
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import NMSparsifier, pack
from lightning_nm.cli import main
from lightning_nm.commands.export import _coreml_report
from lightning_nm.export import CoreMLPackage, CoreMLReport, CoreMLWritten, export_coreml, verify
from lightning_nm.functional import is_nm, nm_prune
from tests.support.experts import Experts
from tests.support.lightning_models import Data, callback, make_trainer, new_model
from tests.support.mil import Program
from tests.support.packed_models import copied, small

X = (torch.randn(2, 16, 4, 4),)  # an input of small()
needs_coremltools = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def coremltools():
    return pytest.importorskip(
        "coremltools", reason="coremltools is not installed: the extra coreml"
    )


def linear(pattern="2:4", rows=16, columns=32, seed=0):
    """One linear layer without a bias."""
    torch.manual_seed(seed)
    layer = nn.Linear(columns, rows, bias=False).eval()
    layer.weight.data = nm_prune(layer.weight.data, pattern)
    return layer


def weights_file(package):
    return package / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"


# Without coremltools.


def test_without_coremltools(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(__import__("sys").modules, "coremltools", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[coreml\]'"):
        export_coreml(linear(), (torch.randn(1, 32),), tmp_path / "a.mlpackage")
    torch.save(linear().state_dict(), tmp_path / "a.pt")
    words = [
        "export",
        str(tmp_path / "a.pt"),
        "--to",
        "coreml",
        "-o",
        str(tmp_path / "a.mlpackage"),
    ]
    assert main([*words, "--model", "tests.export.test_coreml.Small", "--input", "1x32"]) == 2
    assert "pip install -e '.[coreml]'" in capsys.readouterr().err
    (tmp_path / "b.mlpackage").mkdir()
    with pytest.raises(ValueError, match=r"b.mlpackage'.*pip install -e '\.\[coreml\]'"):
        verify(tmp_path / "b.mlpackage")
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.mlpackage"]


class Small(nn.Linear):
    """The layer of :func:`linear`, as ``--model`` calls it."""

    def __init__(self):
        super().__init__(32, 16, bias=False)


@pytest.mark.parametrize(
    ("output", "error", "message"),
    [
        ("a.mlmodel", ValueError, "--to coreml writes .mlpackage, not 'a.mlmodel'"),
        ("a", ValueError, "--to coreml writes .mlpackage, not 'a'"),
        ("there.mlpackage", ValueError, "'there.mlpackage' exists: give a package that does not"),
        ("no/a.mlpackage", FileNotFoundError, "there is no folder 'no' for 'a.mlpackage'"),
    ],
)
def test_outputs_that_are_refused(tmp_path, monkeypatch, capsys, output, error, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.mlpackage").mkdir()
    with pytest.raises(error, match=re.escape(message)):
        export_coreml(linear(), (torch.randn(1, 32),), output)
    # The command says it before it reads the checkpoint.
    assert main(["export", "none.ckpt", "--to", "coreml", "-o", output, "--model", "a.B"]) == 2
    assert message in capsys.readouterr().err
    assert os.listdir() == ["there.mlpackage"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "coreml", "-o", "a.mlpackage"], "--to coreml needs the model's class"),
        (["-o", "a.safetensors", "--precision", "float16"], "--precision is for --to coreml"),
    ],
)
def test_options_that_are_refused(words, message, capsys):
    assert main(["export", "none.ckpt", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_precision(tmp_path):
    with pytest.raises(ValueError, match="precision='int8' is unknown: use 'float32' or 'float16'"):
        export_coreml(linear(), X, tmp_path / "a.mlpackage", precision="int8")


def test_what_is_printed():
    written = [
        CoreMLWritten("a", "2:4", "p_a", ("linear",), True, 0.5, 60, 100),
        CoreMLWritten("b", "1:4", "p_b", ("conv", "linear"), True, 0.25, 30, 100),
        CoreMLWritten("c", "2:4", "p_c", ("linear",), False, 0.0, 100, 100),
        CoreMLWritten("d", "2:4"),
    ]
    report = CoreMLReport(600, 1000, written)
    assert report.operators == {"linear": 2, "conv": 1}
    table, *sentences = _coreml_report(report, "a.mlpackage")
    text = " ".join(sentences)
    assert "2 of 4 N:M weights as nonzeros and a bit mask (2 linear, 1 conv)" in text
    assert "600 bytes, 0.600 of the dense package's 1000" in text
    assert "not run: that needs macOS, and no speed is claimed" in text
    cells = list(table.columns[5].cells)
    assert cells == ["p_a", "p_b", "dense: p_c", "not in the program"]
    assert list(table.columns[4].cells) == ["0.600", "0.300", "1.000", ""]


# With coremltools.


class TestWritten:
    """Packages are read back as the model was."""

    pytestmark = needs_coremltools

    @settings(
        max_examples=12,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        pattern=st.sampled_from(["2:4", "1:4", "3:4", "1:8", "5:16", "1:32"]),
        rows=st.integers(2, 9),
        blocks=st.integers(1, 4),
        precision=st.sampled_from(["float32", "float16"]),
        seed=st.integers(0, 1000),
    )
    def test_values_are_those_of_the_model(
        self, coremltools, tmp_path_factory, pattern, rows, blocks, precision, seed
    ):
        path = tmp_path_factory.mktemp("package") / "a.mlpackage"
        layer = linear(pattern, rows, blocks * 32, seed)
        report = export_coreml(
            layer, (torch.randn(1, blocks * 32),), path, pattern, precision=precision
        )
        (written,) = report.weights
        assert written.is_sparse
        expected = layer.weight.detach().to(getattr(torch, precision))
        assert torch.equal(CoreMLPackage(path).read(written.name), expected)
        # A value of each nonzero, and one bit of each entry.
        nonzeros = int(torch.count_nonzero(expected))
        assert written.bytes == nonzeros * expected.itemsize + -(-expected.numel() // 8)
        assert written.dense_bytes == expected.nbytes
        assert verify(path).ok

    def test_layers_of_all_kinds(self, coremltools, tmp_path):
        model = small("1:16")
        report = export_coreml(model, X, tmp_path / "a.mlpackage")
        assert report.operators == {"conv": 1, "linear": 2}
        assert report.bytes < 0.3 * report.dense_bytes
        package = CoreMLPackage(tmp_path / "a.mlpackage")
        for written in report.weights:
            assert is_nm(package.read(written.name), "1:16", dim=1), written.key
        # The converter multiplies the batch norm into the convolution, and no other weight changes.
        names = {written.key: written.name for written in report.weights}
        scale = model[1].weight / (model[1].running_var + model[1].eps).sqrt()
        folded = model[0].weight * scale[:, None, None, None]
        assert torch.allclose(package.read(names["0.weight"]), folded, rtol=1e-5, atol=1e-7)
        assert torch.equal(package.read(names["4.weight"]), model[4].weight)
        dense = [name for name, weight in package.weights.items() if not weight.is_sparse]
        assert [tuple(package.read(name).shape) for name in dense] == [(3, 32)]
        assert os.listdir(tmp_path) == ["a.mlpackage"]

    @pytest.mark.parametrize("pattern", ["2:4", "1:16"])
    def test_the_program_computes_the_model(self, coremltools, tmp_path, pattern):
        """As the operators are defined: they are run by torch, from the weights in the file."""
        model = small(pattern)
        # Without training a batch norm is nearly the identity.
        generator = torch.Generator().manual_seed(1)
        for tensor in (*model[1].parameters(), *model[1].buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.5, 1.5, generator=generator)
        export_coreml(model, X, tmp_path / "a.mlpackage")
        x = torch.randn(X[0].shape, generator=generator)
        found = Program(tmp_path / "a.mlpackage")(x)
        assert torch.allclose(found, model(x), rtol=1e-4, atol=1e-4)

    def test_weights_that_lie_transposed_or_are_experts(self, coremltools, tmp_path):
        class Transposed(nn.Module):
            def __init__(self):
                super().__init__()
                self.left = nn.Parameter(nm_prune(torch.randn(32, 16), "1:4", 0))
                self.up = nn.Parameter(nm_prune(torch.randn(3, 16, 24), "1:8", 1))
                self.bias = nn.Parameter(torch.randn(16))

            def forward(self, x):
                return torch.bmm(torch.addmm(self.bias, x, self.left).expand(3, -1, -1), self.up)

        report = export_coreml(Transposed(), (torch.randn(4, 32),), tmp_path / "a.mlpackage")
        assert {each.key: each.pattern for each in report.weights} == {"left": "1:4", "up": "1:8"}
        assert all(each.is_sparse for each in report.weights)
        result = verify(tmp_path / "a.mlpackage")
        assert result.ok
        assert {verdict.key for verdict in result.verdicts} == {"left", "up"}
        assert result.share == 1

    def test_a_mixture_of_experts(self, coremltools, tmp_path):
        model = Experts().eval()
        x = (torch.randn(5, model.up.shape[-1]),)
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.data = nm_prune(parameter.data, "1:4", 2)
        with pytest.raises(ValueError, match="Experts"):
            # Routing depends on values: no fixed shapes.
            export_coreml(model, x, tmp_path / "a.mlpackage", "1:4")
        assert not os.listdir(tmp_path)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_other_dtypes_are_exported_in_float32(self, coremltools, tmp_path, dtype):
        model = linear().to(dtype)
        report = export_coreml(model, (torch.randn(1, 32),), tmp_path / "a.mlpackage")
        found = CoreMLPackage(tmp_path / "a.mlpackage").read(report.weights[0].name)
        assert found.dtype == torch.float32
        assert torch.equal(found, model.weight.float())
        assert model.weight.dtype == dtype

    def test_values_beyond_float16_stay_float32(self, coremltools, tmp_path):
        model = nn.Sequential(linear("2:4", 32, 32), linear("2:4", 32, 32, seed=1))
        model[0].weight.data *= 1e7
        output = tmp_path / "a.mlpackage"
        report = export_coreml(model, (torch.randn(1, 32),), output, precision="float16")
        first, second = (CoreMLPackage(output).read(each.name) for each in report.weights)
        assert torch.equal(first, model[0].weight)
        assert torch.equal(second, model[1].weight.half())

    def test_a_weight_that_is_all_zero_stays_dense(self, coremltools, tmp_path):
        model = nn.Sequential(linear("2:4", 32, 32), linear("2:4", 32, 32, seed=1))
        model[0].weight.data.zero_()
        report = export_coreml(model, (torch.randn(1, 32),), tmp_path / "a.mlpackage")
        assert [each.is_sparse for each in report.weights] == [False, True]
        assert verify(tmp_path / "a.mlpackage").warnings

    def test_a_weight_that_the_program_lacks_is_told(self, coremltools, tmp_path):
        class Unused(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = linear(), linear("1:4", 24, 32)

            def forward(self, x):
                return self.used(x)

        report = export_coreml(Unused(), (torch.randn(1, 32),), tmp_path / "a.mlpackage")
        assert [each.name for each in report.weights if each.key == "unused.weight"] == [""]
        assert [v.key for v in verify(tmp_path / "a.mlpackage").verdicts] == ["used.weight"]

    def test_tied_weights_are_stored_once(self, coremltools, tmp_path):
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
                self.embed.weight.data = nm_prune(self.embed.weight.data, "1:4")
                self.head.weight = self.embed.weight

            def forward(self, tokens):
                return self.head(self.embed(tokens))

        tokens = torch.zeros(1, 4, dtype=torch.int64)
        (written,) = export_coreml(Tied(), (tokens,), tmp_path / "a.mlpackage").weights
        assert written.is_sparse
        assert written.operators == ("gather", "linear")

    def test_operators_are_taken_apart(self, coremltools, tmp_path):
        class Differences(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = linear()

            def forward(self, x):
                return self.layer(torch.diff(x, prepend=x[:, :1]))

        report = export_coreml(Differences(), (torch.randn(2, 32),), tmp_path / "a.mlpackage")
        assert report.operators == {"linear": 1}

    def test_the_model_is_as_before(self, coremltools, tmp_path):
        model = small("2:4").train()
        before = copied(model.state_dict())
        export_coreml(model, X, tmp_path / "a.mlpackage")
        assert model.training
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


class TestCommand:
    """``lightning-nm export --to coreml``, and ``lightning-nm verify`` of what it wrote."""

    pytestmark = needs_coremltools

    def test_a_lightning_checkpoint(self, coremltools, tmp_path, capsys):
        trainer = make_trainer(tmp_path, [callback()], max_epochs=1)
        trainer.fit(new_model(), Data())
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        output = tmp_path / "a.mlpackage"
        model = ["--model", "tests.support.lightning_models.Net", "--input", "1x1x8x8"]
        words = ["export", str(tmp_path / "a.ckpt"), "--to", "coreml", "-o", str(output), *model]
        assert main(words) == 0
        said = capsys.readouterr()
        assert re.search(r"net.6.weight +2:4 +linear", said.out)
        # The masked layers alone, although the head might be N:M, too.
        assert "2 of 2 N:M weights as nonzeros and a bit mask (1 conv, 1 linear)" in said.out
        assert said.err == ""
        assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "a.mlpackage"]
        assert main(["verify", str(output), "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["checkpoints"]
        assert {each["key"] for each in found["weights"]} == {"net.3.weight", "net.6.weight"}
        assert {each["pattern"] for each in found["weights"]} == {"2:4"}
        assert main(["verify", str(output), "--pattern", "1:4", "--allow-dense"]) == 1
        # A second export does not touch the first.
        assert main(words) == 2
        assert "a.mlpackage' exists" in capsys.readouterr().err

    def test_a_pattern_and_a_precision(self, coremltools, tmp_path, capsys):
        torch.save(linear("1:4").state_dict(), tmp_path / "a.pt")
        model = ["--model", "tests.export.test_coreml.Small", "--input", "1x32"]
        words = [
            "export",
            str(tmp_path / "a.pt"),
            "--to",
            "coreml",
            *model,
            "--precision",
            "float16",
        ]
        output = tmp_path / "a.mlpackage"
        assert main([*words, "-o", str(output), "--pattern", "2:4"]) == 0
        (verdict,) = verify(output).verdicts
        assert (verdict.key, verdict.pattern, verdict.density) == ("weight", "2:4", 0.25)
        (weight,) = CoreMLPackage(output).weights.values()
        assert CoreMLPackage(output).read(weight.name).dtype == torch.float16
        assert main([*words, "-o", str(tmp_path / "b.mlpackage"), "--pattern", "1:8"]) == 2
        assert "no weight of Small is 1:8 sparse: 'weight': " in capsys.readouterr().err

    def test_a_decoder_of_transformers(self, coremltools, tmp_path):
        transformers = pytest.importorskip("transformers")
        settings = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
        config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config).eval()
        for name, parameter in model.named_parameters():
            if ".c_" in name and parameter.dim() == 2:
                parameter.data = nm_prune(parameter.data, "1:16", 0)
        model.save_pretrained(tmp_path / "in")
        output = tmp_path / "a.mlpackage"
        words = ["--model", "transformers.GPT2LMHeadModel", "--input", "1x8:int64"]
        assert (
            main(["export", str(tmp_path / "in"), "--to", "coreml", "-o", str(output), *words]) == 0
        )
        verdicts = verify(output).verdicts
        assert len(verdicts) == 4
        assert {(each.verdict, each.density) for each in verdicts} == {("N:M", 1 / 16)}


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


class TestRefused:
    """Models that Core ML does not take are named, and nothing is written."""

    pytestmark = needs_coremltools

    @pytest.mark.parametrize(
        ("last", "message"),
        [
            (Branches(), "torch.export cannot trace Sequential: "),
            (Selects(), "the shapes of Sequential depend on values|cannot trace Sequential"),
            (Unknown(), "coremltools cannot convert the operator '.*svd.*' of Sequential"),
        ],
    )
    def test_models(self, coremltools, tmp_path, last, message):
        model = nn.Sequential(linear(), last)
        with pytest.raises(ValueError, match=message):
            export_coreml(model, (torch.randn(4, 32),), tmp_path / "a.mlpackage")
        assert not os.listdir(tmp_path)

    def test_states_of_a_model(self, coremltools, tmp_path):
        x = (torch.randn(2, 32),)
        output = tmp_path / "a.mlpackage"
        with pytest.raises(ValueError, match="no weight of Linear is N:M sparse: 'weight': 128 of"):
            export_coreml(nn.Linear(32, 16), x, output)
        with pytest.raises(ValueError, match="Sequential has packed layers"):
            export_coreml(pack(small("1:16"), kernels="reference"), X, output)
        masked = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        NMSparsifier(masked, "2:4", "ste", skip_first_last=False).attach()
        with pytest.raises(ValueError, match="mask"):
            export_coreml(masked, x, output)
        with pytest.raises(ValueError, match="Linear has no values, it is on the meta device"):
            export_coreml(nn.Linear(32, 16, device="meta"), x, output)
        with pytest.raises(ValueError, match="input 1 is 3: Core ML takes tensors"):
            export_coreml(linear(), (*x, 3), output)
        with pytest.raises(ValueError, match=r"torch\.export cannot trace Linear"):
            export_coreml(linear(), (torch.randn(2, 31),), output)
        assert not os.listdir(tmp_path)

    def test_an_error_while_writing_leaves_nothing(self, coremltools, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("lightning_nm.export.coreml.is_nm", full)
        with pytest.raises(OSError, match=r"a.mlpackage' was not written: No space left"):
            export_coreml(linear(), (torch.randn(1, 32),), tmp_path / "a.mlpackage")
        assert not os.listdir(tmp_path)


class TestRead:
    """Damaged packages are named; those of other programs are read by a pattern."""

    pytestmark = needs_coremltools

    @pytest.fixture(scope="class")
    def written(self, coremltools, tmp_path_factory):
        path = tmp_path_factory.mktemp("written") / "a.mlpackage"
        export_coreml(linear(), (torch.randn(1, 32),), path)
        return path

    @pytest.fixture
    def package(self, written, tmp_path):
        """A copy that a test may damage."""
        return shutil.copytree(written, tmp_path / "a.mlpackage")

    def mask_at(self, package):
        """Where the bit mask begins in the file of weights."""
        (weight,) = CoreMLPackage(package).weights.values()
        return weights_file(package).read_bytes().index(weight.constant.mask.val.tobytes())

    def test_a_moved_bit_breaks_the_pattern(self, package):
        start = self.mask_at(package)
        content = bytearray(weights_file(package).read_bytes())
        first_blocks = content[start]
        kept = [bit for bit in range(4) if first_blocks >> bit & 1]
        pruned = [bit for bit in range(4, 8) if not first_blocks >> bit & 1]
        # One entry of the first block goes to the second, which then holds three.
        content[start] ^= 1 << kept[0] | 1 << pruned[0]
        weights_file(package).write_bytes(content)
        assert verify(package).problems[0] == "'weight' is not 2:4: 1 of 128 blocks hold more"

    def test_damage_is_named(self, package):
        content = weights_file(package).read_bytes()
        start = self.mask_at(package)
        missing_bit = bytearray(content)
        missing_bit[start] ^= 1 << 7
        wrong_record = bytearray(content)
        wrong_record[64] ^= 1  # of the first record
        for damaged, message in [
            (missing_bit, "Number of set bits in mask needs to be equal"),
            (wrong_record, "entinel"),
            (content[: start - 8], ""),
            (b"", ""),
        ]:
            weights_file(package).write_bytes(damaged)
            with pytest.raises(
                ValueError, match=f"cannot read '{package}' as a Core ML.*{message}"
            ):
                verify(package)
        weights_file(package).unlink()
        with pytest.raises(ValueError, match=r"as a Core ML package: "):
            verify(package)
        (package / "Manifest.json").write_text("{")
        with pytest.raises(ValueError, match=f"cannot read '{package}' as a Core ML package: "):
            verify(package)
        assert main(["verify", str(package)]) == 2

    @pytest.mark.parametrize("noted", ["[]", "{", '{"schema": 9, "weights": {}}'])
    def test_damaged_metadata(self, coremltools, package, tmp_path, noted):
        model = coremltools.models.MLModel(str(package), skip_model_load=True)
        model.user_defined_metadata["lightning_nm"] = noted
        model.save(str(tmp_path / "b.mlpackage"))
        with pytest.raises(ValueError, match="its metadata 'lightning_nm'"):
            verify(tmp_path / "b.mlpackage")

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"plain"', '"sideways"'),
            ('"plain"', '"experts"'),
            ('"2:4"', '"2:5"'),
            ('"2:4"', '"x"'),
        ],
    )
    def test_blocks_that_a_weight_cannot_have(self, coremltools, package, tmp_path, old, new):
        model = coremltools.models.MLModel(str(package), skip_model_load=True)
        noted = model.user_defined_metadata["lightning_nm"]
        assert old in noted
        model.user_defined_metadata["lightning_nm"] = noted.replace(old, new)
        model.save(str(tmp_path / "b.mlpackage"))
        with pytest.raises(ValueError, match=r"of shape \[16, 32\] has no blocks .* in the layout"):
            verify(tmp_path / "b.mlpackage")

    def test_a_file_of_weights_outside_of_the_package(self, package, tmp_path):
        file = weights_file(package)
        file.rename(tmp_path / "weight.bin")
        file.symlink_to(tmp_path / "weight.bin")
        with pytest.raises(ValueError, match=r"weights/weight\.bin' is a link"):
            verify(package)

    def test_a_weight_that_the_metadata_names_is_missing(self, coremltools, package, tmp_path):
        model = coremltools.models.MLModel(str(package), skip_model_load=True)
        noted = model.user_defined_metadata["lightning_nm"]
        model.user_defined_metadata["lightning_nm"] = noted.replace("p_weight", "p_other")
        model.save(str(tmp_path / "b.mlpackage"))
        with pytest.raises(ValueError, match="it has no weight 'p_other_sparsified'"):
            verify(tmp_path / "b.mlpackage")

    def test_a_package_of_another_program(self, coremltools, tmp_path):
        layer = linear()
        program = torch.export.export(layer, (torch.randn(1, 32),)).run_decompositions({})
        target = coremltools.target.iOS16
        model = coremltools.convert(program, minimum_deployment_target=target, skip_model_load=True)
        model.save(str(tmp_path / "a.mlpackage"))
        with pytest.raises(ValueError, match=r"does not tell which weights are N:M.*--pattern 2:4"):
            verify(tmp_path / "a.mlpackage")
        (verdict,) = verify(tmp_path / "a.mlpackage", "2:4").verdicts
        assert (verdict.verdict, verdict.violations) == ("N:M", 0)
        assert verdict.note == "along dim 1, dense, linear"
        assert not verify(tmp_path / "a.mlpackage", "1:4").ok

    def test_later_forms_are_read(self, coremltools, tmp_path):
        from coremltools.optimize.coreml import (
            OpLinearQuantizerConfig,
            OpThresholdPrunerConfig,
            OptimizationConfig,
            linear_quantize_weights,
            prune_weights,
        )

        program = torch.export.export(linear("2:4", 64, 64), (torch.randn(1, 64),))
        target = coremltools.target.iOS18
        model = coremltools.convert(
            program.run_decompositions({}), minimum_deployment_target=target, skip_model_load=True
        )
        exact = OpThresholdPrunerConfig(threshold=0.0, minimum_sparsity_percentile=0.1)
        rounded = OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0)
        for changed, held in (
            (prune_weights(model, OptimizationConfig(exact)), "nonzeros and bit mask"),
            (
                linear_quantize_weights(model, OptimizationConfig(rounded)),
                "constexpr_blockwise_shift_scale",
            ),
        ):
            shutil.rmtree(tmp_path / "a.mlpackage", ignore_errors=True)
            changed.save(str(tmp_path / "a.mlpackage"))
            (verdict,) = verify(tmp_path / "a.mlpackage", "2:4").verdicts
            assert (verdict.verdict, verdict.note) == ("N:M", f"along dim 1, {held}, linear")
