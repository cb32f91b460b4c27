"""NVIDIA's 2:4 GEMMs: cuSPARSELt through the two operators that torch core binds to it."""

from __future__ import annotations

import copy
import ctypes
import re
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.kernels.api import GemmKernel, GemmKey
from lightning_nm.kernels.gpu import hopper
from lightning_nm.kernels.gpu.probe import DeviceProbe
from lightning_nm.kernels.gpu.two_four import DENSE_MULTIPLE, TwoFourKernel, two_four_violation

# The compute capabilities of cuSPARSELt 0.8. torch's other 2:4 operators are not used: they support 8.x alone, and
# those that prune by tiles write the packed form of 8.x on every device.
CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (11, 0), (12, 0), (12, 1))

DTYPES = (torch.bfloat16, torch.float16)

# Not float16: there the search ends in an illegal instruction, and with it all work of the process on the device
# (cuSPARSELt 0.8.0 on an H200, `benchmarks/results/gpu`).
SEARCHED = (torch.bfloat16,)

_thread = threading.local()  # its attribute `device` is the one that this thread uses


class CuSparseLtKernel(TwoFourKernel):
    """2:4 GEMMs on sparse tensor cores, by ``torch._cslt_compress`` and ``torch._cslt_sparse_mm``.

    | GEMM | call |
    |---|---|
    | ``pack(A)`` | ``_cslt_compress(A)``, or its bits by one pass |
    | ``linear(A, x, bias)`` | ``_cslt_sparse_mm(packed, x.t(), bias=bias, transpose_result=True, alg_id=algorithm)`` |
    | ``matmul(A, B)`` | ``_cslt_sparse_mm(packed, B, alg_id=algorithm)`` |

    In bfloat16 :meth:`search` lets the library search the algorithm of a GEMM; it becomes a variant, such as
    ``cusparselt:17``. On Hopper :mod:`~lightning_nm.kernels.gpu.hopper` packs where that gives the bits of
    ``_cslt_compress``. Neither call copies an operand or a result. The operators ignore strides, and drop a group's
    third nonzero without an error; the checks of :class:`TwoFourKernel` come before them. No `alpha` is passed, because
    reading it would synchronise. Nothing runs on a device before :meth:`probe` passed there, once for each kernel
    object and device.

    Args:
        algorithm: The library's id of an algorithm, 0 for its default; ``None`` is the default, and
            in mode ``"auto"`` the library also searches in bfloat16. Some ids give wrong results (pytorch#155333): one
            that is given has to pass the probe, one that is found is compared with the dense GEMM at the size at which
            it will run.
        check: For debugging: refuse matrices with more than two entries other than ``+0`` in a group, which costs a
            pass and a synchronisation.

    Raises:
        ValueError: If `algorithm` is negative.

    Source: torch's aten/src/ATen/native/sparse/cuda/cuSPARSELtOps.cpp, and the cuSPARSELt documentation.
    """

    name = "cusparselt"
    device_type = "cuda"
    dtypes = DTYPES
    ops: Any = torch  # the namespace of the two operators; tests replace it

    def __init__(self, algorithm: int | None = None, check: bool = False) -> None:
        self.algorithm = algorithm or 0
        # Decisions are stored under the name, so another algorithm is another kernel.
        self.name = named(self.name, self.algorithm)
        # An algorithm that the user names is not replaced by a search.
        if algorithm is None:
            self.searched = SEARCHED
        self.check = check
        self.device_probe: DeviceProbe = DeviceProbe(self)
        # The one pass replaces `compress`, where crowded groups are refused: it would drop a third nonzero.
        if not check:
            self.one_pass = hopper.compress

    def _with(self, algorithm: int) -> CuSparseLtKernel:
        """Return a copy with another algorithm, which shares the verdict on a device and its packed form."""
        # Shallow: both share the object that knows the verdict on a device.
        variant = copy.copy(self)
        variant.__dict__.update(
            name=named(self.name, algorithm),
            algorithm=algorithm,
            searched=(),
            packs_as=self.packs_as or self.name,
        )
        return variant

    def machine_reason(self, device: torch.device) -> str:
        """Return why cuSPARSELt cannot run on a device, as far as is known without a GEMM; empty if it may."""
        reason = cuda_reason(device)
        if reason or torch.backends.cusparselt.is_available():
            return reason
        return f"torch {torch.__version__} was built without cuSPARSELt: install a CUDA build from pytorch.org"

    def remark(self, device: torch.device) -> str:
        """Warn of cuSPARSELt 0.8.0 on Hopper, which is slower than other versions."""
        if self.machine_reason(device):
            return ""
        return regression(device, library_version())

    def search(self, key: GemmKey, packed: Tensor, dense: Tensor) -> str:
        """Let the library search the fastest algorithm of a GEMM, which takes it some tenths of a second.

        It also answers with a split of the depth (-1 on an H200). That is not used: what is checked and timed is the
        algorithm alone.
        """
        _claim_thread(dense.device)
        is_wgrad = key.gemm == "wgrad"
        # As `matmul` pads the depth, and `linear` the tokens.
        multiple = self.multiple(dense.device) if is_wgrad else DENSE_MULTIPLE
        dense = pad(dense, (0, 0, 0, -len(dense) % multiple))
        other = dense if is_wgrad else dense.t()
        no_bias, no_alpha, same_dtype = None, None, None
        # No operator of torch: it takes the stream of the current device, which need not be this one.
        with torch.cuda.device_of(dense):
            found = self.ops._C._cusparselt.mm_search(
                packed, other, no_bias, no_alpha, same_dtype, not is_wgrad
            )
        # Algorithm 0 is the default, which is this kernel itself.
        return named(self.name, found[0]) if found[0] else ""

    def variant(self, name: str) -> GemmKernel:
        """Return this kernel with another algorithm, such as ``cusparselt:17``; it shares the probe of a device."""
        # No leading zeros: decisions are stored under the name, so that an algorithm has one.
        if match := re.fullmatch(rf"{re.escape(self.name)}:([1-9][0-9]{{0,4}})", name):
            return self._with(int(match[1]))
        return super().variant(name)

    def conditions(self, key: GemmKey) -> str:
        """Say whether algorithms are searched, and whether a Triton kernel packs."""
        found = []
        if key.dtype in self.searched:
            found.append("searched")
        # The time of packing is part of a decision, and differs between the two ways.
        if self.one_pass is not None and self.device_probe.packs_alike(torch.device(key.device)):
            found.append("packed in one pass")
        return ", ".join(found)

    def compress(self, matrix: Tensor) -> Tensor:
        """Pack by the library.

        Raises:
            ValueError: If ``check`` is set and a group holds more than two entries other than ``+0``.
        """
        if self.check:
            refuse_crowded(self.name, matrix)
        _claim_thread(matrix.device)
        return self.ops._cslt_compress(matrix)

    def sparse_linear(self, packed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x A^T + bias``: ``x [tokens, depth]``, result ``[tokens, rows]``."""
        _claim_thread(x.device)
        # The operator computes A x^T in column order, which is x A^T in row order.
        return self.ops._cslt_sparse_mm(
            packed, x.t(), bias=bias, transpose_result=True, alg_id=self.algorithm
        )

    def sparse_matmul(self, packed: Tensor, matrix: Tensor) -> Tensor:
        """Compute ``A B``: ``B [depth, columns]``, result ``[rows, columns]``."""
        _claim_thread(matrix.device)
        return self.ops._cslt_sparse_mm(packed, matrix, alg_id=self.algorithm)


def _claim_thread(device: torch.device) -> None:
    """Refuse a second device in one thread: torch's cuSPARSELt handle belongs to the first one."""
    if device.type != "cuda":
        return
    first = getattr(_thread, "device", device)
    if first != device:
        raise RuntimeError(
            f"this thread used cuSPARSELt on {first} and cannot use it on {device}: one thread or process a device"
        )
    _thread.device = device


def named(name: str, algorithm: int) -> str:
    """Return the name of a kernel with an algorithm; refuse a negative one."""
    if algorithm < 0:
        raise ValueError(
            f"algorithm={algorithm} is not an id of cuSPARSELt: pass 0, its default, or a larger one"
        )
    if algorithm == 0:
        return name
    return f"{name}:{algorithm}"


def refuse_crowded(name: str, matrix: Tensor) -> None:
    """Refuse a matrix with more than two entries other than ``+0`` in a group of four."""
    # As bits, because the library counts -0.0 as a nonzero.
    violation = two_four_violation(matrix.view(torch.int16) != 0)
    if violation:
        raise ValueError(
            f"{name}: a matrix of shape {tuple(matrix.shape)} cannot be packed, {violation}, counting -0.0: "
            "prune it by a select (`torch.where`, `nm_prune`), which leaves +0.0, and not by a product with a mask"
        )


def cuda_reason(device: torch.device) -> str:
    """Return why cuSPARSELt cannot run on a device, as far as torch knows; empty if it may."""
    if device.type != "cuda":
        return f"cuSPARSELt needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    # ROCm calls its devices cuda as well.
    if torch.version.hip:
        return "ROCm's replacement of cuSPARSELt was never tested"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) not in CAPABILITIES:
        known = ", ".join(f"{major}.{minor}" for major, minor in CAPABILITIES)
        return f"compute capability {major}.{minor} is not one that cuSPARSELt knows: {known}"
    return ""


def regression(device: torch.device, version: int | None) -> str:
    """Return a warning of a version of cuSPARSELt that is slow on a device; empty if it is not."""
    if version != 800 or torch.cuda.get_device_capability(device) != (9, 0):
        return ""
    return (
        "cuSPARSELt 0.8.0 has a performance regression on H100 and H200, which 0.8.1 fixes (NVIDIA's release "
        "notes): install a torch that brings 0.8.1 or later, such as 2.13"
    )


def library_version() -> int | None:
    """Return the version of the loaded cuSPARSELt, 801 for 0.8.1; None without it.

    The library is asked; ``torch.backends.cusparselt.version()``, the version that torch was compiled with, is the
    fallback.
    """
    if not torch.backends.cusparselt.is_available():
        return None
    try:
        # torch has loaded it already, so this finds the same copy.
        library = ctypes.CDLL("libcusparseLt.so.0")
        return version_number(lambda part: _property(library, part))
    except (OSError, AttributeError, RuntimeError):
        return torch.backends.cusparselt.version()


def version_number(read: Callable[[int], int]) -> int:
    """Return ``1000 major + 100 minor + patch`` from the library's properties 0, 1 and 2."""
    major = read(0)
    minor = read(1)
    patch = read(2)
    return 1000 * major + 100 * minor + patch


def _property(library: Any, part: int) -> int:
    """A property of the library, by its number in ``libraryPropertyType``."""
    value = ctypes.c_int()
    status = library.cusparseLtGetProperty(part, ctypes.byref(value))
    if status:
        raise RuntimeError(f"cusparseLtGetProperty({part}) returned {status}")
    return value.value
