"""The figures of all masked layers of a model together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import Plan
from lightning_nm.training import statistics as figures

if TYPE_CHECKING:  # for the types only: imports point one way
    from lightning_nm.methods.base import Method


class ModelFigures:
    """What can be asked of a masked model: a base of :class:`~lightning_nm.NMSparsifier`, which fills it."""

    model: nn.Module
    plan: Plan
    attached: bool
    macs: dict[str, int]
    """Multiply-adds of every weight's dense forward GEMM, by layer name, as real batches showed them."""

    @property
    def layers(self) -> dict[str, NMLayer]:
        """The masked layers by name."""
        return {layer.name: layer for layer in self.plan.layers}

    def _require_attached(self, call: str) -> None:
        if not self.attached:
            raise RuntimeError(f"the sparsifier is not attached: call attach() before {call}()")

    def shares(self, gradients: bool = False) -> dict[str, float]:
        """Share of the parameters and, once a batch ran, of the weights' dense multiply-adds in masked layers.

        Args:
            gradients: Take the layers with a gradient estimator instead.
        """
        layers = [
            layer
            for layer in self.plan.layers
            if (layer.estimator is not None and layer.param.requires_grad if gradients else layer.maskable)
        ]
        total = sum(p.numel() for p in self.model.parameters())
        shares = {"parameters": sum(layer.param.numel() for layer in layers) / total}
        if any(self.macs.values()):
            shares["flops"] = sum(self.macs.get(layer.name, 0) for layer in layers) / sum(self.macs.values())
        return shares

    @property
    def _costs(self) -> dict[str, int]:
        return self.macs if any(self.macs.values()) else self.plan.sizes

    def flops_ratios(self) -> dict[str, float]:
        """Multiply-adds of a training step relative to the dense step, by counting: arithmetic, paper, eligible.

        Taken over every linear, convolution and attention weight of the model, masked or not, weighted by the
        multiply-adds that the first batches showed. Before any batch, and for a model that is compiled, or parts of
        it, whose batches are not seen, by the number of weights.
        """
        return figures.flops_ratios(
            {name: layer.gemms().densities() for name, layer in self.layers.items()}, self._costs
        )

    def mean_flops_ratios(self) -> dict[str, float]:
        """:meth:`flops_ratios` averaged over the steps so far, so that dense phases count as dense."""
        return figures.flops_ratios({name: layer.mean_densities() for name, layer in self.layers.items()}, self._costs)

    def layer_stats(self) -> dict[str, dict[str, float]]:
        """Statistics of every masked layer.

        Per layer: ``density`` (share of the forward mask's bits that are set), ``flip_rate`` (share of the forward
        mask's bits that the last update changed), ``kept_magnitude`` (sum of |W_F| over sum of |W|), ``overlap``
        (share of the forward mask's entries that the backward mask keeps); what the layer's method adds; and where the
        layer's gradient estimates were observed, ``grad_snr`` (norm of dW over the norm of its error, when last
        observed: every ``grad_snr_every`` steps in a few layers, never in compiled ones) and ``grad_density`` (share of
        nonzeros in E(dY)).

        Raises:
            ValueError: If a weight holds NaN, naming the layer.
        """
        self._require_attached("layer_stats")
        return {
            layer.name: {
                **figures.statistics([figures.count(layer)]),
                **figures.gradient_statistics([layer]),
                **layer.method.statistics([layer]),
            }
            for layer in self.plan.layers
        }

    def stats(self) -> dict[str, float]:
        """The same over all masked layers together, and ``train_flops_ratio``, the hardware-eligible ratio."""
        self._require_attached("stats")
        together = figures.statistics([figures.count(layer) for layer in self.plan.layers])
        together.update(figures.gradient_statistics(self.plan.layers))
        by_class: dict[type[Method], list[NMLayer]] = {}
        for layer in self.plan.layers:
            by_class.setdefault(type(layer.method), []).append(layer)
        for layers in by_class.values():
            together.update(layers[0].method.statistics(layers))
        return {**together, "train_flops_ratio": self.flops_ratios()["eligible"]}

    def mean_flip_rate(self) -> float:
        """:meth:`stats`' ``flip_rate`` averaged over all steps so far."""
        totals = [0 if layer.masks.total_flips is None else int(layer.masks.total_flips) for layer in self.plan.layers]
        sizes = [layer.param.numel() * max(layer.step, 1) for layer in self.plan.layers]
        return sum(totals) / sum(sizes)

    def violations(self) -> int:
        """Blocks of forward weights that hold more than N nonzeros; 0 unless a method is broken."""
        return sum(figures.violations(layer) for layer in self.plan.layers)
