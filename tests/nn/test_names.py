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
from lightning_nm.callbacks.tables import layer_rows
from lightning_nm.commands.verify import main as verify

checkpointed = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
compiled = partial(torch.compile, backend="eager")
WRAPPERS = {
    "nothing": lambda module: module,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "both": lambda module: compiled(checkpointed(module)),
}
NAMES = ["block.0", "block.2", "last"]


def wrapped(how, place):
    torch.manual_seed(0)
    parts = [nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)]
    last, wrap = nn.Linear(16, 16), WRAPPERS[how]
    if place == "layers":
        parts, last = [wrap(parts[0]), parts[1], wrap(parts[2])], wrap(last)
    block = nn.Sequential(*parts)
    model = nn.Sequential()
    model.add_module("block", wrap(block) if place == "block" else block)
    model.add_module("last", last)
    return wrap(model) if place == "model" else model


def attach(model, **options):
    options = {"skip_first_last": False, "grad_snr_every": 0, **options}
    return NMSparsifier(model, "2:4", "transposable", "mvue", **options).attach()


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
        *(("checkpointed", place) for place in ("block", "layers", "model")),
        *(slow("compiled", place) for place in ("block", "layers", "model")),
        *(slow("both", place) for place in ("block", "layers", "model")),
    ],
)
def test_wrapped_layers_train_as_unwrapped_ones(how, place, tmp_path):
    torch.compiler.reset()
    plain, model = wrapped("nothing", place), wrapped(how, place)
    expected, sparsifier = attach(plain), attach(model)
    assert list(sparsifier.layers) == NAMES
    train(plain, expected, range(3))
    train(model, sparsifier, range(3))
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)  # the noise depends on the names
    states = {"NMSparsityCallback": sparsifier.state_dict()}
    path = str(tmp_path / "saved.ckpt")
    torch.save({"state_dict": model.state_dict(), "callbacks": states}, path)
    assert verify([path]) == 0

    # Either state goes on in the other model.
    ends = []
    for source, state, target in (
        (model, sparsifier.state_dict(), wrapped("nothing", place)),
        (plain, expected.state_dict(), wrapped(how, place)),
    ):
        values = source.state_dict().values()
        with torch.no_grad():
            for parameter, value in zip(target.parameters(), values, strict=True):
                parameter.copy_(value)
        resumed = attach(target)
        resumed.load_state_dict(state)
        assert torch.equal(next(target.parameters()), next(source.parameters()))
        train(target, resumed, range(3, 5))
        ends.append(list(target.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("how", ["compiled", "checkpointed"])
def test_globs_find_wrapped_layers(how):
    for include in ("block.*", "block._orig_mod.*", "block._checkpoint_wrapped_module.*"):
        assert list(attach(wrapped(how, "block"), include=include).layers) == NAMES[:2]
    part = attach(wrapped(how, "block"), include=["block.2"], exclude="last")
    assert list(part.layers) == ["block.2"]
    shapes = {row[0]: row[1] for row in layer_rows(part)}
    assert shapes == {"block.0": "32x16", "block.2": "16x32", "last": "16x16"}
