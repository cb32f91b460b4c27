"""The known kernels, which of them can execute a product, and the dense product if one fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_nm.functional.spelling import not_given
from lightning_nm.kernels.api import GemmKernel, GemmKey, Sparsity
from lightning_nm.kernels.cpu import CpuCsrKernel, CpuPermuteKernel
from lightning_nm.kernels.gpu.cusparselt import CuSparseLtKernel

_NOT_TAKEN: dict[Sparsity, str] = {
    "n:m": "it takes no operand that is N:M along the contraction axis",
    "masked": "its sparse operand must be N:M along the contraction axis",
    "outputs": "it computes all outputs, not those at kept entries alone",
}


class KernelRegistry:
    """The reference and the sparse kernels, in order of preference.

    An exception that a kernel raises counts as a reason against it. Each kernel is probed once per device.

    Args:
        backends: The kernels besides the reference, each with its own name; ``None`` takes those of the package:
            ``cusparselt`` for GPUs, ``cpu-permute`` and ``cpu-csr`` for CPUs.

    Raises:
        ValueError: If two kernels have one name, or something is not a kernel.

    Example::

        >>> from lightning_nm import NMPattern
        >>> from lightning_nm.kernels import SimulatedSparseKernel
        >>> registry = KernelRegistry([CuSparseLtKernel(), SimulatedSparseKernel()])
        >>> key = GemmKey("forward", 64, 32, 8, torch.float32, NMPattern(2, 4), "cpu")
        >>> [(kernel.name, registry.reason(kernel, key)) for kernel in registry.kernels.values()]
        [('reference', ''), ('cusparselt', 'cuSPARSELt needs a CUDA device, not cpu'), ('simulated', '')]
    """

    def __init__(self, backends: Sequence[GemmKernel] | None = None) -> None:
        self.reference = GemmKernel()
        self.kernels: dict[str, GemmKernel] = {}
        if backends is None:
            backends = [
                CuSparseLtKernel(),
                CpuPermuteKernel(),
                CpuCsrKernel(),
            ]
        # A mode as text or a single kernel is a likely mistake.
        if not isinstance(backends, (list, tuple)):
            raise ValueError(f"backends must be a list of GemmKernel objects{not_given(backends)}")
        for kernel in backends:
            if not isinstance(kernel, GemmKernel):
                raise ValueError(f"backends must hold GemmKernel objects{not_given(kernel)}")
        for kernel in (self.reference, *backends):
            if kernel.name in self.kernels:
                raise ValueError(
                    f"two kernels are named '{kernel.name}': give the second one another `name`"
                )
            self.kernels[kernel.name] = kernel
        self.failures: dict[tuple[str, GemmKey], str] = {}
        """Why a kernel was switched off for a product, by its name and the key."""
        # By the kernel's name and the device: why the kernel does not work there, empty if it does.
        self._probes: dict[tuple[str, str], str] = {}

    def __str__(self) -> str:
        return ", ".join(self.kernels)

    @property
    def backends(self) -> list[GemmKernel]:
        """The kernels besides the reference, in order."""
        _, *sparse = self.kernels.values()  # the reference was added first
        return sparse

    def made_for(self, device: str) -> list[GemmKernel]:
        """Return the kernels besides the reference that are made for a device's type, in order; all if none is."""
        kind = torch.device(device).type
        found = [kernel for kernel in self.backends if kernel.device_type in ("", kind)]
        # With none the others are asked, so that the report says why each does not work here.
        return found or self.backends

    def reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        """Return why a kernel is not used for a product: a failure, its probe or its `supports`; empty if it is."""
        failed = self.failures.get((kernel.name, key))
        if failed:
            return failed
        # The probe comes first: a kernel may need the device to answer the rest.
        return (
            self.probe(kernel, key.device)
            or self._sparsity_reason(kernel, key)
            or reason_or_error(partial(kernel.supports, key))
        )

    def _sparsity_reason(self, kernel: GemmKernel, key: GemmKey) -> str:
        """Return why a kernel cannot use what is sparse in a product; empty if it can."""
        if kernel is self.reference:
            return ""
        if key.conv is not None and not kernel.convolutions:
            return "it takes no convolutions"
        if key.sparsity not in kernel.takes:
            return _NOT_TAKEN[key.sparsity]
        return ""

    def reason_against(self, name: str, key: GemmKey) -> str:
        """:meth:`reason` of the kernel with this name, which may not be among the kernels."""
        kernel = self.kernels.get(name)
        if kernel is None:  # of a decision from a file
            return "not among the kernels"
        return self.reason(kernel, key)

    def probe(self, kernel: GemmKernel, device: str) -> str:
        """Return why a kernel does not work on a device; asked once for each."""
        asked = kernel.name, device
        if asked not in self._probes:
            self._probes[asked] = reason_or_error(partial(kernel.probe, torch.device(device)))
        return self._probes[asked]

    def takes(self, device: str) -> frozenset[Sparsity]:
        """Return what may be sparse in the products of the kernels that work on a device."""
        taken: frozenset[Sparsity] = frozenset()
        for kernel in self.backends:
            if not self.probe(kernel, device):
                taken |= kernel.takes
        return taken

    def unavailable_reason(self, device: str) -> str:
        """Return why no sparse kernel works on a device; empty if one does."""
        names: dict[str, list[str]] = {}  # by reason: the kernels of one library share it
        for kernel in self.backends:
            reason = self.probe(kernel, device)
            if not reason:
                return ""
            # That a kernel for GPUs does not run on a CPU explains nothing.
            if kernel in self.made_for(device):
                names.setdefault(reason, []).append(kernel.name)
        reasons = [f"{', '.join(kernels)}: {reason}" for reason, kernels in names.items()]
        return "; ".join(reasons) or "there is no sparse kernel"

    def attempt(
        self,
        kernel: GemmKernel,
        key: GemmKey,
        product: Callable[[], Tensor],
        dense: Callable[[], Tensor],
    ) -> Tensor:
        """Compute a product by a kernel, or the dense one if the kernel fails or failed before.

        A failure gives one warning, and switches this kernel off for this key, unless memory was short. If the dense
        product fails too, the operands are at fault: its error is raised, and the kernel stays on.
        """
        # Asked first whether there are any: the hash of a key takes as long as a small product.
        if self.failures and (kernel.name, key) in self.failures:
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
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            # A capture that failed takes no other product either.
            if kernel is self.reference or capturing:
                raise
            failed = f"it failed, {describe_error(error)}"
        result = dense()  # not while the error is handled, which keeps the memory of what failed
        if failed:
            self.failures[kernel.name, key] = failed
            warnings.warn(
                f"kernel '{kernel.name}' is switched off for {key}: {failed}. The dense product replaces it.",
                RuntimeWarning,
                stacklevel=3,
            )
        return result


def describe_error(error: Exception) -> str:
    """The class and the message of an error."""
    return f"{type(error).__name__}: {error}"


def reason_or_error(ask: Callable[[], str]) -> str:
    """Ask for a reason; an exception is one."""
    try:
        return ask()
    except Exception as error:
        return describe_error(error)
