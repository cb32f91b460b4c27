import pytest

from lightning_nm.kernels import tuner
from lightning_nm.packed import kernel_choice


@pytest.fixture(autouse=True)
def _decisions(tmp_path, monkeypatch):
    """Packed layers find no decisions of other tests."""
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    kernel_choice._tuner.cache_clear()
    kernel_choice.registry_of.cache_clear()


class Clock:
    """Milliseconds of GEMMs, and a clock that the measurement of a dense GEMM advances by one second."""

    def __init__(self):
        self.now = 0.0
        self.asked = []  # the keys of dense GEMMs
        self.measured = []  # their rows and tokens, once for each measurement
        self.dense = {}  # milliseconds of a dense GEMM by its tokens, or by its rows and tokens; else 5

    def dense_ms(self, key, timer):
        self.asked.append(key)
        size = key.rows, key.columns
        if self.measured[-1:] != [size]:
            self.measured.append(size)
            self.now += 1
        found = self.dense.get(size, self.dense.get(key.columns, 5.0))
        return found.pop(0) if isinstance(found, list) else found


@pytest.fixture
def clock(monkeypatch, _decisions):
    """A dense GEMM takes 5 milliseconds, and a kernel 3."""
    made = Clock()
    monkeypatch.setattr(tuner, "dense_ms", made.dense_ms)
    monkeypatch.setattr(tuner, "sparse_ms", lambda *_: (3.0, 0.0))
    monkeypatch.setattr(kernel_choice, "perf_counter", lambda: made.now)
    yield made
    kernel_choice._tuner.cache_clear()
