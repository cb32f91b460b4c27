"""What methods make of the steps of an optimizer: accumulated, repeated, skipped and forgotten ones."""

import copy
import math

import pytest
import torch

from lightning_nm import BAME, STEP, RigL, SLoPe
from tests.support.bame import loop
from tests.support.contract import METHODS, refusal
from tests.support.kinds import held_tensors
from tests.support.method_loop import Loop, mlp

EXCHANGING = {
    "rigl": lambda: RigL(every=1, stop=20, drop=0.8),
    "bame": lambda: BAME(stop=12, budget=1.0, evidence_rate=0.5, gradient_every=2),
    "bame of a batch": lambda: BAME(stop=12, every=2, budget=1.0, evidence="batch"),
}
exchanging = pytest.mark.parametrize("method", EXCHANGING)


@pytest.mark.parametrize("method", [*EXCHANGING, "slope"])
def test_accumulated_gradients_are_those_of_the_whole_batch(method):
    make = EXCHANGING.get(method, lambda: SLoPe(refresh_every=2))
    whole, parts = (loop(make()).train(8, windows).layer for windows in (1, 3))
    torch.testing.assert_close(whole.weight, parts.weight)
    assert torch.equal(whole.masks.bits, parts.masks.bits)


def once(run):
    run.backward()


def called_twice(run):
    run.backward()
    run.sparsifier.before_step(run.optimizer)


def another_gradient(run):
    """Of a closure that is called twice."""
    run.backward(factor=-3.0)
    run.sparsifier.before_step(run.optimizer)
    run.backward()


def skipped(run):
    """A step that a scaler skips."""
    another_gradient(run)
    run.sparsifier.before_step(run.optimizer)
    run.sparsifier.step()
    run.backward()


@exchanging
@pytest.mark.parametrize("bring", [called_twice, another_gradient, skipped])
def test_the_last_gradient_before_a_step_counts_once(method, bring):
    def train(bring):
        run = loop(EXCHANGING[method]())
        for _ in range(9):
            bring(run)
            run.step()
        return run.layer

    plain, other = train(once), train(bring)
    assert torch.equal(plain.weight, other.weight)
    assert torch.equal(plain.forward_mask, other.forward_mask)
    assert int(plain.masks.total_flips) == int(other.masks.total_flips) > 0


def test_zeros_after_a_skipped_step_are_a_gradient():
    def train(factors):
        run = loop(BAME(stop=9, budget=1.0, evidence_rate=0.5))
        for factor in factors:
            run.backward(factor=factor)
            run.sparsifier.before_step(run.optimizer)
            if math.isfinite(factor):
                run.optimizer.step()
            run.sparsifier.step()
        return run.layer

    straight, skipping = train([1, 0, 1, 1]), train([1, math.inf, 0, 1, 1])
    assert torch.equal(straight.weight, skipping.weight)
    assert torch.equal(straight.buffers["evidence_square"], skipping.buffers["evidence_square"])


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (RigL(every=1, stop=20), 1),
        (BAME(stop=20, every=2, evidence="batch"), 2),
        (BAME(stop=20, gradient_every=3), 1),  # between two dense gradients, too
    ],
)
def test_a_forgotten_call_is_an_error_where_the_mask_would_move(method, steps):
    run = loop(method).train(steps)
    run.backward()
    message = r"without before_step\(\) for layer '0'.*call sparsifier\.before_step"
    with pytest.raises(RuntimeError, match=message):
        run.optimizer.step()


def test_gradients_that_are_not_zeroed_do_not_revive_what_was_pruned():
    run = loop(BAME(stop=20, every=2, budget=1.0, evidence="batch"))
    run.optimizer.zero_grad = lambda: None
    for _ in run.steps(5):
        assert not run.state["momentum_buffer"][~run.layer.forward_mask].any()
    assert run.layer.masks.total_flips > 0


def snapshot(run):
    own = map(held_tensors, run.layers.values())
    return copy.deepcopy([run.optimizer.state_dict()["state"], *run.model.parameters(), *own])


@pytest.mark.parametrize("method", [name for name in METHODS if not refusal(name, "adamw-fused")])
def test_a_step_that_a_fused_optimizer_skips_changes_nothing(method):
    adamw = lambda p: torch.optim.AdamW(p, 0.01, fused=True)  # noqa: E731
    run = Loop(METHODS[method](), make=adamw).train(4)
    before = snapshot(run)
    run.backward(factor=math.inf)
    # As a GradScaler does.
    run.optimizer.grad_scale, run.optimizer.found_inf = torch.ones(()), torch.ones(())
    run.step()
    torch.testing.assert_close(snapshot(run), before, rtol=0, atol=0)


def test_unscaled_gradients_reach_the_first_moment():
    """Of a fused optimizer, which unscales them within its step."""

    def train(scale):
        adamw = lambda p: torch.optim.AdamW(p, 0.01, fused=True)  # noqa: E731
        run = Loop(STEP(2, latest=2), make=adamw, model=mlp(16, 16, 8))
        for _ in range(5):
            run.backward(factor=scale)
            run.optimizer.grad_scale = torch.tensor(scale)
            run.optimizer.found_inf = torch.zeros(())
            run.sparsifier.before_step(run.optimizer, scale)
            run.optimizer.step()
            run.sparsifier.step()
        return run.layer.param

    torch.testing.assert_close(train(4.0), train(1.0), rtol=1e-5, atol=1e-6)


def test_an_overflow_at_pruned_entries_alone_skips_a_fused_step():
    make = lambda p: torch.optim.SGD(p, 0.4, momentum=0.5, fused=True)  # noqa: E731
    run = loop(BAME(stop=20, budget=1.0, evidence_rate=9.0), make=make, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(run.model(run.batch(0)).square().mean()).backward()
    run.layer.param.grad[~run.layer.forward_mask] = math.inf
    mask = run.layer.forward_mask
    run.sparsifier.before_step(run.optimizer, scaler.get_scale())
    scaler.step(run.optimizer)
    scaler.update()
    run.sparsifier.step()
    assert torch.equal(run.layer.forward_mask, mask)
    assert run.layer.weight.isfinite().all()
