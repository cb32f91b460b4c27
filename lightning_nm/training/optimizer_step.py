"""One optimizer step of the sparse training: gradients, counters, mask updates, in order.

:class:`TrainingStep` is read from top to bottom: :meth:`~TrainingStep.before_optimizer`, with complete gradients;
:meth:`~TrainingStep.after_clipping`, when the optimizer's step begins; :meth:`~TrainingStep.after_optimizer`, right
after each real step; :meth:`~TrainingStep.end_batch`. What follows are the optimizers and their hooks.

Whether the next accumulation window needs dL/dW_F at pruned entries is decided when a batch ends, so that micro-batches
and ranks agree. A compiled model has two graphs for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import install, uninstall
from lightning_nm.nn.state import keep_replaced
from lightning_nm.schedule import within
from lightning_nm.training.macs import MacsCounter
from lightning_nm.training.optimizers import (
    RegisteredOptimizer,
    changes_nothing,
    remove_parameters,
    unpack_state,
    unwrapped,
)
from lightning_nm.training.phases import begin_stage, refuse_late_sharding, zero_pruned_state
from lightning_nm.training.scale import ScaledLearningRates, forget_initial
from lightning_nm.training.watch import DirectReads, ForgottenCalls, OnDirectRead

_OBSERVED_LAYERS = 4
"""Layers whose gradient estimates are compared with exact gradients at a time."""


class TrainingStep:
    """Advances the counters of layers with the real steps of the optimizers that own their weights.

    Args:
        model: The model of the layers.
        observe_every: Training steps between two comparisons of gradient estimates; 0 for none.
        on_direct_read: What happens when other code reads a masked weight.
        in_plain_loop: Whether the user makes the calls of a step, and may forget one.
    """

    def __init__(
        self,
        model: nn.Module,
        observe_every: int,
        on_direct_read: OnDirectRead,
        in_plain_loop: bool,
    ) -> None:
        self.layers: Sequence[NMLayer] = ()
        self.clock = 0  # training steps: batches at whose end any optimizer had stepped
        self.stepped = False  # whether any optimizer has stepped since the last end_batch()
        self.macs: dict[str, int] = {}
        """Multiply-adds of every weight's dense forward GEMM in the first batches, by layer name."""
        self.counter: MacsCounter | None = None  # None once it has counted
        self.is_suspended: Callable[[], bool] | None = None
        """Asked at each step of an optimizer; if true, the step is none of this training and is ignored."""
        self.forgotten = ForgottenCalls(in_plain_loop)
        self.direct_reads = DirectReads(model, on_direct_read)
        self._model = model
        self.scale_rates(None)
        self._observe_every = observe_every
        # By id: an optimizer has no hash of its own to rely on.
        self._registered: dict[int, RegisteredOptimizer] = {}
        self.optimizers: list[Optimizer] = []
        """The registered optimizers, as a list of its own: every step and every batch asks for them."""
        # The hooks that are called for a layer in this window: none in a dense stage, and never those that its method
        # does not define. Most layers have few.
        self._hooks: dict[NMLayer, frozenset[str]] = {}

    def scale_rates(self, rates: ScaledLearningRates | None) -> None:
        """Multiply the learning rates of masked weights by these, or no more, from the next step on."""
        self._rates = rates
        # Within, the groups of a RegisteredOptimizer have the learning rates of its step.
        self._rates_shown: Callable[[RegisteredOptimizer], AbstractContextManager[Any]] = (
            nullcontext if rates is None else rates.shown
        )

    def start(self, layers: Sequence[NMLayer]) -> None:
        """Install the masks of layers that have some; others may join the list later, see :meth:`add`."""
        self.layers = layers
        self.stepped = False
        self.begin_window()
        install(self._model, layers)
        self.counter = MacsCounter(self._model)
        self.macs = self.counter.macs  # the same dictionary: it outlives the counter

    def add(self, layers: Sequence[NMLayer]) -> None:
        """Install the masks of layers just added to :attr:`layers`; registered optimizers may own them."""
        # First, since a method may refuse an optimizer below, and a loop may go on after that.
        for layer in layers:
            self._begin_window(layer)
        for known in self._registered.values():
            self._find_layers(known)
        self.direct_reads.watch(layers)
        install(self._model, layers)

    def stop(self, *, keep_parameters: bool = False) -> None:
        """Restore ordinary modules, and forget all optimizers.

        ``keep_parameters`` leaves the parameters that methods own in them.
        """
        self.direct_reads.close()
        self._close_counter()
        for known in self._registered.values():
            known.remove_hooks()
            if not keep_parameters:
                remove_parameters(known.optimizer, self.layers)
        self._registered.clear()
        self.optimizers.clear()
        self._hooks.clear()
        uninstall(self._model, self.layers)

    def _close_counter(self) -> None:
        if self.counter is not None:
            self.counter.close()
            self.counter = None

    # ---------------------------------------------------------------------------------------------- the order of a step

    @torch.no_grad()
    def before_optimizer(self, optimizer: Optimizer, loss_scale: float) -> None:
        """Shape the complete gradients, still multiplied by ``loss_scale``, of the optimizer's layers."""
        known = self._known(optimizer)
        if self.direct_reads.pending:
            self.direct_reads.check(known.layers)  # before methods add to the gradients
        known.announced = True
        if not known.in_closure:
            # A new step begins: what is left here is of one that raised an exception.
            known.depth = 0
        # Methods read the learning rates that the step will have, such as BAME for the size of a step.
        with self._rates_shown(known):
            for layer in known.layers:
                hooks = self._hooks[layer]
                # For these alone: full() gathers the weight and the gradient of all processes.
                if "penalty" in hooks or "before_step" in hooks:
                    with _true_gradients(layer, loss_scale), layer.view.full(gradient=True):
                        if "penalty" in hooks:
                            _add_penalty(layer)
                        if "before_step" in hooks:
                            layer.spec.method.before_step(layer, known.optimizer)
                # After the hooks, which tell by it a second call before the same step.
                layer.progress.shaped = True

    @torch.no_grad()
    def after_clipping(self, known: RegisteredOptimizer, view: Any) -> None:
        """Shape the gradients that the optimizer's own step is about to use, and set the learning rates of that step.

        ``view`` is what steps: the optimizer, or a view of it with scaled learning rates.
        """
        if _parameter_count(known.optimizer) != known.parameter_count:
            self._find_layers(known)  # parameters joined after before_step()
        if not known.announced and self.direct_reads.pending:
            self.direct_reads.check(known.layers)
        for layer in known.layers:
            if layer.parameters and is_frozen(layer):
                # What the method owns is frozen with the weight; freezing the module does not reach it.
                for parameter in layer.parameters.values():
                    parameter.grad = None
        try:
            with self._rates_shown(known):
                # Asked only of a step without before_step(), for it may look at all gradients.
                trains = known.announced or not changes_nothing(known.optimizer)
                for layer in known.layers:
                    if trains and "after_clipping" in self._hooks[layer]:
                        # A scaler unscales gradients before, or tells optimizers that do so themselves, as fused ones.
                        scale = getattr(known.optimizer, "grad_scale", None)
                        loss_scale = 1.0 if scale is None else float(scale)
                        with _true_gradients(layer, loss_scale), layer.view.full(gradient=True):
                            layer.spec.method.after_clipping(layer, known.optimizer)
        except BaseException:
            known.depth = 0  # the step ends here, without its post hook
            raise
        if self._rates is not None:
            # Outside of _rates_shown(): within it the groups have these rates already, and would be scaled twice.
            self._rates.scale(view, known.layers)

    @torch.no_grad()
    def after_optimizer(self, known: RegisteredOptimizer) -> None:
        """Count a real step of the optimizer, and let the methods repair what it did to the weights."""
        self.stepped = True
        for layer in known.layers:
            # The cheap question first: most weights are trained.
            if not layer.view.optimizer_param.requires_grad and is_frozen(layer):
                # The optimizer holds the weight and does not train it: the layer's counters stand still.
                if layer.is_random:
                    layer.draw_noise()
                continue
            # Before after_step(), which may move masks: the GEMMs of this step ran with the present ones.
            layer.costs.count_step(layer)
            layer.progress.step += 1
            layer.progress.shaped = False
            is_first = layer.progress.step == 1
            if is_first:
                forget_initial(layer)
            # The first step has found pruned entries in the weight; Adamax adds its epsilon to every entry's state.
            if is_first or isinstance(known.optimizer, torch.optim.Adamax):
                zero_pruned_state(layer, layer.forward_mask, self.optimizers)
            if "after_step" in self._hooks[layer]:
                with layer.view.full(gradient=True):
                    layer.spec.method.after_step(layer, known.optimizer)
            # A batch may hold several steps, and each needs random numbers of its own.
            if layer.is_random:
                layer.draw_noise()

    @torch.no_grad()
    def end_batch(self) -> bool:
        """Move the masks of the layers whose optimizer has stepped, and begin the next window.

        Returns:
            Whether any optimizer had stepped.
        """
        # A batch without a forward pass has counted nothing: the next one is counted.
        if self.macs and self.counter is not None:
            self.counter.end_batch()
            if self.macs:
                # Else parts are compiled, and the counts were dropped: the hooks in their graphs stay until stop().
                self._close_counter()
        # What is left here is of a step that raised an exception, or that a GradScaler skipped.
        for known in self._registered.values():
            known.depth = 0
            known.announced = False
            known.steps_in_batch = 0
        stepped = self.stepped
        self.stepped = False
        if stepped:
            self.clock += 1
        for layer in self.layers:
            progress = layer.progress
            progress.clock = self.clock
            progress.shaped = False
            has_stepped = progress.step > progress.updated_at
            if stepped and not has_stepped:
                # Another optimizer's turn, as in a GAN: the layer's GEMMs ran all the same.
                layer.costs.count_step(layer)
            # Phases begin and end for all layers together, whether or not they made a step.
            begins_phase = stepped and self.clock in progress.schedule
            # Most layers have no schedule of the user's, and so no stages.
            begins_stage = stepped and bool(progress.stages) and progress.begins_stage
            if has_stepped or begins_phase or begins_stage:
                self._move_masks(layer, begins_phase, begins_stage)
            # Each micro-batch has noise of its own, also without a step: errors of estimates then average out.
            if layer.is_random:
                layer.draw_noise()
        # Without a step the window goes on: its micro-batches must all do the same.
        if stepped:
            self.begin_window()
        return stepped

    def _move_masks(self, layer: NMLayer, begins_phase: bool, begins_stage: bool) -> None:
        method = layer.spec.method
        had_mask = layer.masks.has_forward
        # At a moment of its schedule also a method without an update() of its own: the base class's has first masks.
        if "update" in self._hooks[layer] or (begins_phase and not layer.progress.is_dense):
            with layer.view.full():
                method.update(layer)
        # The first masks have come to a trained weight without latent values: what they prune is zero from now on.
        if layer.step and not had_mask and not method.latent:
            layer.zero_pruned()
            zero_pruned_state(layer, layer.forward_mask, self.optimizers)
        if begins_stage:
            with layer.view.full():
                begin_stage(layer, self.optimizers)
            if layer.parameters:
                # The first masks may bring parameters of the method.
                for known in self._registered.values():
                    self._find_layers(known)
        layer.progress.updated_at = layer.progress.step
        # Weights that come back by a later load find no state of before these masks.
        layer.replaced_state = None

    def begin_window(self, *, loaded: bool = False) -> None:
        """Decide what the layers do until the next step, before its first forward pass: all micro-batches do the same.

        ``loaded``: the counters were loaded, and whether gradients are dense with them.
        """
        estimating = []
        for layer in self.layers:
            self._begin_window(layer, loaded=loaded)
            if layer.progress.estimating and layer.param.requires_grad:
                estimating.append(layer)
        if self.direct_reads.pending:
            self.direct_reads.watch(self.layers)
        if self._observe_every and estimating:
            self._observe_some(estimating)

    def _begin_window(self, layer: NMLayer, *, loaded: bool = False) -> None:
        method = layer.spec.method
        progress = layer.progress
        progress.clock = self.clock
        # defined_hooks() compares every hook of a step: it is asked again only where a stage may end or begin.
        if progress.stages or loaded or layer not in self._hooks:
            progress.enter_stage()
            self._hooks[layer] = frozenset() if progress.is_dense else method.defined_hooks()
        if not loaded:
            # The method may look at what the last window was asked for: it stays until the answer is there.
            asks = "needs_dense_gradient" in self._hooks[layer]
            progress.dense_gradient = asks and method.needs_dense_gradient(layer)
        if layer.spec.estimator is not None:
            schedule = progress.estimator_schedule
            progress.estimating = not schedule or within(schedule, self.clock)
            progress.observing = False
            if not progress.estimating:
                progress.observed = None

    def _observe_some(self, estimating: Sequence[NMLayer]) -> None:
        """Compare the estimates of a few layers in this window if it is a turn, or if nothing is known of any layer.

        The latter is so when a training resumes, and when the estimators begin between two turns.
        """
        is_turn = self.clock % self._observe_every == 0
        nothing_known = all(layer.progress.observed is None for layer in estimating)
        if not is_turn and not nothing_known:
            return
        # Each turn takes the next few layers, so that all of them are seen in time.
        # By the clock, so that a resumed run goes on with the same layers.
        first = self.clock // self._observe_every * _OBSERVED_LAYERS
        for k in range(min(_OBSERVED_LAYERS, len(estimating))):
            layer = estimating[(first + k) % len(estimating)]
            # The passes of a weight that tensor parallelism cuts are those of its shards.
            layer.progress.observing = not layer.spec.tensor_parallel

    def load(self, clock: int, stepped: bool, macs: dict[str, int]) -> None:
        """Go on at saved counters; those of the layers are loaded already."""
        self.clock = clock
        self.stepped = stepped
        for layer in self.layers:
            layer.progress.observed = None  # it is of other weights
        self.begin_window(loaded=True)
        if macs:
            # The counts of the first batches, which are not counted again.
            self.macs.clear()
            self.macs.update(macs)
            if self.counter is not None:
                self.counter.known = True

    # --------------------------------------------------------------------------------------------------- the optimizers

    def register(self, optimizer: Optimizer) -> None:
        """Count the real steps of an optimizer, or of the one that it wraps; does nothing if it is registered.

        Raises:
            TypeError: If it is not a ``torch.optim.Optimizer``.
            ValueError: If the method of a layer does not support the optimizer.
            RuntimeError: If the weights were sharded after their masks were installed.
        """
        refuse_late_sharding(self.layers)
        optimizer = unwrapped(optimizer)
        if not isinstance(optimizer, Optimizer):
            name = type(optimizer).__name__
            raise TypeError(
                f"{name} is not a torch.optim.Optimizer: pass the torch optimizer that it wraps"
            )
        if id(optimizer) in self._registered:
            return
        known = RegisteredOptimizer(optimizer)
        # Before it is registered: a method may refuse it, and then nothing has changed.
        self._find_layers(known)
        self._registered[id(optimizer)] = known
        self.optimizers.append(optimizer)
        known.handles = [
            optimizer.register_step_pre_hook(self._enter_step),
            optimizer.register_step_post_hook(self._leave_step),
        ]

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Register all optimizers of a training, and forget others, which were replaced: they train no weight now."""
        inner = [unwrapped(optimizer) for optimizer in optimizers]
        for key in self._registered.keys() - {id(optimizer) for optimizer in inner}:
            self._registered.pop(key).remove_hooks()
        self.optimizers = [known.optimizer for known in self._registered.values()]
        for optimizer in inner:
            if id(optimizer) not in self._registered:
                self.register(optimizer)

    def check_optimizer_states(self) -> None:
        """Let the methods refuse registered optimizers that lack the state to go on with; nothing is changed.

        Call it before the first batch, once the states of layers and optimizers are loaded.

        Raises:
            ValueError: If a method needs state that an optimizer does not have, naming the layer.
        """
        for optimizer in self.optimizers:
            for layer in self._known(optimizer).layers:
                unpack_state(optimizer, layer)
                layer.spec.method.check_optimizer_state(layer, optimizer)

    def unowned(self) -> list[str]:
        """The layers that no registered optimizer trains: their masks are not updated."""
        owned = {layer for optimizer in self.optimizers for layer in self._known(optimizer).layers}
        return [layer.name for layer in self.layers if layer not in owned]

    def unseen(self) -> list[str]:
        """The layers whose module was not called in the batches so far, though others were.

        Other code may read such a weight without its mask, for example by ``F.linear(x, module.weight)``; once it has a
        gradient, that is an error, see ``direct_reads`` of :class:`~lightning_nm.SparsityConfig`. Compiled modules are
        left out, since their calls are not seen.
        """
        if not self.macs:
            return []
        hidden = self.counter.hidden() if self.counter else set()
        return [
            layer.name
            for layer in self.layers
            if layer.name not in self.macs
            and layer.spec.module not in hidden
            # With a gradient it was called as layer.forward(x), without hooks, or `direct_reads` tells.
            and layer not in self.direct_reads.with_gradient
        ]

    def _known(self, optimizer: Optimizer) -> RegisteredOptimizer:
        """A registered optimizer, with the layers whose weight it holds now; parameters may join while training.

        Raises:
            RuntimeError: If the optimizer is not registered.
        """
        known = self._registered.get(id(optimizer)) or self._registered.get(
            id(unwrapped(optimizer))
        )
        if known is None:
            raise RuntimeError(
                "this optimizer is not registered: call sparsifier.register(optimizer) before training"
            )
        if _parameter_count(known.optimizer) != known.parameter_count:
            self._find_layers(known)
        return known

    def _find_layers(self, known: RegisteredOptimizer) -> None:
        """Find the layers of an optimizer, which may have got more parameters, as the layers may have."""
        check = None if self._rates is None else self._rates.check_optimizer
        known.find_layers(self.layers, check)
        known.parameter_count = _parameter_count(known.optimizer)

    # -------------------------------------------------------------------------------------------- hooks of their step()

    def _enter_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        # Within the step of a view, hooks are the view's.
        if id(optimizer) not in self._registered:
            return None
        if self.is_suspended is not None and self.is_suspended():
            # A search trains on, and brings these weights back at its end: what belongs to them is kept.
            for layer in self.layers:
                keep_replaced(layer)
            return None
        known = self._registered[id(optimizer)]
        known.depth += 1
        # The step of a subclass that calls its base class's runs both hooks twice: only the outermost counts.
        if known.depth > 1 and self._rates is None:
            return None
        # What steps: the optimizer, or the view of another sparsifier.
        view = args[0] if self._rates is None else self._rates.view(args[0])
        args = (view, *args[1:])
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if not callable(closure):
            self.after_clipping(known, view)
            return args, kwargs

        # Under Lightning the closure computes the gradients and clips them: what follows clipping comes after it.
        def closure_and_hooks() -> Any:
            known.in_closure = True
            try:
                result = closure()
            except BaseException:
                known.depth = 0  # the step ends here, without its post hook
                raise
            finally:
                known.in_closure = False
            # The closure may log the user's own rates: they are scaled after it.
            self.after_clipping(known, view)
            return result

        if is_positional:
            return (view, closure_and_hooks, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_hooks}

    def _leave_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self._registered:
            return
        if self.is_suspended is not None and self.is_suspended():
            return
        known = self._registered[id(optimizer)]
        is_nested = known.depth > 1
        known.depth = max(known.depth - 1, 0)
        if is_nested and self._rates is None:
            return
        if self._rates is not None:
            # torch hands on the arguments that the pre-hook has returned: the first one is the view that stepped.
            self._rates.write_back(args[0])
        with self._rates_shown(known):
            announced = known.announced
            known.announced = False
            # A fused optimizer skips a step with infinite gradients by itself, and still runs its hooks.
            found_inf = getattr(optimizer, "found_inf", None)
            if found_inf is not None and bool(found_inf):
                return
            if announced or not changes_nothing(optimizer):
                known.steps_in_batch += 1
                self.forgotten.unbaked |= bool(known.layers)
                # The first step of a batch, after before_step(), has forgotten nothing.
                if not announced or known.steps_in_batch > 1:
                    self.forgotten.optimizer_stepped(known.layers, announced, known.steps_in_batch)
                self.after_optimizer(known)


def _true_gradients(layer: NMLayer, loss_scale: float) -> AbstractContextManager[None]:
    """Within, methods see the gradients that no GradScaler has multiplied; those that they made are, afterwards."""
    return nullcontext() if loss_scale == 1 else _unscaled(layer, loss_scale)


def is_frozen(layer: NMLayer) -> bool:
    """Whether the steps of the optimizer that holds a weight leave it as it is, though its method trains it."""
    parameter = layer.view.optimizer_param
    return (
        layer.spec.method.trains_weight
        and not parameter.requires_grad
        and parameter.grad is None  # a gradient from before it was frozen is used still
    )


def _parameter_count(optimizer: Optimizer) -> int:
    count = 0
    for group in optimizer.param_groups:
        count += len(group["params"])
    return count


@contextmanager
def _unscaled(layer: NMLayer, loss_scale: float) -> Iterator[None]:
    parameters = layer.view.optimizer_param, *layer.parameters.values()
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(loss_scale)
    yield
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(loss_scale)


def _add_penalty(layer: NMLayer) -> None:
    """Add the gradient of the method's penalty."""
    # Hooks of a step run without autograd.
    with torch.enable_grad():
        penalty = layer.spec.method.penalty(layer)
        if penalty is None:
            return
        owners = [p for p in (layer.weight, *layer.parameters.values()) if p.requires_grad]
        # A penalty may depend on some of them alone.
        grads = torch.autograd.grad(penalty, owners, allow_unused=True)
    for owner, grad in zip(owners, grads, strict=True):
        if grad is not None:
            # In place: a gradient may be a view of a bucket of DistributedDataParallel.
            owner.grad = grad if owner.grad is None else owner.grad.add_(grad)
