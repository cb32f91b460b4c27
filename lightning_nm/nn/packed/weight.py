"""The weight of a packed layer: a module in the place of the dense parameter."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.functional.int8 import INT8_DTYPES, dequantise_weight
from lightning_nm.functional.nm_format import PACKED_DTYPES
from lightning_nm.kernels.cpu.int8 import int8_matrix
from lightning_nm.nn.packed.kernel_choice import Budget, Kernels
from lightning_nm.nn.packed.memory import return_freed_memory
from lightning_nm.nn.packed.operand import Operand, dense_matrix, lay_out, lay_out_int8
from lightning_nm.nn.packed.tensor import PackedTensor, Role, check_scales

_IN_LAYOUT = ("kernel_values", "kernel_index", "kernel_offset")

_BECOMING_DENSE = threading.Lock()  # one weight at a time, so that a weight has one dense matrix


class PackedWeight(nn.Module):
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
        scales: Of int8 values, float32 ``[out]``, of experts ``[experts, out]``; they are held beside each of the
            three.
        matrix: The dense weight as products take it, ``[out, in]`` or ``[out, in / groups * taps]``, if it is held.
    """

    values: Tensor | None
    positions: Tensor | None
    scales: Tensor | None
    matrix: Tensor | None
    storage = None  # as of a layer in training whose module holds its weight itself

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
        self.pattern, self.layout, self.shape = (
            packed.pattern,
            packed.layout,
            torch.Size(packed.shape),
        )
        self.dtype = packed.dtype
        self.operand: Operand | None = None
        self._former: Operand | None = None  # graphs that were compiled before may still look it up
        self._hold(packed)
        self.lay_out()

    def _hold(self, packed: PackedTensor) -> None:
        """Keep a weight as it is in files."""
        self.operand = self._former = None
        self._drop_layout()
        self.register_buffer("matrix", None, persistent=False)
        self.register_buffer("values", packed.values)
        self.register_buffer("positions", packed.positions)
        self.register_buffer("scales", packed.scales)

    def _drop_layout(self) -> None:
        for name in _IN_LAYOUT:
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)

    def lay_out(self) -> None:
        """Change to the layout of the CPU kernel for this weight; without one, in ``"auto"``, to the dense weight."""
        if self.values is None or self.device.type == "meta" or self.kernels == "reference":
            return
        if self.role == "embedding":  # whose rows are looked up
            return
        device = self.device
        pattern = self._row_pattern()
        if self.is_int8:
            # The scales are those of rows only where blocks lie along the depth of the product. Kernels know two
            # dimensions.
            if self.dim() <= 4 if self._convolves else pattern is not None:
                self.operand = lay_out_int8(self.packed(), self.kernels, self.budget)
        elif device.type == "cpu":
            matrix = self.product_matrix().contiguous()
            self.operand = lay_out(
                matrix, pattern, self.kernels, convolution=self._convolves, budget=self.budget
            )
        if self.operand is not None:
            self.operand.hold = _holder(weakref.ref(self))
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
            operand = self.operand
            if operand is None:
                return
            # Not in inference mode: later products may need gradients of their inputs.
            with torch.inference_mode(False), torch.no_grad():
                matrix = operand.dense()
            operand.become_dense(matrix)
            # A new dict: threads that read the former one find the whole layout there.
            kept = {
                name: buffer for name, buffer in self._buffers.items() if name not in _IN_LAYOUT
            }
            self._buffers = {**kept, "matrix": matrix}
            self._former = operand
            self.operand = None
            self._non_persistent_buffers_set.difference_update(_IN_LAYOUT)
            del operand
        return_freed_memory()

    def measure(self, tokens: int) -> None:
        """In ``"auto"``, choose for products of so many tokens, and hold the dense weight if that is faster."""
        operand = self.operand
        if operand is not None and self.kernels == "auto" and not operand.takes(tokens):
            self.hold_dense()

    def linear(self, x: Tensor, bias: Tensor | None, rows: tuple[int, int] | None) -> Tensor:
        """``x @ W^T + bias``, as :func:`~lightning_nm.nn.nm_linear` asks for it."""
        from lightning_nm.nn.packed.ops import packed_linear

        return packed_linear(x, self, bias, rows)

    def conv(self, x: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        """The convolution of x with W, as :func:`~lightning_nm.nn.nm_conv` asks for it."""
        from lightning_nm.nn.packed.ops import packed_conv

        return packed_conv(x, self, bias, *geometry)

    @property
    def _convolves(self) -> bool:
        return self.role == "convolution"

    def _row_pattern(self) -> Any:
        """The pattern of :meth:`product_matrix` along its depth; ``None`` if it has none."""
        layouts = {
            "linear": ("plain", "flat"),
            "transposed": ("transposed",),
            "convolution": ("flat",),
        }
        return self.pattern if self.layout in layouts[self.role] else None

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
            if self.is_int8:
                return PackedTensor.of_int8(self.unpack(), self.pattern, self.layout, self.scales)
            return PackedTensor.of(self.unpack(), self.pattern, self.layout)
        return self._with_tensors(self.values, self.positions, self.scales)

    def _with_tensors(
        self, values: Tensor, positions: Tensor, scales: Tensor | None
    ) -> PackedTensor:
        """A weight as this one with other tensors."""
        dense_dtype = None if scales is None else self.dtype
        shape = tuple(self.shape)
        return PackedTensor(
            values, positions, self.pattern, self.layout, shape, scales, dense_dtype
        )

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
        if self.values is not None:
            weight = self.packed().unpack()
            return weight.t() if self.role == "transposed" else weight.flatten(1)
        tensors: list[Any] = [buffers[name] for name in _IN_LAYOUT if name in buffers]
        rows = self._rows
        depth = self.numel() // rows
        scales = buffers["scales"]
        if scales is None:
            return dense_matrix(tensors, rows, depth, self.dtype)
        values, positions, _ = tensors
        taps = math.prod(self.shape[2:]) if self.layout == "plain" else 1
        integers = int8_matrix(values, positions, rows, depth, self.pattern, taps)
        return dequantise_weight(integers, scales, self.dtype)

    @property
    def _rows(self) -> int:
        return self.shape[1] if self.role == "transposed" else self.shape[0]

    def extra_repr(self) -> str:
        """Pattern, shape and what is held."""
        return (
            f"{self.pattern}, {self.layout}, {tuple(self.shape)}, {self.dtype}, held as {self.form}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        # A kernel's layout depends on dtype and device.
        packed = self.packed()
        values, positions = fn(packed.values), fn(packed.positions)
        scales = packed.scales
        if scales is not None:
            # Conversions of dtypes are those of the weight that the values stand for: these stay int8.
            dtype = fn(scales.new_empty(0, dtype=self.dtype)).dtype
            if dtype not in INT8_DTYPES:
                raise TypeError(
                    f"'{self.name}' is packed in int8, and cannot be converted to {dtype}: its inputs are float32 or "
                    "bfloat16. For another dtype load lightning_nm.unpacked_state_dict(model) into a model that is not "
                    "packed"
                )
            if values.dtype != torch.int8:  # Module.type() converts all buffers
                values = packed.values.to(values.device)
            moved = fn(scales)
            if moved.dtype != scales.dtype:
                moved = scales.to(values.device)
            packed = packed._replace(scales=moved, dense_dtype=dtype)
        elif values.dtype not in PACKED_DTYPES:
            raise TypeError(
                f"'{self.name}' is packed, and cannot be converted to {values.dtype}: it can be float16, bfloat16, "
                "float32 or float64. For another dtype load lightning_nm.unpacked_state_dict(model) into a model that "
                "is not packed"
            )
        if positions.dtype != torch.uint8:  # Module.type() converts all buffers
            positions = packed.positions.to(values.device)
        self._take(packed._replace(values=values, positions=positions))
        return self

    def _take(self, packed: PackedTensor) -> None:
        """Hold another weight, in its dtype and on its device."""
        self.dtype = packed.dtype
        self._hold(packed)
        self.lay_out()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        packed = self.packed()
        destination[f"{prefix}values"], destination[f"{prefix}positions"] = (
            packed.values,
            packed.positions,
        )
        if packed.scales is not None:
            destination[f"{prefix}scales"] = packed.scales

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
        keys = [f"{prefix}values", f"{prefix}positions"]
        if self.is_int8:
            keys.append(f"{prefix}scales")
        missing_keys += [key for key in keys if key not in state_dict]
        if all(key in state_dict for key in keys):
            values, positions, *rest = (state_dict[key].detach() for key in keys)
            scales = rest[0] if rest else None
            loaded = self._with_tensors(values, positions, scales)
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
                dtype = values.dtype if self.is_int8 else self.dtype
                values = values.to(self.device, dtype, copy=True)
                positions = positions.to(self.device, copy=True)
                scales = None if scales is None else scales.to(self.device, copy=True)
            self._take(loaded._replace(values=values, positions=positions, scales=scales))

    def __getstate__(self) -> dict[str, Any]:
        """As files hold it: layouts and handles belong to this process and its CPU."""
        packed = self.packed()
        buffers = {
            "matrix": None,
            "values": packed.values,
            "positions": packed.positions,
            "scales": packed.scales,
        }
        own = {
            "operand": None,
            "_former": None,
            "_buffers": buffers,
            "_non_persistent_buffers_set": {"matrix"},
        }
        return {**self.__dict__, **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers.setdefault(
            "scales", None
        )  # of models that were pickled before there were any
        self.lay_out()


def _holder(weight: Callable[[], PackedWeight | None]) -> Callable[[], None]:
    """Let the weight, of which there is a weak reference, hold the dense matrix."""

    def hold() -> None:
        found = weight()
        if found is not None:
            found.hold_dense()

    return hold
