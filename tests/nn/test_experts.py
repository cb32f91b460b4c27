"""Masked experts against a twin whose experts are masked linear layers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import BAME, LBC, MVUE, MaxQ, NMSparsifier, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.kernels import Router, routing
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.nn import nm_grouped_linear, register_experts
from lightning_nm.nn.adapters import base
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
from tests.support.outside import ScaledMask, SoftThreshold

METHODS = {
    "dense": lambda: "dense",
    "ste": lambda: "ste",
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


def train(
    model,
    method,
    estimator,
    router=None,
    steps=4,
    dtype=torch.float64,
    optimizer=torch.optim.AdamW,
    tokens=41,
):
    model = model.to(dtype)
    sparsifier = NMSparsifier(model, "2:4", method, estimator, skip_first_last=False).attach()
    optimizer = optimizer(model.parameters(), 1e-2)
    sparsifier.register(optimizer)
    figures = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
        experts = torch.randint(
            0, EXPERTS - (step == 2), (tokens,), generator=generator
        )  # one without tokens
        optimizer.zero_grad(
            set_to_none=False
        )  # a twin without tokens then has a gradient of 0, too
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
    found, figures = train(experts, METHODS[method](), estimator)
    expected, other_figures = train(twin, METHODS[method](), estimator)
    torch.testing.assert_close(figures, other_figures, rtol=1e-9, atol=1e-11)
    for name in ("up", "down"):
        layer, layers = found.layers[name], [expected.layers[f"{name}.{k}"] for k in range(EXPERTS)]
        assert layer.spec.groups == EXPERTS
        assert layer.view.rows(layer.param).shape == (
            EXPERTS * layers[0].param.shape[0],
            layers[0].param.shape[1],
        )
        for get in (
            lambda layer: layer.param,
            lambda layer: layer.param.grad,
            lambda layer: layer.forward_mask,
            lambda layer: layer.masks.backward,
            lambda layer: layer.forward_weight(),
        ):
            if get(layer) is None:
                assert all(get(each) is None for each in layers)
                continue
            for mine, each in zip(matrices(experts, get(layer)), layers, strict=True):
                torch.testing.assert_close(mine, get(each), rtol=1e-9, atol=1e-11)
    if method not in ("dense", "soft-threshold"):
        assert found.violations() == 0


def test_a_method_with_a_parameter_routes_the_gradient_of_all_experts_once():
    torch.manual_seed(0)
    model = Experts().double()
    sparsifier = NMSparsifier(model, "2:4", ScaledMask()).attach()
    x, experts = torch.randn(9, WIDTH).double(), torch.arange(9) % EXPERTS
    model(x, experts).square().mean().backward()
    scales = [
        layer.parameters["scale"].detach().clone().requires_grad_()
        for layer in sparsifier.layers.values()
    ]
    masks = [layer.forward_mask for layer in sparsifier.layers.values()]
    up, down = (
        p.detach() * scale * mask
        for p, scale, mask in zip(model.parameters(), scales, masks, strict=True)
    )
    hidden = torch.einsum("ti,toi->to", x, up[experts]).relu()
    torch.einsum("ti,toi->to", hidden, down[experts]).square().mean().backward()
    for layer, scale in zip(sparsifier.layers.values(), scales, strict=True):
        torch.testing.assert_close(layer.parameters["scale"].grad, scale.grad)


def test_estimates_differ_for_each_expert_and_call_and_repeat_with_the_draw():
    torch.manual_seed(0)
    model = Experts()
    model.up.data[:], model.down.data[:] = model.up[0].detach(), model.down[0].detach()
    sparsifier = NMSparsifier(model, "2:4", "dense", MVUE()).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    sparsifier.register(optimizer)
    x, experts = (
        torch.randn(8, WIDTH).repeat(EXPERTS, 1),
        torch.arange(EXPERTS).repeat_interleave(8),
    )

    def gradient(draw):
        model.zero_grad()
        for layer in sparsifier.layers.values():
            layer.draw_noise(draw)
        model(x, experts).square().sum().backward()
        first = model.down.grad.clone()
        model(x, experts).square().sum().backward()
        return first, model.down.grad - first

    (first, second), (again, _), (later, _) = gradient(1), gradient(1), gradient(2)
    assert torch.equal(first, again)
    assert all(not torch.equal(first[0], other) for other in (*first[1:], second[0], later[0]))


@pytest.mark.parametrize("method", [None, "sr-ste"])
def test_products_without_any_token(method):
    model = Experts()
    if method:
        NMSparsifier(model, "2:4", method).attach()
    x = torch.zeros(0, WIDTH, requires_grad=True)
    y = model(x, torch.zeros(0, dtype=torch.int64))
    assert y.shape == (0, WIDTH)
    y.sum().backward()
    assert not model.up.grad.any()


@pytest.mark.parametrize("method", [None, "sr-ste"])
def test_tokens_beyond_the_last_offset_give_zeros(method):
    model = LinearExperts()
    if method:
        NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    x = torch.randn(10, WIDTH)
    y = nm_grouped_linear(x, model, "weight", torch.tensor([3, 7], dtype=torch.int32))
    assert y.shape == (10, 32)
    assert not y[7:].any()
    assert y[:7].ne(0).any(1).all()


@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_bf16_autocast_is_that_of_the_twin(alike, estimator):
    torch.manual_seed(0)
    experts = Experts()
    twin = Twin(experts)
    options = {"dtype": torch.float32, "optimizer": torch.optim.SGD}
    with torch.autocast("cpu", torch.bfloat16):
        expected = train(twin, "bi-mask", estimator, **options)[1]
        found = train(experts, "bi-mask", estimator, **options)[1]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


@needs_library
@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "bame", "transposable"])
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_the_cpu_kernels_take_every_expert(kind, method, estimator):
    def run(router):
        torch.manual_seed(0)
        return train(kind(), METHODS[method](), estimator, router, dtype=torch.float32)[1]

    router = Router("sparse", [CpuPermuteKernel(), CpuCsrKernel()])
    torch.testing.assert_close(run(router), run(None), rtol=1e-4, atol=1e-5)
    assert not router.registry.failures
    ran = {used.product.key.gemm for used in router.used() if used.kernel.startswith("cpu-")}
    assert ran >= {"forward", "dgrad"} | ({"wgrad"} if estimator or method == "bame" else set())


def test_packs_are_kept_for_each_expert():
    kernel = SimulatedSparseKernel()
    router = Router("sparse", [kernel], reuse=2)
    torch.manual_seed(0)
    model = Experts()
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    x, experts = torch.randn(32, WIDTH), torch.arange(32) % EXPERTS
    with routing(router):
        first = model(x, experts)
        held = list(sparsifier.layers["up"].experts)
        second = model(x, experts)
    assert torch.equal(first, second)
    assert len(held) == EXPERTS
    assert all(a is b for a, b in zip(sparsifier.layers["up"].experts, held, strict=True))
    with torch.no_grad():  # masks that moved are seen
        model.up.copy_(model.up.flip(-1))
    sparsifier.layers["up"].spec.method.init_masks(sparsifier.layers["up"])
    with routing(router):
        moved = model(x, experts)
    torch.testing.assert_close(moved, model(x, experts))
    assert not torch.allclose(moved, first)


def test_the_module_stays_what_it_was():
    torch.manual_seed(0)
    model = Experts()
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    assert all(
        dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items()
    )
    assert all(getattr(model, name) is parameter for name, parameter in parameters.items())
    assert isinstance(model, Experts)
    x, experts = torch.randn(16, WIDTH), torch.arange(16) % EXPERTS
    y = model(x, experts)
    state = model.state_dict()
    assert list(state) == keys
    assert all(nmf.is_nm(value, "2:4") for value in state.values())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        torch.testing.assert_close(twin(x, experts), y)
    plain = Experts()
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(x, experts), y)
    sparsifier.bake()
    sparsifier.detach()
    assert type(model) is Experts
    assert "nm_layers" not in vars(model)
    torch.testing.assert_close(model(x, experts), y)


class Loop(nn.Module):
    """Experts as they are often written, which masks do not reach."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 16, WIDTH))
        self.table = nn.Parameter(torch.randn(EXPERTS, 16, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x) @ self.table[0].t() + x @ self.position[0].t()


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
        nm_grouped_linear(torch.randn(3, WIDTH), model[0], "table", torch.tensor([3, 3, 3, 3]))


@pytest.fixture
def adapters(monkeypatch):
    """Registrations of one test."""
    monkeypatch.setattr(base, "_ADAPTERS", list(base._ADAPTERS))
    monkeypatch.setattr(base, "_CLASSES", {})


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


def test_a_product_over_the_other_axis_tells_the_way_out():
    for model in (LinearExperts(), TransposedLinearExperts()):
        message = f"registered as .*transposed={not isinstance(model, TransposedLinearExperts)}"
        with pytest.raises(ValueError, match=message):
            nm_grouped_linear(torch.randn(4, 32), model, "weight", torch.tensor([2, 4]))
        with pytest.raises(ValueError, match="which 3 ends"):
            nm_grouped_linear(torch.randn(4, WIDTH), model, "weight", torch.tensor([2, 4, 4]))
    with pytest.raises(TypeError, match="takes a module class"):
        register_experts(3)


@pytest.mark.parametrize("offs", [[2, 1, 1, 0], [5, 3, 4, 4], [-1, 2, 3, 4], [1, 2, 3, 9]])
def test_offsets_that_are_not_where_tokens_end_are_refused(offs):
    x = torch.randn(4, WIDTH)
    with pytest.raises(ValueError, match=r"are not where the 4 tokens.*counts.cumsum\(0\)"):
        nm_grouped_linear(x, LinearExperts(), "weight", torch.tensor(offs))


def test_tokens_and_offsets_of_other_kinds_are_refused():
    ends = torch.tensor([1, 2, 3, 4])
    for x, offs in ((torch.randn(4, WIDTH), ends.float()), (torch.randn(2, 2, WIDTH), ends)):
        with pytest.raises(ValueError, match=r"takes tokens \[tokens, in\] and integer ends"):
            nm_grouped_linear(x, LinearExperts(), "weight", offs)


class TwoTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x, offs):
        up = nm_grouped_linear(x, self, "up", offs)
        return up * nm_grouped_linear(x, self, "gate_up", offs)


def test_names_are_whole_ones_of_the_module(adapters):
    register_experts(TwoTables, transposed="gate_up")
    layers = NMSparsifier(TwoTables(), "2:4").attach().layers
    layouts = {name: layer.spec.layout for name, layer in layers.items()}
    assert layouts == {"gate_up": "experts-transposed", "up": "experts"}
    register_experts(TwoTables, parameters="gate_up")
    assert list(NMSparsifier(TwoTables(), "2:4").attach().layers) == ["gate_up"]
    for wrong in ({"parameters": ["gate_upp"]}, {"transposed": ["gate_upp"]}):
        register_experts(TwoTables, **wrong)
        with pytest.raises(ValueError, match="names gate_upp, but its parameters are gate_up, up"):
            NMSparsifier(TwoTables(), "2:4").attach()
