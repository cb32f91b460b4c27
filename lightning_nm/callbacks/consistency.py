"""Work of NMSparsityCallback where several processes train one model."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.strategies import NMDDPStrategy


class ProcessConsistency:
    """Keeps the masks of all processes equal, and averages the gradients that the strategy does not know.

    Masks are compared before the first backward pass that follows a mask update: its collectives are the first that
    could depend on the masks. The decision when to compare follows the Trainer's hooks, which are the same in all
    processes.

    Args:
        strategy: The Trainer's strategy.
        sparsifier: The attached sparsifier.
        every: Optimizer steps between two comparisons; 0 for none. ``nm_ddp`` compares before every step, since its
            communication hook depends on the masks.
    """

    def __init__(self, strategy: DDPStrategy | ModelParallelStrategy, sparsifier: NMSparsifier, every: int) -> None:
        self.sparsifier = sparsifier
        self.comm_hook = strategy.comm_hook if isinstance(strategy, NMDDPStrategy) else None
        self.every = 1 if self.comm_hook is not None else every
        self._steps = 0
        self._due = self.every > 0
        if self.comm_hook is not None:
            self.comm_hook.add(sparsifier.layers.values())

    @classmethod
    def create(cls, trainer: pl.Trainer, sparsifier: NMSparsifier, every: int) -> ProcessConsistency | None:
        """Create one for a fit; ``None`` unless the strategy is a ``DDPStrategy`` or a ``ModelParallelStrategy``.

        Args:
            trainer: The Trainer.
            sparsifier: The attached sparsifier.
            every: Optimizer steps between two comparisons; 0 for none.

        Raises:
            ValueError: If a method owns parameters, and the strategy cannot save their optimizer state.
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
        """End the fit: the communication hook sends full gradients again."""
        if self.comm_hook is not None:
            self.comm_hook.remove(self.sparsifier.layers.values())

    def before_backward(self) -> None:
        """Compare the masks if a comparison is due."""
        if self._due:
            self._due = False
            self.sparsifier.compare_ranks()

    def after_backward(self, trainer: pl.Trainer) -> None:
        """Average the gradients of parameters that methods own, in the micro-batches in which DDP synchronizes."""
        if getattr(trainer.model, "require_backward_grad_sync", True):
            self.sparsifier.reduce_gradients()

    def before_step(self) -> None:
        """Count an optimizer step, after which masks may move."""
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            self._due = True

    def at_end(self) -> None:
        """Compare once more at the end of training: rank 0 saves the model."""
        if self.every:
            self.sparsifier.compare_ranks()

    def bytes_ratio(self) -> float | None:
        """Bytes of gradients sent in this step over the bytes of all gradients; ``None`` without ``nm_ddp``."""
        return None if self.comm_hook is None else self.comm_hook.settle()
