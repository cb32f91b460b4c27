"""The figures of masked layers: statistics of their masks, and multiply-adds relative to dense training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, get_args

import torch

from lightning_nm.functional import FlopsKind, GemmDensity, count_violations, train_flops_ratio
from lightning_nm.functional.statistics import (
    DENSITY,
    FLIP_RATE,
    GRADIENT_SNR,
    KEPT_MAGNITUDE,
    OVERLAP,
    density_counts,
    magnitude_sum,
)
from lightning_nm.nn.layer import NMLayer


class Counts(NamedTuple):
    """What the statistics of a layer are made of; counts of several layers add up.

    Args:
        weights: Number of weights.
        forward: Bits of the forward mask that are set.
        backward: Bits of the backward mask that are set; the forward mask's where there is no other.
        flips: Bits of the forward mask that the last update changed.
        used: Sum of |W_F|.
        magnitude: Sum of |W|.
    """

    weights: float
    forward: float
    backward: float
    flips: float
    used: float
    magnitude: float


@torch.no_grad()
def count(layer: NMLayer) -> Counts:
    """Count a layer, with one device synchronisation.

    Raises:
        ValueError: If the weight holds NaN, naming the layer.
    """
    with layer.full():
        weight, forward_weight = layer.weight.detach(), layer.forward_weight()
    forward, backward = layer.forward_mask, layer.backward_mask
    size = torch.tensor(weight.numel(), device=weight.device)
    kept = size if forward is None else density_counts(forward)[0]
    both = kept if backward is None else density_counts(backward)[0]
    flips = torch.zeros_like(size) if layer.masks.flips is None else layer.masks.flips
    magnitudes = (magnitude_sum(forward_weight), magnitude_sum(weight))
    counts = Counts(*torch.stack([x.double() for x in (size, kept, both, flips, *magnitudes)]).tolist())
    if math.isnan(counts.magnitude):
        raise ValueError(
            f"the weight of layer '{layer.name}' holds NaN after {layer.step} steps: lower the learning rate, "
            "clip gradients, or resume from an earlier checkpoint"
        )
    return counts


def statistics(counts: Sequence[Counts]) -> dict[str, float]:
    """The statistics of all these layers together."""
    total = Counts(*(sum(column) for column in zip(*counts, strict=True)))
    return {
        "density": DENSITY.exact(total.forward, total.weights).item(),
        "flip_rate": FLIP_RATE.exact(total.flips, total.weights).item(),
        "kept_magnitude": KEPT_MAGNITUDE.exact(total.used, total.magnitude).item(),
        "overlap": OVERLAP.exact(total.backward, total.forward).item(),
    }


def gradient_statistics(layers: Sequence[NMLayer]) -> dict[str, float]:
    """What the last observation of these layers' gradient estimates found; empty if there was nothing to be seen."""
    observed = [layer.observation.sums for layer in layers if layer.observation.sums is not None]
    if not observed:
        return {}
    exact, error, nonzeros, entries = torch.stack([sums.to(observed[0].device) for sums in observed]).sum(0).tolist()
    if not entries:
        return {}
    return {
        "grad_snr": GRADIENT_SNR.exact(exact, error).item(),
        "grad_density": DENSITY.exact(nonzeros, entries).item(),
    }


def violations(layer: NMLayer) -> int:
    """Blocks of W_F that hold more than N nonzeros; 0 where the forward weight is not masked."""
    if layer.forward_mask is None:
        return 0
    return int(count_violations(layer.rows(layer.forward_weight()), layer.method.current_pattern(layer), dim=1))


def flops_ratios(densities: Mapping[str, Mapping[FlopsKind, GemmDensity]], macs: Mapping[str, int]) -> dict[str, float]:
    """Multiply-adds of a training step over those of the dense step, in the three countings.

    Args:
        densities: What the GEMMs of the masked layers cost, by layer name.
        macs: Multiply-adds of the dense forward GEMM of every weight by name, masked or not; only shares matter.
    """
    dense = dict.fromkeys(get_args(FlopsKind), GemmDensity())
    return {
        kind: train_flops_ratio((float(cost), densities.get(name, dense)[kind]) for name, cost in macs.items())
        for kind in get_args(FlopsKind)
    }
