"""Whether the Triton kernels run: on CUDA tensors, if Triton is installed and ``LIGHTNING_NM_TRITON`` is not 0."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch

SWITCH = "LIGHTNING_NM_TRITON"
"""The environment variable that switches the kernels off, if it is 0."""


def unavailable() -> str:
    """Return why no Triton kernel runs in this process; empty if they do."""
    switch = os.environ.get(SWITCH) or "1"
    if switch == "0":
        return f"switched off by {SWITCH}=0"
    if switch != "1":
        return f"{SWITCH}={switch!r} is neither 0, for torch operations, nor 1: unset it"
    if not is_installed():
        return "Triton is not installed"
    return ""


# Cached, because Python searches all of its path again for a module that it did not find.
@functools.cache
def is_installed() -> bool:
    """Whether Triton can be imported; it is when this is first asked."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True


def runs_on(device: torch.device) -> bool:
    """Whether the kernels take tensors of a device; on a CPU only by Triton's interpreter, which tests ask for."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    return (interpreted or device.type == "cuda") and not unavailable()


def kernels(name: str) -> ModuleType:
    """Import a module of Triton kernels in this folder, which only a Python with Triton can."""
    return importlib.import_module(f"lightning_nm.kernels.gpu.{name}")
