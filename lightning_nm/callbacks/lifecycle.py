"""The phases of NMSparsityCallback: between fits, within a fit, and after an exception."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Phase(Enum):
    """Whether masks are installed, and how far the fit is."""

    IDLE = "idle"
    """No masks are installed: before the first fit, between fits and during evaluation."""
    INSTALLED = "installed"
    """Masks are installed, and no batch of this fit has ended."""
    TRAINING = "training"
    """Masks are installed, and the first batch has ended."""
    INTERRUPTED = "interrupted"
    """An exception ended a fit with sharded weights. Masks stay installed until the next fit starts."""


class Origin(Enum):
    """Where the training state comes from: that of the current fit, or of the next one while idle."""

    NEW = "new"
    """There is no saved state: masks and clocks start from scratch."""
    CARRIED_OVER = "carried over"
    """State of an earlier fit or of an evaluated checkpoint. It is dropped if it does not fit the model."""
    CHECKPOINT = "checkpoint"
    """State of the checkpoint that the fit resumes. It is an error if it does not fit the model."""


@dataclass
class Lifecycle:
    """A state machine of :class:`~lightning_nm.NMSparsityCallback`; it holds no tensors but those of a saved state.

    The phases of a fit::

        IDLE -- install() --> INSTALLED -- end_batch() --> TRAINING -- end(state) --> IDLE
                                  |                           |
                                  +------- interrupt() -------+--> INTERRUPTED -- end(state) --> IDLE

    Before :meth:`install`, :meth:`begin_fit` and one of :meth:`restored` and :meth:`start_anew` settle the
    :class:`Origin`. Checkpoints arrive by :meth:`read_checkpoint` and then :meth:`receive`.

    Args:
        phase: The current phase.
        origin: Where the training state comes from.
        batch_open: Whether a backward pass has run since the last batch ended. Its random numbers are used, and the
            optimizer may have stepped, but the masks have not moved yet. Checkpoints save it as ``open``.
        state: The saved state that the next fit continues; ``None`` if there is none, or once it is restored.
        steps_before: Optimizer steps of the resumed run before this callback joined it.
    """

    phase: Phase = Phase.IDLE
    origin: Origin = Origin.NEW
    batch_open: bool = False
    state: dict[str, Any] | None = None
    steps_before: int = 0
    _origin_of_loaded: Origin = Origin.CHECKPOINT

    @property
    def is_new(self) -> bool:
        """Whether the training started in this fit, without a saved state."""
        return self.origin is Origin.NEW

    # ------------------------------------------------------------------------------------------------ checkpoints

    def setup(self) -> None:
        """A Trainer starts; it has not read a checkpoint yet."""
        self.steps_before = 0

    def read_checkpoint(self, *, resumes: bool, global_step: int) -> None:
        """A Trainer reads a checkpoint; its state follows by :meth:`receive`.

        Args:
            resumes: Whether a fit resumes; ``False`` for evaluation.
            global_step: Optimizer steps of the run that saved it.
        """
        self._origin_of_loaded = Origin.CHECKPOINT if resumes else Origin.CARRIED_OVER
        self.steps_before = global_step if resumes else 0

    def receive(self, state: dict[str, Any]) -> None:
        """Keep a loaded state until the next fit starts."""
        self.state, self.origin = state, self._origin_of_loaded

    # -------------------------------------------------------------------------------------------------------- fit

    def begin_fit(self) -> None:
        """A fit starts; masks are not installed yet."""
        self.batch_open = False
        if self.state is None:
            self.origin = Origin.NEW

    def restored(self, state: dict[str, Any]) -> None:
        """A saved state was loaded into the sparsifier; without the key ``open`` it counts as saved within a batch."""
        self.batch_open = state.get("open", True)
        self.state = None

    def start_anew(self) -> None:
        """The saved state does not fit the model and is dropped."""
        self.state, self.origin = None, Origin.NEW

    def install(self) -> None:
        """Masks are installed."""
        self.phase = Phase.INSTALLED

    def open_batch(self) -> None:
        """A backward pass starts."""
        self.batch_open = True

    def end_resumed_batch(self) -> None:
        """The masks have moved that were due when the checkpoint was saved."""
        self.batch_open = False

    def end_batch(self) -> None:
        """A batch ends, and the masks that were due have moved."""
        self.phase, self.batch_open = Phase.TRAINING, False

    def interrupt(self) -> None:
        """An exception ended the fit, and masks stay installed."""
        self.phase = Phase.INTERRUPTED

    def end(self, state: dict[str, Any] | None) -> None:
        """Masks are removed.

        Args:
            state: The state that a second fit continues; ``None`` if nothing was trained.
        """
        self.phase, self.state = Phase.IDLE, state
        self.origin = Origin.NEW if state is None else Origin.CARRIED_OVER
