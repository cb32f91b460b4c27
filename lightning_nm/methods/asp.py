"""One-shot pruning with a fixed mask, as NVIDIA's automatic sparsity does."""

from __future__ import annotations

import warnings
from typing import Literal

from lightning_nm.functional import is_nm
from lightning_nm.methods.base import Method, SparseToSparse, largest_entries
from lightning_nm.methods.checks import check_option
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import (
    Moment,
    Phases,
    Schedule,
    Steps,
    check_moment,
    resolve_moment,
    within,
)

Init = Literal["magnitude", "zeros"]
"""Where the mask of :class:`ASP` comes from."""


class ASP(SparseToSparse):
    """Prune once, then keep the mask: train densely, mask by magnitude at a step, go on training the kept weights.

    After pruning there is no latent weight: pruned entries get no gradient, and are set to zero after every step.

    Args:
        start: When to prune: an integer is a training step, a float a fraction of the planned ones. 0 prunes before the
            first step (fine-tuning of a trained model).
        init: ``"magnitude"`` keeps the largest entries. ``"zeros"`` keeps the nonzeros of a model that is already N:M
            sparse.

    Raises:
        TypeError: If ``start`` is neither an integer nor a float.
        ValueError: If ``start`` is negative or a fraction above 1, if ``init="zeros"`` is combined with a later start,
            or if a weight is not N:M sparse with ``init="zeros"``.
    """

    short_name = "asp"

    def __init__(self, start: Moment = 0, init: Init = "magnitude") -> None:
        check_moment("start", start)
        check_option("init", init, Init)
        if init == "zeros" and start > 0:
            raise ValueError(
                f"init='zeros' reads the mask of the given weights, so start must be 0, not {start}"
            )
        self.start = start
        self.init = init

    @property
    def dense_start(self) -> Moment:
        """Training is dense until the start."""
        return self.start

    def follow(self, schedule: Schedule) -> Method:
        """Refuse what a mask of given weights cannot follow."""
        if self.init == "zeros":
            why = "init='zeros' takes the mask of weights that are N:M from the first step on. Give init='magnitude'"
            schedule.refuse(self, dense_start=why, ramp=why)
        return super().follow(schedule)

    def schedule(self, planned_steps: int | None) -> Steps:
        """The step at which to prune; none if that is before the first one."""
        start = resolve_moment(self, "start", self.start, planned_steps)
        return (start,) if start else ()

    def phases(self, layer: NMLayer) -> Phases:
        """Masks come at ``start``; if that is 0, they are there from the first step on."""
        return Phases(layer.progress.schedule)

    def check(self, planned_steps: int | None) -> None:
        """Warn of a start that the training does not reach."""
        start = sum(self.schedule(planned_steps))
        if start and planned_steps is not None and start >= planned_steps:
            warnings.warn(
                f"ASP never prunes: start={self.start} is step {start} of {planned_steps}, so the model stays dense; "
                "use a smaller `start`",
                stacklevel=2,
            )

    def init_masks(self, layer: NMLayer) -> None:
        """Choose the mask if training has begun to prune; at ``start`` it is called again.

        The weight keeps its pruned entries until the next step ends: a fit that fails before changes no weight, and
        loaded weights may be those of the dense phase, whose saved state is loaded next.
        """
        if not within(layer.progress.schedule, layer.progress.clock):
            layer.set_masks(None)
            return
        if layer.spec.forward_reason:
            return
        # A mask that is there moves, so that what changes is counted.
        if self.init == "zeros":
            weight = layer.weight
            rows = layer.view.rows(weight)
            if not is_nm(rows, layer.pattern, dim=1):
                m = layer.pattern.m
                most = int(rows.bool().unflatten(1, (-1, m)).sum(2).max())
                raise ValueError(
                    f"layer '{layer.name}' is not {layer.pattern} sparse, so init='zeros' cannot take its mask: it has "
                    f"blocks with {most} nonzeros of {m}. Give the pattern that it was pruned to, load the sparse "
                    "weights first, name it in `exclude`, or use init='magnitude'"
                )
            # A block with fewer than N nonzeros stays as sparse as it is.
            mask = weight != 0
        else:
            mask = largest_entries(layer)
        layer.set_masks(mask)
