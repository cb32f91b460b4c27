"""A choice of kernels that a router keeps for a layer ends with what it was made for."""

import threading

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMPattern, NMSparsifier
from lightning_nm.estimators import MVUE
from lightning_nm.functional import backward_mask
from lightning_nm.kernels import Router, routing
from lightning_nm.kernels.cpu import library
from lightning_nm.methods import STE
from lightning_nm.nn import nm_linear
from tests.support.fake_kernels import FakeKernel, FakeTimer

pytestmark = pytest.mark.skipif(
    bool(library.unavailable()), reason=library.unavailable() or "a library"
)


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
        self.sparsifier = NMSparsifier(
            self.model, "2:8", self.method, estimator, skip_first_last=False, planned_steps=1000
        ).attach()
        (self.layer,) = self.sparsifier.layers.values()
        self.estimator = estimator
        self.router = Router("sparse")
        self.x = torch.randn(16, 32, requires_grad=True)
        self.forward, self.backward = self.layer.masks.forward, self.layer.masks.backward

    def batch(self, router):
        """The products that ran, by kernel, and the results."""
        calls = {id(used): used.calls for used in router.used()} if router else {}
        self.x.grad = self.model.weight.grad = None
        self.layer.draw_noise(7)
        with routing(router):
            y = self.model(self.x)
        y.square().sum().backward()
        results = [y.detach(), self.x.grad, self.model.weight.grad]
        if router is None:
            return results
        ran = {
            (used.product, used.kernel): used.calls - calls.get(id(used), 0)
            for used in router.used()
            if used.calls != calls.get(id(used), 0)
        }
        return ran, results

    def compare(self):
        kept, found = self.batch(self.router)
        fresh, again = self.batch(Router("sparse"))
        assert kept == fresh
        for name, dense in enumerate(self.batch(None)):
            for result in (found, again):
                if dense is not None:
                    torch.testing.assert_close(result[name], dense, rtol=1e-4, atol=1e-3)
                else:
                    assert result[name] is None
        return kept

    # The changes.

    def no_masks(self):
        self.layer.set_masks(None)

    def no_backward_mask(self):
        self.layer.set_masks(self.forward)

    def no_permutation(self):
        """The backward mask is another one, and N:M in the order of memory."""
        masks = self.layer.masks
        masks.permutation = None
        masks.set_backward(backward_mask(self.layer.weight, self.forward, NMPattern(2, 8)))

    def stage(self):
        self.layer.progress.set_stage("4:8")

    def dense_stage(self):
        self.layer.progress.set_stage("dense")
        self.layer.set_masks(None)

    def frozen(self):
        self.model.weight.requires_grad_(False)

    def dense_gradient(self):
        self.layer.progress.dense_gradient = not self.layer.progress.dense_gradient

    def not_estimating(self):
        self.layer.progress.estimating = False

    def pattern_of_the_method(self):
        self.method.pattern = NMPattern(4, 16)

    def gradient_of_the_method(self):
        self.method.at_pruned = False

    def pattern_of_the_estimator(self):
        self.estimator.tokens = NMPattern(1, 4)

    def tokens(self):
        self.x = torch.randn(48, 32, requires_grad=True)

    def no_gradient_of_the_input(self):
        self.x = torch.randn(16, 32)

    def dtype(self):
        self.model.double()
        self.x = self.x.detach().double().requires_grad_()

    def another_router(self):
        self.router = Router("reference")
        self.compare_reference()
        self.router = Router("sparse")

    def compare_reference(self):
        ran, _ = self.batch(self.router)
        assert {kernel for _, kernel in ran} == {"reference"}


CHANGES = {
    "asp": (
        "no_masks",
        "stage",
        "dense_stage",
        "frozen",
        "tokens",
        "no_gradient_of_the_input",
        "dtype",
        "another_router",
    ),
    "bi-mask": ("no_masks", "no_backward_mask", "no_permutation", "dense_stage"),
    "bame": ("dense_gradient", "no_masks"),
    "told": ("pattern_of_the_method", "gradient_of_the_method"),
}


@pytest.mark.parametrize(
    ("method", "change"), [(method, change) for method in CHANGES for change in CHANGES[method]]
)
def test_every_change_is_seen(method, change):
    run = Run(method)
    before = run.compare()
    assert run.compare() == before
    getattr(run, change)()
    after = run.compare()
    if change != "another_router":
        assert after != before, "nothing was changed"
    # And back, where that is possible.
    if change in ("no_masks", "no_backward_mask"):
        run.layer.set_masks(run.forward, run.backward)
        assert run.compare() == before


@pytest.mark.parametrize("change", ["not_estimating", "pattern_of_the_estimator"])
def test_every_change_of_an_estimator_is_seen(change):
    run = Run("asp", OfAnyPattern())
    run.layer.progress.estimating = True
    before = run.compare()
    getattr(run, change)()
    assert run.compare() != before


def test_kept_choices_are_not_made_again(monkeypatch):
    run = Run("asp")
    run.compare()
    monkeypatch.setattr("lightning_nm.nn.products._product", None)
    run.batch(run.router)
    # Masks that move stay N:M: their layouts are made again, the choices are not.
    run.layer.set_masks(run.forward.roll(8, 1))
    run.batch(run.router)


def test_observed_passes_compare_also_where_choices_were_kept():
    run = Run("asp", MVUE())
    run.layer.progress.estimating = True
    run.compare()
    run.layer.progress.observing = True
    run.batch(run.router)
    assert run.layer.progress.observed is not None


def test_frozen_between_the_passes():
    run = Run("asp")
    run.compare()
    with routing(run.router):
        y = run.model(run.x)
    run.frozen()
    y.sum().backward()
    wgrads = [used for used in run.router.used() if used.product.key.gemm == "wgrad"]
    assert [used.product.reason for used in wgrads][-1] == "none; frozen, so no weight gradient"


def test_second_derivatives_are_dense_after_first_ones_were_not():
    run = Run("asp")
    run.compare()
    gradients = []
    for router in (run.router, None):
        with routing(router):
            y = run.model(run.x)
        (dx,) = torch.autograd.grad(y.square().sum(), run.x, create_graph=True)
        gradients.append(torch.autograd.grad(dx.square().sum(), [run.x, run.model.weight]))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert any("differentiated" in used.product.reason for used in run.router.used())
    run.compare()


def test_products_that_were_postponed_are_measured_after_tune_again():
    model = nn.Linear(32, 32)
    NMSparsifier(model, "2:4", "asp", skip_first_last=False).attach()
    fast = FakeKernel()
    timer = FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
    router = Router("auto", [fast], budget_s=0.0, timer=timer)
    x = torch.randn(16, 32)

    def kernel():
        before = {id(used): used.calls for used in router.used()}
        with routing(router), torch.no_grad():
            model(x)
        (used,) = [use for use in router.used() if use.calls != before.get(id(use), 0)]
        return used.kernel

    kernel()
    with pytest.warns(UserWarning, match="not measured"):
        router.tune()
    assert kernel() == kernel() == "reference"
    recorded = dict(router._recorded)
    router.tune_again()
    # Another layer has the same product, and this one does not run before `tune`.
    with routing(router), torch.no_grad():
        model(x)
    router.budget_s = 60.0
    router.tune()
    assert not recorded
    assert kernel() == "fast"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_passes_see_changes(backend):
    run = Run("asp")
    torch._dynamo.reset()
    eager, run.model = run.model, torch.compile(run.model, backend=backend)
    object.__setattr__(run.model, "weight", eager.weight)
    before = run.compare()
    run.no_masks()
    assert run.compare() != before
    run.layer.set_masks(run.forward)
    assert run.compare() == before


def test_two_threads_with_routers_and_sizes_of_their_own():
    run = Run("asp")
    expected = {}
    for tokens in (16, 48):
        x = torch.randn(tokens, 32)
        expected[tokens] = x, run.model(x).detach()
    router, errors = Router("sparse"), []

    def work(tokens):
        x, y = expected[tokens]
        for _ in range(50):
            with torch.no_grad():
                # Not by the module: its hooks count the products of one thread.
                found = nm_linear(x, run.model.weight, run.model.bias, run.layer)
            if not torch.allclose(found, y, rtol=1e-4, atol=1e-4):
                errors.append(tokens)

    with routing(router):
        threads = [threading.Thread(target=work, args=(tokens,)) for tokens in expected]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert {used.product.key.columns for used in router.used()} == {16, 48}
