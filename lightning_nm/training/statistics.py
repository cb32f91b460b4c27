"""Statistics of masked layers, and multiply-adds relative to dense training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

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
from lightning_nm.nn.selection.selection import Selection
from lightning_nm.training.macs import MacsCounter

if TYPE_CHECKING:  # for the types only: imports point one way
    from lightning_nm.methods.base import Method


class ModelStatistics:
    """Statistics of a masked model: a base class of :class:`~lightning_nm.NMSparsifier`, which sets the attributes."""

    model: nn.Module
    selection: Selection
    attached: bool
    macs: dict[str, int]
    """Multiply-adds of every weight's dense forward GEMM in the first batches, by layer name, and those of all weights
    of kinds without an adapter under :data:`~lightning_nm.training.macs.OTHERS`."""
    _counter: MacsCounter | None

    @property
    def layers(self) -> dict[str, NMLayer]:
        """The masked layers by name."""
        return {layer.name: layer for layer in self.selection.layers}

    def _require_attached(self, call: str) -> None:
        if not self.attached:
            raise RuntimeError(f"the sparsifier is not attached: call attach() before {call}()")

    def shares(self, gradients: bool = False) -> dict[str, float]:
        """Return the share of the parameters and, once a batch ran, of dense multiply-adds in masked layers.

        With ``gradients``, the layers with a gradient estimator count instead.
        """
        layers = [
            layer
            for layer in self.selection.layers
            if (
                layer.estimator is not None and layer.param.requires_grad
                if gradients
                else layer.maskable
            )
        ]
        total = sum(p.numel() for p in self.model.parameters())
        shares = {"parameters": sum(layer.param.numel() for layer in layers) / total}
        if any(self.macs.values()):
            shares["flops"] = sum(self.macs.get(layer.name, 0) for layer in layers) / sum(
                self.macs.values()
            )
        return shares

    def share_of_products(self) -> float:
        """Return the share of the parameters in masked layers, without the weights that are looked up alone.

        A lookup costs no multiply-adds, so a large embedding does not lessen what masks can gain.
        """
        others = (
            module
            for module in self.model.modules()
            if not isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        )
        sizes = {id(p): p.numel() for module in others for p in module.parameters(recurse=False)}
        masked = {id(layer.param) for layer in self.selection.layers if layer.maskable}
        total = sum(sizes.values())
        return sum(size for key, size in sizes.items() if key in masked) / total if total else 1.0

    @property
    def unseen(self) -> list[str]:
        """Masked layers whose module was not called in the batches so far, though others were.

        Other code may read such a weight without its mask, for example by ``F.linear(x, module.weight)``. Compiled
        modules are left out, since their calls are not seen.
        """
        if not self.macs:
            return []
        hidden = self._counter.hidden() if self._counter else set()
        return [
            layer.name
            for layer in self.selection.layers
            if layer.name not in self.macs and layer.module not in hidden
        ]

    @property
    def short_of_tokens(self) -> dict[str, str]:
        """Layers whose first batch had fewer tokens than a block of the estimator, with both numbers."""
        found = {}
        for layer in self.selection.layers:
            pattern = None if layer.estimator is None else layer.estimator.pattern_of(layer)
            tokens = (
                self._counter.least.get(layer.name, 0) // layer.param.numel()
                if self._counter
                else 0
            )
            if pattern is not None and layer.param.requires_grad and 0 < tokens < pattern.m:
                found[layer.name] = f"{tokens} tokens, blocks of {pattern.m}"
        return found

    def flops_ratios(self) -> dict[str, float]:
        """Return the multiply-adds of a training step over those of a dense step: arithmetic, paper and eligible.

        All weights of the model count, weighted by their multiply-adds in the first
        batches; before a batch, and in models with compiled parts, by their size.
        """
        return self._flops_ratios(
            {name: layer.gemms().densities() for name, layer in self.layers.items()}
        )

    def mean_flops_ratios(self) -> dict[str, float]:
        """Return :meth:`flops_ratios` averaged over the steps so far; dense phases count as dense."""
        return self._flops_ratios(
            {name: layer.mean_densities() for name, layer in self.layers.items()}
        )

    def _flops_ratios(
        self, densities: Mapping[str, Mapping[FlopsKind, GemmDensity]]
    ) -> dict[str, float]:
        costs = self.macs if any(self.macs.values()) else self.selection.sizes
        dense = dict.fromkeys(get_args(FlopsKind), GemmDensity())
        return {
            kind: train_flops_ratio(
                (float(cost), densities.get(name, dense)[kind]) for name, cost in costs.items()
            )
            for kind in get_args(FlopsKind)
        }

    def layer_stats(self) -> dict[str, dict[str, float]]:
        """Return the statistics of every masked layer.

        They are ``density`` (share of set bits of the forward mask), ``flip_rate`` (share of its bits that the last
        update changed), ``kept_magnitude`` (sum of |W_F| over sum of |W|), ``overlap`` (share of the forward mask's
        entries that the backward mask keeps), and those of the layer's method; where gradient estimates were observed
        (every ``grad_snr_every`` steps in a few layers, never in compiled ones), also ``grad_snr`` (norm of dW over
        the norm of its error) and ``grad_density`` (share of nonzeros in E(dY)).

        Raises:
            ValueError: If a weight holds NaN, naming the layer.
        """
        self._require_attached("layer_stats")
        return {
            layer.name: {
                **_mask_statistics([layer]),
                **_gradient_statistics([layer]),
                **layer.method.statistics([layer]),
            }
            for layer in self.selection.layers
        }

    def stats(self) -> dict[str, float]:
        """Return the same over all masked layers together, and ``train_flops_ratio``, the hardware-eligible ratio."""
        self._require_attached("stats")
        by_class: dict[type[Method], list[NMLayer]] = {}
        for layer in self.selection.layers:
            by_class.setdefault(type(layer.method), []).append(layer)
        stats = {
            **_mask_statistics(self.selection.layers),
            **_gradient_statistics(self.selection.layers),
        }
        for layers in by_class.values():
            stats.update(layers[0].method.statistics(layers))
        return {**stats, "train_flops_ratio": self.flops_ratios()["eligible"]}

    def mean_flip_rate(self) -> float:
        """Return the ``flip_rate`` of :meth:`stats` averaged over all steps so far."""
        flips = [
            int(layer.masks.total_flips)
            for layer in self.selection.layers
            if layer.masks.total_flips is not None
        ]
        entries = sum(layer.param.numel() * max(layer.step, 1) for layer in self.selection.layers)
        return sum(flips) / entries if entries else 0.0

    def violations(self) -> int:
        """Count the blocks of forward weights that hold more than N nonzeros, also where there is no mask now.

        With masks it is 0 unless a method is wrong. Layers whose forward weight is never masked are left out.
        """
        return sum(
            int(
                count_violations(
                    layer.rows(layer.forward_weight()), layer.method.current_pattern(layer), dim=1
                )
            )
            for layer in self.selection.layers
            if layer.method.sparse_forward and not layer.forward_reason
        )


@torch.no_grad()
def _count(layer: NMLayer) -> list[float]:
    """Sums that add up over layers, with one device synchronization: see :func:`_mask_statistics`."""
    with layer.full():
        weight, forward_weight = layer.weight.detach(), layer.forward_weight()
    forward, backward = layer.forward_mask, layer.backward_mask
    size = torch.tensor(weight.numel(), device=weight.device)
    kept = size if forward is None else density_counts(forward)[0]
    both = kept if backward is None else density_counts(backward)[0]
    flips = torch.zeros_like(size) if layer.masks.flips is None else layer.masks.flips
    magnitudes = (magnitude_sum(forward_weight), magnitude_sum(weight))
    sums: list[float] = torch.stack(
        [x.double() for x in (size, kept, both, flips, *magnitudes)]
    ).tolist()
    if math.isnan(sums[-1]):
        raise ValueError(
            f"the weight of layer '{layer.name}' holds NaN after {layer.step} steps: lower the learning rate, "
            "clip gradients, or resume from an earlier checkpoint"
        )
    return sums


def _mask_statistics(layers: Sequence[NMLayer]) -> dict[str, float]:
    if not layers:  # they are all frozen so far
        return {"density": 1.0, "flip_rate": 0.0, "kept_magnitude": 1.0, "overlap": 1.0}
    columns = zip(*map(_count, layers), strict=True)
    weights, forward, both, flips, used, magnitude = (sum(column) for column in columns)
    return {
        "density": DENSITY.exact(forward, weights).item(),
        "flip_rate": FLIP_RATE.exact(flips, weights).item(),
        "kept_magnitude": KEPT_MAGNITUDE.exact(used, magnitude).item(),
        "overlap": OVERLAP.exact(both, forward).item(),
    }


def _gradient_statistics(layers: Sequence[NMLayer]) -> dict[str, float]:
    """Statistics of the last observed gradient estimates; empty if there were none."""
    observed = [layer.observation.sums for layer in layers if layer.observation.sums is not None]
    if not observed:
        return {}
    exact, error, nonzeros, entries = (
        torch.stack([sums.to(observed[0].device) for sums in observed]).sum(0).tolist()
    )
    if not entries:
        return {}
    return {
        "grad_snr": GRADIENT_SNR.exact(exact, error).item(),
        "grad_density": DENSITY.exact(nonzeros, entries).item(),
    }
