"""Low-rank adapters on N:M weights: the masked delta, and which adapters of a model would break N:M when merged."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.functional import is_nm
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.functional.select import masked
from lightning_nm.nn.layer.names import plain_name
from lightning_nm.nn.layer.sharding import is_sharded


class KeepsMask(nn.Module):
    """Mixed into a module with a low-rank adapter whose delta is masked: merging keeps the zeros of the base weight."""

    nm_mask: Tensor
    """Bool, of the base weight's shape: its nonzeros."""


def masked_delta(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, scaling: float) -> Tensor:
    r""":math:`y = s \, x (M \odot (B A))^T`, without keeping a tensor of the weight's shape for the backward pass.

    With G = dY^T X, the gradients are :math:`dA = s \, B^T (M \odot G)`, :math:`dB = s \, (M \odot G) A^T` and
    :math:`dX = s \, dY (M \odot (B A))`. B A is made again in the backward pass.

    Args:
        x: ``[..., in]``, floating point; under autocast it is cast, and the delta is after it was made.
        a: A, ``[rank, in]``.
        b: B, ``[out, rank]``, of the dtype of A.
        mask: M, bool ``[out, in]``.
        scaling: s.

    Returns:
        ``[..., out]`` in the dtype that ``F.linear`` would return.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        y = _MaskedDelta.apply(x.reshape(-1, x.shape[-1]), a, b, mask, scaling)
        return y.view(*x.shape[:-1], y.shape[-1])


def _delta(a: Tensor, b: Tensor, mask: Tensor, scaling: float) -> Tensor:
    return masked((b @ a) * scaling, mask)


class _MaskedDelta(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, mask: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(x, a, b, mask)
        ctx.scaling = scaling
        return F.linear(x, _delta(a, b, mask, scaling).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        x, a, b, mask = ctx.saved_tensors
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _delta(a, b, mask, ctx.scaling).to(x.dtype)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grad_delta = masked((grad.t() @ x).to(a.dtype), mask) * ctx.scaling
            grad_a, grad_b = b.t() @ grad_delta, grad_delta @ a.t()
        return grad_x, grad_a, grad_b, None, None


def is_low_rank(module: nn.Module) -> bool:
    """Whether a module holds low-rank adapters, by the names of its parts."""
    return any(name.startswith("lora_") for name, _ in module.named_children())


def warn_of_adapters(model: nn.Module, patterns: Sequence[NMPattern]) -> None:
    """Warn of base weights that are N:M by one of the patterns, and would not be with their adapters merged."""
    found = [
        plain_name(name)
        for name, module in model.named_modules()
        if _breaks_when_merged(module, patterns)
    ]
    if found:
        shown = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
        fault = f"low-rank adapters lie on N:M weights, which will not be N:M once they are merged: {shown}"
        warnings.warn(
            f"{fault}. Call lightning_nm.integrations.peft.mask_adapters(model) before training",
            stacklevel=3,
        )


def _breaks_when_merged(module: Any, patterns: Sequence[NMPattern]) -> bool:
    if not is_low_rank(module) or isinstance(module, KeepsMask):
        return False
    weight = getattr(getattr(module, "base_layer", None), "weight", None)
    if (
        not isinstance(weight, Tensor)
        or is_sharded(weight)
        or weight.dim() < 2
        or not weight.is_floating_point()
    ):
        return False
    rows = weight.detach().t() if getattr(module, "fan_in_fan_out", False) else weight.detach()
    return any(
        rows.shape[1] % p.m == 0 and is_nm(rows, p, dim=1) and bool(rows.any()) for p in patterns
    )
