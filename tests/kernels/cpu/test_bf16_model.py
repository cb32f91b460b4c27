"""The level `avx512-bf16` on a CPU with AVX-512 alone: its instructions are those of a software model, bf16_model.h."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_nm.kernels.cpu import build
from tests.sanitize import MODEL
from tests.support.cpu_products import FAST, LEVELS

ROOT = Path(__file__).parents[3]
PLUGIN = """
import os
from pathlib import Path
from lightning_nm.kernels.cpu import library

library.LIBRARY = Path(os.environ["MODELLED"])
assert library.LEVELS[library.level()] == "avx512-bf16", library.unavailable()
"""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("avx512" not in LEVELS, reason="needs a CPU with AVX-512"),
]


@pytest.fixture(scope="module")
def modelled(tmp_path_factory):
    """The library with the software model."""
    target = tmp_path_factory.mktemp("modelled") / "libnm.so"
    assert build.compile_library(target, MODEL) == ""
    return target


def test_a_compiler_that_does_not_know_the_instructions_leaves_the_level_out(
    modelled, tmp_path, monkeypatch
):
    compiler = tmp_path / "old-cc"
    command = " ".join(build.compiler())
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-mavx512bf16*) exit 1;; esac\nexec {command} "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    without = tmp_path / "without.so"
    assert build.compile_library(without, (*MODEL, *FAST)) == ""
    assert [ctypes.CDLL(str(path)).nm_best_level() for path in (modelled, without)] == [3, 2]


def test_products_of_the_modelled_level(modelled, tmp_path):
    """Every test that runs at a level, the layouts, and training."""
    chosen = "avx512-bf16 or test_layouts or test_training or test_routed_masks"
    tests = ["tests/kernels/cpu", "tests/nn/test_routed_masks.py", "-k", chosen]
    (tmp_path / "modelled_level.py").write_text(PLUGIN)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "modelled_level",
        *tests,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "LIGHTNING_NM_ISA"}
    environment |= {"MODELLED": str(modelled), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
