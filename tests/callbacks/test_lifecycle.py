"""What one fit leaves to the next, without a model."""

import pytest

from lightning_nm.callbacks.state import Lifecycle, Origin

STATE = {"schema": 1, "open": False}


def fit(lifecycle):
    lifecycle.begin_fit()
    if lifecycle.state is not None:
        lifecycle.restored()


def test_a_second_fit_carries_the_state_over():
    lifecycle = Lifecycle()
    fit(lifecycle)
    assert lifecycle.is_new
    lifecycle.end(STATE)
    assert lifecycle.state is STATE
    fit(lifecycle)
    assert (lifecycle.origin, lifecycle.state) == (Origin.CARRIED_OVER, None)
    assert not lifecycle.is_new


def test_a_fit_that_trained_nothing_leaves_nothing_behind():
    lifecycle = Lifecycle()
    fit(lifecycle)
    lifecycle.end(None)
    assert (lifecycle.origin, lifecycle.state) == (Origin.NEW, None)


@pytest.mark.parametrize(
    ("resumes", "origin"), [(True, Origin.CHECKPOINT), (False, Origin.CARRIED_OVER)]
)
def test_the_origin_of_a_loaded_state(resumes, origin):
    lifecycle = Lifecycle(resumes=resumes, steps_before=7)
    assert lifecycle.joined_at == 7
    lifecycle.receive(STATE)
    lifecycle.begin_fit()
    assert lifecycle.origin is origin
    assert lifecycle.joined_at == 0, "its state counts these steps"
    assert lifecycle.state is STATE, "it is kept until it is restored"


def test_the_state_of_a_later_fit_does_not_inherit_the_origin_of_a_checkpoint():
    lifecycle = Lifecycle(resumes=True)
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
    lifecycle.restored()
    assert (lifecycle.batch_open, lifecycle.state) == (is_open, None)


def test_a_fit_that_failed_after_it_restored_the_state_starts_anew():
    lifecycle = Lifecycle()
    lifecycle.receive(STATE)
    fit(lifecycle)  # and something failed before masks were installed
    lifecycle.begin_fit()
    assert lifecycle.is_new


def test_an_interrupted_fit_ends_when_the_next_one_begins():
    lifecycle = Lifecycle(batch_open=True, in_first_batch=False, interrupted=True)
    lifecycle.end(STATE)
    lifecycle.begin_fit()
    assert (lifecycle.batch_open, lifecycle.in_first_batch, lifecycle.interrupted) == (
        False,
        True,
        False,
    )
