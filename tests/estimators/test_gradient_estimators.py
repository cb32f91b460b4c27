"""Gradient estimators in layers: what reaches dW, and that nothing else changes."""

import copy
import math

import pytest
import torch
from torch import nn

from lightning_nm import MVUE, GradientEstimator, NMSparsifier, TopN
from lightning_nm import functional as nmf
from tests.support.contract import ESTIMATORS
from tests.support.kinds import KINDS, make
from tests.support.method_loop import Loop, mlp

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def attach(module, estimator, method="dense", **options):
    estimator = ESTIMATORS[estimator]() if isinstance(estimator, str) else estimator
    return NMSparsifier(module, "2:4", method, estimator, skip_first_last=False, **options).attach()


class Spy(GradientEstimator):
    """Notes what it is given."""

    def __init__(self, inner):
        self.inner, self.seen = inner, []

    def estimate(self, layer, grad, seed):
        result = self.inner.estimate(layer, grad, seed)
        self.seen.append((layer.name, grad, result, seed))
        return result

    def pattern_of(self, layer):
        return self.inner.pattern_of(layer)

    @property
    def seeds(self):
        return [tuple(seed.tolist()) for *_, seed in self.seen]


class Doubled(GradientEstimator):
    def estimate(self, layer, grad, seed):
        return 2 * grad


@pytest.mark.parametrize("kind", KINDS)
def test_the_estimate_enters_the_weight_gradient_alone(kind):
    def gradients(estimator):
        module, x = make(kind)
        sparsifier = attach(module, estimator, "sr-ste")
        x.requires_grad_()
        y = module(x)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        layers = [id(layer.weight) for layer in sparsifier.layers.values()]
        found = {name: (p.grad, id(p) in layers) for name, p in module.named_parameters()}
        return {"input": (x.grad, False), **found}

    exact = gradients(None)
    for name, (found, is_estimated) in gradients(Doubled()).items():
        expected = exact[name][0] * (2 if is_estimated else 1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tokens", [1, 3, 4, 6, 13, 16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_blocks_lie_along_tokens_and_are_padded_with_zeros(estimator, tokens):
    made = ESTIMATORS[estimator]()
    spy = Spy(made)
    module = nn.Linear(16, 8)
    attach(module, spy)
    module(torch.randn(tokens, 16)).backward(torch.randn(tokens, 8))
    ((_, grad, estimate, seed),) = spy.seen
    assert estimate.shape == grad.shape == (tokens, 8)
    pattern = made.pattern
    padding = torch.zeros(-tokens % pattern.m, 8)
    padded = torch.cat([grad, padding])
    assert nmf.is_nm(torch.cat([estimate, padding]), pattern, 0)
    blocks = len(padded) // pattern.m
    uniform = nmf.counter_uniform(2 * blocks * 8, seed).view(2, blocks, 8)
    oracles = {
        "mvue": lambda: nmf.mvue(padded, pattern, 0, uniform=uniform[0]),
        "approx-mvue": lambda: nmf.approx_mvue(padded, pattern, 0, uniform=uniform),
        "top-n": lambda: nmf.nm_prune(padded, pattern, 0),
    }
    oracle = oracles.get(estimator.split("-1")[0])
    assert oracle is None or torch.equal(estimate, oracle()[:tokens])


def test_convolution_blocks_lie_along_batch_and_positions():
    spy = Spy(TopN("2:4"))
    module = nn.Conv2d(8, 6, 3)
    attach(module, spy)
    y = module(torch.randn(2, 8, 5, 4))
    dy = torch.randn_like(y)
    y.backward(dy)
    assert torch.equal(spy.seen[0][1], dy.permute(0, 2, 3, 1).reshape(-1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("kind", ["linear", "conv2d", "hugging-face-conv1d", "cross-attention"])
def test_compiled_and_eager_draw_the_same(estimator, kind):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    ends = []
    for compiles in (False, True):
        module, _ = make(kind)  # in float64: no rounding moves what is drawn
        options = {"model": module, "shape": KINDS[kind][1]}
        run = Loop("dense", grad_estimator=ESTIMATORS[estimator](), **options)
        if compiles:
            run.model = torch.compile(module, fullgraph=True, backend=counter)
        ends.append(list(run.train(4).model.parameters()))
    assert counter.frame_count == 1, "a new seed must not compile again"
    # Compiled GEMMs may take operands of other strides, and add up otherwise.
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_autocast(estimator, dtype):
    spy = Spy(ESTIMATORS[estimator]())
    module = nn.Linear(32, 16)
    attach(module, spy)
    with torch.autocast("cpu", dtype):
        y = module(torch.randn(24, 32))
    y.float().square().mean().backward()
    ((_, grad, estimate, _),) = spy.seen
    assert grad.dtype == estimate.dtype == dtype
    assert module.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_visible(estimator, bad):
    module = nn.Linear(16, 8)
    attach(module, estimator)
    dy = torch.randn(16, 8)
    dy[5, 3] = bad
    module(torch.randn(16, 16)).backward(dy)
    finite = module.weight.grad.isfinite().all(1)
    assert finite.tolist() == [k != 3 for k in range(8)], "the row of the bad output, and no other"


def test_seeds_differ_by_layer_step_and_micro_batch_and_repeat():
    def seeds(seed):
        spy = Spy(MVUE("2:4"))
        Loop("dense", grad_estimator=spy, seed=seed).train(3, windows=2)
        return spy.seeds

    first = seeds(0)
    assert len(first) == len(set(first)) == 12
    assert seeds(0) == first
    assert not set(seeds(1)) & set(first)


def test_two_steps_in_one_batch_draw_again_and_an_open_graph_keeps_its_seed():
    spy = Spy(MVUE("2:4"))
    run = Loop("dense", grad_estimator=spy, model=mlp(16, 16))
    before = tuple(run.layer.noise.words.tolist())
    y = run.model(run.batch(0))
    run.layer.draw_noise()
    y.sum().backward()
    assert spy.seeds[0] == before
    run.optimizer.step()  # as in manual optimization: the batch goes on
    run.backward()
    assert spy.seeds[1] != before


def test_a_module_that_is_called_again_draws_again():
    spy, cell, x = Spy(MVUE("2:4")), nn.Linear(16, 16), torch.randn(8, 16)
    (layer,) = attach(cell, spy).layers.values()
    cell(cell(cell(x))).sum().backward()
    copied = copy.deepcopy(cell)  # that no sparsifier follows
    for _ in range(3):
        copied(x).sum().backward()
    seeds = copied.nm_layers["weight"].spec.estimator.seeds
    assert len(set(seeds)) == 6
    layer.draw_noise(layer.noise.draws)
    cell(cell(cell(x))).sum().backward()
    assert spy.seeds == 2 * seeds[:3]


def test_second_derivatives_leave_nothing_behind():
    module, x = mlp(16, 16, 16), torch.randn(8, 16, requires_grad=True)
    sparsifier = attach(module, "mvue", grad_snr_every=1)
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (g.norm(2, 1) - 1).square().mean().backward()
    observed = [layer.progress.observed for layer in sparsifier.layers.values()]
    assert not any(each is not None and each.requires_grad for each in observed)
    copy.deepcopy(module)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_tokens_at_all(estimator):
    module = nn.Linear(16, 8)
    sparsifier = attach(module, estimator)
    module(torch.randn(0, 16)).sum().backward()
    assert torch.equal(module.weight.grad, torch.zeros(8, 16))
    assert "grad_snr" not in sparsifier.stats()
    module(torch.randn(16, 16)).square().sum().backward()
    assert sparsifier.stats()["grad_snr"] > 0


@pytest.mark.parametrize("wrong", [lambda grad: grad.double(), lambda grad: grad[:4]])
def test_an_estimator_that_changes_shape_or_dtype_is_named(wrong):
    class Wrong(GradientEstimator):
        def estimate(self, layer, grad, seed):
            return wrong(grad)

    module = mlp(16, 8)
    attach(module, Wrong())
    message = r"Wrong made torch\.float.* at layer '0', which is torch\.float32 \(16, 8\)"
    with pytest.raises(TypeError, match=message):
        module(torch.randn(16, 16)).sum().backward()


def test_ranks_draw_different_numbers(monkeypatch):
    (layer,) = attach(nn.Linear(16, 16), "mvue").layers.values()
    seeds = [layer.noise.words.tolist()]
    monkeypatch.setattr("lightning_nm.nn.layer.dist.is_initialized", lambda: True)
    for rank in range(3):
        monkeypatch.setattr("lightning_nm.nn.layer.dist.get_rank", lambda rank=rank: rank)
        layer.draw_noise(layer.noise.draws)
        seeds.append(layer.noise.words.tolist())
    alone, *others = map(tuple, seeds)
    assert alone == others[0]
    assert len(set(others)) == 3


def test_parts_of_a_joint_projection_draw_different_numbers():
    module, x = make("cross-attention")
    spy = Spy(MVUE("2:4"))
    attach(module, spy, include="mha")
    module(x).sum().backward()
    names = [name for name, *_ in spy.seen]
    joint = [seed for name, seed in zip(names, spy.seeds, strict=True) if "in_proj" in name]
    assert len(joint) == len(set(joint)) == 3
