"""The compiled library of CPU kernels: finding, checking and calling it."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu.build import LIBRARY, REASON, source

PLACE = Path(__file__).resolve().parents[3]
"""The folder that Python imports this package from: a checkout, or that of the installed packages."""
ABI = 5
LEVELS = ("baseline", "avx2", "avx512", "avx512-bf16")
"""Instruction sets by number; each includes those before it."""
LINEAR, MATMUL, SAMPLED = range(3)
FORWARD, DGRAD, WGRAD = range(3)
"""Products of convolutions."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
EMPTY = 0x80
_NO_MEMORY, _NO_KERNEL = 1, 2
PANEL = 64


_THREADS: list[Any] = [("parallel", c_void_p), ("threads", c_int64)]
_DENSE: list[Any] = [
    ("dtype", c_int32),
    ("failed", c_int32),
    ("x", c_void_p),
    ("bias", c_void_p),
    ("grad", c_void_p),
    ("y", c_void_p),
]


class Operands(ctypes.Structure):
    """``nm_operands`` of the library."""

    _fields_ = [
        *_THREADS,
        ("rows", c_int64),
        ("depth", c_int64),
        ("tokens", c_int64),
        *_DENSE,
    ]


class PermuteOperand(ctypes.Structure):
    """``nm_permute`` of the library."""

    _fields_ = [("index", c_void_p), ("values", c_void_p), ("slots", c_int64), ("paired", c_int64)]


class CsrOperand(ctypes.Structure):
    """``nm_csr`` of the library."""

    _fields_ = [("start", c_void_p), ("offset", c_void_p), ("values", c_void_p)]


class ConvOperands(ctypes.Structure):
    """``nm_conv`` of the library."""

    _fields_ = [
        *_THREADS,
        ("images", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("groups", c_int64),
        ("size", c_int64 * 2),
        ("kernel", c_int64 * 2),
        ("stride", c_int64 * 2),
        ("padding", c_int64 * 2),
        ("dilation", c_int64 * 2),
        ("positions", c_int64 * 2),
        *_DENSE,
    ]


class Mask(ctypes.Structure):
    """``nm_mask`` of the library."""

    _fields_ = [
        *_THREADS,
        ("bits", c_void_p),
        ("bit", c_int32),
        ("rows", c_int64),
        ("depth", c_int64),
        ("row_stride", c_int64),
        ("depth_stride", c_int64),
        ("order", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "nm_abi": (c_int32, []),
    "nm_source": (c_char_p, []),
    "nm_best_level": (c_int32, []),
    "nm_lanes": (c_int64, [c_int32]),
    "nm_permute_layout": (c_int32, [POINTER(Mask), c_int64, c_int64, c_int32, c_void_p]),
    "nm_permute_valid": (c_int32, [c_void_p, c_int64, c_int64]),
    "nm_permute_values": (
        None,
        [POINTER(Mask), c_int64, c_int64, c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p],
    ),
    "nm_csr_start": (c_int64, [POINTER(Mask), c_void_p]),
    "nm_csr_fill": (None, [POINTER(Mask), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "nm_csr_valid": (c_int32, [c_void_p, c_int64, c_void_p, c_int64, c_int64]),
    "nm_csr_values": (
        None,
        [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p],
    ),
    "nm_permute_product": (c_int32, [c_int32, c_int32, POINTER(Operands), POINTER(PermuteOperand)]),
    "nm_csr_product": (c_int32, [c_int32, c_int32, POINTER(Operands), POINTER(CsrOperand)]),
    "nm_conv_product": (c_int32, [c_int32, c_int32, POINTER(ConvOperands), POINTER(CsrOperand)]),
}


@functools.cache
def load() -> Any:
    """Load the library.

    Raises:
        RuntimeError: If it is missing, damaged, of another version or of other sources, with what to do.
    """
    advice = (
        "install lightning-nm again with a C compiler (gcc or clang) on the PATH; "
        "in a checkout, run `make library`"
    )
    if not LIBRARY.exists():
        if other := _other_copy():
            advice = (
                f"Python imports lightning_nm from {PLACE}. Run `python lightning_nm/kernels/cpu/build.py` or `make "
                f"library` there, or start Python in another folder, for the copy in {other}, which has the library"
            )
        raise RuntimeError(f"the library of CPU kernels was not built{_build_failure()}: {advice}")
    try:
        if _is_cut_off():
            raise OSError("it is cut off")
        library = ctypes.CDLL(str(LIBRARY))
        abi = library.nm_abi()
        if abi != ABI:
            raise RuntimeError(
                f"the library of CPU kernels, {LIBRARY}, is of version {abi}, not {ABI}: {advice}"
            )
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"the library of CPU kernels, {LIBRARY}, cannot be loaded ({error}): {advice}"
        ) from error
    if source() not in ("", library.nm_source().decode()):
        raise RuntimeError(
            f"the library of CPU kernels, {LIBRARY}, was compiled from other sources than those beside "
            f"it{_build_failure()}: {advice}"
        )
    return library


def _other_copy() -> Path | None:
    """The folder of another copy of this package that Python could import, and that has a library."""
    inside = Path(__file__).resolve().relative_to(PLACE).with_name(LIBRARY.name)
    folders = (Path(folder or os.curdir).resolve() for folder in sys.path)
    return next(
        (folder for folder in folders if folder != PLACE and (folder / inside).exists()), None
    )


def _is_cut_off() -> bool:
    """Whether the file ends before its section headers, the last part of an ELF file: loading it may be a bus error."""
    with open(LIBRARY, "rb") as file:
        head = file.read(64)
    start, size, count = (
        int.from_bytes(head[place], "little")
        for place in (slice(40, 48), slice(58, 60), slice(60, 62))
    )
    return head.startswith(b"\x7fELF") and LIBRARY.stat().st_size < start + size * count


def _build_failure() -> str:
    """Why the last build gave no library, in parentheses; empty if that is not known."""
    try:
        return f" ({LIBRARY.with_name(REASON).read_text().strip()})"
    except OSError:
        return ""


@functools.cache
def level() -> int:
    """The instruction set to use: the best of this CPU, or the one that ``LIGHTNING_NM_ISA`` names.

    Raises:
        RuntimeError: If there is no library, or the variable names an unknown level or one that the CPU lacks.
    """
    best = load().nm_best_level()
    asked = os.environ.get("LIGHTNING_NM_ISA")
    if not asked:
        return int(best)
    known = ", ".join(LEVELS[: best + 1])
    if asked not in LEVELS[: best + 1]:
        fault = "is unknown" if asked not in LEVELS else "is not an instruction set of this CPU"
        raise RuntimeError(f"LIGHTNING_NM_ISA={asked!r} {fault}: use one of {known}, or unset it")
    return LEVELS.index(asked)


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether the instruction set multiplies pairs of values of a dtype."""
    return dtype == torch.bfloat16 and LEVELS[level()] == "avx512-bf16"


def compiled_from() -> str:
    """Hash of the sources that the library was compiled from."""
    return str(load().nm_source().decode())


@functools.cache
def parallel() -> int | None:
    """Address of torch's function that runs a loop on its threads; ``None`` before torch 2.10, which has none."""
    try:
        found = ctypes.CDLL(
            None
        ).torch_parallel_for  # torch's libraries are loaded, but perhaps not for all
    except (AttributeError, OSError):
        path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
        try:
            found = ctypes.CDLL(path).torch_parallel_for
        except (AttributeError, OSError):
            return None
    return ctypes.cast(found, c_void_p).value


def threads() -> int:
    """Threads that a call uses at most: torch's, or one where :func:`parallel` is ``None``."""
    return torch.get_num_threads() if parallel() is not None else 1


def unavailable() -> str:
    """Why there are no kernels on this machine; empty if there are."""
    try:
        level()
    except RuntimeError as error:
        return str(error)
    return ""


def cpu_name() -> str:
    """The model of the CPU as the system reports it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def operands(
    rows: int,
    depth: int,
    tokens: int,
    x: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
) -> Operands:
    """The dense operands of a product, as the library takes them; the tensors must outlive the call."""
    found = Operands(parallel(), threads(), rows, depth, tokens, DTYPES[x.dtype], 0, x.data_ptr())
    found.bias = None if bias is None else bias.data_ptr()
    found.grad = None if grad is None else grad.data_ptr()
    found.y = y.data_ptr()
    return found


def conv_operands(
    conv: Convolution,
    images: int,
    y: Tensor,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
) -> ConvOperands:
    """The dense operands of a convolution, as the library takes them; the tensors must outlive the call."""
    pairs = (conv.size, conv.kernel, conv.stride, conv.padding, conv.dilation, conv.positions)
    found = ConvOperands(parallel(), threads(), images, conv.inputs, conv.outputs, conv.groups)
    found.size, found.kernel, found.stride, found.padding, found.dilation, found.positions = pairs
    found.dtype = DTYPES[y.dtype]
    found.x, found.bias, found.grad = (
        None if each is None else each.data_ptr() for each in (x, bias, grad)
    )
    found.y = y.data_ptr()
    return found


def run(function: Any, product: int, dense: Operands | ConvOperands, sparse: Any) -> None:
    """Call a product.

    Raises:
        MemoryError: If the library was short of memory for its panels.
        RuntimeError: If the instruction set has no such kernel, or a convolution is too large for it.
    """
    status = function(level(), product, ctypes.byref(dense), ctypes.byref(sparse))
    if status == _NO_MEMORY:
        raise MemoryError("there is no memory for the panels of a CPU kernel")
    if status == _NO_KERNEL:
        raise RuntimeError(f"the instruction set {LEVELS[level()]} has no such kernel")
    if status:
        raise RuntimeError(
            "the planes of the convolution are too large for the kernel's 32-bit offsets"
        )
