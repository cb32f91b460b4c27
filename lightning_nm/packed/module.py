"""Layers for inference: a packed weight in the place of each dense parameter, and the classes of their modules.

Graphs that are compiled call operators, of which two look up a weight by handle when a graph runs. Graphs that are
exported unpack the weight by torch's own operators, so that they run without this package.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_nm.functional.int8 import INT8_DTYPES, dequantise_weight
from lightning_nm.functional.nm_format import PACKED_DTYPES
from lightning_nm.kernels.api import (
    Convolution,
    GemmKey,
    Geometry,
    HasHandle,
    attempt,
    lookup,
    multiply,
)
from lightning_nm.kernels.cpu.int8_kernel import MOST_DEPTH, int8_matrix, rows_linear
from lightning_nm.kernels.cpu.kernels import dense_matrix
from lightning_nm.kernels.cpu.library import is_plain, unavailable
from lightning_nm.nn.adapters import (
    Adapter,
    NMConv1d,
    NMConv2d,
    NMConv3d,
    NMLinear,
    NMMultiheadAttention,
    NMTransposedLinear,
    find_adapter,
)
from lightning_nm.nn.adapters.attention import AttentionForward, switch_fused_paths
from lightning_nm.nn.products import (
    CONVOLUTIONS,
    OPTIONS,
    convolution_of,
    flattened,
    memory_format_of,
    plain,
    unflattened,
)
from lightning_nm.nn.selection import candidates_of
from lightning_nm.nn.weight import Layout, parameter_key, plain_name
from lightning_nm.packed.kernel_choice import (
    KernelChoice,
    Operand,
    lay_out,
    lay_out_int8,
    registry_of,
    return_freed_memory,
)
from lightning_nm.packed.tensor import EVERY_ENTRY, SAME_BLOCKS, PackedKind, PackedTensor

_MOST_SIZES = 1 << 12
"""Sizes of GEMMs whose choice is remembered."""

_MOST_ROW_TOKENS = 256
"""Tokens up to which a GEMM with an embedding in int8 is faster than to dequantise the embedding for it."""

# Buffers of a kernel's layout: its values, and one or two tensors that say where they are.
_IN_LAYOUT = ("kernel_values", "kernel_index", "kernel_offset")

_PLAIN = (Tensor, nn.Parameter)  # others are fake, as in a trace

_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # torch 2.6 has none

_BECOMING_DENSE = threading.Lock()  # one weight at a time, so that a weight has one dense matrix


class PackedWeight(nn.Module, HasHandle):
    """A weight that is N:M along one axis, as the values of each block and their positions.

    It holds them as they are in files, or, on a CPU with a kernel for it, in the kernel's layout, or the dense weight,
    where that is faster and the choice is ``"auto"``: always one of the three. The state dict has ``values`` and
    ``positions`` in each case, and ``scales`` if the values are int8.

    Args:
        packed: The tensors, checked.
        name: Key of the weight in the dense state dict, for messages.
        axes: The layout of the parameter in its module, which tells how GEMMs contract it.
        choice: Which kernels make the GEMMs; the weights of a model share one.
        training: The mode of the module.

    Attributes:
        operand: The kernel's layout, if it is held.
        scales: Of int8 values, float32 ``[out]``, of experts ``[experts, out]``; they are held next to each of the
            three.
        matrix: The dense weight as GEMMs take it, ``[out, in]`` or ``[out, in / groups * taps]``, if it is held.
    """

    kind: PackedKind
    values: Tensor | None
    positions: Tensor | None
    scales: Tensor | None
    matrix: Tensor | None

    def __init__(
        self,
        packed: PackedTensor,
        name: str,
        axes: Layout,
        choice: KernelChoice,
        training: bool,
    ) -> None:
        super().__init__()
        self.name, self.axes, self.choice, self.training = name, axes, choice, training
        # torch.export asks here which buffers no state dict holds, see _save_to_state_dict().
        self._non_persistent_buffers_set = {"matrix", *_IN_LAYOUT}
        self._take(packed)

    def _take(self, packed: PackedTensor) -> None:
        """Hold a weight of this shape, in its dtype and on its device."""
        self.kind = packed.kind
        self.pattern, self.layout, shape, self.dtype, self.is_int8 = packed.kind
        # Attributes that a parameter has, because other code asks a module's weight for them.
        self.shape = torch.Size(shape)
        self.operand: Operand | None = None
        self._has_rows_kernel = False
        # Former choices may be of another dtype or device.
        self._choices: dict[Any, tuple[GemmKey, bool]] = {}
        # As in files for now; lay_out() changes the form where a kernel takes the weight.
        self._hold(**packed.parts)
        self.lay_out()

    def _hold(self, **tensors: Tensor | None) -> None:
        """Hold these tensors, and none of those that were held."""
        # These names always exist, for attributes of the class; those of a layout only while one is held.
        none = dict.fromkeys(("matrix", "values", "positions", "scales"))
        # A new dict: threads that read the former one find the whole layout there.
        self._buffers = {**none, **tensors}

    def lay_out(self) -> None:
        """Change to the layout of the CPU kernel for this weight; without one, in ``"auto"``, to the dense weight."""
        kernels = self.choice.kernels
        # Without `values` the form was chosen already.
        if self.values is None or self.device.type == "meta" or kernels == "reference":
            return
        if self.pattern == EVERY_ENTRY:  # of an embedding, whose rows are looked up as they are
            # Asked here: graphs can compare no patterns in torch 2.6, and cannot load the library.
            self._has_rows_kernel = self.shape[1] <= MOST_DEPTH and not unavailable()
            return
        # Where blocks lie along the depth of the GEMM.
        along = (Layout.FLAT,) if self.convolves else (Layout.PLAIN, Layout.FLAT)
        if self.axes.is_transposed:
            along = (Layout.TRANSPOSED,)
        # Blocks that lie otherwise are no pattern of this matrix: cpu-csr then takes it as any sparse one.
        pattern = self.pattern if self.layout in along else None
        if self.is_int8:
            # The scales are those of rows only where blocks lie along the depth. Kernels know two dimensions.
            if self.dim() <= 4 if self.convolves else pattern is not None:
                self.operand = lay_out_int8(self.packed())
        elif self.device.type == "cpu":
            # Dense for a moment: layouts in floating point are made of a matrix and its mask.
            matrix = self.product_matrix().contiguous()
            self.operand = lay_out(matrix, pattern, convolution=self.convolves)
        if self.operand is not None:
            # An empty tensor whose size is the handle, by which graphs find this weight.
            self.operand.tag = torch.empty(self.handle, 0, dtype=torch.float32)
            # Not strict: a layout of cpu-permute has one tensor fewer than the others.
            tensors: dict[str, Any] = dict(zip(_IN_LAYOUT, self.operand.tensors, strict=False))
            self._hold(scales=self.scales, **tensors)
        # To unpack the weight for each GEMM would be slower than the dense model.
        elif kernels == "auto":
            self._hold(scales=self.scales, matrix=self.product_matrix().contiguous())

    def hold_dense(self) -> None:
        """Hold the dense weight instead of the kernel's layout; nothing if there is no layout."""
        with _BECOMING_DENSE:
            if self.operand is None:
                return
            # Not in inference mode: later GEMMs may need gradients of their inputs.
            with torch.inference_mode(False), torch.no_grad():
                self._hold(scales=self.scales, matrix=self.product_matrix())
            # After the matrix is there: a thread that finds no operand takes that.
            self.operand = None
        return_freed_memory()

    def measure(self, tokens: int) -> None:
        """In ``"auto"``, choose for GEMMs of so many tokens, and hold the dense weight if that is faster."""
        # An earlier choice for this size may be that of its nearest neighbour, without a measurement.
        self.forget()
        operand = self.operand
        is_auto = self.choice.kernels == "auto"
        if operand is not None and is_auto and not self._takes(operand, tokens)[1]:
            self.hold_dense()

    def forget(self) -> None:
        """Re-evaluate the kernel choices; cached timings are kept."""
        self._choices.clear()

    def _takes(
        self, operand: Operand, tokens: int, conv: Convolution | None = None
    ) -> tuple[GemmKey, bool]:
        """The key of a GEMM, and whether the kernel makes it: it can, and is in ``"auto"`` no slower than torch."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        # All that a choice depends on, in a tuple: to hash a GemmKey takes as long as a small GEMM.
        name = operand.layout.rows, tokens, conv, torch.get_num_threads(), deterministic
        found = self._choices.get(name)
        if found is not None:
            return found
        rows, depth = operand.layout.rows, operand.layout.depth
        key = GemmKey("forward", rows, depth, tokens, self.dtype, operand.pattern, "cpu", conv=conv)
        takes, settled = self.choice.takes(operand.kernel, key, operand.packed)
        found = key, takes
        # Other choices are asked for again, because their measurement is still to come.
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
        # A head that shares an embedding in int8: no dense matrix is made of it.
        if rows is None and self._multiplies_rows(x, bias):
            x_ti = x.reshape(-1, x.shape[-1])
            y_to = torch.ops.lightning_nm.packed_rows(x_ti, bias, self.values, self.scales)
            return y_to.view(*x.shape[:-1], -1)
        operand = self._operand_for(x, bias)
        if operand is None or x.dim() == 0 or x.shape[-1] != operand.layout.depth:
            # torch's own error tells of an input of another size.
            y = F.linear(x, self.product_matrix()[chosen], bias)
            self._keep_dense(x)
            return y
        x_ti = x.reshape(-1, x.shape[-1])
        first, end = rows or (0, operand.layout.rows)
        # A graph calls an operator that looks the weight up when it runs: its form may change between two runs.
        if torch.compiler.is_compiling():
            y_to = torch.ops.lightning_nm.packed_linear(x_ti, bias, first, end - first, operand.tag)
        else:
            y_to = self.multiply(x_ti, bias, rows)
        return y_to.view(*x.shape[:-1], end - first)

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
        geometry = stride, padding, dilation, groups
        operand = self._operand_for(x, bias)
        # What does not fit goes to torch, for its error. Kernels know two dimensions.
        fits = x.dim() == self.dim() <= 4 and x.shape[1] == self.shape[1] * groups
        if operand is None or not fits:
            convolve = CONVOLUTIONS[self.dim() - 3]
            y = convolve(x, self.product_matrix().view(self.shape), bias, *geometry)
            self._keep_dense(x)
            return y
        if torch.compiler.is_compiling():
            # Operators take lists of integers, but no tuple of tuples.
            numbers = flattened(geometry)
            return torch.ops.lightning_nm.packed_conv(x, bias, self.shape, numbers, operand.tag)
        return _convolve(self, x, bias, geometry)

    def refuse_training(self) -> None:
        """Refuse to train next to a weight that cannot be trained."""
        # Without gradients nothing is trained, whatever the mode.
        if self.training and torch.is_grad_enabled():
            raise self.training_error()

    def training_error(self) -> RuntimeError:
        """The error that a training raises at this weight."""
        return RuntimeError(
            f"'{self.name}' is packed and cannot be trained: call model.eval() to run the model; to train it, load "
            "lightning_nm.unpacked_state_dict(model) into a model that is not packed"
        )

    def _operand_for(self, x: Tensor, bias: Tensor | None) -> Operand | None:
        """The layout by which a kernel can make a GEMM of `x`; ``None`` if the weight is to be unpacked."""
        return self.operand if self.operand is not None and self._is_for_kernel(x, bias) else None

    def _is_for_kernel(self, x: Tensor, bias: Tensor | None) -> bool:
        """Whether a GEMM of `x` is one of those that kernels make."""
        # Exported programs run without this package, and fake tensors have no memory that a kernel could read.
        if _exporting() or (type(x) not in _PLAIN and not torch.compiler.is_compiling()):
            return False
        # Autocast would cast both operands, which torch's own GEMM does.
        if not x.is_cpu or x.dtype != self.dtype or torch.is_autocast_enabled("cpu"):
            return False
        # Kernels have no backward pass.
        differentiable = x.requires_grad or (bias is not None and bias.requires_grad)
        return not (differentiable and torch.is_grad_enabled())

    def _multiplies_rows(self, x: Tensor, bias: Tensor | None) -> bool:
        """Whether the library multiplies `x` by the rows of an embedding in int8, which a head shares with it."""
        # First the kernel and exports: an exported graph is to hold no condition on the number of tokens.
        if not self._has_rows_kernel or not self._is_for_kernel(x, bias) or x.dim() == 0:
            return False
        depth = self.shape[1]
        # An empty input goes to torch: torch cannot infer the -1 in the view of an empty result.
        fits = x.shape[-1] == depth and 0 < x.numel() <= _MOST_ROW_TOKENS * depth
        return fits and (torch.compiler.is_compiling() or is_plain(x, bias, self.values))

    def _keep_dense(self, x: Tensor) -> None:
        """In ``"auto"``, hold the dense weight after a GEMM that the kernel cannot make, unless it was traced."""
        # A trace runs no GEMM, and an empty one decides nothing.
        traced = torch.compiler.is_compiling() or _exporting()
        if not traced and type(x) in _PLAIN and self.choice.kernels == "auto" and x.numel():
            self.hold_dense()

    def multiply(
        self,
        x: Tensor,
        bias: Tensor | None,
        rows: tuple[int, int] | None = None,
        conv: Convolution | None = None,
    ) -> Tensor:
        """``x W^T + bias`` for ``x [tokens, depth]``, or a convolution: by the kernel, or with the dense matrix.

        In ``"auto"`` that is held from the first GEMM on that is faster with it, or that the kernel cannot make;
        in ``"sparse"`` it is made for each GEMM that the kernel cannot make.
        """

        def dense() -> Tensor:
            self._keep_dense(x)
            matrix = self.product_matrix()
            if conv is not None:
                convolve = CONVOLUTIONS[len(conv.size) - 1]
                return convolve(x, matrix.view(conv.weight_shape), bias, *conv.arguments)
            return F.linear(x, matrix if rows is None else matrix[slice(*rows)], bias)

        # Read once: another thread may let this weight become dense at any time.
        operand = self.operand
        part = None if operand is None else operand.part(rows)
        # Rows that are no whole tiles of the layout are no part.
        if part is None or not x.numel():
            return dense()
        # Each output position of each image counts as a token.
        tokens = x.shape[0] if conv is None else len(x) * math.prod(conv.positions)
        key, takes = self._takes(part, tokens, None if conv is None else conv.planar)
        if not takes:
            return dense()
        registry = registry_of(part.kernel)
        kernel = registry.kernels[part.kernel]

        def sparse() -> Tensor:
            plain_bias = None if bias is None else plain(bias)
            return multiply(kernel, key, part.packed, plain(x), plain_bias)

        # If the kernel fails, the GEMM is made dense, now and in the future.
        y = attempt(kernel, key, registry.failures, sparse, dense)
        # Kernels make planes of height 1 of a convolution in one dimension.
        return y if conv is None else y.view(len(x), conv.outputs, *conv.positions)

    @property
    def convolves(self) -> bool:
        """Whether it is the weight of a convolution."""
        return self.dim() > 2 and not self.axes.has_experts

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(self.buffers()).device

    @property
    def data(self) -> Tensor:
        """Not available: raises an error for code that changes weights in place, such as the merging of adapters.

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
            # By its own scales: rounding then finds the same integers again.
            return PackedTensor.of(
                *(self.unpack(), self.pattern, self.layout), int8=self.is_int8, scales=self.scales
            )
        return PackedTensor(self.values, self.positions, self.kind, self.scales)

    def unpack(self) -> Tensor:
        """The dense weight, a new tensor."""
        if self.values is not None:
            return self.packed().unpack()
        matrix = self.product_matrix()
        if self.axes.is_transposed:
            return matrix.t().clone(memory_format=torch.contiguous_format)
        # Only a matrix that is held must be copied; others were made for this call.
        return (matrix if self.matrix is None else matrix.clone()).view(self.shape)

    def product_matrix(self) -> Tensor:
        """The dense weight as GEMMs take it: the one that is held, or a new tensor."""
        buffers = self._buffers  # once: another thread may let the weight become dense
        matrix = buffers["matrix"]
        if matrix is not None:
            return matrix
        if buffers["values"] is not None:
            weight = self.packed().unpack()
            return weight.t() if self.axes.is_transposed else weight.flatten(1)
        # In this order; dense_matrix() tells the two layouts in floating point apart by their number.
        tensors: list[Any] = [buffers[name] for name in _IN_LAYOUT if name in buffers]
        rows = self.shape[1 if self.axes.is_transposed else 0]
        depth = self.numel() // rows
        scales = buffers["scales"]
        if scales is None:
            return dense_matrix(tensors, rows, depth, self.dtype)
        # The third one corrects the kernel's sums, and is of no use for a matrix.
        values, positions, _ = tensors
        integers = int8_matrix(values, positions, rows, depth, self.pattern, self.kind.taps)
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

        values = packed.values
        # An empty tensor of the weight's dtype tells the new one: Module.to(dtype) leaves int8 values as they are.
        dtype = fn(values.new_empty(0, dtype=self.dtype)).dtype
        remedy = "For another dtype load lightning_nm.unpacked_state_dict(model) into a model that is not packed"
        if self.is_int8 and dtype not in INT8_DTYPES:
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
        if not self.is_int8:
            changed["values"] = fn(values)
        # A kernel's layout depends on dtype and device.
        self._take(packed._replace(kind=self.kind._replace(dtype=dtype), **changed))
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
        names = self.kind.parts
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        # In place, because this is the list that load_state_dict() reports.
        missing_keys += missing
        if missing:
            return
        tensors: dict[str, Any] = {name: state_dict[prefix + name].detach() for name in names}
        # Checked as a whole before this weight changes.
        loaded = PackedTensor(kind=self.kind, **tensors)
        try:
            loaded.check()
            loaded.check_scales(self.axes.has_experts)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"'{self.name}': {error}")
            return
        # Without `assign` torch copies into parameters, which takes memory to copy into.
        if not local_metadata.get("assign_to_params_buffers", False):
            if self.device.type == "meta":
                error_msgs.append(f"'{self.name}' is on the meta device: pass assign=True")
                return
            for name, tensor in tensors.items():
                # Positions, scales and int8 values have the same dtype in every model.
                is_weight = name == "values" and not self.is_int8
                dtype = self.dtype if is_weight else tensor.dtype
                # A copy: as of torch's own copying, the model shares no memory with the state dict.
                tensors[name] = tensor.to(self.device, dtype, copy=True)
        # With `assign` the weight takes the dtype of the state dict, of which int8 values say nothing.
        dtype = self.dtype if self.is_int8 else tensors["values"].dtype
        self._take(PackedTensor(kind=self.kind._replace(dtype=dtype), **tensors))

    def __reduce__(self) -> Any:
        # As files hold it: layouts and handles belong to this process and its CPU.
        state = self.packed(), self.name, self.axes, self.choice, self.training
        return type(self), state


class PackedExperts(PackedWeight):
    """The weight of several experts: each is held as a :class:`PackedWeight` of two axes.

    The state dict has ``values`` and ``positions`` of the whole weight, and ``scales`` in int8, as files have.

    Attributes:
        parts: The weight of each expert, ``[out, in]`` or ``[in, out]``.
    """

    # A tuple, which torch does not register as children: state dicts and summaries see one weight.
    parts: tuple[PackedWeight, ...] = ()

    def lay_out(self) -> None:
        """Divide the weight into those of the experts, and hold each in the layout of a kernel if there is one."""
        if self.values is None or self.device.type == "meta":
            return
        weight_eab = self.packed().unpack()  # experts, and both axes of a matrix in either order
        layout = Layout.TRANSPOSED if self.axes.is_transposed else Layout.PLAIN
        parts = []
        for number, weight_ab in enumerate(weight_eab):
            scales = None if self.scales is None else self.scales[number]
            tensor = PackedTensor.of(
                weight_ab, self.pattern, layout, int8=self.is_int8, scales=scales
            )
            name = f"{self.name}[{number}]"
            parts.append(PackedWeight(tensor, name, layout, self.choice, self.training))
        self.parts = tuple(parts)
        # The scales stay, because the whole weight is packed again by them.
        self.values = self.positions = None

    def _take(self, packed: PackedTensor) -> None:
        # First: while there are parts, buffers() has those of the parts alone.
        self.parts = ()
        super()._take(packed)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The tensors that are held."""
        if not self.parts:
            return super().buffers(recurse)
        return (tensor for part in self.parts for tensor in part.buffers())

    @property
    def form(self) -> str:
        """What is held for the experts, each form once."""
        if not self.parts:
            return super().form
        return ", ".join(dict.fromkeys(part.form for part in self.parts))

    def unpack(self) -> Tensor:
        """The dense weight, a new tensor."""
        if not self.parts:
            return super().unpack()
        return torch.stack([part.unpack() for part in self.parts])

    def measure(self, tokens: int) -> None:
        """In ``"auto"``, choose for GEMMs of so many tokens with each expert."""
        for part in self.parts:
            part.measure(tokens)

    def train(self, mode: bool = True) -> PackedExperts:
        """Set the mode of the experts' weights, too."""
        super().train(mode)
        for part in self.parts:
            part.train(mode)
        return self


@torch.library.custom_op("lightning_nm::packed_linear", **OPTIONS)
def _packed_linear(x: Tensor, bias: Tensor | None, first: int, out: int, tag: Tensor) -> Tensor:
    # A graph holds tensors and numbers: the handle travels as the size of an empty tensor.
    (weight,) = lookup(tag.shape[0])
    return weight.multiply(x, bias, (first, first + out))


@_packed_linear.register_fake
def _(x: Tensor, bias: Tensor | None, first: int, out: int, tag: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], out)


@torch.library.custom_op("lightning_nm::packed_rows", **OPTIONS)
def _packed_rows(x: Tensor, bias: Tensor | None, values: Tensor, scales: Tensor) -> Tensor:
    bias = None if bias is None else plain(bias)
    # Values are [rows, columns, 1], as each block has one entry.
    return rows_linear(values.squeeze(-1), scales, plain(x), bias)


@_packed_rows.register_fake
def _(x: Tensor, bias: Tensor | None, values: Tensor, scales: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], values.shape[0])


@torch.library.custom_op("lightning_nm::packed_conv", **OPTIONS)
def _packed_conv(
    x: Tensor, bias: Tensor | None, shape: Sequence[int], geometry: Sequence[int], tag: Tensor
) -> Tensor:
    (weight,) = lookup(tag.shape[0])
    return _convolve(weight, x, bias, unflattened(geometry))


@_packed_conv.register_fake
def _(
    x: Tensor, bias: Tensor | None, shape: Sequence[int], geometry: Sequence[int], tag: Tensor
) -> Tensor:
    conv = convolution_of(x, shape, unflattened(geometry))
    size = (x.shape[0], conv.outputs, *conv.positions)
    return x.new_empty(size).contiguous(memory_format=memory_format_of(x))


def _convolve(weight: PackedWeight, x: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """The convolution of ``x [images, in, *size]``, in its memory format."""
    y = weight.multiply(x, bias, conv=convolution_of(x, weight.shape, geometry))
    # Kernels return contiguous results; torch's convolutions keep channels last, and so does what follows them.
    return y.contiguous(memory_format=memory_format_of(x))


class _Swapped(nn.Module):
    """Mixed into the class of a module of a packed model."""

    nm_base: ClassVar[type[nn.Module]]  # the class that the module had before

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no importable name: pickle and deepcopy make it again from the class it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).nm_base,), *reduced[2:]


class PackedLayer(_Swapped):
    """Mixed into a module's class whose weights are packed; a :class:`PackedWeight` replaces each parameter.

    The forward is that of the module's adapter, whose :func:`~lightning_nm.nn.nm_linear` and
    :func:`~lightning_nm.nn.nm_conv` take packed weights in the place of masked layers.
    """

    nm_unmaskable: ClassVar[str] = (
        "packed already, for inference: to prune, train or pack it again, load lightning_nm.unpacked_state_dict(model) "
        "into a model that is not packed"
    )

    @property
    def nm_layers(self) -> dict[str, Any]:
        """The packed weights by the names of their parameters, among other children; it is asked at every call."""
        return self._modules


class PackedEmbedding(PackedLayer):
    """``nn.Embedding`` whose matrix is in int8; the rows that are looked up are dequantised.

    A head that shares the matrix holds the same :class:`PackedWeight`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up."""
        weight: Any = self.weight
        weight.refuse_training()
        # Its values are always held: no kernel has a layout of them, so the weight never becomes dense.
        rows = weight.values.squeeze(-1)[input].float() * weight.scales[input].unsqueeze(-1)
        # Rounded once, after the multiplication in float32, as dequantise_weight() does.
        found: Tensor = rows.to(weight.dtype)
        return found


class PackedMultiheadAttention(AttentionForward, PackedLayer):
    """``nn.MultiheadAttention`` with packed projections, or a packed ``out_proj`` alone."""

    project = NMMultiheadAttention.project


class PackedAdapted(PackedLayer):
    """A module of another adapter, which may call ``super()``: it is mixed in, too."""

    # An adapter's own are for masked layers.
    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict
    _apply = nn.Module._apply


class PackedLightningModule(_Swapped):
    """Mixed into the class of a LightningModule whose layers are packed, so that fitting it is refused at once.

    Lightning's fit leaves modules in evaluation mode, in which packed layers run: it would end at the first backward
    pass, by torch's error that no tensor requires gradients.
    """

    def setup(self, stage: str) -> None:
        """Refuse to fit the module while no parameter requires gradients, by a ``RuntimeError``."""
        super().setup(stage)  # type: ignore[misc]
        # The dense parameters of a packed model may be trained: then the user made them require gradients.
        if stage == "fit" and not any(each.requires_grad for each in self.parameters()):
            raise next(m for m in self.modules() if isinstance(m, PackedWeight)).training_error()


def refuse_to_fit(model: nn.Module) -> None:
    """Let a packed model refuse to be fitted, if it is a LightningModule."""
    if _is_lightning(type(model)) and not isinstance(model, PackedLightningModule):
        model.__class__ = _mixed(PackedLightningModule, type(model))


def _is_lightning(kind: type[nn.Module]) -> bool:
    # Known by its hooks: this part of the package does not import Lightning.
    return hasattr(kind, "training_step") and hasattr(kind, "setup")


_CLASSES: dict[tuple[Any, ...], type[nn.Module]] = {}


def _mixed(*bases: Any, forward: Any = None) -> type[nn.Module]:
    """The class of these bases, the last of which is the module's own; made at first use, and once."""
    if bases not in _CLASSES:
        attributes: dict[str, Any] = {"nm_base": bases[-1], "__module__": __name__}
        if forward is not None:
            attributes["forward"] = forward
        _CLASSES[bases] = type(f"Packed{bases[-1].__name__}", bases, attributes)
    return _CLASSES[bases]


_BORROWED = (NMLinear, NMTransposedLinear, NMConv1d, NMConv2d, NMConv3d)
"""Adapters of which packed layers need the forward alone."""


def packed_adapter(kind: type[nn.Module]) -> type[Adapter] | None:
    """The adapter for a module class whose GEMMs can be packed; ``None`` if there is none.

    Classes with a forward of their own have none, and those that look rows up.
    """
    found = find_adapter(kind)
    if found is None or kind.forward is not found[1].forward or found[0].role == "embedding":
        return None
    return found[0]


def holds_embedding(kind: type[nn.Module]) -> bool:
    """Whether modules of a class look rows up as ``nn.Embedding`` does."""
    return issubclass(kind, nn.Embedding) and kind.forward is nn.Embedding.forward


def packed_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class that mixes a packed layer into ``base``, and its adapter or the adapter's forward."""
    # First, because packed_adapter() has none for a class that looks rows up.
    if holds_embedding(base):
        return _mixed(PackedEmbedding, base)
    adapter = packed_adapter(base)
    # For pickle: refuse_to_fit() made the class of such a module.
    if adapter is None and _is_lightning(base):
        return _mixed(PackedLightningModule, base)
    if adapter is None:
        raise TypeError(f"no packed layer for {base.__name__}")
    if adapter in _BORROWED:
        return _mixed(PackedLayer, base, forward=adapter.forward)
    if adapter is NMMultiheadAttention:
        return _mixed(PackedMultiheadAttention, base)
    return _mixed(PackedAdapted, adapter, base)


def _new(base: type[nn.Module]) -> nn.Module:
    """An empty module of the packed class, for pickle and deepcopy to fill."""
    cls = packed_class(base)
    return cls.__new__(cls)


class Place(NamedTuple):
    """A parameter that can be packed.

    Args:
        module: Its module.
        parameter: Its name there.
        axes: The layout of the parameter, along whose rows the module's GEMMs contract.
    """

    module: nn.Module
    parameter: str
    axes: Layout

    @property
    def layouts(self) -> list[Layout]:
        """Where the blocks may lie in files: those of a convolution also in the flattened filter."""
        first = SAME_BLOCKS.get(self.axes, self.axes)
        convolves = self.weight.dim() > 2 and not self.axes.has_experts
        return [first, Layout.FLAT] if convolves else [first]

    @property
    def weight(self) -> nn.Parameter:
        """The parameter."""
        # Looked up at each use, so that a place keeps no dense weight alive.
        found: nn.Parameter = self.module._parameters[self.parameter]  # type: ignore[assignment]
        return found


def places_of(model: nn.Module) -> tuple[dict[str, Place], dict[str, str]]:
    """The weights of a model that can be packed, by their keys in the state dict, and why others cannot.

    Raises:
        ValueError: If a sparsifier's masks are installed.
    """
    for name, module in model.named_modules():
        if _is_masked(module):
            raise ValueError(
                f"layer '{name}' is masked by a sparsifier: call sparsifier.bake() and .detach() first"
            )
    return places_and_reasons(model)


def places_and_reasons(model: nn.Module) -> tuple[dict[str, Place], dict[str, str]]:
    """As :func:`places_of`; layers that are masked or packed are among those that cannot be packed."""
    found: dict[str, Place] = {}
    owners = _owner_counts(model)
    reasons: dict[str, str] = {}
    candidates, skipped = candidates_of(model)
    for candidate in candidates:
        module, parameter = candidate.module, candidate.spec.parameter
        key = parameter_key(candidate.module_name, parameter)
        weight = module._parameters.get(parameter)
        if _is_masked(module):
            reasons[key] = "masked by a sparsifier"
        elif packed_adapter(type(module)) is None:
            reasons[key] = f"no packed layer for {type(module).__name__}"
        elif weight is None or nn.parameter.is_lazy(weight) or weight.dim() < 2:
            reasons[key] = "its weight is not an ordinary parameter"
        elif weight.dtype not in PACKED_DTYPES:
            reasons[key] = f"its weight is {weight.dtype}"
        elif isinstance(weight, DTensor):
            reasons[key] = "its weight is sharded"
        # Another owner would keep the dense weight, in addition to the packed one.
        elif owners[id(weight)] > 1:
            reasons[key] = "its weight is shared with another module"
        else:
            found[key] = Place(module, parameter, Layout(candidate.spec.layout))
    return found, {**skipped, **reasons}


def embeddings_of(model: nn.Module) -> dict[str, list[Place]]:
    """The embeddings of a model that can be held in int8, by the keys of their weights in the state dict.

    The places are those of the embedding, and then of the linear heads that share its weight. Not embeddings with a
    forward of their own, or whose weight modules of other kinds share.
    """
    found: dict[str, list[Place]] = {}
    owners = _owner_counts(model)
    heads: dict[int, list[Place]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        # A forward that was assigned to the instance may use the weight in any way.
        is_linear = packed_adapter(type(module)) is NMLinear and "forward" not in vars(module)
        if is_linear and not _is_masked(module):
            heads.setdefault(id(weight), []).append(Place(module, "weight", Layout.PLAIN))
    for name, module in model.named_modules():
        # max_norm scales rows in place when they are looked up.
        if not holds_embedding(type(module)) or module.max_norm is not None or _is_masked(module):
            continue
        weight = module._parameters.get("weight")
        places = [Place(module, "weight", Layout.PLAIN), *heads.get(id(weight), [])]
        # More owners than places: a module of another kind needs the dense weight.
        if weight is None or isinstance(weight, DTensor) or owners[id(weight)] != len(places):
            continue
        found[parameter_key(plain_name(name), "weight")] = places
    return found


def _owner_counts(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter, by its id."""
    owners: dict[int, int] = {}
    for each in model.modules():
        for tensor in each._parameters.values():
            owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    return owners


def _is_masked(module: nn.Module) -> bool:
    # A packed layer may have an adapter mixed in, and its nm_layers are packed weights.
    return (
        isinstance(module, Adapter)
        and not isinstance(module, PackedLayer)
        and bool(module.nm_layers)
    )


def put(places: Sequence[Place], packed: PackedTensor, name: str, choice: KernelChoice) -> None:
    """Replace a parameter by its packed weight wherever it is, and the classes of its modules."""
    axes = places[0].axes
    kind = PackedExperts if axes.has_experts else PackedWeight
    # One object for all places, so that what was shared stays shared.
    weight = kind(packed, name, axes, choice, places[0].module.training)
    for module, parameter, _ in places:
        # A module with several weights has its new class since the first of them.
        if not isinstance(module, PackedLayer):
            module.__class__ = packed_class(type(module))
        # First: torch refuses a module under the name of a parameter.
        del module._parameters[parameter]
        setattr(module, parameter, weight)


def call_packed_children(model: nn.Module) -> None:
    """Let modules that read the weights of their children call them, and switch off fused paths, which read them."""
    for module in model.modules():
        found = find_adapter(type(module))
        children = () if found is None else found[0].reads_children
        reads = any(isinstance(getattr(module, child, None), PackedLayer) for child in children)
        if reads and not isinstance(module, PackedLayer):
            module.__class__ = packed_class(type(module))
    switch_fused_paths(model)


def packed_weights(
    model: nn.Module, *, all_names: bool = False
) -> Iterator[tuple[str, PackedWeight]]:
    """The packed weights of a model by the keys that they have in the dense state dict.

    Args:
        model: A model.
        all_names: Whether a weight of a module that the model holds under several names comes with each of its keys,
            as in a state dict. By default it comes once, with its first key.
    """
    for name, module in model.named_modules(remove_duplicate=not all_names):
        if isinstance(module, PackedWeight):
            yield name, module
