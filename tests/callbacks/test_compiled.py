"""torch.compile with a Trainer: no graph breaks, graphs that stay, and the training of eager code."""

import copy
import shutil
from functools import cache, partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_nm import BAME, BiMask, NMSparsifier, TransposableMask
from lightning_nm.commands.verify import main as verify
from lightning_nm.demo import ExactResume
from tests.support import lightning_models
from tests.support.lightning_models import (
    Net,
    SaveAt,
    assert_equal_models,
    callback,
    new_model,
    whole_and_resumed,
)
from tests.support.outside import ScaledMask

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
]
METHODS = {
    "transposable": lambda: TransposableMask(update_every=2),
    "bame": lambda: BAME(stop=12, every=2, budget=1.0, gradient_every=2),
    "bame-bi-mask": lambda: BAME(start=1, stop=12, every=2, budget=1.0, dgrad="bi-mask"),
    "bi-mask": lambda: BiMask(permute_every=3),
    "three-gemms": lambda: TransposableMask(update_every=2),
}
STILL = {"dense", "asp"}
CASES = [  # each method, each way to compile, before the masks are there or later
    ("dense", "layers", False),
    ("ste", "in place", False),
    ("sr-ste", "submodule", False),
    ("asp", "block", True),
    ("transposable", "layers", True),
    ("bi-mask", "whole", False),
    ("bame", "block", False),
    ("bame-bi-mask", "submodule", True),
    ("three-gemms", "in place", False),
]


@pytest.fixture(autouse=True)
def _no_graphs_of_others():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Part(nn.Sequential):
    """A block as users write them: torch's own containers are not compiled as such."""

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


class Model(Net):
    """In float64, and without logging in its steps, which breaks graphs."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.net = Part(*self.net)
        self.double()

    def step(self, batch, stage):
        x, y = batch
        return F.cross_entropy(self(x.double()), y)


def sparse(method):
    estimator = "mvue" if method == "three-gemms" else None
    made = METHODS.get(method, lambda: method)()
    return callback(made, grad_estimator=estimator, grad_snr_every=0)


def compile_parts(model, how, **options):
    """The model to hand to a Trainer."""
    if how == "whole":
        return torch.compile(model, **options)
    if how == "submodule":
        model.net = torch.compile(model.net, **options)
        return model
    parts = {"in place": [model], "block": [model.net]}.get(how, [])
    for part in [model.net[3], model.net[6]] if how == "layers" else parts:
        part.compile(**options)
    return model


class Watch(pl.Callback):
    """Compiles after the masks are there, if asked; then keeps the masks and the number of graphs of every step."""

    def __init__(self, how, counter):
        self.how, self.counter, self.masks, self.graphs = how, counter, [], []

    def on_train_start(self, trainer, pl_module):
        compile_parts(pl_module, self.how, backend=self.counter, fullgraph=True)

    def on_train_batch_end(self, trainer, pl_module, *args):
        layers = trainer.callbacks[0].sparsifier.layers.values()
        self.masks.append([tensor.clone() for layer in layers for tensor in layer.read_tensors()])
        self.graphs.append(self.counter.frame_count)


class Reload(pl.Callback):
    """Loads the state that there is."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        sparsifier = trainer.callbacks[0].sparsifier
        if batch_idx == 3:
            weights, state = copy.deepcopy((pl_module.state_dict(), sparsifier.state_dict()))
            pl_module.load_state_dict(weights)
            sparsifier.load_state_dict(state)


def fit(path, method, model, watch, *callbacks, **options):
    callbacks = [sparse(method), watch, ExactResume(), *callbacks]
    return lightning_models.fit(path, callbacks, model, num_sanity_val_steps=0, **options)[1]


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """The model and the masks of an eager run of a method, made once."""

    def run(method):
        watch = Watch("not at all", CompileCounterWithBackend("eager"))
        model = fit(tmp_path_factory.mktemp("eager"), method, new_model(of=Model), watch)
        assert watch.graphs[-1] == 0
        return model, watch.masks

    return cache(run)


def assert_close(a, b):
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


GCC = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("method", "how", "later", "backend"),
    [
        *(
            pytest.param(*case, "aot_eager", marks=() if "whole" in case else pytest.mark.slow)
            for case in CASES
        ),
        *(
            pytest.param(method, "submodule", False, "inductor", marks=(pytest.mark.slow, GCC))
            for method in ("sr-ste", "bi-mask", "bame-bi-mask", "three-gemms")
        ),
    ],
)
def test_compiled_training_is_eager_training(method, how, later, backend, eager, tmp_path):
    counter, path = CompileCounterWithBackend(backend), tmp_path / "mid.ckpt"
    watch = Watch(how if later else "not at all", counter)
    model = new_model(of=Model)
    # A graph break is an error.
    given = model if later else compile_parts(model, how, backend=counter, fullgraph=True)
    fit(tmp_path, method, given, watch, Reload(), SaveAt(path, 8))

    expected, masks = eager(method)
    assert_close(model, expected)
    moved = []
    for step, (found, other) in enumerate(zip(watch.masks, masks, strict=True)):
        assert all(map(torch.equal, found, other))
        moved.append(step and not all(map(torch.equal, found, masks[step - 1])))
    assert (sum(moved) >= 3) != (method in STILL)
    # One graph for training and one for evaluation; BAME has one more for training, without the dense gradient.
    assert watch.graphs[1] == watch.graphs[5], "recompiled within the first epoch"
    assert watch.graphs[6] == watch.graphs[-1], "recompiled after the first validation"
    assert watch.graphs[-1] == (1 + (how == "layers")) * (2 + method.startswith("bame"))

    # It goes on from its checkpoint, compiled and in eager code.
    before, again = copy.deepcopy(model.state_dict()), Watch("not at all", counter)
    fit(tmp_path, method, given, again, ckpt_path=path)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert again.graphs[0] == again.graphs[-1], "recompiled within a training that goes on"
    assert verify([str(path)]) == (method == "dense"), "it fails where nothing is N:M"
    saved = torch.load(path)
    # torch.compile(net) puts its name into the keys, as it does in a dense model; net.compile() does not.
    wrapper = "_orig_mod." if how == "submodule" else ""
    assert set(saved["state_dict"]) == {f"net.{wrapper}{key}" for key in expected.net.state_dict()}
    weights = saved["state_dict"].items()
    saved["state_dict"] = {key.replace("_orig_mod.", ""): value for key, value in weights}
    torch.save(saved, path)
    plain = new_model(9, Model)
    fit(tmp_path, method, plain, Watch("not at all", counter), ckpt_path=path)
    assert_close(plain, expected)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["submodule", "layers"])
def test_averages_of_compiled_submodules(how, tmp_path):
    averages = []

    def callbacks():
        averages.append(EMAWeightAveraging(decay=0.7))
        return [averages[-1], sparse("bi-mask")]

    def new(seed):
        return compile_parts(new_model(seed, Model), how, backend="aot_eager", fullgraph=True)

    assert_equal_models(*whole_and_resumed(tmp_path, callbacks, 8, new=new))
    assert_equal_models(*(average._average_model for average in averages))
    assert verify([str(tmp_path / "mid.ckpt")]) == 0


class Three(ScaledMask):
    """A method whose layers have three tensors."""

    def init_masks(self, layer):
        super().init_masks(layer)
        layer.buffers["other"] = torch.zeros(3)


@pytest.mark.parametrize("quiet", [torch.inference_mode, None])
@pytest.mark.parametrize("make", [partial(nn.Linear, 16, 16), partial(nn.Conv2d, 16, 16, 1)])
@pytest.mark.parametrize("method", ["ste", "bi-mask", "three"])
def test_graphs_without_gradients(method, make, quiet):
    """Whatever number of tensors the layers have besides their weights."""
    module = nn.Sequential(make())
    method = Three() if method == "three" else method
    NMSparsifier(module, "2:4", method, skip_first_last=False).attach()
    if quiet is None:
        module.requires_grad_(False)
    x = torch.randn(4, 16, *[3] * (module[0].weight.dim() - 2))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.enable_grad() if quiet is None else quiet():
        assert torch.equal(compiled(x), module(x))
