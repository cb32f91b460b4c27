"""The compiled library of CPU kernels: finding, checking and calling it."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from contextlib import suppress
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.kernels.api import Convolution
from lightning_nm.kernels.cpu.build import LIBRARY, REASON, source

PLACE = Path(__file__).resolve().parents[3]
"""The folder that Python imports this package from: a checkout, or that of the installed packages."""
ABI = 8
"""Version of the structures and functions below; the library has the same number, or is not loaded."""
LEVELS = ("baseline", "avx2", "avx512", "avx512-bf16")
"""Instruction sets by number; each includes those before it."""
LINEAR, MATMUL, SAMPLED = range(3)
"""Products of matrices, by their numbers in the library."""
FORWARD, DGRAD, WGRAD = range(3)
"""Products of convolutions."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes of operands, by their numbers in the library."""
EMPTY = 0x80
"""The index of a slot without an entry."""
PANEL = 64
"""Tokens that the csr kernel computes at once."""
# What a product returns if it fails.
_NO_MEMORY = 1
_NO_KERNEL = 2

# The structures and signatures repeat those of csrc/nm.h, field by field.
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


class Int8Operand(ctypes.Structure):
    """``nm_int8`` of the library."""

    _fields_ = [
        ("values", c_void_p),
        ("positions", c_void_p),
        ("scale", c_void_p),
        ("offset", c_void_p),
        ("n", c_int64),
        ("m", c_int64),
        ("bits", c_int64),
    ]


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


class Evolution(ctypes.Structure):
    """``nm_evolution`` of the library."""

    _fields_ = [
        *_THREADS,
        ("entries", c_int64),
        ("bits", c_void_p),
        ("weight", c_void_p),
        ("grad", c_void_p),
        ("dtype", c_int32),
        ("failed", c_int32),
        ("old_value", c_void_p),
        ("old_square", c_void_p),
        ("value", c_void_p),
        ("square", c_void_p),
        ("whole_value", c_int32),
        ("whole_square", c_int32),
        ("own_ratio", c_float),
        ("unit", c_float),
        ("limit", c_float),
        ("decay", c_float),
        ("take", c_float),
        ("correction", c_float),
        ("epsilon", c_float),
        ("size", c_float),
        ("kept_square", c_double),
        ("kept", c_int64),
        ("blocks", c_int64),
        ("blocks_per_row", c_int64),
        ("taps", c_int64),
        ("n", c_int64),
        ("m", c_int64),
        ("out_stride", c_int64),
        ("tap_stride", c_int64),
        ("in_stride", c_int64),
        ("in_line", c_int32),
        ("unused", c_int32),
        ("gain", c_void_p),
        ("pruned", c_void_p),
        ("regrown", c_void_p),
        ("chosen", c_void_p),
        ("oscillation", c_void_p),
        ("exchanged", c_void_p),
        ("states", c_int64),
        ("state", c_void_p * 4),
        ("state_dtype", c_int32 * 4),
        ("state_is_square", c_int32 * 4),
        ("moment", c_float),
        ("budget", c_int64),
        ("better", c_int64),
        ("order", c_void_p),
        ("columns", c_int64),
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
    "nm_int8_level": (c_int32, [c_int32]),
    "nm_int8_product": (c_int32, [c_int32, c_int32, POINTER(Operands), POINTER(Int8Operand)]),
    "nm_conv_product": (c_int32, [c_int32, c_int32, POINTER(ConvOperands), POINTER(CsrOperand)]),
    "nm_evolution_pass": (c_int32, [c_int32, c_int32, POINTER(Evolution)]),
    "nm_choose_blocks": (c_int64, [POINTER(Evolution)]),
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
        other = _other_copy()
        if other is not None:
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
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"the library of CPU kernels, {LIBRARY}, cannot be loaded ({error}): {advice}"
        ) from error
    # Without the C files, as in an installed package, there is nothing to compare with.
    if source() not in ("", library.nm_source().decode()):
        raise RuntimeError(
            f"the library of CPU kernels, {LIBRARY}, was compiled from other sources than those beside "
            f"it{_build_failure()}: {advice}"
        )
    return library


def _other_copy() -> Path | None:
    """The folder of another copy of this package that Python could import, and that has a library."""
    inside = Path(__file__).resolve().relative_to(PLACE).with_name(LIBRARY.name)
    for entry in sys.path:
        folder = Path(entry or os.curdir).resolve()  # an empty entry is the current folder
        if folder != PLACE and (folder / inside).exists():
            return folder
    return None


def _is_cut_off() -> bool:
    """Whether the file ends before its section headers, the last part of an ELF file: loading it may be a bus error."""
    with open(LIBRARY, "rb") as file:
        header = file.read(64)
    if not header.startswith(b"\x7fELF"):
        return False
    # The fields e_shoff, e_shentsize and e_shnum of a 64-bit ELF header.
    start = int.from_bytes(header[40:48], "little")
    size = int.from_bytes(header[58:60], "little")
    count = int.from_bytes(header[60:62], "little")
    return LIBRARY.stat().st_size < start + size * count


def _build_failure() -> str:
    """Return why the last build gave no library, in parentheses; empty if that is not known."""
    try:
        reason = LIBRARY.with_name(REASON).read_text()
    except OSError:
        return ""
    return f" ({reason.strip()})"


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


def is_plain(tensor: Tensor, device_type: str = "cpu") -> bool:
    """Tell whether a tensor's address is that of its values: it is on the CPU, and no transform of torch sees it.

    Kernels for other devices name another type of device.
    """
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == device_type
        and not tensor.is_neg()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


@functools.cache
def parallel() -> int | None:
    """Address of torch's function that runs a loop on its threads; ``None`` before torch 2.10, which has none."""
    try:
        # Among the symbols of the process; torch's libraries are loaded, but perhaps not for all to see.
        found = ctypes.CDLL(None).torch_parallel_for
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
    """Return why there are no kernels on this machine; empty if there are."""
    try:
        level()
    except RuntimeError as error:
        return str(error)
    return ""


def cpu_name() -> str:
    """The model of the CPU as the system reports it."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def has_amx() -> bool:
    """Whether the CPU multiplies dense matrices of bfloat16 in tiles (AMX), as the system reports it.

    torch then multiplies dense matrices of bfloat16 much faster than of float32; the kernels here have no use for
    tiles. It is the CPU's flag: ``ONEDNN_MAX_CPU_ISA`` may keep torch from using it.
    """
    return "amx_bf16" in _cpu_info("flags").split()


def _cpu_info(key: str) -> str:
    """The first line of Linux' description of the CPU that has a key; empty if there is none."""
    # Windows and macOS have no such file, and that of ARM has other lines.
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return ""


def operands(
    rows: int,
    depth: int,
    tokens: int,
    x: Tensor,
    y: Tensor,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
) -> Operands:
    """Return the dense operands of a product as the library takes them; the tensors must outlive the call."""
    dense = Operands(parallel(), threads(), rows, depth, tokens, DTYPES[x.dtype])
    dense.x = x.data_ptr()
    dense.bias = None if bias is None else bias.data_ptr()
    dense.grad = None if grad is None else grad.data_ptr()
    dense.y = y.data_ptr()
    return dense


def conv_operands(
    conv: Convolution,
    images: int,
    y: Tensor,
    x: Tensor | None = None,
    bias: Tensor | None = None,
    grad: Tensor | None = None,
) -> ConvOperands:
    """Return the dense operands of a convolution as the library takes them; the tensors must outlive the call."""
    dense = ConvOperands(parallel(), threads(), images, conv.inputs, conv.outputs, conv.groups)
    dense.size = conv.size
    dense.kernel = conv.kernel
    dense.stride = conv.stride
    dense.padding = conv.padding
    dense.dilation = conv.dilation
    dense.positions = conv.positions
    dense.dtype = DTYPES[y.dtype]
    dense.x = None if x is None else x.data_ptr()
    dense.bias = None if bias is None else bias.data_ptr()
    dense.grad = None if grad is None else grad.data_ptr()
    dense.y = y.data_ptr()
    return dense


def check_operand(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> None:
    """Refuse what the library would misread: it takes addresses, and knows neither dtypes nor strides."""
    if tensor.dtype not in DTYPES or (dtype is not None and tensor.dtype != dtype):
        raise ValueError(f"an operand is {tensor.dtype}, not {dtype or 'float32 or bfloat16'}")
    if tensor.device.type != "cpu" or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"an operand of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device} must be "
            f"contiguous, of shape {shape}, on the CPU"
        )


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
    if status:  # only convolutions have a third one
        raise RuntimeError(
            "the planes of the convolution are too large for the kernel's 32-bit offsets"
        )
