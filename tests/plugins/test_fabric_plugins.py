"""The precision plugins in Fabric."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.kernels import router as router_module
from lightning_nm.plugins import fabric as fabric_plugins
from tests.support.mlp import plugin


def fabric_of(made):
    return Fabric(accelerator="cpu", devices=1, plugins=[made])


def linear(made):
    """A Fabric with this plugin, and a masked layer that it set up."""
    module, fabric = nn.Linear(32, 64), fabric_of(made)
    NMSparsifier(module, "2:4", "bi-mask", skip_first_last=False).attach()
    return fabric, fabric.setup(module)


@pytest.mark.parametrize(
    ("cls", "args", "dtype"),
    [
        (fabric_plugins.NMPrecision, (), torch.float32),
        (fabric_plugins.NMMixedPrecision, ("bf16-mixed",), torch.bfloat16),
        (fabric_plugins.NMHalfPrecision, ("bf16-true",), torch.bfloat16),
    ],
)
def test_fabric(cls, args, dtype):
    made = plugin(cls, *args)
    fabric = fabric_of(made)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    model, optimizer = fabric.setup(module, optimizer)
    sparsifier = NMSparsifier(module, "2:4", "bi-mask", "mvue", skip_first_last=False).attach()
    sparsifier.register(optimizer.optimizer)
    x, losses = torch.randn(16, 32), []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(x).float() - x).square().mean()
        fabric.backward(loss, model=model)
        sparsifier.before_step(optimizer.optimizer)
        optimizer.step()
        sparsifier.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    used = made.router.used()
    assert {(each.product.key.dtype, each.kernel) for each in used} == {(dtype, "simulated")}


def test_fabric_without_masked_layers():
    fabric = fabric_of(plugin(fabric_plugins.NMPrecision))
    model = fabric.setup(nn.Linear(32, 64))
    loss = model(torch.randn(8, 32)).sum()
    with pytest.raises(RuntimeError, match="Linear has none"):
        fabric.backward(loss)


def test_fabric_with_two_models_of_which_one_is_masked():
    made = plugin(fabric_plugins.NMPrecision)
    fabric, first = linear(made)
    second = fabric.setup(nn.Linear(64, 8))
    fabric.backward(second(first(torch.randn(8, 32))).sum())
    calls = len(made.router.used())
    fabric.setup(nn.Linear(2, 2))
    assert len(made.router.used()) == calls > 0


def test_a_backward_pass_that_fails_in_fabric_leaves_no_router_active():
    def fail(grad):
        raise RuntimeError("out of luck")

    fabric, model = linear(plugin(fabric_plugins.NMPrecision))
    y = model(torch.randn(8, 32))
    y.register_hook(fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        fabric.backward(y.sum())
    assert router_module.active() is None


def test_the_trainers_plugin_in_fabric_says_where_fabrics_is():
    with pytest.raises(TypeError, match=r"lightning_nm.plugins.fabric"):
        fabric_of(plugin()).setup(nn.Linear(32, 64))
