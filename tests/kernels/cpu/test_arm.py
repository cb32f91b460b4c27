"""The baseline of the C code on 64-bit ARM, in QEMU: ``apt-get install gcc-aarch64-linux-gnu qemu-user``."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_nm.kernels.cpu import build

TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason=f"needs {' and '.join(TOOLS)}")
def test_products_on_arm(tmp_path):
    common = (
        file for file in sorted(build.SOURCES.glob("*.c")) if file.name != "bf16.c"
    )  # which is for x86-64
    sources = [*map(str, common), str(Path(__file__).with_name("products.c"))]
    flags = [
        "-std=gnu11",
        "-O3",
        "-ffp-contract=fast",
        "-static",
        "-DNM_LEVEL=0",
        f"-I{build.SOURCES}",
    ]
    subprocess.run([TOOLS[0], *flags, *sources, "-o", str(tmp_path / "products")], check=True)
    done = subprocess.run(
        [TOOLS[1], str(tmp_path / "products")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "0 errors at level 0\n")
