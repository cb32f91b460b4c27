"""How far the training of one layer has come."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.functional.schedule import DENSE, FINAL, Stages, stage_at, within


@dataclass
class LayerProgress:
    """The counters of a layer, and what it does in the window before the next optimizer step.

    Written by :mod:`lightning_nm.training`: ``step.py`` advances the counters, ``phases.py`` plans the schedules,
    ``planned.py`` goes through a training that is only planned.
    """

    step: int = 0  # real steps of the optimizer that owns the weight
    updated_at: int = 0  # the step at which the masks last moved
    # Training steps of all layers together: batches after which any optimizer had stepped.
    clock: int = 0
    schedule: tuple[int, ...] = ()  # training steps at which the method begins or ends something
    estimator_schedule: tuple[int, ...] = ()  # likewise for the estimator
    stages: Stages = ()  # of the user's schedule; () without one
    stage: str = FINAL  # the present one
    # The pattern of the present stage; None for the layer's own. An attribute: compiled graphs read it.
    pattern: NMPattern | None = None
    dense_gradient: bool = False  # whether the window needs dL/dW_F at pruned entries, too
    estimating: bool = False  # whether the estimator works in the window
    # Whether the layer itself has given its weight a gradient; not known where backward passes are compiled.
    trained_by_layer: bool = False
    # Whether before_step() has run since the last optimizer step or end of a batch.
    shaped: bool = False

    def crossed(self, every: int, first: int = 0) -> bool:
        """Whether one of the steps ``first, first + every, ...`` after step 0 lies in ``(updated_at, step]``."""
        if self.step < first:
            return False
        turns = (self.step - first) // every
        turns_before = (self.updated_at - first) // every
        return turns > turns_before

    @property
    def is_dense(self) -> bool:
        """Whether this is a dense stage of the schedule."""
        return self.stage == DENSE

    @property
    def has_more_stages(self) -> bool:
        """Whether another stage of the schedule follows the present one."""
        return bool(self.stages) and self.stages[-1][0] > self.clock

    @property
    def begins_stage(self) -> bool:
        """Whether a stage of the schedule begins at this training step."""
        return any(begin == self.clock for begin, _ in self.stages)

    def set_stage(self, stage: str) -> None:
        """Set the present stage."""
        self.stage = stage
        self.pattern = None if stage in (DENSE, FINAL) else NMPattern.parse(stage)

    def enter_stage(self) -> None:
        """Set the stage of this training step."""
        self.set_stage(stage_at(self.stages, self.clock))

    def note_gradient(self) -> None:
        """A backward pass of the layer makes a gradient of its weight."""
        self.trained_by_layer = True

    def release_dense_gradient(self) -> None:
        """The dense gradient of this window was used."""
        self.dense_gradient = False

    def go_to(self, clock: int) -> None:
        """Set the counters as before training step `clock`, if each step so far trained this layer.

        Whether this window needs a dense gradient is not known by that.
        """
        self.step = self.clock = clock
        self.updated_at = max(clock - 1, 0)
        self.dense_gradient = False
        self.enter_stage()
        self.estimating = not self.estimator_schedule or within(self.estimator_schedule, clock)

    def need_dense_gradient(self) -> None:
        """The window needs dL/dW_F at pruned entries, too."""
        self.dense_gradient = True

    def load(
        self, step: int, updated_at: int, dense_gradient: bool, schedule: tuple[int, ...]
    ) -> None:
        """Set saved counters; the clock is the model's."""
        self.step, self.updated_at = step, updated_at
        self.dense_gradient, self.schedule = dense_gradient, schedule

    def load_stages(self, stages: Stages, stage: str) -> None:
        """Set the saved stages and the saved one of them."""
        self.stages = stages
        self.set_stage(stage)

    def load_estimator(self, schedule: tuple[int, ...]) -> None:
        """Set the estimator's saved schedule."""
        self.estimator_schedule = schedule
