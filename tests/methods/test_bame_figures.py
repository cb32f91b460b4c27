"""The statistics of BAME, and its predicted loss change against the achieved one."""

import pytest
import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from tests.support.bame import batch


def test_statistics_against_their_definitions():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 32))
    sparsifier = NMSparsifier(
        module, "2:4", BAME(stop=9, every=4, budget=0.2, evidence="batch"), skip_first_last=False
    ).attach()
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    sparsifier.register(optimizer)
    layers = list(sparsifier.layers.values())
    assert sparsifier.stats()["adapted_blocks"] == sparsifier.stats()["oscillation"] == 0
    blocks = sum(layer.weight.numel() // 4 for layer in layers)
    for step in range(12):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        module(torch.randn(8, 16, generator=generator)).sub(1).square().mean().backward()
        sparsifier.before_step(optimizer)
        moves = [layer.pending.exchange for layer in layers]
        before = [layer.forward_mask for layer in layers]
        optimizer.step()
        sparsifier.step()
        stats = sparsifier.stats()
        if step in (0, 4, 8):
            changed = sum(
                int((layer.forward_mask ^ old).unflatten(1, (-1, 4)).any(-1).sum())
                for layer, old in zip(layers, before, strict=True)
            )
            assert stats["adapted_blocks"] == pytest.approx(changed / blocks)
            assert stats["predicted_loss_change"] == pytest.approx(
                sum(float(m.loss_change) for m in moves), rel=1e-5
            )
            assert stats["frozen_blocks"] == pytest.approx(sum(int(m.held) for m in moves) / blocks)
            kept = stats
        elif step < 9:
            for key in ("adapted_blocks", "predicted_loss_change", "frozen_blocks", "flip_rate"):
                assert stats[key] == kept[key], "figures of the last adaptation stay until the next"
        else:
            assert (
                stats["adapted_blocks"],
                stats["frozen_blocks"],
                stats["predicted_loss_change"],
            ) == (0, 1, 0)
        f = torch.cat([layer.buffers["oscillation"] for layer in layers]).double()
        assert stats["oscillation"] == pytest.approx(f.mean().item())
    assert kept["frozen_blocks"] > 0


def test_two_instances_report_their_own_windows_together():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    short = BAME(stop=2, every=1, budget=1.0, evidence_rate=0.5)
    long = BAME(stop=100, every=1, budget=1.0, evidence_rate=0.5)
    rules = [{"include": "0", "method": short}]
    sparsifier = NMSparsifier(module, "2:4", long, rules=rules, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    sparsifier.register(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        (module(torch.randn(8, 16)) - 1).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    together, layers = sparsifier.stats(), sparsifier.layer_stats()
    assert layers["0"]["frozen_blocks"] == 1
    assert layers["1"]["frozen_blocks"] < 1
    for key in ("frozen_blocks", "adapted_blocks"):
        assert together[key] == pytest.approx((layers["0"][key] + layers["1"][key]) / 2)
    assert together["adapted_blocks"] > 0


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_predicted_loss_change_is_achieved_for_small_steps(name):
    make = {"sgd": lambda p: torch.optim.SGD(p, 1e-4), "adam": lambda p: torch.optim.Adam(p, 1e-6)}[
        name
    ]
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(16, 64, dtype=torch.float64), nn.Tanh(), nn.Linear(64, 8, dtype=torch.float64)
    )
    module[0].weight.data.mul_(1e-6)  # so that a small step is worth an exchange
    optimizer = make(module.parameters())
    x, y = batch(0)
    losses = []

    def loss():
        return (module(x) - y).square().mean()

    # This hook runs before the sparsifier's, which exchanges the entries.
    optimizer.register_step_post_hook(lambda *_: losses.append(loss().item()))
    sparsifier = NMSparsifier(
        module, "2:4", BAME(stop=100, every=1, evidence="batch"), include="0"
    ).attach()
    sparsifier.register(optimizer)
    layer = sparsifier.layers["0"]
    optimizer.zero_grad()
    loss().backward()
    # The step of regrown entries: Adam divides by the root of the block's mean second moment, or of their own.
    keep, grad = layer.forward_mask.unflatten(1, (-1, 4)), layer.weight.grad.unflatten(1, (-1, 4))
    mean = (torch.where(keep, grad.square(), 0).sum(-1, keepdim=True) / 2).expand_as(grad)
    root = torch.maximum(mean, grad.square()).sqrt() + 1e-8
    ahead = (-1e-4 * grad if name == "sgd" else -1e-6 * grad / root).flatten(1)
    sparsifier.before_step(optimizer)
    optimizer.step()
    predicted = float(layer.pending.exchange.loss_change)
    assert predicted < 0
    regrown = torch.unravel_index(layer.pending.exchange.regrown, layer.weight.shape)
    with torch.no_grad():
        assert not layer.weight[regrown].any()
        layer.weight[regrown] = ahead[regrown]  # the step that the regrown entries would have made
    assert loss().item() - losses[0] == pytest.approx(predicted, rel=0.02)
