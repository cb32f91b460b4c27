"""Activation checkpointing and policies that wrap by class, on masked layers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_nm import NMSparsifier
from lightning_nm.nn.adapters import Adapter
from tests.support.contract import METHODS, sgd_or_adam
from tests.support.kinds import KINDS, Attention, make

pytestmark = pytest.mark.filterwarnings(
    "ignore:Please specify CheckpointImpl:FutureWarning"
)  # torch 2.6


class Model(nn.Module):
    """Linear layers, a convolution, attention, dropout; the block runs under what a test passes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32))
        self.attention = Attention(dropout=0.1)
        self.run = lambda part, x: part(x)

    def forward(self, x):
        x = self.run(self.conv, x).transpose(1, 2)
        return self.run(self.attention, self.run(self.block, x))


def wrapping(*kinds, **options):
    return lambda model: apply_activation_checkpointing(
        model,
        partial(checkpoint_wrapper, **options),
        check_fn=lambda module: isinstance(module, (nn.Linear, nn.Conv1d, *kinds)),
    )


def in_forward(run):
    def set_run(model):
        model.run = run

    return set_run


HOW = {
    "wrappers": wrapping(nn.Sequential, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "reentrant wrappers": wrapping(checkpoint_impl=CheckpointImpl.REENTRANT),
    "in forward": in_forward(lambda part, x: checkpoint(part, x, use_reentrant=False)),
    "in forward, reentrant": in_forward(lambda part, x: checkpoint(part, x, use_reentrant=True)),
    "in sequence": in_forward(
        lambda part, x: (
            checkpoint_sequential(part, 2, x, use_reentrant=False)
            if isinstance(part, nn.Sequential)
            else part(x)
        )
    ),
}


def steps(method, estimator, how=None, wrap_first=False):
    """Weights after three steps of two micro-batches, and the gradients on the way."""
    torch.manual_seed(0)
    model, found = Model().double(), []
    if wrap_first and how is not None:
        how(model)
    sparsifier = NMSparsifier(
        model, "2:4", METHODS[method](), estimator, skip_first_last=False, grad_snr_every=0
    ).attach()
    if how is not None and not wrap_first:
        how(model)
    optimizer = sgd_or_adam(method, model.parameters(), 0.05)
    sparsifier.register(optimizer)
    for step in range(3):
        for micro in range(2):
            torch.manual_seed(10 * step + micro)
            x = torch.randn(2, 16, 6, dtype=torch.float64, requires_grad=True)
            model(x).square().mean().backward()
            found += [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            if micro:
                sparsifier.before_step(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            sparsifier.step()
    assert len(sparsifier.layers) == 5
    return found + [p.detach() for p in model.parameters()]


ESTIMATORS = [None, "approx-mvue", "top-n"]
CELLS = [(method, "mvue") for method in METHODS] + [
    ("bi-mask", estimator) for estimator in ESTIMATORS
]


QUICK = {
    ("bi-mask", "wrappers"),
    ("bame-bi-mask", "reentrant wrappers"),
    ("transposable", "in forward"),
}


@pytest.mark.parametrize(
    ("method", "estimator", "name"),
    [
        pytest.param(*cell, name, marks=() if (cell[0], name) in QUICK else pytest.mark.slow)
        for cell in CELLS
        for name in HOW
    ],
)
def test_checkpointed_activations_give_the_same_gradients(method, estimator, name):
    """The forward that is computed again draws the noise of the first."""
    plain = steps(method, estimator)
    for wrap_first in (False, True):
        for a, b in zip(plain, steps(method, estimator, HOW[name], wrap_first), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


POLICIES = {
    "by class": lambda cls: ModuleWrapPolicy({cls}),
    "transformer": lambda cls: partial(transformer_auto_wrap_policy, transformer_layer_cls={cls}),
    "custom": lambda cls: CustomPolicy(lambda module: isinstance(module, cls)),
    "by size": lambda cls: partial(size_based_auto_wrap_policy, min_num_params=1),
}


def chosen(policy, model):
    """The modules that a policy would wrap."""
    if callable(policy) and not hasattr(policy, "_run_policy"):
        return [
            m for m in model.modules() if policy(module=m, recurse=False, nonwrapped_numel=10**9)
        ]
    return list(policy._run_policy(model, ignored_modules=set(), root_kwargs={}))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_policies_that_wrap_by_class_find_masked_layers(kind, name):
    plain, _ = make(kind)
    model, policies = nn.Sequential(plain), []
    handled = [
        type(m) for m in model.modules() if any(p.dim() > 1 for p in m.parameters(recurse=False))
    ]
    for cls in dict.fromkeys(handled):
        policy = POLICIES[name](cls)
        before = chosen(policy, model)
        assert before
        sparsifier = NMSparsifier(model, "2:4", skip_first_last=False).attach()
        assert any(isinstance(module, Adapter) for module in before)
        assert chosen(policy, model) == before
        sparsifier.detach()
        policies.append(policy)
    assert policies


def test_a_policy_that_wraps_linear_layers_applies_to_masked_ones():
    model = Model()
    sparsifier = NMSparsifier(model, "2:4", skip_first_last=False).attach()
    apply_activation_checkpointing(
        model, checkpoint_wrapper, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    wrapped = {
        name for name, module in model.named_modules() if isinstance(module, CheckpointWrapper)
    }
    assert wrapped == {"block.0", "block.3", "attention.mha.out_proj"}
    for name in wrapped:
        assert (
            sparsifier.layers[name].spec.module
            is model.get_submodule(name)._checkpoint_wrapped_module
        )
