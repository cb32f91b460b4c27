"""Low-rank adapters of peft on N:M weights: the masked delta, and which would break N:M when merged."""

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

_MOST_SHOWN = 8  # modules that the warning names


class KeepsMask(nn.Module):
    """Mixed into a module with a low-rank adapter whose delta is masked: merging keeps the zeros of the base weight.

    Example:
        >>> class Masked(KeepsMask, nn.Linear):
        ...     pass
        >>> module = Masked(4, 2)
        >>> module.nm_mask = module.weight != 0
        >>> module.nm_mask.shape
        torch.Size([2, 4])
    """

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
    # Float64 is left alone, as autocast leaves it.
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        x_ti = x.reshape(-1, x.shape[-1])
        y_to = _MaskedDelta.apply(x_ti, a, b, mask, scaling)
        return y_to.view(*x.shape[:-1], y_to.shape[-1])


def _delta(a_ri: Tensor, b_or: Tensor, mask_oi: Tensor, scaling: float) -> Tensor:
    """Return the masked change of the base weight, ``[out, in]``."""
    return masked((b_or @ a_ri) * scaling, mask_oi)


class _MaskedDelta(torch.autograd.Function):
    """The product with the delta, which is made twice instead of saved.

    Letters name dimensions: t tokens, i inputs, o outputs, r rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ti: Tensor, a_ri: Tensor, b_or: Tensor, mask_oi: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x_ti, a_ri, b_or, mask_oi)
        ctx.scaling = scaling
        # A and B keep their own dtype, often float32, until their product is made. The delta has no name of its own
        # in that dtype: its memory is given back before the product.
        return F.linear(x_ti, _delta(a_ri, b_or, mask_oi, scaling).to(x_ti.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy_to,) = grads
        x_ti, a_ri, b_or, mask_oi = ctx.saved_tensors
        needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        dx_ti = da_ri = db_or = None
        if needs_x:
            dx_ti = dy_to @ _delta(a_ri, b_or, mask_oi, ctx.scaling).to(x_ti.dtype)
        if needs_a or needs_b:
            # The gradient of the unmasked product B A.
            grad_oi = (dy_to.t() @ x_ti).to(a_ri.dtype)
            grad_oi = masked(grad_oi, mask_oi)
            grad_oi = grad_oi * ctx.scaling
            da_ri = b_or.t() @ grad_oi
            db_or = grad_oi @ a_ri.t()
        return dx_ti, da_ri, db_or, None, None


def is_low_rank(module: nn.Module) -> bool:
    """Whether a module holds low-rank adapters, by the names of its parts."""
    # peft calls them lora_A, lora_B, lora_embedding_A and so on.
    return any(name.startswith("lora_") for name, _ in module.named_children())


def warn_of_adapters(model: nn.Module, patterns: Sequence[NMPattern]) -> None:
    """Warn of base weights that are N:M by one of the patterns, and would not be with their adapters merged."""
    found = []
    for name, module in model.named_modules():
        if _breaks_when_merged(module, patterns):
            found.append(plain_name(name))
    if not found:
        return
    shown = ", ".join(found[:_MOST_SHOWN])
    if len(found) > _MOST_SHOWN:
        shown += f" and {len(found) - _MOST_SHOWN} more"
    warnings.warn(
        f"low-rank adapters lie on N:M weights, which will not be N:M once they are merged: {shown}. "
        "Call lightning_nm.integrations.peft.mask_adapters(model) before training",
        stacklevel=3,  # the attach() of the sparsifier
    )


def _breaks_when_merged(module: Any, patterns: Sequence[NMPattern]) -> bool:
    """Whether merging the adapters of a module would fill the zeros of an N:M base weight."""
    if not is_low_rank(module) or isinstance(module, KeepsMask):
        return False
    base = getattr(module, "base_layer", None)
    weight = getattr(base, "weight", None)
    # No process can look at the blocks of a sharded weight alone.
    if not isinstance(weight, Tensor) or is_sharded(weight):
        return False
    if weight.dim() < 2 or not weight.is_floating_point():
        return False
    rows = weight.detach()
    # peft's name for a base weight [in, out]
    if getattr(module, "fan_in_fan_out", False):
        rows = rows.t()
    return any(_is_sparse(rows, pattern) for pattern in patterns)


def _is_sparse(rows: Tensor, pattern: NMPattern) -> bool:
    """Whether a weight ``[out, in, ...]`` is N:M along its inputs, and not all zeros."""
    if rows.shape[1] % pattern.m != 0:
        return False
    # A weight of zeros is N:M by any pattern, and says nothing.
    return is_nm(rows, pattern, dim=1) and bool(rows.any())
