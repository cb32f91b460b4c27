"""When BAME adapts, what it costs, and its statistics."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from lightning_nm import BAME
from lightning_nm.methods import bi_mask
from tests.support.bame import loop
from tests.support.method_loop import Loop, mlp


def moves(masks):
    """The steps in which the mask moved."""
    return [step for step, pair in enumerate(pairwise(masks)) if not torch.equal(*pair)]


@pytest.mark.parametrize("masked", ["*", "2"], ids=["next to another", "alone"])
def test_a_layer_that_joins_late_evolves_and_freezes_with_the_others(masked):
    method = BAME(stop=8, every=2, budget=1.0, evidence="batch")
    model = mlp(16, 16, 16)
    late = model[2]
    run = Loop(method, model=model, make=lambda p: torch.optim.SGD(model[0].parameters(), 0.5),
               include=masked)  # fmt: skip
    layer = run.layers["2"]
    masks = [layer.forward_mask]
    for step in range(14):
        if step == 5:
            run.optimizer.add_param_group({"params": late.parameters(), "lr": 20.0})
        run.train(1)
        masks.append(layer.forward_mask)
    assert moves(masks) == [5, 6], "at once what it missed, then with the others, which all freeze"
    assert (run.sparsifier.clock, layer.step, layer.progress.dense_gradient) == (14, 9, False)


def test_a_window_without_a_gradient_leaves_the_adaptation_pending():
    run = loop(BAME(start=2, stop=6, every=3, budget=1.0, evidence="batch"))
    other = nn.Parameter(torch.zeros(1))
    run.optimizer.add_param_group({"params": [other]})
    masks = [run.layer.forward_mask]
    for step in range(8):
        run.backward()
        other.grad = torch.ones(1)
        if step in (2, 3):
            run.layer.param.grad = None
        run.step()
        masks.append(run.layer.forward_mask)
    assert moves(masks) == [4, 5]


def test_flops_follow_the_schedule():
    r, dense = 1 / 4, 2  # steps 1 and 3 need the dense gradient
    for options in ({"every": 2, "evidence": "batch"}, {"gradient_every": 2}):
        run = loop(BAME(start=1, stop=5, **options), "1:4").train(10)
        mean = run.sparsifier.flops_ratios(mean=True)
        expected = (10 * 2 * r + dense + (10 - dense) * r) / 30
        assert mean["paper"] == mean["arithmetic"] == pytest.approx(expected)
        assert mean["eligible"] == pytest.approx((r + 2) / 3)
    run = loop(BAME(start=1, stop=5, dgrad="bi-mask"), "1:4").train(10)
    assert run.sparsifier.flops_ratios(mean=True)["eligible"] == pytest.approx((2 * r + 1) / 3)


def test_the_backward_mask_follows_the_weights_between_adaptations(monkeypatch):
    """A permutation that is due with an adaptation is searched once."""
    searched = []
    search = bi_mask.search_permutation
    noted = lambda *a, **k: searched.append(1) or search(*a, **k)  # noqa: E731
    monkeypatch.setattr(bi_mask, "search_permutation", noted)
    for every, count in ((100, 0), (1, 1)):
        method = BAME(stop=200, every=every, dgrad="bi-mask")
        method._bi_mask.permute_every = 4
        run = loop(method)
        searched.clear()
        masks = [run.layer.masks.backward, *(run.layer.masks.backward for _ in run.steps(9))]
        assert len(searched) == 2, "after the steps 4 and 8"
        moved = moves(masks)
        assert moved
        assert set(moved) <= {0, 3, 7} or count


def test_statistics_against_their_definitions():
    method = BAME(stop=9, every=4, budget=0.02, evidence="batch")

    def start(seed):
        model = mlp(16, 8, 32, seed=seed)
        model[0].weight.data.mul_(0.01)  # so that a step of the optimizer is worth an exchange
        return Loop(method, model=model, make=lambda p: torch.optim.SGD(p, 1.0))

    run, shares = start(0), []
    layers = list(run.layers.values())
    blocks = sum(layer.weight.numel() // 4 for layer in layers)
    for step in range(12):
        run.backward()
        run.sparsifier.before_step(run.optimizer)
        found = [layer.pending.exchange for layer in layers]
        before = [layer.forward_mask for layer in layers]
        run.optimizer.step()
        run.sparsifier.step()
        stats = run.sparsifier.stats()
        if step in (0, 4, 8):
            moved = (layer.forward_mask ^ old for layer, old in zip(layers, before, strict=True))
            changed = sum(int(each.unflatten(1, (-1, 4)).any(-1).sum()) for each in moved)
            shares.append(sum(int(each.held) for each in found) / blocks)
            loss = sum(float(each.loss_change) for each in found)
            assert stats["adapted_blocks"] == pytest.approx(changed / blocks)
            assert stats["frozen_blocks"] == pytest.approx(shares[-1])
            assert stats["predicted_loss_change"] == pytest.approx(loss, rel=1e-5)
            assert start(1).load(run.states()).sparsifier.stats() == stats
        oscillation = torch.cat([layer.buffers["oscillation"] for layer in layers]).double()
        assert stats["oscillation"] == pytest.approx(oscillation.mean().item())
    assert max(shares) > 0
    after = {"adapted_blocks": 0, "frozen_blocks": 1, "predicted_loss_change": 0}
    assert {key: stats[key] for key in after} == after


def test_two_instances_report_their_own_phases_together():
    short, long = (BAME(stop=stop, every=1, budget=1.0, evidence_rate=0.5) for stop in (2, 100))
    rules = [{"include": "0", "method": short}]
    run = Loop(long, model=mlp(16, 16, 16), rules=rules).train(5)
    together, layers = run.sparsifier.stats(), run.sparsifier.layer_stats()
    assert layers["0"]["frozen_blocks"] == 1 > layers["2"]["frozen_blocks"]
    for key in ("frozen_blocks", "adapted_blocks"):
        assert together[key] == pytest.approx((layers["0"][key] + layers["2"][key]) / 2)
    assert together["adapted_blocks"] > 0
