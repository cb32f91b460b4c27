"""Masked experts against a twin whose experts are masked linear layers."""

import pytest
import torch
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import BAME, LBC, MVUE, MaxQ, NMSparsifier, TransposableMask
from lightning_nm.kernels import Router, routing
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.nn import nm_grouped_linear, register_experts
from lightning_nm.nn.adapters import adapter
from lightning_nm.nn.layer import LayerNoise
from tests.support.cpu_products import needs_library
from tests.support.experts import (
    EXPERTS,
    WIDTH,
    Experts,
    LinearExperts,
    TransposedExperts,
    TransposedLinearExperts,
    Twin,
    matrices,
)
from tests.support.outside import SoftThreshold

METHODS = {
    "dense": lambda: "dense",
    "sr-ste": lambda: "sr-ste",
    "asp": lambda: "asp",
    "transposable": lambda: TransposableMask(update_every=2),
    "bi-mask": lambda: "bi-mask",
    "bame": lambda: BAME(stop=100, every=2, budget=1.0, evidence="batch"),
    "lbc": lambda: LBC(stop=3),
    "maxq": lambda: MaxQ(stop=0),
    "soft-threshold": SoftThreshold,
}


@pytest.fixture
def alike(monkeypatch):
    """Random choices that do not depend on the layer: the twin's layers have other names."""

    def search(rows, forward, pattern, groups=1, **_):
        order = rows.abs().sum(1).view(groups, -1).argsort(1)
        return (order + torch.arange(groups)[:, None] * order.shape[1]).flatten()

    monkeypatch.setattr("lightning_nm.methods.bi_mask.search_permutation", search)
    monkeypatch.setattr(
        LayerNoise, "for_call", lambda self, words, row: torch.tensor([1, 2, 3, self.draws])
    )


def train(model, method, estimator, router=None, dtype=torch.float64, optimizer=torch.optim.AdamW):
    """The sparsifier, and the losses and input gradients of four steps, in one of which an expert has no token."""
    model = model.to(dtype)
    method = METHODS[method]()
    sparsifier = NMSparsifier(
        model, "2:4", method, estimator, skip_first_last=False, scale=None
    ).attach()
    optimizer = optimizer(model.parameters(), 1e-2)
    sparsifier.register(optimizer)
    figures = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(41, WIDTH, generator=generator).to(dtype).requires_grad_()
        experts = torch.randint(0, EXPERTS - (step == 2), (41,), generator=generator)
        # A twin without tokens then has a gradient of 0, too.
        optimizer.zero_grad(set_to_none=False)
        with routing(router):
            loss = model(x, experts).to(dtype).square().mean()
        loss.backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        figures += [loss.detach(), x.grad]
    return sparsifier, figures


@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_experts_train_as_linear_layers(alike, kind, method, estimator):
    torch.manual_seed(0)
    experts = kind()
    twin = Twin(experts)
    found, figures = train(experts, method, estimator)
    expected, other_figures = train(twin, method, estimator)
    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(figures, other_figures, **close)
    for name in ("up", "down"):
        layer = found.layers[name]
        assert layer.spec.groups == EXPERTS
        for get in (
            lambda layer: layer.param,
            lambda layer: layer.param.grad,
            lambda layer: layer.forward_mask,
            lambda layer: layer.masks.backward,
            lambda layer: layer.forward_weight(),
        ):
            each = [get(expected.layers[f"{name}.{k}"]) for k in range(EXPERTS)]
            if get(layer) is None:
                assert each == [None] * EXPERTS
            else:
                torch.testing.assert_close(matrices(experts, get(layer)), each, **close)
    if method not in ("dense", "soft-threshold"):
        assert found.violations() == 0


@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_bf16_autocast_is_that_of_the_twin(alike, estimator):
    torch.manual_seed(0)
    experts = Experts()
    options = {"dtype": torch.float32, "optimizer": torch.optim.SGD}
    with torch.autocast("cpu", torch.bfloat16):
        _, expected = train(Twin(experts), "bi-mask", estimator, **options)
        _, found = train(experts, "bi-mask", estimator, **options)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


@needs_library
@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (Experts, "sr-ste"),
        (TransposedExperts, "bi-mask"),
        (Experts, "bame"),
        (TransposedExperts, "transposable"),
    ],
)
def test_the_cpu_kernels_take_every_expert(kind, method, estimator):
    router = Router("sparse", [CpuPermuteKernel(), CpuCsrKernel()])
    found = []
    for each in (router, None):
        torch.manual_seed(0)
        found.append(train(kind(), method, estimator, each, dtype=torch.float32)[1])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert not router.registry.failures
    ran = {used.product.key.gemm for used in router.used() if used.kernel.startswith("cpu-")}
    assert ran >= {"forward", "dgrad"} | ({"wgrad"} if estimator or method == "bame" else set())


def test_estimates_differ_for_each_expert_and_call_and_repeat_with_the_draw():
    torch.manual_seed(0)
    model = Experts()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight[:1].clone().expand_as(weight))
    sparsifier = NMSparsifier(model, "2:4", "dense", MVUE()).attach()
    sparsifier.register(torch.optim.SGD(model.parameters(), 0.0))
    x = torch.randn(8, WIDTH).repeat(EXPERTS, 1)
    experts = torch.arange(EXPERTS).repeat_interleave(8)

    def gradients(draw):
        """Of two calls."""
        for layer in sparsifier.layers.values():
            layer.draw_noise(draw)
        found = []
        for _ in range(2):
            model.zero_grad()
            model(x, experts).square().sum().backward()
            found.append(model.down.grad)
        return found

    (first, second), (again, _), (later, _) = gradients(1), gradients(1), gradients(2)
    assert torch.equal(first, again)
    assert all(not torch.equal(first[0], other) for other in (*first[1:], second[0], later[0]))


@pytest.mark.parametrize("method", [None, "sr-ste"])
def test_few_and_no_tokens(method):
    """Tokens beyond the last offset give zeros."""
    model, x = LinearExperts(), torch.randn(10, WIDTH, requires_grad=True)
    if method:
        NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    y = nm_grouped_linear(x, model, "weight", torch.tensor([3, 7], dtype=torch.int32))
    assert y.shape == (10, 32)
    assert not y[7:].any()
    assert y[:7].ne(0).any(1).all()
    y = nm_grouped_linear(x[:0], model, "weight", torch.tensor([0, 0]))
    assert y.shape == (0, 32)
    y.sum().backward()
    assert not model.weight.grad.any()


def test_packs_are_kept_for_each_expert():
    router = Router("sparse", [SimulatedSparseKernel()], reuse=2)
    torch.manual_seed(0)
    model = Experts()
    layer = NMSparsifier(model, "2:4", "sr-ste").attach().layers["up"]
    x, experts = torch.randn(32, WIDTH), torch.arange(32) % EXPERTS
    with routing(router):
        first = model(x, experts)
        held = list(layer.experts)
        second = model(x, experts)
    assert torch.equal(first, second)
    assert len(held) == EXPERTS
    assert all(a is b for a, b in zip(layer.experts, held, strict=True))
    with torch.no_grad():  # masks that moved are seen
        model.up.copy_(model.up.flip(-1))
    layer.spec.method.init_masks(layer)
    with routing(router):
        moved = model(x, experts)
    torch.testing.assert_close(moved, model(x, experts))
    assert not torch.allclose(moved, first)


class Loop(nn.Module):
    """Experts as they are often written, which masks do not reach."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 16, WIDTH))
        self.table = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) @ self.table[0].t() + x @ self.position[0].t()


ENDS = torch.tensor([2, 4])


def test_weights_that_masks_do_not_reach_are_left_out_or_refused_with_the_way_out():
    model = nn.Sequential(Loop())
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
    assert list(sparsifier.layers) == ["0.linear"]
    assert "nm_grouped_linear, and call register_experts" in sparsifier.skipped["0"]
    sparsifier.detach()
    for include in ("0.table", "0"):
        message = f"'{include}' is named by `include` but cannot be masked: .*nm_grouped_linear"
        with pytest.raises(ValueError, match=message):
            NMSparsifier(model, "2:4", "sr-ste", include=[include]).attach()
    with pytest.raises(TypeError, match=r"call lightning_nm.nn.register_experts\(Loop\)"):
        nm_grouped_linear(torch.randn(4, WIDTH), model[0], "table", ENDS)


@pytest.fixture
def adapters(monkeypatch):
    """Registrations of one test."""
    monkeypatch.setattr(adapter, "_ADAPTERS", list(adapter._ADAPTERS))
    monkeypatch.setattr(adapter, "_CLASSES", {})


def test_a_registered_class_that_multiplies_in_another_way_is_refused(adapters):
    register_experts(Loop, parameters=["table"])
    model = Loop()
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", include=["table", "linear"]).attach()
    message = "forward of Loop did not multiply by 'table' with .*nm_grouped_linear, .*`exclude`"
    with pytest.raises(RuntimeError, match=message):
        model(torch.randn(3, WIDTH))
    sparsifier.detach()
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", exclude=["table"], skip_first_last=False)
    assert list(sparsifier.attach().layers) == ["linear"]
    model(torch.randn(3, WIDTH))


OFFSETS = r"are not where the 4 tokens.*counts.cumsum\(0\)"
KINDS = r"takes tokens \[tokens, in\] and integer ends"


@pytest.mark.parametrize(
    ("model", "x", "ends", "message"),
    [
        (LinearExperts, (4, 32), ENDS, "registered as .*transposed=True"),
        (TransposedLinearExperts, (4, 32), ENDS, "registered as .*transposed=False"),
        (LinearExperts, (4, WIDTH), torch.tensor([2, 4, 4]), "which 3 ends"),
        (LinearExperts, (4, WIDTH), torch.tensor([3, 1]), OFFSETS),
        (LinearExperts, (4, WIDTH), torch.tensor([5, 4]), OFFSETS),
        (LinearExperts, (4, WIDTH), torch.tensor([-1, 4]), OFFSETS),
        (LinearExperts, (4, WIDTH), torch.tensor([1, 9]), OFFSETS),
        (LinearExperts, (4, WIDTH), ENDS.float(), KINDS),
        (LinearExperts, (2, 2, WIDTH), ENDS, KINDS),
    ],
)
def test_tokens_and_offsets_that_are_refused(model, x, ends, message):
    with pytest.raises(ValueError, match=message):
        nm_grouped_linear(torch.randn(x), model(), "weight", ends)


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x, ends):
        return nm_grouped_linear(x, self, "up", ends)


def test_names_are_whole_ones_of_the_module(adapters):
    register_experts(TwoTables, transposed="gate_up")
    layers = NMSparsifier(TwoTables(), "2:4", "bi-mask").attach().layers
    layouts = {name: layer.spec.layout for name, layer in layers.items()}
    assert layouts == {"gate_up": "experts-transposed", "up": "experts"}
    register_experts(TwoTables, parameters="gate_up")
    assert list(NMSparsifier(TwoTables(), "2:4", "bi-mask").attach().layers) == ["gate_up"]
    for wrong in ({"parameters": ["gate_upp"]}, {"transposed": ["gate_upp"]}):
        register_experts(TwoTables, **wrong)
        with pytest.raises(ValueError, match="names gate_upp, but its parameters are gate_up, up"):
            NMSparsifier(TwoTables(), "2:4", "bi-mask").attach()
    with pytest.raises(TypeError, match="takes a module class"):
        register_experts(3)
