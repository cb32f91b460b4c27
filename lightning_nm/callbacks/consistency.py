"""Equal masks in all processes that train one model."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lightning_nm.nn.layer import NMLayer
from lightning_nm.plugins import NMDDPStrategy
from lightning_nm.sparsifier import NMSparsifier

_LEFT_OUT = (
    "DistributedDataParallel does not average the gradients of {names}: they were frozen when it wrapped the model and "
    "are trained now, so that each process trains weights of its own. Freeze them later, in on_train_start, with the "
    "strategy 'ddp_find_unused_parameters_true'"
)


class ProcessConsistency:
    """Keeps masks, and the parameters that methods own, equal in all processes.

    It compares the masks of all processes, and averages the gradients of parameters that methods own. Masks are
    compared before the first backward pass after a mask update, since its collectives are the first that
    could depend on the masks. The Trainer's hooks decide when, so all processes do it together.

    ``every`` is the number of optimizer steps between two comparisons; 0 for none. With ``nm_ddp`` it is always 1,
    because its communication hook depends on the masks.
    """

    def __init__(
        self, strategy: DDPStrategy | ModelParallelStrategy, sparsifier: NMSparsifier, every: int
    ) -> None:
        self.sparsifier = sparsifier
        self.comm_hook = strategy.comm_hook if isinstance(strategy, NMDDPStrategy) else None
        self.every = 1 if self.comm_hook is not None else every
        self._steps = 0  # of any optimizer, in this fit
        self._due = self.every > 0  # the first masks are compared, too
        self._layer_count = 0
        # DistributedDataParallel, which wrapped the model before this fit started, leaves these out for good.
        self._left_out: list[NMLayer] = []
        self._said_left_out: list[str] = []
        if isinstance(strategy, DDPStrategy):
            selection = sparsifier.selection
            self._left_out = [
                layer
                for layer in (*selection.layers, *selection.frozen)
                if not layer.param.requires_grad and layer.spec.method.trains_weight
            ]
        self.add_layers()

    @classmethod
    def create(
        cls, trainer: pl.Trainer, sparsifier: NMSparsifier, every: int
    ) -> ProcessConsistency | None:
        """Create one for a fit; ``None`` unless the strategy is a ``DDPStrategy`` or a ``ModelParallelStrategy``.

        Raises:
            ValueError: If a method owns parameters whose optimizer state the strategy cannot save.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, (DDPStrategy, ModelParallelStrategy)):
            return None
        # DCP saves optimizer states by the names of the model's parameters, and these have none.
        owners = [layer for layer in sparsifier.layers.values() if layer.parameters]
        if owners and isinstance(strategy, ModelParallelStrategy):
            owner = f"{type(owners[0].spec.method).__name__} owns parameters at layer '{owners[0].name}'"
            fault = "distributed checkpoints save no optimizer state of parameters that are not the model's"
            raise ValueError(
                f"{owner}, and {fault}: use the ddp or nm_ddp strategy with this method"
            )
        return cls(strategy, sparsifier, every)

    def add_layers(self) -> None:
        """Tell the communication hook of all layers."""
        layers = self.sparsifier.selection.layers
        if self.comm_hook is not None:
            self.comm_hook.add(layers)
        self._layer_count = len(layers)

    def close(self) -> None:
        """End the fit: the communication hook sends full gradients again."""
        if self.comm_hook is not None:
            self.comm_hook.remove(self.sparsifier.layers.values())

    def before_backward(self) -> None:
        """Compare the masks if a comparison is due."""
        # Frozen layers are masked when they are unfrozen.
        if len(self.sparsifier.selection.layers) != self._layer_count:
            self.add_layers()
        self._warn_of_left_out()
        if self._due:
            self._due = False
            self._compare()

    def _warn_of_left_out(self) -> None:
        """Warn of weights that are trained now, and were frozen when DistributedDataParallel wrapped the model."""
        trained = [layer.name for layer in self._left_out if layer.param.requires_grad]
        new = [name for name in trained if name not in self._said_left_out]
        if new:
            self._said_left_out += new
            rank_zero_warn(_LEFT_OUT.format(names=new))

    def _compare(self) -> None:
        """Compare the masks of all processes, and say why they may differ."""
        try:
            self.sparsifier.compare_ranks()
        except RuntimeError as error:
            if not self._said_left_out:
                raise
            cause = _LEFT_OUT.format(names=self._said_left_out)
            raise RuntimeError(f"{error}. The likely cause: {cause}") from error

    def after_backward(self, trainer: pl.Trainer) -> None:
        """Average the gradients of parameters that methods own, in the micro-batches in which DDP synchronizes."""
        # DDP has this attribute; in other models every backward pass synchronizes.
        if getattr(trainer.model, "require_backward_grad_sync", True):
            self.sparsifier.reduce_gradients()

    def before_step(self) -> None:
        """Count an optimizer step, after which masks may be updated.

        The comparison waits for the next backward pass, because the masks change only when the batch ends.
        """
        self._steps += 1
        if self.every and self._steps % self.every == 0:
            self._due = True

    def at_end(self) -> None:
        """Compare once more at the end of training, before rank 0 saves the model."""
        if self.every:
            self._compare()
