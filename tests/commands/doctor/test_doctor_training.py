"""Real training steps: what is counted, what is measured, and what is left behind."""

import lightning.pytorch as pl
import pytest
import torch

from lightning_nm import NMPrecision, NMSparsityCallback
from lightning_nm.commands.doctor.training import _StepClock, judge, judge_unmeasured, watch
from lightning_nm.kernels import CuSparseLtKernel, Router, SimulatedSparseKernel
from lightning_nm.kernels.router.router import active, routing
from lightning_nm.nn.adapters import Adapter
from tests.commands.doctor.test_doctor_report import Watched, make_router
from tests.support.fake_kernels import FakeTimer
from tests.support.lightning_models import Data, callback, make_trainer, new_model


def examined(tmp_path, *callbacks, timed=True, **options):
    trainer = make_trainer(tmp_path, callbacks or [callback()], **options)
    model = new_model()
    return trainer, model, watch(trainer, model, Data(), timed=timed)


def counted(seen):
    return {
        (p.layer, p.key.gemm, p.key.rows, p.key.depth, p.key.columns): n
        for p, n in seen.counts.items()
    }


# Batches of 16: a convolution with 4x4 positions, and a linear layer behind it.
EXPECTED = {
    ("net.3", "forward", 16, 144, 256): 1,
    ("net.3", "dgrad", 144, 16, 256): 1,
    ("net.3", "wgrad", 16, 256, 144): 1,
    ("net.6", "forward", 32, 256, 16): 1,
    ("net.6", "dgrad", 256, 32, 16): 1,
    ("net.6", "wgrad", 32, 16, 256): 1,
}


@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_products_of_one_step_are_counted_as_they_are(tmp_path, capsys, plugin, accumulated):
    plugins = [NMPrecision(backends=[Watched()], decisions=None)] if plugin else None
    trainer, model, seen = examined(
        tmp_path, plugins=plugins, accumulate_grad_batches=accumulated, max_epochs=10
    )
    assert counted(seen) == {product: accumulated * calls for product, calls in EXPECTED.items()}
    assert seen.reuse == accumulated
    assert seen.step_ms > 0
    assert seen.router is (plugins[0].router if plugin else None)
    if plugin:
        assert seen.router.kernels == "auto"
        assert not seen.router.used()
    assert active() is None
    assert not any(isinstance(module, Adapter) for module in model.modules())
    assert [type(c) for c in trainer.callbacks] == [NMSparsityCallback]
    assert trainer.global_step == 1 + 2 + 5
    assert capsys.readouterr().out == ""


def test_a_router_that_was_active_is_so_again(tmp_path):
    router = make_router()
    with routing(router):
        _, _, seen = examined(tmp_path, timed=False)
        assert active() is router
    assert counted(seen) == EXPECTED
    assert not router.used()


def test_one_step_is_enough_where_nothing_is_measured(tmp_path):
    trainer, _, seen = examined(tmp_path, timed=False)
    assert trainer.global_step == 1
    assert seen.step_ms is None
    assert counted(seen) == EXPECTED


def test_schedules_are_those_of_the_whole_training(tmp_path):
    _, _, seen = examined(tmp_path, callback("bi-mask-phases"), max_steps=12)
    assert [seen.sparsifiers[0].layers["net.6"].progress.schedule] == [(2, 6)]
    reasons = {product.reason for product in seen.counts if product.layer == "net.6"}
    assert any("dense phase" in reason for reason in reasons)


def test_a_short_training_is_enough(tmp_path):
    _, _, seen = examined(tmp_path, max_steps=2)
    assert counted(seen) == EXPECTED
    assert seen.step_ms is None


def test_a_training_without_batches_is_refused(tmp_path):
    with pytest.raises(ValueError, match="before its first batch"):
        examined(tmp_path, limit_train_batches=0)


def test_a_trainer_without_masks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no NMSparsityCallback"):
        examined(tmp_path, pl.callbacks.LambdaCallback())


def test_errors_of_the_training_pass_and_leave_nothing_active(tmp_path):
    def fail(*_):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        examined(tmp_path, callback(), pl.callbacks.LambdaCallback(on_before_backward=fail))
    assert active() is None


@pytest.mark.parametrize("mode", ["auto", "sparse", "reference"])
def test_decisions_are_made_and_measured_for_what_was_counted(tmp_path, mode):
    _, _, seen = examined(tmp_path)
    (found,) = judge(make_router(mode), seen)
    assert [(row.product.layer, row.eligible) for row in found.rows] == [("net.3", False)] * 3 + [
        ("net.6", True),
        ("net.6", True),
        ("net.6", False),
    ]
    taken = "mode 'reference'" if mode == "reference" else "simulated: it takes no convolutions"
    assert {row.why for row in found.rows[:3]} == {taken, "none of its operands is N:M"}
    forward = found.rows[3]
    assert (forward.dense_ms, forward.sparse_ms, forward.pack_ms) == pytest.approx((10, 6, 2))
    assert forward.sparse == (mode != "reference")
    assert found.step_ms == seen.step_ms
    saved = 0 if mode == "reference" else 2 * (10 - 8)
    assert found.predicted_step_ms == pytest.approx(seen.step_ms - saved)


def test_a_forced_kernel_may_lose(tmp_path):
    _, _, seen = examined(tmp_path)
    (found,) = judge(make_router("sparse", sparse=12.0), seen)
    assert found.predicted_step_ms == pytest.approx(seen.step_ms + 2 * 4)
    assert "is not faster" in found.verdict


def test_other_token_counts(tmp_path):
    _, _, seen = examined(tmp_path)
    router = Router(backends=[CuSparseLtKernel()], timer=None)
    small, large = judge_unmeasured(router, seen, [64, 1 << 20])
    assert not router.used()
    assert small.kernels is None
    assert [row.could for row in small.rows] == [()] * 3 + [("cusparselt",)] * 2 + [()]
    assert (small.tokens, large.tokens) == (64, 1 << 20)
    assert small.step_ms is large.step_ms is None
    for found, tokens in ((small, 64), (large, 1 << 20)):
        for row in found.rows:
            key = row.product.key
            assert (key.depth if key.gemm == "wgrad" else key.columns) == tokens
            assert key.dtype == torch.bfloat16


def test_without_a_gpu_nothing_runs(tmp_path):
    class Untouched(SimulatedSparseKernel):
        def pack(self, matrix):
            raise AssertionError("packed")

    _, _, seen = examined(tmp_path, timed=False)
    (found,) = judge_unmeasured(Router(backends=[Untouched()], reuse=4), seen)
    convolution = {"simulated: it takes no convolutions", "none of its operands is N:M"}
    assert {row.why for row in found.rows[:3]} == convolution
    assert [row.eligible for row in found.rows] == [False] * 3 + [True, True, False]
    assert [row.pack_uses for row in found.rows] == [4, 4, 1] * 2
    assert found.rows[5].why == "none of its operands is N:M"


def test_the_plugins_router_measures(tmp_path):
    kernel = Watched()
    plugin = NMPrecision(backends=[kernel], decisions=None)
    plugin.router.timer = FakeTimer([kernel], 10, simulated=(6, 2))
    _, _, seen = examined(tmp_path, plugins=[plugin])
    (found,) = judge(seen.router, seen)
    assert found.kernels == "auto"
    assert found.predicted_step_ms == pytest.approx(seen.step_ms - 2 * 2)


@pytest.mark.parametrize(("slowest", "is_told"), [(0.005, False), (0.021, True)])
def test_steps_that_other_work_disturbs_are_told(capsys, slowest, is_told):
    clock = _StepClock()
    clock.seconds = [0.004, 0.004, 0.005, slowest, 0.004]
    assert clock.step_ms(batches_in_step=1) == pytest.approx(4)
    told = capsys.readouterr().err
    assert ("equal steps took 4.0 to 21.0 ms" in told) == is_told
