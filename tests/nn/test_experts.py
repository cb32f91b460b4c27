"""Masked experts against a twin whose experts are masked linear layers."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from lightning_nm import BAME, LBC, MVUE, MaxQ, NMSparsifier, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.kernels import Router, SimulatedSparseKernel, routing
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.nn.layer.noise import LayerNoise
from tests.support.cpu_products import needs_library
from tests.support.experts import (
    EXPERTS,
    GROUPED,
    SPARSE_WAYS,
    WAYS,
    WIDTH,
    Experts,
    TransposedExperts,
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
CASES = [
    pytest.param(
        kind,
        WAYS[(row + column) % len(WAYS)],
        method,
        estimator,
        id=f"{kind.__name__}-{method}-{estimator}",
    )
    for column, method in enumerate(METHODS)
    for row, (kind, estimator) in enumerate(
        [(Experts, None), (TransposedExperts, None), (Experts, "mvue"), (TransposedExperts, "mvue")]
    )
]


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


@pytest.mark.parametrize(("kind", "way", "method", "estimator"), CASES)
def test_experts_train_as_linear_layers(alike, kind, way, method, estimator):
    if estimator and way not in SPARSE_WAYS:
        way = "grouped"  # the estimate of a batch with other tokens is another one
    torch.manual_seed(0)
    experts = kind(way)
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_every_way_of_using_experts_is_the_same(kind, way):
    torch.manual_seed(0)
    model = kind()
    other = copy.deepcopy(model)
    other.way = way
    expected, found = (train(each, "bi-mask", None)[1] for each in (model, other))
    torch.testing.assert_close(found, expected)


def test_a_method_with_a_parameter_routes_the_gradient_of_all_experts_once():
    torch.manual_seed(0)
    model = Experts("grouped").double()
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


@pytest.mark.parametrize("way", ["loop", "index", "grouped"])
def test_estimates_differ_for_each_expert_and_call_and_repeat_with_the_draw(way):
    torch.manual_seed(0)
    model = Experts(way)
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


def test_products_without_any_token():
    for way in ("loop", "index", "grouped", "all", "einsum"):
        model = Experts(way)
        sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
        x = torch.zeros(0, WIDTH, requires_grad=True)
        y = model(x, torch.zeros(0, dtype=torch.int64))
        assert y.shape == (0, WIDTH)
        if way != "loop":  # which calls nothing
            y.sum().backward()
            assert not model.up.grad.any()
        sparsifier.detach()


@pytest.mark.skipif(not GROUPED, reason="this torch has no grouped product")
def test_tokens_beyond_the_last_offset_give_zeros():
    model = Experts()
    NMSparsifier(model, "2:4", "sr-ste").attach()

    def forward(x, ends):
        return torch._grouped_mm(x, model.up.mT, offs=ends)

    model.by_loop = forward
    x = torch.randn(10, WIDTH)
    y = model(x, torch.tensor([2, 2, 5, 7], dtype=torch.int32))
    assert y.shape == (10, 32)
    assert not y[7:].any()
    assert y[:7].ne(0).any(1).all()


@pytest.mark.parametrize("way", ["loop", "index", "grouped"])
@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_bf16_autocast_is_that_of_the_twin(alike, way, estimator):
    torch.manual_seed(0)
    experts = Experts(way)
    twin = Twin(experts)
    options = {"dtype": torch.float32, "optimizer": torch.optim.SGD}
    with torch.autocast(
        "cpu", torch.bfloat16, enabled=way != "grouped" or not GROUPED
    ):  # autocast does not know grouped products
        expected = train(twin, "bi-mask", estimator, **options)[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = train(experts, "bi-mask", estimator, **options)[1]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)


@needs_library
@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", ["sr-ste", "bi-mask", "bame", "transposable"])
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_the_cpu_kernels_take_every_expert(kind, method, estimator):
    def run(router):
        torch.manual_seed(0)
        return train(kind("grouped"), METHODS[method](), estimator, router, dtype=torch.float32)[1]

    router = Router("sparse", [CpuPermuteKernel(), CpuCsrKernel()])
    torch.testing.assert_close(run(router), run(None), rtol=1e-4, atol=1e-5)
    assert not router.registry.failures
    ran = {used.product.key.gemm for used in router.used() if used.kernel.startswith("cpu-")}
    assert ran >= {"forward", "dgrad"} | ({"wgrad"} if estimator or method == "bame" else set())


def test_packs_are_kept_for_each_expert():
    kernel = SimulatedSparseKernel()
    router = Router("sparse", [kernel], reuse=2)
    torch.manual_seed(0)
    model = Experts("grouped")
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    x, experts = torch.randn(32, WIDTH), torch.arange(32) % EXPERTS
    with routing(router):
        first = model(x, experts)
        held = dict(sparsifier.layers["up"].experts)
        second = model(x, experts)
    assert torch.equal(first, second)
    assert sorted(held) == list(range(EXPERTS))
    assert all(sparsifier.layers["up"].experts[k] is layer for k, layer in held.items())
    with torch.no_grad():  # masks that moved are seen
        model.up.copy_(model.up.flip(-1))
    sparsifier.layers["up"].spec.method.init_masks(sparsifier.layers["up"])
    with routing(router):
        moved = model(x, experts)
    torch.testing.assert_close(moved, model(x, experts))
    assert not torch.allclose(moved, first)


def test_the_module_stays_what_it_was():
    torch.manual_seed(0)
    model = Experts("grouped")
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
    plain = Experts("loop")
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(x, experts), y)
    sparsifier.bake()
    sparsifier.detach()
    assert type(model) is Experts
    assert not {"nm_layers", "nm_in_use"} & set(vars(model))
    if hasattr(torch, "_grouped_mm"):
        torch.testing.assert_close(model(x, experts), y)


def test_an_error_in_forward_leaves_the_parameters_readable():
    model = Experts()
    NMSparsifier(model, "2:4", "sr-ste").attach()
    model.by_loop = lambda *_: model.up @ torch.randn(3)
    with pytest.raises(RuntimeError, match="takes an input of 16 features"):
        model(torch.randn(2, WIDTH), torch.zeros(2))
    assert isinstance(model.up, nn.Parameter)
