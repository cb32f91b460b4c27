"""Routed layers in compiled graphs, second passes, copies and other processes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_nm import NMSparsifier
from lightning_nm.kernels import router as router_module
from lightning_nm.kernels import routing
from lightning_nm.kernels.api import lookup
from tests.support.kinds import held_tensors, make
from tests.support.routed import (
    METHODS,
    assert_equal,
    attach,
    compare,
    gradients,
    masked,
    ran,
    simulated,
)


def two_layers(**options):
    """In float64, where no rounding moves a draw."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).double()
    attach(module, **options)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "estimator"), [("bi-mask", "mvue"), ("bi-mask", None), ("scaled-mask", "mvue")]
)
def test_compiled_code_calls_the_same_kernels(method, estimator):
    module = two_layers(method=METHODS[method](), estimator=estimator)
    x = torch.randn(24, 32, dtype=torch.float64)
    router = simulated()
    eager = gradients(module, x, router)
    before = {used.product: used.calls for used in router.used()}
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, x, router), eager)
    after = {used.product: used.calls for used in router.used()}
    assert after == {key: 2 * calls for key, calls in before.items()}
    # Without the router, and with another number of tokens.
    assert_equal(gradients(compiled, x, None), gradients(module, x, None))
    for tokens in (16, 40):
        x = torch.randn(tokens, 32, dtype=torch.float64)
        assert_equal(gradients(compiled, x, router), gradients(module, x, router))


@pytest.mark.slow
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
    module, x = masked(estimator=estimator)
    (layer,) = module.nm_layers.values()
    router = simulated()
    weight, bias, tensors = module.weight.detach(), module.bias.detach(), held_tensors(layer)
    ops, handles = torch.ops.lightning_nm, (layer.handle_tensor, router.handle)
    for forward in ((bias, tensors, True), (None, tensors, False)):
        torch.library.opcheck(ops.forward_gemm, (x, weight, *forward, 64, [], *handles))
    layer.progress.estimating = False  # every call draws other noise
    grad = torch.randn(6, 64).double()
    for needs in ((True, True), (True, False), (False, True)):
        arguments = (grad, x, weight, layer.noise.words, tensors, *needs, [], *handles)
        torch.library.opcheck(ops.backward_gemms, arguments)


def test_flops_are_those_of_the_dense_products():
    counts = []
    for router in (None, simulated()):
        module, x = make("linear-3d-no-bias")
        options = {"skip_first_last": False, "grad_snr_every": 0}
        NMSparsifier(module, "2:4", "bi-mask", "mvue", **options).attach()
        with FlopCounterMode(display=False) as counter, routing(router):
            module(x.requires_grad_()).square().sum().backward()
        counts.append(counter.get_total_flops())
    assert counts == [3 * 2 * 10 * 32 * 16] * 2


def test_checkpointed_layers_compute_their_forward_again_on_the_same_kernels():
    module, x = two_layers(), torch.randn(16, 32, dtype=torch.float64, requires_grad=True)
    calls = []
    for again in (False, True):
        router = simulated()
        with routing(router):
            y = checkpoint(module, x, use_reentrant=False) if again else module(x)
            y.square().sum().backward()
        of_first = [used for used in router.used() if used.product.layer == "0"]
        calls.append({used.product.key.gemm: used.calls for used in of_first})
        assert ("forward", "simulated") in ran(router)
    assert calls[1] == {**calls[0], "forward": 2}


def test_a_backward_pass_uses_what_its_forward_found():
    module, x = masked()
    router = simulated()
    x.requires_grad_()
    module(x).sum().backward()
    with routing(router):
        y = module(x)
    y.sum().backward()
    assert ("dgrad", "simulated") in ran(router)
    assert router_module.active() is None


@pytest.mark.parametrize("again", [copy.deepcopy, lambda part: pickle.loads(pickle.dumps(part))])
def test_copies_of_layers_and_routers_are_their_own(again):
    module, x = masked()
    copied = again(module)
    (layer,), (other,) = module.nm_layers.values(), copied.nm_layers.values()
    assert lookup(layer.handle, other.handle) == [layer, other]
    assert layer.handle_tensor.shape != other.handle_tensor.shape
    other.set_masks(other.forward_mask.roll(1, 0), other.masks.backward.roll(1, 1))
    router = simulated(reuse=2)
    compare(module, x, router)
    travelled = again(router)
    assert travelled.handle != router.handle
    assert not travelled.used()
    compare(copied, x, travelled)
    assert ran(travelled) == ran(router)
