"""SLoPe's low-rank adapters: their product and gradients, when they are trained, and what a training leaves."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import MVUE, NMSparsifier, SLoPe
from lightning_nm.nn.layer.gemms import mean_densities
from lightning_nm.nn.products.low_rank import (
    LEFT,
    RIGHT,
    Factors,
    low_rank_modules,
    replace_low_rank,
    saved_factors,
    take_low_rank,
)
from lightning_nm.training.planned import charge_plan
from tests.support.bame import OPTIMIZERS, batch, linear, run
from tests.support.routed import assert_equal, gradients, ran, simulated

STEPS = 8


def slope(rank=2, last=0.5, **options):
    return SLoPe(adapters={"rank": rank, "last": last}, **options)


def small(method=None, make=OPTIMIZERS["adamw"], steps=STEPS, **options):
    return linear(method or slope(), make=make, planned_steps=steps, **options)


def train(module, sparsifier, optimizer, steps, start=0):
    for step in range(start, start + steps):
        optimizer.zero_grad()
        x, y = batch(step, next(module.parameters()).dtype)
        (module(x) - y).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


def active(layer, seed=0):
    """Let the adapters work, with values that no training gave them."""
    layer.progress.reached = 2
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in (LEFT, RIGHT):
            parameter = layer.parameters[name]
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["2:4", "1:4", "3:8"]),
    st.integers(1, 8),
    st.sampled_from([(), (3,), (2, 3)]),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_the_product_and_its_gradients_are_those_of_the_formula(pattern, rank, axes, bias, seed):
    """Y = X (F W)^T + (X R^T) L^T; dX = dY (B W) + (dY L) R; dW = F (dY^T X); dL = dY^T (X R^T); dR = (dY L)^T X."""
    torch.manual_seed(seed)
    module = nn.Linear(16, 8, bias=bias).double()
    sparsifier = NMSparsifier(
        module, pattern, slope(rank), skip_first_last=False, planned_steps=4
    ).attach()
    (layer,) = sparsifier.layers.values()
    active(layer, seed)
    left, right = layer.parameters[LEFT], layer.parameters[RIGHT]
    x = torch.randn(*axes, 16, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(*axes, 8, dtype=torch.float64)
    y = module(x)
    y.backward(dy)

    weight = layer.weight.detach()
    used = torch.where(layer.forward_mask, weight, 0)
    used_backward = torch.where(layer.masks.backward, weight, 0)
    x_ti, dy_to = x.detach().reshape(-1, 16), dy.reshape(-1, 8)
    expected = x_ti @ used.t() + (x_ti @ right.t()) @ left.t()
    if bias:
        expected = expected + module.bias
        torch.testing.assert_close(module.bias.grad, dy_to.sum(0))
    torch.testing.assert_close(y.reshape(-1, 8), expected)
    dx = dy_to @ used_backward + (dy_to @ left) @ right
    torch.testing.assert_close(x.grad.reshape(-1, 16), dx)
    torch.testing.assert_close(
        layer.weight.grad, torch.where(layer.forward_mask, dy_to.t() @ x_ti, 0)
    )
    torch.testing.assert_close(left.grad, dy_to.t() @ (x_ti @ right.t()))
    torch.testing.assert_close(right.grad, (dy_to @ left).t() @ x_ti)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_are_trained_in_the_last_steps_alone(name):
    module, sparsifier, optimizer, layer = small(make=OPTIMIZERS[name])
    left, right = layer.parameters[LEFT], layer.parameters[RIGHT]
    initial = right.detach().clone()
    assert not left.any()
    assert 0 < initial.abs().max() <= 1 / 4, "R is uniform within 1 / sqrt(in)"
    assert {id(left), id(right)} <= {id(p) for g in optimizer.param_groups for p in g["params"]}
    for step in range(STEPS):
        train(module, sparsifier, optimizer, 1, step)
        if step < STEPS // 2:
            # Neither a gradient, nor weight decay, nor a state.
            assert left.grad is None
            assert right.grad is None
            assert torch.equal(right, initial)
            assert left not in optimizer.state
            assert sparsifier.stats()["adapter_share"] == 0
        else:
            assert left.any()
        if step > STEPS // 2:
            assert right.grad.any(), "R has a gradient once L is not zero"
            assert not torch.equal(right, initial)
    assert sparsifier.violations() == 0
    assert not layer.weight[~layer.forward_mask].any()
    product = left.detach() @ right.detach()
    share = product.norm() / layer.forward_weight().norm()
    assert sparsifier.stats()["adapter_share"] == pytest.approx(share.item())


@pytest.mark.parametrize(
    ("last", "steps", "first"),
    [(0.01, 1000, 990), (1.0, 10, 0), (0.25, 8, 6), (0.001, 10, 9), (1, 7, 0)],
)
def test_the_last_share_has_at_least_one_step(last, steps, first):
    assert slope(last=last).schedule(steps) == (0, first)


def test_a_training_until_the_adapters_is_the_one_without_them():
    found = []
    for method in (slope(), SLoPe()):
        module, sparsifier, optimizer, layer = small(method)
        train(module, sparsifier, optimizer, STEPS // 2)
        found.append((layer.weight.detach(), layer.masks.bits))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("stop", [2, STEPS // 2, 6])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_resumed_training_ends_with_the_same_bits(name, stop):
    def parts():
        module, sparsifier, optimizer, layer = small(make=OPTIMIZERS[name])
        return (module, sparsifier, optimizer), layer

    whole, layer = parts()
    train(*whole, STEPS)
    begun, _ = parts()
    train(*begun, stop)
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in begun], buffer)
    buffer.seek(0)
    resumed, other = parts()
    for part, state in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*resumed, STEPS - stop, stop)
    assert torch.equal(layer.weight, other.weight)
    for key in (LEFT, RIGHT):
        assert layer.parameters[key].any()
        assert torch.equal(layer.parameters[key], other.parameters[key])


@pytest.mark.parametrize(
    ("method", "difference"),
    [
        (slope(4), r"adapters .*'rank': 2.* in the checkpoint, .*'rank': 4.* here"),
        (SLoPe(), r"adapters .*'rank': 2.* in the checkpoint, {} here"),
    ],
)
def test_a_resume_with_other_adapters_is_refused(method, difference):
    module, sparsifier, optimizer, _ = small()
    train(module, sparsifier, optimizer, 2)
    other, other_sparsifier, *_ = small(method)
    other.load_state_dict(module.state_dict())
    with pytest.raises(ValueError, match=rf"'0'.*{difference}"):
        other_sparsifier.load_state_dict(sparsifier.state_dict())


def test_accumulated_gradients_are_those_of_the_whole_batch():
    found = []
    for windows in (1, 3):
        module, sparsifier, optimizer, layer = small(slope(last=1.0), make=OPTIMIZERS["sgd"])
        for step in range(4):
            optimizer.zero_grad()
            run(module, sparsifier, optimizer, 1, start=step, windows=windows)
        found.append([layer.weight.detach(), *layer.parameters.values()])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts)


def test_a_model_computes_the_same_after_its_training():
    module, sparsifier, optimizer, layer = small()
    train(module, sparsifier, optimizer, STEPS)
    x, _ = batch(0)
    keys, y = list(module.state_dict()), module(x)
    dense = F.linear(x, layer.forward_weight())
    sparsifier.bake()
    sparsifier.detach()
    assert type(module[0]) is nn.Linear
    assert list(module.state_dict()) == keys
    torch.testing.assert_close(module(x), y)
    torch.testing.assert_close(module[0](input=x), y)
    assert not torch.allclose(y, dense)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x), y)
        assert take_low_rank(other[0]) is not None
        torch.testing.assert_close(other(x), dense)
    torch.testing.assert_close(module(x), y, msg="a copy shares the hook")
    assert module.half()[0].low_rank.left.dtype == torch.float16


def test_another_training_continues_with_them_or_is_refused():
    module, sparsifier, optimizer, layer = small()
    train(module, sparsifier, optimizer, STEPS)
    state = sparsifier.state_dict()
    sparsifier.bake()
    sparsifier.detach(keep_parameters=True)
    for method in (slope(), "sr-ste"):
        with pytest.raises(ValueError, match=r"layer '0' has a low-rank adapter .*drop_adapters"):
            NMSparsifier(module, "2:4", method, skip_first_last=False, planned_steps=8).attach()
        assert low_rank_modules(module), "a refusal changes nothing"
    x, _ = batch(0)
    y = module(x)
    again = NMSparsifier(module, "2:4", slope(), skip_first_last=False).attach(state)
    assert not low_rank_modules(module)
    again.load_state_dict(state)
    torch.testing.assert_close(module(x), y)
    assert torch.equal(again.layers["0"].parameters[LEFT], layer.parameters[LEFT])
    # Removed before its first step, it leaves the model as it was.
    again.detach()
    torch.testing.assert_close(module(x), y)


def test_a_training_that_fails_before_its_first_step_leaves_the_adapters():
    module, sparsifier, optimizer, _ = small()
    train(module, sparsifier, optimizer, STEPS)
    state = sparsifier.state_dict()
    sparsifier.bake()
    sparsifier.detach()
    x, _ = batch(0)
    y = module(x)
    other = NMSparsifier(module, "2:4", slope(), skip_first_last=False, planned_steps=8)
    other.attach(state)
    other.detach()
    torch.testing.assert_close(module(x), y)


def test_costs_count_the_adapters():
    module, sparsifier, optimizer, layer = small()
    before = layer.gemms()
    planned = copy.deepcopy(layer)
    train(module, sparsifier, optimizer, STEPS)
    # X R^T, (X R^T) L^T, and as many multiply-adds for dX and for both gradients: r (in + out) of in out.
    added = 2 * (16 + 8) / (16 * 8)
    after = layer.gemms()
    for then, now in zip(before, after, strict=True):
        assert (now.kind, now.pattern) == (then.kind, then.pattern)
        assert (now.eligible, now.paper) == (then.eligible, then.paper)
        assert now.low_rank == pytest.approx(added)
        assert "low-rank adapters of rank 2" in now.reason
    charge_plan([planned], STEPS)
    found, expected = mean_densities(layer), mean_densities(planned)
    assert found["eligible"].wgrad == 1
    # In half of the steps.
    assert found["eligible"].low_rank == pytest.approx(added / 2)
    for kind in ("paper", "eligible"):
        assert vars(found[kind]) == pytest.approx(vars(expected[kind]))


@pytest.mark.slow
def test_compiled_layers_have_a_graph_with_and_one_without():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    module, sparsifier, optimizer, _ = small()
    train(module, sparsifier, optimizer, 1)  # multiply-adds are counted by hooks until then
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for step in range(1, STEPS):
        torch.testing.assert_close(compiled(batch(0)[0]), module(batch(0)[0]))
        optimizer.zero_grad()
        compiled(batch(step)[0]).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_autocast_and_estimators():
    module, _, _, layer = small(slope(last=1.0), dtype=torch.float32, grad_estimator=MVUE("2:4"))
    active(layer)
    x, _ = batch(0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    exact = module(x).detach()
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.1)
    for parameter in layer.parameters.values():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.any()


def test_the_product_with_the_sparse_weight_stays_on_its_kernel():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128))  # of a size that the kernel takes
    options = {"skip_first_last": False, "planned_steps": 4}
    sparsifier = NMSparsifier(module, "2:4", slope(last=1.0), **options).attach()
    layer = sparsifier.layers["0"]
    active(layer)
    x = torch.randn(64, 64)
    router = simulated()
    found = gradients(module, x, router)
    of_adapters = [parameter.grad.clone() for parameter in layer.parameters.values()]
    for parameter in layer.parameters.values():
        parameter.grad = None
    assert_equal(found, gradients(module, x, None), rtol=1e-4, atol=1e-3)
    expected = [parameter.grad for parameter in layer.parameters.values()]
    assert_equal(of_adapters, expected, rtol=1e-4, atol=1e-3)
    assert {gemm for gemm, kernel in ran(router) if kernel == "simulated"} >= {"forward", "dgrad"}


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_layers_whose_forward_is_dense_have_none():
    model = nn.Sequential(nn.Linear(10, 16), nn.Linear(16, 10))
    sparsifier = NMSparsifier(model, "2:4", slope(), skip_first_last=False, planned_steps=4)
    layers = sparsifier.attach().layers
    assert not layers["0"].parameters
    assert set(layers["1"].parameters) == {LEFT, RIGHT}


def test_hugging_faces_conv1d_has_them():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    module = nn.Sequential(conv1d(8, 16)).double()  # [in, out] = [16, 8]
    sparsifier = NMSparsifier(module, "2:4", slope(), skip_first_last=False, planned_steps=4)
    (layer,) = sparsifier.attach().layers.values()
    active(layer)
    x = torch.randn(3, 16, dtype=torch.float64)
    y = x @ layer.forward_weight() + module[0].bias
    y = y + (x @ layer.parameters[RIGHT].t()) @ layer.parameters[LEFT].t()
    torch.testing.assert_close(module(x), y)
    sparsifier.bake()
    sparsifier.detach()
    torch.testing.assert_close(module(x), y)


def test_factors_of_a_state_are_those_that_were_trained():
    module, sparsifier, optimizer, layer = small()
    train(module, sparsifier, optimizer, STEPS // 2)
    assert saved_factors(sparsifier.state_dict()) == {}
    train(module, sparsifier, optimizer, 2, STEPS // 2)
    factors = saved_factors(sparsifier.state_dict())
    assert torch.equal(factors["0"].left, layer.parameters[LEFT])
    x, _ = batch(0)
    fresh = nn.Sequential(nn.Linear(16, 8, bias=False)).double()
    fresh.load_state_dict(module.state_dict())
    replace_low_rank(fresh, factors)
    torch.testing.assert_close(fresh(x), module(x))
    for name, shape in (("1", (8, 16)), ("0", (4, 16))):
        wrong = {name: Factors(torch.ones(shape[0], 2), torch.ones(2, shape[1]))}
        with pytest.raises(ValueError, match=rf"layer '{name}' are .*Sequential has no linear"):
            replace_low_rank(fresh, wrong)
    torch.testing.assert_close(fresh(x), module(x))
    replace_low_rank(fresh, {})
    assert not low_rank_modules(fresh)


REFUSED = {
    "convolution": (nn.Conv2d(8, 8, 3), "the 'weight' of a Conv2d"),
    "attention": (nn.MultiheadAttention(16, 2), "MultiheadAttention"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_layers_are_refused_by_name(kind):
    module, text = REFUSED[kind]
    model = nn.Sequential(nn.Linear(8, 8), copy.deepcopy(module))
    keys = [type(m) for m in model.modules()]
    sparsifier = NMSparsifier(model, "2:4", slope(), skip_first_last=False, planned_steps=4)
    with pytest.raises(ValueError, match=rf"layer '1.*{text}.*`exclude`.*`rules`"):
        sparsifier.attach()
    assert [type(m) for m in model.modules()] == keys
    rules = [{"include": "1*", "method": "slope"}]
    options = {"skip_first_last": False, "planned_steps": 4, "rules": rules}
    layers = NMSparsifier(model, "2:4", slope(), **options).attach().layers
    assert layers["0"].parameters


def test_the_output_projection_of_attention_is_refused():
    model = nn.MultiheadAttention(16, 2)
    rules = [{"include": "in_proj_weight", "method": "slope"}]
    options = {"skip_first_last": False, "planned_steps": 4, "rules": rules}
    with pytest.raises(ValueError, match=r"layer 'out_proj': attention reads"):
        NMSparsifier(model, "2:4", slope(), **options).attach()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_and_a_rank_that_is_too_large_are_refused():
    options = {"skip_first_last": False, "planned_steps": 4}
    sparsifier = NMSparsifier(Tied(), "2:4", slope(), include=["embedding", "head"], **options)
    with pytest.raises(ValueError, match=r"layer '(head|embedding)': .*`exclude`"):
        sparsifier.attach()
    small_one = nn.Sequential(nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"rank 5, and the weight of layer '0', 4 x 8"):
        NMSparsifier(small_one, "2:4", slope(5), **options).attach()


@pytest.mark.parametrize(
    ("adapters", "error", "text"),
    [
        ({"rank": 0, "last": 0.1}, ValueError, r"rank=0 must be an integer of at least 1"),
        ({"rank": 2.5, "last": 0.1}, ValueError, r"rank=2\.5 must be an integer"),
        ({"rank": 2, "last": 0}, ValueError, r"last=0 must be a share of the training steps"),
        ({"rank": 2, "last": -0.5}, ValueError, r"last=-0\.5 must be a share"),
        ({"rank": 2, "last": 100}, ValueError, r"last=100 must be a share"),
        ({"rank": 2, "last": float("nan")}, ValueError, r"last=nan must be a share"),
        ({"rank": 2, "last": "all"}, TypeError, r"last='all' must be a number"),
        ({"rank": 2, "last": True}, TypeError, r"last=True must be a number"),
        ({"rank": 2}, ValueError, r"lacks 'last': give, for example"),
        ({"rank": 2, "lats": 0.1}, ValueError, r"has no 'lats'; did you mean 'last'\?; it has"),
        (8, TypeError, r"adapters=8 must be a mapping with the keys rank, last"),
    ],
)
def test_bad_settings_are_named(adapters, error, text):
    with pytest.raises(error, match=text):
        SLoPe(adapters=adapters)


def test_plans_that_cannot_work_are_refused():
    def attach(method, **options):
        model = nn.Sequential(nn.Linear(8, 8))
        NMSparsifier(model, "2:4", method, skip_first_last=False, **options).attach()

    with pytest.raises(
        ValueError,
        match=r"last 0\.5 of the planned .*not known: leave adapters out, or pass planned_steps",
    ):
        attach(slope())
    with pytest.raises(ValueError, match=r"begin at step 5 of 10, before start=8 prunes"):
        attach(slope(start=8), planned_steps=10)
    with pytest.raises(ValueError, match=r"begin at step 5, before .*'final', at step 6.*'0'"):
        attach(slope(), planned_steps=10, schedule={"dense_start": 6})
    with pytest.raises(ValueError, match=r"schedule has dense_end, which method .*adapters"):
        attach(slope(), planned_steps=10, schedule={"dense_end": 2})
    attach(slope(), planned_steps=10, schedule={"ramp": ["3:4"], "ramp_ends": [4]})


def test_masks_that_begin_later_or_narrow_leave_the_adapters():
    for options in ({"start": 2}, {}):
        schedule = None if options else {"ramp": ["3:4"], "ramp_ends": [3]}
        module, sparsifier, optimizer, layer = small(slope(**options), schedule=schedule)
        parameters = list(layer.parameters.values())
        train(module, sparsifier, optimizer, STEPS)
        assert all(a is b for a, b in zip(parameters, layer.parameters.values(), strict=True))
        assert layer.parameters[LEFT].any()
        assert sparsifier.violations() == 0


def test_other_weights_begin_with_other_adapters():
    module, sparsifier, optimizer, layer = small()
    train(module, sparsifier, optimizer, STEPS)
    own = copy.deepcopy(module.state_dict())
    left = layer.parameters[LEFT].detach().clone()
    module.load_state_dict({key: torch.randn_like(value) for key, value in own.items()})
    assert not layer.parameters[LEFT].any()
    module.load_state_dict(own)
    assert torch.equal(layer.parameters[LEFT], left)
