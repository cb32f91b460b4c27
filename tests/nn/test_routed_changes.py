"""A choice of kernels that a router keeps for a layer ends with what it was made for."""

import threading

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMPattern, NMSparsifier
from lightning_nm.estimators import MVUE
from lightning_nm.functional import backward_mask
from lightning_nm.kernels import Router, routing
from lightning_nm.methods import STE
from lightning_nm.nn import nm_linear
from tests.support.cpu_products import needs_library
from tests.support.fake_kernels import FakeKernel
from tests.support.routed import masked, timed

pytestmark = needs_library


class Told(STE):
    """A method whose answers are attributes, which no counter of the layer knows of."""

    pattern = None
    at_pruned = True

    def current_pattern(self, layer):
        return self.pattern or layer.pattern

    def gradient_at_pruned(self, layer):
        return self.at_pruned

    def weight_gradient(self, layer, weight, grad):
        mask = layer.masks.forward_view
        kept = grad if mask is None or self.at_pruned else torch.where(mask, grad, 0)
        return super().weight_gradient(layer, weight, kept)


class OfAnyPattern(MVUE):
    tokens = None

    def pattern_of(self, layer):
        return self.tokens or super().pattern_of(layer)


METHODS = {
    "asp": lambda: "asp",
    "bi-mask": lambda: "bi-mask",
    "bame": lambda: BAME(stop=100),
    "told": Told,
}


class Run:
    """A layer under one router for all batches, to be compared with a router that has seen nothing."""

    def __init__(self, method, estimator=None):
        torch.manual_seed(0)
        self.model = nn.Linear(32, 32)
        self.method = METHODS[method]()
        self.estimator = estimator
        options = {"skip_first_last": False, "planned_steps": 1000}
        sparsifier = NMSparsifier(self.model, "2:8", self.method, estimator, **options)
        (self.layer,) = sparsifier.attach().layers.values()
        self.layer.progress.estimating = estimator is not None
        self.router = Router("sparse")
        self.x = torch.randn(16, 32, requires_grad=True)
        self.masks = self.layer.masks.forward, self.layer.masks.backward

    def batch(self, router):
        """The GEMMs that ran, by kernel, and the results."""
        self.x.grad = self.model.weight.grad = None
        self.layer.draw_noise(7)
        before = {id(used): used.calls for used in router.used()} if router else {}
        with routing(router):
            y = self.model(self.x)
        y.square().sum().backward()
        ran = {
            (used.product, used.kernel): used.calls - before.get(id(used), 0)
            for used in (router.used() if router else ())
            if used.calls != before.get(id(used), 0)
        }
        return ran, [y.detach(), self.x.grad, self.model.weight.grad]

    def compare(self):
        kept, found = self.batch(self.router)
        fresh, again = self.batch(Router("sparse"))
        assert kept == fresh
        _, dense = self.batch(None)
        for result in (found, again):
            torch.testing.assert_close(result, dense, rtol=1e-4, atol=1e-3)
        return kept


def no_permutation(run):
    """The backward mask is another one, and N:M in the order of memory."""
    masks = run.layer.masks
    masks.permutation = None
    masks.set_backward(backward_mask(run.layer.weight, run.masks[0], NMPattern(2, 8)))


def dense_stage(run):
    run.layer.progress.set_stage("dense")
    run.layer.set_masks(None)


def other_dtype(run):
    run.model.double()
    run.x = run.x.detach().double().requires_grad_()


def dense_gradient(run):
    run.layer.progress.dense_gradient = not run.layer.progress.dense_gradient


def no_masks(run):
    run.layer.set_masks(None)


CHANGES = [
    ("asp", "no masks", no_masks),
    ("asp", "stage", lambda run: run.layer.progress.set_stage("4:8")),
    ("asp", "dense stage", dense_stage),
    ("asp", "frozen", lambda run: run.model.weight.requires_grad_(False)),
    ("asp", "tokens", lambda run: setattr(run, "x", torch.randn(48, 32, requires_grad=True))),
    ("asp", "no input gradient", lambda run: setattr(run, "x", torch.randn(16, 32))),
    ("asp", "dtype", other_dtype),
    ("bi-mask", "no masks", no_masks),
    ("bi-mask", "no backward mask", lambda run: run.layer.set_masks(run.masks[0])),
    ("bi-mask", "no permutation", no_permutation),
    ("bi-mask", "dense stage", dense_stage),
    ("bame", "dense gradient", dense_gradient),
    ("bame", "no masks", no_masks),
    ("told", "pattern", lambda run: setattr(run.method, "pattern", NMPattern(4, 16))),
    ("told", "gradient", lambda run: setattr(run.method, "at_pruned", False)),
    ("mvue", "not estimating", lambda run: setattr(run.layer.progress, "estimating", False)),
    ("mvue", "pattern", lambda run: setattr(run.estimator, "tokens", NMPattern(1, 4))),
]


@pytest.mark.parametrize(
    ("method", "name", "change"), CHANGES, ids=[f"{method}-{name}" for method, name, _ in CHANGES]
)
def test_every_change_is_seen(method, name, change):
    run = Run("asp", OfAnyPattern()) if method == "mvue" else Run(method)
    before = run.compare()
    if method != "mvue":
        assert run.compare() == before
    change(run)
    assert run.compare() != before, "nothing was changed"
    if name in ("no masks", "no backward mask"):
        run.layer.set_masks(*run.masks)
        assert run.compare() == before


def test_another_router_has_choices_of_its_own():
    run = Run("asp")
    before = run.compare()
    ran, _ = run.batch(Router("reference"))
    assert {kernel for _, kernel in ran} == {"reference"}
    assert run.compare() == before


def test_kept_choices_are_not_made_again(monkeypatch):
    run = Run("asp")
    run.compare()
    monkeypatch.setattr("lightning_nm.nn.products._product", None)
    run.batch(run.router)
    # Masks that move stay N:M: their layouts are made again, the choices are not.
    run.layer.set_masks(run.masks[0].roll(8, 1))
    run.batch(run.router)


def test_observed_passes_compare_also_where_choices_were_kept():
    run = Run("asp", MVUE())
    run.compare()
    run.layer.progress.observing = True
    run.batch(run.router)
    assert run.layer.progress.observed is not None


def test_frozen_between_the_passes():
    run = Run("asp")
    run.compare()
    with routing(run.router):
        y = run.model(run.x)
    run.model.weight.requires_grad_(False)
    y.sum().backward()
    wgrads = [used for used in run.router.used() if used.product.key.gemm == "wgrad"]
    assert wgrads[-1].product.reason == "none; frozen, so no weight gradient"


def test_second_derivatives_are_dense_after_first_ones_were_not():
    run = Run("asp")
    run.compare()
    gradients = []
    for router in (run.router, None):
        with routing(router):
            y = run.model(run.x)
        (dx,) = torch.autograd.grad(y.square().sum(), run.x, create_graph=True)
        gradients.append(torch.autograd.grad(dx.square().sum(), [run.x, run.model.weight]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)
    assert any("differentiated" in used.product.reason for used in run.router.used())
    run.compare()


def test_products_that_were_postponed_are_measured_after_tune_again():
    module, x = masked(dtype=torch.float32, method="asp")
    router = timed(FakeKernel(), budget_s=0.0)

    def kernel():
        before = {id(used): used.calls for used in router.used()}
        with routing(router), torch.no_grad():
            module(x)
        (used,) = [use for use in router.used() if use.calls != before.get(id(use), 0)]
        return used.kernel

    kernel()
    with pytest.warns(UserWarning, match="not measured"):
        router.tune()
    assert kernel() == kernel() == "reference"
    recorded = dict(router._recorded)
    router.tune_again()
    # Another layer has the same GEMM, and this one does not run before `tune`.
    with routing(router), torch.no_grad():
        module(x)
    router.budget_s = 60.0
    router.tune()
    assert not recorded
    assert kernel() == "fast"


def test_compiled_passes_see_changes():
    run = Run("asp")
    torch._dynamo.reset()
    eager, run.model = run.model, torch.compile(run.model, backend="eager")
    object.__setattr__(run.model, "weight", eager.weight)
    before = run.compare()
    run.layer.set_masks(None)
    assert run.compare() != before
    run.layer.set_masks(*run.masks)
    assert run.compare() == before


def test_two_threads_with_routers_and_sizes_of_their_own():
    run = Run("asp")
    inputs = [torch.randn(tokens, 32) for tokens in (16, 48)]
    expected = [run.model(x).detach() for x in inputs]
    router, errors = Router("sparse"), []

    def work(x, y):
        for _ in range(50):
            with torch.no_grad():
                # Not by the module: its hooks count the GEMMs of one thread.
                found = nm_linear(x, run.model.weight, run.model.bias, run.layer)
            if not torch.allclose(found, y, rtol=1e-4, atol=1e-4):
                errors.append(len(x))

    with routing(router):
        threads = [
            threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert {used.product.key.columns for used in router.used()} == {16, 48}
