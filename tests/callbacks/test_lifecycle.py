"""The phases of the callback, without a model."""

import pytest

from lightning_nm.callbacks.state import Lifecycle, Origin, Phase

STATE = {"schema": 1, "open": False}


def fit(lifecycle, batches=1):
    lifecycle.begin_fit()
    if lifecycle.state is not None:
        lifecycle.restored(lifecycle.state)
    lifecycle.phase = Phase.INSTALLED
    for _ in range(batches):
        lifecycle.batch_open = True
        lifecycle.end_batch()


def test_a_fit_goes_through_its_phases():
    lifecycle = Lifecycle()
    assert (lifecycle.phase, lifecycle.is_new) == (Phase.IDLE, True)
    fit(lifecycle, 0)
    assert lifecycle.phase is Phase.INSTALLED
    lifecycle.batch_open = True
    lifecycle.end_batch()
    assert not lifecycle.batch_open
    assert lifecycle.phase is Phase.TRAINING
    lifecycle.end(STATE)
    assert lifecycle.phase is Phase.IDLE
    assert lifecycle.state is STATE


def test_a_second_fit_carries_the_state_over():
    lifecycle = Lifecycle()
    fit(lifecycle)
    lifecycle.end(STATE)
    assert lifecycle.origin is Origin.CARRIED_OVER
    fit(lifecycle, 0)
    assert (lifecycle.phase, lifecycle.origin, lifecycle.state) == (
        Phase.INSTALLED,
        Origin.CARRIED_OVER,
        None,
    )
    assert not lifecycle.is_new


def test_a_fit_that_trained_nothing_leaves_nothing_behind():
    lifecycle = Lifecycle()
    fit(lifecycle, 0)
    lifecycle.end(None)
    assert (lifecycle.phase, lifecycle.origin, lifecycle.state) == (Phase.IDLE, Origin.NEW, None)


@pytest.mark.parametrize(
    ("resumes", "origin", "steps"), [(True, Origin.CHECKPOINT, 7), (False, Origin.CARRIED_OVER, 0)]
)
def test_the_origin_of_a_loaded_state(resumes, origin, steps):
    lifecycle = Lifecycle()
    lifecycle.read_checkpoint(resumes=resumes, global_step=7)
    assert lifecycle.steps_before == steps
    lifecycle.receive(STATE)
    lifecycle.begin_fit()
    assert lifecycle.origin is origin
    assert lifecycle.state is STATE, "it is kept until it is restored"


def test_the_state_of_a_later_fit_does_not_inherit_the_origin_of_a_checkpoint():
    lifecycle = Lifecycle()
    lifecycle.read_checkpoint(resumes=True, global_step=7)
    lifecycle.receive(STATE)
    fit(lifecycle)
    assert lifecycle.origin is Origin.CHECKPOINT
    lifecycle.end(STATE)
    assert lifecycle.origin is Origin.CARRIED_OVER


@pytest.mark.parametrize(
    ("state", "is_open"), [({"open": True}, True), ({"open": False}, False), ({"schema": 1}, True)]
)
def test_a_checkpoint_within_a_batch_opens_it(state, is_open):
    lifecycle = Lifecycle(batch_open=not is_open)
    lifecycle.receive(state)
    lifecycle.begin_fit()
    assert not lifecycle.batch_open
    lifecycle.restored(state)
    assert (lifecycle.batch_open, lifecycle.state) == (is_open, None)


def test_a_state_of_another_model_is_dropped():
    lifecycle = Lifecycle()
    lifecycle.receive(STATE)
    lifecycle.begin_fit()
    lifecycle.start_anew()
    assert (lifecycle.is_new, lifecycle.state) == (True, None)


def test_a_fit_that_failed_after_it_restored_the_state_starts_anew():
    lifecycle = Lifecycle()
    lifecycle.receive(STATE)
    lifecycle.begin_fit()
    lifecycle.restored(STATE)  # and something failed before masks were installed
    lifecycle.begin_fit()
    assert lifecycle.is_new


def test_an_interrupted_fit_keeps_its_batch_until_it_ends():
    lifecycle = Lifecycle()
    fit(lifecycle)
    lifecycle.batch_open = True
    lifecycle.phase = Phase.INTERRUPTED
    assert (lifecycle.phase, lifecycle.batch_open) == (Phase.INTERRUPTED, True)
    lifecycle.end(STATE)
    assert (lifecycle.phase, lifecycle.batch_open) == (Phase.IDLE, True), (
        "the saved state says so as well"
    )
    lifecycle.begin_fit()
    assert not lifecycle.batch_open
