"""dgrad="mvue": a random N:M backward weight for the input gradient, which is exact in the mean."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import (
    ASP,
    BAME,
    SRSTE,
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
from tests.support.kinds import KINDS, make
from tests.support.lightning_models import (
    Data,
    assert_equal_models,
    callback,
    make_trainer,
    new_model,
)
from tests.support.outside import ScaledMask, SoftThreshold
from tests.support.routed import ran, simulated

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

METHODS = {
    "dense": lambda: "dense",
    "ste": lambda: "ste",
    "sr-ste": lambda: "sr-ste",
    "asp": lambda: "asp",
    "bame": lambda: BAME(stop=100, every=2, budget=1.0, evidence="batch"),
    "soft-threshold": SoftThreshold,
    "scaled-mask": ScaledMask,
}
OWN = {
    "bi-mask": lambda: "bi-mask",
    "bi-mask-object": BiMask,
    "transposable": TransposableMask,
    "bame-bi-mask": lambda: BAME(stop=100, dgrad="bi-mask"),
}


def attach(module, method="sr-ste", dgrad="mvue", pattern="2:4", **options):
    made = METHODS[method]() if method in METHODS else method
    return NMSparsifier(
        module, pattern, made, dgrad=dgrad, skip_first_last=False, **options
    ).attach()


def layers_of(module):
    return [layer for part in module.modules() for layer in getattr(part, "nm_layers", {}).values()]


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


def gradients(module, x):
    """All gradients of one micro-batch."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    y.backward(dy)
    return {"input": x.grad, **{name: p.grad.clone() for name, p in module.named_parameters()}}


# The other kinds take seconds.
FAST = ("linear", "conv2d-groups", "hugging-face-conv1d")
EVERY_KIND = [
    kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS
]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_input_gradient_is_exact_in_the_mean(kind, draws):
    module, x = make(kind)
    exact_model = copy.deepcopy(module)
    attach(exact_model, dgrad=None)
    exact = gradients(exact_model, x)
    attach(module)
    layers = layers_of(module)
    number = 80
    total = square = 0.0
    for _ in range(number):
        found = gradients(module, x)
        total, square = total + found["input"], square + found["input"] ** 2
        for layer in layers:
            layer.draw_noise()
    mean = total / number
    error = (square / number - mean**2).clamp(min=0).div(number - 1).sqrt()
    assert error.max() > 0, "nothing was drawn"
    # The worst of all entries, of which there are up to a thousand.
    bound = 6 * error + 1e-9 * exact["input"].abs().max()
    assert ((mean - exact["input"]).abs() <= bound).all()
    for layer, forward, drawn in draws:
        for group in drawn.chunk(layer.spec.groups if len(drawn) == len(layer.param) else 1):
            assert nmf.is_nm(group, "2:4", dim=0)
        assert not drawn[forward == 0].any()
    if len(layers) == 1:
        for name in exact.keys() - {"input"}:
            torch.testing.assert_close(found[name], exact[name])


@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_uses_the_draw_for_dx_and_w_f_elsewhere(method, pattern, draws):
    module, x = make("linear")
    attach(module, method, pattern=pattern)
    (layer,) = layers_of(module)
    x.requires_grad_()
    y = module(x)
    torch.testing.assert_close(y, x @ layer.forward_weight().t() + module.bias)
    dy = torch.randn_like(y)
    y.backward(dy)
    ((_, forward, drawn),) = draws
    assert torch.equal(forward, layer.forward_weight())
    assert nmf.is_nm(drawn, pattern, dim=0)
    torch.testing.assert_close(x.grad, dy @ drawn)
    torch.testing.assert_close(layer.backward_weight(), forward)
    torch.testing.assert_close(module.bias.grad, dy.sum(0))


def test_the_variance_is_that_of_the_estimator():
    """The closed form of nmf.mvue_probabilities, and no more than that."""
    module, _ = make("linear")
    sparsifier = attach(module, "dense", pattern="1:4")
    (layer,) = sparsifier.layers.values()
    weight = layer.weight.detach()
    p = nmf.mvue_probabilities(weight, "1:4", 0)
    expected = (weight.square() * (1 / p.clamp(min=1e-12) - 1)).sum()
    number, found = 150, 0.0
    for _ in range(number):
        layer.draw_noise()
        drawn = estimates.drawn_matrix(layer, weight, layer.noise.words, torch.float64)
        found += (drawn - weight).square().sum()
    assert float(found / number) == pytest.approx(float(expected), rel=0.05)


@pytest.mark.parametrize("kind", ["conv2d-groups", "hugging-face-conv1d", "cross-attention"])
def test_equal_counters_draw_equal_weights(kind):
    found = []
    for seed in (0, 0, 1):
        module, x = make(kind)
        attach(module, seed=seed)
        found.append([gradients(module, x)["input"] for _ in range(2)])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][0], found[2][0]), "another seed"
    assert not torch.equal(found[0][0], found[0][1]), "another pass of the micro-batch"


def test_a_draw_is_not_that_of_the_estimator_and_neither_disturbs_the_other():
    module, x = make("linear")
    both = copy.deepcopy(module)
    attach(module, dgrad=None, grad_estimator="mvue")
    attach(both, grad_estimator="mvue")
    (layer,) = layers_of(both)
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


def train(model, sparsifier, optimizer, steps, micro_batches=1):
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(micro_batches):
            generator = torch.Generator().manual_seed(100 * step + part)
            x = torch.randn(8, 16, generator=generator)
            model(x).square().mean().backward()
            if part < micro_batches - 1:
                sparsifier.step()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    )


@pytest.mark.parametrize("method", METHODS)
def test_a_run_with_accumulation_resumes_bit_for_bit(method):
    def begin(seed):
        model = mlp(seed)
        sparsifier = attach(model, method, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        sparsifier.register(optimizer)
        return model, sparsifier, optimizer

    whole = begin(0)
    train(*whole, 3, micro_batches=2)
    buffer = io.BytesIO()
    torch.save([part.state_dict() for part in whole], buffer)
    train(*whole, 3, micro_batches=2)
    resumed = begin(1)
    buffer.seek(0)
    for part, state in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(*resumed, 3, micro_batches=2)
    for a, b in zip(whole[0].parameters(), resumed[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_state_of_the_methods_own_dgrad_is_refused_by_name():
    saved = mlp()
    state = attach(saved, dgrad=None).state_dict()
    model = mlp()
    model.load_state_dict(saved.state_dict())
    sparsifier = attach(model)
    with pytest.raises(
        ValueError, match=r"layer '\{0,2,4\}' .*: dgrad none in the checkpoint, mvue here"
    ):
        sparsifier.load_state_dict(state)
    for layer in state["layers"].values():  # as of 0.2
        del layer["dgrad"]
    sparsifier.load_state_dict(state)


@pytest.mark.parametrize("name", OWN)
def test_methods_with_a_backward_weight_of_their_own_refuse_it_by_name(name):
    made = OWN[name]()
    short = made if isinstance(made, str) else made.short_name
    words = rf"dgrad='mvue' draws the backward weight, but method '{short}' .*dgrad: null.*'sr-ste'"
    with pytest.raises(ValueError, match=words):
        SparsityConfig("2:4", made, dgrad="mvue")
    rule = {"include": "0", "method": made}
    with pytest.raises(ValueError, match=rf"of the layers 0, but method '{short}'"):
        SparsityConfig("2:4", "ste", dgrad="mvue", rules=[rule])
    SparsityConfig("2:4", "ste", dgrad="mvue", rules=[{**rule, "dgrad": None}])


def test_a_users_method_with_a_backward_weight_refuses_it_by_its_class():
    class Halved(Method):
        def backward_weight(self, layer, weight):
            return weight / 2

    with pytest.raises(ValueError, match="method 'Halved' makes a backward weight of its own"):
        SparsityConfig("2:4", Halved(), dgrad="mvue")


@pytest.mark.parametrize("value", ["mvu", "bi-mask", True, 2])
def test_unknown_values_are_refused(value):
    with pytest.raises(ValueError, match=f"dgrad={value!r} is unknown: use 'mvue', or None"):
        SparsityConfig("2:4", "ste", dgrad=value)


def test_rules_decide_for_their_layers():
    rules = [{"include": "0", "dgrad": None}, {"include": "2", "pattern": "1:4"}]
    sparsifier = attach(mlp(), rules=rules)
    labels = {name: layer.gemms().dgrad.label for name, layer in sparsifier.layers.items()}
    assert labels == {"0": "masked", "2": "1:4", "4": "2:4"}
    rules = [{"include": "2", "dgrad": "mvue"}]
    sparsifier = attach(mlp(), dgrad=None, rules=rules)
    labels = {name: layer.gemms().dgrad.label for name, layer in sparsifier.layers.items()}
    assert labels == {"0": "masked", "2": "2:4", "4": "masked"}
    config = SparsityConfig("1:4", "ste", dgrad="mvue")
    assert SparsityConfig.from_dict(config.to_dict()) == config


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_each_product_has_its_own_eligibility():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd_out = nn.Linear(32, 30)
            self.odd_in = nn.Linear(30, 32)
            self.odd_both = nn.Linear(30, 30)
            self.groups = nn.Conv2d(32, 24, 1, groups=4)  # 6 outputs in each group

        def forward(self, x):
            return self.odd_both(self.odd_out(self.odd_in(self.odd_out(x))))

    model = Odd().double()
    sparsifier = attach(model)
    gemms = {name: layer.gemms() for name, layer in sparsifier.layers.items()}
    labels = {name: (found.forward.label, found.dgrad.label) for name, found in gemms.items()}
    assert labels == {
        "odd_out": ("2:4", "masked"),
        "odd_in": ("dense", "2:4"),
        "groups": ("2:4", "masked"),
    }
    fitting = "(M = 2, 3, 5, 6, 10, 15 would fit)"
    assert gemms["odd_out"].dgrad.reason == "out 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"
    assert gemms["groups"].dgrad.reason == "out/group 6 % 4 != 0 (M = 2, 3, 6 would fit)"
    assert sparsifier.skipped == {
        "odd_both": f"in 30 % 4 != 0 {fitting}; out 30 % 4 != 0 {fitting}"
    }
    dense = attach(Odd(), "dense")
    reasons = {name: layer.gemms().dgrad.reason for name, layer in dense.layers.items()}
    assert reasons["odd_out"] == "out 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"
    assert reasons["odd_in"] == ""

    layer = sparsifier.layers["odd_in"]
    x = torch.randn(4, 30, dtype=torch.float64, requires_grad=True)
    model.odd_in(x).sum().backward()
    layer.draw_noise(layer.noise.draws)
    drawn = estimates.drawn_matrix(layer, layer.weight.detach(), layer.noise.words, x.dtype)
    torch.testing.assert_close(x.grad, drawn.sum(0).expand_as(x))
    x = torch.randn(4, 32, dtype=torch.float64, requires_grad=True)
    model.odd_out(x).sum().backward()
    exact = sparsifier.layers["odd_out"].forward_weight()
    torch.testing.assert_close(x.grad, exact.sum(0).expand_as(x))


def test_nothing_is_drawn_in_a_dense_phase(draws):
    model = mlp()
    sparsifier = attach(model, ASP(start=2), rules=[{"include": "4", "dgrad": None}])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    layer = sparsifier.layers["2"]
    labels = []
    for _ in range(3):
        labels.append((layer.gemms().dgrad.label, len(draws)))
        train(model, sparsifier, optimizer, 1)
    assert labels == [("dense", 0), ("dense", 0), ("2:4", 0)]
    assert len(draws) == 1, "the first layer needs no input gradient"
    ratios = sparsifier.flops_ratios(mean=True)
    assert ratios["eligible"] < 1


@pytest.mark.parametrize("method", ["dense", "sr-ste"])
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:8"])
def test_the_counted_arithmetic_is_the_expected_share_of_nonzeros(method, pattern):
    torch.manual_seed(0)
    module = nn.Linear(512, 256)
    sparsifier = attach(module, method, pattern=pattern)
    (layer,) = sparsifier.layers.values()
    drawn = estimates.drawn_matrix(layer, layer.weight.detach(), layer.noise.words, torch.float32)
    share = float(drawn.count_nonzero()) / drawn.numel()
    dgrad = layer.gemms().dgrad
    assert dgrad.arithmetic == pytest.approx(share, rel=0.02)
    assert dgrad.eligible == dgrad.paper == layer.pattern.density
    assert dgrad.kind == "n:m"


def test_the_share_of_nonzeros_by_counting_all_masks():
    for pattern in (NMPattern(2, 4), NMPattern(1, 4), NMPattern(3, 5)):
        rows = torch.cartesian_prod(*[torch.tensor([0, 1])] * pattern.m)
        kept = rows.sum(1).clamp(max=pattern.n).double()
        chance = torch.where(rows == 1, 0.3, 0.7).double().prod(1)
        expected = float((kept * chance).sum()) / pattern.m
        assert drawn_density(pattern, 0.3) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "conv2d", "hugging-face-conv1d"])
def test_compiled_layers_draw_as_eager_ones(kind):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    module, x = make(kind, torch.float32)
    twin = copy.deepcopy(module)
    attach(module)
    attach(twin)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    found = []
    for _ in range(3):
        eager = gradients(twin, x)
        in_graph = gradients(compiled, x)
        torch.testing.assert_close(in_graph["input"], eager["input"])
        found.append(eager["input"])
        for layer in (*layers_of(module), *layers_of(twin)):
            layer.draw_noise()
    assert counter.frame_count == 1, "new random numbers need no new graph"
    assert not torch.equal(found[0], found[1])
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["linear", "conv2d", "experts", "attention"])
@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_a_router_makes_the_same_gradients(kind, estimator):
    module, x = make(kind, torch.float32)
    twin = copy.deepcopy(module)
    attach(module, grad_estimator=estimator)
    attach(twin, grad_estimator=estimator)
    expected = gradients(twin, x)
    router = simulated()
    with routing(router):
        found = gradients(module, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    kernels = {(use.kernel, use.product.reason) for use in router.used() if is_dgrad(use)}
    if kind == "conv2d":
        assert kernels == {("reference", "a convolution that no kernel takes")}
    else:
        assert ("simulated", "") in kernels
        assert all(use.product.key.drawn for use in router.used() if is_dgrad(use))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_compiled_layers_of_a_router_draw_as_eager_ones(kind):
    torch._dynamo.reset()
    module, x = make(kind, torch.float32)
    twin = copy.deepcopy(module)
    attach(module, grad_estimator="mvue")
    attach(twin, grad_estimator="mvue")
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        expected = gradients(twin, x)
        with routing(simulated()):
            found = gradients(compiled, x)
        for name, gradient in expected.items():
            torch.testing.assert_close(
                found[name if name == "input" else f"_orig_mod.{name}"],
                gradient,
                rtol=1e-4,
                atol=1e-5,
            )
        for layer in (*layers_of(module), *layers_of(twin)):
            layer.draw_noise()
    torch._dynamo.reset()


def is_dgrad(use):
    return use.product.key.gemm == "dgrad"


@needs_library
@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("kind", ["linear", "conv1d", "conv2d", "conv2d-groups"])
def test_cpu_kernels_make_the_other_products(kind, channels_last, estimator):
    """The weight of dX is the one that would be drawn without kernels; of convolutions that product is dense."""
    module, x = make(kind, torch.float32)
    if channels_last and x.dim() == 4:
        module.to(memory_format=torch.channels_last)
        x = x.to(memory_format=torch.channels_last)
    twin = copy.deepcopy(module)
    attach(module, grad_estimator=estimator)
    attach(twin, grad_estimator=estimator)
    expected = gradients(twin, x)
    router = Router("sparse", [CpuCsrKernel()])
    with routing(router):
        found = gradients(module, x)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)
    assert ("forward", "cpu-csr") in ran(router)
    (use,) = filter(is_dgrad, router.used())
    if kind == "linear":
        assert use.kernel == "cpu-csr"
        assert use.product.key.drawn
    else:
        assert use.kernel == "reference"
        assert use.product.reason == "no kernel takes a drawn weight of a convolution"


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (64, 16)])
@pytest.mark.parametrize("pattern", ["2:4", "1:8"])
def test_the_transposed_draw_is_the_draw(shape, pattern):
    torch.manual_seed(0)
    module = nn.Linear(*shape, dtype=torch.float64)
    (layer,) = attach(module, pattern=pattern).layers.values()
    weight, words = layer.weight.detach(), layer.noise.words
    drawn_oi = estimates.drawn_matrix(layer, weight, words, torch.float64)
    layer.draw_noise(layer.noise.draws)
    drawn_io = estimates.drawn_matrix(layer, weight, words, torch.float64, transposed=True)
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
        gradients(module, x)
        one = len(packed)
        gradients(module, x)
    drawn = [matrix for matrix in packed if matrix.shape == (32, 64)]
    assert len(packed) > one
    assert not torch.equal(drawn[-1], drawn[-2])
    assert all(nmf.is_nm(matrix, "2:4", dim=1) for matrix in drawn)


@needs_library
def test_measured_kernels_take_drawn_weights():
    """The decision is of packing and product; cpu-permute says why it takes no drawn weight."""
    module, x = make("linear", torch.float32)
    attach(module, pattern="1:8")
    router = Router("auto", [CpuPermuteKernel(), CpuCsrKernel()])
    with routing(router):
        for _ in range(2):
            gradients(module, x)
    (use,) = {use.product.key: use for use in router.used() if is_dgrad(use)}.values()
    assert use.product.key.drawn
    assert use.decision.dense_ms > 0
    assert use.decision.pack_ms > 0
    assert "cpu-permute: it packs masks that are kept" in use.decision.reason


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    module, x = make("linear")
    twin = copy.deepcopy(module)
    attach(module)
    attach(twin)
    expected = gradients(twin, x)["input"]
    x = x.requires_grad_()
    y = checkpoint(module, x, use_reentrant=reentrant)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=y.dtype)
    y.backward(dy)
    torch.testing.assert_close(x.grad, expected)


def test_a_pass_that_is_differentiated_uses_the_forward_weight():
    module, x = make("linear")
    attach(module)
    (layer,) = layers_of(module)
    x.requires_grad_()
    (dx,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    torch.testing.assert_close(dx, layer.forward_weight().sum(0).expand_as(x))
    dx.square().sum().backward()
    assert layer.weight.grad.isfinite().all()


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_trainer_resumes_bit_for_bit(tmp_path, accumulate):
    def fit(epochs, checkpoint=None):
        made = callback("sr-ste", dgrad="mvue", skip_first_last=False)
        options = {"max_epochs": epochs, "accumulate_grad_batches": accumulate}
        trainer = make_trainer(tmp_path, [made, ExactResume()], **options)
        model = new_model()
        trainer.fit(model, Data(), ckpt_path=checkpoint)
        return model, trainer

    whole, _ = fit(2)
    _, trainer = fit(1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = fit(2, tmp_path / "half.ckpt")
    assert_equal_models(whole, resumed)


def test_the_table_of_layers_says_which_products_are_nm():
    rules = [{"include": "2", "dgrad": None}]
    sparsifier = attach(mlp(), rules=rules)
    found = {name: cells for name, *cells in layer_rows(sparsifier)}
    assert found["0"][3:6] == ["2:4", "2:4", "dense"]
    assert found["2"][3:6] == ["2:4", "masked", "dense"]
    assert hyperparameters(sparsifier)["nm/dgrad"] == "MVUE"
    assert "nm/rules/0/dgrad" not in hyperparameters(sparsifier)


def test_autocast_draws_in_the_dtype_of_the_product(draws):
    module, x = make("linear", torch.float32)
    attach(module)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    y.float().sum().backward()
    ((_, _, drawn),) = draws
    assert drawn.dtype == torch.bfloat16
    assert nmf.is_nm(drawn.float(), "2:4", dim=0)
    assert x.grad.dtype == torch.float32


def test_decay_and_masks_are_those_without_it():
    """Only dX differs: a single layer trains as it would."""
    weights = []
    for dgrad in (None, "mvue"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32))
        sparsifier = attach(model, SRSTE(decay=0.1), dgrad=dgrad)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sparsifier.register(optimizer)
        train(model, sparsifier, optimizer, 3)
        weights.append(model[0].weight.detach().clone())
    assert torch.equal(*weights)
