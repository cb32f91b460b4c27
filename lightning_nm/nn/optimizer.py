"""What an optimizer keeps for one weight: its effective step, and the state of entries that come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.nn.shards import gather, held, part

SIZES = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "exp_inf", "exp_avg_sq_hat", "step_size"}
)
"""State that scales steps: zero would not be neutral for a regrown entry, the block's mean is. All else starts at 0."""


@dataclass(frozen=True)
class StepSize:
    r"""How far a unit of gradient moves each entry, in the long run.

    :math:`\eta = s` without a second moment; with one, :math:`\eta = s / (\sqrt{(a v + b G^2) / c} + \epsilon)`, the
    preconditioner of the coming step. A pruned entry has no second moment: it takes the mean over its block's kept
    entries, which is what it starts from when it is regrown, but at least its own :math:`G^2`, so that it is not
    expected to move further than s.

    Args:
        scale: s.
        moment: v, of the weight's shape; ``None`` for zeros.
        keep: a.
        take: b.
        correction: c.
        epsilon: Added to the root; ``None`` when steps are not preconditioned.
    """

    scale: float
    moment: Tensor | None = None
    keep: float = 0.0
    take: float = 1.0
    correction: float = 1.0
    epsilon: float | None = None
    maximize: bool = False
    """Whether the optimizer climbs: the gradient of the loss is then the negative one."""

    def of_blocks(self, moment: Tensor | None, grad: Tensor, mask: Tensor) -> Tensor | float:
        """The step size of blocks ``[B, M]``, given their part of ``moment``."""
        if self.epsilon is None:
            return self.scale
        square = grad.square()
        second = self.take * square if moment is None else self.keep * moment + self.take * square
        second /= self.correction
        mean = torch.where(mask, second, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
        second = torch.where(mask, second, torch.maximum(mean, square))
        return self.scale / (second.sqrt_() + self.epsilon)


def step_size(optimizer: Optimizer, weight: Tensor, mask: Tensor, parameter: Tensor | None = None) -> StepSize:
    r"""Read the effective step size for a weight that holds its complete gradient.

    SGD: :math:`lr (1 - d) / (1 - \mu)` with dampening d. Adam and its kin, RMSprop, Adagrad, Adadelta: the learning
    rate over the root of the second moment. Optimizers that normalise the whole update (Muon, Adafactor), that move by
    given sizes (Rprop), and others with betas: the root mean square of their update over that of the gradient's kept
    entries. Any other optimizer: as SGD. Weight decay is no part of it.

    Args:
        optimizer: The optimizer.
        weight: The weight.
        mask: The forward mask, of the weight's shape.
        parameter: What the optimizer knows the weight by, where processes shard it.
    """
    parameter = weight if parameter is None else parameter
    group = next(group for group in optimizer.param_groups if any(p is parameter for p in group["params"]))
    state = {
        key: gather(value) if isinstance(value, Tensor) else value
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    return replace(_step_size(optimizer, group, state, weight, mask), maximize=bool(group.get("maximize")))


def _step_size(
    optimizer: Optimizer, group: dict[str, Any], state: dict[str, Any], weight: Tensor, mask: Tensor
) -> StepSize:
    rate, done = float(group["lr"]), float(state.get("step", 0))
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):  # torch 2.9 and later
        long = max(weight.shape)
        adjusted = (
            0.2 * long**0.5
            if group["adjust_lr_fn"] == "match_rms_adamw"
            else max(1, weight.shape[0] / weight.shape[1]) ** 0.5
        )
        return _matched(rate * adjusted / long**0.5, weight, mask)  # an orthogonal matrix's entries
    if isinstance(optimizer, torch.optim.Adafactor):
        size = float(weight.detach().square().mean().sqrt())
        return _matched(min(rate, (done + 1) ** -0.5) * max(group["eps"][1] or 0, size), weight, mask)
    if isinstance(optimizer, torch.optim.Rprop):
        return _matched(float(state["step_size"][mask].mean()) if state else rate, weight, mask)
    if isinstance(optimizer, torch.optim.Adadelta):
        moved = float(state["acc_delta"][mask].mean()) if state else 0.0
        rho, epsilon = group["rho"], group["eps"]
        return StepSize(rate * (moved + epsilon) ** 0.5, state.get("square_avg"), rho, 1 - rho, 1.0, epsilon**0.5)
    if isinstance(optimizer, torch.optim.Adagrad):
        rate /= 1 + done * group["lr_decay"]
        return StepSize(rate, state.get("sum"), 1.0, 1.0, 1.0, group["eps"])
    betas = group.get("betas")
    if betas is not None and isinstance(group.get("eps"), (int, float)) and (not state or "exp_avg_sq" in state):
        beta = float(betas[1])
        if isinstance(optimizer, torch.optim.RAdam):
            rectified = _rectification(beta, done + 1)
            if rectified is None:
                return StepSize(rate)
            rate *= rectified
        correction = 1 - beta ** (done + 1)
        if "max_exp_avg_sq" in state:  # AMSGrad
            return StepSize(rate, state["max_exp_avg_sq"], 1.0, 0.0, correction, group["eps"])
        return StepSize(rate, state.get("exp_avg_sq"), beta, 1 - beta, correction, group["eps"])
    if betas is not None:
        return _matched(rate, weight, mask)
    momentum = float(group.get("momentum") or 0)
    if momentum < 1:
        rate *= (1 - float(group.get("dampening") or 0)) / (1 - momentum)  # what a gradient adds up to in the end
    if isinstance(optimizer, torch.optim.RMSprop):
        return StepSize(rate, state.get("square_avg"), group["alpha"], 1 - group["alpha"], 1.0, group["eps"])
    return StepSize(rate)


def _rectification(beta: float, step: float) -> float | None:
    """RAdam's factor (Liu et al., arXiv 1908.03265), ``None`` while it does not precondition."""
    limit = 2 / (1 - beta) - 1
    length = limit - 2 * step * beta**step / (1 - beta**step)
    if length <= 5:
        return None
    return ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)) ** 0.5


def _matched(size: float, weight: Tensor, mask: Tensor) -> StepSize:
    """The uniform step under which the gradient of kept entries makes an update of this root mean square."""
    assert weight.grad is not None
    mean = torch.where(mask, weight.grad, 0).square().sum(dtype=torch.float64) / mask.sum()
    return StepSize(size / max(float(mean) ** 0.5, torch.finfo(torch.float32).tiny))


def entry_states(optimizer: Optimizer, weight: Tensor, layer: str) -> Iterator[tuple[str, Tensor]]:
    """The optimizer's tensors that hold one number for each entry of the weight, with their names.

    Numbers and factored statistics (Adafactor's rows and columns) belong to no entry and are left out.

    Raises:
        ValueError: If the optimizer keeps something that cannot be matched to entries, naming it and the layer.
    """
    for key, value in optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor):
            if value.shape == weight.shape and value.is_floating_point():
                yield key, value
                continue
            if value.numel() <= 1 or (value.is_floating_point() and _is_factor(value.shape, weight.shape)):
                continue
            kept = f"'{key}' as {value.dtype} of shape {tuple(value.shape)}"
        elif _holds_tensors(value):
            kept = f"'{key}' as a {type(value).__name__} of tensors"
        else:
            continue
        raise ValueError(_unmatched(optimizer, layer, f"keeps {kept} for a weight of shape {tuple(weight.shape)}"))


def check_optimizer(optimizer: Optimizer, weight: Tensor, layer: str) -> None:
    """Refuse an optimizer whose state is known not to belong to entries.

    Raises:
        ValueError: Naming the optimizer and the layer.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(_unmatched(optimizer, layer, "keeps one history of all parameters together"))
    for _ in entry_states(optimizer, weight, layer):
        pass


def _unmatched(optimizer: Optimizer, layer: str, what: str) -> str:
    return (
        f"{type(optimizer).__name__} {what} (layer '{layer}'), so the state of pruned and regrown entries cannot be "
        "set: use an optimizer whose state has the weight's shape, such as SGD or AdamW, or another method"
    )


def _is_factor(shape: torch.Size, weight: torch.Size) -> bool:
    """Whether the shape is the weight's with axes removed or reduced to 1."""
    if len(shape) == len(weight):
        return all(size in (1, full) for size, full in zip(shape, weight, strict=True)) and shape != weight
    remaining: Iterator[int] = iter(weight)
    return len(shape) < len(weight) and all(any(size == full for full in remaining) for size in shape)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_tensors(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return isinstance(value, Tensor)


@torch.no_grad()
def clear_entries(optimizer: Optimizer, weight: Tensor, pruned: Tensor, layer: str) -> None:
    """Zero the state of the entries under a bool mask."""
    for _, state in entry_states(optimizer, weight, layer):
        held(state).masked_fill_(part(pruned, state), 0)
