"""The products of packed layers: by a CPU kernel, or with the dense weight, which is held or unpacked.

Graphs that are compiled call two operators, which look up the weight's layout by handle when a graph runs. Graphs that
are exported unpack the weight by torch's own operators, so that they run without this package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_nm.kernels.api import Convolution, lookup
from lightning_nm.nn.packed.operand import Operand
from lightning_nm.nn.packed.weight import PackedWeight
from lightning_nm.nn.products import CONVOLUTIONS, OPTIONS


def packed_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, rows: tuple[int, int] | None = None
) -> Tensor:
    """``x @ W^T + bias``.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``, or ``[in, out]`` of a transposed layer.
        bias: ``[out]`` or ``None``.
        rows: Use only the output rows ``rows[0]:rows[1]``.

    Raises:
        RuntimeError: In training mode with gradients.
    """
    refuse_training(weight)
    chosen = slice(None) if rows is None else slice(*rows)
    if bias is not None:
        bias = bias[chosen]
    operand = _operand(x, weight, bias)
    part = None if operand is None else operand.part(rows)
    if operand is None or part is None or x.dim() == 0 or x.shape[-1] != part.layout.depth:
        # torch's own error tells of an input of another size.
        matrix = weight.product_matrix()[chosen]
        y = F.linear(x, matrix, bias)
        _hold_dense(x, weight)
        return y
    x_ti = x.reshape(-1, x.shape[-1])
    out = part.layout.rows
    if torch.compiler.is_compiling():
        first = 0 if rows is None else rows[0]
        y_to = torch.ops.lightning_nm.packed_linear(x_ti, bias, first, out, operand.handle_tensor)
    else:
        y_to = weight.multiply(x_ti, bias, rows)
    return y_to.view(*x.shape[:-1], out)


def packed_conv(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """The convolution of ``x [batch, in, *positions]`` with ``W [out, in / groups, *taps]``.

    Raises:
        RuntimeError: In training mode with gradients.
    """
    refuse_training(weight)
    operand = _operand(x, weight, bias)
    inputs = weight.shape[1] * groups
    # An image without a batch goes to torch, and so does what does not fit, for its error. Kernels know two dimensions.
    is_batch = x.dim() == weight.dim() <= 4 and x.shape[1] == inputs
    if operand is None or not is_batch:
        matrix = weight.product_matrix().view(weight.shape)
        convolve = CONVOLUTIONS[weight.dim() - 3]
        y = convolve(x, matrix, bias, stride, padding, dilation, groups)
        _hold_dense(x, weight)
        return y
    # A convolution in one dimension is one in two, over images of height 1.
    is_1d = weight.dim() == 3
    taps = [1, *weight.shape[2:]] if is_1d else list(weight.shape[2:])
    image = x.unsqueeze(2) if is_1d else x
    if is_1d:
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    geometry = [*stride, *padding, *dilation, groups, weight.shape[0], *taps]
    if torch.compiler.is_compiling():
        y = torch.ops.lightning_nm.packed_conv(image, bias, geometry, operand.handle_tensor)
    else:
        y = _convolve(weight, image, bias, geometry)
    return y.squeeze(2) if is_1d else y


def packed_embedding(input: Tensor, weight: PackedWeight) -> Tensor:
    """Rows of a matrix in int8, in the dtype of the weight that it stands for: ``integers[i] * scales[i]``."""
    refuse_training(weight)
    values, scales = weight.values, weight.scales
    assert values is not None
    assert scales is not None
    rows = values.squeeze(-1)[input].float() * scales[input].unsqueeze(-1)
    return rows.to(weight.dtype)


def refuse_training(weight: PackedWeight) -> None:
    """Refuse to train beside a weight that cannot be trained."""
    if weight.training and torch.is_grad_enabled():
        raise training_error(weight)


def training_error(weight: PackedWeight) -> RuntimeError:
    """What a training that meets a packed weight ends with."""
    return RuntimeError(
        f"'{weight.name}' is packed and cannot be trained: call model.eval() to run the model; to train it, load "
        "lightning_nm.unpacked_state_dict(model) into a model that is not packed"
    )


def _hold_dense(x: Tensor, weight: PackedWeight) -> None:
    """In ``"auto"``, hold the dense weight after a product that the kernel cannot make, unless it was traced."""
    if torch.compiler.is_compiling() or _exporting() or _is_fake(x):
        return
    if weight.kernels == "auto" and weight.operand is not None and x.numel():
        weight.hold_dense()


def _exporting() -> bool:
    # torch 2.6 has no such function.
    is_exporting = getattr(torch.compiler, "is_exporting", None)
    return is_exporting is not None and bool(is_exporting())


def _is_fake(x: Tensor) -> bool:
    return type(x) not in (Tensor, torch.nn.Parameter)


def _operand(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Operand | None:
    """The layout by which a kernel can make a product of `x`; ``None`` if the weight is to be unpacked."""
    if weight.operand is None or _exporting():
        return None
    if _is_fake(x) and not torch.compiler.is_compiling():
        return None
    if x.device.type != "cpu" or x.dtype != weight.dtype or torch.is_autocast_enabled("cpu"):
        return None
    # Kernels have no backward pass.
    differentiable = x.requires_grad or (bias is not None and bias.requires_grad)
    if differentiable and torch.is_grad_enabled():
        return None
    return weight.operand


@torch.library.custom_op("lightning_nm::packed_linear", **OPTIONS)
def _packed_linear(x: Tensor, bias: Tensor | None, first: int, out: int, tag: Tensor) -> Tensor:
    weight: PackedWeight = lookup(tag.shape[0])
    return weight.multiply(x, bias, (first, first + out))


@_packed_linear.register_fake
def _(x: Tensor, bias: Tensor | None, first: int, out: int, tag: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], out)


@torch.library.custom_op("lightning_nm::packed_conv", **OPTIONS)
def _packed_conv(x: Tensor, bias: Tensor | None, geometry: Sequence[int], tag: Tensor) -> Tensor:
    return _convolve(lookup(tag.shape[0]), x, bias, geometry)


@_packed_conv.register_fake
def _(x: Tensor, bias: Tensor | None, geometry: Sequence[int], tag: Tensor) -> Tensor:
    conv = _convolution(x, geometry)
    size = (x.shape[0], conv.outputs, *conv.positions)
    return x.new_empty(size).contiguous(memory_format=_memory_format(x))


def _convolve(
    weight: PackedWeight, x: Tensor, bias: Tensor | None, geometry: Sequence[int]
) -> Tensor:
    """The convolution of ``x [images, in, height, width]``, in its memory format."""
    y = weight.multiply(x, bias, conv=_convolution(x, geometry))
    return y.contiguous(memory_format=_memory_format(x))


def _memory_format(x: Tensor) -> torch.memory_format:
    # A tensor of one channel is contiguous in both orders.
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    return torch.contiguous_format


def _convolution(x: Tensor, geometry: Sequence[int]) -> Convolution:
    """The geometry for ``x [images, in, height, width]``."""
    stride, padding, dilation = (tuple(geometry[axis : axis + 2]) for axis in (0, 2, 4))
    groups, out, *taps = geometry[6:]
    size = tuple(x.shape[2:])
    return Convolution(x.shape[1], out, size, tuple(taps), stride, padding, dilation, groups)
