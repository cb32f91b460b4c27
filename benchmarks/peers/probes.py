"""The questions, each answered by training a tiny model with a tool."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.tools import Ours, Tool, weight
from lightning_nm.functional import is_nm
from lightning_nm.kernels import Router, routing

STEPS = 8
Probe = Callable[[type[Tool]], bool]


def new_model(seed: int = 0) -> nn.Sequential:
    """A fresh MLP whose first layer all tools can prune."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW, with large steps, so that masks can move."""
    return torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.1)


def train(
    model: nn.Module, tool: Tool, optimizer: torch.optim.Optimizer, steps: range
) -> list[Tensor]:
    """Train on batches that depend on the step alone; the first layer's nonzeros before it and after each step."""
    seen = [weight(model[0]) != 0]  # type: ignore[index]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 32, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.roll(step + 1, 1)[:, :16]).square().mean().backward()
        tool.step(optimizer)
        seen.append(weight(model[0]) != 0)  # type: ignore[index]
    return seen


def _trained(
    kind: type[Tool], steps: int = STEPS
) -> tuple[nn.Sequential, Tool, torch.optim.Optimizer, list[Tensor]]:
    model, tool = new_model(), kind()
    optimizer = new_optimizer(model)  # made before the tool sees the model
    tool.apply(model, optimizer, "2:4")
    return model, tool, optimizer, train(model, tool, optimizer, range(steps))


def _prunes(kind: type[Tool], model: nn.Module, pattern: str) -> bool:
    optimizer, tool = new_optimizer(model), kind()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # some prune in the optimizer's step alone
    try:
        tool.apply(model, optimizer, pattern)
        tool.step(optimizer)
        return is_nm(weight(model[0]), pattern, dim=1)  # type: ignore[index]
    except (
        AssertionError,
        AttributeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        ValueError,
    ):
        return False


def two_of_four(kind: type[Tool]) -> bool:
    """Its own pruning makes a linear layer 2:4."""
    return _prunes(kind, new_model(), "2:4")


def other_patterns(kind: type[Tool]) -> bool:
    """It makes a linear layer 1:8."""
    return _prunes(kind, new_model(), "1:8")


def convolutions(kind: type[Tool]) -> bool:
    """It makes a convolution 2:4 along its input channels, the order of sparse tensor cores."""
    torch.manual_seed(0)
    return _prunes(kind, nn.Sequential(nn.Conv2d(32, 32, 3)), "2:4")


def masks_move(kind: type[Tool]) -> bool:
    """A pruned weight comes back during training, where the tool chooses masks after every step."""
    return returns(_trained(kind)[3])


def returns(seen: Sequence[Tensor]) -> bool:
    """Whether any entry is nonzero after it was zero."""
    return any(bool((later & ~before).any()) for before, later in pairwise(seen))


def optimizer_before(kind: type[Tool]) -> bool:
    """An optimizer that was made before, and has stepped, trains the weights that the layer multiplies by."""
    model = new_model()
    optimizer, tool = new_optimizer(model), kind()
    train(model, Tool(), optimizer, range(1))
    tool.apply(model, optimizer, "2:4")
    before = weight(model[0]).clone()
    try:
        train(model, tool, optimizer, range(1, 3))
    except AssertionError:
        return False
    return not torch.equal(weight(model[0]), before)


def both_directions(kind: type[Tool]) -> bool:
    """After training the weight is 2:4 along its outputs, too, as the input gradient needs it."""
    model, tool = new_model(), Ours("transposable") if kind is Ours else kind()
    optimizer = new_optimizer(model)
    tool.apply(model, optimizer, "2:4")
    train(model, tool, optimizer, range(2))
    return is_nm(weight(model[0]), "2:4", dim=0)


def calibrated(kind: type[Tool]) -> bool:
    """Calibration data decide which weights of a trained model are kept."""
    model = new_model()
    try:
        kind().calibrate(model, [torch.randn(16, 32) for _ in range(4)])
    except NotImplementedError:
        return False
    return is_nm(weight(model[0]), "2:4", dim=1)


def loads_without(kind: type[Tool]) -> bool:
    """The state dict in the middle of training loads into the plain model, strictly, and gives the same outputs."""
    model, *_ = _trained(kind)
    plain, x = new_model(1), torch.randn(4, 32)
    try:
        plain.load_state_dict(model.state_dict())
    except RuntimeError:
        return False
    return torch.equal(plain(x), model(x))


def resumes(kind: type[Tool]) -> bool:
    """A run that was saved, and loaded into new objects, ends with the bits of the run that was not stopped."""
    expected, *_ = _trained(kind, 2 * STEPS)
    model, tool, optimizer, _ = _trained(kind)
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tool": tool.state(),
    }
    saved = copy.deepcopy(state)
    model, tool = new_model(1), kind()
    optimizer = new_optimizer(model)
    tool.load(model, optimizer, "2:4", saved)
    optimizer.load_state_dict(saved["optimizer"])
    train(model, tool, optimizer, range(STEPS, 2 * STEPS))
    return torch.equal(weight(model[0]), weight(expected[0]))


class _Products(TorchDispatchMode):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.dense = shape, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear):
            sizes = {
                tuple(arg.shape)
                for arg in args
                if isinstance(arg, Tensor) and arg.layout == torch.strided
            }
            self.dense |= bool({self.shape, self.shape[::-1]} & sizes)
        return func(*args, **(kwargs or {}))


def sparse_products(kind: type[Tool]) -> bool:
    """On a CPU, forward multiplies by the kept weights alone, not by a dense matrix with zeros."""
    model, *_ = _trained(kind, 1)
    with routing(Router("sparse")) if kind is Ours else nullcontext():
        return not dense_products(model, (64, 32))


def dense_products(model: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether the model's forward multiplies by a dense matrix of this shape."""
    with _Products(shape) as products, torch.no_grad():
        model(torch.randn(64, shape[1]))
    return products.dense


PROBES: dict[str, Probe] = {
    "two-of-four": two_of_four,
    "other-patterns": other_patterns,
    "convolutions": convolutions,
    "masks-move": masks_move,
    "optimizer-before": optimizer_before,
    "loads-without": loads_without,
    "resumes": resumes,
    "both-directions": both_directions,
    "sparse-products": sparse_products,
    "calibrated": calibrated,
}
