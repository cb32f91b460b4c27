"""The table of kernels after a fit."""

from lightning_nm import (
    NMPrecision,
)
from lightning_nm.kernels import CuSparseLtDirectKernel, CuSparseLtKernel
from tests.plugins.test_precision_plugins import fit, mlp, plugin, sparse_callback, tabled  # noqa: F401
from tests.support.fake_kernels import FakeKernel


def test_the_table_after_a_fit(tmp_path, capsys):
    made = plugin()
    made.router.reset()
    for tables in (True, False):
        fit(tmp_path, [made], callbacks=[tabled(tables)], max_epochs=1)
        out = capsys.readouterr().out
        assert ("N:M kernels" in out) == tables
    fit(tmp_path, [plugin(kernels="auto")], callbacks=[tabled(True)], max_epochs=1, limit_train_batches=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "share of the masked layers' GEMM time on sparse kernels" in out
    dense = NMPrecision(kernels="sparse", backends=[FakeKernel(supports=lambda key: "never " + "and never " * 3)])
    fit(tmp_path, [dense], callbacks=[tabled(True)], max_epochs=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "no product ran on a sparse kernel" in out
    assert "as above" in out
    assert "0.0% (by dense multiply-adds)" in out


def test_nothing_is_routed_where_no_kernel_works(tmp_path, capsys):
    backends = [CuSparseLtDirectKernel(), CuSparseLtKernel()]
    made = NMPrecision(backends=backends, decisions=str(tmp_path / "kernels.json"))
    fit(tmp_path, [made], callbacks=[tabled(True)], max_epochs=1)
    assert made.router.active_or_none() is None
    assert not made.router.used()
    out = " ".join(capsys.readouterr().out.split())
    assert "every product was dense, no sparse kernel works here: " in out
    assert "cusparselt-direct, cusparselt: cuSPARSELt needs a CUDA device" in out
    assert not (tmp_path / "kernels.json").exists()
    none = NMPrecision(backends=[])
    fit(tmp_path, [none], max_epochs=1)
    assert none.router.unavailable_reason == "there is no sparse kernel"
