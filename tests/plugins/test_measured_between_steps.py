"""Products that the first batch's budget leaves out are measured between optimizer steps, a little at a time."""

import time

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lightning_nm import NMPrecision
from lightning_nm.kernels import Router
from lightning_nm.kernels.router import router as router_module
from lightning_nm.kernels.router.tuner import Tuner
from lightning_nm.nn.products.routed_ops import GEMMS
from tests.plugins.test_precision_plugins import fit, sparse_callback
from tests.support.fake_kernels import FakeKernel, FakeTimer, gemm_key
from tests.support.processes import in_processes


def fake(budget_s=0.0, dense=10.0, **options):
    kernel = FakeKernel()
    made = NMPrecision(
        kernels="auto", backends=[kernel], decisions=None, budget_s=budget_s, **options
    )
    made.router.timer = FakeTimer([kernel], dense, fast=(2.0, 1.0))
    return made


class Seen(pl.Callback):
    """The products that are still to be measured after each step."""

    def __init__(self, router):
        self.router = router
        self.left = []

    def on_train_batch_end(self, *_):
        self.left.append(len(self.router.tuner.decisions.postponed()))


@pytest.mark.filterwarnings("ignore:.*were not measured within:UserWarning")
def test_one_product_is_measured_after_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(router_module, "LATER_SHARE", 1e9)
    made = fake()
    seen = Seen(made.router)
    fit(tmp_path, [made], callbacks=[sparse_callback(), seen], max_epochs=3)
    assert seen.left[:9] == [7, 6, 5, 4, 3, 2, 1, 0, 0], (
        "each of the eight is measured after one step"
    )
    measured = [
        used for used in made.router.used() if used.decision and used.decision.source == "measured"
    ]
    assert {used.kernel for used in measured} == {"fast"}
    assert made.router.sparse_share()[0] > 0


def test_what_is_left_out_is_said_at_once(tmp_path):
    with pytest.warns(
        UserWarning,
        match=r"8 of 8 products, 100% of their multiply-adds, were not measured within bud",
    ):
        fit(tmp_path, [fake()], max_epochs=1, limit_train_batches=1)


@pytest.mark.filterwarnings("ignore:.*were not measured within:UserWarning")
def test_the_share_on_sparse_kernels_is_logged(tmp_path, monkeypatch):
    monkeypatch.setattr(router_module, "LATER_SHARE", 1e9)
    shares = []

    class Look(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            shares.append(float(trainer.callback_metrics["nm/sparse_gemm_share"]))

    fit(
        tmp_path,
        [fake()],
        callbacks=[sparse_callback(monitor=True), Look()],
        max_epochs=3,
        log_every_n_steps=1,
    )
    assert shares[0] == 0
    assert shares[-1] > 0.3
    assert shares == sorted(shares)


@pytest.mark.filterwarnings("ignore:.*were not measured within:UserWarning")
def test_measuring_takes_a_share_of_the_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    measured = []

    def measure_next(tuner):
        measured.append(now[0])
        now[0] += 1.0  # a measurement takes as long as 20 steps
        return True

    monkeypatch.setattr(Tuner, "measure_next", measure_next)

    class Clock(pl.Callback):
        def on_train_batch_end(self, *_):
            now[0] += 1.0

    fit(tmp_path, [fake()], callbacks=[sparse_callback(), Clock()], max_epochs=20)
    assert now[0] > 80
    assert len(measured) == pytest.approx(0.05 * now[0], abs=1.1)


@pytest.mark.filterwarnings("ignore:.*were not measured within:UserWarning")
def test_a_router_stays_active_until_all_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(router_module, "LATER_SHARE", 1e9)
    made = fake(dense=1.0)  # no product is faster sparse
    active = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *_):
            active.append(not made.router.all_dense)

    fit(tmp_path, [made], callbacks=[sparse_callback(), Look()], max_epochs=3)
    assert active[:9] == [True] * 7 + [False] * 2


def test_nothing_is_measured_later_if_all_was(tmp_path, monkeypatch):
    def refuse(tuner):
        raise AssertionError("all products were measured")

    monkeypatch.setattr(Tuner, "measure_next", refuse)
    fit(tmp_path, [fake(budget_s=60.0)], max_epochs=2)


def test_postponed_products_are_not_kept_in_the_file(tmp_path):
    router = Router("auto", [FakeKernel()], tmp_path / "kernels.json", budget_s=0.0)
    tuner = router.initialize(torch.device("cpu"))
    tuner.tune([gemm_key()], 0.0)
    assert tuner.decisions.postponed()
    tuner.decisions.save(tmp_path / "kernels.json")
    assert not router_module.Decisions.load(tmp_path / "kernels.json", tuner.decisions.environment)


def _measure_together():
    kernel = FakeKernel()
    router = Router(
        "auto", [kernel], budget_s=0.0, timer=FakeTimer([kernel], 10.0, fast=(2.0, 1.0))
    )
    keys = [gemm_key(gemm) for gemm in GEMMS]
    router.record(
        [router_module.Product("layer", key) for key in keys]
    )  # no plugin has initialized the router
    found = []
    with pytest.warns(UserWarning, match="were not measured within"):
        router.tune()
    for _ in range(3 * router_module.LATER_STEPS + 1):
        router.measure_more()
        found.append([router.tuner.decisions[key].kernel for key in keys].count("fast"))
    timed = len(router.timer.timed)
    assert (timed > 0) == (dist.get_rank() == 0), "the first process measures for all"
    return found


@pytest.mark.slow
def test_processes_decide_together(tmp_path):
    first, second = in_processes(2, tmp_path, _measure_together)
    steps = router_module.LATER_STEPS
    assert first == second
    assert [first[k * steps - 1] for k in (1, 2, 3)] == [1, 2, 3]
    assert first[steps - 2] == 0


def _decide_with_products_on_the_first_rank():
    kernel = FakeKernel()
    router = Router(
        "auto", [kernel], budget_s=0.0, timer=FakeTimer([kernel], 10.0, fast=(2.0, 1.0))
    )
    own = gemm_key(columns=256 + 256 * dist.get_rank())
    if dist.get_rank() == 0:
        router.record([router_module.Product("layer", gemm_key(gemm)) for gemm in GEMMS])
        with pytest.warns(UserWarning, match="were not measured within"):
            router.tune()
    else:
        router.tune()
    router.initialize(torch.device("cpu")).decide(own)
    for _ in range(4 * router_module.LATER_STEPS):
        router.measure_more()  # all take part: one that did not would let the first wait for ever
    keys = [gemm_key(gemm) for gemm in GEMMS]
    return [router.tuner.decisions[key].kernel for key in [*keys, own]]


@pytest.mark.slow
def test_a_rank_without_products_takes_part_and_keeps_its_own_sizes(tmp_path):
    assert in_processes(2, tmp_path, _decide_with_products_on_the_first_rank) == [["fast"] * 4] * 2


def test_a_postponed_product_is_measured_at_its_size_on_a_numbered_device():
    key = gemm_key(columns=100, device="cpu:0")  # its bucket has 128
    kernel = FakeKernel()
    router = Router("auto", [kernel], timer=FakeTimer([kernel], 10.0, fast=(2.0, 1.0)))
    tuner = router.initialize(torch.device("cpu:0"))
    tuner.tune([key], 0.0)
    seen = []
    tuner._measured = lambda key: seen.append(key) or tuner._dense(key)
    assert tuner.measure_next()
    assert seen == [key]


@pytest.mark.parametrize("call", ["tune", "measure_next"])
def test_measuring_leaves_the_random_numbers_alone(call):
    """It happens at times that the clock decides."""
    router = Router("auto", budget_s=0.0)
    tuner = router.initialize(torch.device("cpu"))
    tuner.tune([gemm_key(dtype=torch.float32)], 60.0 if call == "tune" else 0.0)
    before = torch.get_rng_state()
    if call == "tune":
        tuner.tune([gemm_key(rows=64, dtype=torch.float32)], 60.0)
    else:
        assert tuner.measure_next()
    assert torch.equal(torch.get_rng_state(), before)
