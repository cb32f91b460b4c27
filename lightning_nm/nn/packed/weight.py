"""The weight of a packed layer: a module in the place of the dense parameter, which makes its products.

Graphs that are compiled call two operators, which look up the weight by handle when a graph runs. Graphs that are
exported unpack the weight by torch's own operators, so that they run without this package.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.functional.int8 import INT8_DTYPES, dequantise_weight
from lightning_nm.functional.nm_format import PACKED_DTYPES
from lightning_nm.kernels.api import Convolution, GemmKey, HasHandle, attempt, lookup
from lightning_nm.kernels.cpu.int8 import int8_matrix
from lightning_nm.kernels.cpu.layouts import Packed
from lightning_nm.nn.packed.kernel_choice import (
    Budget,
    Kernels,
    choose,
    registry_of,
    return_freed_memory,
)
from lightning_nm.nn.packed.operand import Operand, dense_matrix, lay_out, lay_out_int8
from lightning_nm.nn.packed.tensor import PackedTensor, Role, check_scales, part_names
from lightning_nm.nn.products import CONVOLUTIONS, OPTIONS, plain

_MOST_SIZES = 1 << 12
"""Sizes of products whose choice is remembered."""

_IN_LAYOUT = ("kernel_values", "kernel_index", "kernel_offset")

_PLAIN = (Tensor, nn.Parameter)  # others are fake, as in a trace

_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none

_BECOMING_DENSE = threading.Lock()  # one weight at a time, so that a weight has one dense matrix


class PackedWeight(nn.Module, HasHandle):
    """A weight that is N:M along one axis, as the values of each block and their positions.

    It holds them as they are in files, or, on a CPU with a kernel for it, in the kernel's layout, or the dense weight,
    where that is faster and ``kernels`` is ``"auto"``: always one of the three. The state dict has ``values`` and
    ``positions`` in each case, and ``scales`` if the values are int8.

    Args:
        packed: The tensors, checked.
        name: Key of the weight in the dense state dict, for messages.
        role: The module that it belongs to.
        kernels: ``"auto"``, ``"sparse"`` or ``"reference"``, see :func:`lightning_nm.pack`.
        budget: How long products may be measured in ``"auto"``; the weights of a model share one.

    Attributes:
        operand: The kernel's layout, if it is held.
        scales: Of int8 values, float32 ``[out]``, of experts ``[experts, out]``; they are held next to each of the
            three.
        matrix: The dense weight as products take it, ``[out, in]`` or ``[out, in / groups * taps]``, if it is held.
    """

    values: Tensor | None
    positions: Tensor | None
    scales: Tensor | None
    matrix: Tensor | None

    def __init__(
        self,
        packed: PackedTensor,
        name: str,
        role: Role,
        kernels: Kernels = "auto",
        budget: Budget | None = None,
    ) -> None:
        super().__init__()
        self.budget = budget or Budget()
        self.name, self.role, self.kernels = name, role, kernels
        self.pattern, self.layout = packed.pattern, packed.layout
        self.shape = torch.Size(packed.shape)
        self._take(packed)

    def _take(self, packed: PackedTensor) -> None:
        """Hold a weight of this shape, in its dtype and on its device."""
        self.dtype = packed.dtype
        self.operand: Operand | None = None
        self._choices: dict[Any, tuple[GemmKey, bool]] = {}
        self._drop_layout()
        self.register_buffer("matrix", None, persistent=False)
        self.register_buffer("values", packed.values)
        self.register_buffer("positions", packed.positions)
        self.register_buffer("scales", packed.scales)
        self.lay_out()

    def _drop_layout(self, **changed: Tensor) -> None:
        # A new dict: threads that read the former one find the whole layout there.
        kept = {name: each for name, each in self._buffers.items() if name not in _IN_LAYOUT}
        self._buffers = {**kept, **changed}
        self._non_persistent_buffers_set.difference_update(_IN_LAYOUT)

    def lay_out(self) -> None:
        """Change to the layout of the CPU kernel for this weight; without one, in ``"auto"``, to the dense weight."""
        if self.values is None or self.device.type == "meta" or self.kernels == "reference":
            return
        if self.role == "embedding":  # whose rows are looked up
            return
        # Where blocks lie along the depth of the product.
        along = {"linear": ("plain", "flat"), "transposed": ("transposed",)}
        pattern = self.pattern if self.layout in along.get(self.role, ("flat",)) else None
        convolves = self.role == "convolution"
        if self.is_int8:
            # The scales are those of rows only where blocks lie along the depth. Kernels know two dimensions.
            if self.dim() <= 4 if convolves else pattern is not None:
                self.operand = lay_out_int8(self.packed())
        elif self.device.type == "cpu":
            matrix = self.product_matrix().contiguous()
            self.operand = lay_out(matrix, pattern, convolution=convolves)
        if self.operand is not None:
            # An empty tensor whose size is the handle, by which graphs find this weight.
            self.operand.tag = torch.empty(self.handle, 0, dtype=torch.float32)
            for name, tensor in zip(_IN_LAYOUT, self.operand.tensors, strict=False):
                self.register_buffer(name, tensor, persistent=False)
        elif self.kernels == "auto":
            self.matrix = self.product_matrix().contiguous()
        else:
            return
        self.values = self.positions = None

    def hold_dense(self) -> None:
        """Hold the dense weight instead of the kernel's layout; nothing if there is no layout."""
        with _BECOMING_DENSE:
            if self.operand is None:
                return
            # Not in inference mode: later products may need gradients of their inputs.
            with torch.inference_mode(False), torch.no_grad():
                self._drop_layout(matrix=self.product_matrix())
            self.operand = None
        return_freed_memory()

    def measure(self, tokens: int) -> None:
        """In ``"auto"``, choose for products of so many tokens, and hold the dense weight if that is faster."""
        self.forget()
        operand = self.operand
        if operand is not None and self.kernels == "auto" and not self._takes(operand, tokens)[1]:
            self.hold_dense()

    def forget(self) -> None:
        """Ask again which products the kernel makes; those that were measured are not measured again."""
        self._choices.clear()

    def _takes(
        self, operand: Operand, tokens: int, conv: Convolution | None = None
    ) -> tuple[GemmKey, bool]:
        """The key of a product, and whether the kernel makes it: it can, and is in ``"auto"`` no slower than torch."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        name = operand.layout.rows, tokens, conv, torch.get_num_threads(), deterministic
        found = self._choices.get(name)
        if found is not None:
            return found
        kernel, layout = operand.kernel, operand.layout
        key = GemmKey(
            *("forward", layout.rows, layout.depth, tokens, self.dtype, operand.pattern, "cpu"),
            conv=conv,
        )
        takes, settled = not registry_of(kernel).reason_against(kernel, key), True
        if takes and self.kernels == "auto":
            takes, settled = choose(kernel, key, self.budget, Packed(layout, operand.values))
        found = key, takes
        if settled:
            # Kept, because to make a key takes longer than to multiply one token.
            if len(self._choices) >= _MOST_SIZES:
                self._choices.clear()
            self._choices[name] = found
        return found

    def linear(
        self, x: Tensor, bias: Tensor | None = None, rows: tuple[int, int] | None = None
    ) -> Tensor:
        """``x @ W^T + bias`` for ``x [..., in]``, or the columns of these rows of W.

        Raises:
            RuntimeError: In training mode with gradients.
        """
        self.refuse_training()
        chosen = slice(None) if rows is None else slice(*rows)
        if bias is not None:
            bias = bias[chosen]
        operand = self._operand_for(x, bias)
        part = None if operand is None else operand.part(rows)
        if operand is None or part is None or x.dim() == 0 or x.shape[-1] != part.layout.depth:
            # torch's own error tells of an input of another size.
            y = F.linear(x, self.product_matrix()[chosen], bias)
            self._keep_dense(x)
            return y
        x_ti = x.reshape(-1, x.shape[-1])
        out = part.layout.rows
        if torch.compiler.is_compiling():
            first = 0 if rows is None else rows[0]
            tag = operand.tag
            y_to = torch.ops.lightning_nm.packed_linear(x_ti, bias, first, out, tag)
        else:
            y_to = self.multiply(x_ti, bias, rows)
        return y_to.view(*x.shape[:-1], out)

    def conv(
        self,
        x: Tensor,
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
        self.refuse_training()
        operand = self._operand_for(x, bias)
        # What does not fit goes to torch, for its error. Kernels know two dimensions.
        fits = x.dim() == self.dim() <= 4 and x.shape[1] == self.shape[1] * groups
        if operand is None or not fits:
            convolve = CONVOLUTIONS[self.dim() - 3]
            matrix = self.product_matrix().view(self.shape)
            y = convolve(x, matrix, bias, stride, padding, dilation, groups)
            self._keep_dense(x)
            return y
        # A convolution in one dimension is one in two, over images of height 1.
        is_1d = self.dim() == 3
        taps: tuple[int, ...] = self.shape[2:]
        if is_1d:
            x, taps = x.unsqueeze(2), (1, *taps)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        geometry = [*stride, *padding, *dilation, groups, self.shape[0], *taps]
        if torch.compiler.is_compiling():
            y = torch.ops.lightning_nm.packed_conv(x, bias, geometry, operand.tag)
        else:
            y = _convolve(self, x, bias, geometry)
        return y.squeeze(2) if is_1d else y

    def refuse_training(self) -> None:
        """Refuse to train next to a weight that cannot be trained."""
        if self.training and torch.is_grad_enabled():
            raise self.training_error()

    def training_error(self) -> RuntimeError:
        """What a training that meets this weight ends with."""
        return RuntimeError(
            f"'{self.name}' is packed and cannot be trained: call model.eval() to run the model; to train it, load "
            "lightning_nm.unpacked_state_dict(model) into a model that is not packed"
        )

    def _operand_for(self, x: Tensor, bias: Tensor | None) -> Operand | None:
        """The layout by which a kernel can make a product of `x`; ``None`` if the weight is to be unpacked."""
        if self.operand is None or _exporting():
            return None
        if type(x) not in _PLAIN and not torch.compiler.is_compiling():
            return None
        if x.device.type != "cpu" or x.dtype != self.dtype or torch.is_autocast_enabled("cpu"):
            return None
        # Kernels have no backward pass.
        differentiable = x.requires_grad or (bias is not None and bias.requires_grad)
        if differentiable and torch.is_grad_enabled():
            return None
        return self.operand

    def _keep_dense(self, x: Tensor) -> None:
        """In ``"auto"``, hold the dense weight after a product that the kernel cannot make, unless it was traced."""
        traced = torch.compiler.is_compiling() or _exporting()
        if not traced and type(x) in _PLAIN and self.kernels == "auto" and x.numel():
            self.hold_dense()

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None,
        rows: tuple[int, int] | None = None,
        conv: Convolution | None = None,
    ) -> Tensor:
        """``x W^T + bias`` for ``x [tokens, depth]``, or a convolution: by the kernel, or with the dense matrix.

        In ``"auto"`` that is held from the first product on that is faster with it, or that the kernel cannot make;
        in ``"sparse"`` it is made for each product that the kernel cannot make.
        """

        def dense() -> Tensor:
            if self.kernels == "auto" and x.numel():
                self.hold_dense()
            matrix = self.product_matrix()
            if conv is not None:
                return F.conv2d(x, matrix.view(conv.weight_shape), bias, *conv.arguments)
            return F.linear(x, matrix if rows is None else matrix[slice(*rows)], bias)

        # Read once: another thread may let this weight become dense at any time.
        operand = self.operand
        part = None if operand is None else operand.part(rows)
        if part is None or not x.numel():
            return dense()
        tokens = len(x) * (1 if conv is None else math.prod(conv.positions))
        key, takes = self._takes(part, tokens, conv)
        if not takes:
            return dense()
        registry = registry_of(part.kernel)
        kernel = registry.kernels[part.kernel]
        packed = Packed(part.layout, part.values)

        def sparse() -> Tensor:
            plain_bias = None if bias is None else plain(bias)
            if conv is None:
                return kernel.linear(packed, plain(x), plain_bias)
            return kernel.conv(packed, plain(x), conv, plain_bias)

        # If the kernel fails, the product is made dense, now and in the future.
        return attempt(kernel, key, registry.failures, sparse, dense)

    @property
    def is_int8(self) -> bool:
        """Whether the values are int8."""
        return self.scales is not None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(self.buffers()).device

    @property
    def data(self) -> Tensor:
        """What code that changes weights in place asks for, such as the merging of adapters.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"'{self.name}' is packed, for inference, and cannot be changed in place, as merging an adapter does: load "
            "lightning_nm.unpacked_state_dict(model) into a model that is not packed, and merge there"
        )

    def dim(self) -> int:
        """Axes of the weight."""
        return len(self.shape)

    def numel(self) -> int:
        """Entries of the weight."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return sum(buffer.nbytes for buffer in self.buffers())

    @property
    def dense_nbytes(self) -> int:
        """Bytes of the dense weight."""
        return self.numel() * self.dtype.itemsize

    @property
    def form(self) -> str:
        """What is held: ``"packed"``, ``"dense"``, or the layout of the kernel with this name; and whether of int8."""
        # Read first: another thread sets the matrix before it takes the operand away.
        operand = self.operand
        if self.matrix is not None:
            return "dense, of int8" if self.is_int8 else "dense"
        if operand is not None:
            return operand.kernel
        return "packed int8" if self.is_int8 else "packed"

    def packed(self) -> PackedTensor:
        """The weight as files hold it; it is packed again if it is in a kernel's layout."""
        if self.values is None or self.positions is None:
            return PackedTensor.of(
                *(self.unpack(), self.pattern, self.layout), int8=self.is_int8, scales=self.scales
            )
        return self._with_tensors(self.values, self.positions, self.scales)

    def _with_tensors(
        self, values: Tensor, positions: Tensor, scales: Tensor | None = None
    ) -> PackedTensor:
        """A weight as this one with other tensors."""
        dense_dtype = None if scales is None else self.dtype
        kind = self.pattern, self.layout, tuple(self.shape)
        return PackedTensor(values, positions, *kind, scales, dense_dtype)

    def unpack(self) -> Tensor:
        """The dense weight, a new tensor."""
        if self.values is not None:
            return self.packed().unpack()
        matrix = self.product_matrix()
        if self.role == "transposed":
            return matrix.t().clone(memory_format=torch.contiguous_format)
        return (matrix if self.matrix is None else matrix.clone()).view(self.shape)

    def product_matrix(self) -> Tensor:
        """The dense weight as products take it: the one that is held, or a new tensor."""
        buffers = self._buffers  # once: another thread may let the weight become dense
        matrix = buffers["matrix"]
        if matrix is not None:
            return matrix
        if buffers["values"] is not None:
            weight = self.packed().unpack()
            return weight.t() if self.role == "transposed" else weight.flatten(1)
        tensors: list[Any] = [buffers[name] for name in _IN_LAYOUT if name in buffers]
        rows = self.shape[1 if self.role == "transposed" else 0]
        depth = self.numel() // rows
        scales = buffers["scales"]
        if scales is None:
            return dense_matrix(tensors, rows, depth, self.dtype)
        values, positions, _ = tensors
        taps = math.prod(self.shape[2:]) if self.layout == "plain" else 1
        integers = int8_matrix(values, positions, rows, depth, self.pattern, taps)
        return dequantise_weight(integers, scales, self.dtype)

    def extra_repr(self) -> str:
        """Pattern, shape and what is held."""
        return (
            f"{self.pattern}, {self.layout}, {tuple(self.shape)}, {self.dtype}, held as {self.form}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        packed = self.packed()

        def moved(tensor: Tensor) -> Tensor:
            # Conversions of dtypes, which Module.type() makes of all buffers, are those of the weight alone.
            found = fn(tensor)
            return found if found.dtype == tensor.dtype else tensor.to(found.device)

        values, scales = packed.values, packed.scales
        dtype = fn(values.new_empty(0, dtype=self.dtype)).dtype
        remedy = "For another dtype load lightning_nm.unpacked_state_dict(model) into a model that is not packed"
        if scales is not None and dtype not in INT8_DTYPES:
            raise TypeError(
                f"'{self.name}' is packed in int8, and cannot be converted to {dtype}: its inputs are float32 or "
                f"bfloat16. {remedy}"
            )
        if dtype not in PACKED_DTYPES:
            raise TypeError(
                f"'{self.name}' is packed, and cannot be converted to {dtype}: it can be float16, bfloat16, float32 "
                f"or float64. {remedy}"
            )
        changed: dict[str, Any] = {name: moved(tensor) for name, tensor in packed.parts.items()}
        own = {"values": fn(values)} if scales is None else {"dense_dtype": dtype}
        # A kernel's layout depends on dtype and device.
        self._take(packed._replace(**{**changed, **own}))
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        for name, tensor in self.packed().parts.items():
            destination[prefix + name] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = part_names(self.is_int8)
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        missing_keys += missing
        if missing:
            return
        tensors: dict[str, Any] = {name: state_dict[prefix + name].detach() for name in names}
        loaded = self._with_tensors(**tensors)
        try:
            loaded.check()
            check_scales(loaded, self.role)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"'{self.name}': {error}")
            return
        # Without `assign` torch copies into parameters, which takes memory to copy into.
        if not local_metadata.get("assign_to_params_buffers", False):
            if self.device.type == "meta":
                error_msgs.append(f"'{self.name}' is on the meta device: pass assign=True")
                return
            for name, tensor in tensors.items():
                is_weight = name == "values" and not self.is_int8
                dtype = self.dtype if is_weight else tensor.dtype
                tensors[name] = tensor.to(self.device, dtype, copy=True)
        self._take(loaded._replace(**tensors))

    def __getstate__(self) -> dict[str, Any]:
        """As files hold it: layouts and handles belong to this process and its CPU."""
        own = {
            "operand": None,
            "_buffers": {"matrix": None, "scales": None, **self.packed().parts},
            "_non_persistent_buffers_set": {"matrix"},
        }
        # A copy has a handle and choices of its own.
        state = {**self.__dict__, **own}
        return {name: each for name, each in state.items() if name not in ("handle", "_choices")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._choices = {}
        self.lay_out()


@torch.library.custom_op("lightning_nm::packed_linear", **OPTIONS)
def _packed_linear(x: Tensor, bias: Tensor | None, first: int, out: int, tag: Tensor) -> Tensor:
    (weight,) = lookup(tag.shape[0])
    return weight.multiply(x, bias, (first, first + out))


@_packed_linear.register_fake
def _(x: Tensor, bias: Tensor | None, first: int, out: int, tag: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], out)


@torch.library.custom_op("lightning_nm::packed_conv", **OPTIONS)
def _packed_conv(x: Tensor, bias: Tensor | None, geometry: Sequence[int], tag: Tensor) -> Tensor:
    (weight,) = lookup(tag.shape[0])
    return _convolve(weight, x, bias, geometry)


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
