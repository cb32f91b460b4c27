"""Exports for an Ethos-U85 by ExecuTorch and Vela: what the compiler takes as sparse, as the rules say."""

import os
from importlib.metadata import version

import pytest
import torch
from torch import nn

pytest.importorskip("executorch", reason="executorch is not installed: make ethos")
pytest.importorskip("ethosu", reason="ethos-u-vela is not installed: make ethos")

from lightning_nm.export import export_executorch
from lightning_nm.functional import nm_prune
from tests.export.executorch_programs.nets import images, sparse_conv_net

# ExecuTorch and torchao warn of each other's deprecated names.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

EXAMPLE = (torch.zeros(1, 3, 32, 32),)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("ethos") / "model.pte"
    model = sparse_conv_net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = export_executorch(model, path, EXAMPLE, calibration=images(4, 4))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    return result, path


def by_layer(result):
    return {each.module: each for each in result.operators if each.has_weight}


def test_layers_that_are_sparse_cost_half(exported):
    result, path = exported
    assert path.stat().st_size == result.bytes
    operators = by_layer(result)
    assert {name for name, each in operators.items() if each.sparse} == {"c2", "c3", "fc"}
    for name in ("c2", "c3"):
        assert 1.9 < operators[name].dense_cycles / operators[name].cycles < 2.1
    assert operators["c1"].dense_cycles == operators["c1"].cycles
    assert "depth 3 is no multiple of 4" in operators["c1"].reason
    assert "depthwise" in operators["depthwise"].reason
    assert "hold more than 2 of 4" in operators["head"].reason
    assert result.cycles == sum(each.cycles for each in result.operators)
    saved = sum(each.dense_cycles - each.cycles for each in operators.values())
    assert result.dense_cycles - result.cycles == saved > 0


@pytest.mark.skipif(version("ethos-u-vela") != "5.1.0", reason="estimates change with Vela")
def test_the_estimates_of_the_documentation(exported):
    convolution = by_layer(exported[0])["c3"]
    assert (convolution.dense_cycles, convolution.cycles) == (200020, 100180)


def test_patterns_of_the_quantised_weights(exported):
    result, _ = exported
    patterns = {each.key: each.pattern for each in result.layers}
    assert {key for key, pattern in patterns.items() if pattern == "2:4"} == {
        "c2.weight",
        "c3.weight",
        "fc.weight",
    }
    assert all(0.45 < each.density <= 0.5 for each in result.layers if each.pattern)
    assert result.in_float == {}


def test_sparser_patterns_shrink_the_file_and_cost_as_much(exported):
    result, _ = exported
    model = sparse_conv_net("1:8")
    sparser = export_executorch(model, "m.pte", EXAMPLE, calibration=images(4))
    cycles = {name: each.cycles for name, each in by_layer(result).items()}
    assert by_layer(sparser)["c3"].cycles == cycles["c3"]
    assert result.bytes == pytest.approx(result.dense_bytes, rel=0.02)
    assert sparser.bytes < 0.6 * result.bytes


class Rows(nn.Module):
    """Layers of many depths and patterns one after another."""

    def __init__(self, depths, groups):
        super().__init__()
        sizes = [*depths, 16]
        self.layers = nn.ModuleList(
            nn.Conv2d(sizes[i], sizes[i + 1], 3, padding=1, groups=groups[i])
            for i in range(len(depths))
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize("seed", range(3))
def test_the_compiler_agrees_with_the_rules(seed):
    generator = torch.Generator().manual_seed(seed)

    def choose(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    depths = [choose(4, 6, 8, 10, 12, 16, 24) for _ in range(8)]
    model = Rows(depths, [1] * 8).eval()
    for layer in model.layers:
        # Blocks of four, of which the last one may be cut: at most `kept` nonzeros in each.
        kept = choose(1, 2, 2, 3, 4)
        depth = layer.weight.shape[1]
        padded = nn.functional.pad(layer.weight.data.movedim(1, -1), (0, -depth % 4))
        pruned = nm_prune(padded, f"{kept}:4") if kept < 4 else padded
        layer.weight.data = pruned[..., :depth].movedim(-1, 1).contiguous()
    # One layer that is N:M for the export to be made.
    model.layers.append(nn.Conv2d(16, 16, 1))
    model.layers[-1].weight.data = nm_prune(model.layers[-1].weight.data, "2:4", dim=1)
    example = (torch.randn(1, depths[0], 8, 8, generator=generator),)
    result = export_executorch(model, "m.pte", example, calibration=[example], compare_dense=False)
    found = [each for each in result.operators if each.has_weight]
    assert len(found) == 9
    for each in found:
        # Where the rules allow a sparse weight, the compiler may still find it slower; here it never does.
        assert each.sparse == (each.reason == ""), each
        assert "estimate" not in each.reason
    assert {each.sparse for each in found} == {True, False}
    assert result.dense_cycles is None


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else x


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x):
        return self.lstm(self.fc(x))[0]


class Affine(nn.Module):
    """A GEMM by ``addmm``, on which the quantizer fails."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.addmm(self.bias, self.fc(x), self.weight)


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        (Branches(), ValueError, r"cannot trace Branches for inputs float32 \[2, 8\]: "),
        (Recurrent(), ValueError, "'lstm': there is no int8 form of lstm"),
        (Affine(), (RuntimeError, ValueError), "EthosUQuantizer fails|in float"),
        (nn.Linear(8, 8), ValueError, r"no weight of Linear is N:M sparse: 'weight': "),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_models_that_cannot_be_exported(model, error, says):
    if hasattr(model, "fc"):
        model.fc.weight.data = nm_prune(model.fc.weight.data, "2:4")
    x = torch.randn(2, 8)
    with pytest.raises(error, match=says):
        export_executorch(model, "m.pte", (x,), calibration=[x])
    assert os.listdir() == []


def test_what_runs_on_the_host():
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 8))
    model[1].weight.data = nm_prune(model[1].weight.data, "2:4")
    tokens = torch.randint(32, (1, 4))
    result = export_executorch(model, "m.pte", (tokens,), calibration=[tokens], compare_dense=False)
    (undelegated,) = result.on_cpu
    assert "copy" in undelegated.operator


def test_a_compiler_that_fails_leaves_no_file():
    with pytest.raises(RuntimeError, match=r"cannot compile this model for ethos-u85-256"):
        export_executorch(
            sparse_conv_net(width=8),
            "m.pte",
            EXAMPLE,
            calibration=images(1),
            system_config="No_Such_Memory",
        )
    assert os.listdir() == []
