"""How a method's class tells which hooks it defines, and what became of old ones."""

import pytest
import torch
from torch import nn

from lightning_nm import SRSTE, GradientEstimator, Method, NMSparsifier
from lightning_nm.methods import MaskMethod


@pytest.mark.parametrize("name", ["init", "forward_part", "forward_operand", "backward_operand", "gemms"])
def test_a_replaced_hook_is_refused_when_the_class_is_made(name):
    with pytest.raises(TypeError, match=rf"Mine defines {name}\(\), which is not a hook any more: "):
        type("Mine", (MaskMethod,), {name: lambda self, layer: None})


def test_a_replaced_hook_of_an_estimator_is_refused():
    with pytest.raises(TypeError, match=r"Mine defines gemm\(\).*define pattern_of\(\)"):
        type("Mine", (GradientEstimator,), {"gemm": lambda self, layer: None})


def test_a_class_knows_its_own_and_its_bases_hooks():
    class Mine(SRSTE):
        def penalty(self, layer):
            return None

    assert Method.hooks == frozenset()
    assert {"update", "before_step", "init_masks"} <= SRSTE.hooks
    assert Mine.hooks == SRSTE.hooks | {"penalty"}


def test_a_method_that_computes_its_weights_does_not_select_entries():
    class Scaled(MaskMethod):
        def forward_weight(self, layer, weight):
            return 2 * super().forward_weight(layer, weight)

    class Named(Scaled):
        pass

    class Selects(MaskMethod):
        selects_entries = True

        def backward_weight(self, layer, weight):
            return super().backward_weight(layer, weight)

    assert MaskMethod.selects_entries
    assert not Scaled.selects_entries
    assert not Named.selects_entries
    assert Selects.selects_entries


def test_a_penalty_counts_whether_or_not_before_step_calls_its_base():
    class Pulls(SRSTE):
        def __init__(self, calls_base):
            super().__init__(decay=0.0)
            self.calls_base = calls_base

        def penalty(self, layer):
            return 0.5 * layer.weight.square().sum()

        def before_step(self, layer, optimizer):
            if self.calls_base:
                super().before_step(layer, optimizer)

    found = []
    for calls_base in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        sparsifier = NMSparsifier(model, "2:4", Pulls(calls_base), skip_first_last=False).attach()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sparsifier.register(optimizer)
        model.weight.grad = torch.zeros_like(model.weight)
        sparsifier.before_step(optimizer)
        torch.testing.assert_close(model.weight.grad, model.weight.detach())
        found.append(model.weight.grad)
    assert torch.equal(*found)
