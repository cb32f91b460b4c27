"""The kernels that are known, which of them can make a product, and a way back to the dense product if one fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_nm.kernels.api import GemmKernel, GemmKey
from lightning_nm.kernels.backends.cusparselt import CuSparseLtKernel
from lightning_nm.kernels.backends.cusparselt_direct import CuSparseLtDirectKernel
from lightning_nm.kernels.backends.cutlass import CutlassKernel
from lightning_nm.kernels.keys import multiply_adds
from lightning_nm.kernels.trial import check


class KernelRegistry:
    """Kernels in the order in which they are tried, the reference first.

    Kernels may come from outside, and what they raise is a reason like any other. Each is probed once on a device.

    Args:
        kernels: The kernels besides the reference, each under a name of its own; ``None`` takes ``cusparselt-direct``,
            ``cusparselt`` and ``cutlass``.

    Raises:
        ValueError: If two kernels have one name, or something is no kernel.

    Example::

        >>> from lightning_nm import NMPattern
        >>> from lightning_nm.kernels import SimulatedSparseKernel
        >>> registry = KernelRegistry([CuSparseLtKernel(), SimulatedSparseKernel()])
        >>> key = GemmKey("forward", 64, 32, 8, torch.float32, NMPattern(2, 4), "cpu")
        >>> [(kernel.name, reason) for kernel, reason in registry.usable(key)]
        [('reference', ''), ('cusparselt', 'cuSPARSELt needs a CUDA device, not cpu'), ('simulated', '')]
    """

    def __init__(self, kernels: Sequence[GemmKernel] | None = None) -> None:
        self.reference = GemmKernel()
        self.kernels: dict[str, GemmKernel] = {}
        if kernels is None:
            kernels = [CuSparseLtDirectKernel(), CuSparseLtKernel(), CutlassKernel()]
        if isinstance(kernels, (str, GemmKernel)) or not all(isinstance(kernel, GemmKernel) for kernel in kernels):
            raise ValueError(f"kernels={kernels!r} must be a list of GemmKernel objects")
        for kernel in (self.reference, *kernels):
            if kernel.name in self.kernels:
                raise ValueError(f"two kernels are named '{kernel.name}': give the second one another `name`")
            self.kernels[kernel.name] = kernel
        self._failed: dict[tuple[str, GemmKey], str] = {}
        self._probes: dict[tuple[str, str], str] = {}

    def __str__(self) -> str:
        return ", ".join(self.kernels)

    @property
    def failures(self) -> int:
        """How many times a kernel was switched off for a product."""
        return len(self._failed)

    def forget_failures(self) -> None:
        """Let every kernel try again."""
        self._failed.clear()

    def reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        """Why a kernel is not used for a product: it failed before, its probe, or what it supports; empty if it is."""
        if failed := self._failed.get((kernel.name, key)):
            return failed
        return self.probe(kernel, key.device) or answer(partial(kernel.supports, key))

    def probe(self, kernel: GemmKernel, device: str) -> str:
        """Why a kernel does not work on a device; asked once for each."""
        if (kernel.name, device) not in self._probes:
            self._probes[kernel.name, device] = answer(partial(kernel.probe, torch.device(device)))
        return self._probes[kernel.name, device]

    def idle(self, device: str) -> str:
        """Why no sparse kernel works on a device; empty if one does."""
        reasons = [f"{kernel.name}: {self.probe(kernel, device)}" for kernel in list(self.kernels.values())[1:]]
        working = any(not self.probe(kernel, device) for kernel in list(self.kernels.values())[1:])
        return "" if working else "; ".join(reasons) or "there is no sparse kernel"

    def usable(self, key: GemmKey) -> list[tuple[GemmKernel, str]]:
        """List all known kernels, each with the reason why it is not used for a product, empty if it can be."""
        return [(kernel, self.reason(kernel, key)) for kernel in self.kernels.values()]

    def legal(self, key: GemmKey, notes: list[str]) -> Iterator[GemmKernel]:
        """Yield the sparse kernels that compute a product right, each tried when it is asked for.

        Args:
            key: The product.
            notes: Takes the reasons against the others.
        """
        if not multiply_adds(key):
            notes.append("the product is empty")
            return
        for kernel in list(self.kernels.values())[1:]:
            reason = self.reason(kernel, key) or answer(partial(check, kernel, key))
            if reason:
                notes.append(f"{kernel.name}: {reason}")
            else:
                yield kernel

    def attempt(
        self, kernel: GemmKernel, key: GemmKey, product: Callable[[], Tensor], dense: Callable[[], Tensor]
    ) -> Tensor:
        """Make a product by a kernel, and the dense one if that fails, now and from then on.

        A failure is told in one warning, and switches this kernel off for this key, unless memory was short. If the
        dense product fails too, the operands are at fault: its error is raised, and the kernel stays.

        Args:
            kernel: The kernel that `product` calls.
            key: The product.
            product: Makes the product by the kernel.
            dense: Makes it by the reference.
        """
        if (kernel.name, key) in self._failed:
            return dense()
        try:
            return _checked(product(), key)
        except torch.OutOfMemoryError:
            failed = ""  # of the moment, not of the kernel
        except Exception as error:
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if kernel is self.reference or capturing:  # a capture that failed takes no other product either
                raise
            failed = f"it failed, {failure(error)}"
        result = dense()  # not while the error is handled, which keeps the memory of what failed
        if not failed:
            return result
        self._failed[kernel.name, key] = failed
        warnings.warn(
            f"kernel '{kernel.name}' is switched off for {key}: {failed}. The dense product takes its place.",
            RuntimeWarning,
            stacklevel=3,
        )
        return result

    def linear(self, kernel: GemmKernel, key: GemmKey, matrix: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x A^T + bias`` with ``A [rows, depth]`` packed on the way, by a kernel or, if it fails, dense.

        Args:
            kernel: What should make it.
            key: The product, with the sizes of `matrix` and `x`.
            matrix: ``A [rows, depth]``, N:M along `depth`, contiguous.
            x: ``[tokens, depth]``, contiguous.
            bias: ``[rows]``.

        Returns:
            ``[tokens, rows]``.
        """
        return self.attempt(
            kernel,
            key,
            lambda: kernel.linear(kernel.pack(matrix), x, bias),
            lambda: self.reference.linear(matrix, x, bias),
        )

    def matmul(self, kernel: GemmKernel, key: GemmKey, matrix: Tensor, dense: Tensor) -> Tensor:
        """``A B`` with ``A [rows, depth]`` packed on the way, by a kernel or, if it fails, dense.

        Args:
            kernel: What should make it.
            key: The product, with the sizes of `matrix` and `dense`.
            matrix: ``A [rows, depth]``, N:M along `depth`, contiguous.
            dense: ``B [depth, columns]``, contiguous.

        Returns:
            ``[rows, columns]``.
        """
        return self.attempt(
            kernel,
            key,
            lambda: kernel.matmul(kernel.pack(matrix), dense),
            lambda: self.reference.matmul(matrix, dense),
        )


def _checked(result: Tensor, key: GemmKey) -> Tensor:
    """Refuse a result of another form than the product's."""
    shape = (key.rows, key.columns) if key.gemm == "wgrad" else (key.columns, key.rows)
    if result.shape != shape or result.dtype != key.dtype or not result.is_contiguous():
        raise RuntimeError(
            f"it returned {tuple(result.shape)} {result.dtype} with strides {result.stride()}, not a contiguous "
            f"{shape} {key.dtype}"
        )
    return result


def failure(error: Exception) -> str:
    """Say what was raised."""
    return f"{type(error).__name__}: {error}"


def answer(question: Callable[[], str]) -> str:
    """Ask for a reason; what is raised is one."""
    try:
        return question()
    except Exception as error:
        return failure(error)
