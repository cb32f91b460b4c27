"""NMSparsifier: a model, a method and an estimator, without Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_nm.config import SHORT_NAMES, SparsityConfig, chosen_config, refuse_unknown
from lightning_nm.estimators import GradientEstimator
from lightning_nm.methods import Method
from lightning_nm.nn.costs import mean_densities
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import Rule, Selection, install, uninstall, warn_of_adapters
from lightning_nm.nn.state import layer_state
from lightning_nm.nn.weight import known_size, reshard
from lightning_nm.pattern import PatternLike
from lightning_nm.schedule import UnknownLength
from lightning_nm.short_names import EstimatorName, MethodName
from lightning_nm.training.checkpoint import (
    SparsifierState,
    check_scale,
    check_state,
    warn_of_changes,
)
from lightning_nm.training.direct_reads import DirectReads
from lightning_nm.training.forgotten import ForgottenCalls
from lightning_nm.training.macs import MacsCounter
from lightning_nm.training.optimizers import (
    held_by,
    is_frozen,
    trained_by,
    trained_layer,
    unwrapped,
)
from lightning_nm.training.phases import (
    choose_masks,
    plan_schedules,
    refuse_late_sharding,
    refuse_to_mask,
    told_as_dense,
)
from lightning_nm.training.ranks import RankComparison, reduce_gradients
from lightning_nm.training.scale import ScaledLearningRates, rescale_initial
from lightning_nm.training.statistics import (
    flops_ratios,
    joint_statistics,
    layer_statistics,
    layers_short_of_tokens,
    mean_flip_rate,
    share_of_products,
    violations,
)
from lightning_nm.training.step import TrainingStep


class NMSparsifier:
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
        """Multiply-adds of every weight's dense forward GEMM in the first batches, by layer name.

        Those of all weights of kinds without an adapter are under :data:`~lightning_nm.training.macs.OTHERS`.
        """
        self.initial_factors: dict[str, float] = {}
        self._counter: MacsCounter | None = None
        self._is_suspended: Callable[[], bool] | None = None
        self._forgotten = ForgottenCalls()
        self._step = TrainingStep((), forgotten=self._forgotten)
        self._comparison = RankComparison(())

    @property
    def layers(self) -> dict[str, NMLayer]:
        """The masked layers by name."""
        return {layer.name: layer for layer in self.selection.layers}

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
            ValueError: If the selection fails, see :func:`~lightning_nm.nn.selection.select`, or a schedule
                does not fit ``planned_steps``.
        """
        if self.attached:
            return self
        saved = SparsifierState.from_dict(state) if state else None
        try:
            selection = self._select(saved, optimizers)
        except UnknownLength as error:
            if not self._forgotten.in_plain_loop:
                raise
            raise ValueError(f"{error}, or pass planned_steps to NMSparsifier") from error
        self._install(selection)
        if (
            self._forgotten.in_plain_loop and self.trained_dense
        ):  # a callback warns when its training starts
            warnings.warn(told_as_dense(self.trained_dense), stacklevel=2)
        is_untrained = saved is None and self.clock == 0
        if self.config.scale == "supar" and is_untrained:
            self._rescale_initial()
        return self

    def _rescale_initial(self) -> None:
        for layer in self.selection.layers:
            if layer.masks.has_forward:
                factor = rescale_initial(layer, self.config.base_density)
                self.initial_factors[layer.name] = factor

    def _select(
        self, saved: SparsifierState | None, optimizers: Iterable[Optimizer] | None
    ) -> Selection:
        """Select the layers, and choose their first masks; nothing is installed."""
        reshard([module for module in self.model.modules() if isinstance(module, FSDPModule)])
        is_trained = None
        is_held = None
        if self.config.frozen != "mask":
            # Both read the optimizers, which may be given as an iterator.
            optimizers = None if optimizers is None else list(optimizers)
            is_trained = trained_by(optimizers)
            is_held = held_by(optimizers)
        saved_layers = saved.layers if saved else {}
        selection = self.settings.select(
            self.model,
            seed=self.seed,
            is_trained=is_trained,
            is_held=is_held,
            continued=saved_layers,
            saved_first_last=saved.first_last if saved else None,
        )
        warn_of_adapters(self.model, [rule.pattern for rule in self.rules])
        # Frozen layers get no masks yet, but a schedule that does not fit is an error now.
        plan_schedules(selection.frozen, saved_layers, self.planned_steps, self.clock)
        self._choose_masks(selection.layers, saved_layers)
        return selection

    def _install(self, selection: Selection) -> None:
        self.selection = selection
        rates = None
        if self.config.scale is not None:
            rates = ScaledLearningRates(self.config.base_density)
        self._step = TrainingStep(
            selection.layers,
            observe_every=self.config.grad_snr_every,
            clock=self.clock,
            forgotten=self._forgotten,
            rates=rates,
            is_suspended=self._is_suspended,
            direct_reads=DirectReads(self.model, self.config.direct_reads),
        )
        self._step.begin_window()
        install(self.model, selection.layers)
        self._comparison = RankComparison(selection.layers)
        self._counter = MacsCounter(self.model)
        self.macs = self._counter.macs
        self.attached = True

    def _choose_masks(self, layers: Sequence[NMLayer], saved: Mapping[str, dict[str, Any]]) -> None:
        choose_masks(layers, saved, self.planned_steps, self.clock, self.data_rank)

    def mask_unfrozen(self) -> list[NMLayer]:
        """Mask the frozen layers that a registered optimizer trains by now, and return them; see :meth:`follow`, too.

        :meth:`step` calls it at the end of a batch. Call it right after layers were unfrozen, for masks in the next
        forward pass. All processes must unfreeze the same layers.

        Raises:
            ValueError: If a weight holds NaN, or a method does not support the optimizer; nothing is changed then.
        """
        self._require_attached("mask_unfrozen")
        if not self.selection.frozen or not self._step.optimizers:
            return []
        optimizers = [known.optimizer for known in self._step.optimizers.values()]
        unfrozen = [layer for layer in self.selection.frozen if trained_layer(layer, optimizers)]
        self._mask_frozen(unfrozen, {})
        return unfrozen

    def _mask_frozen(self, layers: list[NMLayer], saved: Mapping[str, dict[str, Any]]) -> None:
        if not layers:
            return
        refuse_to_mask(layers, [known.optimizer for known in self._step.optimizers.values()])
        for layer in layers:
            layer.to_weight_device()
            layer.costs.charge_dense(self.clock)  # the steps so far, in which it was dense
        self._choose_masks(layers, saved)
        self.selection.unfreeze(layers)
        self._step.add(layers)
        install(self.model, layers)

    @property
    def has_pending_step(self) -> bool:
        """Whether an optimizer has stepped since the last call of :meth:`step`."""
        return self._step.stepped

    @property
    def frozen_again(self) -> list[str]:
        """Masked layers that have trained and are frozen now: their masks and counters stand still."""
        return [layer.name for layer in self.selection.layers if layer.step and is_frozen(layer)]

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
            layer.view.local.copy_(layer.forward_weight(local=True))
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

    def check_optimizer_states(self) -> None:
        """Let the methods refuse registered optimizers that lack the state to go on with; nothing is changed.

        Call it before the first batch, once :meth:`load_state_dict` and those of the optimizers were called.

        Raises:
            ValueError: If a method needs state that an optimizer does not have, naming the layer.
        """
        self._require_attached("check_optimizer_states")
        self._step.check_optimizer_states()

    def called_by_callback(self, *, is_suspended: Callable[[], bool] | None = None) -> None:
        """Tell, before :meth:`attach`, that a Trainer's callback makes the calls of a step: it forgets none.

        While ``is_suspended()`` is true, methods and counters ignore the steps of optimizers: they are none of this
        training, as those of a search for a learning rate.
        """
        self._is_suspended = is_suspended
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
            self._counter.end_batch()
            if self.macs:
                self._close_counter()
        stepped = self._step.end_batch()
        self.mask_unfrozen()
        return stepped

    def finish(self) -> None:
        """Let the methods do now what they have scheduled for the end of the training, such as CAST's projection.

        :meth:`step` does it at the last planned step. A training that takes fewer, because it stops early or a gradient
        scaler skips some, calls this after its last :meth:`step`. All processes must.
        """
        self._require_attached("finish")
        for layer in self.selection.layers:
            with layer.full():
                layer.spec.method.finish(layer)

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

    def _require_attached(self, call: str) -> None:
        if not self.attached:
            raise RuntimeError(f"the sparsifier is not attached: call attach() before {call}()")

    def _close_counter(self) -> None:
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    def stats(self) -> dict[str, float]:
        """Return the statistics of all masked layers together, and ``train_flops_ratio``, the hardware-eligible ratio.

        They are ``density`` (share of set bits of the forward mask), ``flip_rate`` (share of its bits that the last
        update changed), ``kept_magnitude`` (sum of |W_F| over sum of |W|), ``overlap`` (share of the forward mask's
        entries that the backward mask keeps), and those of the layers' methods; where gradient estimates were observed
        (every ``grad_snr_every`` steps in a few layers, never in compiled ones), also ``grad_snr`` (norm of dW over
        the norm of its error) and ``grad_density`` (share of nonzeros in E(dY)).

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
        return {layer.name: layer_statistics(layer) for layer in self.selection.layers}

    def mean_flip_rate(self) -> float:
        """Return the ``flip_rate`` of :meth:`stats` averaged over all steps so far."""
        return mean_flip_rate(self.selection.layers)

    def violations(self) -> int:
        """Count the blocks of forward weights that hold more than N nonzeros, also where there is no mask now.

        With masks it is 0 unless a method is wrong. Layers whose forward weight is never masked are left out.
        """
        return violations(self.selection.layers)

    def flops_ratios(self) -> dict[str, float]:
        """Return the multiply-adds of a training step over those of a dense step: arithmetic, paper and eligible.

        All weights of the model count, weighted by their multiply-adds in the first batches; before a batch, and in
        models with compiled parts, by their size.
        """
        densities = {name: layer.gemms().densities() for name, layer in self.layers.items()}
        return flops_ratios(densities, self._costs())

    def mean_flops_ratios(self) -> dict[str, float]:
        """Return :meth:`flops_ratios` averaged over the steps so far; dense phases count as dense."""
        densities = {name: mean_densities(layer) for name, layer in self.layers.items()}
        return flops_ratios(densities, self._costs())

    def _costs(self) -> dict[str, int]:
        return self.macs if any(self.macs.values()) else self.selection.sizes

    def shares(self, gradients: bool = False) -> dict[str, float]:
        """Return the share of the parameters and, once a batch ran, of dense multiply-adds in masked layers.

        With ``gradients``, the layers with a gradient estimator count instead.
        """
        if gradients:
            layers = [
                layer
                for layer in self.selection.layers
                if layer.spec.estimator is not None and layer.param.requires_grad
            ]
        else:
            layers = [layer for layer in self.selection.layers if layer.spec.maskable]
        all_parameters = sum(map(known_size, self.model.parameters()))
        shares = {"parameters": sum(layer.view.shape.numel() for layer in layers) / all_parameters}
        all_macs = sum(self.macs.values())
        if all_macs:
            shares["flops"] = sum(self.macs.get(layer.name, 0) for layer in layers) / all_macs
        return shares

    def share_of_products(self) -> float:
        """Return the share of the parameters in masked layers, without the weights that are looked up alone.

        A lookup costs no multiply-adds, so a large embedding does not lessen what masks can gain.
        """
        return share_of_products(self.model, self.selection.layers)

    @property
    def unseen(self) -> list[str]:
        """Masked layers whose module was not called in the batches so far, though others were.

        Other code may read such a weight without its mask, for example by ``F.linear(x, module.weight)``; once it has a
        gradient, that is an error, see ``direct_reads`` of :class:`~lightning_nm.SparsityConfig`. Compiled modules are
        left out, since their calls are not seen.
        """
        if not self.macs:
            return []
        hidden = self._counter.hidden() if self._counter else set()
        reads = self._step.direct_reads
        told = reads.with_gradient if reads is not None else set()
        return [
            layer.name
            for layer in self.selection.layers
            if layer.name not in self.macs
            and layer.spec.module not in hidden
            # With a gradient it was called as layer.forward(x), without hooks, or `direct_reads` tells.
            and layer not in told
        ]

    @property
    def trained_dense(self) -> dict[str, str]:
        """Layers whose weight is trained dense, and why: only GEMMs of the backward pass are N:M; frozen ones, too."""
        return {
            layer.name: layer.spec.forward_reason
            for layer in (*self.selection.layers, *self.selection.frozen)
            if layer.spec.forward_reason and layer.spec.method.sparse_forward
        }

    @property
    def short_of_tokens(self) -> dict[str, str]:
        """Layers whose first batch had fewer tokens than a block of the estimator, with both numbers."""
        if self._counter is None:
            return {}
        return layers_short_of_tokens(self.selection.layers, self._counter.least)

    def state_dict(self) -> dict[str, Any]:
        """Return all that training needs beyond ``model.state_dict()``: packed masks, latent values, clocks.

        It holds plain tensors and primitives, so ``torch.load(weights_only=True)`` reads it.
        """
        self._require_attached("state_dict")
        state = SparsifierState(
            layers={layer.name: layer_state(layer) for layer in self.selection.layers},
            seed=self.seed,
            clock=self.clock,
            stepped=self._step.stepped,
            preset=self.config.preset or "",
            macs=self.macs,
            frozen_layers=[layer.name for layer in self.selection.frozen],
            first_last=self.selection.first_last,
            skip_first=self.settings.skip_first,
            skip_last=self.settings.skip_last,
            scale=self.config.scale or "",
            base_density=self.config.base_density,
        )
        return state.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore masks, latent values and clocks; call it after ``model.load_state_dict``.

        Raises:
            ValueError: If the state is of another schema, layer set, pattern, method, estimator or shape, or does not
                belong to the model's weights. Nothing is changed then.
        """
        self._require_attached("load_state_dict")
        saved = SparsifierState.from_dict(state)
        check_scale(
            saved,
            self.selection,
            scale=self.config.scale,
            base_density=self.config.base_density,
            clock=self.clock,
            initial_factors=self.initial_factors,
        )
        checked = check_state(saved, self.selection, SHORT_NAMES)
        masked_first_last = self.settings.masked_in(state)
        warn_of_changes(checked.layers, saved.layers, self.planned_steps, masked_first_last)

        self._mask_frozen(checked.frozen, saved.layers)
        self.seed = saved.seed
        checked.apply()
        self._step.load(saved.clock, saved.stepped)
        if saved.macs:
            # The counts of the first batches, which are not counted again.
            self.macs.clear()
            self.macs.update(saved.macs)
            if self._counter is not None:
                self._counter.known = True
