"""NMSparsifier: N:M training of a model in any loop, without Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_nm.config import SparsityConfig, chosen_config
from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import Method
from lightning_nm.nn.costs import mean_densities
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import Selection, select, warn_of_adapters
from lightning_nm.nn.state import State, layer_state
from lightning_nm.nn.weight import reshard
from lightning_nm.pattern import PatternLike
from lightning_nm.schedule import UnknownLength
from lightning_nm.short_names import SHORT_NAMES, EstimatorName, MethodName
from lightning_nm.training.checkpoint import (
    SCHEMA,
    apply_state,
    check_scale,
    check_schema,
    check_state,
)
from lightning_nm.training.optimizer_step import TrainingStep
from lightning_nm.training.optimizers import held_by, trained_layer
from lightning_nm.training.phases import (
    choose_masks,
    plan_schedules,
    refuse_to_mask,
    told_as_dense,
)
from lightning_nm.training.scale import (
    Scale,
    ScaledLearningRates,
    forget_initial,
    rescale_initial,
    restore_initial,
)
from lightning_nm.training.statistics import (
    flops_ratios,
    joint_statistics,
    shares_of,
    violations,
)


class NMSparsifier:
    """Trains a model's weights under an N:M method, in any training loop.

    Args:
        model: The model; its modules and parameters stay the same objects. With FSDP2 pass the whole model: the modules
            that gather the weights must be in it.
        pattern: The N:M pattern.
        method: A short name, by default ``"bame"``, which needs `planned_steps`, or a :class:`Method`.
        grad_estimator: A short name (``"mvue"``) or a :class:`GradientEstimator`; ``None`` keeps dY.
        config: All settings as one object, instead of the other arguments.
        planned_steps: Training steps of the whole training (calls of :meth:`step` after an optimizer step), for
            schedules given as fractions of it.
        data_rank: Index of the part of the global batch that this process sees; its rank by default. Processes that
            see the same part, as in a tensor-parallel group, must draw the same random numbers.
        managed: Whether a Trainer's callback makes the calls of a step: it forgets none, and gives its own warnings.
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
        method: MethodName | Method = "bame",
        grad_estimator: EstimatorName | GradientEstimator | None = None,
        *,
        config: SparsityConfig | None = None,
        planned_steps: int | None = None,
        data_rank: int | None = None,
        managed: bool = False,
        **options: Any,
    ) -> None:
        self.config = chosen_config(
            NMSparsifier,
            config,
            pattern=pattern,
            method=method,
            grad_estimator=grad_estimator,
            **options,
        )
        self.settings = self.config.resolve()
        self.model = model
        self.seed = self.config.seed
        self.planned_steps = planned_steps
        self.data_rank = data_rank
        self.managed = managed
        self.selection = Selection()  # an empty one until attach()
        self.attached = False
        self.initial_factors: dict[str, float] = {}
        """By layer name, what ``scale="supar"`` multiplied its initial weight by."""
        self.training = TrainingStep(
            model, self.config.grad_snr_every, self.config.direct_reads, not managed
        )
        """What advances when an optimizer steps."""
        self.scale: Scale | None
        """The scale of initial values and learning rates; ``None`` for that of a dense weight."""
        self._use_scale(self.settings.scale)

    @property
    def layers(self) -> dict[str, NMLayer]:
        """The masked layers by name."""
        return {layer.name: layer for layer in self.selection.layers}

    @property
    def skipped(self) -> dict[str, str]:
        """Why each other weight is dense, by layer name."""
        return self.selection.skipped

    @property
    def clock(self) -> int:
        """The training steps so far: calls of :meth:`step` before which any optimizer had stepped."""
        return self.training.clock

    @property
    def macs(self) -> dict[str, int]:
        """Multiply-adds of every weight's dense forward GEMM in the first batches, by layer name.

        Those of all weights of kinds without an adapter are under :data:`~lightning_nm.training.macs.OTHERS`.
        """
        return self.training.macs

    # ------------------------------------------------------------------------------------------- begin, step and end

    def attach(
        self,
        state: State | None = None,
        optimizers: Iterable[Optimizer] | None = None,
        *,
        trained: bool = False,
    ) -> NMSparsifier:
        """Select the layers, choose the first masks and install them; does nothing when attached.

        The model is not changed before everything was checked.

        Args:
            state: The state that :meth:`load_state_dict` loads next: its layers are masked even if they are frozen now
                or would be the first or the last layer, and its schedules need no ``planned_steps``.
            optimizers: All optimizers of the training: weights that none of them holds are frozen, too. By default
                those with ``requires_grad=False`` are.
            trained: Whether the weights were trained before, without masks: ``scale="supar"`` then leaves their values.

        Raises:
            ValueError: If the selection fails, see :func:`~lightning_nm.nn.selection.select`, or a schedule
                does not fit ``planned_steps``.
        """
        if self.attached:
            return self
        if state:
            check_schema(state)
        try:
            self._select(state or {}, optimizers)
        except UnknownLength as error:
            # The callback's own advice is about the Trainer.
            if self.managed:
                raise
            raise ValueError(f"{error}, or pass planned_steps to NMSparsifier") from error
        self._use_scale(self._scale_after(state) if state else self.settings.scale)
        # All checks have passed: this is the first line that changes the model.
        self.training.start(self.selection.layers)
        self.attached = True
        told = told_as_dense([*self.selection.layers, *self.selection.frozen])
        if told and not self.managed:  # a callback warns when its training starts
            warnings.warn(told, stacklevel=2)
        # Only initial values are scaled: none of a saved training, and none that were trained before this attach().
        if self.scale == "supar" and not (state or trained or self.clock):
            try:
                self._rescale_initial()
            except BaseException:
                self.detach()
                raise
        return self

    def _rescale_initial(self) -> None:
        for layer in self.selection.layers:
            # A weight with a dense start is trained when its masks come, and keeps its values then.
            if layer.masks.has_forward:
                factor = rescale_initial(layer, self.config.base_density)
                self.initial_factors[layer.name] = factor

    def _select(self, state: State, optimizers: Iterable[Optimizer] | None) -> None:
        """Select the layers, and choose their first masks; nothing is installed."""
        # FSDP may have left gathered parameters in modules: optimizers hold the sharded ones, which are compared below.
        reshard([module for module in self.model.modules() if isinstance(module, FSDPModule)])
        is_held = held_by(optimizers)

        def is_trained(parameter: nn.Parameter) -> bool:
            return parameter.requires_grad and is_held(parameter)

        waits = self.config.frozen != "mask"
        saved = state.get("layers", {})
        selection = select(
            self.model,
            self.settings.rules,
            self.settings.exclude,
            skip_first=self.settings.skip_first,
            skip_last=self.settings.skip_last,
            seed=self.seed,
            is_trained=is_trained if waits else None,
            is_held=is_held if waits else None,
            continued=saved,
            saved_first_last=state.get("ends"),
        )
        warn_of_adapters(self.model, [rule.pattern for rule in self.settings.rules])
        # Frozen layers get no masks yet, but a schedule that does not fit is an error now.
        plan_schedules(selection.frozen, saved, self.planned_steps, self.clock)
        choose_masks(selection.layers, saved, self.planned_steps, self.clock, self.data_rank)
        # Last: after an error the sparsifier is as it was.
        self.selection = selection

    def register(self, optimizer: Optimizer) -> None:
        """Register an optimizer, to count its real steps and keep its weights N:M; does nothing if it is registered.

        Of an optimizer that wraps another one as its attribute ``optimizer``, the inner one is registered.

        Raises:
            TypeError: If it is not a ``torch.optim.Optimizer``.
            ValueError: If the method of a layer does not support the optimizer.
            RuntimeError: If the weights were sharded after :meth:`attach`.
        """
        self._require_attached("register")
        self.training.register(optimizer)

    def before_step(self, optimizer: Optimizer, loss_scale: float = 1.0) -> None:
        """Let the methods change the complete gradients; call it before clipping and ``optimizer.step()``.

        ``loss_scale`` is the factor of the gradients, 1 once they are unscaled.
        """
        self.training.before_optimizer(optimizer, loss_scale)

    def step(self) -> bool:
        """Update the masks of layers whose optimizer stepped since the last call; call it after every batch.

        This includes batches that only accumulate gradients, because estimators draw new random numbers for each. At a
        step of a layer's schedule its masks are always updated: phases begin and end for all layers together.

        Returns whether any optimizer had stepped; without a registered one it raises a RuntimeError.
        """
        if not self.training.optimizers:
            # A detached sparsifier has no optimizers either, and that is the fault to name.
            self._require_attached("step")
            raise RuntimeError(
                "no optimizer is registered: call sparsifier.register(optimizer) before training"
            )
        stepped = self.training.end_batch()
        if self.selection.frozen:
            self.mask_unfrozen()
        return stepped

    def mask_unfrozen(self) -> list[NMLayer]:
        """Mask the frozen layers that a registered optimizer trains by now, and return them.

        :meth:`step` calls it at the end of a batch. Call it right after layers were unfrozen, for masks in the next
        forward pass. All processes must unfreeze the same layers.

        Raises:
            ValueError: If a weight holds NaN, or a method does not support the optimizer; nothing is changed then.
        """
        self._require_attached("mask_unfrozen")
        if not self.selection.frozen or not self.training.optimizers:
            return []
        optimizers = self.training.optimizers
        unfrozen = [layer for layer in self.selection.frozen if trained_layer(layer, optimizers)]
        self._mask_frozen(unfrozen, {})
        return unfrozen

    def _mask_frozen(self, layers: Sequence[NMLayer], saved: Mapping[str, State]) -> None:
        if not layers:
            return
        # All layers are checked before the first one is changed.
        refuse_to_mask(layers, self.training.optimizers)
        self._check_optimizers(layers, self.scale)
        for layer in layers:
            # The model may have moved since the selection, and only modules with masks move their layers.
            layer.to_weight_device()
            layer.costs.charge_dense(self.clock)  # the steps so far, in which it was dense
        choose_masks(layers, saved, self.planned_steps, self.clock, self.data_rank)
        # This extends the list that TrainingStep holds, too, and add() then installs the new layers.
        self.selection.unfreeze(layers)
        self.training.add(layers)

    @torch.no_grad()
    def finish(self) -> None:
        """Let the methods do now what they have scheduled for the end of the training, such as CAST's projection.

        :meth:`step` does it at the last planned step. A training that takes fewer, because it stops early or a gradient
        scaler skips some, calls this after its last :meth:`step`. All processes must.
        """
        self._require_attached("finish")
        for layer in self.selection.layers:
            with layer.full():
                layer.spec.method.finish(layer)

    def bake(self) -> None:
        """Set every masked parameter to W_F; the latent values of pruned entries are lost."""
        for layer in self.selection.layers:
            # In place, for optimizers hold the parameter; by shards, for a mask needs no whole weight.
            layer.view.local.copy_(layer.forward_weight(local=True))
        # The next optimizer step makes it true again.
        self.training.forgotten.unbaked = False

    def detach(self, *, keep_parameters: bool = False) -> None:
        """Restore ordinary modules, which hold the latent weights; call :meth:`bake` first for the sparse ones.

        With ``keep_parameters``, those that methods own stay in the optimizers, for their state dicts. A
        :class:`~lightning_nm.training.watch.ForgottenCallWarning` tells if the weights were trained and not baked.
        """
        if self.attached:
            # First, while there are masks to compare the weights with.
            self.training.forgotten.detaching(self.selection.layers)
            self.training.stop(keep_parameters=keep_parameters)
            self.attached = False
            # A fit that fails before its first step leaves the model as it came.
            for layer in self.selection.layers:
                restore_initial(layer)

    def _require_attached(self, call: str) -> None:
        if not self.attached:
            raise RuntimeError(f"the sparsifier is not attached: call attach() before {call}()")

    # ---------------------------------------------------------------------------------------------------- statistics

    def stats(self) -> dict[str, float]:
        """Return the statistics of all masked layers together, and ``train_flops_ratio``, the hardware-eligible ratio.

        They are ``density`` (fraction of set bits of the forward mask), ``flip_rate`` (fraction of its bits that the
        last update changed), ``kept_magnitude`` (sum of |W_F| over sum of |W|), ``overlap`` (fraction of the forward
        mask's entries that the backward mask keeps), and those of the layers' methods; where gradient estimates were
        observed (every ``grad_snr_every`` steps in a few layers, never in compiled ones), also ``grad_snr`` (norm of dW
        over the norm of its error) and ``grad_density`` (fraction of nonzeros in E(dY)).

        Raises:
            ValueError: If a weight holds NaN, naming the layer.
        """
        self._require_attached("stats")
        statistics = joint_statistics(self.selection.layers)
        statistics["train_flops_ratio"] = self.flops_ratios()["eligible"]
        return statistics

    def layer_stats(self) -> dict[str, dict[str, float]]:
        """Return the statistics of :meth:`stats` for every masked layer, without ``train_flops_ratio``."""
        self._require_attached("layer_stats")
        return {layer.name: joint_statistics([layer]) for layer in self.selection.layers}

    def violations(self) -> int:
        """Count the blocks of forward weights that hold more than N nonzeros, also where there is no mask now.

        With masks it is 0 unless a method is wrong. Layers whose forward weight is never masked are left out.
        """
        return violations(self.selection.layers)

    def flops_ratios(self, *, mean: bool = False) -> dict[str, float]:
        """Return the multiply-adds of a training step over those of a dense step: arithmetic, paper and eligible.

        All weights of the model count, weighted by their multiply-adds in the first batches; before a batch, and in
        models with compiled parts, by their size. With ``mean`` it is the average over the steps so far, in which dense
        phases count as dense.
        """
        densities = {
            layer.name: mean_densities(layer) if mean else layer.gemms().densities()
            for layer in self.selection.layers
        }
        # Counts may all be 0, as of a batch that reached no counted GEMM, and weigh nothing.
        return flops_ratios(
            densities, self.macs if any(self.macs.values()) else self.selection.sizes
        )

    def shares(self) -> dict[str, float]:
        """Return the fraction of the parameters and, once a batch ran, of dense multiply-adds in masked layers."""
        # Layers of the method `dense` are among the layers, too.
        masked = [layer for layer in self.selection.layers if layer.spec.maskable]
        return shares_of(self.model, masked, self.macs)

    # --------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> State:
        """Return all that training needs beyond ``model.state_dict()``: packed masks, latent values, clocks.

        It holds plain tensors and primitives, so ``torch.load(weights_only=True)`` reads it. Its keys are explained in
        :mod:`lightning_nm.training.checkpoint`.
        """
        self._require_attached("state_dict")
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "preset": self.config.preset or "",
            "clock": self.clock,
            "stepped": self.training.stepped,
            "layers": {layer.name: layer_state(layer) for layer in self.selection.layers},
            "macs": dict(self.macs),
            "waiting": [layer.name for layer in self.selection.frozen],
            "ends": dict(self.selection.first_last),
            **self._skips(),
            "scale": self.scale or "",
            "base_density": self.config.base_density,
            "auto": "",  # 0.3 reads it: no training chooses patterns
        }

    def _skips(self) -> dict[str, bool]:
        return {"skip_first": self.settings.skip_first, "skip_last": self.settings.skip_last}

    def _use_scale(self, scale: Scale | None) -> None:
        self.scale = scale
        self.training.scale_rates(
            None if scale is None else ScaledLearningRates(self.config.base_density)
        )

    def _check_optimizers(self, layers: Sequence[NMLayer], scale: Scale | None) -> None:
        """Refuse registered optimizers that cannot follow a scale."""
        if scale is not None:
            rates = ScaledLearningRates(self.config.base_density)
            for optimizer in self.training.optimizers:
                rates.check_optimizer(optimizer, layers)

    def _scale_after(self, state: State) -> Scale | None:
        """The scale of a training that goes on from this state: that of the state, if none was asked for."""
        if self.config.scale == "auto":
            return state["scale"] or None
        return self.settings.scale

    def load_state_dict(self, state: State) -> None:
        """Restore masks, latent values and clocks; call it after ``model.load_state_dict``.

        Raises:
            ValueError: If the state is of another schema, layer set, pattern, method, estimator or shape, or does not
                belong to the model's weights. Nothing is changed then.
        """
        self._require_attached("load_state_dict")
        check_schema(state)
        scale = self._scale_after(state)
        check_scale(
            state,
            self.selection,
            scale,
            self.config.base_density,
            {} if self.clock else self.initial_factors,
        )
        loaded = check_state(state, self.selection, self._skips(), self.planned_steps, SHORT_NAMES)
        self._check_optimizers(self.selection.layers, scale)

        saved = state["layers"]
        # All checks have passed: from here on the model is changed.
        frozen = [layer for layer in self.selection.frozen if layer.name in saved]
        self._mask_frozen(frozen, saved)
        self._use_scale(scale)
        self.seed = state["seed"]
        apply_state(state, self.selection, loaded)
        for layer in self.selection.layers:
            forget_initial(layer)
        # Last: it begins a window, which asks the layers' restored counters.
        self.training.load(state["clock"], state["stepped"], state["macs"])
