"""The table of kernels after a fit."""

import io

import pytest
import torch
from rich.console import Console

from lightning_nm import NMPattern, NMPrecision
from lightning_nm.callbacks.tables import kernel_columns, kernel_rows, print_kernels
from lightning_nm.kernels import CuSparseLtKernel, GemmKey, Router
from lightning_nm.kernels.router import GemmUse, Product
from lightning_nm.kernels.tuner import Decision
from tests.support.fake_kernels import FakeKernel
from tests.support.mlp import fit, plugin, sparse_callback


@pytest.fixture
def printed(tmp_path, capsys):
    """What a fit with a plugin prints, in one line."""

    def run(plugin, show_tables=True, **options):
        nm = sparse_callback(grad_estimator=None)
        nm.show_tables = show_tables
        fit(tmp_path, [plugin], [nm], max_epochs=1, **options)
        return " ".join(capsys.readouterr().out.split())

    return run


def test_the_table_after_a_fit(printed):
    made = plugin()
    made.router.reset()
    for tables in (True, False):
        assert ("N:M kernels" in printed(made, tables)) == tables
    out = printed(plugin(kernels="auto"), limit_train_batches=1)
    assert "fraction of the masked layers' GEMM time on sparse kernels" in out
    kernel = FakeKernel(supports=lambda key: "never " + "and never " * 3)
    out = printed(NMPrecision(kernels="sparse", backends=[kernel]))
    assert "no GEMM ran on a sparse kernel" in out
    assert out.count("never and never and never and never") == 1, "a reason is printed once"
    assert "0.0% (by dense multiply-adds)" in out


def test_nothing_is_routed_where_no_kernel_works(tmp_path, printed):
    file = tmp_path / "kernels.json"
    made = NMPrecision(backends=[CuSparseLtKernel()], decisions=str(file))
    out = printed(made)
    assert made.router.active_or_none() is None
    assert not made.router.used()
    assert "every GEMM was dense, no sparse kernel works here: " in out
    assert "cusparselt: cuSPARSELt needs a CUDA device" in out
    assert not file.exists()
    none = NMPrecision(backends=[])
    printed(none)
    assert none.router.unavailable_reason == "there is no sparse kernel"


def use(kernel="reference", calls=2, layer="a", gemm="forward", reason="", **options):
    """A GEMM's use, which was measured if its kernel is a sparse one."""
    pattern = NMPattern.parse(options.pop("pattern", "2:4"))
    key = GemmKey(gemm, 4096, 16384, 65536, torch.bfloat16, pattern, "cpu", **options)
    why = f"measured {kernel} 4.000x; sparse from 1.03x"
    decision = Decision(kernel, 1000.25, 200.0, 50.0, why, "measured")
    return GemmUse(
        Product(layer, key, reason), kernel, calls, None if kernel == "reference" else decision
    )


@pytest.fixture
def router(monkeypatch):
    def made(*uses):
        router = Router("sparse", [])
        monkeypatch.setattr(router, "used", lambda: list(uses))
        router.unavailable_reason = ""
        return router

    return made


def test_a_product_has_one_row_for_all_its_kernels_and_layers(router):
    sparse = [use("cpu-permute", 5), use("cpu-permute", 6, "b")]
    (row,) = kernel_rows(router(use(), use(layer="b"), *sparse))
    assert (row.product, row.calls, row.kernel) == ("forward 4096x16384x65536", 15, "cpu-permute")
    measured = "measured cpu-permute 4.000x; sparse from 1.03x"
    assert row.why == f"{measured}; 4 calls before that on reference"
    assert row.gain == 1000.25 / (200 + 50)


def test_products_of_equal_sizes_are_told_apart_by_what_differs(router):
    keys = ({}, {"pattern": "1:4"}, {"permuted": True}, {"gemm": "dgrad"})
    names = [row.product for row in kernel_rows(router(*(use(**key) for key in keys)))]
    assert names == [
        "forward 4096x16384x65536 2:4",
        "forward 4096x16384x65536 1:4",
        "forward 4096x16384x65536 2:4 permuted",
        "dgrad 4096x16384x65536",
    ]


def test_the_table_fits_into_80_columns(router):
    made = router(
        use("cusparselt", 123456),
        use(calls=123456, gemm="wgrad", reason="none of its operands is N:M " * 9),
        use("cpu-permute", 123456, permuted=True),
    )
    out = io.StringIO()
    print_kernels(made, Console(file=out, width=80))
    text = out.getvalue()
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "…" not in text
    for words in ("123456", "1000.250", "250.000", "4.00x", "cusparselt"):
        assert words in text
    assert "1: none of its operands is N:M" in text
    assert [len(row) for row in kernel_columns(made)[1]] == [7] * 3
