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
"""Name of the file beside the library that says why it could not be compiled."""
LEVELS = {
    0: [],
    1: ["-mavx2", "-mfma"],
    2: ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
}
"""Compiler flags of each instruction set; on other processors than x86-64 there is the baseline alone.

The baseline of 64-bit ARM has NEON, so it needs no flag; it has run there under QEMU alone."""
BF16 = [*LEVELS[2], "-mavx512bf16"]
"""Compiler flags of level 3, which adds products to level 2; gcc before 10 and clang before 9 do not know them."""


def source() -> str:
    """Hash of what a library is compiled from, the C files and this one; empty if the C files are not installed."""
    files = sorted(SOURCES.glob("*.[ch]"))
    if not files:
        return ""
    found = hashlib.sha256()
    for file in (*files, Path(__file__)):
        content = file.read_bytes()
        found.update(f"{file.name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def is_current(library: Path) -> bool:
    """Whether a file is a library that loads, compiled from the present sources."""
    try:
        version = ctypes.CDLL(str(library)).nm_source
    except (OSError, AttributeError):
        return False
    version.restype = ctypes.c_char_p
    return bool(version().decode() == source())


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
    for command in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
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
    macros, failed = _run(
        [*common, "-dM", "-E", "-x", "c", os.devnull]
    )  # of the target, also where CC crosses
    if failed:
        return failed
    levels = LEVELS if "__x86_64__" in macros else {0: []}
    pairs = len(levels) > 1 and not _run([*common, *BF16, "-E", "-x", "c", os.devnull])[1]
    with tempfile.TemporaryDirectory() as folder:
        version = Path(folder) / "source.c"
        version.write_text(f'const char *nm_source(void) {{ return "{source()}"; }}\n')
        objects = []
        for file, level, extra in [
            (version, None, []),
            (SOURCES / "library.c", None, ["-DNM_BF16"] if pairs else []),
            (SOURCES / "layout.c", None, []),
            *(
                (SOURCES / file, level, extra)
                for file in ("kernels.c", "conv.c")
                for level, extra in levels.items()
            ),
            *([(SOURCES / "bf16.c", 3, BF16)] if pairs else []),
        ]:
            objects.append(f"{folder}/{file.stem}{'' if level is None else level}.o")
            define = [] if level is None else [f"-DNM_LEVEL={level}"]
            _, failed = _run([*common, *extra, *define, "-c", str(file), "-o", objects[-1]])
            if failed:
                return failed
        made = Path(folder) / target.name
        _, failed = _run([*command, "-shared", *flags, *objects, "-o", str(made)])
        if failed:
            return failed
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copy(made, new)
        new.replace(target)
    return ""


def _run(command: list[str]) -> tuple[str, str]:
    """What a command printed, and how it failed; empty if it did not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return "", f"{shlex.join(command)} failed: {error}"
    if done.returncode == 0:
        return done.stdout, ""
    message = (done.stderr or done.stdout).strip()[:2000]
    return "", f"{shlex.join(command)} failed with status {done.returncode}: {message}"


if __name__ == "__main__":
    reason = build()
    print(reason or LIBRARY)
    sys.exit(bool(reason))
