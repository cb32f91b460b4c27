"""One-shot pruning with a fixed mask, as NVIDIA's automatic sparsity does."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional import is_nm
from lightning_nm.functional.select import mask_
from lightning_nm.methods.base import MaskMethod, check_option, largest_entries
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment, check_moment, resolve_moment


class ASP(MaskMethod):
    """Prune once, then keep the mask: train densely, mask by magnitude at a step, go on training the kept weights.

    After pruning there is no latent weight: pruned entries get no gradient, and are set to zero after every step.

    Args:
        start: When to prune: an integer is a training step, a float a share of the planned ones. 0 prunes before the
            first step (fine-tuning of a trained model).
        init: ``"magnitude"`` keeps the largest entries. ``"zeros"`` keeps the nonzeros of a model that is already N:M
            sparse.

    Raises:
        TypeError: If ``start`` is neither an integer nor a float.
        ValueError: If ``start`` is negative or a share above 1, if ``init="zeros"`` is combined with a later start, or
            if a weight is not N:M sparse with ``init="zeros"``.
    """

    short_name = "asp"
    restores_masks = True
    latent = False

    def __init__(
        self, start: Moment = 0, init: Literal["magnitude", "zeros"] = "magnitude"
    ) -> None:
        check_moment("start", start)
        check_option("init", init, "magnitude", "zeros")
        if init == "zeros" and start > 0:
            raise ValueError(
                f"init='zeros' reads the mask of the given weights, so start must be 0, not {start}"
            )
        self.start = start
        self.init = init

    @property
    def dense_start(self) -> Moment:  # type: ignore[override]
        """Training is dense until the start."""
        return self.start

    @property
    def refused_schedule(self) -> Mapping[str, str]:  # type: ignore[override]
        """What a mask of given weights cannot follow."""
        if self.init == "magnitude":
            return {}
        why = "init='zeros' takes the mask of weights that are N:M from the first step on. Give init='magnitude'"
        return {"dense_start": why, "ramp": why}

    def schedule(self, planned_steps: int | None) -> tuple[int, ...]:
        """The step at which to prune; none if that is before the first one."""
        start = resolve_moment(self, "start", self.start, planned_steps)
        return (start,) if start else ()

    def check(self, planned_steps: int | None) -> None:
        """Warn of a start that the training does not reach."""
        start = sum(self.schedule(planned_steps))
        if start and planned_steps is not None and start >= planned_steps:
            warnings.warn(
                f"ASP never prunes: start={self.start} is step {start} of {planned_steps}, so the model stays dense; "
                "use a smaller `start`",
                stacklevel=2,
            )

    def _begun(self, layer: NMLayer) -> bool:
        # start=0 needs no schedule.
        return layer.progress.clock >= sum(layer.progress.schedule)

    def init_masks(self, layer: NMLayer) -> None:
        """Choose the mask if training has begun to prune.

        The weight keeps its pruned entries until the next step ends: a fit that fails before changes no weight, and
        loaded weights may be those of the dense phase, whose saved state is loaded next.
        """
        if self._begun(layer):
            # A mask that is there moves, so that what changes is counted.
            self._choose_mask(layer)
        else:
            layer.set_masks(None)

    @torch.no_grad()
    def update(self, layer: NMLayer) -> None:
        """Prune when the clock reaches ``start``."""
        if layer.masks.bits is not None or not self._begun(layer):
            return
        self._choose_mask(layer)
        if layer.masks.has_forward and layer.step:
            layer.zero_pruned(layer.view.local)

    @torch.no_grad()
    def _choose_mask(self, layer: NMLayer) -> None:
        if layer.spec.forward_reason:
            return
        if self.init == "zeros":
            weight = layer.weight.detach()
            if not is_nm(layer.view.rows(weight), layer.pattern, dim=1):
                raise ValueError(
                    f"layer '{layer.name}' is not {layer.pattern} sparse, so init='zeros' cannot take its mask: "
                    "use init='magnitude', or load the sparse weights first"
                )
            mask = weight != 0
        else:
            mask = largest_entries(layer)
        layer.set_masks(mask)

    def gradient_at_pruned(self, layer: NMLayer) -> bool:
        """Whether training is still dense; after pruning, no step needs the gradient of pruned entries."""
        return not layer.masks.has_forward

    def weight_gradient(
        self, layer: NMLayer, weight: Tensor, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradient at kept entries, 0 at pruned ones."""
        mask = layer.masks.forward_view
        if mask is not None:
            grad = mask_(grad, mask)
        return super().weight_gradient(layer, weight, grad)

    @torch.no_grad()
    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Keep pruned entries at zero, whatever the optimizer did."""
        if layer.masks.has_forward:
            layer.zero_pruned(layer.view.local)
