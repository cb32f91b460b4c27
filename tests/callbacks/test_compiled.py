"""torch.compile with a Trainer: no graph breaks, graphs that stay, and the training of eager code."""

import copy
import shutil
from functools import cache, partial
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_nm import BAME, BiMask, NMSparsifier, NMSparsityCallback, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.commands.verify import main as verify
from lightning_nm.demo import ExactResume
from tests.support.lightning_models import Data, Net, SaveAt, assert_equal_models, make_trainer
from tests.support.outside import ScaledMask

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated"),
]
METHODS = {
    "dense": lambda: "dense",
    "ste": lambda: "ste",
    "sr-ste": lambda: "sr-ste",
    "asp": lambda: "asp",
    "transposable": lambda: TransposableMask(update_every=2),
    "bi-mask": lambda: BiMask(permute_every=3),
    "bame": lambda: BAME(stop=12, every=2, budget=1.0, gradient_every=2),
    "bame-bi-mask": lambda: BAME(start=1, stop=12, every=2, budget=1.0, dgrad="bi-mask"),
    "three-gemms": lambda: TransposableMask(update_every=2),
}
STILL = {"dense", "asp"}
METHODS_THAT_MOVE = [method for method in METHODS if method not in STILL]
IN_CHECKPOINTS = {
    method: ("submodule", "block")[k % 2] for k, method in enumerate(METHODS_THAT_MOVE)
}
"""How parts are compiled in the test of checkpoints, which compares their training with that of eager code, too."""


def places(method):
    """Every way to compile, before the masks are there or later: each pair of a method, a way and a time occurs."""
    turn = list(METHODS).index(method) % 2
    for k, how in enumerate(("whole", "in place", "submodule", "block", "layers")):
        later = how == IN_CHECKPOINTS.get(method) or (k > 1 and k % 2 == turn)
        yield method, how, later


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

    def __init__(self, dropout=0.0):
        super().__init__(dropout=dropout)
        self.net = Part(*self.net)
        self.double()

    def step(self, batch, stage):
        x, y = batch
        return F.cross_entropy(self(x.double()), y)


def new(seed=0, **options):
    pl.seed_everything(seed, verbose=False)
    return Model(**options)


def sparse(method):
    return NMSparsityCallback(
        "2:4",
        METHODS[method](),
        "mvue" if method == "three-gemms" else None,
        show_tables=False,
        grad_snr_every=0,
    )


def compile_parts(model, how, **options):
    """The model to hand to a Trainer."""
    if how == "whole":
        return torch.compile(model, **options)
    if how == "in place":
        model.compile(**options)
    elif how == "submodule":
        model.net = torch.compile(model.net, **options)
    elif how == "block":
        model.net.compile(**options)
    elif how == "layers":
        for k in (3, 6):
            model.net[k].compile(**options)
    return model


class Watch(pl.Callback):
    """Compiles after the masks are there, if asked; then keeps the masks and the number of graphs of every step."""

    def __init__(self, how, counter, **options):
        self.how, self.counter, self.options, self.masks, self.graphs = (
            how,
            counter,
            options,
            [],
            [],
        )

    def on_train_start(self, trainer, pl_module):
        compile_parts(pl_module, self.how, **self.options)

    def on_train_batch_end(self, trainer, pl_module, *args):
        layers = trainer.callbacks[0].sparsifier.layers.values()
        self.masks.append([tensor.clone() for layer in layers for tensor in layer.read_tensors()])
        self.graphs.append(self.counter.frame_count)


def fit(
    tmp_path,
    method,
    how,
    later=False,
    backend="aot_eager",
    model=None,
    callbacks=(),
    ckpt_path=None,
    **options,
):
    counter = CompileCounterWithBackend(backend)
    compiling = {"backend": counter, "fullgraph": True}  # a graph break is an error
    model = model or new()
    part, watch = sparse(method), Watch(how if later else "not at all", counter, **compiling)
    given = model if later else compile_parts(model, how, **compiling)
    options = {"num_sanity_val_steps": 0, **options}
    trainer = make_trainer(tmp_path, [part, watch, *callbacks], **options)
    trainer.fit(given, Data(), ckpt_path=ckpt_path)
    return model, part, watch


def moves(watch):
    return sum(
        any(not torch.equal(a, b) for a, b in zip(*pair, strict=True))
        for pair in zip(watch.masks[:-1], watch.masks[1:], strict=True)
    )


def check_equal(eager, compiled):
    (model, _, watch), (other, _, other_watch) = eager, compiled
    assert len(watch.masks) == len(other_watch.masks) == 12
    for masks, others in zip(watch.masks, other_watch.masks, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(masks, others, strict=True))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def check_graphs(method, how, watch):
    """One graph for training and one for evaluation; BAME has one more for training, without the dense gradient."""
    parts = 2 if how == "layers" else 1
    dense_gradient = method.startswith("bame")
    assert watch.graphs[1] == watch.graphs[5], "recompiled within the first epoch"
    assert watch.graphs[-1] == parts * (2 + dense_gradient)
    assert watch.graphs[6] == watch.graphs[-1], "recompiled after the first validation"


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """The eager run of a method, made once."""
    return cache(lambda method: fit(tmp_path_factory.mktemp("eager"), method, "not at all"))


QUICK = {("bi-mask", "whole", False)}
CASES = [case for method in METHODS for case in places(method)]


def test_each_pair_of_method_way_and_time_occurs():
    covered = {*CASES, *((method, how, False) for method, how in IN_CHECKPOINTS.items())}
    ways = {how for _, how, _ in CASES}
    assert {case[:2] for case in covered} == set(product(METHODS, ways))
    assert {case[::2] for case in covered} == set(product(METHODS, (False, True)))
    assert {case[1:] for case in covered} == {
        *product(ways, (False,)),
        *product(ways - {"whole", "in place"}, (True,)),
    }


@pytest.mark.parametrize(
    ("method", "how", "later"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_compiled_training_is_eager_training(method, how, later, eager, tmp_path):
    compiled = fit(tmp_path, method, how, later)
    check_equal(eager(method), compiled)
    assert eager(method)[2].graphs[-1] == 0
    check_graphs(method, how, compiled[2])
    assert (moves(compiled[2]) >= 3) != (method in STILL)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "bame-bi-mask", "three-gemms"])
def test_inductor(method, eager, tmp_path):
    compiled = fit(tmp_path, method, "submodule", backend="inductor")
    check_equal(eager(method), compiled)
    check_graphs(method, "submodule", compiled[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "how"),
    [(method, ("submodule", "layers")[k % 2]) for k, method in enumerate(METHODS_THAT_MOVE)],
)
def test_loaded_states_and_second_fits_keep_the_graphs(method, how, tmp_path):
    class Reload(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            sparsifier = trainer.callbacks[0].sparsifier
            if batch_idx == 3:
                weights, state = copy.deepcopy((pl_module.state_dict(), sparsifier.state_dict()))
                pl_module.load_state_dict(weights)
                sparsifier.load_state_dict(state)

    path = tmp_path / "mid.ckpt"
    model, _, watch = fit(tmp_path, method, how, callbacks=[Reload(), SaveAt(path, 9)])
    check_graphs(method, how, watch)
    again = Watch("not at all", watch.counter)
    make_trainer(tmp_path, [sparse(method), again], num_sanity_val_steps=0).fit(
        model, Data(), ckpt_path=path
    )
    assert len(again.graphs) == 3
    assert again.graphs[-1] == watch.graphs[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "how"), IN_CHECKPOINTS.items())
def test_checkpoints_of_compiled_submodules(method, how, tmp_path):
    path = tmp_path / "mid.ckpt"
    straight = new(dropout=0.2)
    _, _, watch = fit(
        tmp_path, method, how, model=straight, callbacks=[ExactResume(), SaveAt(path, 8)]
    )
    check_graphs(method, how, watch)
    assert moves(watch) >= 3
    resumed = new(7, dropout=0.2)
    fit(tmp_path, method, how, model=resumed, callbacks=[ExactResume()], ckpt_path=path)
    assert_equal_models(straight, resumed)

    saved = torch.load(path, weights_only=True)
    assert set(saved["callbacks"]["NMSparsityCallback"]["layers"]) == {"net.3", "net.6"}
    assert verify([str(path)]) == 0
    # torch.compile(net) puts its name into the keys, as it does in a dense model; net.compile() does not.
    wrapper = "_orig_mod." if how == "submodule" else ""
    assert set(saved["state_dict"]) == {f"net.{wrapper}{key}" for key in new().net.state_dict()}

    # The compiled run goes on in eager code, once its keys are those of the plain model.
    saved["state_dict"] = {
        key.replace("_orig_mod.", ""): value for key, value in saved["state_dict"].items()
    }
    torch.save(saved, tmp_path / "plain.ckpt")
    plain = new(9, dropout=0.2)
    fit(
        tmp_path,
        method,
        "not at all",
        model=plain,
        callbacks=[ExactResume()],
        ckpt_path=tmp_path / "plain.ckpt",
    )
    for a, b in zip(straight.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["submodule", "block", "layers"])
def test_averages_of_compiled_submodules(how, tmp_path):
    def run(path_to_save=None, seed=0, ckpt_path=None):
        model = compile_parts(new(seed), how, backend="aot_eager", fullgraph=True)
        average, saves = (
            EMAWeightAveraging(decay=0.7),
            [SaveAt(path_to_save, 8)] if path_to_save else [],
        )
        trainer = make_trainer(tmp_path, [average, sparse("bi-mask"), ExactResume(), *saves])
        trainer.fit(model, Data(), ckpt_path=ckpt_path)
        return model, [p.clone() for p in average._average_model.parameters()]

    model, average = run(tmp_path / "mid.ckpt")
    assert verify([str(tmp_path / "mid.ckpt")]) == 0
    resumed, other = run(seed=5, ckpt_path=tmp_path / "mid.ckpt")
    assert_equal_models(model, resumed)
    assert all(torch.equal(a, b) for a, b in zip(average, other, strict=True))
    weights = {key.replace("_orig_mod.", ""): weight for key, weight in model.state_dict().items()}
    assert nmf.is_nm(weights["net.6.weight"], "2:4", dim=1)


@pytest.mark.parametrize("quiet", [torch.inference_mode, None])
@pytest.mark.parametrize("make", [partial(nn.Linear, 16, 16), partial(nn.Conv2d, 16, 16, 1)])
@pytest.mark.parametrize("method", ["ste", "bi-mask", "three"])
def test_graphs_without_gradients(method, make, quiet):
    """Whatever number of tensors the layers have beside their weights."""
    torch.manual_seed(0)
    module = nn.Sequential(make())
    method = Three() if method == "three" else method
    (layer,) = NMSparsifier(module, "2:4", method, skip_first_last=False).attach().layers.values()
    if quiet is None:
        module.requires_grad_(False)
    x = torch.randn(4, 16, *[3] * (layer.weight.dim() - 2))
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.enable_grad() if quiet is None else quiet():
        assert torch.equal(compiled(x), module(x))


class Three(ScaledMask):
    """A method whose layers have three tensors."""

    def init_masks(self, layer):
        super().init_masks(layer)
        layer.buffers["other"] = torch.zeros(3)
