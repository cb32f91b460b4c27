"""The base class of every method: which weights the forward and the dgrad GEMM use, and when the masks move."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_nm.functional.masks import magnitude_mask
from lightning_nm.functional.select import masked
from lightning_nm.nn.layer import NMLayer
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import DENSE, Moment

_STEP_HOOKS = (
    "penalty",
    "before_step",
    "after_clipping",
    "after_step",
    "update",
    "needs_dense_gradient",
    "gradient_at_pruned",
    "current_pattern",
)

_PROMISES = {
    "selects_entries": ("forward_weight", "training_weight", "backward_weight"),
    "restores_masks": ("init_masks",),
    "gradient_at_pruned": ("weight_gradient",),
}
"""What a class says of some hooks. It need not hold for other hooks that replace them in a subclass."""


def check_option(name: str, value: str, *options: str) -> None:
    """Raise ``ValueError`` for an unknown option."""
    if value not in options:
        raise ValueError(f"{name}={value!r} is unknown: use {' or '.join(map(repr, options))}")


def check_number(
    name: str, value: float, why: str, *, zero: bool = False, most: float = math.inf
) -> None:
    """Raise ``TypeError`` for a setting that is not a number, ``ValueError`` for one that is out of its range.

    Args:
        name: Of the setting.
        value: Of the setting.
        why: What the number is, or what to do: the end of the message.
        zero: Whether 0 is allowed; negative numbers are not.
        most: The largest number that is allowed; infinity allows any finite one.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} must be a number, not {type(value).__name__}: {why}")
    if not 0 <= value <= most or value == math.inf or (value == 0 and not zero):
        kind = "0 or a positive number" if zero else "a positive number"
        limit = "" if most == math.inf else f" of at most {most:g}"
        raise ValueError(f"{name}={value} must be {kind}{limit}: {why}")


def check_count(name: str, value: int, least: int) -> None:
    """Raise ``ValueError`` for a setting that is not an integer, or is below its least value."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")


def largest_entries(layer: NMLayer, pattern: NMPattern | None = None) -> Tensor:
    """The mask of the largest magnitudes of a layer's weight, by its own pattern or another one."""
    return layer.view.by_rows(lambda rows: magnitude_mask(rows, pattern or layer.pattern, dim=1))


def set_parameter(layer: NMLayer, name: str, values: Tensor) -> None:
    """Give a layer a parameter of the method's, or set the values of the one that it has."""
    if name in layer.parameters:
        # The optimizer may hold this object.
        layer.parameters[name].data.copy_(values)
    else:
        layer.parameters[name] = nn.Parameter(values)


def warn_of_late_stop(
    what: str, setting: Moment, stop: int, planned_steps: int | None, stacklevel: int = 3
) -> None:
    """Warn of a ``stop`` that the training does not reach.

    Args:
        what: What is the case then, a clause.
        setting: The `stop` that the user gave.
        stop: The training step that it is.
        planned_steps: Of the whole training; ``None`` if that is not known.
        stacklevel: As of :func:`warnings.warn`.
    """
    if planned_steps is not None and stop > planned_steps:
        warnings.warn(
            f"{what}: stop={setting} is step {stop} of {planned_steps}; use a smaller `stop`",
            stacklevel=stacklevel,
        )


def check_moving_masks(layer: NMLayer, stop: int) -> None:
    """Compare a user's ``schedule`` with the ``stop`` until which masks move.

    Raise a ``ValueError`` if the first masks come no earlier; warn if those of the layer's own pattern do not.
    """
    method = type(layer.spec.method).__name__
    begins = [begin for begin, name in layer.progress.stages if name != DENSE] or [0]
    # At 0 masks come without a schedule, too.
    if begins[0] and begins[0] >= stop:
        raise ValueError(
            f"the masks of {method} would never move: they come at step {begins[0]} by the schedule's dense_start, and "
            f"move until `stop`, step {stop}, alone (layer '{layer.name}'): use an earlier dense_start, or a later "
            "`stop`"
        )
    if begins[-1] and begins[-1] >= stop:
        warnings.warn(
            f"the {layer.spec.pattern} masks of {method} stand still: the schedule's ramp ends at step {begins[-1]}, "
            f"and masks move until `stop`, step {stop}, alone; use an earlier end of the ramp, or a later `stop`",
            stacklevel=2,
        )


def refuse_tensor_parallel(layer: NMLayer, what: str) -> None:
    """Raise a ``ValueError`` if each process multiplies by its own part of the weight, for a method that needs all.

    Args:
        layer: The layer.
        what: What the method needs the whole weight for, a noun phrase.
    """
    if layer.spec.tensor_parallel:
        raise ValueError(
            f"tensor parallelism cuts the weight of layer '{layer.name}', but {type(layer.spec.method).__name__} has "
            f"{what}: use DDP, name the layer in `exclude`, or use another method"
        )


class Method:
    """A method decides the values W_F and W_B that a layer's GEMMs use, when masks move, and how dW reaches W.

    The base class keeps every weight dense. One instance serves many layers: the state of one layer is kept on its
    :class:`~lightning_nm.nn.layer.NMLayer` (``set_masks``, ``buffers``, ``parameters``) or under ``layer.name``.

    The order of calls is: :meth:`check` and :meth:`check_optimizer`; :meth:`init_masks` once; then for each real
    optimizer step :meth:`before_step` (gradients are complete, unscaled and not yet clipped), :meth:`after_clipping`,
    the optimizer's step, :meth:`after_step`, and at the end of the batch :meth:`update`. A step that a gradient scaler
    skips has a :meth:`before_step` alone. :meth:`forward_weight` runs in every forward pass, :meth:`backward_weight`
    and :meth:`weight_gradient` in every backward pass; these three are traced by ``torch.compile`` and must be plain
    tensor code.
    """

    short_name: str = ""
    """The name of a built-in method in YAML and on command lines."""
    sparse_forward: bool = False
    """Whether the method makes the forward weight N:M along `in`."""
    sparse_dgrad: bool = False
    """Whether the method makes the backward weight N:M along `out`."""
    dense_start: Moment = 0
    """How long training stays dense before the first masks, for a method that can: training steps, or a share."""
    dense_end: Moment = 0
    """How long it is dense again at the end, likewise."""
    plans_dense_phases: bool = False
    """Whether the moments of the method depend on ``dense_start`` and ``dense_end``, so that a user's ``schedule`` sets
    these. Of other methods the package begins and ends the masks by :meth:`init_masks` and :meth:`end_masks`. Without
    masks, and before :meth:`init_masks`, :meth:`forward_weight` must return the weight itself then."""
    refused_schedule: Mapping[str, str] = MappingProxyType({})
    """Why the method refuses parts of a user's ``schedule``, and the way out; by ``dense_start``, ``ramp`` and
    ``dense_end``."""
    may_start_early: bool = False
    """Whether masks may come before the first step of :meth:`sparse_window`, which is then the latest."""
    uses_masks: bool = False
    """Whether the method prunes by the layer's masks."""
    transposable: bool = False
    """Whether the forward mask is N:M along `out`, too, in layers where dgrad can be N:M."""
    paper_counts_masked: bool = False
    """Whether the paper counts GEMMs as sparse that are masked, but not N:M along the contraction axis."""
    trains_weight: bool = True
    """Whether the weight itself is trained. If not, it may be frozen: its layer is masked all the same if an optimizer
    holds the weight, and this optimizer trains ``layer.parameters``."""
    latent: bool = True
    """Whether pruned entries of the parameter hold values that matter."""
    selects_entries: bool = False
    """Whether W_F and W_B are W under the layer's masks: then kernels mask while they pack, and processes mask their
    shards. A subclass of :class:`MaskMethod` that overrides ``forward_weight`` or ``backward_weight`` must set it."""
    restores_masks: bool = False
    """Whether a saved state replaces all that :meth:`init_masks` does, which is then not called for a layer whose
    training continues. A class that overrides ``init_masks`` of a method where it is ``True`` must set it."""
    passes_read_buffers: bool = True
    """Whether forward or backward passes read ``layer.buffers``; if not, the buffers may change their number and shapes
    without another compiled graph."""
    headline: str = "kept_magnitude"
    """The statistic for progress bars: one of the sparsifier's or the method's own."""
    has_training_weight: ClassVar[bool] = False
    """Whether a subclass overrides :meth:`training_weight`; set by the class itself."""
    fixed: tuple[str, ...] = ()
    """Settings that a saved state depends on: resuming with other values is refused."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A plain attribute: compiled graphs read it.
        cls.has_training_weight = cls.training_weight is not Method.training_weight
        for promise, hooks in _PROMISES.items():
            cls._refuse_inherited(promise, hooks)

    @classmethod
    def _refuse_inherited(cls, promise: str, hooks: Sequence[str]) -> None:
        """Refuse a class that overrides one of these hooks and inherits what its base says of them."""
        # The first class in the order of inheritance decides, as it does when the hooks are called.
        for base in cls.__mro__:
            if promise in vars(base):
                return
            overridden = [hook for hook in hooks if hook in vars(base)]
            if overridden:
                break
        inherited = getattr(cls, promise)
        if inherited in (False, Method.gradient_at_pruned):
            return  # this promises nothing
        remedy = f"set {promise} = True or False in the class"
        if callable(inherited):
            remedy = f"define {promise}(), too: is the gradient at pruned entries needed?"
        raise TypeError(
            f"{base.__name__} overrides {overridden[0]}(), so {promise} of its base class may not hold any more: "
            f"{remedy}"
        )

    def defined_hooks(self) -> frozenset[str]:
        """The hooks of a step that this method overrides; the others are not called."""
        found = set()
        for name in _STEP_HOOKS:
            hook = getattr(self, name)
            # A bound method keeps its function; one that was set on the object may be a plain function.
            if getattr(hook, "__func__", hook) is not getattr(Method, name):
                found.add(name)
        return frozenset(found)

    @property
    def has_own_backward_weight(self) -> bool:
        """Whether the class makes W_B in another way than W_F, and than by a backward mask."""
        inherited = (Method.backward_weight, MaskMethod.backward_weight)
        return type(self).backward_weight not in inherited

    @property
    def changes_pattern(self) -> bool:
        """Whether the pattern of the masks may change, so that a plan of the costs looks at more than the schedule."""
        return type(self).current_pattern is not Method.current_pattern

    def schedule(self, planned_steps: int | None) -> tuple[int, ...]:
        """The training steps at which something begins or ends; resolved once and kept as ``layer.progress.schedule``.

        At each of them :meth:`update` is called for every layer, whether or not it made a step.

        Raises:
            ValueError: If that takes the number of planned steps, and it is not known.
        """
        return ()

    def layer_schedule(self, layer: NMLayer, planned_steps: int | None) -> tuple[int, ...]:
        """The schedule of one layer, for a method whose moments depend on its pattern; :meth:`schedule` by default."""
        return self.schedule(planned_steps)

    def sparse_window(self, layer: NMLayer) -> tuple[int, ...]:
        """The training steps between which the layer is N:M, where there is a ``dense_start`` or a ``dense_end``.

        As :func:`~lightning_nm.schedule.resolve_window` gives them; by default the layer's schedule.
        """
        return layer.progress.schedule

    def check(self, planned_steps: int | None) -> None:
        """Refuse settings that cannot work with this plan, by a ``ValueError``; warn of those that have no effect."""

    def needs_dense_gradient(self, layer: NMLayer) -> bool:
        """Whether the window that begins at ``layer.progress.clock`` needs dL/dW_F at pruned entries, too.

        The answer is kept as ``layer.progress.dense_gradient``, which :meth:`weight_gradient` may read. It is asked
        again when the window ends.
        """
        return False

    def gradient_at_pruned(self, layer: NMLayer) -> bool:
        """Whether the step of the present window needs the weight's gradient at entries that the forward mask prunes.

        ``False`` promises that 0 does there: kernels and ``nm_ddp`` may then leave these entries out, and
        :meth:`weight_gradient` gets 0 or the gradient there. A class that overrides that hook and not this one answers
        ``True``. All processes must answer the same: it may depend on counters, schedule, ``dense_gradient`` and
        whether there is a mask, not on weights.
        """
        return True

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse an optimizer that the method cannot work with, by a ``ValueError`` that names it and the layer."""

    def check_optimizer_state(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse to go on without state that the optimizer should have by now, by a ``ValueError`` that says how.

        It is called before the first batch of a fit, when masks and optimizers have what a checkpoint holds of them.
        A plain loop calls ``sparsifier.training.check_optimizer_states()`` for it.
        """

    def init_masks(self, layer: NMLayer) -> None:
        """Choose the first masks of a layer whose weight has just been set or loaded; the weight is not written to.

        It is called again at each pattern of a user's ``schedule``, which is ``layer.pattern`` then. A weight keeps its
        pruned entries until the next step ends: a fit that fails before has changed nothing, and a saved state that
        keeps more entries may be loaded next.
        """

    def end_masks(self, layer: NMLayer) -> None:
        """End the masks for the dense stage at the end of a user's ``schedule``; no hook of a step is called then."""
        layer.set_masks(None)

    def check_stages(self, layer: NMLayer) -> None:
        """Refuse stages of a user's ``schedule``, ``layer.progress.stages``, that leave the method nothing to do.

        By a ``ValueError``; a warning if that holds for some of them. The layer's schedule is planned.
        """

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W_F, of the weight's shape; built with a select, so that pruned entries are +0.0."""
        return weight

    def training_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """What both GEMMs use in place of W_F and W_B while the layer's module is in training mode; W_F by default.

        For methods that train by other values than those of the model, such as random or soft masks. State dicts,
        files, statistics and evaluation have W_F. Where it is overridden, the products of layers count as dense.
        """
        return self.forward_weight(layer, weight)

    def backward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W_B, of the weight's shape; the forward weight unless overridden."""
        return self.forward_weight(layer, weight)

    def weight_gradient(
        self, layer: NMLayer, weight: Tensor, grad: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Turn ``dL/dW_F`` into the gradients of the weight and of ``layer.parameters``, in that order.

        ``grad`` may be overwritten. The default is the straight-through estimator: the weight receives it unchanged.
        """
        return (grad, *[None] * len(layer.parameters))

    def penalty(self, layer: NMLayer) -> Tensor | None:
        """A scalar term added to the loss once per real optimizer step; ``None`` for no term.

        Its gradient is added after all-reduce and unscaling and before clipping, so that it means the same under
        accumulation, mixed precision and data parallelism.
        """
        return None

    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Shape the complete gradient just before the optimizer uses it; the :meth:`penalty` is in it already."""

    def lost_without_before_step(self, layer: NMLayer) -> str:
        """What a step of this layer lacks if a training loop does not call :meth:`before_step`; empty for nothing.

        A noun phrase, for a warning. By default the hooks that are called then and that the class defines.
        """
        defined = self.defined_hooks()
        lost = []
        for hook in ("penalty", "before_step"):
            if hook in defined:
                lost.append(f"{type(self).__name__}.{hook}()")
        return " and ".join(lost)

    def after_clipping(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Shape the complete gradient when the optimizer's step begins: after clipping, if a loop clips."""

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Repair the weight right after an optimizer step, as methods without latent weights must.

        ``layer.step`` has advanced. Masks that belong to one certain step move here, others in :meth:`update`.
        """

    def update(self, layer: NMLayer) -> None:
        """Move the masks: at the end of a batch with a step of this layer, and at every step of the layer's schedule.

        ``layer.step`` counts the layer's optimizer steps, ``layer.progress.updated_at`` is the last update's, and
        ``layer.progress.clock`` counts training steps, this one included.
        """

    def finish(self, layer: NMLayer) -> None:
        """Do what was scheduled for the end of the training: the planned training has ended.

        The clock may lie before the planned end: it does not count the steps that a gradient scaler skipped.
        """

    def current_pattern(self, layer: NMLayer) -> NMPattern | None:
        """The pattern of the masks now, for a method whose N changes while it trains; ``layer.pattern`` by default.

        ``None`` while the masks hold to no N:M, as those that shrink entry by entry. Then no product counts as N:M, the
        share of kept entries is measured, and ``violations`` of the sparsifier goes by the layer's pattern.
        """
        return layer.pattern

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """Further statistics of these layers, whose methods are of this class; logged as ``nm/...``."""
        return {}

    def __repr__(self) -> str:
        settings = ", ".join(
            f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_")
        )
        return f"{type(self).__name__}({settings})"


class Dense(Method):
    """No masks: the baseline of comparisons, by the same code."""

    short_name = "dense"
    headline = "grad_snr"
    selects_entries = True


class MaskMethod(Method):
    """W_F is W under the forward mask, W_B is W under the backward mask."""

    sparse_forward = True
    uses_masks = True
    selects_entries = True

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """``where(forward_mask, W, 0)``."""
        mask = layer.masks.forward_view
        if mask is None:
            return weight
        return masked(weight, mask)

    def backward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """``where(backward_mask, W, 0)``; W_F for a layer without a backward mask."""
        mask = layer.masks.backward
        if mask is None:
            return self.forward_weight(layer, weight)
        return masked(weight, mask)
