"""Activation checkpointing and policies that wrap by class, on masked layers."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
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
from tests.support.pairs import pairwise_cases

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
    return lambda model: setattr(model, "run", run)


def in_sequence(part, x):
    if isinstance(part, nn.Sequential):
        return checkpoint_sequential(part, 2, x, use_reentrant=False)
    return part(x)


HOW = {
    "wrappers": wrapping(nn.Sequential, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
    "reentrant wrappers": wrapping(checkpoint_impl=CheckpointImpl.REENTRANT),
    "in forward": in_forward(lambda part, x: checkpoint(part, x, use_reentrant=False)),
    "in forward, reentrant": in_forward(lambda part, x: checkpoint(part, x, use_reentrant=True)),
    "in sequence": in_forward(in_sequence),
}


def steps(method, estimator, before=None, after=None):
    """Weights after three steps of two micro-batches, and the gradients on the way."""
    torch.manual_seed(0)
    model, found = Model().double(), []
    if before is not None:
        before(model)
    options = {"skip_first_last": False, "grad_snr_every": 0}
    sparsifier = NMSparsifier(model, "2:4", METHODS[method](), estimator, **options).attach()
    if after is not None:
        after(model)
    assert len(sparsifier.layers) == 5
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
    return found + [p.detach() for p in model.parameters()]


QUICK = ("bi-mask", "bame-bi-mask", "transposable")


@pytest.mark.parametrize(
    ("method", "name", "estimator"),
    [
        pytest.param(*case, marks=() if case[0] in QUICK and k % 5 == 0 else pytest.mark.slow)
        for k, case in enumerate(pairwise_cases(METHODS, HOW, ["mvue", None, "top-n"]))
    ],
)
def test_checkpointed_activations_give_the_same_gradients(method, name, estimator):
    """The forward that is computed again draws the noise of the first."""
    plain, how = steps(method, estimator), HOW[name]
    for found in (steps(method, estimator, before=how), steps(method, estimator, after=how)):
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-12)


POLICIES = {
    "by class": lambda cls: ModuleWrapPolicy({cls}),
    "transformer": lambda cls: partial(transformer_auto_wrap_policy, transformer_layer_cls={cls}),
    "custom": lambda cls: CustomPolicy(lambda module: isinstance(module, cls)),
    "by size": lambda cls: partial(size_based_auto_wrap_policy, min_num_params=1),
}


def chosen(policy, model):
    """The modules that a policy would wrap."""
    if hasattr(policy, "_run_policy"):
        return list(policy._run_policy(model, ignored_modules=set(), root_kwargs={}))
    options = {"recurse": False, "nonwrapped_numel": 10**9}
    return [module for module in model.modules() if policy(module=module, **options)]


@pytest.mark.parametrize("kind", KINDS)
def test_policies_that_wrap_by_class_find_masked_layers(kind):
    model = nn.Sequential(make(kind)[0])
    classes = [
        type(m) for m in model.modules() if any(p.dim() > 1 for p in m.parameters(recurse=False))
    ]
    for cls in classes:
        policies = [make_policy(cls) for make_policy in POLICIES.values()]
        before = [chosen(policy, model) for policy in policies]
        sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
        for policy, modules in zip(policies, before, strict=True):
            assert any(isinstance(module, Adapter) for module in modules)
            assert chosen(policy, model) == modules
        sparsifier.detach()
    assert classes
