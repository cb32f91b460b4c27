"""How a method's class tells which hooks it defines, and what became of old ones."""

import pytest
import torch
from torch import nn

from lightning_nm import ASP, BAME, SRSTE, STE, Dense, Method, NMSparsifier
from lightning_nm.functional import nm_mask
from lightning_nm.methods import MaskMethod


def test_a_method_knows_the_hooks_that_are_overridden():
    class Mixin:
        def penalty(self, layer):
            return None

    class Mine(Mixin, SRSTE):
        pass

    method = Mine()
    assert Method().defined_hooks() == frozenset()
    assert SRSTE().defined_hooks() == {"before_step", "update"}
    assert method.defined_hooks() == {"before_step", "update", "penalty"}
    method.after_step = lambda layer, optimizer: None
    assert method.defined_hooks() == {"before_step", "update", "penalty", "after_step"}


def twice(self, layer, weight):
    return 2 * MaskMethod.forward_weight(self, layer, weight)


OWN = {"forward_weight": twice, "selects_entries": False}


class Doubles:
    selects_entries = False
    forward_weight = twice


class MasksForAPenalty(Method):
    """Has masks, but a dense forward weight."""

    def init_masks(self, layer):
        layer.set_masks(
            layer.view.unrows(
                nm_mask(layer.view.rows(layer.weight.detach()).abs(), layer.pattern, dim=1)
            )
        )

    sparse_forward = True


@pytest.mark.parametrize(
    "make",
    [
        lambda: type("Own", (STE,), OWN)(),
        lambda: type("Mixed", (Doubles, STE), {})(),
        lambda: type("Below", (type("Own", (STE,), OWN),), {})(),
        MasksForAPenalty,
    ],
)
def test_the_state_dict_is_the_function_of_a_method_that_computes_its_weights(make):
    torch.manual_seed(0)
    method = make()
    assert not method.selects_entries
    model, fresh = nn.Linear(8, 4), nn.Linear(8, 4)
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(fresh(x), model(x))
    if isinstance(method, MasksForAPenalty):
        assert sparsifier.flops_ratios() == {"arithmetic": 1.0, "paper": 1.0, "eligible": 1.0}


def test_a_class_that_makes_weights_by_itself_does_not_count_as_one_that_selects_entries():
    class Backward(STE):
        def backward_weight(self, layer, weight):
            return super().backward_weight(layer, weight)

    class Training(STE):
        def training_weight(self, layer, weight):
            return weight

    class Below(Backward):
        selects_entries = True

    class Untouched(STE):
        def update(self, layer):
            super().update(layer)

    mixed = type("Mixed", (type("Mixin", (), {"forward_weight": twice}), STE), {})
    assert STE().selects_entries
    assert Untouched().selects_entries
    for cls in (Backward, Training, Below, mixed, type("Under", (mixed,), {})):
        assert not cls().selects_entries


def test_a_subclass_of_dense_that_makes_weights_by_itself_does_not_select_entries():
    class Doubled(Dense):
        def forward_weight(self, layer, weight):
            return 2 * weight

    assert Dense().selects_entries
    assert type("Untouched", (Dense,), {})().selects_entries
    for cls in (Doubled, type("Below", (Doubled,), {}), type("Mixed", (Doubles, Dense), {})):
        assert not cls.selects_entries
    model, x = nn.Linear(8, 4), torch.randn(3, 8)
    expected = nn.functional.linear(x, 2 * model.weight, model.bias)
    NMSparsifier(model, "2:4", Doubled(), skip_first_last=False).attach()
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("base", [STE, MaskMethod, Dense])
def test_a_subclass_need_not_call_init(base):
    class Own(base):
        def __init__(self):
            self.calls = 0

        def init_masks(self, layer):
            self.calls += 1
            super().init_masks(layer)

    method = Own()
    NMSparsifier(nn.Linear(8, 4), "2:4", method, skip_first_last=False, planned_steps=5).attach()
    assert method.calls == 1


def test_a_class_that_overrides_the_gradient_gets_it_at_pruned_entries():
    def gradient(self, layer, weight, grad):
        return ASP.weight_gradient(self, layer, weight, grad)

    def says(self, layer):
        return False

    own = type("Own", (ASP,), {"weight_gradient": gradient})
    mixed = type("Mixed", (type("Mixin", (), {"weight_gradient": gradient}), ASP), {})
    for cls in (own, mixed, type("Below", (own,), {})):
        assert cls.gradient_at_pruned is Method.gradient_at_pruned
    told = type("Told", (own,), {"gradient_at_pruned": says})
    both = type("Both", (ASP,), {"weight_gradient": gradient, "gradient_at_pruned": says})
    for cls in (told, both, type("Below", (both,), {})):
        assert cls.gradient_at_pruned is says
    assert type("Untouched", (ASP,), {}).gradient_at_pruned is ASP.gradient_at_pruned


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_a_forward_mask_of_a_layer_that_cannot_have_one_is_ignored():
    sparsifier = NMSparsifier(nn.Linear(6, 16), "2:4", "bi-mask", skip_first_last=False).attach()
    layer = sparsifier.layers["weight"]
    layer.set_masks(torch.zeros(16, 6, dtype=torch.bool), layer.masks.backward)
    assert layer.spec.forward_reason
    assert layer.forward_mask is None
    assert layer.masks.has_backward


class Grows(STE):
    """Asks for dense gradients every second step, and reads so when masks are updated."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def needs_dense_gradient(self, layer):
        return layer.progress.clock % 2 == 0

    def update(self, layer):
        self.seen.append(layer.progress.dense_gradient)
        super().update(layer)


def test_whether_gradients_were_dense_is_known_when_masks_are_updated():
    method = Grows()
    model = nn.Linear(8, 4)
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    for _ in range(4):
        model(torch.randn(4, 8)).sum().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert method.seen == [True, False, True, False]


def test_each_of_two_optimizers_uses_the_dense_gradient_of_its_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    sparsifier = NMSparsifier(
        model, "2:4", BAME(stop=8, gradient_every=4), skip_first_last=False
    ).attach()
    optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in model]
    for optimizer in optimizers:
        sparsifier.register(optimizer)
    model(torch.randn(4, 8)).square().sum().backward()
    assert all(layer.progress.dense_gradient for layer in sparsifier.layers.values())
    for optimizer in optimizers:
        sparsifier.before_step(optimizer)
    for optimizer in optimizers:
        optimizer.step()
    sparsifier.step()
    assert not any(layer.progress.dense_gradient for layer in sparsifier.layers.values())


def test_an_adaptation_that_found_no_gradient_is_made_up_for():
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    sparsifier = NMSparsifier(
        model, "2:4", BAME(stop=8, gradient_every=4), skip_first_last=False
    ).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    model(torch.randn(4, 8)).square().sum().backward()
    sparsifier.before_step(optimizer)  # and a scaler skips the step
    sparsifier.step()
    model.weight.grad = None
    sparsifier.before_step(optimizer)
    optimizer.step()
    sparsifier.step()
    assert sparsifier.layers["weight"].progress.dense_gradient


def test_a_method_of_ones_own_prepares_itself_when_a_training_continues():
    class Counts(STE):
        def __init__(self):
            super().__init__()
            self.prepared = []

        def init_masks(self, layer):
            self.prepared.append(layer.name)
            super().init_masks(layer)

    model = nn.Linear(8, 4)
    state = NMSparsifier(model, "2:4", Counts(), skip_first_last=False).attach().state_dict()
    method = Counts()
    NMSparsifier(nn.Linear(8, 4), "2:4", method, skip_first_last=False).attach(state)
    assert method.prepared == ["weight"]
    with pytest.raises(ValueError, match="schema 2"):
        NMSparsifier(nn.Linear(8, 4), "2:4", "ste", skip_first_last=False).attach(
            {**state, "schema": 2}
        )


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
