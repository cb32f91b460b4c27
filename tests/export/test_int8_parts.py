"""Embeddings and experts in int8: their files, what is held in memory, and the parts of a file by size."""

import copy
import json
import math
import pickle
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import int8_head
from lightning_nm import (
    load_packed,
    pack,
    packed_summary,
    save_packed,
    unpacked_state_dict,
    warm_up,
)
from lightning_nm.cli import main
from lightning_nm.export import PackedFile, verify
from lightning_nm.export.outputs import export_packed
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.functional import nm_prune
from lightning_nm.packed.module import packed_weights
from tests.support.cpu_products import needs_library
from tests.support.experts import WIDTH, Experts, TransposedExperts
from tests.support.packed_models import (
    assert_equal_states,
    clones,
    copied,
    header_of,
    mutated,
    without_checksums,
)


class Scaled(nn.Embedding):
    """As of Gemma."""

    def forward(self, input):
        return super().forward(input) * 3


class Model(nn.Module):
    """An embedding, one with a forward of its own, and one that is tied to the head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(40, 32, padding_idx=3)
        self.scaled = Scaled(40, 32)
        self.middle = nn.Linear(32, 32)
        self.tied = nn.Embedding(24, 32)
        self.head = nn.Linear(32, 24, bias=False)
        self.head.weight = self.tied.weight

    def forward(self, ids):
        return self.head(self.middle(self.words(ids) + self.scaled(ids)) + self.tied(ids % 24))


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    model = Model().to(dtype).eval()
    model.middle.weight.data = nm_prune(model.middle.weight.data, "2:4")
    # Rows of very different sizes, and one of zeros.
    model.words.weight.data *= torch.logspace(-6, 6, 40, base=10)[:, None].to(dtype)
    return model


def run(*words):
    return main(["export", *map(str, words)])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def exported(request, tmp_path):
    """A model, and a file with all of its matrices in int8."""
    model = model_of(request.param)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    path = tmp_path / "model.safetensors"
    globs = ("--int8-embeddings", "words", "--int8-embeddings", "[st]*.weight")
    assert run(tmp_path / "model.pt", "-o", path, "--dtype", "int8", *globs) == 0
    return model, path


def on_meta():
    with torch.device("meta"):
        return Model()


IDS = torch.arange(40).view(2, 20)


# ---------------------------------------------------------------------------------------------------------- embeddings


def test_rows_are_rounded_to_127_steps(exported):
    """Each entry is a multiple of its row's scale, and at most half a step off."""
    model, path = exported
    found = read_checkpoint(path).weights
    for key in ("words.weight", "scaled.weight", "tied.weight"):
        weight = dict(model.named_parameters())[key].detach().double()
        step = weight.abs().amax(1, keepdim=True) / 127
        # bfloat16 rounds once more.
        rest = 2.0**-8 if model.words.weight.dtype == torch.bfloat16 else 2.0**-22
        error = (found[key].double() - weight).abs()
        assert (error <= step / 2 + weight.abs() * rest + step * 1e-5).all(), key
        assert (found[key][weight == 0] == 0).all()
    assert error.max() > 0, "something was rounded"


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
def test_lookups_are_those_of_the_dequantised_matrix(exported, kernels):
    model, path = exported
    loaded = load_packed(on_meta(), path, kernels=kernels)
    held = dict(packed_weights(loaded))
    assert list(held) == ["words.weight", "middle.weight", "tied.weight"]
    assert held["words.weight"].form == "packed int8"
    assert held["words.weight"].nbytes == 40 * 32 + 40 * 4
    state = unpacked_state_dict(loaded)
    assert torch.equal(loaded.words(IDS), F.embedding(IDS, state["words.weight"]))
    assert loaded.words(torch.tensor(5)).shape == (32,)
    # One with a forward of its own is dense in memory.
    assert torch.equal(loaded.scaled(IDS), F.embedding(IDS, state["scaled.weight"]) * 3)
    assert loaded.head.weight is loaded.tied.weight is held["tied.weight"]
    assert held["tied.weight"].nbytes == 24 * 32 + 24 * 4
    assert state["tied.weight"] is state["head.weight"]
    assert state["tied.weight"].dtype == loaded.tied.weight.dtype == model.tied.weight.dtype
    dense = Model().to(model.tied.weight.dtype)
    dense.load_state_dict(state)
    if kernels == "reference":
        assert torch.equal(loaded(IDS), dense(IDS))
    loaded.train()
    with pytest.raises(RuntimeError, match=r"'words.weight' is packed and cannot be trained"):
        loaded.words(IDS)


@needs_library
@pytest.mark.parametrize("kernels", ["auto", "sparse"])
def test_a_tied_head_multiplies_by_the_rows(exported, kernels):
    """It rounds tokens to 16 bits, and the rest as the float64 product with the dequantised matrix is rounded."""
    _, path = exported
    loaded = load_packed(on_meta(), path, kernels=kernels)
    weight, dtype = loaded.tied.weight, loaded.tied.weight.dtype
    rows = weight.values.squeeze(-1).double() * weight.scales.double()[:, None]
    for shape in ((32,), (1, 1, 32), (2, 20, 32), (300, 32)):
        x = torch.randn(shape).to(dtype)
        exact = x.double() @ rows.t()
        found = loaded.head(x)
        assert found.shape == (*shape[:-1], 24)
        assert found.dtype == dtype
        # More tokens are multiplied by the dequantised matrix, which is rounded to the dtype.
        bound = exact.abs() * torch.finfo(dtype).eps + x.double().abs().amax(-1, True) * (
            rows.abs().sum(-1) * (2.0**-16 if len(x) < 300 else torch.finfo(dtype).eps)
        )
        assert ((found.double() - exact).abs() <= bound).all()
    assert loaded.head(x[:0]).shape == (0, 24)
    assert weight.values is not None, "it stays in int8"
    wanted = torch.randn(2, 32).to(dtype).requires_grad_()
    loaded.head(wanted).sum().backward()
    assert torch.allclose(wanted.grad.double(), rows.sum(0).expand(2, -1), rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        loaded.head(torch.randn(2, 31).to(dtype))
    assert loaded.head(torch.full((1, 32), math.nan).to(dtype)).isnan().all()


@needs_library
def test_some_rows_of_a_tied_head(exported):
    """Products with some rows have their columns alone, with their part of the bias."""
    _, path = exported
    weight = load_packed(on_meta(), path).tied.weight
    x, bias = torch.randn(2, 32).to(weight.dtype), torch.randn(24).to(weight.dtype)
    wanted = F.linear(x, weight.unpack()[4:10], bias[4:10])
    assert torch.equal(weight.linear(x, bias, rows=(4, 10)), wanted)


@needs_library
@pytest.mark.parametrize("dtype", ["int8", None])
def test_tensors_may_move_into_shared_memory(dtype):
    """A product after it reads them where they are, not where they were."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128))
    model[0].weight.data = nm_prune(model[0].weight.data, "2:8")
    pack(model, dtype=dtype, kernels="sparse")
    assert model[0].weight.operand is not None
    x = torch.randn(2, 256)
    wanted = model(x)
    for tensor in model.buffers():
        tensor.share_memory_()
    assert torch.equal(model(x), wanted)


def test_heads_that_are_no_linear_layers_keep_the_dense_weight():
    class Head(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    other, own = model_of(), model_of()
    other.head.__class__ = Head
    own.head.forward = lambda input: input @ own.head.weight.t()
    for model in (other, own):
        with pytest.raises(ValueError, match=r"'tied' matches no nn.Embedding"):
            pack(model, dtype="int8", int8_embeddings="tied")


def test_copies_and_conversions(exported, tmp_path):
    _, path = exported
    loaded = load_packed(on_meta(), path, kernels="reference")
    expected = loaded(IDS)
    other = load_packed(on_meta(), path, kernels="reference")
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(loaded.state_dict())
    for each in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)), other):
        assert torch.equal(each(IDS), expected)
        assert isinstance(each.words, nn.Embedding)
    graph = torch.export.export(loaded, (IDS,)).module()
    assert torch.equal(graph(IDS), expected)
    compiled = torch.compile(loaded, backend="eager", fullgraph=True)
    assert torch.equal(compiled(IDS), expected)
    low = copy.deepcopy(loaded).bfloat16()
    assert low.words(IDS).dtype == torch.bfloat16
    assert torch.equal(low.words(IDS), loaded.words(IDS).bfloat16())
    warm_up(load_packed(on_meta(), path), tokens=[4])
    assert "words.weight" in str(packed_summary(loaded))
    for each in (copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)), low):
        assert each.head.weight is each.tied.weight
        assert each.tied.weight.values.data_ptr() != loaded.tied.weight.values.data_ptr()
    save_packed(loaded, tmp_path / "again.safetensors")
    assert PackedFile(tmp_path / "again.safetensors").aliases == {"head.weight": "tied.weight"}
    again = load_packed(on_meta(), tmp_path / "again.safetensors", kernels="reference")
    assert_equal_states(clones(again), clones(loaded))


def test_pack_and_save_make_the_same_weights(exported, tmp_path):
    model, path = exported
    globs = ["words", "tied"]
    packed = pack(copied(model), dtype="int8", int8_embeddings=globs, kernels="reference")
    save_packed(packed, tmp_path / "other.safetensors")
    ours, theirs = PackedFile(tmp_path / "other.safetensors"), PackedFile(path)
    for key in ("words.weight", "middle.weight", "tied.weight"):
        assert ours.packed[key] == theirs.packed[key]
        for a, b in zip(ours.read(key), theirs.read(key), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    save_packed(load_packed(on_meta(), tmp_path / "other.safetensors"), tmp_path / "b.safetensors")
    assert (tmp_path / "b.safetensors").read_bytes() == ours.path.read_bytes()


def test_versions(exported, tmp_path):
    """Older readers refuse the file by its version, and read files without such matrices."""
    model, path = exported
    assert PackedFile(path).metadata["version"] == "3"
    packed = json.loads(PackedFile(path).metadata["packed"])
    assert {key: each["pattern"] for key, each in packed.items()} == {
        "words.weight": "dense",
        "scaled.weight": "dense",
        "middle.weight": "2:4",
        "tied.weight": "dense",
    }
    assert PackedFile(path).aliases == {"head.weight": "tied.weight"}
    save_packed(pack(copied(model), dtype="int8"), tmp_path / "other.safetensors")
    assert PackedFile(tmp_path / "other.safetensors").metadata["version"] == "2"


def test_verify(exported, capsys):
    _, path = exported
    result = verify(path)
    assert result.ok
    assert [verdict.key for verdict in result.verdicts] == ["middle.weight"]
    assert (result.count("N:M"), result.count("dense")) == (1, 4)
    dense = verify(path, "2:4")
    assert "4 of 5 matrices are dense" in dense.problems[0]
    assert verify(path, "2:4", allow_dense=True).ok


def test_what_is_refused(tmp_path, capsys):
    model = model_of()
    for globs in ("middle", "head", "scaled", ["words", "none"]):
        with pytest.raises(ValueError, match=r"matches no nn.Embedding whose weight is its own"):
            pack(copied(model), dtype="int8", int8_embeddings=globs)
    with pytest.raises(ValueError, match=r"`int8_embeddings` needs dtype='int8'"):
        pack(copied(model), int8_embeddings="words")
    broken = copied(model)
    broken.words.weight.data[1, 1] = torch.nan
    before = clones(broken)
    with pytest.raises(ValueError, match=r"'words.weight' has no int8 form.*`int8_embeddings`"):
        pack(broken, dtype="int8", int8_embeddings="*")
    assert before.keys() == broken.state_dict().keys()
    torch.save(model.state_dict(), tmp_path / "a.pt")
    torch.save(broken.state_dict(), tmp_path / "broken.pt")
    for file, options, message in (
        ("a.pt", ("--int8-embeddings", "words"), "are for --dtype int8"),
        ("a.pt", ("--int8-experts", "words"), "are for --dtype int8"),
        (
            "a.pt",
            ("--dtype", "int8", "--int8-embeddings", "middle"),
            "--int8-embeddings 'middle' matches no matrix that is not N:M",
        ),
        (
            "a.pt",
            ("--dtype", "int8", "--int8-experts", "*"),
            "--int8-experts '*' matches no N:M weight of three axes",
        ),
        (
            "broken.pt",
            ("--dtype", "int8", "--int8-embeddings", "*"),
            "'words.weight' of",
        ),
    ):
        assert run(tmp_path / file, "-o", tmp_path / "a.safetensors", *options) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "a.safetensors").exists()


HOSTILE = {
    "version": (lambda h, p: h["__metadata__"].update(version="2"), "'dense' as an N:M pattern"),
    "layout": (lambda h, p: p["words.weight"].update(layout="transposed"), "a dense matrix is not"),
    "axes": (lambda h, p: p["words.weight"].update(shape=[40, 8, 4]), "a dense matrix is not"),
    "shape": (
        lambda h, p: p["words.weight"].update(shape=[32, 40]),
        r"'words.weight.values' is torch.int8 \(40, 32, 1\), not torch.int8 \(32, 40, 1\)",
    ),
    "not in int8": (lambda h, p: p["words.weight"].pop("values"), "a dense matrix is not"),
    "N:M": (
        lambda h, p: p["words.weight"].update(pattern="2:4"),
        r"'words.weight.values' is torch.int8 \(40, 32, 1\), not",
    ),
    "dense": (
        lambda h, p: p["middle.weight"].update(pattern="dense"),
        r"'middle.weight.values' is torch.int8 \(32, 8, 2\), not torch.int8 \(32, 32, 1\)",
    ),
    "scales": (
        lambda h, p: h["words.weight.scales"].update(shape=[20, 2]),
        r"'words.weight.scales' is torch.float32 \(20, 2\), not",
    ),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_hostile_headers(exported, fault):
    model, path = exported
    change, message = HOSTILE[fault]
    header, content = header_of(path)
    packed = json.loads(header["__metadata__"]["packed"])
    change(header, packed)
    header["__metadata__"]["packed"] = json.dumps(packed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    before = clones(model)
    with pytest.raises(ValueError, match=message) as raised:
        load_packed(model, path)
    assert str(path) in str(raised.value)
    assert_equal_states(clones(model), before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no checksums", "ignore:tensors of .* NaN or infinite")
def test_mutated_files(exported):
    """Every mutated file is refused by a ValueError, or loads as a model of the same shapes that runs."""
    model, path = exported
    without_checksums(path)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    rng, loaded, refused = random.Random(0), 0, []
    for _ in range(800):
        path.write_bytes(mutated(rng, content, start))
        other = on_meta()
        try:
            load_packed(other, path, kernels="reference")
        except ValueError as error:
            refused.append(str(error))
            continue
        loaded += 1
        shapes = {key: value.shape for key, value in unpacked_state_dict(other).items()}
        assert shapes == {key: value.shape for key, value in model.state_dict().items()}
        other.words(IDS)
    assert 0 < loaded < 500
    assert all(str(path) in message for message in refused)


# ------------------------------------------------------------------------------------------------------------- experts


def experts_of(kind, dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": kind(), "conv": nn.Conv1d(16, 8, 3)}).to(dtype).eval()
    for name in ("up", "down"):
        weight = getattr(model["experts"], name)
        weight.data = nm_prune(weight.data, "1:16", 1 if kind.transposed else 2)
    model["conv"].weight.data = nm_prune(model["conv"].weight.data, "1:16", 1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_experts_by_name(tmp_path, capsys, kind, dtype):
    """The file has the weights of `pack(model, dtype="int8")`; a convolution of three axes stays as it was."""
    model = experts_of(kind, dtype)
    torch.save(model.state_dict(), tmp_path / "a.pt")
    path = tmp_path / "a.safetensors"
    options = ("--dtype", "int8", "--int8-experts", "experts.*")
    assert run(tmp_path / "a.pt", "-o", path, *options) == 0
    packed = pack(copied(model), dtype="int8", exclude="conv", kernels="reference")
    save_packed(packed, tmp_path / "b.safetensors")
    ours, theirs = PackedFile(path), PackedFile(tmp_path / "b.safetensors")
    for key in ("experts.up", "experts.down"):
        assert ours.packed[key] == theirs.packed[key]
        for a, b in zip(ours.read(key), theirs.read(key), strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    loaded = load_packed(experts_of(kind), path, kernels="reference")
    assert {name: weight.is_int8 for name, weight in packed_weights(loaded)} == {
        "experts.up": True,
        "experts.down": True,
        "conv.weight": False,
    }
    x, ids = torch.randn(5, WIDTH, dtype=dtype), torch.arange(5) % 4
    assert torch.equal(loaded["experts"](x, ids), packed["experts"](x, ids))
    # By default none is.
    assert run(tmp_path / "a.pt", "-o", path, "--dtype", "int8") == 0
    assert not any(entry.int8 for entry in PackedFile(path).packed.values())


def test_names_that_are_not_of_experts(tmp_path, capsys):
    """A convolution that was named as experts does not load as one; blocks across rows are none of experts."""
    model = experts_of(Experts)
    path = tmp_path / "a.safetensors"
    torch.save(model.state_dict(), tmp_path / "a.pt")
    assert run(tmp_path / "a.pt", "-o", path, "--dtype", "int8", "--int8-experts", "*") == 0
    with pytest.raises(ValueError, match=r"'conv.weight' of .* does not fit the model: scales"):
        load_packed(copied(model), path)
    weight = nm_prune(torch.randn(8, 48), "1:16").view(8, 16, 3).contiguous()
    torch.save({"conv.weight": weight}, tmp_path / "a.pt")
    capsys.readouterr()
    assert run(tmp_path / "a.pt", "-o", path, "--dtype", "int8", "--int8-experts", "*") == 2
    assert (
        "its blocks lie across rows, so that it is no weight of experts" in capsys.readouterr().err
    )


# --------------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("dtype", "embeddings", "experts"),
    [
        (None, (), ()),
        ("int8", (), ()),
        ("int8", ("*",), ()),
        ("int8", ("words", "head"), ("experts.up",)),
        ("int8", (), ("experts.*",)),
    ],
)
def test_bytes_are_those_of_the_file(tmp_path, dtype, embeddings, experts):
    """Of each key, and of all: a tied weight counts once."""
    weights = {**model_of().state_dict(), **experts_of(Experts).state_dict()}
    weights["number"] = torch.tensor(3)
    torch.save(weights, tmp_path / "a.pt")
    source = read_checkpoint(tmp_path / "a.pt")
    path = tmp_path / "a.safetensors"
    written = export_packed(source, path, None, dtype, experts, embeddings)
    file = PackedFile(path)
    sizes = {name: file.read_stored(name).nbytes for name in file.entries}
    for each in written:
        parts = [f"{each.key}.{part}" for part in ("values", "positions", "scales")]
        own = [each.key, *(parts if each.key in file.packed else ())]
        assert each.bytes == sum(sizes.get(name, 0) for name in own), each
    assert sum(each.bytes for each in written) == sum(sizes.values())
    assert sum(each.dense_bytes for each in written) == sum(
        weights[key].nbytes for key in weights if key != "head.weight"
    )
    assert {each.key for each in written} == set(weights) == set(file.names())
    tied = file.packed.get("tied.weight")
    assert (tied is not None and tied.int8) == bool(embeddings), "its other name was given"


def test_the_table_of_parts(tmp_path, capsys):
    weights = {**model_of().state_dict(), **experts_of(Experts).state_dict()}
    torch.save(weights, tmp_path / "a.pt")
    sizes = {}
    for options in ((), ("--int8-embeddings", "*", "--int8-experts", "experts.*")):
        output = tmp_path / "a.safetensors"
        assert run(tmp_path / "a.pt", "-o", output, "--dtype", "int8", *options) == 0
        said = capsys.readouterr().out
        table = said[said.index("parts") :]
        rows = [line.split() for line in table.splitlines() if line.startswith(" ") and "%" in line]
        shares = [float(cell[:-1]) for row in rows for cell in row if cell.endswith("%")]
        assert math.isclose(sum(shares), 100, abs_tol=0.1 * len(rows))
        assert shares == sorted(shares, reverse=True)
        sizes[options] = output.stat().st_size
        joined = " ".join(table.split())
        assert ("N:M, int8, three axes 2 " in joined) == bool(options)
        assert ("dense, int8 3 " in joined) == bool(options)
        (in_float,) = (line for line in table.splitlines() if line.startswith("not in int8: "))
        assert ("dense matrices (embeddings: --int8-embeddings GLOB)" in in_float) == (not options)
        assert "of the file are N:M weights of three axes (of experts: --int8-experts" in in_float
    small, large = sorted(sizes.values())
    assert small < 0.7 * large


def test_the_benchmark_of_a_head(capsys):
    int8_head.main(["--words", "64", "--width", "64", "--tokens", "1", "2", "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tokens", "1", "2"]
