"""RNGState: the random state of every process, kept in the checkpoint."""

from __future__ import annotations

import base64
import io
import time
import warnings
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_nm.callbacks.random_states import rng_state, set_rng_state

_KEY = "nm_rng_states"


class RNGState(pl.Callback):
    """Saves the random states of every process in the checkpoint, and puts them back when training resumes.

    Lightning saves none of them, so dropout differs after a resume. The states are those of torch (the CPU, and the
    CUDA devices: all that the process sees, or with several processes its own), of numpy's global generator if numpy is
    used (MT19937, its default) and of Python's ``random``. Masks and gradient estimators do not need this callback:
    their random numbers are functions of saved counters.

    A run that resumes on another number of processes or devices gets the states that are there; a warning says which
    are not. The states are put back after the sanity check and before the first batch. Not covered are data
    loaders that draw from the global generator, as torch's do when an epoch begins unless they have a ``generator`` of
    their own (those of `lightning_nm.demo` have), and what worker processes draw.

    Rank 0 collects the states without a collective: if a process does not save (it raised an exception, say), the
    checkpoint is written without its state after ``timeout`` seconds.

    Args:
        timeout: How long rank 0 waits for the states of the other processes, in seconds.

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
        self._store: Any = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Connect the processes."""
        self._loaded = []
        if stage == "fit" and trainer.world_size > 1:
            self._store = _connect(trainer, timedelta(seconds=self.timeout))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the states of all processes, in the order of their ranks."""
        own = rng_state(_devices(trainer))
        if trainer.world_size == 1:
            checkpoint[_KEY] = [own]
        elif self._store is None:  # no fit of several processes came before
            checkpoint[_KEY] = [own if rank == trainer.global_rank else None for rank in range(trainer.world_size)]
        elif trainer.is_global_zero:
            checkpoint[_KEY] = [own, *self._collect(self._store, trainer)]
        else:
            self._store.set(str(trainer.global_rank), _pack({"at": _moment(trainer), "state": own}))

    def _collect(self, store: Any, trainer: pl.Trainer) -> list[dict[str, Any] | None]:
        deadline = time.monotonic() + self.timeout
        states: list[dict[str, Any] | None] = []
        for rank in range(1, trainer.world_size):
            states.append(_receive(store, str(rank), _moment(trainer), deadline))
        missing = [rank for rank, state in enumerate(states, 1) if state is None]
        if missing:
            rank_zero_warn(
                f"the checkpoint is written without the random states of ranks {missing}, which did not save within "
                f"{self.timeout:g} s: save on all processes, or raise RNGState's timeout"
            )
        return states

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember what was saved; a checkpoint that is only evaluated leaves the random states alone."""
        if trainer.state.fn != "fit":
            return
        self._loaded = checkpoint.get(_KEY, [])
        if not self._loaded:
            rank_zero_warn("the checkpoint was saved without RNGState: random numbers do not continue where they were")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put this process's states back, after the sanity check and before the first batch."""
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
                warnings.warn(
                    f"rank {rank} has random states of {len(state['cuda'])} CUDA devices in the checkpoint and "
                    f"{len(devices)} devices here: only those of the first {min(len(state['cuda']), len(devices))} "
                    "continue",
                    stacklevel=2,
                )
        elif rank < len(saved):
            warnings.warn(
                f"the checkpoint was written without the random states of rank {rank}: they go on as they were seeded",
                stacklevel=2,
            )


def _devices(trainer: pl.Trainer) -> list[int]:
    """The CUDA devices of this process."""
    if not torch.cuda.is_initialized():
        return []
    root = trainer.strategy.root_device
    if trainer.world_size > 1:
        return [torch.cuda.current_device() if root.index is None else root.index] if root.type == "cuda" else []
    return list(range(torch.cuda.device_count()))


def _connect(trainer: pl.Trainer, timeout: timedelta) -> Any:
    """A key-value store of its own, on a free port of the main node, that all processes reach."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in every build of torch

    environment = getattr(trainer.strategy, "cluster_environment", None)
    host = "127.0.0.1" if environment is None else environment.main_address
    store = TCPStore(host, 0, is_master=True, timeout=timeout) if trainer.is_global_zero else None
    port = trainer.strategy.broadcast(0 if store is None else store.port)
    return store or TCPStore(host, port, is_master=False, timeout=timeout)


def _moment(trainer: pl.Trainer) -> list[int]:
    """When this is in the training; the same in all processes."""
    return [trainer.global_step, trainer.fit_loop.total_batch_idx, trainer.current_epoch]


def _pack(message: dict[str, Any]) -> str:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def _receive(store: Any, key: str, moment: list[int], deadline: float) -> dict[str, Any] | None:
    """The state that a process posted at this moment, once it is there; ``None`` after the deadline."""
    while True:
        if store.check([key]):
            message = torch.load(io.BytesIO(base64.b64decode(store.get(key))), weights_only=True)
            if message["at"] == moment:  # else it is left over from a moment at which rank 0 did not save
                store.delete_key(key)
                state: dict[str, Any] = message["state"]
                return state
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)
