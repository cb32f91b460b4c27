"""The table of kernels after a fit."""

import io

import torch
from rich.console import Console

from lightning_nm import NMPattern, NMPrecision
from lightning_nm.callbacks.tables import kernel_columns, kernel_rows, print_kernels
from lightning_nm.kernels import CuSparseLtKernel, GemmKey, Router
from lightning_nm.kernels.router import GemmUse, Product
from lightning_nm.kernels.tuner import Decision
from tests.plugins.test_precision_plugins import fit, mlp, plugin, sparse_callback, tabled  # noqa: F401
from tests.support.fake_kernels import FakeKernel


def test_the_table_after_a_fit(tmp_path, capsys):
    made = plugin()
    made.router.reset()
    for tables in (True, False):
        fit(tmp_path, [made], callbacks=[tabled(tables)], max_epochs=1)
        out = capsys.readouterr().out
        assert ("N:M kernels" in out) == tables
    fit(
        tmp_path,
        [plugin(kernels="auto")],
        callbacks=[tabled(True)],
        max_epochs=1,
        limit_train_batches=1,
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "share of the masked layers' GEMM time on sparse kernels" in out
    dense = NMPrecision(
        kernels="sparse", backends=[FakeKernel(supports=lambda key: "never " + "and never " * 3)]
    )
    fit(tmp_path, [dense], callbacks=[tabled(True)], max_epochs=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "no product ran on a sparse kernel" in out
    assert out.count("never and never and never and never") == 1, "a reason is printed once"
    assert "0.0% (by dense multiply-adds)" in out


def test_nothing_is_routed_where_no_kernel_works(tmp_path, capsys):
    backends = [CuSparseLtKernel()]
    made = NMPrecision(backends=backends, decisions=str(tmp_path / "kernels.json"))
    fit(tmp_path, [made], callbacks=[tabled(True)], max_epochs=1)
    assert made.router.active_or_none() is None
    assert not made.router.used()
    out = " ".join(capsys.readouterr().out.split())
    assert "every product was dense, no sparse kernel works here: " in out
    assert "cusparselt: cuSPARSELt needs a CUDA device" in out
    assert not (tmp_path / "kernels.json").exists()
    none = NMPrecision(backends=[])
    fit(tmp_path, [none], max_epochs=1)
    assert none.router.unavailable_reason == "there is no sparse kernel"


def product(
    layer,
    gemm="forward",
    rows=4096,
    depth=16384,
    columns=65536,
    reason="",
    pattern="2:4",
    **options,
):
    key = GemmKey(
        gemm, rows, depth, columns, torch.bfloat16, NMPattern.parse(pattern), "cpu", **options
    )
    return Product(layer, key, reason)


def decided(kernel="cpu-permute", dense_ms=1000.25):
    return Decision(
        kernel, dense_ms, 200.0, 50.0, f"measured {kernel} 4.000x; sparse from 1.03x", "measured"
    )


def used_router(monkeypatch, *uses):
    made = Router("sparse", [])
    monkeypatch.setattr(made, "used", lambda: list(uses))
    made.unavailable_reason = ""
    return made


def test_a_product_has_one_row_for_all_its_kernels_and_layers(monkeypatch):
    made = used_router(
        monkeypatch,
        GemmUse(product("a"), "reference", 2, None),
        GemmUse(product("b"), "reference", 2, None),
        GemmUse(product("a"), "cpu-permute", 5, decided()),
        GemmUse(product("b"), "cpu-permute", 6, decided()),
    )
    (row,) = kernel_rows(made)
    assert (row.product, row.calls, row.kernel) == ("forward 4096x16384x65536", 15, "cpu-permute")
    assert (
        row.why
        == "measured cpu-permute 4.000x; sparse from 1.03x; 4 calls before that on reference"
    )
    assert row.gain == 1000.25 / (200 + 50)


def test_products_of_equal_sizes_are_told_apart_by_what_differs(monkeypatch):
    keys = ({}, {"pattern": "1:4"}, {"permuted": True}, {"gemm": "dgrad"})
    made = used_router(
        monkeypatch, *(GemmUse(product("a", **key), "reference", 1, None) for key in keys)
    )
    names = [row.product for row in kernel_rows(made)]
    assert names == [
        "forward 4096x16384x65536 2:4",
        "forward 4096x16384x65536 1:4",
        "forward 4096x16384x65536 2:4 permuted",
        "dgrad 4096x16384x65536",
    ]


def test_the_table_fits_into_80_columns(monkeypatch):
    made = used_router(
        monkeypatch,
        GemmUse(product("a"), "cusparselt", 123456, decided("cusparselt")),
        GemmUse(
            product("a", "wgrad", reason="none of its operands is N:M " * 9),
            "reference",
            123456,
            None,
        ),
        GemmUse(product("a", permuted=True), "cpu-permute", 123456, decided()),
    )
    out = io.StringIO()
    print_kernels(made, Console(file=out, width=80))
    text = out.getvalue()
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "…" not in text
    for words in (
        "123456",
        "1000.250",
        "250.000",
        "4.00x",
        "cusparselt",
        "1: none of its operands is N:M",
    ):
        assert words in text
    assert [len(row) for row in kernel_columns(made)[1]] == [7] * 3
