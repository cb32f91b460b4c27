"""Everything that advances when an optimizer steps, in order.

:class:`TrainingStep` is read from top to bottom: :meth:`~TrainingStep.before_optimizer`, with complete gradients;
:meth:`~TrainingStep.after_clipping`, when the optimizer's step begins; :meth:`~TrainingStep.after_optimizer`, right
after each real step; :meth:`~TrainingStep.end_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.state import layer_state
from lightning_nm.schedule import within
from lightning_nm.training.direct_reads import DirectReads
from lightning_nm.training.forgotten import ForgottenCalls
from lightning_nm.training.optimizers import (
    OwnedLayers,
    changes_nothing,
    is_frozen,
    owned_layers,
    remove_parameters,
    unpack_state,
)
from lightning_nm.training.phases import begin_stage, zero_pruned_state
from lightning_nm.training.scale import ScaledLearningRates, check_optimizer

_OBSERVED_LAYERS = 4
"""Layers whose gradient estimates are compared with exact gradients at a time."""


class TrainingStep:
    """Advances the counters of layers with the real steps of the optimizers that own their weights.

    Args:
        layers: The masked layers.
        observe_every: Training steps between two comparisons of gradient estimates; 0 for none.
        clock: Training steps so far.
        forgotten: What warns of calls that the loop leaves out.
        rates: What scales the learning rates of masked weights within a step.
        is_suspended: Asked at each step of an optimizer; if true, the step is none of this training and is ignored.
        direct_reads: What finds weights that other code reads.
    """

    def __init__(
        self,
        layers: Sequence[NMLayer],
        observe_every: int = 0,
        clock: int = 0,
        forgotten: ForgottenCalls | None = None,
        rates: ScaledLearningRates | None = None,
        is_suspended: Callable[[], bool] | None = None,
        direct_reads: DirectReads | None = None,
    ) -> None:
        self.layers = layers
        self._is_suspended = is_suspended or (lambda: False)
        self.direct_reads = direct_reads
        self.forgotten = forgotten or ForgottenCalls()
        self.rates = rates
        self.observe_every = observe_every
        self.clock = clock  # training steps: batches at whose end any optimizer had stepped
        self.stepped = False  # whether any optimizer has stepped since the last end_batch()
        # The keys of these are the ids of optimizers: an optimizer has no hash of its own to rely on.
        self.optimizers: dict[int, OwnedLayers] = {}  # the registered ones
        self._handles: dict[int, list[RemovableHandle]] = {}
        self._depth: dict[int, int] = {}  # of nested calls of step(), see _enter_step()
        self._in_closure: set[int] = set()  # those whose step is computing its gradients
        self._announced: set[int] = set()  # those whose gradients before_optimizer() has shaped
        # Hooks that a method does not define are not called at all: most layers have few.
        self._hooks = {layer.spec.method: layer.spec.method.defined_hooks() for layer in layers}

    def add(self, layers: Sequence[NMLayer]) -> None:
        """Start counting the steps of layers just added to :attr:`layers`; registered optimizers may own them."""
        for layer in layers:
            self._hooks[layer.spec.method] = layer.spec.method.defined_hooks()
        for known in list(self.optimizers.values()):
            self._find_owned(known.optimizer)
        for layer in layers:
            self._begin_window(layer)
        if self.direct_reads is not None:
            self.direct_reads.watch(layers)

    def _hooks_of(self, layer: NMLayer) -> frozenset[str]:
        """The hooks that are called for a layer: none in a dense stage."""
        return frozenset() if layer.progress.is_dense else self._hooks[layer.spec.method]

    def before_optimizer(self, optimizer: Optimizer, loss_scale: float = 1.0) -> None:
        """Shape the complete gradients, still multiplied by ``loss_scale``, of the optimizer's layers."""
        owned = self.owned(optimizer)
        if self.direct_reads is not None:
            self.direct_reads.check(owned)  # before methods add to the gradients
        self._announced.add(id(optimizer))
        if id(optimizer) not in self._in_closure:
            # A new step begins: what is left here is of one that raised an exception.
            self._depth.pop(id(optimizer), None)
        # Methods read the learning rates that the step will have, such as BAME for the size of a step.
        with self._rates_shown(optimizer):
            for layer in owned:
                method = layer.spec.method
                hooks = self._hooks_of(layer)
                # Methods see true gradients, whatever a GradScaler has multiplied them by.
                with _unscaled(layer, loss_scale), layer.full(gradient=True):
                    if "penalty" in hooks:
                        _add_penalty(layer)
                    if "before_step" in hooks:
                        method.before_step(layer, optimizer)
                layer.progress.shaped = True

    def after_clipping(self, optimizer: Optimizer) -> None:
        """Shape the gradients that the optimizer's step is about to use."""
        shaping = [
            layer for layer in self.owned(optimizer) if "after_clipping" in self._hooks_of(layer)
        ]
        if not shaping:
            return
        announced = id(optimizer) in self._announced
        if not announced and changes_nothing(optimizer):
            return
        loss_scale = _scale_within_step(optimizer)
        for layer in shaping:
            with _unscaled(layer, loss_scale), layer.full(gradient=True):
                layer.spec.method.after_clipping(layer, optimizer)

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Count a real step of the optimizer, and let the methods repair what it did to the weights."""
        self.stepped = True
        for layer in self.owned(optimizer):
            if is_frozen(layer):
                # The optimizer holds the weight and does not train it: the layer's counters stand still.
                layer.draw_noise()
                continue
            hooks = self._hooks_of(layer)
            layer.costs.count_step(layer)
            layer.progress.step += 1
            layer.progress.shaped = False
            # The first step has found pruned entries in the weight; Adamax adds its epsilon to every entry's state.
            if layer.progress.step == 1 or isinstance(optimizer, torch.optim.Adamax):
                self._zero_pruned_state(layer)
            if "after_step" in hooks:
                with layer.full(gradient=True):
                    layer.spec.method.after_step(layer, optimizer)
            # A batch may hold several steps, and each needs random numbers of its own.
            layer.draw_noise()

    def end_batch(self) -> bool:
        """Move the masks of the layers whose optimizer has stepped, and begin the next window.

        Returns:
            Whether any optimizer had stepped.
        """
        # What is left here is of a step that raised an exception, or that a GradScaler skipped.
        self._depth.clear()
        self._announced.clear()
        self.forgotten.batch_ended()
        stepped = self.stepped
        self.stepped = False
        if stepped:
            self.clock += 1
        for layer in self.layers:
            self._end_batch(layer, stepped)
        if stepped:
            self.begin_window()
        return stepped

    def _end_batch(self, layer: NMLayer, stepped: bool) -> None:
        method = layer.spec.method
        hooks = self._hooks_of(layer)
        progress = layer.progress
        progress.clock = self.clock
        progress.shaped = False
        has_stepped = progress.step > progress.updated_at
        if stepped and not has_stepped:
            # Another optimizer's turn, as in a GAN: the layer's products ran all the same.
            layer.costs.count_step(layer)
        # Phases begin and end for all layers together, whether or not they made a step.
        begins_phase = stepped and self.clock in progress.schedule
        begins_stage = stepped and progress.begins_stage
        if has_stepped or begins_phase or begins_stage:
            had_mask = layer.masks.has_forward
            if "update" in hooks:
                with layer.full():
                    method.update(layer)
            if not had_mask and layer.step:
                self._zero_pruned_state(layer)
            if begins_stage:
                self._begin_stage(layer)
            progress.updated_at = progress.step
            # Weights that come back by a later load find no state of before these masks.
            layer.replaced_state = None
        layer.draw_noise()

    def _zero_pruned_state(self, layer: NMLayer) -> None:
        """Leave optimizers nothing of the entries that are pruned from now on, where they have no latent values."""
        kept = layer.forward_mask
        if kept is not None and not layer.spec.method.latent:
            zero_pruned_state(layer, kept, [known.optimizer for known in self.optimizers.values()])

    def _begin_stage(self, layer: NMLayer) -> None:
        """Begin a stage of the schedule, in all layers at the same training step."""
        with layer.full():
            begin_stage(layer, [known.optimizer for known in self.optimizers.values()])
        if layer.parameters:
            # The first masks may bring parameters of the method.
            self.add(())

    def begin_window(self, *, loaded: bool = False) -> None:
        """Decide what the layers do until the next step, before its first forward pass: all micro-batches do the same.

        ``loaded``: the counters were loaded, and whether gradients are dense with them.
        """
        for layer in self.layers:
            self._begin_window(layer, loaded=loaded)
        if self.direct_reads is not None:
            self.direct_reads.watch(self.layers)
        if self.observe_every:
            self._observe_some()

    def _observe_some(self) -> None:
        """Compare the estimates of a few layers in this window if it is a turn, or if nothing is known of any layer.

        The latter is so when a training resumes, and when the estimators begin between two turns.
        """
        estimating = [
            layer
            for layer in self.layers
            if layer.progress.estimating and layer.param.requires_grad
        ]
        is_turn = self.clock % self.observe_every == 0
        nothing_known = all(layer.progress.observed is None for layer in estimating)
        if not is_turn and not nothing_known:
            return
        # Each turn takes the next few layers, so that all of them are seen in time.
        turn = self.clock // self.observe_every
        first = turn * _OBSERVED_LAYERS
        for k in range(min(_OBSERVED_LAYERS, len(estimating))):
            layer = estimating[(first + k) % len(estimating)]
            # The passes of a weight that tensor parallelism cuts are those of its shards.
            layer.progress.observing = not layer.spec.tensor_parallel

    def _begin_window(self, layer: NMLayer, *, loaded: bool = False) -> None:
        method = layer.spec.method
        progress = layer.progress
        progress.clock = self.clock
        progress.enter_stage()
        if not loaded:
            # The method may look at what the last window was asked for: it stays until the answer is there.
            asks = "needs_dense_gradient" in self._hooks_of(layer)
            progress.dense_gradient = asks and method.needs_dense_gradient(layer)
        if layer.spec.estimator is not None:
            schedule = progress.estimator_schedule
            progress.estimating = not schedule or within(schedule, self.clock)
            progress.observing = False
            if not progress.estimating:
                progress.observed = None

    def load(self, clock: int, stepped: bool) -> None:
        """Go on at saved counters; those of the layers are loaded already."""
        self.clock = clock
        self.stepped = stepped
        for layer in self.layers:
            layer.progress.observed = None  # it is of other weights
        self.begin_window(loaded=True)

    def register(self, optimizer: Optimizer) -> None:
        """Count the real steps of an optimizer; does nothing if it is registered."""
        if id(optimizer) in self.optimizers:
            return
        self._find_owned(optimizer)
        enter = optimizer.register_step_pre_hook(self._enter_step)
        leave = optimizer.register_step_post_hook(self._leave_step)
        self._handles[id(optimizer)] = [enter, leave]

    def check_optimizer_states(self) -> None:
        """Let the methods refuse optimizers without the state to go on with, once it has the form of this version."""
        for known in list(self.optimizers.values()):
            for layer in self.owned(known.optimizer):
                unpack_state(known.optimizer, layer)
                layer.spec.method.check_optimizer_state(layer, known.optimizer)

    def forget_others(self, optimizers: Sequence[Optimizer]) -> None:
        """Forget the registered optimizers that are not among these: they were replaced."""
        in_use = {id(optimizer) for optimizer in optimizers}
        for key in self.optimizers.keys() - in_use:
            for handle in self._handles.pop(key):
                handle.remove()
            del self.optimizers[key]
            self._depth.pop(key, None)
            self._announced.discard(key)

    def owned(self, optimizer: Optimizer) -> list[NMLayer]:
        """The layers whose weight the optimizer holds now; parameters may join while training.

        Raises:
            RuntimeError: If the optimizer is not registered.
        """
        known = self.optimizers.get(id(optimizer))
        if known is None:
            raise RuntimeError(
                "this optimizer is not registered: call sparsifier.register(optimizer) before training"
            )
        held = sum(len(group["params"]) for group in optimizer.param_groups)
        if held != known.parameters:
            return self._find_owned(optimizer)
        return known.layers

    def _find_owned(self, optimizer: Optimizer) -> list[NMLayer]:
        """Find the layers of an optimizer, among those that it did not hold before."""
        known = self.optimizers.get(id(optimizer))
        if self.rates is not None:
            check_optimizer(optimizer, self.layers)
        owned = owned_layers(optimizer, self.layers, known)
        self.optimizers[id(optimizer)] = owned
        return owned.layers

    def unowned(self) -> list[NMLayer]:
        """The layers that no registered optimizer owns."""
        owned: set[NMLayer] = set()
        for known in list(self.optimizers.values()):
            owned.update(self.owned(known.optimizer))
        return [layer for layer in self.layers if layer not in owned]

    def release(self, *, keep_parameters: bool = False) -> None:
        """Forget all optimizers; ``keep_parameters`` leaves the parameters that methods own in them."""
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()
        if self.direct_reads is not None:
            self.direct_reads.close()
        if not keep_parameters:
            for known in self.optimizers.values():
                remove_parameters(known.optimizer, self.layers)
        self._handles.clear()
        self.optimizers.clear()
        self._depth.clear()
        self._announced.clear()

    def _enter_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        # The step of a subclass that calls its base class's runs both hooks twice: only the outermost counts. Within
        # the step of a view it is the view's.
        if id(optimizer) not in self.optimizers:
            return None
        if self._is_suspended():
            self._keep_states()
            return None
        depth = self._depth.get(id(optimizer), 0) + 1
        self._depth[id(optimizer)] = depth
        if depth > 1 and self.rates is None:
            return None
        # What steps: the optimizer, or the view of another sparsifier.
        view = args[0] if self.rates is None else self.rates.view(args[0])
        args = (view, *args[1:])
        is_positional = len(args) > 1
        closure = args[1] if is_positional else kwargs.get("closure")
        if not callable(closure):
            self._enter_after_clipping(optimizer, view)
            return args, kwargs

        # Under Lightning the closure computes the gradients and clips them: what follows clipping comes after it.
        def closure_and_hooks() -> Any:
            self._in_closure.add(id(optimizer))
            try:
                result = closure()
            except BaseException:
                # The step ends here, without its post hook.
                self._depth.pop(id(optimizer), None)
                raise
            finally:
                self._in_closure.discard(id(optimizer))
            # The closure may log the user's own rates: they are scaled after it.
            self._enter_after_clipping(optimizer, view)
            return result

        if is_positional:
            return (view, closure_and_hooks, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_and_hooks}

    def _keep_states(self) -> None:
        """Keep what belongs to the present weights: those that come back after the search find it again."""
        for layer in self.layers:
            if layer.replaced_state is None:
                layer.replaced_state = layer_state(layer)

    def _leave_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if id(optimizer) not in self.optimizers or self._is_suspended():
            return
        depth = self._depth.get(id(optimizer), 1) - 1
        self._depth[id(optimizer)] = max(depth, 0)
        if depth != 0 and self.rates is None:
            return
        if self.rates is not None:
            self.rates.write_back(args[0])
        with self._rates_shown(optimizer):
            self._after_step(optimizer)

    def _enter_after_clipping(self, optimizer: Optimizer, view: Any) -> None:
        """What happens between clipping and the optimizer's own step, which has the learning rates set here."""
        if self.direct_reads is not None and id(optimizer) not in self._announced:
            self.direct_reads.check(self.owned(optimizer))
        for layer in self.owned(optimizer):
            if layer.parameters and is_frozen(layer):
                # What the method owns is frozen with the weight; freezing the module does not reach it.
                for parameter in layer.parameters.values():
                    parameter.grad = None
        try:
            with self._rates_shown(optimizer):
                self.after_clipping(optimizer)
        except BaseException:
            self._depth.pop(id(optimizer), None)
            raise
        if self.rates is not None:
            self.rates.scale(view, self.owned(optimizer))

    def _rates_shown(self, optimizer: Optimizer) -> Any:
        """Within, the optimizer's groups have the learning rates of its step."""
        if self.rates is None:
            return nullcontext()
        return self.rates.shown(optimizer, self.owned(optimizer))

    def _after_step(self, optimizer: Optimizer) -> None:
        announced = id(optimizer) in self._announced
        self._announced.discard(id(optimizer))
        # A fused optimizer skips a step with infinite gradients by itself, and still runs its hooks.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            return
        if announced or not changes_nothing(optimizer):
            self.forgotten.optimizer_stepped(optimizer, self.owned(optimizer), announced)
            self.after_optimizer(optimizer)


def _scale_within_step(optimizer: Optimizer) -> float:
    """The factor of the gradients when the step begins.

    A gradient scaler unscales them before, or tells optimizers that do so themselves, as fused ones, by `grad_scale`.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def _unscaled(layer: NMLayer, loss_scale: float) -> Any:
    """Within, the gradients are not multiplied by the loss scale; those that a method made are afterwards, too."""
    return nullcontext() if loss_scale == 1 else _without_scale(layer, loss_scale)


@contextmanager
def _without_scale(layer: NMLayer, loss_scale: float) -> Iterator[None]:
    _for_gradients(layer, lambda grad: grad.div_(loss_scale))
    yield
    _for_gradients(layer, lambda grad: grad.mul_(loss_scale))


def _for_gradients(layer: NMLayer, change: Callable[[Tensor], Tensor]) -> None:
    for parameter in (layer.view.optimizer_param, *layer.parameters.values()):
        if parameter.grad is not None:
            change(parameter.grad)


def _add_penalty(layer: NMLayer) -> None:
    """Add the gradient of the method's penalty."""
    with torch.enable_grad():
        penalty = layer.spec.method.penalty(layer)
        if penalty is None:
            return
        owners = [p for p in (layer.weight, *layer.parameters.values()) if p.requires_grad]
        grads = torch.autograd.grad(penalty, owners, allow_unused=True)
    for owner, grad in zip(owners, grads, strict=True):
        if grad is not None:
            owner.grad = grad if owner.grad is None else owner.grad.add_(grad)
