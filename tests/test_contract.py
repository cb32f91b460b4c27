"""What every method must hold, on every layer kind, pattern and optimizer."""

import copy
import io
from itertools import product

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd.graph import saved_tensors_hooks

from lightning_nm import NMSparsifier, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.nn import products as estimates
from lightning_nm.nn.adapters import Adapter
from lightning_nm.nn.weight import key_of_layer
from tests.support.contract import (
    LEAVES_GRADIENTS_OUT,
    METHODS,
    OPTIONS,
    OWNERS,
    TWO_GRAPHS,
    WEIGHT_GRADIENTS,
    WITHOUT_LATENT_WEIGHTS,
    accepted,
    refusal,
)
from tests.support.kinds import KINDS, held_tensors, make
from tests.support.loop import Loop, same
from tests.support.muon import muon
from tests.support.outside import SoftThreshold
from tests.support.pairs import mostly_slow, pairwise_cases

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel lengths",  # the stock module's
)

PATTERNS = ["2:4", "1:16", "3:8"]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "muon": lambda p: muon([q for q in p if q.dim() == 2], 1e-2),
}


def attach(module, method, pattern="2:4", **options):
    options = {**OPTIONS.get(method, {}), **options}
    return NMSparsifier(
        module, pattern, METHODS[method](), skip_first_last=False, **options
    ).attach()


class Run(Loop):
    """One module under a method; its batches are noisy copies of an input."""

    def __init__(self, method, kind="linear", optimizer=None, seed=0, module=None, **options):
        made, self.x = make(kind, torch.float32, seed=seed)
        optimizer = optimizer or OPTIMIZERS[accepted(method, "sgd", "adamw")]
        options = {**OPTIONS.get(method, {}), **options}
        super().__init__(
            module or made, METHODS[method](), optimizer=optimizer, seed=seed, **options
        )

    def batch(self, number=0):
        generator = torch.Generator().manual_seed(number)
        return self.x + 0.1 * torch.randn(self.x.shape, generator=generator)

    def step(self):
        self.sparsifier.before_step(self.optimizer)
        self.optimizer.step()
        for layer in self.layers.values():  # between a step and the move of the masks, too
            check_nm(layer)
        self.sparsifier.step()


def check_nm(layer):
    forward = layer.forward_weight()
    pattern = layer.spec.method.current_pattern(layer)
    if layer.masks.bits is not None or isinstance(layer.spec.method, SoftThreshold):
        assert (
            layer.spec.forward_reason
            or pattern is None
            or nmf.is_nm(layer.view.rows(forward), pattern, dim=1)
        )
        assert not torch.signbit(forward[forward == 0]).any(), "-0.0 breaks compressors"
    is_transposable = isinstance(layer.spec.method, TransposableMask)
    if is_transposable and layer.masks.has_forward and not layer.spec.dgrad_reason:
        for group in layer.view.rows(layer.forward_mask).chunk(layer.spec.groups):
            assert nmf.is_nm(group, layer.pattern, dim=0)
    if layer.masks.has_backward:
        rows = layer.view.rows(layer.backward_weight())
        if layer.masks.permutation is not None:
            rows = rows[layer.masks.permutation]
        for group in rows.chunk(layer.spec.groups):
            assert nmf.is_nm(group, layer.pattern, dim=0)
        if layer.forward_mask is not None:
            assert not (layer.masks.backward & ~layer.forward_mask).any()


@pytest.mark.parametrize(
    ("method", "kind", "pattern"), mostly_slow(pairwise_cases(METHODS, KINDS, PATTERNS), every=4)
)
def test_trains_sparse_and_leaves_no_trace(method, kind, pattern):
    module, _ = make(kind, torch.float32)
    keys, kinds = list(module.state_dict()), [type(m) for m in module.modules()]
    parameters = list(module.parameters())
    # Made before attach, as LightningCLI does.
    optimizer = OPTIMIZERS[accepted(method, "sgd", "adamw")](module.parameters())
    run = Run(method, kind, pattern=pattern, module=module, optimizer=lambda _: optimizer)
    sparsifier = run.sparsifier
    own = [p for layer in run.layers.values() for p in layer.parameters.values()]
    trained = [*parameters, *own]
    before = [p.detach().clone() for p in trained]
    run.train(range(4))
    assert not all(map(torch.equal, before, trained)), "nothing was trained"
    assert all(p is q for p, q in zip(parameters, module.parameters(), strict=True)), (
        "a parameter was replaced"
    )
    state = module.state_dict()
    assert list(state) == keys
    for name, layer in run.layers.items():
        assert torch.equal(state[key_of_layer(name, layer.spec.parameter)], layer.forward_weight())
    assert sparsifier.violations() == 0

    fresh, _ = make(kind, torch.float32, seed=1)
    fresh.load_state_dict(state)
    with torch.no_grad():
        # The stock encoder layer takes a fused path in evaluation, which rounds differently.
        torch.testing.assert_close(fresh.eval()(run.x), module.eval()(run.x), rtol=1e-5, atol=1e-5)
    run.end()
    assert [type(m) for m in module.modules()] == kinds
    assert not any(key.startswith(("nm", "_nm")) for m in module.modules() for key in vars(m))
    assert same(module.state_dict(), state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_optimizer_keeps_nm(method, optimizer):
    make_optimizer = OPTIMIZERS[optimizer]
    error = refusal(method, optimizer)
    if method in OWNERS and optimizer == "muon":
        error = r"Muon trains matrices only.* owns .*shape \(.*\) at"
    if error is not None:
        with pytest.raises(ValueError, match=rf"{error}.*layer 'weight'"):
            Run(method, optimizer=make_optimizer)
        return
    run = Run(method, optimizer=make_optimizer)
    run.train(range(6))
    assert run.sparsifier.violations() == 0
    (layer,) = run.layers.values()
    if method.startswith(WITHOUT_LATENT_WEIGHTS):
        assert nmf.is_nm(layer.weight, "2:4"), "a method without latent weights keeps none"


def used_backward_weight(layer):
    """W_B, of a layer that draws it the draw of the first backward pass."""
    if not layer.draws_backward:
        return layer.values_of("dgrad", layer.weight.detach())
    layer.draw_noise(layer.noise.draws)
    weight = layer.weight.detach()

    def draw(part, weight):
        drawn = estimates.drawn_matrix(part, weight, layer.noise.words, weight.dtype)
        return part.view.unrows(drawn.reshape(part.view.rows(weight).shape))

    if layer.spec.layout.startswith("experts"):
        # Each expert has GEMMs, and so draws, of its own.
        drawn = torch.stack([draw(*each) for each in zip(layer.experts, weight, strict=True)])
    else:
        drawn = draw(layer, weight)
    rows = layer.view.rows(drawn)
    for group in rows.chunk(layer.spec.groups):
        assert nmf.is_nm(group, layer.pattern, dim=0)
    assert not torch.equal(drawn, layer.forward_weight())
    return drawn


SINGLE_KINDS = [kind for kind in KINDS if "attention" not in kind and "encoder" not in kind]
EVERY_KIND = mostly_slow(list(product(METHODS, KINDS)), every=4)
"""Each method with each kind; a quarter of the pairs, with every method and every kind among them, is fast."""


@pytest.mark.parametrize(
    ("method", "kind"), mostly_slow(list(product(METHODS, SINGLE_KINDS)), every=4)
)
def test_gradients_follow_the_formulas(method, kind):
    module, x = make(kind)
    plain = copy.deepcopy(module)
    sparsifier = attach(module, method)
    layers = list(sparsifier.layers.values())
    x.requires_grad_()
    y = module(x)
    dy = torch.randn_like(y)
    y.backward(dy)

    def reference(weights):
        """The stock module with these weights: its output, input gradient and the gradients of its parameters."""
        parameters = dict(plain.named_parameters())
        with torch.no_grad():
            for layer, weight in zip(layers, weights, strict=True):
                parameters[key_of_layer(layer.name, layer.spec.parameter)].copy_(weight)
        plain.zero_grad()
        x_plain = x.detach().clone().requires_grad_()
        out = plain(x_plain)
        out.backward(dy)
        return out, x_plain.grad, {name: parameter.grad for name, parameter in parameters.items()}

    with torch.no_grad():
        used = [layer.values_of("forward", layer.weight.detach()) for layer in layers]
        used_backward = [used_backward_weight(layer) for layer in layers]
    out, _, grads = reference(used)
    _, dx, _ = reference(used_backward)
    torch.testing.assert_close(y, out)
    has_own = any(layer.masks.has_backward or layer.draws_backward for layer in layers)
    if len(layers) > 1 and has_own:
        return  # the gradient of a weight is made by W_B of those after it, and their inputs by W_F
    torch.testing.assert_close(x.grad, dx)
    if "bias" in grads:
        torch.testing.assert_close(module.bias.grad, grads["bias"])
    for layer in layers:
        dw = grads[key_of_layer(layer.name, layer.spec.parameter)]
        expected = WEIGHT_GRADIENTS.get(method, lambda layer, grad: grad)(layer, dw)
        if expected is None:
            assert layer.weight.grad is None
            continue
        torch.testing.assert_close(layer.weight.grad, expected)
        if method == "scaled-mask":
            masked = torch.where(layer.forward_mask, layer.weight, 0)
            torch.testing.assert_close(layer.parameters["scale"].grad, (dw * masked).sum())


@pytest.mark.parametrize("method", METHODS)
def test_gradients_that_are_not_needed_may_be_left_out(method):
    """Data parallelism sends nothing of them."""
    weights, left_out = [], 0
    for cut in (False, True):
        run = Run(method, optimizer=OPTIMIZERS["adamw"])
        for number in range(6):
            run.backward(number)
            for layer in run.layers.values() if cut else ():
                mask = layer.masks.forward_view
                if mask is not None and not layer.spec.method.gradient_at_pruned(layer):
                    layer.weight.grad.masked_fill_(~mask, 0)
                    left_out += 1
            run.step()
        weights.append(run.weights())
    assert same(*weights)
    assert (left_out > 0) == method.startswith(LEAVES_GRADIENTS_OUT)


ROUND_TRIPS = ["linear", "conv2d-groups", "hugging-face-conv1d", "attention", "encoder-layer"]


@pytest.mark.parametrize(
    ("method", "kind", "name"),
    pairwise_cases(
        METHODS, ROUND_TRIPS, ["adamw", "adafactor"]
    ),  # the latter looks at norms, not at entries
)
def test_state_round_trip_is_exact(method, kind, name):
    optimizer = OPTIMIZERS[accepted(method, name, "sgd", "adamw")]
    straight = Run(method, kind, optimizer)
    straight.train(range(2))
    buffer = io.BytesIO()
    torch.save(straight.save(), buffer)
    straight.train(range(2, 6))

    resumed = Run(method, kind, optimizer, seed=1)
    resumed.x = straight.x
    buffer.seek(0)
    resumed.load(torch.load(buffer, weights_only=True))
    resumed.sparsifier.stats()  # looking changes nothing
    resumed.train(range(2, 6))
    ratios = [run.sparsifier.flops_ratios(mean=True) for run in (straight, resumed)]
    assert ratios[0] == ratios[1]
    assert same(straight.weights(), resumed.weights())
    for one, other in zip(straight.layers.values(), resumed.layers.values(), strict=True):
        assert one.step == other.step == 6
        assert same(held_tensors(one), held_tensors(other))


SCHEDULES = {
    "no-schedule": None,
    "dense-start": {"dense_start": 3},
    "ramp": {"ramp": ["3:4"], "ramp_ends": [4]},
    "dense-end": {"dense_end": 2},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("method", METHODS)
def test_training_returns_to_any_earlier_moment(method, schedule):
    """Masks are on and may be sparser than at that moment; nothing that is loaded is changed, or shared."""
    try:
        run = Run(method, planned_steps=8, schedule=SCHEDULES[schedule])
    except (TypeError, ValueError):
        if schedule == "no-schedule":
            raise
        pytest.skip("the method refuses this schedule")
    moments = []
    for step in range(8):
        moments.append((run.save(), run.weights()))
        run.train([step])
    ends = run.weights()
    for step in (3, 0, 7, 5, 1, 3):
        states, weights = moments[step]
        given = copy.deepcopy(states)
        run.model.load_state_dict(given[0])
        run.sparsifier.load_state_dict(given[1])
        run.optimizer.load_state_dict(copy.deepcopy(given[2]))  # torch's own shares tensors
        assert same(run.weights(), weights), step
        run.train(range(step, 8))
        assert same(run.weights(), ends), step
        assert same(given, states)


@pytest.mark.parametrize(("method", "kind"), EVERY_KIND)
def test_memory(method, kind):
    module, x = make(kind, torch.float32)
    sparsifier = attach(module, method)
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = module(x.requires_grad_())
    layers = sparsifier.layers.values()
    weights = {layer.weight.data_ptr(): layer for layer in layers}
    marks = {layer.masks.bits.data_ptr() for layer in layers if layer.masks.bits is not None}
    shapes = {layer.weight.shape for layer in layers}
    shapes |= {shape[::-1] for shape in shapes if len(shape) == 2}
    shaped = [t for t in saved if t.shape in shapes and t.numel() > 64]
    assert shaped, "the weight must be saved: it is needed for dX"
    if "attention" not in kind and "encoder" not in kind:
        # No copy: the parameter itself, or the byte of masks that the layer holds anyway.
        assert {tensor.data_ptr() for tensor in shaped} <= weights.keys() | marks
    floating = {t.data_ptr() for t in shaped if t.is_floating_point()}
    assert set(weights) <= floating
    y.sum().backward()
    for layer in layers:
        trained = {id(parameter) for parameter in layer.parameters.values()}
        kept = [tensor for tensor in held_tensors(layer) if id(tensor) not in trained]
        assert sum(t.numel() * t.element_size() for t in kept) <= 2 * layer.weight.numel()


@pytest.mark.parametrize(("method", "kind"), EVERY_KIND)
def test_copies_and_pickles(method, kind):
    module, x = make(kind, torch.float32)
    attach(module, method)
    module.eval()
    y = module(x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), y)
        adapted = [m for m in other.modules() if isinstance(m, Adapter)]
        assert adapted
        assert all(layer.spec.module is m for m in adapted for layer in m.nm_layers.values())
        assert not {id(p) for p in other.parameters()} & {id(p) for p in module.parameters()}


@pytest.mark.parametrize("kind", ["linear", "conv2d", "attention"])
@pytest.mark.parametrize("method", METHODS)
def test_autocast(method, kind):
    module, x = make(kind, torch.float32)
    plain = copy.deepcopy(module)
    sparsifier = attach(module, method)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = module(x), plain(x)
    assert y.dtype == expected.dtype
    y.float().square().mean().backward()
    assert x.grad.dtype == torch.float32
    for layer in sparsifier.layers.values():
        trained = [layer.weight, *layer.parameters.values()]
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        assert grads
        for grad in grads:
            assert grad.dtype == torch.float32
            assert grad.isfinite().all()


COMPILED = [
    "linear",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("conv2d", "hugging-face-conv1d")),
]


@pytest.mark.parametrize("kind", COMPILED)
@pytest.mark.parametrize("method", METHODS)
def test_compiles_without_breaks(method, kind):
    torch._dynamo.reset()
    run = Run(method, kind)
    counter = CompileCounterWithBackend("aot_eager")
    module, run.model = run.model, torch.compile(run.model, fullgraph=True, backend=counter)
    for number in range(4):
        torch.testing.assert_close(run.model(run.x), module(run.x))
        run.train([number])
    assert counter.frame_count == 1 + method.startswith(TWO_GRAPHS)
    torch._dynamo.reset()


def test_module_called_twice_and_frozen_weights():
    x = torch.randn(4, 32)
    chain = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    sparsifier = attach(chain, "sr-ste")
    layer = sparsifier.layers["0"]
    (chain(chain(x))).sum().backward()
    assert layer.weight.grad is not None
    chain.zero_grad()
    layer.weight.requires_grad_(False)
    chain(x.requires_grad_()).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
