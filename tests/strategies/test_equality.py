"""Several processes train as one does on the same global batch."""

from functools import cache

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_nm import NMDDPStrategy
from tests.support.parallel import ADAM, FIRST_MASKS_STAY, METHODS, Net, assert_equal, data, train
from tests.support.processes import in_processes

STRATEGIES = {
    "static": lambda: NMDDPStrategy(static_graph=True, gradient_as_bucket_view=True),
}
OVERFLOWS = (0, 4, 5)
STEPS = 12
NAMES = [
    name for name in METHODS if name not in ("bame-bi-mask", "cast", "step", "s-ste-scheduled")
]
RUNS = [
    (method, strategy, 1, scaled)
    for scaled in (False, True)
    for method in NAMES
    for strategy in ("ddp", "nm_ddp")
]
RUNS += [
    ("bame", "nm_ddp", 2, False),
    ("asp", "static", 1, False),
    ("bame", "static", 1, False),
    ("scaled-mask", "ddp", 2, False),
]


def run(world, method, strategy, accumulate, scaled):
    """Without autocast, which leaves float64 alone, but with scaled gradients."""
    model = Net(
        "adamw" if method in ADAM else "sgd",
        OVERFLOWS if scaled else (),
        freezes=method == "mask-logits",
    )
    options = {"accumulate_grad_batches": accumulate, "dense_end": 2}
    options["loader"] = data(batch_size=8, steps=STEPS)
    if scaled:
        scaler = torch.amp.GradScaler("cpu")
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    made = STRATEGIES.get(strategy, lambda: strategy)()
    return train(method, world, made, model, **options)


def runs_of(runs, world):
    return [run(world, *each) for each in runs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "runs"), [(2, RUNS), (4, [("bame", "nm_ddp", 1, False)])], ids=["2", "4"]
)
def test_processes_equal_one(tmp_path, world, runs):
    everyone = in_processes(world, tmp_path / "run", runs_of, runs, world)
    alone = cache(lambda method, *options: run(1, method, "auto", *options))
    for each, *ranks in zip(runs, *everyone, strict=True):
        method, _, accumulate, scaled = each
        expected = alone(method, accumulate, scaled)
        layers = expected[1].values()
        steps = STEPS // accumulate - len(OVERFLOWS) * scaled
        assert {layer["step"] for layer in layers} == {steps}
        for found in ranks:
            assert_equal(found, expected, message=each)
            assert_equal(found, ranks[0], 0, each)
        assert method in FIRST_MASKS_STAY or all(layer["total_flips"] for layer in layers), each
