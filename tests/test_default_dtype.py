"""torch's default dtype, which precision plugins set around training steps, changes no number of the package."""

import ast
import copy
import math
from pathlib import Path
from typing import get_args

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import (
    MVUE,
    NMSparsifier,
    NMSparsityCallback,
    load_packed,
    pack,
    prune,
    save_packed,
)
from lightning_nm import functional as nmf
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.functional.permutation import Criterion, Search
from lightning_nm.functional.soft import gumbel_noise, normal_noise
from lightning_nm.kernels.cpu.int8 import CpuInt8Kernel
from tests.support.contract import ESTIMATORS, METHODS, OPTIONS, accepted
from tests.support.cpu_products import KERNELS
from tests.support.default_dtype import OTHERS, default_dtype, same
from tests.support.kinds import KINDS, make
from tests.support.metric_cases import CASES as METRICS
from tests.support.routed import attach, gradients, simulated

PACKAGE = Path(__file__).parent.parent / "lightning_nm"
defaults = pytest.mark.parametrize("default", OTHERS, ids=str)

FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye"),
    *("frombuffer", "full", "linspace", "logspace", "normal", "ones", "rand", "randn", "range"),
    *("scalar_tensor", "sparse_coo_tensor", "tensor", "zeros"),
}
"""Functions of torch that take the default dtype where none is given, or that of Python's numbers."""
MAY_ASK = {"export/packed_model.py"}
"""Files that read the default dtype: whether a model was converted on purpose."""


def faults(source):
    """Calls that leave a dtype to torch, and readings of the default, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        module, name = node.func.value, node.func.attr
        if not (isinstance(module, ast.Name) and module.id == "torch"):
            continue
        given = {keyword.arg for keyword in node.keywords}
        makes = name in FACTORIES and "dtype" not in given
        # Between two Python numbers torch.where() makes a tensor of the default dtype.
        chooses = name == "where" and all(isinstance(arg, ast.Constant) for arg in node.args[1:])
        asks = name == "get_default_dtype" or (name == "finfo" and not node.args)
        if makes or chooses or asks:
            yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "is_fault"),
    [
        ("torch.zeros(3)", True),
        ("torch.zeros(3, dtype=torch.int64)", False),
        ("torch.tensor([0.5], device=device)", True),
        ("torch.where(mask, 1.0, 0.0)", True),
        ("torch.where(mask, values, 0.0)", False),
        ("weight.new_zeros(3)", False),
        ("torch.finfo().eps", True),
        ("torch.get_default_dtype()", True),
    ],
)
def test_what_leaves_a_dtype_to_torch_is_found(source, is_fault):
    assert bool(list(faults(source))) == is_fault


def test_every_tensor_is_made_with_a_dtype():
    found = [
        f"{path}:{line}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in MAY_ASK
        for line, call in faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def network(dtype=torch.float32):
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.Linear(32, 16),
    )
    return nn.Sequential(*layers).to(dtype)


def trained(default, method, dtype=torch.float32, **options):
    """All that a training leaves behind: weights, our state and the optimizer's, statistics."""
    model = network(dtype)
    batches = torch.randn(6, 4, 8, 4, 4).to(dtype)
    with default_dtype(default):
        sparsifier = NMSparsifier(
            model, "2:4", METHODS[method](), **OPTIONS.get(method, {}), **options
        ).attach()
        if accepted(method, "sgd", "adamw") == "sgd":
            optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        sparsifier.register(optimizer)
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        stats = sparsifier.stats()
        state = copy.deepcopy(sparsifier.state_dict())
        sparsifier.bake()
    moments = [
        # torch's own Adam counts its steps in float64 under a default of float64.
        {key: value.float() if key == "step" else value for key, value in each.items()}
        for each in optimizer.state.values()
    ]
    return model.state_dict(), state, moments, stats


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("dtype", "default"),
    [*((torch.float32, other) for other in OTHERS), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
def test_every_method_trains_alike(method, dtype, default):
    assert same(trained(default, method, dtype), trained(torch.float32, method, dtype))


@defaults
@pytest.mark.parametrize(
    ("method", "options"),
    [
        *(("bi-mask", {"grad_estimator": make}) for make in ESTIMATORS.values()),
        ("bi-mask", {"scale": lambda: "supar"}),
        ("slope", {"scale": lambda: "supar-lr"}),
    ],
    ids=[*ESTIMATORS, "supar", "supar-lr"],
)
def test_estimators_and_scales_train_alike(method, options, default):
    def run(default):
        return trained(default, method, **{name: make() for name, make in options.items()})

    assert same(run(default), run(torch.float32))


@defaults
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_kind_computes_alike(kind, default):
    def run(default):
        module, x = make(kind, torch.float32)
        with default_dtype(default):
            attach(module, "2:4", "bi-mask", MVUE("2:4"))
            plain = gradients(module, x, None)
            # The router draws the operands of its checks.
            return plain, gradients(module, x, simulated())

    assert same(run(default), run(torch.float32))


@defaults
@pytest.mark.parametrize("search", get_args(Search))
@pytest.mark.parametrize("criterion", get_args(Criterion))
def test_permutations_are_found_alike(search, criterion, default):
    weight = torch.randn(32, 24, generator=seeded())
    mask = nmf.magnitude_mask(weight, "2:4")

    def run(default):
        with default_dtype(default):
            return nmf.search_permutation(
                weight, mask, "2:4", search=search, criterion=criterion, generator=seeded()
            )

    assert same(run(default), run(torch.float32))


def seeded():
    return torch.Generator().manual_seed(0)


def statistics(x):
    mask, other = nmf.magnitude_mask(x, "2:4"), nmf.magnitude_mask(x.roll(1, -1), "2:4")
    return (
        nmf.mask_density(mask),
        nmf.mask_flip_rate(mask, other),
        nmf.mask_oscillation([mask, other, mask]),
        nmf.mask_overlap(mask, mask & other),
        nmf.kept_magnitude(x, mask),
        nmf.gradient_snr(x, x * mask),
        nmf.mask_margin(x, mask, "2:4"),
    )


FUNCTIONS = {
    "noise": lambda x: [
        draw(30, nmf.fold_seed(0)) for draw in (nmf.counter_uniform, gumbel_noise, normal_noise)
    ],
    "mvue": lambda x: [
        nmf.mvue_probabilities(x, "2:4"),
        nmf.mvue(x, "2:4", generator=seeded()),
        nmf.mvue(x, "1:8", generator=seeded()),
        nmf.approx_mvue(x, "2:4", generator=seeded()),
    ],
    "masks": lambda x: [
        [nmf.nm_mask(x, pattern), nmf.nm_prune(x, pattern), nmf.backward_mask(x, None, pattern)]
        for pattern in ("2:4", "1:16", "4:8")
    ],
    "transposable": lambda x: [nmf.transposable_mask(x, p) for p in ("2:4", "4:8", "3:16")],
    "soft threshold": lambda x: nmf.soft_threshold_nm(x, "2:4"),
    "files": lambda x: [nmf.pack_nm(nmf.nm_prune(x, p), p) for p in ("2:4", "1:16", "7:16")],
    "int8": lambda x: [nmf.quantise_weight(x), nmf.quantise_tokens(x), nmf.fake_quantise_tokens(x)],
    "calibration": lambda x: [wanda_mask(x, x[0].abs(), "2:4"), sparsegpt(x, x.t() @ x, "2:4")],
    "allocation": lambda x: [
        nmf.retained_magnitudes(x, 8),
        nmf.allocate([[0.5, 0.2], [0.9, 0.1]], [[1.0, 3.0], [2.0, 4.0]], 5.5),
    ],
    "statistics": statistics,
    "checks of the CPU kernels": lambda x: [
        kernel.probe(x.device) for kernel in (*KERNELS, CpuInt8Kernel())
    ],
}


@defaults
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_return_the_same(name, default):
    x = torch.randn(32, 48, generator=seeded())

    def run(default):
        with default_dtype(default):
            return FUNCTIONS[name](x)

    assert same(run(default), run(torch.float32))


@defaults
@pytest.mark.parametrize("name", METRICS)
def test_metrics_have_the_same_value(name, default):
    def run(default):
        with default_dtype(default):
            metric = METRICS[name].make()
            for update in METRICS[name].updates:
                metric.update(**update)
            return metric.compute()

    assert same(run(default), run(torch.float32))


@pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
@defaults
@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
def test_a_model_is_pruned_packed_and_loaded_alike(score, default, tmp_path):
    data = [torch.randn(4, 8, 4, 4, generator=seeded())]
    by_budget = {"budget": 0.6, "candidates": ["1:4", "2:4"]}

    path = tmp_path / "packed.safetensors"

    def run(default):
        found, models = [], [network(), network()]
        with default_dtype(default):
            for model, options in zip(models, ({"pattern": "2:4"}, by_budget), strict=True):
                prune(model, score=score, data=data, skip_first_last=False, **options)
                found.append(copy.deepcopy(model.state_dict()))
                for dtype in (None, "int8"):
                    packed = pack(copy.deepcopy(model), dtype=dtype, kernels="reference")
                    save_packed(packed, path)
                    loaded = load_packed(copy.deepcopy(model), path, kernels="reference")
                    found.append((packed.state_dict(), loaded(data[0])))
        return found

    assert same(run(default), run(torch.float32))


class Net(pl.LightningModule):
    """Knows the loss of each training step."""

    def __init__(self, method):
        super().__init__()
        self.method = method
        self.net = network()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        if accepted(self.method, "sgd", "adamw") == "sgd":
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 0.01)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_under_a_precision_plugin(method, precision):
    model = Net(method)
    callback = NMSparsityCallback(
        "2:4",
        METHODS[method](),
        grad_estimator=MVUE("2:4"),
        show_tables=False,
        **OPTIONS.get(method, {}),
    )
    trainer = pl.Trainer(
        max_steps=6,
        precision=precision,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(24, 8, 4, 4, generator=seeded())), 4))
    assert len(model.losses) == 6
    assert all(map(math.isfinite, model.losses))
    assert all(weight.isfinite().all() for weight in model.state_dict().values())
