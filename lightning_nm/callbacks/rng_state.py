"""RNGState: the random states of every process in the checkpoint."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

_KEY = "nm_rng_states"


class RNGState(pl.Callback):
    """Saves the random states of every process in the checkpoint, and restores them when training resumes.

    Lightning does not save them, so dropout differs after a resume. They are the states of torch (the CPU, and the CUDA
    devices: all visible ones, or with several processes the process's own), of numpy's global generator if it is
    MT19937, numpy's default, and of Python's ``random``. Masks and gradient estimators do not need this callback: their
    random numbers are functions of saved counters.

    The states are restored after the sanity check and before the first batch. A run that resumes with another number of
    processes or devices restores those that exist and warns. Not covered are the random numbers of worker processes,
    and data loaders without a ``generator`` of their own, which draw from the global one when an epoch begins (those of
    `lightning_nm.demo` have one).

    Rank 0 gathers the states over a process group of this callback. If a process does not save, for example because it
    raised an exception, the others wait ``timeout`` seconds; the checkpoint is then written with a warning and only
    the state of rank 0. So are later ones of that fit, as torch cannot use a process group after a timeout.

    Args:
        timeout: Seconds that a process waits for the others when a checkpoint is saved.

    Raises:
        ValueError: If ``timeout`` is not positive.

    Example::

        >>> trainer = pl.Trainer(callbacks=[RNGState()], logger=False, accelerator="cpu")
    """

    def __init__(self, timeout: float = 60.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be a positive number of seconds")
        self.timeout = timeout
        self._loaded: list[dict[str, Any] | None] = []
        self._group: dist.ProcessGroup | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Create the process group."""
        self._loaded = []
        if stage == "fit" and trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states of all processes, in the order of their ranks."""
        states: list[dict[str, Any] | None] = [None] * trainer.world_size
        states[trainer.global_rank] = rng_state(_devices(trainer))
        if trainer.world_size > 1:
            self._gather(trainer, states)
        checkpoint[_KEY] = states

    def _gather(self, trainer: pl.Trainer, states: list[dict[str, Any] | None]) -> None:
        """Fill in the states of the other processes on rank 0."""
        own = states[trainer.global_rank]
        # Processes that save at different moments could meet in one gather.
        moment = (trainer.global_step, trainer.fit_loop.total_batch_idx, trainer.current_epoch)
        received: list[Any] | None = [None] * trainer.world_size if trainer.is_global_zero else None
        if self._group is not None:
            try:
                dist.gather_object((moment, own), received, dst=0, group=self._group)
            except RuntimeError:  # a timeout, or a process that has timed out before
                self._group = None
        if received is None:
            return
        for rank, message in enumerate(received):
            if message is not None and message[0] == moment:
                states[rank] = message[1]
        missing = [rank for rank, state in enumerate(states) if state is None]
        if missing:
            rank_zero_warn(
                f"the checkpoint is written without the random states of ranks {missing}, which did not save within "
                f"{self.timeout:g} s, now or before: save on all processes, or raise RNGState's timeout"
            )

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the saved states until training starts; evaluation leaves the random states unchanged."""
        if trainer.state.fn != "fit":
            return
        self._loaded = checkpoint.get(_KEY, [])
        if not self._loaded:
            rank_zero_warn("the checkpoint was saved without RNGState: random numbers do not continue where they were")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore this process's states, after the sanity check and before the first batch."""
        saved, self._loaded = self._loaded, []
        if not saved:
            return
        rank, world, devices = trainer.global_rank, trainer.world_size, _devices(trainer)
        if len(saved) != world:
            few, many = sorted((len(saved), world))
            rank_zero_warn(
                f"the checkpoint is of {len(saved)} processes, this run has {world}: the random states of ranks "
                f"{list(range(few, many))} {'are not used' if len(saved) > world else 'go on as they were seeded'}"
            )
        state = saved[rank] if rank < len(saved) else None
        if state is not None:
            set_rng_state(state, devices)
            if len(state["cuda"]) != len(devices):
                then, now = len(state["cuda"]), len(devices)
                found = f"{then} CUDA devices in the checkpoint and {now} devices here"
                message = f"rank {rank} has random states of {found}: only those of the first {min(then, now)} continue"
                warnings.warn(message, stacklevel=2)
        elif rank < len(saved):
            lost = f"the checkpoint was written without the random states of rank {rank}"
            warnings.warn(f"{lost}: they go on as they were seeded", stacklevel=2)


def _devices(trainer: pl.Trainer) -> list[int]:
    """The CUDA devices of this process."""
    if not torch.cuda.is_initialized():
        return []
    root = trainer.strategy.root_device
    if trainer.world_size > 1:
        return [torch.cuda.current_device() if root.index is None else root.index] if root.type == "cuda" else []
    return list(range(torch.cuda.device_count()))


def rng_state(devices: Sequence[int] = ()) -> dict[str, Any]:
    """Return the global random states of torch, CUDA devices, numpy and Python as tensors and primitives."""
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": None
        if numpy["bit_generator"] != "MT19937"
        else {
            "words": torch.tensor(numpy["state"]["key"].tolist()),
            "position": int(numpy["state"]["pos"]),
            "has_gauss": int(numpy["has_gauss"]),
            "gauss": float(numpy["gauss"]),
        },
    }


def set_rng_state(state: dict[str, Any], devices: Sequence[int] = ()) -> None:
    """Restore a result of :func:`rng_state`; with another number of devices, the first ones."""
    torch.set_rng_state(state["torch"].cpu())
    for device, words in zip(devices, state["cuda"], strict=False):
        torch.cuda.set_rng_state(words.cpu(), device)
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    if numpy is not None:
        words = np.array(numpy["words"].tolist(), np.uint32)
        np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
