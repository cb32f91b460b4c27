"""RNGState: the random states of every process in the checkpoint."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_nm.nn.state import State

_KEY = "nm_rng_states"
"""The key in checkpoints: a list with the state of each process, in the order of their ranks."""


class RNGState(Callback):
    """Saves the random states of every process in the checkpoint, and restores them when training resumes.

    Lightning does not save them, so dropout differs after a resume. They are the states of torch (the CPU, and the CUDA
    devices: all visible ones, or with several processes the process's own), of numpy's global generator if it is
    MT19937, numpy's default, and of Python's ``random``. Masks and gradient estimators do not need this callback: their
    random numbers are functions of saved counters.

    The states are restored after the sanity check and before the first batch. A run that resumes with another number of
    processes or devices restores those that exist and warns. Not covered are the random numbers of worker processes,
    and data loaders without a ``generator`` of their own, which draw from the global one when an epoch begins.

    Rank 0 gathers the states over a process group of this callback. If a process does not save, for example because it
    raised an exception, the others wait ``timeout`` seconds; the checkpoint is then written with a warning and only
    the state of rank 0. So are later ones of that fit, as torch cannot use a process group after a timeout.

    Args:
        timeout: Seconds that a process waits for the others when a checkpoint is saved.

    Raises:
        ValueError: If ``timeout`` is not positive.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[RNGState()], logger=False, accelerator="cpu")
    """

    def __init__(self, timeout: float = 60.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be a positive number of seconds")
        self.timeout = timeout
        self._loaded: list[State | None] = []
        self._group: dist.ProcessGroup | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Create the process group."""
        self._loaded = []
        if stage == "fit" and trainer.world_size > 1 and dist.is_initialized():
            # Of its own, since a timeout makes a group useless. Gloo sends from the CPU, where the states are.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Add the states of all processes, in the order of their ranks."""
        states: list[State | None] = [None] * trainer.world_size
        states[trainer.global_rank] = rng_state(_devices(trainer))
        if trainer.world_size > 1:
            self._gather(trainer, states)
        checkpoint[_KEY] = states

    def _gather(self, trainer: Trainer, states: list[State | None]) -> None:
        """Fill in the states of the other processes on rank 0."""
        # Processes that save at different moments could meet in one gather.
        moment = (trainer.global_step, trainer.fit_loop.total_batch_idx, trainer.current_epoch)
        own = (moment, states[trainer.global_rank])
        messages: list[tuple[Any, Any]] | None = None  # of all ranks, on rank 0
        if trainer.is_global_zero:
            messages = [(None, None)] * trainer.world_size
        if self._group is not None:
            try:
                dist.gather_object(own, messages, dst=0, group=self._group)
            except RuntimeError:  # a timeout, or a process that has timed out before
                self._group = None  # later checkpoints do not wait
        if messages is None:
            return

        for rank, (sent_at, state) in enumerate(messages):
            if sent_at == moment:
                states[rank] = state
        missing = [rank for rank, state in enumerate(states) if state is None]
        if missing:
            rank_zero_warn(
                f"the checkpoint is written without the random states of ranks {missing}, which did not save within "
                f"{self.timeout:g} s, now or before: save on all processes, or raise RNGState's timeout"
            )

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: State
    ) -> None:
        """Keep the saved states until training starts; evaluation leaves the random states unchanged."""
        if trainer.state.fn != "fit":
            return
        self._loaded = checkpoint.get(_KEY, [])
        if not self._loaded:
            rank_zero_warn(
                "the checkpoint was saved without RNGState: random numbers do not continue where they were"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore this process's states, after the sanity check and before the first batch."""
        saved = self._loaded
        self._loaded = []  # a second fit goes on from where this one ends
        if not saved:
            return
        then, now = len(saved), trainer.world_size
        if then != now:
            # The ranks that are in one of the runs alone.
            ranks = sorted({*range(then)} ^ {*range(now)})
            fate = "are not used" if then > now else "go on as they were seeded"
            rank_zero_warn(
                f"the checkpoint is of {then} processes, this run has {now}: the random states of ranks {ranks} {fate}"
            )
        rank = trainer.global_rank
        if rank >= then:  # a process more than in the run that was saved
            return
        state = saved[rank]
        if state is None:
            warnings.warn(
                f"the checkpoint was written without the random states of rank {rank}: they go on as they were seeded",
                stacklevel=2,
            )
            return
        devices = _devices(trainer)
        set_rng_state(state, devices)
        then, now = len(state["cuda"]), len(devices)
        if then != now:
            warnings.warn(
                f"rank {rank} has random states of {then} CUDA devices in the checkpoint and {now} devices here: only "
                f"those of the first {min(then, now)} continue",
                stacklevel=2,
            )


def _devices(trainer: Trainer) -> list[int]:
    """The CUDA devices of this process."""
    # A state that nothing has used yet needs no saving, and asking for it would initialize CUDA.
    if not torch.cuda.is_initialized():
        return []
    if trainer.world_size == 1:
        return list(range(torch.cuda.device_count()))
    root = trainer.strategy.root_device
    index = torch.cuda.current_device() if root.index is None else root.index
    return [index] if root.type == "cuda" else []


def rng_state(devices: Sequence[int] = ()) -> State:
    """Return the global random states of torch, CUDA devices, numpy and Python as tensors and primitives.

    That of numpy is ``None`` unless its global generator is MT19937.

    Example:
        >>> state = rng_state()
        >>> first = torch.rand(2)
        >>> set_rng_state(state)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    # Tensors and primitives alone: torch reads them with weights_only=True.
    version, words, gauss = random.getstate()
    found: Any = np.random.get_state(legacy=False)
    numpy = None
    if found["bit_generator"] == "MT19937":
        numpy = {
            # torch has no uint32: the words become int64.
            "words": torch.tensor(found["state"]["key"].tolist(), dtype=torch.int64),
            "position": int(found["state"]["pos"]),
            "has_gauss": int(found["has_gauss"]),
            "gauss": float(found["gauss"]),
        }
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in devices],
        "python": {
            "version": version,
            "words": torch.tensor(words, dtype=torch.int64),
            "gauss": gauss,
        },
        "numpy": numpy,
    }


def set_rng_state(state: State, devices: Sequence[int] = ()) -> None:
    """Restore a result of :func:`rng_state`; with another number of devices, the first ones.

    Example:
        >>> set_rng_state(rng_state())
    """
    torch.set_rng_state(state["torch"].cpu())
    for device, words in zip(devices, state["cuda"], strict=False):
        torch.cuda.set_rng_state(words.cpu(), device)

    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))

    numpy = state["numpy"]
    if numpy is not None:
        words = np.array(numpy["words"].tolist(), np.uint32)
        np.random.set_state(
            ("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"])
        )
