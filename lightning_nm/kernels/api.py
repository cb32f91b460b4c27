"""The kernel interface: a GEMM with an N:M operand is described by a key and computed by a kernel."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import grad as nn_grad

from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.pattern import NMPattern

GemmName = Literal["forward", "dgrad", "wgrad"]

Sparsity = Literal["n:m", "masked", "outputs"]
"""What is sparse in a GEMM. ``"n:m"``: A is N:M along the contraction axis, perhaps permuted. ``"masked"``: A is
zero outside of a mask that is N:M along its rows. ``"outputs"``: A is dense, and the result is needed at the entries of
a mask alone."""


Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
"""Stride, zeros on both sides, dilation, each per spatial dimension, and groups."""


class Convolution(NamedTuple):
    """The sizes of a convolution; kernels take those in two dimensions, of height and width, see :attr:`planar`.

    Example::

        >>> conv = Convolution(3, 8, (28, 28), (3, 3), (2, 2), (1, 1))
        >>> conv.positions, str(conv)
        ((14, 14), '3>8@28x28,kernel3x3,stride2x2,padding1x1,dilation1x1,groups1')
    """

    inputs: int  # channels, of all groups
    outputs: int  # as well
    size: tuple[int, ...]  # of the input
    kernel: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    def __str__(self) -> str:
        parts = [f"{self.inputs}>{self.outputs}@{'x'.join(map(str, self.size))}"]
        for name in ("kernel", "stride", "padding", "dilation"):
            parts.append(name + "x".join(map(str, getattr(self, name))))
        parts.append(f"groups{self.groups}")
        return ",".join(parts)

    @property
    def planar(self) -> Convolution:
        """This convolution; of one in one dimension the same in two, over images of height 1."""
        if len(self.size) > 1:
            return self
        # The library takes two of every size. A height of 1, with one tap and no padding, changes no sum.
        return self._replace(
            size=(1, *self.size),
            kernel=(1, *self.kernel),
            stride=(1, *self.stride),
            padding=(0, *self.padding),
            dilation=(1, *self.dilation),
        )

    @property
    def positions(self) -> tuple[int, ...]:
        """The sizes of the output, as torch counts them."""
        found = []
        # Fields 2 to 6, in this order.
        for size, taps, stride, padding, dilation in zip(*self[2:7], strict=True):
            reach = dilation * (taps - 1) + 1  # from the first tap to the last
            found.append((size + 2 * padding - reach) // stride + 1)
        return tuple(found)

    @property
    def arguments(self) -> Geometry:
        """Stride, padding, dilation and groups, as torch's convolutions take them."""
        return self.stride, self.padding, self.dilation, self.groups

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """``[out, in / groups, *kernel]``."""
        return self.outputs, self.inputs // self.groups, *self.kernel


@dataclass(frozen=True)
class GemmKey:
    """The properties that decide which kernel is fastest: ``A [rows, depth]``, N:M along `depth`, times a dense matrix.

    The forward has ``A = W_F [out, in]``, dgrad ``A = W_B^T [in, out]``, wgrad ``A = E(dY)^T [out, tokens]``. Where A
    is not N:M along `depth`, `sparsity` says what is sparse.

    Example::

        >>> str(GemmKey("dgrad", 1024, 4096, 8192, torch.bfloat16, NMPattern(2, 4), "cuda:0"))
        'dgrad 1024x4096x8192 bfloat16 2:4 cuda:0'
    """

    gemm: GemmName
    rows: int
    depth: int  # the contraction axis
    columns: int  # the other size of the dense matrix: tokens for forward and dgrad, `in` for wgrad
    dtype: torch.dtype  # of both operands and the result
    pattern: NMPattern
    device: str  # type and index, for example "cuda:0"
    permuted: bool = False  # A is N:M if its depth is permuted, as for a permuted W_B
    sparsity: Sparsity = "n:m"
    # Of a convolution: `in` is [in / groups * taps], tokens are output positions.
    conv: Convolution | None = None
    drawn: bool = False  # A is a W_B that is drawn again for each GEMM: no mask of it is kept

    def __str__(self) -> str:
        """``gemm rowsxdepthxcolumns dtype pattern device``, then ``permuted``, ``drawn``, sparsity and geometry."""
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = f"{self.rows}x{self.depth}x{self.columns}"
        parts = [self.gemm, sizes, dtype, str(self.pattern), self.device]
        if self.permuted:
            parts.append("permuted")
        if self.drawn:
            parts.append("drawn")
        if self.sparsity != "n:m":
            parts.append(self.sparsity)
        if self.conv is not None:
            parts.append(str(self.conv))
        return " ".join(parts)

    @property
    def packs_each_time(self) -> bool:
        """Whether A is another one in each GEMM: an estimate of dY, or a drawn W_B."""
        return self.drawn or (self.gemm == "wgrad" and self.sparsity == "n:m")

    @property
    def tokens(self) -> int:
        """Tokens, or output positions of all images."""
        return self.depth if self.gemm == "wgrad" else self.columns

    @property
    def images(self) -> int:
        """Images of a convolution with these tokens."""
        assert self.conv is not None
        # A bucket of tokens need not hold whole images; what is left over is not counted.
        return self.tokens // math.prod(self.conv.positions)

    # Cached, because each result is compared with it. The cache is in the instance's dict, which `frozen` leaves open.
    @cached_property
    def result_shape(self) -> tuple[int, ...]:
        """Shape of what a kernel returns."""
        if self.gemm == "wgrad":
            return self.rows, self.columns  # dW as a matrix, also of a convolution
        if self.conv is None:
            return self.columns, self.rows
        if self.gemm == "forward":
            return self.images, self.conv.outputs, *self.conv.positions
        return self.images, self.conv.inputs, *self.conv.size


class MaskedMatrix(NamedTuple):
    """A matrix ``A [rows, depth]`` as a weight and its mask, from which a kernel makes its packed form.

    Args:
        values: ``[rows, depth]``, any strides and floating dtype; values outside of the mask are not used.
        bits: uint8 of that shape; `bit` is set at entries of the mask.
        bit: Of ``bits``, see :mod:`lightning_nm.functional.mask_storage`.
        pattern: The N:M pattern of the mask; ``None`` if it has none.
        dtype: Of the GEMMs.
        order: int64 ``[depth]``: the mask is N:M along the depth in this order.
        dense: Makes the contiguous masked matrix in `dtype`, its depth in that order.
    """

    values: Tensor
    bits: Tensor
    bit: int
    pattern: NMPattern | None
    dtype: torch.dtype
    order: Tensor | None
    dense: Callable[[], Tensor]

    @classmethod
    def of(cls, matrix: Tensor, mask: Tensor, pattern: NMPattern | None) -> MaskedMatrix:
        """A contiguous matrix with a bool mask; `dense` is the matrix as it is."""
        # A bool is a byte of 0 or 1: its lowest bit, FORWARD_BIT, is the mask. Nothing is copied.
        bits = mask.view(torch.uint8)
        return cls(matrix, bits, FORWARD_BIT, pattern, matrix.dtype, None, lambda: matrix)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and depth."""
        rows, depth = self.bits.shape
        return rows, depth


class GemmKernel:
    """Executes GEMMs of an N:M matrix ``A [rows, depth]`` with dense ones.

    The base class is the reference: dense GEMMs, on every device and dtype.

    Example::

        >>> kernel = GemmKernel()
        >>> packed = kernel.pack(torch.tensor([[1.0, 0.0, 0.0, 2.0]]))
        >>> kernel.linear(packed, torch.ones(3, 4)).shape
        torch.Size([3, 1])
    """

    # Unique among the kernels: decisions, failures and packs are kept under it.
    name = "reference"
    device_type = ""
    """The type of device it is made for, such as ``"cuda"``; empty if it is made for every type."""
    takes: frozenset[Sparsity] = frozenset({"n:m"})
    """What may be sparse in its GEMMs."""
    ordered = True
    """Whether it takes a permuted matrix, and its dense columns, in the permuted order."""
    convolutions = False
    """Whether it also takes GEMMs of convolutions, by :meth:`conv` and the two after it."""
    keeps_packs = True
    """Whether the micro-batches of a step share packs of weights. Not if packing costs no more than reading the weight,
    as given its layout: a pack that is made again has no values from before a write that torch does not count."""

    searched: tuple[torch.dtype, ...] = ()
    """Dtypes of the GEMMs for which :meth:`search` is asked for a variant, in mode ``"auto"``."""
    packs_as: str = ""
    """The name of the kernel whose packed form this one takes; empty if it has its own."""

    tolerance: float | None = None
    """Largest relative difference of its GEMMs from the dense ones; ``None`` for that of the dtype."""

    def probe(self, device: torch.device) -> str:
        """Return why this kernel does not work on a device; empty if a numeric check on the device passed."""
        return ""

    def remark(self, device: torch.device) -> str:
        """Return what users should know about this kernel on a device where it works; usually empty."""
        return ""

    def supports(self, key: GemmKey) -> str:
        """Return why this kernel cannot execute a GEMM; empty if it can."""
        return ""

    def search(self, key: GemmKey, packed: Any, dense: Tensor) -> str:
        """Return the name of the variant of this kernel that is best for a GEMM; empty if it is the kernel itself.

        The name of a variant is that of the kernel, a colon and something that :meth:`variant` understands.

        Args:
            key: The GEMM.
            packed: A random A, as :meth:`pack` returns it.
            dense: The dense operand of :meth:`linear` or :meth:`matmul`.
        """
        return ""

    def conditions(self, key: GemmKey) -> str:
        """Return what else a decision for a GEMM depends on, as text: with another text it is made again."""
        return ""

    def variant(self, name: str) -> GemmKernel:
        """Return the variant with a name that :meth:`search` returned, here or in another process.

        Raises:
            ValueError: If there is none.
        """
        raise ValueError(f"{self.name} has no variant {name!r}")

    def pack(self, matrix: Tensor) -> Any:
        """Pack ``A [rows, depth]``, contiguous and N:M along `depth`, into the form that the GEMMs take."""
        return matrix

    def layout(self, matrix: MaskedMatrix) -> Any:
        """Return the part of the packed form that depends on the mask alone; it is kept until the masks change."""
        return None

    def pack_masked(self, matrix: MaskedMatrix, layout: Any) -> Any:
        """Pack a weight and its mask; `layout` is what :meth:`layout` returned for them."""
        return self.pack(matrix.dense())

    def linear(self, packed: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, ``bias [rows]``, result ``[tokens, rows]``.

        All are contiguous.
        """
        return torch.nn.functional.linear(x, packed, bias)

    def matmul(self, packed: Any, matrix: Tensor) -> Tensor:
        """Compute ``A B``: ``B [depth, columns]``, result ``[rows, columns]``, all contiguous.

        A may have more columns than B has rows: zeros that pad the tokens.
        """
        product: Tensor = packed[:, : len(matrix)] @ matrix
        return product

    def sampled(self, layout: Any, grad: Tensor, x: Tensor) -> Tensor:
        """Compute ``grad^T x`` at the entries of a mask with this layout; other entries are zero or anything.

        ``grad [tokens, rows]``, ``x [tokens, columns]``, result ``[rows, columns]``, all contiguous.
        """
        return grad.t() @ x

    def conv(self, packed: Any, x: Tensor, conv: Convolution, bias: Tensor | None = None) -> Tensor:
        """Convolve ``x [images, in, *size]`` with the packed ``W [out, in / groups * taps]``, all contiguous."""
        weight = packed.view(conv.weight_shape)
        return torch.nn.functional.conv2d(x, weight, bias, *conv.arguments)

    def conv_input(self, packed: Any, grad: Tensor, conv: Convolution) -> Tensor:
        """Compute a convolution's input gradient for ``grad [images, out, *positions]``, W as for :meth:`conv`."""
        # W is not transposed for this GEMM: where W_B is W_F, the pack of the forward serves it.
        weight = packed.view(conv.weight_shape)
        shape = torch.Size((len(grad), conv.inputs, *conv.size))
        return nn_grad.conv2d_input(shape, weight, grad, *conv.arguments)

    def conv_sampled(self, layout: Any, grad: Tensor, x: Tensor, conv: Convolution) -> Tensor:
        """Compute the gradient of a convolution's weight as a matrix; right at a mask's entries, anything elsewhere."""
        # The result is [out, in / groups * taps].
        shape = torch.Size(conv.weight_shape)
        return nn_grad.conv2d_weight(x, shape, grad, *conv.arguments).flatten(1)


def multiply(
    kernel: GemmKernel,
    key: GemmKey,
    packed: Any,
    other: Tensor,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
) -> Tensor:
    """The GEMM that a key describes, by the method of a kernel that computes it.

    Args:
        kernel: The kernel.
        key: Names the method and has the geometry of a convolution.
        packed: The packed A. Where outputs are sparse it is the layout of their mask.
        other: The dense operand: X of the forward and of wgrad, or dY of dgrad.
        bias: Of the forward.
        grad: dY, where outputs are sparse.
    """
    if key.conv is not None:
        if key.gemm == "forward":
            return kernel.conv(packed, other, key.conv, bias)
        if key.gemm == "dgrad":
            return kernel.conv_input(packed, other, key.conv)
        assert grad is not None
        return kernel.conv_sampled(packed, grad, other, key.conv)
    # dgrad is a `linear` as well: dX = dY A^T with A = W_B^T [in, out].
    if key.gemm != "wgrad":
        return kernel.linear(packed, other, bias)
    # With dY outputs are sparse, dW = dY^T X at the entries of a mask. Without it A is E(dY)^T.
    if grad is not None:
        return kernel.sampled(packed, grad, other)
    return kernel.matmul(packed, other)


Failures = dict[tuple[str, GemmKey], str]
"""Why a kernel is switched off for a GEMM, by its name and the key."""


def attempt(
    kernel: GemmKernel,
    key: GemmKey,
    failures: Failures,
    product: Callable[[], Tensor],
    dense: Callable[[], Tensor],
) -> Tensor:
    """Compute a GEMM by a kernel, or the dense one if the kernel fails or failed before.

    A failure gives one warning, and switches this kernel off for this key, unless memory was short. If the dense
    GEMM fails too, the operands are at fault: its error is raised, and the kernel stays on.
    """
    # Asked first whether there are any: the hash of a key takes as long as a small GEMM.
    if failures and (kernel.name, key) in failures:
        return dense()
    shape = key.result_shape
    try:
        result = product()
        # The layers hand the memory on as it is, so a transposed result would be misread.
        if result.shape != shape or result.dtype != key.dtype or not result.is_contiguous():
            raise RuntimeError(
                f"it returned {tuple(result.shape)} {result.dtype} with strides {result.stride()}, not a "
                f"contiguous {shape} {key.dtype}"
            )
        return result
    except (torch.OutOfMemoryError, MemoryError):
        failed = ""  # of the moment, not of the kernel
    except Exception as error:
        # The dense GEMM is no other one for the reference. A capture that failed takes no other GEMM either.
        if kernel.name == GemmKernel.name or is_capturing():
            raise
        failed = f"it failed, {describe_error(error)}"
    result = dense()  # not while the error is handled, which keeps the memory of what failed
    if failed:
        failures[kernel.name, key] = failed
        warnings.warn(
            f"kernel '{kernel.name}' is switched off for {key}: {failed}. The dense GEMM replaces it.",
            RuntimeWarning,
            stacklevel=3,
        )
    return result


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: nothing may be timed then, and what is computed belongs to the graph."""
    # In this order: a torch without CUDA raises an error at the second question.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def describe_error(error: Exception) -> str:
    """The class and the message of an error."""
    return f"{type(error).__name__}: {error}"


def token_bucket(tokens: int) -> int:
    """Round a number of tokens up to the next of ``{4, 5, 6, 7} 2^k``; a number up to 8 is its own bucket.

    The largest number of a bucket is less than 25 % above its smallest. The bucket of a multiple of a power of two is
    one as well, so a kernel that supports a size supports its bucket.

    Example::

        >>> [token_bucket(tokens) for tokens in (3, 9, 1000, 1024, 1025)]
        [3, 10, 1024, 1024, 1280]
    """
    # Between two powers of two the buckets are equally far apart, a quarter of the lower power: three bits are kept.
    step = 1 << max((tokens - 1).bit_length() - 3, 0)
    steps = -(-tokens // step)  # rounded up
    return steps * step


# Cached, because the router asks for each GEMM that it meets, and making a frozen dataclass is slow.
@lru_cache(maxsize=1 << 14)
def bucketed(key: GemmKey) -> GemmKey:
    """Replace the tokens of a key, its columns or for wgrad its depth, by their bucket; a decision holds for it."""
    if key.gemm == "wgrad":
        return replace(key, depth=token_bucket(key.depth))
    return replace(key, columns=token_bucket(key.columns))


def multiply_adds(key: GemmKey) -> int:
    """Count the multiply-adds of the dense GEMM, ``rows * depth * columns``."""
    return key.rows * key.depth * key.columns


def uses_of_pack(key: GemmKey, reuse: int) -> int:
    """Count the GEMMs that use one pack: `reuse` of them for a weight's, one for an operand that is drawn."""
    # dY differs in each micro-batch, as a drawn W_B does in each GEMM. Where outputs are sparse, nothing is packed.
    if key.gemm == "wgrad" or key.drawn:
        return 1
    return reuse


def check_mode(kernels: object) -> None:
    """Raise a ValueError for a mode that does not exist, with the modes."""
    if kernels in ("auto", "sparse", "reference"):
        return
    modes = "'auto' (measured), 'sparse' or 'reference'"
    if not isinstance(kernels, str):
        raise ValueError(
            f"kernels={kernels!r} is the mode, {modes}: pass a list of kernels as backends="
        )
    raise ValueError(f"kernels={kernels!r} is unknown: use {modes}")


# ------------------------------------------------------------------------------------------------------ handles

# Operators of compiled graphs take tensors and integers, so other objects go by number.
_numbers = count(1)
# Weak: a number keeps no object alive, and a graph that outlives its router is refused by `lookup`.
_objects: WeakValueDictionary[int, HasHandle] = WeakValueDictionary()


class HasHandle:
    """An object with an integer handle, by which :func:`lookup` returns it; a copy has a handle of its own.

    Example::

        >>> class Scale(HasHandle):
        ...     pass
        >>> scale = Scale()
        >>> lookup(scale.handle) == [scale]
        True
    """

    handle: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an object and register it."""
        # Not in __init__: copying and unpickling do not call that, and would share the handle.
        made = super().__new__(cls)
        made.handle = next(_numbers)
        _objects[made.handle] = made
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take another object's state, but not its handle."""
        for name, value in state.items():
            if name != "handle":
                self.__dict__[name] = value


def lookup(*handles: int) -> list[Any]:
    """Return the objects with these handles.

    Raises:
        RuntimeError: If one no longer exists.
    """
    try:
        return list(map(_objects.__getitem__, handles))
    except KeyError as error:
        raise RuntimeError(
            f"object {error.args[0]} of a compiled graph is gone: keep model and router until the backward pass is over"
        ) from None
