"""Every metric with inputs that arrive over several updates, its functional form, and its value by the oracles."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from lightning_nm import functional as nmf
from lightning_nm import metrics
from tests.support import metric_oracles as oracle

SHAPES = {"encoder.0": (3, 8), "head": (5, 4, 2), "empty": (0, 4)}
UPDATES = 4


def _layers(make):
    """Updates, each of them a dict of tensors by layer name."""
    generator = torch.Generator().manual_seed(0)
    return [
        {name: make(shape, generator) for name, shape in SHAPES.items()} for _ in range(UPDATES)
    ]


def _mask(shape, generator):
    return torch.rand(shape, generator=generator) < 0.4


def _values(dtype):
    return lambda shape, generator: torch.randn(shape, generator=generator).to(dtype)


MASKS = _layers(_mask)
BACKWARD = [{name: mask & mask.flip(-1) for name, mask in update.items()} for update in MASKS]
WIDE_MASKS = [
    {name: mask.movedim(0, -1) for name, mask in update.items()} for update in MASKS
]  # not contiguous


def arrays(updates):
    """All tensors of all updates as arrays, layer by layer."""
    return [tensor.double().numpy() for update in updates for tensor in update.values()]


def histories(updates):
    return [[update[name].numpy() for update in updates] for name in SHAPES]


class Case(NamedTuple):
    """A metric.

    Args:
        make: Makes it.
        updates: The keyword arguments of each update, by layer.
        expected: Its value after these updates, by an oracle.
        functional: Its value after updates of one tensor each, from their arguments: the pure function.
        empty: Its value before any update.
    """

    make: object
    updates: list
    expected: float
    functional: object
    empty: float


def _case(make, expected, functional, empty, **arguments):
    updates = [
        dict(zip(arguments, values, strict=True))
        for values in zip(*arguments.values(), strict=True)
    ]
    return Case(make, updates, expected, functional, empty)


def _flip_rate(updates):
    return torch.stack(
        [nmf.mask_flip_rate(a["masks"], b["masks"]) for a, b in pairwise(updates)]
    ).mean()


def _cat(updates, name):
    return torch.cat([update[name].flatten() for update in updates])


def _magnitude(dtype):
    weights = _layers(_values(dtype))
    return _case(
        metrics.KeptMagnitude,
        oracle.kept_magnitude(arrays(weights), arrays(MASKS)),
        lambda updates: nmf.kept_magnitude(_cat(updates, "weights"), _cat(updates, "masks")),
        1.0,
        weights=weights,
        masks=MASKS,
    )


def _snr(dtype):
    exact = _layers(_values(dtype))
    noise = _layers(lambda shape, generator: torch.rand(shape, generator=generator) - 0.5)
    estimate = [
        {name: (g + e[name]).to(dtype) for name, g in u.items()}
        for u, e in zip(exact, noise, strict=True)
    ]
    return _case(
        metrics.GradientSNR,
        oracle.snr(arrays(exact), arrays(estimate)),
        lambda updates: nmf.gradient_snr(_cat(updates, "exact"), _cat(updates, "estimate")),
        np.inf,
        exact=exact,
        estimate=estimate,
    )


CASES = {
    "MaskDensity": _case(
        metrics.MaskDensity,
        oracle.density(arrays(WIDE_MASKS)),
        lambda updates: nmf.mask_density(_cat(updates, "masks")),
        np.nan,
        masks=WIDE_MASKS,
    ),
    "MaskViolations": _case(
        lambda **options: metrics.MaskViolations("1:2", **options),
        oracle.violations(arrays(MASKS), 1, 2),
        lambda updates: nmf.count_violations(_cat(updates, "masks"), "1:2"),
        0,
        masks=MASKS,
    ),
    "MaskFlipRate": _case(
        metrics.MaskFlipRate,
        oracle.flip_rate(histories(WIDE_MASKS)),
        _flip_rate,
        0.0,
        masks=WIDE_MASKS,
    ),
    "MaskOscillation": _case(
        metrics.MaskOscillation,
        oracle.oscillation(histories(WIDE_MASKS)),
        lambda updates: nmf.mask_oscillation(update["masks"] for update in updates),
        0.0,
        masks=WIDE_MASKS,
    ),
    "MaskOverlap": _case(
        metrics.MaskOverlap,
        oracle.overlap(arrays(MASKS), arrays(BACKWARD)),
        lambda updates: nmf.mask_overlap(_cat(updates, "masks"), _cat(updates, "backward_masks")),
        1.0,
        masks=MASKS,
        backward_masks=BACKWARD,
    ),
    "KeptMagnitude": _magnitude(torch.float32),
    "KeptMagnitude-float16": _magnitude(torch.float16),
    "KeptMagnitude-bfloat16": _magnitude(torch.bfloat16),
    "GradientSNR": _snr(torch.float32),
    "GradientSNR-float16": _snr(torch.float16),
    "GradientSNR-bfloat16": _snr(torch.bfloat16),
}


def lone(update, layer="encoder.0"):
    """The arguments of an update of one layer alone."""
    return {name: layers[layer] for name, layers in update.items()}


def in_a_process(share):
    """For each case the value, what it is here alone after one more update, and the last of those synchronised by step.

    Every process has all updates or, with `share`, some of its own.
    """
    values = []
    for case in CASES.values():
        updates = case.updates[dist.get_rank() :: dist.get_world_size()] if share else case.updates
        metric, stepwise = case.make(), case.make(dist_sync_on_step=True)
        for update in updates:
            metric.update(**update)
            step = stepwise(**update)
        value = metric.compute()
        metric.update(**case.updates[0])  # the process's own sums are back
        values.append(torch.stack([value.double(), metric.compute().double(), step.double()]))
    return torch.stack(values)
