"""Routed layers on a GPU: run with ``pytest -m gpu`` on one with sparse tensor cores.

Every test also runs on the CPU, in the ordinary suite, with cuSPARSELt's operators in software: that shows that the
tests are right, and nothing of GPUs. What needs no device is in ``test_routing.py``.
"""

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_nm import MVUE, NMSparsifier
from lightning_nm.kernels import routing
from tests.support.places import PLACES, assert_on_kernel, assert_right, exact, make_place, results

BF16, FP16 = torch.bfloat16, torch.float16
GEMMS = {
    "sr-ste": {"forward"},
    "bi-mask": {"forward", "dgrad"},
    "transposable": {"forward", "dgrad"},
}


@pytest.fixture(params=PLACES)
def place(request):
    return make_place(request.param)


def masked(place, method="bi-mask", mvue=False, sizes=(256, 384), dtype=BF16):
    """A masked linear layer, its sparsifier, an input and an output gradient."""
    module = nn.Linear(*sizes)
    with torch.no_grad():
        values = torch.randn(sizes[::-1], generator=torch.Generator().manual_seed(1))
        module.weight.copy_(values * sizes[0] ** -0.5)
        module.bias.copy_(torch.linspace(-1, 1, sizes[1]))
    module.to(place.device, dtype)
    options = {"skip_first_last": False, "grad_snr_every": 0}
    estimator = MVUE("2:4") if mvue else None
    sparsifier = NMSparsifier(module, "2:4", method, estimator, **options).attach()
    return module, sparsifier, *batch(place, module)


def batch(place, module, tokens=200, seed=0):
    """Input and output gradient."""
    out, width = module.weight.shape
    dtype = module.weight.dtype
    x = place.random(tokens, width, dtype=dtype, seed=seed)
    return x, place.random(tokens, out, dtype=dtype, seed=seed + 1)


def change(module):
    """Other weights, by far more than a product's rounding."""
    with torch.no_grad():
        module.weight.copy_(module.weight.roll(1, 0) * -1.5)


def move_masks(sparsifier, by=4):
    """Other masks that are N:M alike: whole blocks change places."""
    for layer in sparsifier.layers.values():
        backward = layer.masks.backward
        layer.set_masks(
            layer.forward_mask.roll((by, by), (0, 1)),
            None if backward is None else backward.roll(by, 1),
        )


@pytest.mark.parametrize("tokens", [1, 50, 128])
@pytest.mark.parametrize("sizes", [(256, 384), (144, 176)], ids=["128", "16"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mvue", [False, True], ids=["dense-grad", "mvue"])
@pytest.mark.parametrize("method", GEMMS)
def test_a_layer(place, method, mvue, dtype, sizes, tokens):
    module, *_ = masked(place, method, mvue, sizes, dtype)
    x, grad = batch(place, module, tokens)
    router = place.router()
    found, expected = results(module, x, grad, router), exact(module, x, grad)
    assert_right(found, expected, dtype)
    assert_right(results(module, x, grad, None), expected, dtype)
    gemms = GEMMS[method] | ({"wgrad"} if mvue else set())
    sparse = assert_on_kernel(place, router, gemms)
    assert sparse == gemms or sizes == (144, 176)


def test_in_auto_each_product_has_a_reason_and_is_right_on_whatever_it_ran(place):
    module, _, x, grad = masked(place, mvue=True)
    router = place.router("auto", budget_s=300)
    for _ in range(3):
        assert_right(results(module, x, grad, router), exact(module, x, grad), BF16)
    decisions = {used.product.key.gemm: used.decision for used in router.used() if used.decision}
    assert set(decisions) == {"forward", "dgrad", "wgrad"}
    assert {decision.source for decision in decisions.values()} == {"measured"}
    for decision in decisions.values():
        assert min(decision.dense_ms, decision.sparse_ms, decision.pack_ms) > 0


@pytest.mark.filterwarnings(  # Inductor's own; a kernel that fails is a RuntimeWarning
    "ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize(
    ("method", "mvue", "mode"),
    [
        ("bi-mask", True, "default"),
        ("bi-mask", False, "reduce-overhead"),
        ("transposable", True, "reduce-overhead"),
    ],
)
def test_compiled(place, method, mvue, mode):
    """Weights and masks change between the calls, of which CUDA graphs replay all but the first."""
    module, sparsifier, *_ = masked(place, method, mvue)
    router = place.router(reuse=2)
    call = place.compiled(module, mode)
    for k in range(5):
        x, grad = batch(place, module, seed=k)
        torch.compiler.cudagraph_mark_step_begin()
        assert_right(results(module, x, grad, router, call), exact(module, x, grad), BF16)
        if k % 2:
            change(module)
        else:
            move_masks(sparsifier)
    assert assert_on_kernel(place, router, GEMMS[method] | ({"wgrad"} if mvue else set()))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("reuse", [1, 2])
def test_on_a_side_stream_that_is_behind(place, reuse):
    module, _, x, grad = masked(place, mvue=True)
    router = place.router(reuse=reuse)
    before = exact(module, x, grad)
    assert_right(results(module, x, grad, router), before, BF16)
    with place.side_stream():
        there = results(module, x, grad, router)
        change(module)
        changed = results(module, x, grad, router)
    assert_right(there, before, BF16)
    assert_right(changed, exact(module, x, grad), BF16)
    assert_right(results(module, x, grad, router), exact(module, x, grad), BF16)


def test_the_same_bits_again_where_deterministic_algorithms_are_asked_for(
    place, deterministic, monkeypatch
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    module, *_ = masked(place, mvue=True)
    router = place.router()
    x, grad = batch(place, module, 4096 if place.on_gpu else 200)
    first = results(module, x, grad, router)
    assert_right(first, exact(module, x, grad), BF16)
    for _ in range(5):
        for (name, a), (_, b) in zip(
            results(module, x, grad, router).items(), first.items(), strict=True
        ):
            assert torch.equal(a, b), name
    refused = [
        used.decision.reason
        for used in router.used()
        if used.kernel == "reference" and used.decision
    ]
    assert all("gives other bits" in reason for reason in refused)


@pytest.mark.parametrize("method", ["bi-mask", "transposable"])
def test_captured_by_hand(place, method):
    """A replay reads weights and masks as they are then: sizes that ran before are sparse, and no pack is kept."""
    module, sparsifier, x, grad = masked(place, method)
    router = place.router(reuse=2)
    x.requires_grad_()

    def step():
        with routing(router):
            y = module(x)
        return y, *torch.autograd.grad(y, (x, module.weight, module.bias), grad)

    replay = place.captured(step)
    calls = sum(used.calls for used in router.used())
    for k in range(4):
        with torch.no_grad():
            x.copy_(place.random(*x.shape, seed=k))
        found = [tensor.detach().clone() for tensor in replay()]
        expected = exact(module, x.detach(), grad)
        names = ("y", "dx", "weight", "bias")
        assert_right(dict(zip(names, found, strict=True)), dict(expected.items()), BF16)
        change(module)
        if k:
            move_masks(sparsifier)
    assert assert_on_kernel(place, router, GEMMS[method]) == GEMMS[method]
    assert (sum(used.calls for used in router.used()) == calls) == place.on_gpu, (
        "a replay calls no router"
    )


def test_memory_of_packs_is_let_go(place, monkeypatch):
    module, _, x, grad = masked(place, mvue=True, sizes=(1024, 512))
    router = place.router(reuse=2)
    results(module, x, grad, router)
    packs = []
    pack = type(place.kernel).pack

    def recorded(kernel, matrix):
        packed = pack(kernel, matrix)
        packs.append(weakref.ref(packed))
        return packed

    # Of the class: an algorithm that was found is a kernel of its own.
    monkeypatch.setattr(type(place.kernel), "pack", recorded)
    change(module)
    results(module, x, grad, router)
    results(module, x, grad, router)

    def alive():
        gc.collect()
        return sum(reference() is not None for reference in packs)

    assert (len(packs), alive()) == (4, 2), (
        "those of the weight, forward and dgrad; each E(dY) has one that goes"
    )
    before = torch.cuda.memory_allocated() if place.on_gpu else 0
    router.release()
    assert alive() == 0
    if place.on_gpu:
        assert before - torch.cuda.memory_allocated() >= 2 * module.weight.numel() * 2 * 9 // 16
