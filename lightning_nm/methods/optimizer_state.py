"""Reads and moves the optimizer state of one weight, for SGD and the Adam family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.nn.layer import NMLayer, blocks_of
from lightning_nm.nn.weight import gather

SECOND_MOMENTS = frozenset({"exp_avg_sq", "max_exp_avg_sq"})
"""State that scales steps: zero would not be neutral for a regrown entry, the block's mean is. All else starts at 0."""


def step_size(
    layer: NMLayer, optimizer: Optimizer, grad_bm: Tensor, mask_bm: Tensor
) -> Tensor | float:
    r"""How far a unit of gradient moves each entry of a layer's weight in the long run, by the state of its optimizer.

    SGD: :math:`\eta = lr (1 - d) / (1 - \mu)` with momentum :math:`\mu` and dampening d, what a gradient adds up to in
    the end. The Adam family: :math:`\eta = lr / (\sqrt{h} + \epsilon)`, where
    :math:`h = (\beta_2 v + (1 - \beta_2) G^2) / c` is the preconditioner of the coming step, c the correction of its
    bias; with AMSGrad :math:`h = \max(u, \beta_2 v + (1 - \beta_2) G^2) / c` with the maximum u. A pruned entry takes
    the mean of h over its block's kept entries, which it starts from when it is regrown, but at least its own
    :math:`G^2`: it is not expected to move further than the learning rate. Weight decay is no part of it.

    Args:
        layer: The layer.
        optimizer: The optimizer of its weight.
        grad_bm: The complete dense gradient of the coming step, in blocks ``[B, M]``.
        mask_bm: The kept entries, bool ``[B, M]``.

    Returns:
        ``[B, M]``, or a number where all entries have the same.
    """
    group = group_of(layer, optimizer)
    state = optimizer.state.get(layer.param, {})
    # torch also takes a tensor for it.
    rate = float(group["lr"])
    if not is_adam_like(optimizer, group, state):
        momentum = float(group.get("momentum") or 0)
        # At momentum 1 a gradient adds up without end: the learning rate alone is taken.
        if momentum < 1:
            rate *= (1 - float(group.get("dampening") or 0)) / (1 - momentum)
        return rate
    beta = float(group["betas"][1])
    coming = float(state.get("step", 0)) + 1
    if isinstance(optimizer, torch.optim.RAdam):
        rectified = _rectification(beta, coming)
        if rectified is None:
            # In its first steps RAdam goes by the first moment alone.
            return rate
        rate *= rectified
    square = grad_bm.square()
    second = (1 - beta) * square
    if "exp_avg_sq" in state:
        second = beta * blocks_of(layer, gather(state["exp_avg_sq"])).to(second.dtype) + second
    if "max_exp_avg_sq" in state:
        # AMSGrad's, which the coming gradient may still raise.
        largest = blocks_of(layer, gather(state["max_exp_avg_sq"])).to(second.dtype)
        second = torch.maximum(largest, second)
    second /= 1 - beta**coming
    # Of kept entries alone: the state of pruned ones is zero, and would pull the mean down.
    mean = torch.where(mask_bm, second, 0).sum(1, keepdim=True) / mask_bm.sum(1, keepdim=True)
    second = torch.where(mask_bm, second, torch.maximum(mean, square))
    return rate / (second.sqrt_() + group["eps"])


def group_of(layer: NMLayer, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's group of a layer's weight; a ``RuntimeError`` if there is none."""
    parameter = layer.view.optimizer_param
    for group in optimizer.param_groups:
        # By identity: `in` would compare the values of tensors.
        for held in group["params"]:
            if held is parameter:
                return group
    raise RuntimeError(
        f"a masked weight of shape {tuple(parameter.shape)} is not in {type(optimizer).__name__} any more: it was "
        "replaced by another parameter; change weights in place, or give the optimizer the new parameter"
    )


def coupled_decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """The weight decay that Adam adds to the gradient; AdamW's is apart from it."""
    # In newer versions of torch Adam takes this key, too.
    if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
        return 0.0
    return float(group["weight_decay"])


def will_be_skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer is about to skip a step with infinite gradients, which runs its hooks all the same."""
    # A GradScaler sets it on optimizers that unscale by themselves, as fused ones do.
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf)


def moment_correction(group: Mapping[str, Any], state: Mapping[str, Any]) -> float:
    r"""What corrects Adam's second moment after its steps so far: :math:`1 - \beta_2^t`, or 1 before the first."""
    steps = float(state.get("step", 0))
    return 1 - float(group["betas"][1]) ** steps if steps else 1.0


def is_adam_like(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether an optimizer divides by the root of a second moment of every entry, as Adam does."""
    # Adafactor's eps is a pair. Adamax has both settings, but divides by a maximum. Before the first step there is no
    # state to look at.
    numbers = "betas" in group and isinstance(group.get("eps"), (int, float))
    return (
        numbers
        and (not state or "exp_avg_sq" in state)
        and not isinstance(optimizer, torch.optim.Adamax)
    )


def _rectification(beta: float, step: float) -> float | None:
    """RAdam's factor (Liu et al., arXiv 1908.03265), ``None`` while it does not precondition."""
    # The paper's rho of infinitely many steps and rho_t. torch rectifies above 5, the paper above 4.
    limit = 2 / (1 - beta) - 1
    length = limit - 2 * step * beta**step / (1 - beta**step)
    if length <= 5:
        return None
    return ((length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)) ** 0.5


def entry_states(layer: NMLayer, optimizer: Optimizer) -> dict[str, Tensor]:
    """The tensors with one number for each entry of the weight, by name; a ValueError names any other state."""
    weight = layer.param
    found = {}
    for key, value in optimizer.state.get(weight, {}).items():
        if isinstance(value, Tensor):
            if value.shape == weight.shape and value.is_floating_point():
                found[key] = value
                continue
            # A single number, such as a count of steps, belongs to no entry.
            is_unknown = value.numel() > 1
            kept = f"{value.dtype} of shape {tuple(value.shape)} for a weight of shape {tuple(weight.shape)}"
        else:
            # Numbers, None and empty containers say nothing of entries.
            is_unknown = isinstance(value, (list, tuple, dict)) and bool(value)
            kept = f"a {type(value).__name__}"
        if is_unknown:
            raise unsupported(layer, optimizer, f"keeps '{key}' as {kept}")
    return found


def unsupported(layer: NMLayer, optimizer: Optimizer, why: str) -> ValueError:
    """The error of an optimizer for a method that exchanges entries."""
    return ValueError(
        f"{type(optimizer).__name__} {why} (layer '{layer.name}'), so the state of pruned and regrown entries cannot "
        "be set: use SGD, Adam, AdamW, NAdam or RAdam, or another method, such as 'asp'"
    )
