"""Embeddings and experts in int8: what is held in memory, what they compute, and the parts of a file by size."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import int8_head
from lightning_nm import load_packed, pack, packed_summary, unpacked_state_dict, warm_up
from lightning_nm.export import PackedFile, verify
from lightning_nm.export.outputs import export_packed
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.functional import nm_prune
from lightning_nm.packed.module import packed_weights
from tests.support.cpu_products import needs_library
from tests.support.experts import Experts
from tests.support.packed_models import Embeddings, clones, copied, on_meta, prune

IDS = torch.arange(40).view(2, 20)
GLOBS = "--int8-embeddings words --int8-embeddings scaled --int8-embeddings embed"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def embeddings(dtype=torch.float32):
    torch.manual_seed(0)
    model = prune(Embeddings().to(dtype), "2:4")
    # Rows of very different sizes, and one of zeros.
    model.words.weight.data *= torch.logspace(-6, 6, 40, base=10)[:, None].to(dtype)
    return model


def packed(dtype=torch.float32, kernels="reference"):
    return pack(
        embeddings(dtype), dtype="int8", int8_embeddings=["words", "embed"], kernels=kernels
    )


# ---------------------------------------------------------------------------------------------------------- embeddings


@DTYPES
def test_rows_are_rounded_to_127_steps(dtype):
    """Each entry is a multiple of its row's scale, and at most half a step off."""
    found = unpacked_state_dict(packed(dtype))
    # bfloat16 rounds once more.
    rest = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-22
    for key in ("words.weight", "embed.weight"):
        weight = embeddings(dtype).state_dict()[key].double()
        step = weight.abs().amax(1, keepdim=True) / 127
        error = (found[key].double() - weight).abs()
        assert (error <= step / 2 + weight.abs() * rest + step * 1e-5).all(), key
        assert error.max() > 0, "something was rounded"
        assert (found[key][weight == 0] == 0).all()


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
@DTYPES
def test_lookups_are_those_of_the_dequantised_matrix(command, dtype, kernels):
    torch.save(embeddings(dtype).state_dict(), "a.pt")
    command(f"export a.pt -o a.safetensors --dtype int8 {GLOBS}")
    loaded = load_packed(on_meta(Embeddings), "a.safetensors", kernels=kernels)
    held, state = dict(packed_weights(loaded)), unpacked_state_dict(loaded)
    # The file has more: one with a forward of its own is dense in memory.
    assert set(held) == set(PackedFile("a.safetensors").packed) - {"scaled.weight"}
    for name, rows in (("words", 40), ("embed", 24)):
        weight = held[f"{name}.weight"]
        assert (weight.form, weight.nbytes) == ("packed int8", rows * 32 + rows * 4)
        ids = IDS % rows
        expected = F.embedding(ids, state[f"{name}.weight"])
        assert torch.equal(loaded.get_submodule(name)(ids), expected)
        assert expected.dtype == dtype
    assert loaded.words(torch.tensor(5)).shape == (32,)
    assert torch.equal(loaded.scaled(IDS), F.embedding(IDS, state["scaled.weight"]) * 3)
    assert loaded.head.weight is loaded.embed.weight
    assert state["embed.weight"] is state["head.weight"]
    loaded.train()
    with pytest.raises(RuntimeError, match=r"'words\.weight' is packed and cannot be trained"):
        loaded.words(IDS)


@needs_library
@pytest.mark.parametrize("kernels", ["auto", "sparse"])
@DTYPES
def test_a_tied_head_multiplies_by_the_rows(dtype, kernels):
    """It rounds tokens to 16 bits, and the rest as the float64 GEMM with the dequantised matrix is rounded."""
    model = packed(dtype, kernels)
    weight = model.embed.weight
    rows = weight.values.squeeze(-1).double() * weight.scales.double()[:, None]
    eps = torch.finfo(dtype).eps
    for shape in ((32,), (1, 1, 32), (2, 20, 32), (300, 32)):
        x = torch.randn(shape).to(dtype)
        exact, found = x.double() @ rows.t(), model.head(x)
        assert (found.shape, found.dtype) == ((*shape[:-1], 24), dtype)
        # More tokens are multiplied by the dequantised matrix, which is rounded to the dtype.
        of_tokens = 2.0**-16 if len(x) < 300 else eps
        bound = x.double().abs().amax(-1, True) * rows.abs().sum(-1) * of_tokens
        assert ((found.double() - exact).abs() <= exact.abs() * eps + bound).all()
    assert model.head(x[:0]).shape == (0, 24)
    assert weight.values is not None, "it stays in int8"
    x = torch.randn(2, 32).to(dtype).requires_grad_()
    model.head(x).sum().backward()
    assert torch.allclose(x.grad.double(), rows.sum(0).expand(2, -1), rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.head(torch.randn(2, 31).to(dtype))
    assert model.head(torch.full((1, 32), math.nan).to(dtype)).isnan().all()
    # GEMMs with some rows have their columns alone, with their part of the bias.
    bias = torch.randn(24).to(dtype)
    expected = F.linear(x, weight.unpack()[4:10], bias[4:10])
    assert torch.equal(weight.linear(x, bias, rows=(4, 10)), expected)


@needs_library
@pytest.mark.parametrize("dtype", ["int8", None])
def test_tensors_may_move_into_shared_memory(dtype):
    """A GEMM after it reads them where they are, not where they were."""
    model = nn.Sequential(nn.Linear(256, 128))
    model[0].weight.data = nm_prune(model[0].weight.data, "2:8")
    pack(model, dtype=dtype, kernels="sparse")
    assert model[0].weight.operand is not None
    x = torch.randn(2, 256)
    expected = model(x)
    for tensor in model.buffers():
        tensor.share_memory_()
    assert torch.equal(model(x), expected)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("kernels", ["sparse", "reference"])
def test_graphs(kernels):
    """A compiled one multiplies by the rows of the head where the model does; an exported one needs no kernel."""
    model = packed(kernels=kernels)
    calls = []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert torch.equal(compiled(IDS), model(IDS))
    assert any("packed_rows" in call for call in calls) == (kernels == "sparse")
    exported = torch.export.export(model, (IDS,)).module()
    assert torch.allclose(exported(IDS), packed()(IDS))


def test_copies_and_conversions():
    model = packed()
    low = copy.deepcopy(model).bfloat16()
    assert low.words(IDS).dtype == torch.bfloat16
    assert torch.equal(low.words(IDS), model.words(IDS).bfloat16())
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), low):
        assert isinstance(each.words, nn.Embedding)
        assert each.head.weight is each.embed.weight
        assert each.embed.weight.values.data_ptr() != model.embed.weight.values.data_ptr()
    warm_up(packed(kernels="auto"), tokens=[4])
    assert "words.weight" in str(packed_summary(model))


def test_verify(command):
    torch.save(embeddings().state_dict(), "a.pt")
    command(f"export a.pt -o a.safetensors --dtype int8 {GLOBS}")
    result = verify("a.safetensors")
    assert result.ok
    assert [verdict.key for verdict in result.verdicts] == ["middle.weight"]
    assert (result.count("N:M"), result.count("dense")) == (1, 4)
    assert "4 of 5 matrices are dense" in verify("a.safetensors", "2:4").problems[0]
    assert verify("a.safetensors", "2:4", allow_dense=True).ok


class DoubleHead(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def test_embeddings_that_are_refused():
    model = embeddings()
    not_linear, own_forward, broken = copied(model), copied(model), copied(model)
    not_linear.head.__class__ = DoubleHead
    own_forward.head.forward = lambda input: input
    broken.words.weight.data[1, 1] = torch.nan
    own = "matches no nn.Embedding whose weight is its own"
    for given, globs, message in (
        *((model, globs, own) for globs in ("middle", "head", "scaled", ["words", "none"])),
        (not_linear, "embed", own),
        (own_forward, "embed", own),
        (broken, "*", "'words.weight' has no int8 form.*`int8_embeddings`"),
    ):
        keys = clones(given).keys()
        with pytest.raises(ValueError, match=message):
            pack(given, dtype="int8", int8_embeddings=globs)
        assert given.state_dict().keys() == keys
    with pytest.raises(ValueError, match="`int8_embeddings` needs dtype='int8'"):
        pack(model, int8_embeddings="words")


# ------------------------------------------------------------------------------------------------------------- experts


def mixture():
    """Experts, and a convolution whose weight has as many axes."""
    torch.manual_seed(0)
    return prune(nn.ModuleDict({"experts": Experts(), "conv": nn.Conv1d(16, 8, 3)}), "1:16")


def test_experts_are_named(command):
    """A convolution that was named as experts does not load as one; blocks across rows are none of experts."""
    torch.save(mixture().state_dict(), "a.pt")
    in_int8 = "export a.pt -o a.safetensors --dtype int8"
    for globs, keys in (("", set()), ("--int8-experts experts.*", {"experts.up", "experts.down"})):
        command(f"{in_int8} {globs}")
        packed = PackedFile("a.safetensors").packed
        assert {key for key, entry in packed.items() if entry.int8} == keys
        held = dict(packed_weights(load_packed(mixture(), "a.safetensors")))
        assert {key for key, weight in held.items() if weight.is_int8} == keys
        assert "conv.weight" in held
    command(f"{in_int8} --int8-experts *")
    with pytest.raises(ValueError, match=r"'conv\.weight' of .* does not fit the model: scales"):
        load_packed(mixture(), "a.safetensors")
    weight = nm_prune(torch.randn(8, 48), "1:16").view(8, 16, 3).contiguous()
    torch.save({"conv.weight": weight}, "a.pt")
    assert "its blocks lie across rows, so that it is no weight of experts" in command(
        f"{in_int8} --int8-experts *", 2
    )


# --------------------------------------------------------------------------------------------------------------- sizes


def save_all():
    weights = {**embeddings().state_dict(), **mixture().state_dict(), "n": torch.tensor(3)}
    torch.save(weights, "a.pt")
    return weights


@pytest.mark.parametrize(
    ("dtype", "globs_of_embeddings", "globs_of_experts"),
    [
        (None, (), ()),
        ("int8", (), ()),
        ("int8", ("*",), ()),
        ("int8", ("words", "head"), ("experts.up",)),
        ("int8", (), ("experts.*",)),
    ],
)
def test_bytes_are_those_of_the_file(dtype, globs_of_embeddings, globs_of_experts):
    """Of each key, and of all: a tied weight counts once."""
    weights = save_all()
    source = read_checkpoint("a.pt")
    written = export_packed(
        source, "a.safetensors", None, dtype, globs_of_experts, globs_of_embeddings
    )
    file = PackedFile("a.safetensors")
    sizes = {name: file.read_stored(name).nbytes for name in file.entries}
    for each in written:
        own = {each.key, *(f"{each.key}.{part}" for part in ("values", "positions", "scales"))}
        assert each.bytes == sum(size for name, size in sizes.items() if name in own), each
    assert sum(each.bytes for each in written) == sum(sizes.values())
    dense_bytes = sum(weight.nbytes for key, weight in weights.items() if key != "head.weight")
    assert sum(each.dense_bytes for each in written) == dense_bytes
    assert {each.key for each in written} == set(weights) == set(file.names())
    tied = file.packed.get("embed.weight")
    assert (tied is not None and tied.int8) == bool(globs_of_embeddings), "its other name was given"


@pytest.mark.parametrize("options", ["", "--int8-embeddings * --int8-experts experts.*"])
def test_the_table_of_parts(command, options):
    save_all()
    said = command(f"export a.pt -o a.safetensors --dtype int8 {options}")
    table, in_float = said[said.index("parts") :].split("not in int8: ")
    shares = [float(cell[:-1]) for cell in table.split() if cell.endswith("%")]
    assert math.isclose(sum(shares), 100, abs_tol=0.5)
    assert shares == sorted(shares, reverse=True)
    joined = " ".join(table.split())
    for part in ("N:M, int8, three axes 2 ", "dense, int8 3 "):
        assert (part in joined) == bool(options)
    assert ("dense matrices (embeddings: --int8-embeddings GLOB)" in in_float) != bool(options)
    assert "of the file are N:M weights of three axes (of experts: --int8-experts" in in_float


def test_the_benchmark_of_a_head(capsys):
    int8_head.main(["--words", "64", "--width", "64", "--tokens", "1", "2", "--repeats", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["tokens", "1", "2"]
