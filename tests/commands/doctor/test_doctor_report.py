"""Rows and sums against numbers computed by hand."""

import io
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from lightning_nm import NMPattern, NMSparsifier
from lightning_nm.commands.doctor import KernelState, Machine, report
from lightning_nm.commands.doctor.report import static_row, summarize
from lightning_nm.commands.doctor.tables import print_machine, print_report
from lightning_nm.kernels import (
    CuSparseLtKernel,
    GemmKernel,
    GemmKey,
    KernelRegistry,
    Router,
    SimulatedSparseKernel,
    routing,
)
from lightning_nm.kernels.router.cache import Environment
from lightning_nm.kernels.router.router import Product
from tests.support.fake_kernels import FakeTimer

CPU = torch.device("cpu")


class Watched(SimulatedSparseKernel):
    """Writes its calls down, for the fake timer."""

    def __init__(self):
        self.calls = []

    def pack(self, matrix):
        self.calls.append("pack")
        return super().pack(matrix)

    def linear(self, packed, x, bias=None):
        self.calls.append("linear")
        return super().linear(packed, x, bias)

    def matmul(self, packed, matrix):
        self.calls.append("matmul")
        return super().matmul(packed, matrix)


def make_router(mode="auto", dense=10.0, sparse=6.0, pack=2.0, **options):
    kernel = Watched()
    return Router(
        mode, [kernel], timer=FakeTimer([kernel], dense, simulated=(sparse, pack)), **options
    )


def trained(router, steps=2, method="transposable", estimator="mvue", batch=16):
    """Two linear layers: five products a step, as the first needs no dgrad."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    sparsifier = NMSparsifier(
        model, "2:4", method, estimator, skip_first_last=False, grad_snr_every=0
    ).attach()
    for _ in range(steps):
        with routing(router):
            loss = model(torch.randn(batch, 32)).square().mean()
            router.tune()
            loss.backward()
    return sparsifier


def gemms(found):
    return [(row.product.layer, row.product.key.gemm) for row in found.rows]


def test_sums_are_those_of_the_measured_times():
    router = make_router()
    found = report(router, trained(router), steps=2, step_ms=100.0)
    assert gemms(found) == [
        ("0", "forward"),
        ("0", "wgrad"),
        ("2", "forward"),
        ("2", "dgrad"),
        ("2", "wgrad"),
    ]
    assert all(
        (row.kernel, row.calls, row.chosen_ms) == ("simulated", 1, pytest.approx(8))
        for row in found.rows
    )
    assert all(row.gain == pytest.approx(10 / 8) and row.eligible for row in found.rows)
    assert (found.dense_ms, found.chosen_ms) == (pytest.approx(50), pytest.approx(40))
    assert found.predicted_step_ms == pytest.approx(90)
    assert found.kernel_speedup == pytest.approx(100 / 90)
    assert found.speedup is None, "training without masks was not measured"
    assert "5 of 5 products run sparse" in found.verdict
    assert found.verdict.endswith("1.111x as fast as under dense products")


def test_speed_is_that_against_training_without_masks():
    router = make_router()
    found = replace(report(router, trained(router), steps=2, step_ms=100.0), plain_step_ms=45.0)
    assert found.speedup == pytest.approx(45 / 90)
    assert found.verdict.endswith("0.500x as fast as plain dense training")
    assert found.to_dict()["speedup"] == pytest.approx(45 / 90)
    text = printed(80, print_report, found)
    names = ("plain dense training", "under masks with dense", "under masks with the chosen")
    lines = [line.split() for line in text.splitlines() if line.strip().startswith(names)]
    assert [line[-3:] for line in lines] == [
        ["45", "ms", "1.000x"],
        ["100", "ms", "0.450x"],
        ["90", "ms", "0.500x"],
    ]


def test_packs_of_weights_are_shared_and_those_of_gradients_are_not():
    router = make_router(pack=5.0, reuse=2)  # 6 + 5 / 2 < 10 < 6 + 5
    found = report(router, trained(router), steps=2, step_ms=100.0)
    assert [row.sparse for row in found.rows] == [
        row.product.key.gemm != "wgrad" for row in found.rows
    ]
    assert found.dense_ms == pytest.approx(50)
    assert found.chosen_ms == pytest.approx(3 * 8.5 + 2 * 10)
    assert found.predicted_step_ms == pytest.approx(100 - 4.5)


def test_what_gains_nothing_is_said():
    router = make_router(pack=5.0)
    found = report(router, trained(router), steps=2, step_ms=100.0)
    assert all(row.eligible and not row.sparse for row in found.rows)
    assert found.predicted_step_ms == found.step_ms == 100.0
    assert found.verdict == "no product is faster sparse: train without the plugin"


def test_products_without_an_operand_have_a_reason_and_no_time():
    router = make_router()
    found = report(router, trained(router, method="sr-ste", estimator=None), steps=2)
    dense = [row for row in found.rows if row.product.key.gemm != "forward"]
    assert {row.why for row in dense} == {
        "masked; not N:M along out",
        "none of its operands is N:M",
    }
    assert not any(row.eligible or row.dense_ms for row in dense)
    assert (found.dense_ms, found.chosen_ms) == (pytest.approx(20), pytest.approx(16))
    assert found.to_dict()["untimed"] == len(dense) == 3
    assert found.predicted_step_ms is None


def test_a_shape_that_does_not_fit_is_the_reason():
    router = make_router()
    model = nn.Sequential(nn.Linear(24, 32))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", skip_first_last=False).attach()
    with routing(router):
        loss = model(torch.randn(16, 24)).sum()
        router.tune()
        loss.backward()
        model(torch.randn(16, 24))
    row = report(router, sparsifier).rows[0]
    assert "depth=24 is not a multiple of 16" in row.why
    assert not row.eligible


def test_times_are_scaled_from_the_bucket_to_the_real_tokens():
    router = make_router()
    trained(router)
    key = GemmKey("forward", 64, 32, 9, torch.float32, NMPattern(2, 4), "cpu")  # its bucket is 10
    gradients = replace(key, gemm="wgrad", depth=9, columns=32)
    products = {Product("0", key): 3.0, Product("0", gradients): 1.0}
    for product in products:
        router.initialize(CPU).decide(product.key)
    forward, wgrad = report(router, counts=products).rows
    assert (forward.dense_ms, forward.sparse_ms, forward.pack_ms) == pytest.approx((9.0, 5.4, 2.0))
    assert (wgrad.dense_ms, wgrad.sparse_ms, wgrad.pack_ms) == pytest.approx((9.0, 5.4, 1.8))
    assert report(router, counts=products).dense_ms == pytest.approx(3 * 9 + 9)


@pytest.mark.parametrize(
    ("mode", "words"), [("reference", "runs every product dense"), ("sparse", "not known")]
)
def test_modes_that_do_not_measure(mode, words):
    router = make_router(mode)
    found = report(router, trained(router), step_ms=100.0)
    assert words in found.verdict
    assert found.predicted_step_ms == (100.0 if mode == "reference" else None)


def test_nothing_seen():
    found = report(make_router())
    assert found.rows == ()
    assert "nothing to say" in found.verdict
    assert found.predicted_step_ms is None
    sparsifier = NMSparsifier(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))).attach()
    found = report(make_router(), sparsifier, step_ms=3.0)
    assert found.unseen == ("0",)
    assert found.skipped == {"1": "last linear layer"}
    assert found.predicted_step_ms == 3.0
    with pytest.raises(ValueError, match="steps=0 must be positive"):
        report(make_router(), steps=0)


def test_layers_of_another_sparsifier_are_not_dense():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    both = [NMSparsifier(model, include="0").attach(), NMSparsifier(model, include="2").attach()]
    assert set(report(make_router(), *both).skipped) == {"4"}


SIZES = st.sampled_from([16, 24, 64, 1024, 4096, 12288])  # each its own bucket


@settings(max_examples=60, deadline=None)
@given(
    gemm=st.sampled_from(["forward", "dgrad", "wgrad"]),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    pattern=st.sampled_from(["2:4", "1:4", "4:8"]),
    permuted=st.booleans(),
    reuse=st.sampled_from([1, 4]),
)
def test_without_a_gpu_sizes_and_patterns_decide_what_could_run(
    gemm, sizes, dtype, pattern, permuted, reuse
):
    class Broken(GemmKernel):
        name = "broken"

        def static_reason(self, key):
            raise KeyError("mine")

    key = GemmKey(
        gemm, *sizes, dtype, NMPattern.parse(pattern), "cpu", permuted and gemm == "dgrad"
    )
    kernel = CuSparseLtKernel()
    row = static_row(KernelRegistry([Broken(), kernel]), reuse, Product("layer", key), 2.0)
    rows, depth, _ = sizes
    fits = (
        rows % 16 == 0
        and (gemm == "wgrad" or depth % 16 == 0)
        and pattern != "4:8"
        and dtype != torch.float32
    )
    assert (row.eligible, row.could) == (fits, ("cusparselt",) if fits else ())
    assert ("; cusparselt: " in row.why) == (not fits)
    assert row.why.startswith("broken: KeyError: 'mine'")
    assert (row.calls, row.pack_uses, row.sparse) == (2.0, 1 if gemm == "wgrad" else reuse, False)
    assert row.dense_ms is row.chosen_ms is row.gain is None
    assert not kernel.device_probe._verdicts, "nothing is probed"


def test_reports_are_json():
    router = make_router()
    found = report(router, trained(router), step_ms=100.0)
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert content["rows"][0]["dtype"] == "float32"
    assert content["rows"][0]["pattern"] == "2:4"
    assert content["predicted_step_ms"] == found.predicted_step_ms
    product = Product("0", GemmKey("forward", 64, 64, 64, torch.bfloat16, NMPattern(2, 4), "cpu"))
    make_row = partial(static_row, KernelRegistry([CuSparseLtKernel()]), 1)
    unmeasured = summarize(make_row, None, [], {product: 1.0})
    content = json.loads(json.dumps(unmeasured.to_dict(), allow_nan=False))
    assert (content["kernels"], content["rows"][0]["could"]) == (None, ["cusparselt"])
    assert content["verdict"].startswith("1 of 1 products could run on a sparse kernel")


def printed(width, show, *found):
    console = Console(record=True, width=width, file=io.StringIO())
    show(*found, console)
    return console.export_text()


def test_tables_show_what_was_found():
    router = make_router()
    found = report(router, trained(router, method="sr-ste"), steps=2, step_ms=100.0)
    found = replace(found, skipped={"head": "last linear layer"})
    text = printed(120, print_report, found)
    for words in (
        "products, measured",
        "1.250x",
        "simulated",
        "6000 + 2000",
        "not N:M along out",
        "last linear layer",
    ):
        assert words in text
    rows = [line.split() for line in text.splitlines() if "under masks" in line]
    assert [row[-3:] for row in rows] == [["100", "ms", "-"], ["92", "ms", "-"]]
    assert found.verdict in text


def test_long_names_are_folded_not_cut():
    router = make_router()
    found = report(router, trained(router), steps=2)
    name = "encoder." * 20 + "0"
    long = [replace(row, product=row.product._replace(layer=name)) for row in found.rows[:1]]
    table = printed(80, print_report, replace(found, rows=tuple(long))).split("sizes: rows")[0]
    assert all(len(line) <= 80 for line in table.splitlines())
    assert name in "".join(line.split()[0] for line in table.splitlines() if line.strip())


def test_a_machine_with_a_gpu():
    environment = Environment("NVIDIA H200", "580.65", "2.13.0", "13.0", "800")
    states = (
        KernelState("reference", True, "", ""),
        KernelState("cusparselt", True, "", "slower than 0.8.1"),
    )
    text = printed(80, print_machine, Machine(environment, "9.0", states))
    for words in (
        "NVIDIA H200, compute capability 9.0",
        "580.65",
        "13.0",
        "800",
        "slower than 0.8.1",
    ):
        assert words in text
    assert "no CUDA device" not in text
    assert "triton" not in text  # not known


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("", "its kernels prepare operands"),
        ("switched off by LIGHTNING_NM_TRITON=0", "LIGHTNING_NM_TRITON=0: torch prepares operands"),
    ],
)
def test_a_machine_says_if_triton_kernels_run(reason, words):
    environment = Environment("NVIDIA H200", "580.65", "2.13.0", "13.0", "800")
    machine = Machine(environment, "9.0", (), triton=reason)
    assert words in printed(200, print_machine, machine)
    assert machine.to_dict()["triton"] == reason
