"""A machine without GPUs, with CPU kernels of fixed times or without them."""

import sys

import pytest
import torch

from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.router import checks, tuner
from tests.commands.doctor.runs import NO_LIBRARY


@pytest.fixture(autouse=True)
def _bare_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["lightning-nm", "doctor"])
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # where decisions are kept
    monkeypatch.delenv("LIGHTNING_NM_ISA", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def no_library(monkeypatch):
    """The CPU kernels were not compiled."""

    def load():
        raise RuntimeError(NO_LIBRARY)

    monkeypatch.setattr(library, "load", load)
    library.level.cache_clear()
    yield
    library.level.cache_clear()


@pytest.fixture
def kernels(monkeypatch):
    """The CPU kernels, each with its times, for a product and a pack; skips where they do not work."""
    if reason := library.unavailable():
        pytest.skip(reason)
    times = {"cpu-permute": (6.0, 2.0), "cpu-csr": (7.0, 2.0)}
    for module in (tuner, checks):
        monkeypatch.setattr(module, "dense_ms", lambda key, timer: 10.0)
        monkeypatch.setattr(module, "sparse_ms", lambda kernel, key, timer: times[kernel.name])
    return times
