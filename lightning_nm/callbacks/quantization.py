"""QuantizationAwareTraining: the last fraction of an N:M training with the rounding of the int8 export."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_nm.callbacks.fit_checks import callbacks_of, planned_steps
from lightning_nm.callbacks.sparsity import NMSparsityCallback
from lightning_nm.nn.layer import NMLayer
from lightning_nm.schedule import Moment, check_moment
from lightning_nm.training.int8_rounding import Int8Rounding, rounding_fault
from lightning_nm.training.watch import compiled_parts


class QuantizationAwareTraining(Callback):
    """Trains the last steps with masked weights rounded as ``pack(model, dtype="int8")`` rounds them.

    In these steps, and in validation after their beginning, the forward and the backward pass see
    ``W_q = scale * nearest(W_F / scale)`` with a scale for each output, see
    :func:`lightning_nm.functional.quantise_weight`. The optimizer changes W by the gradient at W_q (the
    straight-through estimator, arXiv 1308.3432). Checkpoints hold W as before, and the export rounds it to the W_q of
    training. Layers without masks are not rounded, as in the export.

    Args:
        last: How long: a fraction of the training's optimizer steps, or an integer for a number of steps.
        activations: Also round each token that a masked linear layer reads, as the kernel ``cpu-int8`` does. The inputs
            of convolutions, attention and experts are not rounded.

    Raises:
        ValueError: If `last` is no fraction. When fit starts, and before training: without an
            :class:`~lightning_nm.NMSparsityCallback` after it in the list, under manual optimization, if the length of
            the training is not known, or for a layer whose weight cannot be rounded, by its name.

    Example::

        >>> from lightning_nm import NMSparsityCallback
        >>> from lightning.pytorch import Trainer
        >>> callbacks = [QuantizationAwareTraining(last=0.1), NMSparsityCallback("2:4", "sr-ste")]
        >>> trainer = Trainer(callbacks=callbacks, logger=False, accelerator="cpu")
    """

    def __init__(self, last: Moment = 0.1, *, activations: bool = False) -> None:
        check_moment("last", last)
        self.last = last
        self.start: int | None = None
        """The optimizer step from which on weights are rounded; known when fit starts, and saved."""
        self.rounding = Int8Rounding(activations=activations)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse callbacks in another order, manual optimization, and activations in compiled modules."""
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise ValueError(
                "QuantizationAwareTraining rounds weights for one backward pass of a batch: it does not work under "
                "manual optimization. Use Int8Rounding of lightning_nm.training.int8_rounding in training_step"
            )
        callbacks = callbacks_of(trainer, Callback)
        others = callbacks_of(trainer, NMSparsityCallback)
        # The other one ends a fit that fails, and must find the weights as they were.
        if not others or callbacks.index(others[0]) < callbacks.index(self):
            raise ValueError(
                "QuantizationAwareTraining rounds the weights that an NMSparsityCallback masks: "
                "callbacks=[QuantizationAwareTraining(...), NMSparsityCallback(...)], in this order"
            )
        if self.rounding.activations and compiled_parts(pl_module):
            raise ValueError(
                "activations=True works by hooks, which compiled modules do not call: leave torch.compile or "
                "activations=True out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the first step, and refuse layers that cannot be rounded."""
        if self.start is None:
            planned = planned_steps(trainer, pl_module)
            if planned is None:
                raise ValueError(
                    f"QuantizationAwareTraining's last={self.last} counts from the end of the training, whose length "
                    "is not known: give the Trainer max_steps, or max_epochs and data with a length"
                )
            steps = round(self.last * planned) if isinstance(self.last, float) else self.last
            self.start = max(planned - steps, 0)
        for layer in _layers(trainer):
            fault = rounding_fault(layer)
            if fault:
                raise ValueError(
                    f"QuantizationAwareTraining cannot round layer '{layer.name}': {fault}"
                )

    def on_train_batch_start(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Round the weights, if it is time; for validation, too."""
        if self.start is not None and trainer.global_step >= self.start:
            self.rounding.begin(_layers(trainer))

    on_validation_start = on_train_batch_start

    def on_after_backward(self, *_: Any, **__: Any) -> None:
        """Give the weights their values back, before anything reads or changes them."""
        self.rounding.end()

    on_train_batch_end = on_after_backward  # of a batch without a backward pass
    on_validation_end = on_after_backward  # checkpoints are saved later
    on_exception = on_after_backward

    def state_dict(self) -> dict[str, Any]:
        """The first step with rounding: a resumed run keeps it, whatever its own length."""
        return {"schema": 1, "start": self.start}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.start = state_dict["start"]


def _layers(trainer: Trainer) -> list[NMLayer]:
    """The masked layers of all sparsifiers of a Trainer; none outside fit."""
    return [
        layer
        for callback in callbacks_of(trainer, NMSparsityCallback)
        if callback.sparsifier is not None
        for layer in callback.sparsifier.layers.values()
    ]
