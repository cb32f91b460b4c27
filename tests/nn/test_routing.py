"""Masked layers on the kernels of a router: the same numbers, wherever and however often they run."""

import copy
import gc
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_nm import MVUE, NMSparsifier, TransposableMask
from lightning_nm.kernels import Router, SimulatedSparseKernel, routing
from lightning_nm.kernels import router as router_module
from lightning_nm.kernels.cost import DeviceModel
from lightning_nm.kernels.handles import find
from tests.fake_kernels import FakeKernel, FakeTimer
from tests.kinds import KINDS, make
from tests.outside import ScaledMask, SoftThreshold

METHODS = {
    "dense": lambda: "dense",
    "sr-ste": lambda: "sr-ste",
    "asp": lambda: "asp",
    "bi-mask": lambda: "bi-mask",
    "transposable": lambda: TransposableMask(),
    "soft-threshold": SoftThreshold,
    "scaled-mask": ScaledMask,
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def simulated(**options):
    return Router("sparse", [SimulatedSparseKernel()], **options)


def ran(router):
    return {(used.product.key.gemm, used.kernel) for used in router.used()}


def attach(module, pattern="2:4", method="bi-mask", estimator=None):
    return NMSparsifier(module, pattern, method, estimator, skip_first_last=False).attach()


def gradients(module, x, router):
    """The output, dX and all gradients of a batch, whose noise is always the same."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    for part in module.modules():
        for layer in getattr(part, "nm_layers", {}).values():
            layer.draw_seed(7)
    with routing(router):
        y = module(x)
    (y.square() * torch.linspace(1, 2, y.shape[-1], dtype=y.dtype)).sum().backward()
    return y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())


def assert_equal(found, expected, **tolerance):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("pattern", ["2:4", "1:2", "1:16", "3:8"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_numbers(method, kind, pattern):
    module, x = make(kind)
    attach(module, pattern, METHODS[method](), MVUE(pattern))
    router = simulated()
    assert_equal(gradients(module, x, router), gradients(module, x, None), rtol=1e-10, atol=1e-10)
    linear = not kind.startswith("conv")
    assert (("forward", "simulated") in ran(router)) == (
        linear and method not in ("dense", "soft-threshold") and pattern != "3:8"
    )


@pytest.mark.parametrize(
    ("method", "estimator", "sparse"),
    [
        ("dense", None, set()),
        ("ste", None, {"forward"}),
        ("bi-mask", None, {"forward", "dgrad"}),
        ("transposable", None, {"forward", "dgrad"}),
        ("ste", "top-n", {"forward", "wgrad"}),
        ("dense", "mvue", {"wgrad"}),
        ("bi-mask", "approx-mvue", {"forward", "dgrad", "wgrad"}),
    ],
)
def test_each_product_that_can_be_sparse_is(method, estimator, sparse):
    module, x = make("linear")
    attach(module, "2:4", method, estimator)
    router = simulated()
    gradients(module, x, router)
    assert {gemm for gemm, kernel in ran(router) if kernel == "simulated"} == sparse
    assert {used.product.key.gemm for used in router.used() if used.product.reason} == {
        "forward",
        "dgrad",
        "wgrad",
    } - sparse
    share, basis = router.sparse_share()
    assert share == pytest.approx(len(sparse) / 3)
    assert basis == "dense multiply-adds"


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 40), seed=st.integers(0, 99), estimator=st.sampled_from([None, "mvue", "top-n"]))
def test_any_number_of_tokens(tokens, seed, estimator):
    torch.manual_seed(seed)
    module = nn.Linear(32, 64, dtype=torch.float64)
    attach(module, "2:4", "bi-mask", estimator)
    x = torch.randn(tokens, 32, dtype=torch.float64)
    router = simulated()
    assert_equal(gradients(module, x, router), gradients(module, x, None), rtol=1e-10, atol=1e-10)
    assert ("dgrad", "simulated") in ran(router)


def test_an_empty_batch_and_an_expanded_gradient():
    module, _ = make("linear")
    attach(module, estimator="mvue")
    with routing(simulated()):
        empty = module(torch.zeros(0, 32, dtype=torch.float64, requires_grad=True))
        empty.sum().backward()
    assert empty.shape == (0, 64)
    results = []
    for router in (None, simulated()):
        module.zero_grad()
        with routing(router):
            module(torch.ones(8, 32, dtype=torch.float64)).sum().backward()  # a gradient of strides 0
        results.append(module.weight.grad.clone())
    torch.testing.assert_close(*results)


def test_other_layouts_of_the_input():
    module, _ = make("linear")
    attach(module, estimator="mvue")
    for x in (
        torch.randn(32, 16).double().t(),
        torch.randn(16, 64).double()[:, ::2],
        torch.randn(3, 4, 2, 32).double(),
    ):
        assert_equal(gradients(module, x, simulated()), gradients(module, x, None), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    module, x = make("linear", torch.float32)
    attach(module, estimator="mvue")
    results = []
    for router in (None, simulated()):
        with torch.autocast("cpu", dtype):
            results.append(gradients(module, x, router))
    assert results[0][0].dtype == dtype
    assert_equal(*results, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("conv_layout", ["channels", "flat"])
def test_convolutions_of_one_tap_with_channels_last_are_matrix_products(kind, conv_layout):
    torch.manual_seed(0)
    module = kind(16, 32, 1).double()
    NMSparsifier(module, "2:4", "bi-mask", "mvue", conv_layout=conv_layout, skip_first_last=False).attach()
    shape = (2, 4, 5, 6)[: module.weight.dim() - 1]
    x = torch.randn(*shape, 16).double().movedim(-1, 1)
    router = simulated()
    assert_equal(gradients(module, x, router), gradients(module, x, None), rtol=1e-10, atol=1e-10)
    assert ran(router) == {(gemm, "simulated") for gemm in ("forward", "dgrad", "wgrad")}

    first = simulated()
    gradients(module, x.contiguous(), first)
    assert {used.product.reason for used in first.used()} == {"a convolution, left to cuDNN"}


def test_convolutions_that_are_none_stay_convolutions():
    x = torch.randn(2, 6, 6, 16).double().movedim(-1, 1)
    for options in ({"stride": 2}, {"padding": 1}, {"groups": 2}, {"padding": 1, "padding_mode": "circular"}):
        module = nn.Conv2d(16, 16, 1, **options).double()
        attach(module)
        router = simulated()
        assert_equal(gradients(module, x, router), gradients(module, x, None), rtol=1e-10, atol=1e-10)
        if options.get("padding_mode") is None:
            assert {kernel for _, kernel in ran(router)} == {"reference"}, options


@pytest.mark.parametrize("shape", [(8, 32), (2, 5, 32), (32,)])
def test_outputs_may_be_changed_in_place(shape):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True))
    attach(module)
    x = torch.randn(shape)
    assert_equal(gradients(module, x, simulated()), gradients(module, x, None))


def test_products_of_other_dtypes_are_the_dense_ones_to_refuse():
    module = nn.Linear(32, 64, bias=False)
    attach(module)
    for x in (torch.randint(0, 5, (8, 32)), torch.randn(8, 32).double()):
        for router in (None, simulated()):
            with routing(router), pytest.raises(RuntimeError, match="dtype"):
                module(x)


def test_a_router_may_go_before_the_backward_pass():
    module, x = make("linear")
    attach(module)
    with routing(simulated()):
        y = module(x.requires_grad_())
    gc.collect()
    y.sum().backward()
    assert x.grad is not None


def test_only_products_that_run_are_counted():
    module = nn.Conv2d(16, 16, 3)
    attach(module)
    x = torch.randn(2, 16, 5, 5)
    router = simulated()
    with routing(router):
        y = module(x)
    assert {used.product.key.gemm for used in router.used()} == {"forward"}
    y.sum().backward()
    assert {used.product.key.gemm for used in router.used()} == {"forward", "wgrad"}


# ------------------------------------------------------------------------------------------------------- packs


class Counting(SimulatedSparseKernel):
    def __init__(self):
        self.packs = 0

    def pack(self, matrix):
        self.packs += 1
        return super().pack(matrix)


def micro_batches(module, x, router, count):
    for _ in range(count):
        with routing(router):
            module(x).square().sum().backward()


@pytest.mark.parametrize("reuse", [1, 2])
def test_micro_batches_share_packs_of_weights_and_steps_do_not(reuse):
    module, x = make("linear")
    x.requires_grad_()
    sparsifier = attach(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    kernel = Counting()
    router = Router("sparse", [kernel], reuse=reuse)
    micro_batches(module, x, router, 1)  # the trial of each product packs, too
    for step in range(4):
        kernel.packs = 0
        micro_batches(module, x, router, 2)
        assert kernel.packs == 2 * (2 if reuse == 1 else min(1, step))
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


CHANGES = {
    "in place": lambda module, sparsifier: module.weight.mul_(1.5),
    "through data, in a step": lambda module, sparsifier: step(module, sparsifier),
    "other weights": lambda module, sparsifier: module.load_state_dict(
        {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    ),
    "masks": lambda module, sparsifier: [
        layer.set_masks(layer.forward_mask.roll(1, 0), layer.backward_mask.roll(1, 1))
        for layer in sparsifier.layers.values()
    ],
    "baked": lambda module, sparsifier: sparsifier.bake(),
    "float32": lambda module, sparsifier: module.float(),
}


class ThroughData(torch.optim.SGD):
    """Writes where no version is counted."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data = parameter.data.clone()
                parameter.data.mul_(0.5)


def step(module, sparsifier):
    optimizer = ThroughData(module.parameters(), 0.1)
    sparsifier.register(optimizer)
    optimizer.step()


@pytest.mark.parametrize("change", CHANGES)
def test_no_pack_is_older_than_its_weight(change):
    module, x = make("linear")
    sparsifier = attach(module)
    router = simulated(reuse=2)
    for _ in range(2):
        gradients(module, x, router)
    with torch.no_grad():
        CHANGES[change](module, sparsifier)
    x = x.to(module.weight.dtype)
    assert_equal(gradients(module, x, router), gradients(module, x, None))


def test_captures_of_graphs_neither_use_nor_keep_packs_nor_measure(monkeypatch):
    module, x = make("linear")
    attach(module)
    kernel = Counting()
    router = Router("sparse", [kernel], reuse=2)
    gradients(module, x, router)
    kernel.packs = 0
    gradients(module, x, router)
    assert kernel.packs == 0
    monkeypatch.setattr(router_module, "_capturing", lambda: True)
    gradients(module, x, router)
    gradients(module, x, router)
    assert kernel.packs == 4

    fast = FakeKernel()
    timer = FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
    auto = Router("auto", [fast], timer=timer)
    auto.tune()
    gradients(module, x, auto)
    assert not timer.timed
    assert {kernel for _, kernel in ran(auto)} == {"reference"}
    monkeypatch.undo()
    gradients(module, x, auto)
    assert timer.timed
    assert ("forward", "fast") in ran(auto)


def test_packs_are_of_training_passes_alone():
    """Averages are swapped in for validation through .data, which no version tells."""
    module, x = make("linear")
    attach(module)
    router = simulated(reuse=2)
    expected = gradients(module, x, router)
    kept = module.weight.detach().clone()
    module.weight.data.mul_(2)
    with routing(router), torch.no_grad():
        found = module(x)
    with torch.no_grad():
        assert torch.equal(found, module(x))
    module.weight.data.copy_(kept)
    assert_equal(gradients(module, x, router), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["auto", "sparse", "heuristic"])
def test_captures_try_nothing(mode, monkeypatch):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    figures = DeviceModel("mine", 100, 1e6, 1.9)
    router = Router(mode, [fast], timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)), gpu=figures)
    monkeypatch.setattr(router_module, "_capturing", lambda: True)
    gradients(module, x, router)
    assert not fast.calls
    assert {kernel for _, kernel in ran(router)} == {"reference"}


def test_packs_go_with_their_layer_and_with_the_router():
    module, x = make("linear")
    sparsifier = attach(module)
    router = simulated(reuse=2)
    gradients(module, x, router)
    assert len(router._packs) == 1
    router.release()
    assert not router._packs
    gradients(module, x, router)
    sparsifier.detach()
    del module, sparsifier
    gc.collect()
    assert not router._packs


# ---------------------------------------------------------------------------------------------------- choosing


def test_auto_is_dense_until_tuned_and_then_takes_what_was_measured(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel(supports=lambda key: "only forward" if key.gemm != "forward" else "")
    timer = FakeTimer([fast], dense=9.0, fast=(1.0, 0.0))
    file = tmp_path / "new folder" / "kernels.json"
    router = Router("auto", [fast], file=file, timer=timer)
    with routing(router):
        y = module(x)
    assert ran(router) == {("forward", "reference")}
    assert not timer.timed
    y.sum().backward()
    assert timer.timed
    timed = len(timer.timed)
    gradients(module, x, router)
    router.tune()
    assert len(timer.timed) == timed
    assert {("forward", "fast"), ("dgrad", "reference"), ("wgrad", "reference")} <= ran(router)
    share, basis = router.sparse_share()
    # Two batches: 9 ms for each of five products, dX of the first not needed, but for the second forward's 1 ms.
    assert share == pytest.approx(1 / 37)
    assert basis == "measured times"

    again = Router("auto", [fast], file=file, timer=(second := FakeTimer([fast], dense=1.0, fast=(9.0, 0.0))))
    gradients(module, x, again)
    again.tune()
    gradients(module, x, again)
    assert not second.timed, "what the file knows is not measured"
    assert ("forward", "fast") in ran(again)

    replayed = Router(f"replay:{file}", [fast])
    gradients(module, x, replayed)
    assert {("forward", "fast"), ("dgrad", "reference"), ("wgrad", "reference")} == ran(replayed)


def test_a_file_that_cannot_be_written_ends_no_training(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    (tmp_path / "kernels.json").write_text("my notes")
    for file in (tmp_path / "kernels.json", tmp_path / "kernels.json" / "below.json"):
        router = Router("auto", [fast], file=file, timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
        with pytest.warns(RuntimeWarning, match="not kept and will be measured again"):
            gradients(module, x, router)
        gradients(module, x, router)
        assert ("forward", "fast") in ran(router)
    assert (tmp_path / "kernels.json").read_text() == "my notes"


def test_a_training_without_gradients_needs_forward_products_alone():
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    router = Router("auto", [fast], timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    with routing(router), torch.no_grad():
        module(x)
    assert [product.key.gemm for product in router._noted] == ["forward"]


@pytest.mark.parametrize("fails", ["linear", "matmul", "pack"])
def test_a_kernel_that_fails_is_replaced_with_one_warning(fails):
    def failing(*args):
        raise RuntimeError("no such algorithm")

    module, x = make("linear")
    attach(module, estimator="mvue")
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    router.tune()
    gradients(module, x, router)
    setattr(kernel, fails, failing)
    expected = gradients(module, x, None)
    with pytest.warns(RuntimeWarning, match="no such algorithm") as warned:
        assert_equal(gradients(module, x, router), expected)
    assert len(warned) == {"linear": 2, "matmul": 1, "pack": 3}[fails]
    assert_equal(gradients(module, x, router), expected)  # a warning would be an error


class Flickers(FakeKernel):
    """Rounds otherwise in every second product."""

    def linear(self, packed, x, bias=None):
        y = super().linear(packed, x, bias)
        return y * (1 + 1e-6) if len(self.calls) % 2 else y


def test_deterministic_algorithms_are_asked_for_later():
    module, x = make("linear", torch.float32)
    attach(module)
    router = Router("sparse", [Flickers()])
    gradients(module, x, router)
    assert ("forward", "fast") in ran(router)
    before = {used.product: used.calls for used in router.used() if used.kernel == "fast"}
    torch.use_deterministic_algorithms(True)
    try:
        gradients(module, x, router)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {used.product: used.calls for used in router.used() if used.kernel == "fast"} == before


def test_a_reset_lets_kernels_try_again():
    module, x = make("linear")
    attach(module)
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    gradients(module, x, router)
    linear, kernel.linear = kernel.linear, lambda *args: torch.zeros(3)
    with pytest.warns(RuntimeWarning, match=r"it returned \(3,\)"):
        gradients(module, x, router)
    gradients(module, x, router)
    reasons = [used.decision.reason for used in router.used() if used.kernel == "reference" and used.decision]
    assert all("it failed" in reason for reason in reasons)
    assert reasons
    kernel.linear = linear
    router.reset()
    gradients(module, x, router)
    assert ("forward", "fast") in ran(router)


def test_short_memory_switches_no_kernel_off():
    module, x = make("linear")
    attach(module)
    kernel = FakeKernel()
    router = Router("sparse", [kernel])
    expected = gradients(module, x, router)
    linear = kernel.linear

    def short(*args):
        raise torch.OutOfMemoryError("40 GB wanted")

    kernel.linear = short
    assert_equal(gradients(module, x, router), expected)
    kernel.linear = linear
    kernel.calls.clear()
    assert_equal(gradients(module, x, router), expected)
    assert kernel.calls.count("linear") == 2


def test_operands_at_odd_addresses_are_copied_and_switch_no_kernel_off():
    module = nn.Linear(32, 64)
    attach(module, estimator="mvue")
    odd = torch.randn(16 * 32 + 1)[1:].view(16, 32)
    module.bias = nn.Parameter(torch.zeros(65)[1:])
    router = simulated()
    assert_equal(gradients(module, odd, router), gradients(module, odd, None))
    with routing(router):
        module(odd)
    assert ("forward", "simulated") in ran(router)


def test_measuring_draws_no_random_numbers():
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    router = Router("auto", [fast], timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    state = torch.random.get_rng_state()
    gradients(module, x, router)
    assert len(router.timer.timed) == 8, "two products, of which that of dgrad is permuted"
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("kernels", ["cutlass", SimulatedSparseKernel(), [SimulatedSparseKernel]])
def test_kernels_are_objects_in_a_list(kernels):
    with pytest.raises(ValueError, match="must be a list of GemmKernel objects"):
        Router("sparse", kernels)


@pytest.mark.parametrize("budget", [-1, "x"])
def test_budgets(budget):
    with pytest.raises(ValueError, match="must be a number of seconds"):
        Router(budget_s=budget)


def test_a_damaged_file_ends_no_training(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    file = tmp_path / "kernels.json"
    file.write_text('{"schema": 1, "environments": []}')
    router = Router("auto", [fast], file=file, timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    with pytest.warns(RuntimeWarning, match="does not hold decisions"):
        gradients(module, x, router)


def test_what_is_measured_later_is_kept_in_the_end(tmp_path):
    module, x = make("linear")
    attach(module)
    fast = FakeKernel()
    file = tmp_path / "kernels.json"
    router = Router("auto", [fast], file=file, timer=FakeTimer([fast], dense=9.0, fast=(1.0, 0.0)))
    gradients(module, x, router)
    first = file.read_text()
    gradients(module, torch.cat([x] * 9), router)
    assert file.read_text() == first
    router.release()
    assert len(file.read_text()) > len(first)


def test_unknown_modes_and_nothing_to_replay(tmp_path):
    with pytest.raises(ValueError, match=r"'fast' is none of auto, sparse, reference, heuristic, replay:FILE"):
        Router("fast")
    module, x = make("linear")
    attach(module)
    with pytest.raises(ValueError, match="nothing to replay"), routing(Router(f"replay:{tmp_path / 'missing.json'}")):
        module(x)
    with pytest.raises(ValueError, match="no figures are known for 'cpu'"), routing(Router("heuristic")):
        module(x)


# -------------------------------------------------------------------------------------------- graphs and copies


@pytest.mark.parametrize("estimator", [None, "mvue"])
@pytest.mark.parametrize("method", ["bi-mask", "scaled-mask"])
def test_compiled_code_calls_the_same_kernels(method, estimator):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    attach(module, "2:4", METHODS[method](), estimator)
    x = torch.randn(24, 32)
    router = simulated()
    eager = gradients(module, x, router)
    before = {used.product: used.calls for used in router.used()}
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, x, router), eager)
    assert {used.product: used.calls for used in router.used()} == {key: 2 * calls for key, calls in before.items()}
    # Without the router, and with another number of tokens.
    assert_equal(gradients(compiled, x, None), gradients(module, x, None))
    for tokens in (16, 40):
        x = torch.randn(tokens, 32)
        assert_equal(gradients(compiled, x, router), gradients(module, x, router))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_equal_blocks_share_graphs():
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(10)]
    model = nn.Sequential(*blocks)
    attach(model, estimator="mvue")
    counts = []
    for router in (None, simulated()):
        torch.compiler.reset()
        counter = torch._dynamo.testing.CompileCounter()
        for block in blocks:
            block.compile(backend=counter)
        with routing(router):
            model(torch.randn(8, 32)).square().sum().backward()
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] < 10


@pytest.mark.parametrize("estimator", [None, "mvue"])
def test_the_operators_are_well_made(estimator):
    module, x = make("linear")
    sparsifier = attach(module, estimator=estimator)
    (layer,) = sparsifier.layers.values()
    router = simulated()
    weight, bias, tensors = module.weight.detach(), module.bias.detach(), list(layer.tensors())
    grad = torch.randn(6, 64).double()
    ops = torch.ops.lightning_nm
    torch.library.opcheck(ops.forward_gemm, (x, weight, bias, tensors, True, 64, layer.tag, router.handle))
    torch.library.opcheck(ops.forward_gemm, (x, weight, None, tensors, False, 64, layer.tag, router.handle))
    for needs in ((True, True), (True, False), (False, True)):
        layer.estimating = False  # every call draws other noise
        arguments = (grad, x, weight, layer.noise, tensors, *needs, layer.tag, router.handle)
        torch.library.opcheck(ops.backward_gemms, arguments)


def test_flops_are_those_of_the_dense_products():
    counts = []
    for router in (None, simulated()):
        module, x = make("linear-3d-no-bias")
        sparsifier = NMSparsifier(module, "2:4", "bi-mask", "mvue", skip_first_last=False, grad_snr_every=0)
        sparsifier.attach()
        with FlopCounterMode(display=False) as counter, routing(router):
            module(x.requires_grad_()).square().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 3 * 2 * 10 * 32 * 16


def test_checkpointed_layers_compute_their_forward_again_on_the_same_kernels():
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(16, 32, requires_grad=True)
    attach(module)
    calls = []
    for again in (False, True):
        router = simulated()
        with routing(router):
            y = checkpoint(module, x, use_reentrant=False) if again else module(x)
            y.square().sum().backward()
        calls.append({used.product.key.gemm: used.calls for used in router.used() if used.product.layer == "0"})
        assert ("forward", "simulated") in ran(router)
    assert calls[1] == {**calls[0], "forward": 2}


def test_second_derivatives_take_the_dense_products():
    module, x = make("linear")
    attach(module)
    results = []
    for router in (None, simulated()):
        x = x.detach().requires_grad_()
        with routing(router):
            y = module(x).pow(3).sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        results.append((first.detach(), second))
    assert_equal(*results)


def test_a_backward_pass_uses_what_its_forward_found():
    module, x = make("linear")
    attach(module)
    router = simulated()
    x.requires_grad_()
    module(x).sum().backward()
    with routing(router):
        y = module(x)
    y.sum().backward()
    assert ("dgrad", "simulated") in ran(router)
    with routing(router):
        module(x)
    assert router_module.active() is None


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_layers_of_their_own(again):
    module, x = make("linear")
    attach(module)
    copied = again(module)
    (layer,), (other,) = module.nm_layers.values(), copied.nm_layers.values()
    assert find(layer.handle) is layer
    assert find(other.handle) is other
    assert layer.tag.shape != other.tag.shape
    other.set_masks(other.forward_mask.roll(1, 0), other.backward_mask.roll(1, 1))
    for mine in (module, copied):
        assert_equal(gradients(mine, x, simulated()), gradients(mine, x, None))


def test_routers_travel_without_what_belongs_to_a_process():
    module, x = make("linear")
    attach(module)
    router = simulated(reuse=2)
    gradients(module, x, router)
    for other in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        assert other.handle != router.handle
        assert not other.used()
        assert_equal(gradients(module, x, other), gradients(module, x, None))
        assert ran(other) == ran(router)


# --------------------------------------------------------------------------------------------------- operands


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("conv")])
@pytest.mark.parametrize("method", METHODS)
def test_operands_are_the_weights_that_the_dense_products_take(method, kind):
    module, _ = make(kind, torch.float32)
    for layer in attach(module, "2:4", METHODS[method]()).layers.values():
        weight = layer.weight.detach()
        expected = layer.matrix(layer.forward_weight()).bfloat16()
        found = layer.method.forward_operand(layer, weight, torch.bfloat16)
        assert torch.equal(found, expected)
        backward = layer.matrix(layer.backward_weight()).bfloat16()
        if layer.own_backward:
            backward = backward[layer.permutation]
        transposed = layer.method.backward_operand(layer, weight, torch.bfloat16)
        assert torch.equal(transposed, backward.t())
        for operand in (found, transposed):
            assert operand.is_contiguous()
            if method not in ("dense", "scaled-mask"):
                assert not torch.signbit(operand[operand == 0]).any(), "-0.0 breaks compressors"


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    estimator=st.sampled_from(["mvue", "approx-mvue", "top-n", MVUE("1:2"), MVUE("3:5"), MVUE("4:8")]),
    gather=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_transposed_estimate_is_the_estimate(tokens, estimator, gather, seed):
    module = nn.Linear(8, 12)
    sparsifier = NMSparsifier(module, "2:4", "dense", estimator, skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randn(tokens, 12, generator=generator)
    order = torch.randperm(12, generator=generator) if gather else None
    found, gathered = layer.estimator.estimate_transposed(layer, grad, layer.noise, order)
    assert found.is_contiguous()
    assert torch.equal(found[:, :tokens], layer.estimate(grad, layer.noise).t())
    assert not found[:, tokens:].any()
    assert gathered is None or torch.equal(gathered, grad[:, order])


@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
def test_one_pass_draws_the_same_estimate(pattern, tokens, monkeypatch):
    module = nn.Linear(8, 12)
    sparsifier = NMSparsifier(module, "2:4", "dense", MVUE(pattern), skip_first_last=False).attach()
    (layer,) = sparsifier.layers.values()
    grad = torch.randn(12, tokens).t()
    expected = layer.estimate(grad, layer.noise)
    monkeypatch.setattr("lightning_nm.estimators.mvue.in_one_pass", lambda grad: True)
    found = layer.estimate(grad, layer.noise)
    assert torch.equal(found, expected)
    assert found.t().stride()[-1] == 1, "the product takes it without a copy"


def test_the_faster_of_two_ways_is_measured_once_and_on_a_gpu_alone():
    class Recorded:
        def __init__(self):
            self.timed = []

        def time(self, function, device):
            self.timed.append(function())
            return {"slow": 2.0, "fast": 1.0}[function()]

    def slow():
        return "slow"

    def fast():
        return "fast"

    timer = Recorded()
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    router = Router("auto", [], timer=timer)
    assert router.faster("a", (slow, fast), cpu) is slow
    assert not timer.timed
    assert router.faster("a", (slow, fast), cuda) is fast
    assert router.faster("a", (slow, fast), cuda) is fast
    assert timer.timed == ["slow", "fast"]
    assert router.faster("b", (fast, slow), cuda) is fast
    assert Router("sparse", [], timer=timer).faster("a", (slow, fast), cuda) is slow
