"""Compile the library of CPU kernels with the C compiler of the machine.

Neither torch nor this package is imported: ``hatch_build.py`` loads this file by its path.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = Path(__file__).parent / "libnm.so"
REASON = "libnm.txt"
"""Name of the file next to the library that says why it could not be compiled."""
LEVELS = {
    0: [],
    1: ["-mavx2", "-mfma"],
    2: ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
}
"""Compiler flags of each instruction set; on other processors than x86-64 there is the baseline alone.

The baseline of 64-bit ARM has NEON, so it needs no flag; it has run there under QEMU alone."""
# The last two change no rounding. They allow roots as single instructions, and selects instead of branches.
SEPARATE = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
"""Compiler flags of code whose every operation is rounded on its own, as torch's are."""

PARTS = {"kernels": [], "conv": [], "top": [], "evolve": SEPARATE, "int8": SEPARATE}
"""The files that are compiled for each instruction set, with flags of their own."""
OPTIONAL = {
    "bf16": (3, [*LEVELS[2], "-mavx512bf16"]),
    "int8": (2, [*LEVELS[2], "-mavx512vbmi", "-mavx512vnni", *SEPARATE]),
}
"""Files that old compilers cannot compile, with level and flags; the library then goes without these GEMMs.

The flags of bf16 are unknown to gcc before 10 and clang before 9, those of int8 to gcc before 8 and clang before 6."""


def source() -> str:
    """Hash of what a library is compiled from, the C files and this one."""
    # This file decides about the compiler flags, so it is part of what a library is made from.
    files = [*sorted(SOURCES.glob("*.[ch]")), Path(__file__)]
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        # The name and the length separate the files: moving bytes from one to the next changes the hash.
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def is_current(library: Path) -> bool:
    """Whether a file is a library that loads, compiled from the present sources."""
    try:
        compiled_from = ctypes.CDLL(str(library)).nm_source
    except (OSError, AttributeError):
        return False
    compiled_from.restype = ctypes.c_char_p
    return bool(compiled_from().decode() == source())


def build(folder: Path = LIBRARY.parent) -> str:
    """Compile the library into a folder, or write why there is none into :data:`REASON` there; return the reason."""
    reason = compile_library(folder / LIBRARY.name)
    if reason:
        (folder / REASON).write_text(f"{reason}\n")
    else:
        (folder / REASON).unlink(missing_ok=True)
    return reason


def compiler() -> list[str]:
    """The command of the C compiler: ``$CC``, ``cc``, ``gcc`` or ``clang``; empty if there is none."""
    # $CC may hold options as well, as in "ccache gcc".
    from_environment = shlex.split(os.environ.get("CC", ""))
    for command in (from_environment, ["cc"], ["gcc"], ["clang"]):
        if command and shutil.which(command[0]):
            return command
    return []


def compile_library(target: Path = LIBRARY, flags: tuple[str, ...] = ()) -> str:
    """Compile the library; return why there is none, or an empty string.

    Args:
        target: The file to write; it is replaced at once, so that a process that has loaded the old one keeps it.
        flags: Further flags, such as ``-fsanitize=address``.
    """
    try:
        _compile(target, flags)
    except _FailedError as failure:
        return str(failure)
    return ""


class _FailedError(Exception):
    """Why there is no library."""


def _compile(target: Path, flags: tuple[str, ...]) -> None:
    if sys.platform not in ("linux", "darwin"):
        raise _FailedError(f"there is no library for {sys.platform}")
    command = compiler()
    if not command:
        raise _FailedError("there was no C compiler: neither $CC, cc, gcc nor clang")
    common = [
        *command,
        "-std=gnu11",
        "-O3",
        "-fPIC",
        "-ffp-contract=fast",
        "-fvisibility=default",
        *flags,
    ]
    preprocess_nothing = ["-E", "-x", "c", os.devnull]
    # The macros tell the processor that is compiled for: with a cross compiler it is not this machine's.
    is_x86 = "__x86_64__" in _run([*common, "-dM", *preprocess_nothing])
    # Once, for the baseline: layout.c moves bytes, and has no code for an instruction set.
    files: list[tuple[str, int, list[str]]] = [("layout", 0, [])]
    for level, of_level in LEVELS.items():
        if level and not is_x86:
            continue
        for name, own in PARTS.items():
            if (name, level) != ("int8", 2):  # for which AVX-512 is not enough
                files.append((name, level, [*of_level, *own]))
    defines = []
    for name, (level, needed) in OPTIONAL.items():
        if is_x86:
            with suppress(_FailedError):
                # Compilers refuse a flag that they do not know.
                _run([*common, *needed, *preprocess_nothing])
                files.append((name, level, needed))
                defines.append(f"-DNM_{name.upper()}")
    # Last: it has to know which of the optional files there are.
    files.append(("library", 0, defines))
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "source.c"
        # So that `load` can tell a library of other sources than those next to it.
        version.write_text(f'const char *nm_source(void) {{ return "{source()}"; }}\n')
        objects = [str(version)]
        for name, level, extra in files:
            # One file becomes an object, with function names of its own, for each level.
            compiled = f"{folder}/{name}{level}.o"
            # They follow the common flags: of two -ffp-contract the last one counts.
            options = [*extra, f"-DNM_LEVEL={level}", "-c", str(SOURCES / f"{name}.c")]
            _run([*common, *options, "-o", compiled])
            objects.append(compiled)
        linked = Path(folder) / target.name
        _run([*common, "-shared", *objects, "-o", str(linked)])
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renaming replaces a file at once, but only within one file system: copy next to the target first.
        new = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(linked, new)
        new.replace(target)


def _run(command: list[str]) -> str:
    """Run a command, and return what it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise _FailedError(f"{shlex.join(command)} failed: {error}") from error
    if done.returncode:
        # Some compilers write errors to the standard output; an error in a header can fill pages.
        printed = done.stderr or done.stdout
        message = printed.strip()[:2000]
        raise _FailedError(f"{shlex.join(command)} failed with status {done.returncode}: {message}")
    return done.stdout


if __name__ == "__main__":
    reason = build()
    print(reason or LIBRARY)
    sys.exit(bool(reason))
