"""What routers keep of masks and weights, after random changes of both: products equal the dense ones."""

import copy
import pickle
import warnings

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

PATTERN = "2:4"
METHODS = {
    "asp": lambda: "asp",
    "sr-ste": lambda: "sr-ste",
    "bi-mask": lambda: "bi-mask",
    "bame": lambda: "bame",
    "transposable": lambda: "transposable",
    "outside": ScaledMask,
}


def masked_model(method, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    sparsifier = NMSparsifier(
        model, PATTERN, METHODS[method](), skip_first_last=False, planned_steps=100
    ).attach()
    return model, sparsifier


def products(model, router, x):
    model.zero_grad()
    x = x.clone().requires_grad_()
    with routing(router):
        y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())


class Interleaved:
    """A model and a router; the methods of ``ALL`` change masks or weights."""

    def __init__(self, method, router):
        self.method, self.router = method, router
        self.model, self.sparsifier = masked_model(method, 0)
        self.checkpoints = []
        for seed in (1, 2):
            other, sparsifier = masked_model(method, seed)
            self.checkpoints.append((copy.deepcopy(other.state_dict()), sparsifier.state_dict()))
        self.x = torch.randn(16, 32)
        self.averages = [0.1 * torch.randn_like(weight) for weight in self.weights()]

    def weights(self):
        return [layer.weight for layer in self.sparsifier.layers.values()]

    def layers(self):
        return self.sparsifier.layers.values()

    def load_a_checkpoint(self, number):
        weights, state = self.checkpoints[number % 2]
        self.model.load_state_dict(weights)
        self.sparsifier.load_state_dict(state)

    def load_weights_alone(self, number):
        self.model.load_state_dict(self.checkpoints[number % 2][0])

    def set_masks(self, number):
        for layer in self.layers():
            forward = nmf.nm_mask(torch.rand_like(layer.weight), PATTERN)
            backward = None
            if layer.masks.backward is not None:
                backward = nmf.backward_mask(
                    layer.weight, forward, PATTERN, layer.masks.permutation
                )
            if self.method == "transposable":
                forward = nmf.transposable_mask(torch.rand_like(layer.weight), PATTERN)
            layer.set_masks(forward, backward)

    def move_the_backward_mask(self, number):
        for layer in self.layers():
            if layer.masks.backward is None:
                continue
            permutation = torch.randperm(len(layer.weight))
            mask = nmf.backward_mask(layer.weight, layer.forward_mask, PATTERN, permutation)
            layer.masks.set_permutation(permutation)
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

    def write_weights(self, number):
        with torch.no_grad():
            for weight in self.weights():
                weight.mul_(1.0 + 0.1 * number)

    def assign_data(self, number):
        for weight in self.weights():
            weight.data = 0.1 * torch.randn_like(weight)

    def assign_data_twice(self, number):
        """The second memory may be that of the first, which is free again."""
        self.assign_data(number)
        self.assign_data(number)

    def step(self, number):
        optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.sparsifier.register(optimizer)
        products(self.model, self.router, self.x)
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
        self.sparsifier = NMSparsifier(
            self.model, PATTERN, METHODS[self.method](), skip_first_last=False, planned_steps=100
        ).attach()

    def swap_averages(self, number):
        """As averaging callbacks do: torch counts no write through ``.data``."""
        for weight, average in zip(self.weights(), self.averages, strict=True):
            kept = average.clone()
            average.copy_(weight.data)
            weight.data.copy_(kept)

    def check(self):
        found = products(self.model, self.router, self.x)
        dense = products(self.model, None, self.x)
        for a, b in zip(found, dense, strict=True):
            assert (a - b).norm() <= 1e-4 * b.norm()


COUNTED = [
    "load_a_checkpoint",
    "load_weights_alone",
    "set_masks",
    "move_the_backward_mask",
    "write_bits",
    "assign_bits",
    "write_weights",
    "assign_data",
    "assign_data_twice",
    "step",
    "evaluate",
    "copy_all",
    "bake",
    "install_again",
]
"""Changes that torch or the masks count."""
ALL = [*COUNTED, "swap_averages"]


def interleave(method, router, changes):
    world = Interleaved(method, router)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a kernel that is switched off would make the rest dense
        for name, number in changes:
            world.check()
            getattr(world, name)(number)
        world.check()
    assert not router.registry.failures
    sparse = {used.kernel for used in router.used()} - {"reference"}
    assert sparse


def changes(names):
    return st.lists(st.tuples(st.sampled_from(names), st.integers(1, 3)), min_size=1, max_size=8)


@needs_library
@settings(max_examples=25, deadline=None)
@given(method=st.sampled_from(sorted(METHODS)), reuse=st.sampled_from([1, 4]), changes=changes(ALL))
def test_cpu_kernels_multiply_the_masks_and_weights_of_now(method, reuse, changes):
    interleave(method, Router("sparse", reuse=reuse), changes)


@settings(max_examples=25, deadline=None)
@given(method=st.sampled_from(sorted(METHODS)), changes=changes(COUNTED))
def test_kept_packs_are_of_the_masks_and_weights_of_now(method, changes):
    interleave(method, Router("sparse", [SimulatedSparseKernel()], reuse=4), changes)


@needs_library
@pytest.mark.parametrize("change", ALL)
@pytest.mark.parametrize("method", sorted(METHODS))
def test_each_change_twice(method, change):
    interleave(method, Router("sparse", reuse=4), [(change, 1), (change, 2)])


def test_no_two_states_of_masks_have_one_number():
    mask = torch.ones(4, 4, dtype=torch.bool)
    first, second = LayerMasks(), LayerMasks()
    states = [first.cache_key, second.cache_key]
    for masks in (first, second):
        masks.set(mask, None)
        states.append(masks.cache_key)
        masks.set(mask, mask)
        states.append(masks.cache_key)
        masks.bits[0] = 0
        states.append(masks.cache_key)
        masks.set_permutation(torch.arange(4))
        states.append(masks.cache_key)
        masks.set_permutation(torch.arange(4))
        states.append(masks.cache_key)
        assert masks.cache_key == states[-1], "nothing changed"
    states += [
        copy.copy(first).cache_key,
        copy.deepcopy(first).cache_key,
        pickle.loads(pickle.dumps(first)).cache_key,
    ]
    assert len(set(states)) == len(states)


def test_masks_that_stay_on_their_device_keep_their_cache_key():
    sparsifier = NMSparsifier(torch.nn.Linear(8, 8), "2:4", "bi-mask", skip_first_last=False)
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

    def input_gradient(router):
        inputs = x.clone().requires_grad_()
        with routing(router):
            model(inputs, experts).square().sum().backward()
        return inputs.grad

    router = Router("sparse", [SimulatedSparseKernel()], reuse=4)
    input_gradient(router)
    for layer in sparsifier.layers.values():
        layer.set_masks(layer.forward_mask)
    fresh = copy.deepcopy(model)
    inputs = x.clone().requires_grad_()
    fresh(inputs, experts).square().sum().backward()
    torch.testing.assert_close(input_gradient(router), inputs.grad)
    torch.testing.assert_close(input_gradient(None), inputs.grad)
