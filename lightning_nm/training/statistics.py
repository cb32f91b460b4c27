"""Statistics of masked layers, and their multiply-adds relative to dense training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from lightning_nm.functional import FlopsKind, GemmDensity, count_violations, train_flops_ratio
from lightning_nm.functional.mask_statistics import (
    DENSITY,
    FLIP_RATE,
    GRADIENT_SNR,
    KEPT_MAGNITUDE,
    OVERLAP,
    density_counts,
    magnitude_sum,
)
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import known_size


def joint_statistics(layers: Sequence[NMLayer]) -> dict[str, float]:
    """The statistics of layers together: of masks and gradient estimates, and of each method, for the layers it has.

    Raises:
        ValueError: If a weight holds NaN, naming the layer.
    """
    found = {**_mask_statistics(layers), **_gradient_statistics(layers)}
    layers_by_method: dict[type, list[NMLayer]] = {}
    for layer in layers:
        # By class: rules may bring several objects of one method, whose statistics are one number.
        layers_by_method.setdefault(type(layer.spec.method), []).append(layer)
    for members in layers_by_method.values():
        found.update(members[0].spec.method.statistics(members))
    return found


def shares_of(
    model: nn.Module, layers: Iterable[NMLayer], macs: Mapping[str, int]
) -> dict[str, float]:
    """The fractions of a model's parameters and, where they were counted, of its multiply-adds that layers have."""
    layers = list(layers)
    all_parameters = sum(map(known_size, model.parameters()))
    found = {"parameters": sum(layer.view.shape.numel() for layer in layers) / all_parameters}
    all_macs = sum(macs.values())
    if all_macs:
        found["flops"] = sum(macs.get(layer.name, 0) for layer in layers) / all_macs
    return found


def share_of_products(model: nn.Module, layers: Iterable[NMLayer]) -> float:
    """The fraction of a model's parameters in maskable layers, without the weights that are looked up alone.

    A lookup costs no multiply-adds, so a large embedding does not lessen what masks can gain.
    """
    parameters = {
        parameter
        for module in model.modules()
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    # A masked embedding drops out again, unless a layer with a GEMM shares its weight.
    masked = parameters & {layer.param for layer in layers if layer.spec.maskable}
    total = sum(map(known_size, parameters))
    return sum(map(known_size, masked)) / total if total else 1.0


def layers_short_of_tokens(
    layers: Iterable[NMLayer], least_macs: Mapping[str, int]
) -> dict[str, str]:
    """The layers whose smallest batch had fewer tokens than a block of the estimator, with both numbers.

    Args:
        layers: The layers.
        least_macs: By layer name, the multiply-adds of the smallest call.
    """
    found = {}
    for layer in layers:
        estimator = layer.spec.estimator
        if estimator is None or not layer.param.requires_grad:
            continue
        pattern = estimator.pattern_of(layer)
        # Each token takes one multiply-add for each entry of the weight.
        tokens = least_macs.get(layer.name, 0) // layer.view.shape.numel()
        # 0 tokens: not called, or its calls are not counted.
        if pattern is not None and 0 < tokens < pattern.m:
            found[layer.name] = f"{tokens} tokens, blocks of {pattern.m}"
    return found


def flops_ratios(
    densities: Mapping[str, Mapping[FlopsKind, GemmDensity]], costs: Mapping[str, int]
) -> dict[str, float]:
    """The multiply-adds of a training step over those of a dense step, in each counting.

    Args:
        densities: Of each masked layer, the densities of its three GEMMs.
        costs: The weight that each layer of the model has in the sum; those that are not masked count as dense.
    """
    dense: dict[FlopsKind, GemmDensity] = dict.fromkeys(get_args(FlopsKind), GemmDensity())
    return {
        kind: train_flops_ratio(
            [(float(cost), densities.get(name, dense)[kind]) for name, cost in costs.items()]
        )
        for kind in dense
    }


def mean_flip_rate(layers: Sequence[NMLayer]) -> float:
    """The fraction of forward mask bits that a step changed, averaged over all steps so far."""
    flips = sum(int(layer.masks.total_flips or 0) for layer in layers)
    entries = sum(layer.view.shape.numel() * max(layer.step, 1) for layer in layers)
    return flips / entries if entries else 0.0


def violations(layers: Iterable[NMLayer]) -> int:
    """The number of blocks of forward weights that hold more than N nonzeros, also where there is no mask now."""
    return sum(violations_of(layer, layer.forward_weight()) for layer in layers)


def violations_of(layer: NMLayer, weight: Tensor) -> int:
    """Count the violating blocks of given values of a layer's weight; 0 where the forward weight is never masked."""
    spec = layer.spec
    if not spec.method.sparse_forward or spec.forward_reason:
        return 0
    # Where the masks hold to no N:M now, they are compared with what they are to become.
    pattern = spec.method.current_pattern(layer) or spec.pattern
    return int(count_violations(layer.view.rows(weight), pattern, dim=1))


def _sums(layer: NMLayer) -> list[float]:
    """What :func:`_mask_statistics` adds up over layers, read with one device synchronization."""
    with layer.full():
        weight = layer.weight.detach()
        forward_weight = layer.forward_weight()
    forward, backward, flips = layer.masks.forward, layer.masks.backward, layer.masks.flips
    size = torch.tensor(weight.numel(), dtype=torch.int64, device=weight.device)
    kept = size if forward is None else density_counts(forward)[0]
    # Without a mask of its own dgrad uses W_F: the overlap is 1.
    kept_backward = kept if backward is None else density_counts(backward)[0]
    flips = torch.zeros_like(size) if flips is None else flips
    magnitudes = magnitude_sum(forward_weight), magnitude_sum(weight)
    parts = (size, kept, kept_backward, flips, *magnitudes)
    sums: list[float] = torch.stack([part.double() for part in parts]).tolist()
    # The last sum is of all magnitudes of W, and so NaN if one entry is.
    if math.isnan(sums[-1]):
        raise ValueError(
            f"the weight of layer '{layer.name}' holds NaN after {layer.step} steps: lower the learning rate, "
            "clip gradients, or resume from an earlier checkpoint"
        )
    return sums


def _mask_statistics(layers: Sequence[NMLayer]) -> dict[str, float]:
    """``density``, ``flip_rate``, ``kept_magnitude`` and ``overlap`` of layers together."""
    # So that there are six columns without layers, too.
    nothing = [0.0] * 6
    totals = [sum(column) for column in zip(nothing, *map(_sums, layers), strict=True)]
    size, kept, kept_backward, flips, magnitude_kept, magnitude = totals
    return {
        # All layers may be frozen so far.
        "density": DENSITY.exact(kept, size).item() if layers else 1.0,
        "flip_rate": FLIP_RATE.exact(flips, size).item(),
        "kept_magnitude": KEPT_MAGNITUDE.exact(magnitude_kept, magnitude).item(),
        "overlap": OVERLAP.exact(kept_backward, kept).item(),
    }


def _gradient_statistics(layers: Sequence[NMLayer]) -> dict[str, float]:
    """``grad_snr`` and ``grad_density`` of the last observed estimates of layers together; empty without any."""
    observed = [layer.progress.observed for layer in layers if layer.progress.observed is not None]
    if not observed:
        return {}
    # The layers of one model may be on several devices.
    totals = torch.stack([sums.to(observed[0].device) for sums in observed]).sum(0)
    exact, error, nonzeros, entries = totals.tolist()
    # Only passes with infinite gradients were observed, whose sums were set to 0.
    if not entries:
        return {}
    return {
        "grad_snr": GRADIENT_SNR.exact(exact, error).item(),
        "grad_density": DENSITY.exact(nonzeros, entries).item(),
    }
