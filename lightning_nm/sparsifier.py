"""NMSparsifier: a model, a method and an estimator, without Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_nm.config import SparsityConfig, chosen_config, refuse_unknown
from lightning_nm.config.rules import SHORT_NAMES
from lightning_nm.estimators import EstimatorName, GradientEstimator
from lightning_nm.functional.pattern import PatternLike
from lightning_nm.methods import Method, MethodName
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.sharding import reshard
from lightning_nm.nn.layer.state import SCHEMA, by_plain_name, check_schema, layer_state
from lightning_nm.nn.selection.install import install, uninstall
from lightning_nm.nn.selection.low_rank import warn_of_adapters
from lightning_nm.nn.selection.selection import Rule, Selection
from lightning_nm.training.distributed.consistency import RankComparison, reduce_gradients
from lightning_nm.training.fitting import FittingState
from lightning_nm.training.forgotten import ForgottenCalls
from lightning_nm.training.macs import MacsCounter
from lightning_nm.training.optimizers import trained_by, unwrapped
from lightning_nm.training.phases import plan_schedules, warn_of_changes
from lightning_nm.training.scale import ScaledLearningRates, is_rescaled, rescale_initial
from lightning_nm.training.start import choose_masks, refuse_late_sharding, refuse_to_wake
from lightning_nm.training.statistics import ModelStatistics
from lightning_nm.training.step import TrainingStep


class NMSparsifier(ModelStatistics):
    """Trains a model's weights under an N:M method, in any training loop.

    Args:
        model: The model; its modules and parameters stay the same objects. With FSDP2 pass the whole model: the modules
            that gather the weights must be in it.
        pattern: The N:M pattern.
        method: A short name (``"bi-mask"``) or a :class:`Method`.
        grad_estimator: A short name (``"mvue"``) or a :class:`GradientEstimator`; ``None`` keeps dY.
        config: All settings as one object, instead of the other arguments.
        planned_steps: Training steps of the whole training (calls of :meth:`step` after an optimizer step), for
            schedules given as shares of it.
        data_rank: Index of the part of the global batch that this process sees; its rank by default. Processes that
            see the same part, as in a tensor-parallel group, must draw the same random numbers.
        options: The other settings of :class:`~lightning_nm.SparsityConfig`, by name.

    Raises:
        ValueError: For an impossible pattern, an unknown method or estimator, a bad rule or an argument out of range.

    Example::

        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sparsifier.register(optimizer)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.randn(32, 8)).square().mean().backward()
        ...     sparsifier.before_step(optimizer)
        ...     _ = optimizer.step()
        ...     _ = sparsifier.step()
        >>> sparsifier.stats()["density"]
        0.5
    """

    def __init__(
        self,
        model: nn.Module,
        pattern: PatternLike = "2:4",
        method: MethodName | Method = "bi-mask",
        grad_estimator: EstimatorName | GradientEstimator | None = None,
        *,
        config: SparsityConfig | None = None,
        planned_steps: int | None = None,
        data_rank: int | None = None,
        **options: Any,
    ) -> None:
        refuse_unknown(options, NMSparsifier)
        given = SparsityConfig(
            pattern=pattern, method=method, grad_estimator=grad_estimator, **options
        )
        self.config = chosen_config(config, given)
        self.settings = self.config.resolve()
        self.model = model
        self.seed = self.config.seed
        self.planned_steps = planned_steps
        self.data_rank = data_rank
        self.selection = Selection()
        self.attached = False
        self.macs: dict[str, int] = {}
        self.initial_factors: dict[str, float] = {}
        self._counter: MacsCounter | None = None
        self._forgotten = ForgottenCalls()
        self._step = TrainingStep((), forgotten=self._forgotten)
        self._comparison = RankComparison(())

    @property
    def rules(self) -> list[Rule]:
        """What the layers get: the first rule that matches one decides; the last rule is the general one."""
        return self.settings.rules

    @property
    def exclude(self) -> tuple[str, ...]:
        """Globs over names of modules to keep dense."""
        return self.settings.exclude

    @property
    def skipped(self) -> dict[str, str]:
        """Why each other weight is dense, by layer name."""
        return self.selection.skipped

    def attach(
        self,
        state: Mapping[str, Any] | None = None,
        optimizers: Iterable[Optimizer] | None = None,
    ) -> NMSparsifier:
        """Select the layers, choose the first masks and install them; does nothing when attached.

        The model is not changed before everything was checked.

        Args:
            state: The state that :meth:`load_state_dict` loads next: its layers are masked even if they are frozen now
                or would be the first or the last layer, and its schedules need no ``planned_steps``.
            optimizers: All optimizers of the training: weights that none of them holds are frozen, too. By default
                those with ``requires_grad=False`` are.

        Raises:
            ValueError: If the selection fails, see :func:`~lightning_nm.nn.selection.selection.select`, or a schedule
                does not fit ``planned_steps``.
        """
        if not self.attached:
            if state:
                check_schema(state)
            self._install(self._select(state or {}, optimizers))
            if self.config.scale == "supar" and not state and self.clock == 0:
                self._rescale_initial()
        return self

    def _rescale_initial(self) -> None:
        masked = [layer for layer in self.selection.layers if layer.masks.has_forward]
        self.initial_factors = {
            layer.name: rescale_initial(layer, self.config.base_density) for layer in masked
        }

    def _select(
        self, state: Mapping[str, Any], optimizers: Iterable[Optimizer] | None
    ) -> Selection:
        """Select the layers, and choose their first masks; nothing is installed."""
        reshard([module for module in self.model.modules() if isinstance(module, FSDPModule)])
        saved = by_plain_name(state["layers"]) if state else {}
        selection = self.settings.select(
            self.model,
            seed=self.seed,
            is_trained=None if self.config.frozen == "mask" else trained_by(optimizers),
            continued=saved,
            saved_first_last=state.get("ends"),
        )
        warn_of_adapters(self.model, [rule.pattern for rule in self.rules])
        plan_schedules(selection.waiting, saved, self.planned_steps, self.clock)
        self._choose_masks(selection.layers, saved)
        return selection

    def _install(self, selection: Selection) -> None:
        self.selection = selection
        rates = None if self.config.scale is None else ScaledLearningRates(self.config.base_density)
        self._step = TrainingStep(
            selection.layers, self.config.grad_snr_every, self.clock, self._forgotten, rates
        )
        self._step.begin_window()
        install(self.model, selection.layers)
        self._comparison = RankComparison(selection.layers)
        self._counter = MacsCounter(self.model)
        self.macs = self._counter.macs
        self.attached = True

    def _choose_masks(self, layers: Sequence[NMLayer], saved: Mapping[str, dict[str, Any]]) -> None:
        choose_masks(layers, saved, self.planned_steps, self.clock, self.data_rank)

    def wake(self) -> list[NMLayer]:
        """Mask the frozen layers that a registered optimizer trains by now, and return them; see :meth:`follow`, too.

        :meth:`step` calls it at the end of a batch. Call it right after layers were unfrozen, for masks in the next
        forward pass. All processes must unfreeze the same layers.

        Raises:
            ValueError: If a weight holds NaN, or a method does not support the optimizer; nothing is changed then.
        """
        self._require_attached("wake")
        if not self.selection.waiting or not self._step.optimizers:
            return []
        is_trained = trained_by(known.optimizer for known in self._step.optimizers.values())
        return self._wake(
            [layer for layer in self.selection.waiting if is_trained(layer.optimizer_param)], {}
        )

    def _wake(self, layers: list[NMLayer], saved: Mapping[str, dict[str, Any]]) -> list[NMLayer]:
        if layers:
            refuse_to_wake(layers, [known.optimizer for known in self._step.optimizers.values()])
            for layer in layers:
                layer.to_weight_device()
                layer.costs.charge_dense(self.clock)
            self._choose_masks(layers, saved)
            self.selection.wake(layers)
            self._step.add(layers)
            install(self.model, layers)
        return layers

    @property
    def clock(self) -> int:
        """The training steps so far: calls of :meth:`step` before which any optimizer had stepped."""
        return self._step.clock

    def detach(self, *, keep_parameters: bool = False) -> None:
        """Restore ordinary modules, which hold the latent weights; call :meth:`bake` first for the sparse ones.

        With ``keep_parameters``, those that methods own stay in the optimizers, for their state dicts. A
        :class:`~lightning_nm.training.forgotten.ForgottenCallWarning` tells if the weights were trained and not baked.
        """
        if self.attached:
            self._forgotten.detaching(self.selection.layers)
        self._step.release(keep_parameters=keep_parameters)
        self._close_counter()
        if self.attached:
            uninstall(self.model, self.selection.layers)
            self.attached = False

    @torch.no_grad()
    def bake(self) -> None:
        """Set every masked parameter to W_F; the latent values of pruned entries are lost."""
        for layer in self.selection.layers:
            layer.local_weight.copy_(layer.local_forward_weight())
        self._forgotten.baked()

    def register(self, optimizer: Optimizer) -> None:
        """Register an optimizer, to count its real steps and keep its weights N:M; does nothing if it is registered.

        Of an optimizer that wraps another one as its attribute ``optimizer``, the inner one is registered.

        Raises:
            TypeError: If it is not a ``torch.optim.Optimizer``.
            ValueError: If the method of a layer does not support the optimizer.
            RuntimeError: If the weights were sharded after :meth:`attach`.
        """
        self._require_attached("register")
        refuse_late_sharding(self.selection.layers)
        optimizer = unwrapped(optimizer)
        if not isinstance(optimizer, Optimizer):
            name = type(optimizer).__name__
            raise TypeError(
                f"{name} is not a torch.optim.Optimizer: pass the torch optimizer that it wraps"
            )
        self._step.register(optimizer)

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Register all optimizers of a training, and forget others, which were replaced: they train no weight now."""
        inner = [unwrapped(optimizer) for optimizer in optimizers]
        self._step.forget_others(inner)
        for optimizer in inner:
            if id(optimizer) not in self._step.optimizers:
                self.register(optimizer)

    def called_by_callback(self) -> None:
        """Tell that a Trainer's callback makes the calls of a step: it forgets none, so nothing is to be warned of."""
        self._forgotten.in_plain_loop = False

    @property
    def unowned(self) -> list[str]:
        """Masked layers that no registered optimizer trains: their masks are not updated."""
        return [layer.name for layer in self._step.unowned()]

    def before_step(self, optimizer: Optimizer, loss_scale: float = 1.0) -> None:
        """Let the methods change the complete gradients; call it before clipping and ``optimizer.step()``.

        ``loss_scale`` is the factor of the gradients, 1 once they are unscaled.
        """
        self._step.before_optimizer(unwrapped(optimizer), loss_scale)

    def step(self) -> bool:
        """Update the masks of layers whose optimizer stepped since the last call; call it after every batch.

        This includes batches that only accumulate gradients, because estimators draw new random numbers for each. At a
        step of a layer's schedule its masks are always updated: phases begin and end for all layers together.

        Returns whether any optimizer had stepped; without a registered one it raises a RuntimeError.
        """
        if not self.attached or not self._step.optimizers:
            self._require_attached("step")
            raise RuntimeError(
                "no optimizer is registered: call sparsifier.register(optimizer) before training"
            )
        if self.macs and self._counter is not None:
            self._counter.settle()
            if self.macs:
                self._close_counter()
        stepped = self._step.end_batch()
        self.wake()
        return stepped

    def compare_ranks(self, group: dist.ProcessGroup | None = None) -> None:
        """Compare the masks, and what decides on them, of a group of processes, all by default; call it in all of them.

        This takes one small all-reduce, and nothing in a single process. Unchanged masks are not read again.

        Raises:
            RuntimeError: In all processes if any two differ, naming the layers and what differs.
        """
        self._require_attached("compare_ranks")
        self._comparison(group)

    def reduce_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        """Average the gradients of the parameters that methods own, which DistributedDataParallel does not know.

        Call it before unscaling, in all processes of the group.
        """
        self._require_attached("reduce_gradients")
        reduce_gradients(self.selection.layers, group)

    def _close_counter(self) -> None:
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs beyond ``model.state_dict()``: packed masks, latent values, clocks.

        It holds plain tensors and primitives, so ``torch.load(weights_only=True)`` reads it.
        """
        self._require_attached("state_dict")
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "preset": self.config.preset or "",
            "clock": self.clock,
            "stepped": self._step.stepped,
            "layers": {layer.name: layer_state(layer) for layer in self.selection.layers},
            "macs": dict(self.macs),
            "waiting": [layer.name for layer in self.selection.waiting],
            "ends": dict(self.selection.first_last),
            "skip_first": self.settings.skip_first,
            "skip_last": self.settings.skip_last,
            "scale": self.config.scale or "",
            "base_density": self.config.base_density,
        }

    def _check_scale(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of another scale, and weights that were rescaled although the state belongs to others."""
        saved = state.get("scale", ""), state.get("base_density", 1.0)
        own = self.config.scale or "", self.config.base_density
        if saved != own:
            names = [
                f"scale={scale or None!r}, base_density={density}"
                for scale, density in (saved, own)
            ]
            raise ValueError(
                f"the state was saved with {names[0]}, and this training has {names[1]}: use the former"
            )
        rescaled = [name for name, factor in self.initial_factors.items() if factor != 1]
        changed = [
            layer.name
            for layer in self.selection.layers
            if layer.name in rescaled and is_rescaled(layer)
        ]
        if changed and self.clock == 0 and state["clock"]:
            raise ValueError(
                f"attach() has rescaled the weight of layer '{changed[0]}', which the state does not know: give the "
                "state to attach(state), or load the model's weights after attach()"
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore masks, latent values and clocks; call it after ``model.load_state_dict``.

        Raises:
            ValueError: If the state is of another schema, layer set, pattern, method, estimator or shape, or does not
                belong to the model's weights. Nothing is changed then.
        """
        self._require_attached("load_state_dict")
        check_schema(state)
        self._check_scale(state)
        fitting = FittingState.of(self.selection, state, SHORT_NAMES)
        warn_of_changes(
            fitting.layers, fitting.saved, self.planned_steps, self.settings.masked_in(state)
        )
        self._wake(fitting.waiting, fitting.saved)
        self.seed = state["seed"]
        fitting.load()
        self._step.load(state["clock"], state["stepped"])
        if state["macs"]:
            self.macs.clear()
            self.macs.update(by_plain_name(state["macs"]))
            if self._counter is not None:
                self._counter.known = True
