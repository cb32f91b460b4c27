"""NMSparsifier: a model, a method and an estimator, without Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_nm.distributed.consistency import RankComparison, reduce_gradients
from lightning_nm.estimators import EstimatorName, GradientEstimator
from lightning_nm.methods import Method, MethodName
from lightning_nm.nn.install import install, uninstall
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.names import plain_name
from lightning_nm.nn.selection import Plan, as_globs, select
from lightning_nm.nn.sharding import is_sharded, reshard
from lightning_nm.nn.state import (
    changed_settings,
    fits,
    layer_state,
    load_layer_state,
    refuse_others,
    saved_layer,
    state_difference,
)
from lightning_nm.pattern import PatternLike
from lightning_nm.rules import make_rules
from lightning_nm.training.macs import MacsCounter
from lightning_nm.training.model_statistics import ModelFigures
from lightning_nm.training.phases import changed_schedules, plan_schedules
from lightning_nm.training.step import TrainingStep

SCHEMA = 1


class NMSparsifier(ModelFigures):
    """Trains a model's weights under an N:M method, in any training loop.

    Args:
        model: The model; its modules and parameters stay the same objects. All of it where FSDP2 shards it, not a part:
            what gathers the weights must be in it.
        pattern: The N:M pattern, see :meth:`NMPattern.parse`.
        method: A short name (``"bi-mask"``) or a :class:`Method`.
        grad_estimator: What replaces dY in the wgrad GEMM: a short name (``"mvue"``) or a
            :class:`GradientEstimator`; ``None`` keeps it.
        include: Globs over module names that are masked; ``None`` takes every layer that can be. A glob without
            wildcards names a layer that must be maskable.
        exclude: Globs over module names that stay dense.
        rules: Mappings with ``include`` and any of ``pattern``, ``method``, ``grad_estimator``; the first that matches
            a layer replaces the arguments above for it.
        skip_first_last: Leave the first convolution and the last linear layer dense.
        conv_layout: ``"channels"``: convolution blocks along `in` for a fixed kernel tap, the hardware's order.
            ``"flat"``: along the flattened ``(in, *kernel)``, the papers' order.
        seed: Base of all random choices; equal on all ranks.
        planned_steps: Training steps (calls of :meth:`step` after an optimizer's) that the whole training will take,
            for schedules given as shares of it.
        data_rank: Which part of the global batch this process sees, its rank by default: processes that see the same,
            as those of a tensor-parallel group do, must draw the same random numbers for weights that they all hold.
        grad_snr_every: Training steps between two comparisons of estimated weight gradients with exact ones, each in a
            few layers, which take turns; 0 for none.

    Raises:
        ValueError: For an impossible pattern, an unknown method or estimator, a bad rule or another argument out of
            its range, naming it.

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
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        rules: Sequence[Mapping[str, Any]] | None = None,
        seed: int = 0,
        *,
        skip_first_last: bool = True,
        conv_layout: Literal["channels", "flat"] = "channels",
        planned_steps: int | None = None,
        data_rank: int | None = None,
        grad_snr_every: int = 100,
    ) -> None:
        if conv_layout not in ("channels", "flat"):
            raise ValueError(f"conv_layout={conv_layout!r} is unknown: use 'channels' or 'flat'")
        if not isinstance(grad_snr_every, int) or isinstance(grad_snr_every, bool) or grad_snr_every < 0:
            raise ValueError(f"grad_snr_every={grad_snr_every} must be a number of training steps, or 0 for never")
        self.model = model
        self.rules = make_rules(pattern, method, grad_estimator, include, rules)
        self.exclude = as_globs(exclude, "exclude") or ()
        self.skip_first_last = skip_first_last
        self.conv_layout = conv_layout
        self.seed = seed
        self.planned_steps = planned_steps
        self.data_rank = data_rank
        self.grad_snr_every = grad_snr_every
        self.plan = Plan()
        self.attached = False
        self.macs: dict[str, int] = {}
        self._counter: MacsCounter | None = None
        self._step = TrainingStep(())
        self._comparison = RankComparison(())

    # --------------------------------------------------------------------------------------------- in and out

    @property
    def skipped(self) -> dict[str, str]:
        """Why each other weight is dense, by layer name."""
        return self.plan.skipped

    def attach(self, state: Mapping[str, Any] | None = None) -> NMSparsifier:
        """Select the layers, choose the first masks and install them; does nothing when attached.

        Everything is checked and every mask is made before the model is touched.

        Args:
            state: The state of a training that is to go on, for :meth:`load_state_dict` to load next: its schedules
                hold, and need no plan.

        Raises:
            ValueError: If the selection fails, see :func:`~lightning_nm.nn.selection.select`, or the schedule of a
                method or an estimator does not go with ``planned_steps``.
        """
        if not self.attached:
            reshard([module for module in self.model.modules() if isinstance(module, FSDPModule)])
            self.plan = select(
                self.model,
                self.rules,
                self.exclude,
                skip_first_last=self.skip_first_last,
                conv_layout=self.conv_layout,
                seed=self.seed,
            )
            saved = _by_plain_name(state["layers"]) if state else {}
            plan_schedules(self.plan.layers, saved, self.planned_steps)
            for layer in self.plan.layers:
                self._first_masks(layer, saved.get(layer.name))
                layer.noise.follow_data(self.data_rank)
                layer.draw_noise()
            self._step = TrainingStep(self.plan.layers, self.grad_snr_every)
            self._step.begin_window()
            install(self.model, self.plan.layers)
            self._comparison = RankComparison(self.plan.layers)
            self._counter = MacsCounter(self.model)
            self.macs = self._counter.macs
            self.attached = True
        return self

    @staticmethod
    def _first_masks(layer: NMLayer, saved: dict[str, Any] | None) -> None:
        """The masks of a saved state that fits the layer, or those that the method chooses: a search may take long."""
        if saved is not None and not state_difference(layer, saved):
            layer.adopt(saved_layer(layer, saved))
        else:
            with layer.full():
                layer.method.init_masks(layer)

    @property
    def clock(self) -> int:
        """Calls of :meth:`step` before which any optimizer had stepped: the training steps that a plan counts."""
        return self._step.clock

    def detach(self, *, keep_parameters: bool = False) -> None:
        """Leave ordinary modules that hold the latent weights; :meth:`bake` first for the sparse ones.

        Args:
            keep_parameters: Leave the parameters that methods own in the optimizers, whose state dict is then as that
                of the training.
        """
        self._step.release(keep_parameters=keep_parameters)
        self._close_counter()
        if self.attached:
            uninstall(self.model, self.plan.layers)
            self.attached = False

    @torch.no_grad()
    def bake(self) -> None:
        """Set every masked parameter to W_F: the latent values of pruned entries are gone from the model."""
        for layer in self.plan.layers:
            layer.local_weight.copy_(layer.local_forward_weight())

    # -------------------------------------------------------------------------------------------------- a step

    def register(self, optimizer: Optimizer) -> None:
        """Follow an optimizer: count its real steps and keep its weights N:M; harmless when done before.

        Raises:
            TypeError: If this is not a ``torch.optim.Optimizer``, whose hooks tell when a step was made.
            ValueError: If the method cannot work with the optimizer, naming it and the layer.
            RuntimeError: If the weights were sharded after :meth:`attach`, naming a layer.
        """
        self._require_attached("register")
        for layer in self.plan.layers:
            if is_sharded(layer.param) and not layer.sharded:
                raise RuntimeError(
                    f"the weight of layer '{layer.name}' was sharded after its masks were installed: call fully_shard "
                    "or parallelize_module first, then attach()"
                )
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"{type(optimizer).__name__} is not a torch.optim.Optimizer: its steps cannot be followed, so N:M "
                "could be lost; pass the torch optimizer that it wraps"
            )
        self._step.register(optimizer)

    @property
    def unowned(self) -> list[str]:
        """Masked layers that no registered optimizer trains: their clocks and masks stand still."""
        return [layer.name for layer in self._step.unowned()]

    def before_step(self, optimizer: Optimizer, loss_scale: float = 1.0) -> None:
        """Shape the complete gradients just before ``optimizer.step()``, before clipping.

        Args:
            optimizer: A registered optimizer.
            loss_scale: What the gradients are still multiplied by; 1 once they are unscaled.
        """
        self._step.before_optimizer(optimizer, loss_scale)

    def step(self) -> bool:
        """Move the masks of every layer whose optimizer has stepped since the last call; call it after every batch.

        At a step of a layer's schedule they move in any case: phases begin and end for all layers together.

        Batches that only accumulate gradients are no exception: estimators draw other random numbers for each.

        Returns:
            Whether any optimizer had stepped.

        Raises:
            RuntimeError: If no optimizer was registered, so that no step was ever counted.
        """
        if not self.attached or not self._step.optimizers:
            self._require_attached("step")
            raise RuntimeError("no optimizer is registered: call sparsifier.register(optimizer) before training")
        if self.macs and self._counter is not None:
            self._counter.settle()
            if self.macs:
                self._close_counter()
        return self._step.end_batch()

    def compare_ranks(self, group: dist.ProcessGroup | None = None) -> None:
        """Fail in all processes if the masks, or what decides on them, are not equal in all; call it in all.

        One small all-reduce; nothing in a single process. Masks that did not move since are not read again.

        Args:
            group: The processes that train this model together; all by default.

        Raises:
            RuntimeError: Naming the layers, what differs and the way out.
        """
        self._require_attached("compare_ranks")
        self._comparison(group)

    def reduce_gradients(self, group: dist.ProcessGroup | None = None) -> None:
        """Average the gradients of the parameters that methods own; call it in all processes, before unscaling.

        DistributedDataParallel does not know them. Nothing is sent if there are none.

        Args:
            group: The processes that train this model together; all by default.
        """
        self._require_attached("reduce_gradients")
        reduce_gradients(self.plan.layers, group)

    def _close_counter(self) -> None:
        if self._counter is not None:
            self._counter.close()
            self._counter = None

    @property
    def unseen(self) -> list[str]:
        """Masked layers whose module was not called in the batches so far, though others were.

        Such a weight may be read by other code, as ``F.linear(x, module.weight)`` does, which no mask reaches. Calls
        of compiled modules are not seen, and nothing is said of them.
        """
        if not self.macs:
            return []
        hidden = self._counter.hidden() if self._counter else set()
        return [layer.name for layer in self.plan.layers if layer.name not in self.macs and layer.module not in hidden]

    @property
    def short_of_tokens(self) -> dict[str, str]:
        """Layers that saw fewer tokens in the first batch than the estimator's blocks have, with both numbers."""
        found = {}
        for layer in self.plan.layers:
            pattern = None if layer.estimator is None else layer.estimator.pattern_of(layer)
            tokens = self._counter.least.get(layer.name, 0) // layer.param.numel() if self._counter else 0
            if pattern is not None and layer.param.requires_grad and 0 < tokens < pattern.m:
                found[layer.name] = f"{tokens} tokens, blocks of {pattern.m}"
        return found

    # ---------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that training needs beyond ``model.state_dict()``: packed masks, latent values, clocks.

        Plain tensors and primitives, so ``torch.load(weights_only=True)`` reads it.
        """
        self._require_attached("state_dict")
        return {
            "schema": SCHEMA,
            "seed": self.seed,
            "clock": self.clock,
            "stepped": self._step.stepped,
            "layers": {layer.name: layer_state(layer) for layer in self.plan.layers},
            "macs": dict(self.macs),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore after ``model.load_state_dict``: masks, latent values, clocks.

        Raises:
            ValueError: If the state is of another schema, layer set, pattern, method, estimator or shape, or does not
                belong to the model's weights. Nothing is changed then.
        """
        self._require_attached("load_state_dict")
        check_schema(state)
        layers, saved = self.layers, _by_plain_name(state["layers"])
        refuse_others(layers, saved)
        unveiled = {}  # weights whose latent values came back with them: they were loaded over themselves
        for name, layer in layers.items():
            if fits(layer, saved[name]):
                continue
            forward = layer.forward_weight()
            if layer.replaced_state is not None and fits(layer, saved[name], forward):
                unveiled[name] = forward
            else:
                raise ValueError(
                    f"the masks in the checkpoint do not belong to the weights of layer '{name}': load the "
                    "checkpoint's weights into the model before its sparsifier state; where they are averages, resume "
                    "with the averaging callback, too"
                )
        self.seed = state["seed"]
        for name, then, here in changed_schedules(self.plan.layers, saved, self.planned_steps):
            warnings.warn(
                f"this training began with {name} scheduled at steps {then}, which stays; the settings and the plan of "
                f"now would make that {here}",
                stacklevel=2,
            )
        changes = {change for name, layer in layers.items() for change in changed_settings(layer, saved[name])}
        if changes:
            warnings.warn(f"this training goes on with other settings: {'; '.join(sorted(changes))}", stacklevel=2)
        for name, layer in layers.items():
            layer.noise.reseed(self.seed)
            if name in unveiled:
                layer.local_weight.copy_(layer.local_shard(unveiled[name]))
            load_layer_state(layer, saved[name])
            layer.forget_replaced_state()
        self._step.load(state["clock"], state["stepped"])
        if state["macs"]:
            self.macs.clear()
            self.macs.update(_by_plain_name(state["macs"]))
            if self._counter is not None:
                self._counter.known = True


def _by_plain_name(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Version 0.1.0 saved the names of wrapped layers with their wrappers."""
    return {plain_name(name): value for name, value in saved.items()}


def check_schema(state: dict[str, Any]) -> None:
    """Refuse a state that this version cannot read.

    Raises:
        ValueError: Naming both schema numbers.
    """
    if state.get("schema") != SCHEMA:
        raise ValueError(
            f"sparsifier state of schema {state.get('schema')!r}, but this version reads schema {SCHEMA}: use the "
            "version of lightning_nm that wrote it"
        )
