"""NVIDIA's 2:4 products: cuSPARSELt through the two operators that torch core binds to it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_nm.kernels.backends.probe import DeviceProbe
from lightning_nm.kernels.backends.two_four import TwoFourKernel, two_four_violation

# Compute capabilities that cuSPARSELt 0.8 names. torch's other 2:4 operators know 8.x alone, and those that prune by
# tiles write the packed form of 8.x on whatever device they run: none of them is used.
CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (11, 0), (12, 0), (12, 1))

DTYPES = (torch.bfloat16, torch.float16)

_thread = threading.local()


class CuSparseLtKernel(TwoFourKernel):
    """2:4 products on sparse tensor cores, by ``torch._cslt_compress`` and ``torch._cslt_sparse_mm``.

    | product | call |
    |---|---|
    | ``pack(A)`` | ``_cslt_compress(A)`` |
    | ``linear(A, x, bias)`` | ``_cslt_sparse_mm(packed, x.t(), bias=bias, transpose_result=True, alg_id=algorithm)`` |
    | ``matmul(A, B)`` | ``_cslt_sparse_mm(packed, B, alg_id=algorithm)`` |

    Neither call copies an operand or a result. The operators take A for row-major and B for row-major or its
    transpose, whatever their strides are, and drop a group's third nonzero without an error; the checks of
    :class:`TwoFourKernel` come before them. No `alpha` is passed, because reading it would synchronise.

    Nothing runs on a device before :meth:`probe` passed there, once for each kernel object and device.

    Args:
        algorithm: The library's id of an algorithm. Some ids were seen to give wrong results (pytorch#155333), so each
            has to pass the probe; 0 is the library's default.
        check: Look into every matrix to pack for a group of more than two entries that are not ``+0``, at the cost of
            a pass and a synchronisation; to find errors with.

    Raises:
        ValueError: If `algorithm` is negative.

    Source: torch's aten/src/ATen/native/sparse/cuda/cuSPARSELtOps.cpp, and the cuSPARSELt documentation.
    """

    name = "cusparselt"
    dtypes = DTYPES
    ops: Any = torch  # what holds the two operators

    def __init__(self, algorithm: int = 0, check: bool = False) -> None:
        self.name = named(self.name, algorithm)
        self.algorithm = algorithm
        self.check = check
        self.device_probe = DeviceProbe(self)

    def machine_reason(self, device: torch.device) -> str:
        """Why cuSPARSELt cannot run on a device, as far as can be said without trying; empty if it may."""
        if reason := cuda_reason(device):
            return reason
        if not torch.backends.cusparselt.is_available():
            return f"torch {torch.__version__} was built without cuSPARSELt: install a CUDA build from pytorch.org"
        return ""

    def remark(self, device: torch.device) -> str:
        """Warn of cuSPARSELt 0.8.0 on Hopper, which is correct but slower than what came before and after."""
        return "" if self.machine_reason(device) else regression(device, library_version())

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack by the library; with ``check``, refuse what it might drop or misread.

        Raises:
            ValueError: If ``check`` is set and a group holds more than two entries other than ``+0``.
        """
        if self.check:
            refuse_crowded(self.name, matrix)
        _claim_thread(matrix.device)
        return self.ops._cslt_compress(matrix)

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        _claim_thread(x.device)
        return self.ops._cslt_sparse_mm(packed, x.t(), bias=bias, transpose_result=True, alg_id=self.algorithm)

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        _claim_thread(matrix.device)
        return self.ops._cslt_sparse_mm(packed, matrix, alg_id=self.algorithm)


def _claim_thread(device: torch.device) -> None:
    """Refuse a second device in one thread: torch's cuSPARSELt handle belongs to the first one that a thread used."""
    if device.type != "cuda":
        return
    first = getattr(_thread, "device", device)
    if first != device:
        raise RuntimeError(
            f"this thread used cuSPARSELt on {first} and cannot use it on {device}: one thread or process a device"
        )
    _thread.device = device


def named(name: str, algorithm: int) -> str:
    """The name of a kernel with an algorithm.

    Raises:
        ValueError: If `algorithm` is negative.
    """
    if algorithm < 0:
        raise ValueError(f"algorithm={algorithm} is not an id of cuSPARSELt: pass 0, its default, or a larger one")
    return f"{name}:{algorithm}" if algorithm else name


def refuse_crowded(name: str, matrix: Tensor) -> None:
    """Refuse what the library might drop or misread.

    Raises:
        ValueError: If a group of four holds more than two entries other than ``+0``.
    """
    if violation := two_four_violation(matrix.view(torch.int16) != 0):
        raise ValueError(
            f"{name}: a matrix of shape {tuple(matrix.shape)} cannot be packed, {violation}, counting -0.0: "
            "prune it by a select (`torch.where`, `nm_prune`), which leaves +0.0, and not by a product with a mask"
        )


def cuda_reason(device: torch.device) -> str:
    """Why cuSPARSELt cannot run on a device, from what torch tells of it; empty if it may."""
    if device.type != "cuda":
        return f"cuSPARSELt needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip:
        return "what replaces cuSPARSELt on ROCm was never tried"
    capability = torch.cuda.get_device_capability(device)
    if capability not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        return f"compute capability {capability[0]}.{capability[1]} is not one that cuSPARSELt knows: {known}"
    return ""


def regression(device: torch.device, version: int | None) -> str:
    """Say that this version of cuSPARSELt is slow on this device; empty if it is not."""
    if version != 800 or torch.cuda.get_device_capability(device) != (9, 0):
        return ""
    return (
        "cuSPARSELt 0.8.0 has a performance regression on H100 and H200, which 0.8.1 fixes (NVIDIA's release "
        "notes): install a torch that brings 0.8.1 or later, such as 2.13"
    )


def library_version() -> int | None:
    """The version of the cuSPARSELt that is loaded, 801 for 0.8.1; None without it.

    ``torch.backends.cusparselt.version()`` is the version that torch was compiled with. Another release of the library
    may be installed beside it, so the library itself is asked, and torch only if that fails.
    """
    if not torch.backends.cusparselt.is_available():
        return None
    try:
        library = ctypes.CDLL("libcusparseLt.so.0")
        return version_number(lambda part: _property(library, part))
    except (OSError, AttributeError, RuntimeError):
        return torch.backends.cusparselt.version()


def version_number(read: Callable[[int], int]) -> int:
    """``1000 major + 100 minor + patch`` from the library's properties 0, 1 and 2."""
    major, minor, patch = map(read, range(3))
    return 1000 * major + 100 * minor + patch


def _property(library: Any, part: int) -> int:
    value = ctypes.c_int()
    if status := library.cusparseLtGetProperty(part, ctypes.byref(value)):
        raise RuntimeError(f"cusparseLtGetProperty({part}) returned {status}")
    return value.value
