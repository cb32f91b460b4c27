"""The level `avx512-bf16` on a CPU with AVX-512 alone: its instructions are those of a software model, bf16_model.h."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_nm.kernels.cpu import build
from tests.cpu_products import LEVELS
from tests.sanitize import MODEL

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from pathlib import Path
import pytest
from lightning_nm.kernels.cpu import library

library.LIBRARY = Path(sys.argv[1])
assert library.LEVELS[library.level()] == "avx512-bf16", library.unavailable()
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.skipif("avx512" not in LEVELS, reason="needs a CPU with AVX-512")
def test_products_of_the_modelled_level(tmp_path):
    """Every test that runs at a level, the layouts, and training."""
    assert build.compile_library(tmp_path / "libnm.so", MODEL) == ""
    tests = [
        "tests/kernels/cpu",
        "tests/nn/test_routed_masks.py",
        "-k",
        "avx512-bf16 or test_layouts or test_routed_masks",
    ]
    command = [sys.executable, "-c", RUN, str(tmp_path / "libnm.so"), "-q", "-p", "no:cacheprovider", *tests]
    environment = {name: value for name, value in os.environ.items() if name != "LIGHTNING_NM_ISA"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
