"""What routers keep of masks and weights, after random changes of both: GEMMs equal the dense ones."""

import copy
import pickle
import warnings
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.kernels import Router, routing
from lightning_nm.nn.layer import LayerMasks
from lightning_nm.training.watch import ForgottenCallWarning
from tests.support.cpu_products import needs_library
from tests.support.experts import EXPERTS, WIDTH, Experts
from tests.support.outside import ScaledMask
from tests.support.routed import gradients

PATTERN = "2:4"
METHODS = ["asp", "bame", "bi-mask", "outside", "sr-ste", "transposable"]


def masked_model(method, seed=None):
    """A model of two layers; the same one masked again if it is given."""
    model = seed
    if not isinstance(seed, nn.Module):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    made = ScaledMask() if method == "outside" else method
    options = {"skip_first_last": False, "planned_steps": 100}
    return model, NMSparsifier(model, PATTERN, made, **options).attach()


class ThroughData(torch.optim.SGD):
    """Writes where no version is counted."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()
                parameter.data.mul_(0.5)


class Interleaved:
    """A model and a router, and the changes of masks or weights, each with a number from 1 to 3."""

    def __init__(self, method, router):
        self.method, self.router = method, router
        self.model, self.sparsifier = masked_model(method, 0)
        self.checkpoints = []
        for seed in (1, 2):
            other, sparsifier = masked_model(method, seed)
            self.checkpoints.append((copy.deepcopy(other.state_dict()), sparsifier.state_dict()))
        self.x = torch.randn(16, 32)
        self.averages = [0.1 * torch.randn_like(weight) for weight in self.weights()]

    def layers(self):
        return self.sparsifier.layers.values()

    def weights(self):
        return [layer.weight for layer in self.layers()]

    def load_a_checkpoint(self, number):
        weights, state = self.checkpoints[number % 2]
        self.model.load_state_dict(weights)
        self.sparsifier.load_state_dict(state)

    def load_weights_alone(self, number):
        self.model.load_state_dict(self.checkpoints[number % 2][0])

    def set_masks(self, number):
        for layer in self.layers():
            scores = torch.rand_like(layer.weight)
            if self.method == "transposable":
                forward = nmf.transposable_mask(scores, PATTERN)
            else:
                forward = nmf.nm_mask(scores, PATTERN)
            backward = None
            if layer.masks.backward is not None:
                order = layer.masks.permutation
                backward = nmf.backward_mask(layer.weight, forward, PATTERN, order)
            layer.set_masks(forward, backward)

    def move_the_backward_mask(self, number):
        for layer in self.layers():
            if layer.masks.backward is not None:
                order = torch.randperm(len(layer.weight))
                mask = nmf.backward_mask(layer.weight, layer.forward_mask, PATTERN, order)
                layer.masks.set_permutation(order)
                layer.masks.set_backward(mask)

    def write_bits(self, number):
        for layer in self.layers():
            layer.masks.bits.copy_(self.other_bits(layer))

    def assign_bits(self, number):
        for layer in self.layers():
            layer.masks.bits = self.other_bits(layer)

    def other_bits(self, layer):
        """Whole blocks, exchanged in a way that keeps both masks N:M."""
        size = layer.masks.bits.shape[1]
        blocks = torch.randperm(size // 4)[:, None] * 4 + torch.arange(4)
        return layer.masks.bits[:, blocks.flatten()].clone()

    @torch.no_grad()
    def write_weights(self, number):
        for weight in self.weights():
            weight.mul_(1.0 + 0.1 * number)

    def assign_data(self, number):
        """More than once: the last memory may be that of the first, which is free again."""
        for _ in range(number):
            for weight in self.weights():
                weight.data = 0.1 * torch.randn_like(weight)

    def step(self, number):
        kind = ThroughData if number % 2 else torch.optim.SGD
        optimizer = kind(self.model.parameters(), 1e-3)
        self.sparsifier.register(optimizer)
        gradients(self.model, self.x, self.router)
        self.sparsifier.before_step(optimizer)
        optimizer.step()
        self.sparsifier.step()

    def evaluate(self, number):
        with routing(self.router), torch.no_grad():
            self.model(self.x)

    def copy_all(self, number):
        self.model, self.sparsifier = copy.deepcopy((self.model, self.sparsifier))

    def bake(self, number):
        self.sparsifier.bake()

    def install_again(self, number):
        with warnings.catch_warnings():  # the latent weights are meant
            warnings.simplefilter("ignore", ForgottenCallWarning)
            self.sparsifier.detach()
        _, self.sparsifier = masked_model(self.method, self.model)

    def swap_averages(self, number):
        """As averaging callbacks do: torch counts no write through ``.data``, which the CPU kernels need not."""
        for weight, average in zip(self.weights(), self.averages, strict=True):
            kept = average.clone()
            average.copy_(weight.data)
            weight.data.copy_(kept)


COUNTED = [
    "load_a_checkpoint",
    "load_weights_alone",
    "set_masks",
    "move_the_backward_mask",
    "write_bits",
    "assign_bits",
    "write_weights",
    "assign_data",
    "step",
    "evaluate",
    "copy_all",
    "bake",
    "install_again",
]
"""Changes that torch or the masks count."""
ROUTERS = {
    "cpu": lambda reuse: Router("sparse", reuse=reuse),
    "simulated": lambda reuse: Router("sparse", [SimulatedSparseKernel()], reuse=reuse),
}
KERNELS = [pytest.param("cpu", marks=needs_library), "simulated"]


def interleave(method, router, changes):
    world = Interleaved(method, router)

    def check():
        found = gradients(world.model, world.x, router)
        for a, b in zip(found, gradients(world.model, world.x, None), strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kernel that is switched off would make the rest dense
        for name, number in changes:
            check()
            getattr(world, name)(number)
        check()
    assert not router.registry.failures
    assert {used.kernel for used in router.used()} - {"reference"}


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=15, deadline=None)
@given(data=st.data(), method=st.sampled_from(METHODS), reuse=st.sampled_from([1, 4]))
def test_any_changes(kernel, data, method, reuse):
    names = COUNTED if kernel == "simulated" else [*COUNTED, "swap_averages"]
    change = st.tuples(st.sampled_from(names), st.integers(1, 3))
    changes = data.draw(st.lists(change, min_size=1, max_size=8))
    interleave(method, ROUTERS[kernel](reuse), changes)


@pytest.mark.parametrize(
    ("kernel", "method", "change"),
    [
        *(
            pytest.param("cpu", *case, marks=needs_library)
            for case in product(METHODS, [*COUNTED, "swap_averages"])
        ),
        *(("simulated", "bi-mask", change) for change in COUNTED),
    ],
)
def test_each_change_twice(kernel, method, change):
    interleave(method, ROUTERS[kernel](4), [(change, 1), (change, 2)])


def test_no_two_states_of_masks_have_one_number():
    mask = torch.ones(4, 4, dtype=torch.bool)
    first, second = LayerMasks(), LayerMasks()
    states = []
    for masks in (first, second):
        for change in (
            lambda: None,
            lambda masks=masks: masks.set(mask, None),
            lambda masks=masks: masks.set(mask, mask),
            lambda masks=masks: masks.bits.fill_(0),
            lambda masks=masks: masks.set_permutation(torch.arange(4)),
            lambda masks=masks: masks.set_permutation(torch.arange(4)),
        ):
            change()
            states.append(masks.cache_key)
        assert masks.cache_key == states[-1], "nothing changed"
    again = copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))
    states += [masks.cache_key for masks in again]
    assert len(set(states)) == len(states)


def test_masks_that_stay_on_their_device_keep_their_cache_key():
    sparsifier = NMSparsifier(nn.Linear(8, 8), "2:4", "bi-mask", skip_first_last=False)
    (layer,) = sparsifier.attach().layers.values()
    before = layer.masks.cache_key
    layer.to_weight_device()
    assert layer.masks.cache_key == before


def test_experts_hear_that_the_backward_mask_went():
    """The bits are written in place, so the views of single experts stay what they are."""
    torch.manual_seed(0)
    model = Experts()
    sparsifier = NMSparsifier(model, "2:4", "bi-mask").attach()
    x, experts = torch.randn(32, WIDTH), torch.arange(32) % EXPERTS

    def input_gradient(model, router):
        inputs = x.clone().requires_grad_()
        with routing(router):
            model(inputs, experts).square().sum().backward()
        return inputs.grad

    router = ROUTERS["simulated"](4)
    input_gradient(model, router)
    for layer in sparsifier.layers.values():
        layer.set_masks(layer.forward_mask)
    expected = input_gradient(copy.deepcopy(model), None)
    for again in (router, None):
        torch.testing.assert_close(input_gradient(model, again), expected)
