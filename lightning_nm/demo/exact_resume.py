"""ExactResume: the parts of an exact resume that Lightning's checkpoints do not hold."""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_nm.callbacks.rng_state import RNGState


class ExactResume(RNGState):
    """Saves the random states, as `RNGState` does, and the gradients of an unfinished accumulation window.

    Without these gradients, a checkpoint made between two optimizer steps (`accumulate_grad_batches` > 1) resumes
    without the window's first micro-batches, but still divides by the number of all.

    With this callback and a `ResumableDataModule`, a resumed run is bit-equal to the uninterrupted one, given the same
    machine and deterministic kernels. Gradients are saved in one process only.

    Raises:
        ValueError: In `setup`, if several processes accumulate gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._gradients: dict[str, Tensor] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse gradient accumulation in several processes."""
        if stage == "fit" and trainer.world_size > 1 and trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "ExactResume keeps gradients of one process: use RNGState, and save where windows end"
            )
        self._gradients = {}
        super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random states and, inside a window, the gradients."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        done = trainer.fit_loop.batch_idx + 1
        if (
            trainer.state.fn == "fit"
            and done % trainer.accumulate_grad_batches
            and not trainer.is_last_batch
        ):
            checkpoint["exact_resume_gradients"] = {
                name: parameter.grad.detach().clone()
                for name, parameter in _parameters(trainer, pl_module)
                if parameter.grad is not None
            }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved gradients until training starts."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._gradients = (
            checkpoint.get("exact_resume_gradients", {}) if trainer.state.fn == "fit" else {}
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore gradients and random states, after the sanity check and before the first batch."""
        gradients, self._gradients = self._gradients, {}
        for name, parameter in _parameters(trainer, pl_module):
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device)
        super().on_train_start(trainer, pl_module)


def _parameters(trainer: Trainer, pl_module: LightningModule) -> Iterator[tuple[str, nn.Parameter]]:
    """The model's parameters by name, then those that methods own, by their places: optimizers alone hold these."""
    known = set()
    for name, parameter in pl_module.named_parameters():
        known.add(id(parameter))
        yield name, parameter
    for k, optimizer in enumerate(trainer.optimizers):
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for place, parameter in enumerate(held):
            if id(parameter) not in known:
                yield f"optimizers.{k}.{place}", parameter
