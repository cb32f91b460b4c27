"""Warnings of calls that a plain training loop forgets, each given once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from lightning_nm.nn.layer import NMLayer

STEPS_WITHOUT_END = 16
"""Steps of one optimizer after which a missing ``step()`` is said. A loop may take a few of them in one batch."""


class ForgottenCallWarning(UserWarning):
    """A training loop left out a call of :class:`~lightning_nm.NMSparsifier`."""


class ForgottenCalls:
    """Notices the calls that a loop leaves out.

    Args:
        in_plain_loop: Whether the user makes the calls. Where a callback makes them, only ``before_step()`` can be
            missing, for an optimizer that the Trainer does not know.
    """

    def __init__(self, in_plain_loop: bool = True) -> None:
        self.in_plain_loop = in_plain_loop
        self._given: set[str] = set()
        self._steps: Counter[int] = (
            Counter()
        )  # by the optimizer's id, since the last end of a batch
        self._unbaked = False  # whether an optimizer has stepped since the last bake()

    def optimizer_stepped(
        self, optimizer: Optimizer, layers: Sequence[NMLayer], announced: bool
    ) -> None:
        """An optimizer made a real step of these layers; ``announced``: after ``before_step()``."""
        if not layers:
            return
        self._unbaked = True
        if not announced and "before_step" not in self._given:
            lost = {
                layer.name: layer.spec.method.lost_without_before_step(layer) for layer in layers
            }
            name = next((name for name in lost if lost[name]), None)
            if name is not None:
                self._warn(
                    "before_step",
                    f"the optimizer stepped without sparsifier.before_step(optimizer), so {lost[name]} is missing at "
                    f"layer '{name}': call it after the last backward pass of each step; with Lightning, step the "
                    "optimizer of self.optimizers()",
                )
        self._steps[id(optimizer)] += 1
        if self.in_plain_loop and self._steps[id(optimizer)] == STEPS_WITHOUT_END:
            self._warn(
                "step",
                f"the optimizer made {STEPS_WITHOUT_END} steps without sparsifier.step(): masks stand still and no "
                "training step is counted. Call sparsifier.step() after each optimizer.step()",
            )

    def batch_ended(self) -> None:
        """``step()`` was called."""
        self._steps.clear()

    def baked(self) -> None:
        """``bake()`` was called."""
        self._unbaked = False

    def detaching(self, layers: Sequence[NMLayer]) -> None:
        """``detach()`` is about to restore ordinary modules."""
        if not (self.in_plain_loop and self._unbaked):
            return
        latent = [layer.name for layer in layers if _holds_more(layer)]
        if latent:
            self._warn(
                "bake",
                f"detach() without bake() after training gives back the latent weights of {len(latent)} layers, such "
                f"as '{latent[0]}': they are not N:M sparse. Call sparsifier.bake() before detach() for the sparse "
                "weights",
            )

    def _warn(self, call: str, message: str) -> None:
        if call not in self._given:
            self._given.add(call)
            warnings.warn(message, ForgottenCallWarning, stacklevel=2)


@torch.no_grad()
def _holds_more(layer: NMLayer) -> bool:
    """Whether the parameter has values that W_F does not have. A shard is compared by its own process."""
    if layer.view.is_sharded and not layer.spec.method.selects_entries:
        return layer.masks.has_forward  # gathering the weight would take all processes
    return not torch.equal(
        layer.view.local.nan_to_num(), layer.forward_weight(local=True).nan_to_num()
    )
