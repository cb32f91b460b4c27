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
BF16 = [*LEVELS[2], "-mavx512bf16"]
"""Compiler flags of level 3, which adds products to level 2; gcc before 10 and clang before 9 do not know them."""
INT8 = [*LEVELS[2], "-mavx512vbmi", "-mavx512vnni"]
"""Compiler flags of the int8 products of AVX-512; gcc before 8 and clang before 6 do not know them."""

SEPARATE = ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
"""Compiler flags of code whose every operation is rounded on its own, as torch's are."""


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
    if sys.platform not in ("linux", "darwin"):
        return f"there is no library for {sys.platform}"
    command = compiler()
    if not command:
        return "there was no C compiler: neither $CC, cc, gcc nor clang"
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
    macros, failed = _run([*common, "-dM", *preprocess_nothing])
    if failed:
        return failed
    levels: dict[int, list[str]] = {0: []}
    known = set()
    if "__x86_64__" in macros:
        levels = LEVELS
        # An old compiler refuses the flags; the library then goes without these products.
        for name, needed in (("bf16", BF16), ("int8", INT8)):
            _, refused = _run([*common, *needed, *preprocess_nothing])
            if not refused:
                known.add(name)
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "source.c"
        version.write_text(f'const char *nm_source(void) {{ return "{source()}"; }}\n')
        objects = []
        for file, level, extra in _compilations(version, levels, known):
            name = file.stem
            define = []
            if level is not None:
                # One file becomes an object, with function names of its own, for each level.
                name = f"{file.stem}{level}"
                define = [f"-DNM_LEVEL={level}"]
            compiled = f"{folder}/{name}.o"
            _, failed = _run([*common, *extra, *define, "-c", str(file), "-o", compiled])
            if failed:
                return failed
            objects.append(compiled)
        linked = Path(folder) / target.name
        _, failed = _run([*command, "-shared", *flags, *objects, "-o", str(linked)])
        if failed:
            return failed
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renaming replaces a file at once, but only within one file system: copy next to the target first.
        new = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(linked, new)
        new.replace(target)
    return ""


def _compilations(
    version: Path, levels: dict[int, list[str]], known: set[str]
) -> list[tuple[Path, int | None, list[str]]]:
    """The C files to compile, each with its level and further flags; level None for files that are compiled once."""
    library_flags = [f"-DNM_{name.upper()}" for name in sorted(known)]
    compilations: list[tuple[Path, int | None, list[str]]] = [
        (version, None, []),
        (SOURCES / "library.c", None, library_flags),
        (SOURCES / "layout.c", None, []),
    ]
    for level, extra in levels.items():
        compilations.append((SOURCES / "kernels.c", level, extra))
        compilations.append((SOURCES / "conv.c", level, extra))
        compilations.append((SOURCES / "top.c", level, extra))
        compilations.append((SOURCES / "evolve.c", level, [*extra, *SEPARATE]))
        # At level 2 int8 products need more than AVX-512.
        if level < 2:
            compilations.append((SOURCES / "int8.c", level, [*extra, *SEPARATE]))
    if "bf16" in known:
        compilations.append((SOURCES / "bf16.c", 3, BF16))
    if "int8" in known:
        compilations.append((SOURCES / "int8.c", 2, [*INT8, *SEPARATE]))
    return compilations


def _run(command: list[str]) -> tuple[str, str]:
    """Run a command; return what it printed, and how it failed, which is empty if it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return "", f"{shlex.join(command)} failed: {error}"
    if done.returncode == 0:
        return done.stdout, ""
    # Some compilers write errors to the standard output; an error in a header can fill pages.
    printed = done.stderr or done.stdout
    message = printed.strip()[:2000]
    return "", f"{shlex.join(command)} failed with status {done.returncode}: {message}"


if __name__ == "__main__":
    reason = build()
    print(reason or LIBRARY)
    sys.exit(bool(reason))
