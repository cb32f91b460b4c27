"""Gradient estimators in layers: what reaches dW, and that nothing else changes."""

import copy
import math
import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_nm import MVUE, GradientEstimator, NMSparsifier, TopN
from lightning_nm import functional as nmf
from tests.support.contract import ESTIMATORS
from tests.support.kinds import KINDS, make

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


def gradients(module, x, dy_seed=0):
    """All gradients of one micro-batch, with the noise of the layers' last draw."""
    module.zero_grad()
    for part in module.modules():
        for layer in getattr(part, "nm_layers", {}).values():
            layer.draw_noise(layer.noise.draws)
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.backward(
        torch.randn(y.shape, generator=torch.Generator().manual_seed(dy_seed), dtype=y.dtype)
    )
    return {"input": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


QUICK_KINDS = ("linear", "conv2d", "attention", "experts")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK_KINDS else pytest.mark.slow) for kind in KINDS],
)
def test_the_weight_gradient_is_unbiased_and_nothing_else_changes(kind):
    module, x = make(kind)
    sparsifier = attach(module, None, "sr-ste")
    exact = gradients(module, x)
    sparsifier.detach()
    sparsifier = attach(module, "mvue", "sr-ste")
    weights = [layer.weight for layer in sparsifier.layers.values()]
    draws = 200
    sums, squares = [0.0] * len(weights), [0.0] * len(weights)
    for _ in range(draws):
        found = gradients(module, x)
        for k, weight in enumerate(weights):
            sums[k], squares[k] = sums[k] + weight.grad, squares[k] + weight.grad**2
        for layer in sparsifier.layers.values():
            layer.draw_noise()
    masked = {id(weight) for weight in weights}
    others = {"input"} | {name for name, p in module.named_parameters() if id(p) not in masked}
    for name in others:
        assert torch.equal(found[name], exact[name]), f"{name} must keep the exact dY"
    by_id = {id(p): exact[name] for name, p in module.named_parameters()}
    for k, weight in enumerate(weights):
        mean, expected = sums[k] / draws, by_id[id(weight)]
        error = (squares[k] / draws - mean**2).clamp(min=0).div(draws - 1).sqrt()
        assert error.max() > 0, "the estimate never changed"
        # The worst of all entries, of which there are thousands, each with 200 draws.
        assert ((mean - expected).abs() <= 6 * error + 1e-9 * expected.abs().max()).all()
        score = ((mean - expected) / error.clamp(min=1e-12)).square().mean()
        assert (
            0.3 < score < 3
        )  # on the average over the entries their errors are what their spread says


@pytest.mark.parametrize("tokens", [1, 3, 4, 6, 13, 16])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_blocks_lie_along_tokens_and_are_padded_with_zeros(estimator, tokens):
    made = ESTIMATORS[estimator]()
    spy = Spy(made)
    module = nn.Linear(16, 8)
    attach(module, spy)
    gradients(module, torch.randn(tokens, 16))
    ((_, grad, estimate, seed),) = spy.seen
    assert estimate.shape == grad.shape == (tokens, 8)
    pattern = made.pattern
    padding = -tokens % pattern.m
    padded = torch.cat([grad, torch.zeros(padding, 8)])
    assert nmf.is_nm(torch.cat([estimate, torch.zeros(padding, 8)]), pattern, 0)
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
    x = torch.randn(2, 8, 5, 4)
    y = module(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    ((_, grad, _, _),) = spy.seen
    assert torch.equal(grad, dy.permute(0, 2, 3, 1).reshape(-1, 6))


@pytest.mark.parametrize("kind", ["linear", "conv2d", "attention", "cross-attention"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(kind, use_reentrant):
    module, x = make(kind)
    attach(module, "mvue", "transposable")
    plain = gradients(module, x)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=use_reentrant)

    recomputed = gradients(Checkpointed(), x)
    for name, value in plain.items():
        torch.testing.assert_close(
            recomputed[name if name == "input" else f"inner.{name}"], value, rtol=0, atol=0
        )


QUICK = {
    ("mvue", "linear"),
    ("approx-mvue", "conv2d"),
    ("top-n", "hugging-face-conv1d"),
}


@pytest.mark.parametrize(
    ("estimator", "kind"),
    [
        pytest.param(estimator, kind, marks=() if (estimator, kind) in QUICK else pytest.mark.slow)
        for estimator in ESTIMATORS
        for kind in ("linear", "conv2d", "hugging-face-conv1d", "attention", "cross-attention")
    ],
)
def test_compiled_and_eager_draw_the_same(estimator, kind):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    module, x = make(kind)  # in float64: no rounding moves what is drawn
    other = copy.deepcopy(module)
    counter = CompileCounterWithBackend("aot_eager")
    runs = []
    for trained, compile_it in ((module, False), (other, True)):
        sparsifier = attach(trained, estimator)
        optimizer = torch.optim.SGD(trained.parameters(), 0.05)
        sparsifier.register(optimizer)
        called = torch.compile(trained, fullgraph=True, backend=counter) if compile_it else trained
        for _ in range(4):
            optimizer.zero_grad()
            called(x).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()
        runs.append([p.detach().clone() for p in trained.parameters()])
    assert counter.frame_count == 1, "a new seed must not compile anew"
    for a, b in zip(
        *runs, strict=True
    ):  # compiled products may take operands of other strides, and add up otherwise
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
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


def test_the_scale_of_the_loss_does_not_matter():
    module = nn.Linear(16, 8)
    sparsifier = attach(module, "mvue")
    (layer,) = sparsifier.layers.values()
    dy, x = torch.randn(16, 8), torch.randn(16, 16)
    module(x).backward(dy)
    plain = layer.weight.grad.clone()
    module.zero_grad()
    layer.draw_noise(layer.noise.draws)
    module(x).backward(2.0**16 * dy)
    assert torch.equal(layer.weight.grad, 2.0**16 * plain)


def test_seeds_differ_by_layer_step_and_micro_batch_and_repeat():
    def seeds(seed):
        torch.manual_seed(0)
        spy = Spy(MVUE("2:4"))
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        sparsifier = attach(model, spy, seed=seed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sparsifier.register(optimizer)
        for micro_batch in range(6):
            model(torch.randn(8, 16)).square().mean().backward()
            if micro_batch % 2:
                sparsifier.before_step(optimizer)
                optimizer.step()
            sparsifier.step()
        return [tuple(seen[3].tolist()) for seen in spy.seen]

    first = seeds(0)
    assert len(first) == len(set(first)) == 12
    assert seeds(0) == first
    assert not set(seeds(1)) & set(first)


def test_two_steps_in_one_batch_draw_anew_and_an_open_graph_keeps_its_seed():
    spy = Spy(MVUE("2:4"))
    model = nn.Linear(16, 16)
    sparsifier = attach(model, spy)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sparsifier.register(optimizer)
    x = torch.randn(8, 16)
    (layer,) = sparsifier.layers.values()
    before = layer.noise.words.clone()
    y = model(x)
    layer.draw_noise()
    y.square().mean().backward()
    assert torch.equal(spy.seen[0][3], before)
    optimizer.step()  # as in manual optimization: the batch goes on
    model(x).square().mean().backward()
    assert not torch.equal(spy.seen[1][3], before)


def test_a_module_that_is_called_again_draws_anew():
    spy = Spy(MVUE("2:4"))
    cell = nn.Linear(16, 16)
    sparsifier = attach(cell, spy)
    x = torch.randn(8, 16)
    cell(cell(cell(x))).square().mean().backward()
    copied = copy.deepcopy(cell)  # that no sparsifier follows
    for _ in range(3):
        copied(x).square().mean().backward()
    seeds = [
        tuple(seed.tolist())
        for *_, seed in (*spy.seen, *copied.nm_layers["weight"].spec.estimator.seen[3:])
    ]
    assert len(set(seeds)) == 6
    (layer,) = sparsifier.layers.values()
    layer.draw_noise(layer.noise.draws)
    cell(cell(cell(x))).square().mean().backward()
    assert [tuple(seed.tolist()) for *_, seed in spy.seen[3:]] == seeds[:3]


def test_second_derivatives_leave_nothing_behind():
    module = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    sparsifier = attach(module, "mvue", grad_snr_every=1)
    x = torch.randn(8, 16, requires_grad=True)
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    (g.norm(2, 1) - 1).square().mean().backward()
    assert not any(
        layer.progress.observed.requires_grad
        for layer in sparsifier.layers.values()
        if layer.progress.observed is not None
    )
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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("method", "estimator"),
    [("sr-ste", None), ("transposable", "mvue"), ("bi-mask", "approx-mvue"), ("bame", "top-n")],
)
@pytest.mark.filterwarnings(
    "ignore:BAME adapts once", "ignore:.*torch.jit.script_method.* is deprecated"
)
def test_inductor_and_eager_agree(method, estimator):
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    sparsifier = attach(module, estimator, method, planned_steps=100)
    x = torch.randn(64, 16)
    eager = gradients(module, x)
    for name, value in gradients(torch.compile(module, fullgraph=True), x).items():
        torch.testing.assert_close(
            value, eager[name.removeprefix("_orig_mod.")], rtol=1e-4, atol=1e-4
        )
    assert sparsifier.attached
    torch._dynamo.reset()


@pytest.mark.parametrize("wrong", [lambda grad: grad.double(), lambda grad: grad[:4]])
def test_an_estimator_that_changes_shape_or_dtype_is_named(wrong):
    class Wrong(GradientEstimator):
        def estimate(self, layer, grad, seed):
            return wrong(grad)

    module = nn.Sequential(nn.Linear(16, 8))
    attach(module, Wrong())
    with pytest.raises(
        TypeError,
        match=r"Wrong made torch\.float.* at layer '0', which is torch\.float32 \(16, 8\)",
    ):
        module(torch.randn(16, 16)).sum().backward()


def test_ranks_draw_different_numbers(monkeypatch):
    module = nn.Linear(16, 16)
    (layer,) = attach(module, "mvue").layers.values()
    alone = layer.noise.words
    monkeypatch.setattr("lightning_nm.nn.layer.dist.is_initialized", lambda: True)
    seeds = []
    for rank in range(3):
        monkeypatch.setattr("lightning_nm.nn.layer.dist.get_rank", lambda rank=rank: rank)
        layer.draw_noise(layer.noise.draws)
        seeds.append(layer.noise.words)
    assert torch.equal(seeds[0], alone)
    assert len({tuple(seed.tolist()) for seed in seeds}) == 3


def test_parts_of_a_joint_projection_draw_different_numbers():
    module, x = make("cross-attention")
    spy = Spy(MVUE("2:4"))
    attach(module, spy, include="mha")
    gradients(module, x)
    seeds = [tuple(seen[3].tolist()) for seen in spy.seen if seen[0].endswith("in_proj_weight")]
    assert len(set(seeds)) == 3
