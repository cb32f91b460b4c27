"""torch's default dtype, which precision plugins set around training steps, changes no number of the package."""

import ast
import contextlib
import copy
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_nm import MVUE, load_packed, pack, prune, save_packed
from lightning_nm import functional as nmf
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.functional.permutation import Criterion, Search
from lightning_nm.functional.soft import gumbel_noise, normal_noise
from lightning_nm.kernels.cpu.int8_kernel import CpuInt8Kernel
from tests.support.contract import ESTIMATORS, METHODS, OPTIONS, accepted
from tests.support.cpu_products import KERNELS
from tests.support.kinds import KINDS, make
from tests.support.loop import Loop, adamw, same, sgd
from tests.support.metric_cases import CASES as METRICS
from tests.support.routed import attach, gradients, simulated

PACKAGE = Path(__file__).parent.parent / "lightning_nm"
TORCH = str(Path(torch.__file__).parent)

OTHERS = (torch.bfloat16, torch.float16, torch.float64)
"""What a precision plugin may make of the default dtype."""


class _Operations(TorchDispatchMode):
    """Notes the operations whose result has the default dtype, though no argument has or names it."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        default = torch.get_default_dtype()
        if any(_dtype(each) == default for each in tree_leaves(result)):
            given = tree_leaves((args, kwargs))
            if default not in given and default not in map(_dtype, given):
                self._note(operation)
        return result

    def _note(self, operation):
        """Keep the line of the package that called it, unless others did: an optimizer's own tensors are torch's."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.found.add(f"{frame.f_code.co_filename}:{frame.f_lineno}: {operation}")


def _dtype(value):
    return value.dtype if isinstance(value, torch.Tensor) else None


@contextlib.contextmanager
def default_dtype(dtype):
    """Set the default dtype; no operation that the package calls may take it, unless it is float32."""
    operations = _Operations()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if dtype == torch.float32 else operations:
            yield
    finally:
        torch.set_default_dtype(before)
    assert not operations.found, "\n".join(sorted(operations.found))


def assert_alike(function, prepare=tuple, defaults=OTHERS):
    """It returns the same of what is prepared, whatever the default dtype."""
    found = []
    for default in (torch.float32, *defaults):
        arguments = prepare()
        with default_dtype(default):
            found.append(function(*arguments))
        assert same(found[0], found[-1]), default


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


def trained(model, method, **options):
    """All that a training leaves behind: weights, our state and the optimizer's, statistics."""
    optimizer = {"sgd": sgd, "adamw": adamw}[accepted(method, "sgd", "adamw")]
    options = {"shape": (4, 8, 4, 4), "optimizer": optimizer, **OPTIONS.get(method, {}), **options}
    loop = Loop(model, METHODS[method](), **options)
    loop.train(range(6))
    states, stats = loop.save(), loop.sparsifier.stats()
    loop.end()
    for each in states[2]["state"].values():
        if "step" in each:
            # torch's own Adam counts its steps in float64 under a default of float64.
            each["step"] = float(each["step"])
    return model.state_dict(), states, stats


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_alike(method):
    """Also a model that is converted, as by some precision plugins."""
    assert_alike(lambda model: trained(model, method), lambda: [network()])
    for dtype in (torch.bfloat16, torch.float64):
        assert_alike(lambda model: trained(model, method), lambda d=dtype: [network(d)], [dtype])


@pytest.mark.parametrize(
    ("method", "option", "make"),
    [
        *(("bi-mask", "grad_estimator", make) for make in ESTIMATORS.values()),
        ("bi-mask", "scale", lambda: "supar"),
        ("slope", "scale", lambda: "supar-lr"),
    ],
)
def test_estimators_and_scales_train_alike(method, option, make):
    assert_alike(lambda model: trained(model, method, **{option: make()}), lambda: [network()])


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_kind_computes_alike(kind):
    def run(module, x):
        attach(module, "2:4", "bi-mask", MVUE("2:4"))
        # The router draws the operands of its checks.
        return gradients(module, x, None), gradients(module, x, simulated())

    assert_alike(run, lambda: make(kind, torch.float32))


@pytest.mark.parametrize("search", get_args(Search))
@pytest.mark.parametrize("criterion", get_args(Criterion))
def test_permutations_are_found_alike(search, criterion):
    options = {"search": search, "criterion": criterion}
    weight = torch.randn(32, 24, generator=seeded())
    mask = nmf.magnitude_mask(weight, "2:4")
    assert_alike(lambda: nmf.search_permutation(weight, mask, "2:4", generator=seeded(), **options))


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_return_the_same(name):
    x = torch.randn(32, 48, generator=seeded())
    assert_alike(lambda: FUNCTIONS[name](x))


@pytest.mark.parametrize("name", METRICS)
def test_metrics_have_the_same_value(name):
    def run():
        metric = METRICS[name].make()
        for update in METRICS[name].updates:
            metric.update(**update)
        return metric.compute()

    assert_alike(run)


@pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
def test_a_model_is_pruned_packed_and_loaded_alike(score, tmp_path):
    data = [torch.randn(4, 8, 4, 4, generator=seeded())]
    path = tmp_path / "packed.safetensors"

    def run(*models):
        found = []
        by_budget = {"budget": 0.6, "candidates": ["1:4", "2:4"]}
        for model, options in zip(models, ({"pattern": "2:4"}, by_budget), strict=True):
            prune(model, score=score, data=data, skip_first_last=False, **options)
            found.append(copy.deepcopy(model.state_dict()))
            for dtype in (None, "int8"):
                packed = pack(copy.deepcopy(model), dtype=dtype, kernels="reference")
                save_packed(packed, path)
                loaded = load_packed(copy.deepcopy(model), path, kernels="reference")
                found.append((packed.state_dict(), loaded(data[0])))
        return found

    assert_alike(run, lambda: [network(), network()])
