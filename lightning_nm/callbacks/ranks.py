"""What the callback does where several processes train one model by data parallelism."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.strategies import NMDDPStrategy


class Ranks:
    """Keeps the processes of a parallel strategy together; :meth:`of` makes none where there is nothing to do.

    The masks are compared before the first backward pass that follows a move: that pass is the first whose collectives
    could depend on them. All that decides on when to compare, the hooks of the Trainer, is the same in all processes.

    Args:
        strategy: The Trainer's strategy.
        sparsifier: The attached sparsifier.
        every: Optimizer steps between two comparisons; 0 for none.
    """

    def __init__(self, strategy: DDPStrategy | ModelParallelStrategy, sparsifier: NMSparsifier, every: int) -> None:
        self.sparsifier = sparsifier
        self.wire = strategy.wire if isinstance(strategy, NMDDPStrategy) else None
        # What the hook sends depends on what is compared.
        self.every = 1 if self.wire is not None else every
        self._steps = 0
        self._due = self.every > 0
        if self.wire is not None:
            self.wire.add(sparsifier.layers.values())

    @classmethod
    def of(cls, trainer: pl.Trainer, sparsifier: NMSparsifier, every: int) -> Ranks | None:
        """One for this fit; ``None`` under other strategies.

        Args:
            trainer: The Trainer.
            sparsifier: The attached sparsifier.
            every: Optimizer steps between two comparisons; 0 for none.

        Raises:
            ValueError: If a method's own parameters could not be saved under the strategy.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, (DDPStrategy, ModelParallelStrategy)):
            return None
        owners = [layer for layer in sparsifier.layers.values() if layer.parameters]
        if owners and isinstance(strategy, ModelParallelStrategy):
            raise ValueError(
                f"{type(owners[0].method).__name__} owns parameters at layer '{owners[0].name}', and distributed "
                "checkpoints save no optimizer state of parameters that are not the model's: use the ddp or nm_ddp "
                "strategy with this method"
            )
        return cls(strategy, sparsifier, every)

    def close(self) -> None:
        """The fit is over: gradients are sent whole again."""
        if self.wire is not None:
            self.wire.remove(self.sparsifier.layers.values())

    def before_backward(self) -> None:
        """Compare the masks if they may have moved since the last time."""
        if self._due:
            self._due = False
            self.sparsifier.compare_ranks()

    def after_backward(self, trainer: pl.Trainer) -> None:
        """Average the gradients of parameters that methods own, with the micro-batch that DDP averages after, too."""
        if getattr(trainer.model, "require_backward_grad_sync", True):
            self.sparsifier.reduce_gradients()

    def before_step(self) -> None:
        """Note that masks may move."""
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            self._due = True

    def at_end(self) -> None:
        """Compare once more: the model is what the first process saves."""
        if self.every:
            self.sparsifier.compare_ranks()

    def bytes_ratio(self) -> float | None:
        """Bytes of gradients sent in this step over those of all gradients; ``None`` if that is not counted."""
        return None if self.wire is None else self.wire.settle()
