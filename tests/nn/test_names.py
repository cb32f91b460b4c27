"""Layers inside wrappers are called, found, saved and random as without them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)

from lightning_nm import NMSparsifier
from lightning_nm.callbacks.tables import layer_table
from lightning_nm.commands.verify import main as verify

checkpointed = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
WRAPPERS = {
    "nothing": lambda module: module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "checkpointed": checkpointed,
    "both": lambda module: torch.compile(checkpointed(module), backend="eager"),
}
NAMES = ["block.0", "block.2", "last"]


def wrapped(how, place):
    torch.manual_seed(0)
    block, last = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)), nn.Linear(16, 16)
    wrap = WRAPPERS[how]
    if place == "block":
        block = wrap(block)
    if place == "layers":
        block = nn.Sequential(
            *(wrap(part) if isinstance(part, nn.Linear) else part for part in block)
        )
        last = wrap(last)
    model = nn.Sequential()
    model.add_module("block", block)
    model.add_module("last", last)
    return wrap(model) if place == "model" else model


def attach(model, method="transposable", **options):
    options = {"skip_first_last": False, "grad_snr_every": 0, **options}
    return NMSparsifier(model, "2:4", method, "mvue", **options).attach()


def train(model, sparsifier, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("how", "place"),
    [
        ("compiled", "layers"),
        *(("checkpointed", place) for place in ("block", "layers", "model")),
        *(slow("compiled", place) for place in ("block", "model")),
        *(slow("both", place) for place in ("block", "layers", "model")),
    ],
)
def test_wrapped_layers_train_as_unwrapped_ones(how, place, tmp_path):
    torch.compiler.reset()
    results = []
    plain, model = wrapped("nothing", place), wrapped(how, place)
    expected, sparsifier = attach(plain), attach(model)
    assert list(sparsifier.layers) == NAMES
    train(plain, expected, range(3))
    train(model, sparsifier, range(3))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)  # the noise depends on the names

    path = str(tmp_path / "saved.ckpt")
    torch.save(
        {
            "state_dict": model.state_dict(),
            "callbacks": {"NMSparsityCallback": sparsifier.state_dict()},
        },
        path,
    )
    assert verify([path]) == 0

    # Either state goes on in the other model.
    for source, part, target in (
        (model, sparsifier, wrapped("nothing", place)),
        (plain, expected, wrapped(how, place)),
    ):
        with torch.no_grad():
            for parameter, value in zip(
                target.parameters(), source.state_dict().values(), strict=True
            ):
                parameter.copy_(value)
        resumed = attach(target)
        resumed.load_state_dict(part.state_dict())
        assert torch.equal(next(target.parameters()), next(source.parameters()))
        train(target, resumed, range(3, 5))
        results.append(list(target.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_globs_find_wrapped_layers(how):
    for include in ("block.*", "block._orig_mod.*", "block._checkpoint_wrapped_module.*"):
        assert list(attach(wrapped(how, "block"), include=include).layers) == NAMES[:2]
    part = attach(wrapped(how, "block"), include=["block.2"], exclude="last")
    assert list(part.layers) == ["block.2"]
    shapes = dict(
        zip(layer_table(part).columns[0]._cells, layer_table(part).columns[1]._cells, strict=True)
    )
    assert shapes == {"block.0": "32x16", "block.2": "16x32", "last": "16x16"}
