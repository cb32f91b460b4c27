"""What Lightning's checkpoints leave out of an exact resume."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class ExactResume(Callback):
    """Saves the random state, and the gradients of an unfinished accumulation window.

    Lightning saves neither. Without the first, dropout differs after a resume. Without the second, a checkpoint made
    between two optimizer steps (`accumulate_grad_batches` > 1) resumes with the gradients of the window's first
    micro-batches missing: the next step uses a part of the window, divided as if it were the whole.

    With this callback and a `ResumableDataModule`, a resumed run is bit-equal to the uninterrupted one, given the same
    machine and deterministic kernels. For one process only: Lightning saves what rank 0 has.

    Raises:
        ValueError: If training is distributed.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse distributed training."""
        if stage == "fit" and trainer.world_size > 1:
            raise ValueError("ExactResume works in one process: a checkpoint holds the state of rank 0 only")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the random state and, inside a window, the gradients."""
        state: dict[str, Any] = {"cpu": torch.get_rng_state(), "gradients": {}}
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
        done = trainer.fit_loop.batch_idx + 1
        if trainer.state.fn == "fit" and done % trainer.accumulate_grad_batches and not trainer.is_last_batch:
            state["gradients"] = {
                name: parameter.grad.detach().clone()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }
        checkpoint["exact_resume"] = state

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remember what was saved; a checkpoint without it is fine."""
        self._loaded = checkpoint.get("exact_resume", {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put it back, after the sanity check and before the first batch."""
        state, self._loaded = self._loaded, {}
        if not state:
            return
        gradients = state["gradients"]
        for name, parameter in pl_module.named_parameters():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device)
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
            torch.cuda.set_rng_state_all(state["cuda"])
