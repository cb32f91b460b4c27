"""cuSPARSELt through its own calls: a handle for each thread and device, and plans that are kept between products."""

from __future__ import annotations

import ctypes
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.kernels.api import Algorithm
from lightning_nm.kernels.gpu.cusparselt import version_number
from lightning_nm.kernels.gpu.two_four import ALIGNMENT

CAPACITY = 256
"""Plans that a thread keeps for a device: a few for each product of a model, times the token counts of its batches."""

# From library_types.h and cusparse.h; the enumerations of cuSPARSELt itself come with its binding.
_CUDA_TYPES = {torch.float16: 2, torch.bfloat16: 14}
_COLUMN_ORDER = 1
_ROW_ORDER = 2
_AS_IT_IS = 0
_TRANSPOSED = 1

# alpha and beta. Read from host memory when a product is launched, so they must not be freed.
_ONE = ctypes.c_float(1)
_ZERO = ctypes.c_float(0)


class _PackingKey(NamedTuple):
    """What the plan for packing a matrix depends on."""

    rows: int
    depth: int
    dtype: torch.dtype


class _ProductKey(NamedTuple):
    """What the plan for a product depends on."""

    rows: int
    depth: int
    columns: int
    dtype: torch.dtype
    transposed: bool  # whether `x A^T` is computed, and not `A B`
    bias: bool  # whether there is one; its address is set for each product
    algorithm: Algorithm


class Library:
    """cuSPARSELt in one thread on one device: a handle, and the plans of the last products.

    A plan and its descriptors point at each other, so they stay at one address until the plan is destroyed: the least
    recently used one when there are more than `capacity`, all when the thread ends. At the exit of the interpreter the
    library may be unloaded already, and nothing is destroyed.

    Args:
        binding: The module ``nvmath.bindings.cusparseLt``.
        capacity: Plans to keep.
    """

    def __init__(self, binding: Any, capacity: int = CAPACITY) -> None:
        self.binding = binding
        self.capacity = capacity
        self.handle: int = binding.init()  # for the device that is current now
        self._plans: OrderedDict[tuple[Any, ...], _Packing | _Product] = OrderedDict()
        weakref.finalize(self, _close, binding, self.handle, self._plans).atexit = False
        self.version: int = version_number(binding.get_property)
        """801 for 0.8.1."""

    def compress(self, matrix: Tensor, stream: int) -> Tensor:
        """Pack ``A [rows, depth]``, contiguous, into ``[rows, width]``, the width by the library."""
        key = _PackingKey(matrix.shape[0], matrix.shape[1], matrix.dtype)
        plan = self._plan(key, lambda: _Packing(self.binding, self.handle, key))
        return plan(matrix, stream)

    def multiply(
        self,
        packed: Tensor,
        dense: Tensor,
        bias: Tensor | None,
        *,
        transposed: bool,
        algorithm: Algorithm,
        stream: int,
    ) -> Tensor:
        """Compute ``x A^T + bias`` of ``x [tokens, depth]`` if `transposed`, else ``A B`` of ``B [depth, columns]``."""
        key = _product_key(packed, dense, transposed, bias is not None, algorithm)
        plan = self._plan(key, lambda: _Product(self.binding, self.handle, key, bias))
        return plan(packed, dense, bias, stream)

    def search(self, packed: Tensor, dense: Tensor, *, transposed: bool, stream: int) -> Algorithm:
        """Let the library time its algorithms for a product; the arguments are as :meth:`multiply`'s."""
        key = _product_key(packed, dense, transposed, False, Algorithm())
        # The search changes its plan, so it gets one of its own.
        product = _Product(self.binding, self.handle, key, None)
        try:
            return product.search(packed, dense, stream)
        finally:
            product.destroy()

    def _plan(self, key: tuple[Any, ...], make: Callable[[], _Packing | _Product]) -> Any:
        """Return the kept plan of a key, or make it; the order of the plans is that of their last use."""
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        plan = make()
        while len(self._plans) >= self.capacity:
            # Its products may still run: torch, too, destroys a plan at once.
            _, oldest = self._plans.popitem(last=False)
            oldest.destroy()
        self._plans[key] = plan
        return plan


class _Packing:
    """The plan for packing matrices of one shape."""

    def __init__(self, binding: Any, handle: int, key: _PackingKey) -> None:
        self.binding = binding
        self.handle = handle
        # What is made is destroyed if a later step fails; if all succeed, `destroy` does it.
        with ExitStack() as undo:
            self.matrix = _sparse(undo, binding, handle, key.rows, key.depth, key.dtype)
            packed_bytes, self.buffer = binding.sp_mma_compressed_size2(handle, self.matrix)
            self.destroy = undo.pop_all().close
        row_bytes = key.rows * key.dtype.itemsize  # of one column of the packed matrix
        self.shape = key.rows, -(-packed_bytes // row_bytes)

    def __call__(self, matrix: Tensor, stream: int) -> Tensor:
        packed = matrix.new_empty(self.shape)
        buffer = matrix.new_empty(self.buffer, dtype=torch.uint8)
        self.binding.sp_mma_compress2(
            self.handle,
            self.matrix,
            1,  # the sparse matrix is the first operand
            _AS_IT_IS,
            matrix.data_ptr(),
            packed.data_ptr(),
            buffer.data_ptr(),
            stream,
        )
        return packed


class _Product:
    """The plan for products of one shape.

    ``x A^T`` is computed as ``A x^T`` in column order, which is ``x A^T`` in row order: nothing is copied.
    """

    def __init__(self, binding: Any, handle: int, key: _ProductKey, bias: Tensor | None) -> None:
        self.binding = binding
        self.handle = handle
        # Memory whose addresses the library is given.
        self.bias = ctypes.c_void_p()
        self.stream = ctypes.c_void_p()
        m = key.rows
        k = key.depth
        n = key.columns
        # A descriptor has rows, columns, and the leading dimension: the distance of two rows, or columns, in memory.
        if key.transposed:
            self.shape = (n, m)
            dense_sizes = (n, k, k)
            result_sizes = (m, n, m)
            result_order = _COLUMN_ORDER
            operation = _TRANSPOSED
        else:
            self.shape = (m, n)
            dense_sizes = (k, n, n)
            result_sizes = (m, n, n)
            result_order = _ROW_ORDER
            operation = _AS_IT_IS
        kind = _CUDA_TYPES[key.dtype]
        # As in _Packing: what is made is destroyed if a later step fails.
        with ExitStack() as undo:
            a = _sparse(undo, binding, handle, m, k, key.dtype)
            b = binding.dense_descriptor_init(handle, *dense_sizes, ALIGNMENT, kind, _ROW_ORDER)
            undo.callback(binding.mat_descriptor_destroy, b)
            c = binding.dense_descriptor_init(handle, *result_sizes, ALIGNMENT, kind, result_order)
            undo.callback(binding.mat_descriptor_destroy, c)
            self.matmul = binding.matmul_descriptor_init(
                handle, _AS_IT_IS, operation, a, b, c, c, binding.ComputeType.COMPUTE_32F
            )
            undo.callback(binding.matmul_descriptor_destroy, self.matmul)
            if bias is not None:
                self._point_at(bias)  # whether there is one may decide about the plan
            self.selection = binding.matmul_alg_selection_init(
                handle, self.matmul, binding.MatmulAlg.DEFAULT
            )
            undo.callback(binding.matmul_alg_selection_destroy, self.selection)
            self._select(key.algorithm)
            self.plan = binding.matmul_plan_init(handle, self.matmul, self.selection)
            undo.callback(binding.matmul_plan_destroy, self.plan)
            self.workspace = binding.matmul_get_workspace(handle, self.plan)
            self.destroy = undo.pop_all().close

    def __call__(self, packed: Tensor, dense: Tensor, bias: Tensor | None, stream: int) -> Tensor:
        if bias is not None:
            self._point_at(bias)
        return self._launch(self.binding.matmul, packed, dense, stream)

    def search(self, packed: Tensor, dense: Tensor, stream: int) -> Algorithm:
        """Find the fastest algorithm; this plan is changed to it."""
        self._launch(self.binding.matmul_search, packed, dense, stream)
        attributes = self.binding.MatmulAlgAttribute
        identity = self._get(attributes.CONFIG_ID)
        split_k = self._get(attributes.SPLIT_K)
        mode = self._get(attributes.SPLIT_K_MODE)
        if mode <= 0:
            mode = -1
        return Algorithm(identity, split_k, mode)

    def _select(self, algorithm: Algorithm) -> None:
        """Set an algorithm for the plan that is about to be made."""
        attributes = self.binding.MatmulAlgAttribute
        self._set(attributes.CONFIG_ID, algorithm.id)
        if algorithm.split_k != 1:
            self._set(attributes.SPLIT_K, algorithm.split_k)
        if algorithm.split_k_mode > 0:  # -1 was never set, and 0 is the library's "invalid"
            self._set(attributes.SPLIT_K_MODE, algorithm.split_k_mode)

    def _launch(
        self, call: Callable[..., object], packed: Tensor, dense: Tensor, stream: int
    ) -> Tensor:
        """Launch the product, or the search for its fastest algorithm, which has the same arguments."""
        result = dense.new_empty(self.shape)
        # The allocator reuses the workspace only for later work of this stream, so it may be freed at once.
        workspace = dense.new_empty(self.workspace, dtype=torch.uint8)
        self.stream.value = stream
        call(
            self.handle,
            self.plan,
            ctypes.addressof(_ONE),
            packed.data_ptr(),
            dense.data_ptr(),
            ctypes.addressof(_ZERO),
            result.data_ptr(),  # C, which beta = 0 leaves unread
            result.data_ptr(),  # D
            workspace.data_ptr(),
            ctypes.addressof(self.stream),
            1,  # the number of streams
        )
        return result

    def _set(self, attribute: int, value: int) -> None:
        """Set an attribute of the algorithm."""
        word = ctypes.c_int32(value)
        self.binding.matmul_alg_set_attribute(
            self.handle, self.selection, attribute, ctypes.addressof(word), ctypes.sizeof(word)
        )

    def _get(self, attribute: int) -> int:
        """Read an attribute of the algorithm."""
        word = ctypes.c_int32()
        self.binding.matmul_alg_get_attribute(
            self.handle, self.selection, attribute, ctypes.addressof(word), ctypes.sizeof(word)
        )
        return word.value

    def _point_at(self, bias: Tensor) -> None:
        """Give the product the address of a bias."""
        self.bias.value = bias.data_ptr()
        self.binding.matmul_desc_set_attribute(
            self.handle,
            self.matmul,
            self.binding.MatmulDescAttribute.BIAS_POINTER,
            ctypes.addressof(self.bias),
            ctypes.sizeof(self.bias),
        )


def _product_key(
    packed: Tensor, dense: Tensor, transposed: bool, bias: bool, algorithm: Algorithm
) -> _ProductKey:
    if transposed:
        columns, depth = dense.shape  # x [tokens, depth]
    else:
        depth, columns = dense.shape
    return _ProductKey(len(packed), depth, columns, dense.dtype, transposed, bias, algorithm)


def _sparse(
    undo: ExitStack, binding: Any, handle: int, rows: int, depth: int, dtype: torch.dtype
) -> int:
    """Make the descriptor of a sparse matrix, and note in `undo` how it is destroyed."""
    descriptor: int = binding.structured_descriptor_init(
        handle,
        rows,
        depth,
        depth,
        ALIGNMENT,
        _CUDA_TYPES[dtype],
        _ROW_ORDER,
        binding.Sparsity.SPARSITY_50_PERCENT,
    )
    undo.callback(binding.mat_descriptor_destroy, descriptor)
    return descriptor


def _close(binding: Any, handle: int, plans: OrderedDict[Any, _Packing | _Product]) -> None:
    """Destroy the plans, and after them the handle; an error of one does not keep the others."""
    with ExitStack() as undo:
        undo.callback(binding.destroy, handle)
        for plan in plans.values():
            undo.callback(plan.destroy)
