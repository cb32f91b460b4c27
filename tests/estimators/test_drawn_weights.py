"""dgrad="mvue": a random N:M backward weight for the input gradient, which is exact in the mean."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import (
    ASP,
    BAME,
    BiMask,
    Method,
    NMPattern,
    NMSparsifier,
    SparsityConfig,
    TransposableMask,
)
from lightning_nm import functional as nmf
from lightning_nm.callbacks.tables import hyperparameters, layer_rows
from lightning_nm.demo.exact_resume import ExactResume
from lightning_nm.kernels import GemmKey, Router, routing
from lightning_nm.kernels.api import uses_of_pack
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.nn import products as estimates
from lightning_nm.nn.costs import drawn_density
from tests.support.cpu_products import needs_library
from tests.support.kinds import make
from tests.support.lightning_models import (
    Data,
    assert_equal_models,
    callback,
    make_trainer,
    new_model,
)
from tests.support.method_loop import Loop, mlp
from tests.support.outside import ScaledMask, SoftThreshold
from tests.support.routed import ran, simulated

METHODS = {
    "dense": lambda: "dense",
    "ste": lambda: "ste",
    "asp": lambda: "asp",
    "bame": lambda: BAME(stop=100, every=2, budget=1.0, evidence="batch"),
    "soft-threshold": SoftThreshold,
    "scaled-mask": ScaledMask,
}


def attach(module, method="sr-ste", dgrad="mvue", pattern="2:4", **options):
    options = {"dgrad": dgrad, "skip_first_last": False, **options}
    return NMSparsifier(module, pattern, method, **options).attach()


def layers_of(module):
    return [layer for part in module.modules() for layer in getattr(part, "nm_layers", {}).values()]


def draw(layer, dtype=torch.float64, **options):
    """The backward weight of the present draw."""
    weight = layer.weight.detach()
    return estimates.drawn_matrix(layer, weight, layer.noise.words, dtype, **options)


@pytest.fixture
def draws(monkeypatch):
    """What every dgrad has drawn: the layer, the rows of W_F and those of W_B."""
    seen = []
    made = estimates.drawn_matrix

    def noted(layer, weight, noise, dtype, rows=slice(None)):
        drawn = made(layer, weight, noise, dtype, rows)
        seen.append((layer, layer.view.matrix(layer.values_of("forward", weight))[rows], drawn))
        return drawn

    monkeypatch.setattr(estimates, "drawn_matrix", noted)
    return seen


def gradients(module, x, called=None):
    """All gradients of one micro-batch."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x) if called is None else called(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype))
    return {"input": x.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


def twins(kind, dtype=torch.float32, **options):
    """Two equal modules with dgrad="mvue", and an input."""
    module, x = make(kind, dtype)
    pair = module, copy.deepcopy(module)
    for each in pair:
        attach(each, **options)
    return *pair, x


@pytest.mark.parametrize(
    "kind", ["linear", "conv2d-groups", "hugging-face-conv1d", "cross-attention"]
)
def test_the_input_gradient_is_exact_in_the_mean(kind, draws):
    module, x = make(kind)
    exact_model = copy.deepcopy(module)
    attach(exact_model, dgrad=None)
    exact = gradients(exact_model, x)
    attach(module)
    layers = layers_of(module)
    number, found = 80, []
    for _ in range(number):
        found.append(gradients(module, x))
        for layer in layers:
            layer.draw_noise()
    inputs = torch.stack([each["input"] for each in found])
    error = inputs.std(0) / number**0.5
    assert error.max() > 0, "nothing was drawn"
    # The worst of all entries, of which there are up to a thousand.
    bound = 6 * error + 1e-9 * exact["input"].abs().max()
    assert ((inputs.mean(0) - exact["input"]).abs() <= bound).all()
    for layer, forward, drawn in draws:
        for group in drawn.chunk(layer.spec.groups if len(drawn) == len(layer.param) else 1):
            assert nmf.is_nm(group, "2:4", dim=0)
        assert not drawn[forward == 0].any()
    if len(layers) == 1:
        for name in exact.keys() - {"input"}:
            torch.testing.assert_close(found[0][name], exact[name])


@pytest.mark.parametrize("method", METHODS)
def test_every_method_uses_the_draw_for_dx_and_w_f_elsewhere(method, draws):
    module, x = make("linear")
    attach(module, METHODS[method](), pattern="1:8")
    (layer,) = layers_of(module)
    dy = torch.linspace(-1, 1, 6 * 64, dtype=x.dtype).view(6, 64)
    x.requires_grad_()
    y = module(x)
    torch.testing.assert_close(y, x @ layer.forward_weight().t() + module.bias)
    y.backward(dy)
    ((_, forward, drawn),) = draws
    assert torch.equal(forward, layer.forward_weight())
    assert nmf.is_nm(drawn, "1:8", dim=0)
    torch.testing.assert_close(x.grad, dy @ drawn)
    torch.testing.assert_close(layer.backward_weight(), forward)
    torch.testing.assert_close(module.bias.grad, dy.sum(0))


@pytest.mark.parametrize("kind", ["conv2d-groups", "hugging-face-conv1d", "cross-attention"])
def test_equal_counters_draw_equal_weights(kind):
    found = []
    for seed in (0, 0, 1):
        module, x = make(kind)
        attach(module, seed=seed)
        found.append([gradients(module, x)["input"] for _ in range(2)])
    first, same, other = found
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first[0], other[0]), "another seed"
    assert not torch.equal(*first), "another pass of the micro-batch"


def test_a_draw_is_not_that_of_the_estimator_and_neither_disturbs_the_other():
    module, x = make("linear")
    both = copy.deepcopy(module)
    attach(module, dgrad=None, grad_estimator="mvue")
    (layer,) = attach(both, grad_estimator="mvue").layers.values()
    words = layer.noise.words
    assert not torch.equal(layer.noise.for_weight(words, 0), layer.noise.for_call(words, 0))
    layer.draw_noise(layer.noise.draws)
    expected, found = gradients(module, x), gradients(both, x)
    assert torch.equal(found["weight"], expected["weight"])
    assert not torch.equal(found["input"], expected["input"])


def test_a_module_that_is_called_twice_draws_twice(draws):
    """A product of two equal draws would not be exact in the mean."""
    module = nn.Linear(16, 16, dtype=torch.float64)
    attach(module)
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    module(module(x)).sum().backward()
    (_, _, first), (_, _, second) = draws
    assert not torch.equal(first, second)


def test_a_state_of_the_methods_own_dgrad_is_refused_by_name():
    model, own = mlp(16, 32, 32, 8), mlp(16, 32, 32, 8)
    state = attach(own, dgrad=None).state_dict()
    model.load_state_dict(own.state_dict())
    sparsifier = attach(model)
    message = r"layer '\{0,2,4\}' .*: dgrad none in the checkpoint, mvue here"
    with pytest.raises(ValueError, match=message):
        sparsifier.load_state_dict(state)
    for layer in state["layers"].values():  # as of 0.2
        del layer["dgrad"]
    sparsifier.load_state_dict(state)


class Halved(Method):
    def backward_weight(self, layer, weight):
        return weight / 2


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("bi-mask", "bi-mask"),
        (BiMask(), "bi-mask"),
        (TransposableMask(), "transposable"),
        (BAME(stop=100, dgrad="bi-mask"), "bame"),
        (Halved(), "Halved"),
    ],
)
def test_methods_with_a_backward_weight_of_their_own_refuse_it_by_name(made, name):
    words = rf"dgrad='mvue' draws the backward weight, but method '{name}' .*dgrad: null.*'sr-ste'"
    with pytest.raises(ValueError, match=words):
        SparsityConfig("2:4", made, dgrad="mvue")
    rule = {"include": "0", "method": made}
    with pytest.raises(ValueError, match=rf"of the layers 0, but method '{name}'"):
        SparsityConfig("2:4", "ste", dgrad="mvue", rules=[rule])
    SparsityConfig("2:4", "ste", dgrad="mvue", rules=[{**rule, "dgrad": None}])


@pytest.mark.parametrize("value", ["mvu", "bi-mask", True, 2])
def test_unknown_values_are_refused(value):
    with pytest.raises(ValueError, match=f"dgrad={value!r} is unknown: use 'mvue', or None"):
        SparsityConfig("2:4", "ste", dgrad=value)


@pytest.mark.parametrize(
    ("dgrad", "rules", "labels"),
    [
        (
            "mvue",
            [{"include": "0", "dgrad": None}, {"include": "2", "pattern": "1:4"}],
            ["masked", "1:4", "2:4"],
        ),
        (None, [{"include": "2", "dgrad": "mvue"}], ["masked", "2:4", "masked"]),
    ],
)
def test_rules_decide_for_their_layers(dgrad, rules, labels):
    sparsifier = attach(mlp(16, 32, 32, 8), dgrad=dgrad, rules=rules)
    assert [layer.gemms().dgrad.label for layer in sparsifier.layers.values()] == labels
    rows = {name: cells for name, *cells in layer_rows(sparsifier)}
    assert [cells[4] for cells in rows.values()] == labels
    assert hyperparameters(sparsifier).get("nm/dgrad") == (dgrad and "MVUE")
    config = sparsifier.config
    assert SparsityConfig.from_dict(config.to_dict()) == config


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_each_product_has_its_own_eligibility():
    model = nn.ModuleDict(
        {
            "odd_out": nn.Linear(32, 30),
            "odd_in": nn.Linear(30, 32),
            "odd_both": nn.Linear(30, 30),
            "groups": nn.Conv2d(32, 24, 1, groups=4),  # 6 outputs in each group
        }
    ).double()
    sparsifier = attach(model)
    gemms = {name: layer.gemms() for name, layer in sparsifier.layers.items()}
    labels = {name: (found.forward.label, found.dgrad.label) for name, found in gemms.items()}
    assert labels == {
        "odd_out": ("2:4", "masked"),
        "odd_in": ("dense", "2:4"),
        "groups": ("2:4", "masked"),
    }
    fitting = "30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"
    assert gemms["odd_out"].dgrad.reason == f"out {fitting}"
    assert gemms["groups"].dgrad.reason == "out/group 6 % 4 != 0 (M = 2, 3, 6 would fit)"
    assert sparsifier.skipped == {"odd_both": f"in {fitting}; out {fitting}"}

    for name, width in (("odd_in", 30), ("odd_out", 32)):
        layer = sparsifier.layers[name]
        x = torch.randn(4, width, dtype=torch.float64, requires_grad=True)
        model[name](x).sum().backward()
        layer.draw_noise(layer.noise.draws)
        used = draw(layer) if name == "odd_in" else layer.forward_weight()
        torch.testing.assert_close(x.grad, used.sum(0).expand_as(x))


def test_nothing_is_drawn_in_a_dense_phase(draws):
    rules = [{"include": "4", "dgrad": None}]
    run = Loop(ASP(start=2), model=mlp(16, 32, 32, 8), dgrad="mvue", rules=rules)
    labels = []
    for _ in range(3):
        labels.append((run.layers["2"].gemms().dgrad.label, len(draws)))
        run.train(1)
    assert labels == [("dense", 0), ("dense", 0), ("2:4", 0)]
    assert len(draws) == 1, "the first layer needs no input gradient"
    assert run.sparsifier.flops_ratios(mean=True)["eligible"] < 1


@pytest.mark.parametrize("method", ["dense", "sr-ste"])
@pytest.mark.parametrize("pattern", ["2:4", "3:8"])
def test_the_counted_arithmetic_is_the_expected_share_of_nonzeros(method, pattern):
    model = mlp(512, 256)
    (layer,) = attach(model, method, pattern=pattern).layers.values()
    drawn = draw(layer, torch.float32)
    dgrad = layer.gemms().dgrad
    assert dgrad.arithmetic == pytest.approx(float((drawn != 0).float().mean()), rel=0.02)
    assert dgrad.eligible == dgrad.paper == layer.pattern.density
    assert dgrad.kind == "n:m"


@pytest.mark.parametrize("pattern", [NMPattern(2, 4), NMPattern(1, 4), NMPattern(3, 5)])
def test_the_share_of_nonzeros_by_counting_all_masks(pattern):
    rows = torch.cartesian_prod(*[torch.tensor([0, 1])] * pattern.m)
    kept = rows.sum(1).clamp(max=pattern.n).double()
    chance = torch.where(rows == 1, 0.3, 0.7).double().prod(1)
    expected = float((kept * chance).sum()) / pattern.m
    assert drawn_density(pattern, 0.3) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "conv2d", "hugging-face-conv1d"])
@pytest.mark.parametrize("is_routed", [False, True])
def test_compiled_layers_draw_as_eager_ones(kind, is_routed):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    module, twin, x = twins(kind, grad_estimator="mvue" if is_routed else None)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for _ in range(3):
        expected = gradients(twin, x)
        with routing(simulated() if is_routed else None):
            found = gradients(module, x, compiled)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for layer in (*layers_of(module), *layers_of(twin)):
            layer.draw_noise()
    assert is_routed or counter.frame_count == 1, "new random numbers need no new graph"
    torch._dynamo.reset()


def dgrads(router):
    return [use for use in router.used() if use.product.key.gemm == "dgrad"]


@pytest.mark.parametrize("kind", ["linear", "conv2d", "experts", "attention"])
@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_a_router_makes_the_same_gradients(kind, estimator):
    module, twin, x = twins(kind, grad_estimator=estimator)
    expected, router = gradients(twin, x), simulated()
    with routing(router):
        found = gradients(module, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    kernels = {(use.kernel, use.product.reason) for use in dgrads(router)}
    if kind == "conv2d":
        assert kernels == {("reference", "a convolution that no kernel takes")}
    else:
        assert ("simulated", "") in kernels
        assert all(use.product.key.drawn for use in dgrads(router))


@needs_library
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv2d-groups"])
def test_cpu_kernels_make_the_other_products(kind, channels_last):
    """The weight of dX is the one that would be drawn without kernels; of convolutions that GEMM is dense."""
    module, twin, x = twins(kind, grad_estimator="mvue")
    if channels_last and x.dim() == 4:
        module, twin, x = (each.to(memory_format=torch.channels_last) for each in (module, twin, x))
    expected, router = gradients(twin, x), Router("sparse", [CpuCsrKernel()])
    with routing(router):
        found = gradients(module, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert ("forward", "cpu-csr") in ran(router)
    (use,) = dgrads(router)
    if kind == "linear":
        assert use.kernel == "cpu-csr"
        assert use.product.key.drawn
    else:
        assert use.kernel == "reference"
        assert use.product.reason == "no kernel takes a drawn weight of a convolution"


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (64, 16)])
@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
def test_the_transposed_draw_is_the_draw(shape, pattern):
    (layer,) = attach(mlp(*shape, dtype=torch.float64), pattern=pattern).layers.values()
    drawn_oi = draw(layer)
    layer.draw_noise(layer.noise.draws)
    drawn_io = draw(layer, transposed=True)
    assert drawn_io.is_contiguous()
    torch.testing.assert_close(drawn_io, drawn_oi.t())


def test_a_drawn_operand_is_packed_for_each_product():
    key = GemmKey("dgrad", 8, 8, 8, torch.float32, NMPattern(2, 4), "cpu", drawn=True)
    assert str(key).endswith("2:4 cpu drawn")
    assert [uses_of_pack(replace(key, drawn=drawn), 4) for drawn in (True, False)] == [1, 4]
    assert key != replace(key, drawn=False), "its decision is not that of a kept mask"
    packed = []

    class Packs(SimulatedSparseKernel):
        def pack(self, matrix):
            packed.append(matrix)
            return super().pack(matrix)

    module, x = make("linear", torch.float32)
    attach(module)
    with routing(Router("sparse", [Packs()])):
        for _ in range(2):
            gradients(module, x)
    *_, first, second = (matrix for matrix in packed if matrix.shape == (32, 64))
    assert not torch.equal(first, second)
    assert nmf.is_nm(torch.cat([first, second]), "2:4", dim=1)


@needs_library
def test_measured_kernels_take_drawn_weights():
    """The decision is of packing and GEMM; cpu-permute says why it takes no drawn weight."""
    module, x = make("linear", torch.float32)
    attach(module, pattern="1:8")
    router = Router("auto", [CpuPermuteKernel(), CpuCsrKernel()])
    with routing(router):
        for _ in range(2):
            gradients(module, x)
    (use,) = {use.product.key: use for use in dgrads(router)}.values()
    assert use.product.key.drawn
    assert use.decision.dense_ms > 0
    assert use.decision.pack_ms > 0
    assert "cpu-permute: it packs masks that are kept" in use.decision.reason


def test_a_pass_that_is_differentiated_uses_the_forward_weight():
    module, x = make("linear")
    (layer,) = attach(module).layers.values()
    x.requires_grad_()
    (dx,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    torch.testing.assert_close(dx, layer.forward_weight().sum(0).expand_as(x))
    dx.square().sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_a_trainer_resumes_bit_for_bit(tmp_path):
    def fit(epochs, path=None):
        made = callback("sr-ste", dgrad="mvue", skip_first_last=False)
        options = {"max_epochs": epochs, "accumulate_grad_batches": 2}
        trainer, model = make_trainer(tmp_path, [made, ExactResume()], **options), new_model()
        trainer.fit(model, Data(), ckpt_path=path)
        return model, trainer

    whole, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(2, tmp_path / "half.ckpt")
    assert_equal_models(whole, resumed)
