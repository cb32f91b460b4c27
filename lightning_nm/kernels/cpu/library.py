"""The compiled library of CPU kernels: finding, checking and calling it."""

from __future__ import annotations

import functools
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cffi
import torch
from torch import Tensor, nn

from lightning_nm.kernels.cpu.build import LIBRARY, REASON, SOURCES, source

PLACE = Path(__file__).resolve().parents[3]
"""The folder that Python imports this package from: a checkout, or that of the installed packages."""
LEVELS = ("baseline", "avx2", "avx512", "avx512-bf16")
"""Instruction sets by number; each includes those before it."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes of operands, by their numbers in the library."""
EMPTY = 0x80
"""The index of a slot without an entry."""
PANEL = 64
"""Tokens that the csr kernel computes at once."""


def _declarations() -> str:
    """The declarations of csrc/nm.h as Python uses them: addresses of tensors are numbers."""
    declarations = re.sub("^#.*", "", (SOURCES / "nm.h").read_text(), flags=re.MULTILINE)
    # Both are passed alike, but every cast to a pointer takes as long as a quarter of a small call.
    addresses = re.sub(r"(const )?(void|float|u?int\d+_t) \*", "uintptr_t ", declarations)
    return addresses.replace(", *", ", ")


# Made when this module is imported: two threads could make two, of which one refuses the structures of the other.
ffi = cffi.FFI()
ffi.cdef(_declarations())
# A function of torch and not of this library, see `parallel`.
ffi.cdef("int32_t torch_parallel_for(int64_t, int64_t, int64_t, nm_task, uintptr_t);")


# An error is not cached: a library that is built in the meantime is found by the next call.
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
        library = ffi.dlopen(str(LIBRARY))
        # All of them now: an older library may lack one, which should not end a training later.
        for name in dir(library):  # functions are looked up when they are first called
            if name.startswith("nm_"):
                getattr(library, name)
    except (OSError, AttributeError) as error:
        raise RuntimeError(
            f"the library of CPU kernels, {LIBRARY}, cannot be loaded ({error}): {advice}"
        ) from error
    # Equal names do not suffice: structures of other sources may have other fields, which would be misread.
    if source() != ffi.string(library.nm_source()).decode():
        raise RuntimeError(
            f"the library of CPU kernels, {LIBRARY}, was compiled from other sources than those next to "
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


def _build_failure() -> str:
    """Return why the last build gave no library, in parentheses; empty if that is not known."""
    try:
        reason = LIBRARY.with_name(REASON).read_text()
    except OSError:
        return ""
    return f" ({reason.strip()})"


# Once for a process: layouts that exist have the lanes of one instruction set.
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


def permuted_lanes() -> int:
    """Values in a register that an instruction permutes; 0 where there is no such instruction."""
    return int(load().nm_lanes(level()))


def multiplies_pairs(dtype: torch.dtype) -> bool:
    """Whether the instruction set multiplies pairs of values of a dtype."""
    return dtype == torch.bfloat16 and LEVELS[level()] == "avx512-bf16"


def compiled_from() -> str:
    """Hash of the sources that the library was compiled from."""
    return str(ffi.string(load().nm_source()).decode())


def is_plain(*tensors: Tensor | None, device_type: str = "cpu") -> bool:
    """Tell whether tensors' addresses are those of their values: on the CPU, and no transform of torch sees them.

    Kernels for other devices name another type of device.
    """
    # A trace of torch's operators does not see what the library writes.
    if torch._C._functorch.peek_interpreter_stack() is not None or torch._C._is_tracing():
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        # A subclass, such as a DTensor or a fake tensor, may have other values at its address, or none.
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != device_type:
            return False
        # The memory of a view that torch negates lazily has the other sign.
        if tensor.is_neg() or tensor._is_zerotensor():  # it has no memory
            return False
    return True


@functools.cache
def parallel() -> Any:
    """Torch's function that runs a loop on its threads; ``None`` before torch 2.10, which has none."""
    # Among the symbols of the process; torch's libraries are loaded, but perhaps not for all to see.
    for place in (None, os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")):
        with suppress(AttributeError, OSError):
            return ffi.addressof(ffi.dlopen(place), "torch_parallel_for")
    return None


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


def call(function: str, *arguments: Any) -> Any:
    """Call a function of csrc/nm.h; a plain tensor stands for its address."""
    found = []
    for value in arguments:
        # isinstance() takes as long as all the rest for a number.
        found.append(value.data_ptr() if type(value) is Tensor else value)
    return getattr(load(), function)(*found)


def structure(kind: str, *fields: Any) -> Any:
    """Return a structure of csrc/nm.h that runs on torch's threads, with the fields after those; the rest is zero."""
    loop = parallel()  # without it in one thread
    number = 1 if loop is None else torch.get_num_threads()
    return ffi.new(kind, (loop or ffi.NULL, number, *fields))


def run(
    function: str,
    product: str,
    kind: str,
    sizes: Sequence[Any],
    inputs: Iterable[tuple[Tensor | None, tuple[int, ...]]],
    y: Tensor,
    sparse: Any,
) -> None:
    """Call a GEMM by its names in csrc/nm.h.

    Args:
        function: Its function.
        product: Which one of the function.
        kind: The structure of its dense operands.
        sizes: The fields of the structure before the dtype.
        inputs: The tensors after it, each with its shape; ``None`` is NULL.
        y: For the result, contiguous, of the dtype of all inputs.
        sparse: The sparse operand.

    Raises:
        ValueError: If the library would misread an input: it knows neither shapes nor dtypes nor strides.
        MemoryError: If the library was short of memory for its panels.
        RuntimeError: If the instruction set has no such kernel, or a convolution is too large for it.
    """
    dtype = y.dtype
    if dtype not in DTYPES:
        raise ValueError(f"an operand is {dtype}, not float32 or bfloat16")
    addresses = []
    for tensor, shape in inputs:
        if tensor is None:
            addresses.append(0)
            continue
        if tensor.dtype != dtype:
            raise ValueError(f"an operand is {tensor.dtype}, not {dtype}")
        if not tensor.is_cpu or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"an operand of shape {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device} must be "
                f"contiguous, of shape {shape}, on the CPU"
            )
        addresses.append(tensor.data_ptr())
    # The 0 is `failed`, which the library sets.
    dense = structure(kind, *sizes, DTYPES[dtype], 0, *addresses, y.data_ptr())
    library = load()
    status = getattr(library, function)(level(), getattr(library, product), dense, sparse)
    if status == library.NM_NO_MEMORY:
        raise MemoryError("there is no memory for the panels of a CPU kernel")
    if status == library.NM_NO_KERNEL:
        raise RuntimeError(f"the instruction set {LEVELS[level()]} has no such kernel")
    if status:  # only convolutions have a third one
        raise RuntimeError(
            "the planes of the convolution are too large for the kernel's 32-bit offsets"
        )
