"""ExactResume: the parts of an exact resume that Lightning's checkpoints do not hold."""

from itertools import chain
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

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
        # Within a window each process has gradients of its own, and one process writes the checkpoint.
        if stage == "fit" and trainer.world_size > 1 and trainer.accumulate_grad_batches > 1:
            raise ValueError(
                "ExactResume keeps gradients of one process: use RNGState, and save where windows end"
            )
        self._gradients = {}  # an earlier fit may have ended before it used them
        super().setup(trainer, pl_module, stage)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the random states and, inside a window, the gradients."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        # As Lightning decides: a step follows every n-th batch, and the last one of an epoch in any case.
        ends_window = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if trainer.state.fn == "fit" and not ends_window and not trainer.is_last_batch:
            checkpoint["exact_resume_gradients"] = {
                name: parameter.grad.detach().clone()
                for name, parameter in _parameters(trainer, pl_module).items()
                if parameter.grad is not None
            }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved gradients until training starts."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if trainer.state.fn == "fit":
            self._gradients = checkpoint.get("exact_resume_gradients", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore gradients and random states, after the sanity check and before the first batch."""
        gradients, self._gradients = self._gradients, {}  # a second fit has none
        # Not when the checkpoint is loaded: parameters of methods are made in on_fit_start, which may come later.
        for name, parameter in _parameters(trainer, pl_module).items():
            if name in gradients:
                # They stay: Lightning sets gradients to zero before the first batch of a window alone.
                parameter.grad = gradients[name].to(parameter.device)
        super().on_train_start(trainer, pl_module)


def _parameters(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """The model's parameters by name; by place those that optimizers hold besides them, such as the logits of masks."""
    found: dict[str, Tensor] = dict(module.named_parameters())
    # A set finds tensors by identity, where a list would compare their values.
    known = {*found.values()}
    for number, optimizer in enumerate(trainer.optimizers):
        members = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        for place, parameter in enumerate(members):
            if parameter not in known:
                found[f"{place} of optimizer {number}"] = parameter
    return found
