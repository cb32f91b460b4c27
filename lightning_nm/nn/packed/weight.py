"""The weight of a packed layer: a module in the place of the dense parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_nm.nn.packed.choice import Kernels
from lightning_nm.nn.packed.operand import Operand, dense_matrix, lay_out
from lightning_nm.nn.packed.tensor import PackedTensor

Role = Literal["linear", "transposed", "convolution"]
"""Of the module: its weight is ``[out, in]``, ``[in, out]`` or ``[out, in / groups, *taps]``."""

_IN_LAYOUT = ("kernel_values", "kernel_index", "kernel_offset")


class PackedWeight(nn.Module):
    """A weight that is N:M along one axis, as the values of each block and their positions.

    It holds them as they are in files, or, on a CPU with a kernel for it, in the kernel's layout, never both and never
    the dense weight. The state dict has ``values`` and ``positions`` in either case.

    Args:
        packed: The tensors, checked.
        name: Key of the weight in the dense state dict, for messages.
        role: The module that it belongs to.
        kernels: ``"auto"``, ``"sparse"`` or ``"reference"``, see :func:`lightning_nm.pack`.
    """

    values: Tensor | None
    positions: Tensor | None

    def __init__(self, packed: PackedTensor, name: str, role: Role, kernels: Kernels = "auto") -> None:
        super().__init__()
        self.name, self.role, self.kernels = name, role, kernels
        self.pattern, self.layout, self.shape = packed.pattern, packed.layout, torch.Size(packed.shape)
        self.dtype = packed.values.dtype
        self.operand: Operand | None = None
        self._hold(packed)
        self.lay_out()

    def _hold(self, packed: PackedTensor) -> None:
        """Keep a weight as it is in files."""
        self.operand = None
        for name in _IN_LAYOUT:
            self._buffers.pop(name, None)
            self._non_persistent_buffers_set.discard(name)
        self.register_buffer("values", packed.values)
        self.register_buffer("positions", packed.positions)

    def lay_out(self) -> None:
        """Change to the layout of the CPU kernel for this weight, if there is one."""
        if self.operand is None and self.device.type == "cpu" and self.kernels != "reference":
            self.operand = lay_out(self._matrix(), self._row_pattern(), self.kernels, convolution=self._convolves)
            if self.operand is not None:
                self.values = self.positions = None
                for name, tensor in zip(_IN_LAYOUT, self.operand.tensors, strict=False):
                    self.register_buffer(name, tensor, persistent=False)

    @property
    def _convolves(self) -> bool:
        return self.role == "convolution"

    def _row_pattern(self) -> Any:
        """The pattern of :meth:`_matrix` along its depth; ``None`` if it has none."""
        layouts = {"linear": ("plain", "flat"), "transposed": ("transposed",), "convolution": ("flat",)}
        return self.pattern if self.layout in layouts[self.role] else None

    def _matrix(self) -> Tensor:
        """The dense weight as products take it, ``[out, in]`` or ``[out, in / groups * taps]``."""
        weight = self.unpack()
        return weight.t().contiguous() if self.role == "transposed" else weight.flatten(1)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(self.buffers()).device

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

    def packed(self) -> PackedTensor:
        """The weight as files hold it; it is packed again if it is in a kernel's layout."""
        if self.values is None or self.positions is None:
            return PackedTensor.of(self.unpack(), self.pattern, self.layout)
        return PackedTensor(self.values, self.positions, self.pattern, self.layout, tuple(self.shape))

    def unpack(self) -> Tensor:
        """The dense weight, a new tensor."""
        if self.values is not None:
            return self.packed().unpack()
        tensors = [self._buffers[name] for name in _IN_LAYOUT if name in self._buffers]
        matrix = dense_matrix(tensors, self._rows, self.numel() // self._rows, self.dtype)  # type: ignore[arg-type]
        return matrix.t().contiguous() if self.role == "transposed" else matrix.view(self.shape)

    @property
    def _rows(self) -> int:
        return self.shape[1] if self.role == "transposed" else self.shape[0]

    def extra_repr(self) -> str:
        """Pattern, shape and kernel."""
        kernel = "unpacked for each product" if self.operand is None else self.operand.kernel
        return f"{self.pattern}, {self.layout}, {tuple(self.shape)}, {self.dtype}, {kernel}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PackedWeight:
        # A kernel's layout depends on dtype and device.
        self._hold(self.packed())
        super()._apply(fn, recurse)
        assert self.values is not None
        self.dtype = self.values.dtype
        self.lay_out()
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        packed = self.packed()
        destination[f"{prefix}values"], destination[f"{prefix}positions"] = packed.values, packed.positions

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
        missing_keys += [key for key in keys if key not in state_dict]
        if all(key in state_dict for key in keys):
            values, positions = (state_dict[key].detach().to(self.device, copy=True) for key in keys)
            loaded = PackedTensor(values, positions, self.pattern, self.layout, tuple(self.shape))
            try:
                loaded.check()
            except (TypeError, ValueError) as error:
                error_msgs.append(f"'{self.name}': {error}")
                return
            self.dtype = loaded.values.dtype
            self._hold(loaded)
            self.lay_out()

    def __getstate__(self) -> dict[str, Any]:
        """As files hold it: layouts and handles belong to this process and its CPU."""
        packed = self.packed()
        buffers = {"values": packed.values, "positions": packed.positions}
        return {**self.__dict__, "operand": None, "_buffers": buffers, "_non_persistent_buffers_set": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lay_out()
