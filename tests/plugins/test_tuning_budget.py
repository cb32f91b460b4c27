"""GEMMs that the first batch's budget leaves out are dense, and measured by a later training."""

import pytest
import torch
import torch.distributed as dist

from lightning_nm import NMPrecision
from lightning_nm.kernels import Router
from lightning_nm.kernels import router as router_module
from lightning_nm.kernels.tuner import environment_of
from lightning_nm.nn.products import GEMMS
from tests.support.fake_kernels import FakeKernel, FakeTimer, gemm_key
from tests.support.mlp import fit
from tests.support.processes import in_processes


def fake_router(budget_s=0.0, file=None):
    kernel = FakeKernel()
    timer = FakeTimer([kernel], 10.0, fast=(2.0, 1.0))
    return Router("auto", [kernel], file, budget_s=budget_s, timer=timer)


def test_what_is_left_out_is_said_and_dense(tmp_path):
    made = NMPrecision(kernels="auto", backends=[FakeKernel()], decisions=None, budget_s=0.0)
    with pytest.warns(
        UserWarning,
        match=r"8 of 8 GEMMs, 100% of their multiply-adds, were not measured within budget_s=0",
    ):
        fit(tmp_path, [made], max_epochs=1)
    assert {used.kernel for used in made.router.used()} == {"reference"}


@pytest.mark.filterwarnings("ignore:.*were not measured within:UserWarning")
def test_postponed_products_are_not_kept_in_the_file_and_measured_later(tmp_path):
    key, file = gemm_key(), tmp_path / "kernels.json"
    for budget_s, source in ((0.0, "postponed"), (60.0, "measured")):
        router = fake_router(budget_s, file)
        router.record([router_module.Product("layer", key)])
        router.tune()
        assert router.tuner.decisions[key].source == source
        router.tuner.decisions.save(file)
        loaded = router_module.Decisions.load(file, router.tuner.decisions.environment)
        assert (key in loaded) == (source == "measured")


def _decide_with_products_on_the_first_rank():
    router = fake_router(60.0)
    own = gemm_key(columns=256 + 256 * dist.get_rank())
    if dist.get_rank() == 0:
        router.record([router_module.Product("layer", gemm_key(gemm)) for gemm in GEMMS])
    router.tune()
    assert not router.timer.timed or dist.get_rank() == 0, "the first process measures for all"
    router.initialize(torch.device("cpu")).decide(own)
    return [router.tuner.decisions[key].kernel for key in [*map(gemm_key, GEMMS), own]]


@pytest.mark.slow
def test_a_rank_without_products_takes_part_and_keeps_its_own_sizes(tmp_path):
    assert in_processes(2, tmp_path, _decide_with_products_on_the_first_rank) == [["fast"] * 4] * 2


def test_what_is_measured_after_a_dense_start_is_saved_for_its_device():
    router = fake_router()
    router.tune()  # no GEMM ran that could be sparse, so no device is known
    device = torch.device("meta")
    assert router.initialize(device).decisions.environment == environment_of(device)


def test_measuring_leaves_the_random_numbers_alone():
    """It happens at times that the clock decides."""
    router = Router("auto")
    tuner = router.initialize(torch.device("cpu"))
    tuner.tune([gemm_key(dtype=torch.float32)], 60.0)
    before = torch.get_rng_state()
    tuner.tune([gemm_key(rows=64, dtype=torch.float32)], 60.0)
    assert torch.equal(torch.get_rng_state(), before)
