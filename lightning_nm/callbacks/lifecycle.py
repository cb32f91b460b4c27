"""The phases of NMSparsityCallback: between fits, within a fit, and after an exception."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Phase(Enum):
    """Whether masks are installed, and how far the fit is."""

    IDLE = "idle"  # no masks: before the first fit, between fits and during evaluation
    INSTALLED = "installed"  # masks are installed, and no batch of this fit has ended
    TRAINING = "training"  # the first batch has ended
    # An exception ended a fit with sharded weights: masks stay until the next fit starts, when all processes are there.
    INTERRUPTED = "interrupted"


class Origin(Enum):
    """Where the training state of the current fit, or of the next one, comes from."""

    NEW = "new"  # masks and clocks start from scratch
    # An earlier fit or an evaluated checkpoint; dropped if it does not fit the model.
    CARRIED_OVER = "carried over"
    # The checkpoint that the fit resumes; an error if it does not fit the model.
    CHECKPOINT = "checkpoint"


@dataclass
class Lifecycle:
    """The state machine of :class:`~lightning_nm.NMSparsityCallback`.

    The phases of a fit::

        IDLE --> INSTALLED -- end_batch() --> TRAINING -- end(state) --> IDLE
                     |                            |
                     +----------------------------+--> INTERRUPTED -- end(state) --> IDLE

    Checkpoints arrive by :meth:`read_checkpoint` and then :meth:`receive`. Before masks are installed,
    :meth:`begin_fit` and one of :meth:`restored` and :meth:`start_anew` set the :class:`Origin`.

    Example:
        >>> lifecycle = Lifecycle()
        >>> lifecycle.read_checkpoint(resumes=True, global_step=100)
        >>> lifecycle.receive({"clock": 100})
        >>> lifecycle.begin_fit()
        >>> lifecycle.origin
        <Origin.CHECKPOINT: 'checkpoint'>
    """

    phase: Phase = Phase.IDLE
    origin: Origin = Origin.NEW
    batch_open: bool = False
    """Whether a backward pass has run since the last batch ended: its random numbers are used, and the optimizer may
    have stepped, but the masks are not updated yet. Checkpoints save it as ``open``."""
    state: dict[str, Any] | None = None
    """The state that the next fit continues; ``None`` if there is none, or once it is restored."""
    steps_before: int = 0
    """Optimizer steps of the resumed run. If its checkpoint has no state of this callback, it joins the run after
    them."""
    # What a state that arrives by receive() is; set by read_checkpoint(), which Lightning's order puts before it.
    _origin_of_loaded: Origin = Origin.CHECKPOINT

    @property
    def is_new(self) -> bool:
        """Whether the training started in this fit, without a saved state."""
        return self.origin is Origin.NEW

    def read_checkpoint(self, *, resumes: bool, global_step: int) -> None:
        """Note that a Trainer reads a checkpoint, to resume a fit or else to evaluate it; its state may follow."""
        if resumes:
            self._origin_of_loaded = Origin.CHECKPOINT
            self.steps_before = global_step
        else:
            self._origin_of_loaded = Origin.CARRIED_OVER
            self.steps_before = 0

    def receive(self, state: dict[str, Any]) -> None:
        """Keep a loaded state until the next fit starts."""
        self.state = state
        self.origin = self._origin_of_loaded

    def begin_fit(self) -> None:
        """Start a fit; masks are not installed yet."""
        self.batch_open = False
        if self.state is None:
            self.origin = Origin.NEW

    def restored(self, state: dict[str, Any]) -> None:
        """Note that the sparsifier has loaded a saved state; without the key ``open`` it counts as saved in a batch."""
        self.batch_open = state.get("open", True)
        self.state = None

    def give_back(self, state: dict[str, Any] | None) -> bool:
        """Keep a state for the next fit, after this one failed before its first batch; whether it had been restored."""
        was_restored = state is not None and self.state is None and not self.is_new
        if was_restored:
            self.state = state
            self.batch_open = False
        return was_restored

    def start_anew(self) -> None:
        """Drop the saved state, which does not fit the model."""
        self.state = None
        self.origin = Origin.NEW

    def end_batch(self) -> None:
        """End a batch, whose masks are updated."""
        self.phase = Phase.TRAINING
        self.batch_open = False

    def end(self, state: dict[str, Any] | None) -> None:
        """End the fit, whose masks are removed; a second fit continues ``state``, ``None`` if nothing was trained."""
        self.phase = Phase.IDLE
        self.state = state
        self.origin = Origin.NEW if state is None else Origin.CARRIED_OVER
