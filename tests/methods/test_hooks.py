"""How a method's class tells which hooks it defines, and when hooks are called."""

import pytest
import torch
from torch import nn

from lightning_nm import ASP, BAME, SRSTE, STE, Dense, Method, NMSparsifier
from lightning_nm.functional import magnitude_mask
from lightning_nm.methods import MaskMethod
from tests.support.method_loop import Loop, mlp
from tests.support.outside import DecayingN


def attach(method, **options):
    torch.manual_seed(0)
    return NMSparsifier(nn.Linear(16, 8), "2:4", method, skip_first_last=False, **options)


def subclass(*bases, **hooks):
    return type("Sub", bases, hooks)


def test_a_method_knows_the_hooks_that_are_overridden():
    method = subclass(subclass(object, penalty=lambda self, layer: None), SRSTE)()
    assert Method().defined_hooks() == frozenset()
    assert SRSTE().defined_hooks() == {"before_step", "update"}
    assert method.defined_hooks() == {"before_step", "update", "penalty"}
    method.after_step = lambda layer, optimizer: None
    assert method.defined_hooks() == {"before_step", "update", "penalty", "after_step"}


def twice(self, layer, weight):
    return 2 * MaskMethod.forward_weight(self, layer, weight)


def whole(self, layer, weight):
    return weight


class MasksForAPenalty(Method):
    """Has masks, but a dense forward weight."""

    sparse_forward = True

    def init_masks(self, layer):
        layer.set_masks(layer.view.by_rows(lambda rows: magnitude_mask(rows, "2:4", dim=1)))


Doubles = subclass(object, selects_entries=False, forward_weight=twice)
Own = subclass(STE, selects_entries=False, forward_weight=twice)
Mixed = subclass(Doubles, STE)
Backward = subclass(STE, backward_weight=whole)
DenseTwice = subclass(Dense, forward_weight=lambda self, layer, weight: 2 * weight)


def test_a_class_that_makes_weights_by_itself_does_not_count_as_one_that_selects_entries():
    making = [Own, subclass(Own), Mixed, subclass(Mixed), MasksForAPenalty, Backward, DenseTwice]
    making += [subclass(STE, training_weight=whole), subclass(Backward, selects_entries=True)]
    making += [subclass(DenseTwice), subclass(Doubles, Dense)]
    assert not any(cls().selects_entries for cls in making)
    selecting = [STE, Dense, subclass(STE, update=lambda self, layer: None), subclass(Dense)]
    assert all(cls().selects_entries for cls in selecting)


@pytest.mark.parametrize("cls", [Own, Mixed, subclass(Own), MasksForAPenalty, DenseTwice])
def test_the_state_dict_is_the_function_of_a_method_that_computes_its_weights(cls):
    sparsifier = attach(cls()).attach()
    fresh, x = nn.Linear(16, 8), torch.randn(3, 16)
    fresh.load_state_dict(sparsifier.model.state_dict())
    torch.testing.assert_close(fresh(x), sparsifier.model(x))
    is_dense = cls in (MasksForAPenalty, DenseTwice)
    assert (set(sparsifier.flops_ratios().values()) == {1.0}) == is_dense


@pytest.mark.parametrize("base", [STE, MaskMethod, Dense])
def test_a_subclass_need_not_call_init(base):
    class Own(base):
        def __init__(self):
            self.prepared = []

        def init_masks(self, layer):
            self.prepared.append(layer.name)
            super().init_masks(layer)

    method = Own()
    state = attach(method, planned_steps=5).attach().state_dict()
    attach(method).attach(state)
    assert method.prepared == ["weight", "weight"], "also when a training continues"
    with pytest.raises(ValueError, match="schema 2"):
        attach("ste").attach({**state, "schema": 2})


def test_a_class_that_overrides_the_gradient_gets_it_at_pruned_entries():
    def gradient(self, layer, weight, grad):
        return ASP.weight_gradient(self, layer, weight, grad)

    def says(self, layer):
        return False

    own = subclass(ASP, weight_gradient=gradient)
    mixed = subclass(subclass(object, weight_gradient=gradient), ASP)
    told = subclass(own, gradient_at_pruned=says)
    both = subclass(ASP, weight_gradient=gradient, gradient_at_pruned=says)
    for hook, classes in (
        (Method.gradient_at_pruned, (own, mixed, subclass(own))),
        (says, (told, both, subclass(both))),
        (ASP.gradient_at_pruned, (subclass(ASP),)),
    ):
        assert all(cls.gradient_at_pruned is hook for cls in classes)


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_a_forward_mask_of_a_layer_that_cannot_have_one_is_ignored():
    layer = Loop("bi-mask", model=nn.Linear(6, 16), shape=(4, 6)).layer
    layer.set_masks(torch.zeros(16, 6, dtype=torch.bool), layer.masks.backward)
    assert layer.spec.forward_reason
    assert layer.forward_mask is None
    assert layer.masks.has_backward


def test_whether_gradients_were_dense_is_known_when_masks_are_updated():
    class Grows(STE):
        def needs_dense_gradient(self, layer):
            return layer.progress.clock % 2 == 0

        def update(self, layer):
            seen.append(layer.progress.dense_gradient)
            super().update(layer)

    seen = []
    Loop(Grows(), model=mlp(16, 8)).train(4)
    assert seen == [True, False, True, False]


def test_each_of_two_optimizers_uses_the_dense_gradient_of_its_layers():
    model = mlp(16, 16, 16)
    part = lambda place: torch.optim.SGD(model[place].parameters(), 0.1)  # noqa: E731
    run = Loop(BAME(stop=8, gradient_every=4), make=lambda _: part(0), model=model)
    second = part(2)
    run.sparsifier.register(second)
    run.backward()
    assert all(layer.progress.dense_gradient for layer in run.layers.values())
    run.sparsifier.before_step(second)
    second.step()
    run.step()
    assert not any(layer.progress.dense_gradient for layer in run.layers.values())


def test_an_adaptation_that_found_no_gradient_is_made_up_for():
    run = Loop(BAME(stop=8, gradient_every=4), model=mlp(16, 16))
    run.backward()
    run.sparsifier.before_step(run.optimizer)  # and a scaler skips the step
    run.sparsifier.step()
    run.layer.param.grad = None
    run.step()
    assert run.layer.progress.dense_gradient


@pytest.mark.parametrize("calls_base", [False, True])
def test_a_penalty_counts_whether_or_not_before_step_calls_its_base(calls_base):
    class Pulls(SRSTE):
        def penalty(self, layer):
            return 0.5 * layer.weight.square().sum()

        def before_step(self, layer, optimizer):
            if calls_base:
                super().before_step(layer, optimizer)

    run = Loop(Pulls(decay=0.0))
    run.layer.param.grad = torch.zeros_like(run.layer.param)
    run.sparsifier.before_step(run.optimizer)
    torch.testing.assert_close(run.layer.param.grad, run.layer.param.detach())


def test_a_wider_pattern_is_no_violation():
    run = Loop(DecayingN())
    for density in (0.75, 0.75, 0.5):
        assert run.layer.forward_mask.float().mean() == density
        assert run.sparsifier.violations() == 0
        run.train(1)
    run.layer.set_masks(torch.ones_like(run.layer.forward_mask))
    assert run.sparsifier.violations() == 16 * 32 // 4
