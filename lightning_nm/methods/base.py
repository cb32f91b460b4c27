"""The base class of every method: which weights the forward and the dgrad GEMM use, and when the masks move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.functional.masks import backward_mask, magnitude_mask
from lightning_nm.functional.select import masked
from lightning_nm.nn.layer import NMLayer
from lightning_nm.pattern import NMPattern
from lightning_nm.schedule import Phases, Schedule, Steps, refuse_second, resolve_moment
from lightning_nm.spelling import with_settings

Gradients = tuple[Tensor | None, ...]
"""The gradients of a weight and of the parameters that the method owns, ``None`` for none."""

# The hooks that defined_hooks() looks for. Most methods override few of them, and the others are not called.
_STEP_HOOKS = (
    "penalty",
    "before_step",
    "after_clipping",
    "after_step",
    "update",
    "needs_dense_gradient",
    "gradient_at_pruned",
    "current_pattern",
    "training_weight",
)

# The hooks that make the values of the GEMMs: a kernel that masks while it packs takes the place of all three.
_WEIGHT_HOOKS = ("forward_weight", "backward_weight", "training_weight")


def largest_entries(layer: NMLayer, pattern: NMPattern | None = None) -> Tensor:
    """The mask of the largest magnitudes of a layer's weight, by its own pattern or another one."""
    # No block crosses a row: processes that shard the rows mask their own, and gather the mask instead of the weight.
    return layer.view.by_rows(lambda rows: magnitude_mask(rows, pattern or layer.pattern, dim=1))


def backward_entries(layer: NMLayer, forward: Tensor | None) -> Tensor:
    """The backward mask of a layer for a forward mask, or None for a dense weight, under the layer's permutation."""
    rows = layer.view.rows
    backward_rows = backward_mask(
        rows(layer.weight.detach()),
        None if forward is None else rows(forward),
        layer.pattern,
        layer.masks.permutation,
        layer.spec.groups,
    )
    return layer.view.unrows(backward_rows)


def set_tensor(tensors: dict[str, Any], name: str, values: Tensor) -> None:
    """Add a tensor to a layer's buffers or parameters, or set the values of the one that is there.

    An optimizer may hold a parameter, and compiled graphs read a buffer.
    """
    if name in tensors:
        tensors[name].copy_(values)
    else:
        tensors[name] = values


def has_ended(layer: NMLayer) -> bool:
    """Whether the last moment of the schedule has come."""
    # The clock counts finished steps: right after training step k it is k.
    return layer.progress.clock >= layer.progress.schedule[-1]


def kept_gradient(layer: NMLayer, grad: Tensor) -> Tensor:
    """The gradient at kept entries, 0 at pruned ones, in place; all of it in a window whose gradient is dense."""
    if not layer.progress.dense_gradient:
        layer.masks.zero_pruned(grad)
    return grad


def weighted_mean(name: str, parts: Iterable[tuple[float, float]]) -> dict[str, float]:
    """A statistic of layers from its sum and its number of summands in each of them; none without summands."""
    total = count = 0.0
    for own_total, own_count in parts:
        total += own_total
        count += own_count
    return {name: total / count} if count else {}


def _place(cls: type, hook: str) -> int:
    """Which of the classes that a class inherits from, in the order of inheritance, defines a hook."""
    return next(place for place, base in enumerate(cls.__mro__) if hook in vars(base))


class Method:
    """A method decides the values W_F and W_B that a layer's GEMMs use, when masks move, and how dW reaches W.

    The base class keeps every weight dense. One instance serves many layers: the state of one layer is kept on its
    :class:`~lightning_nm.nn.layer.NMLayer` (``set_masks``, ``buffers``, ``parameters``) or under ``layer.name``.

    The order of calls is: :meth:`check` and :meth:`check_optimizer`; :meth:`init_masks` once; then for each real
    optimizer step :meth:`before_step` (gradients are complete, unscaled and not yet clipped), :meth:`after_clipping`,
    the optimizer's step, :meth:`after_step`, and at the end of the batch :meth:`update`. A step that a gradient scaler
    skips has a :meth:`before_step` alone. :meth:`forward_weight` runs in every forward pass, :meth:`backward_weight`
    and :meth:`weight_gradient` in every backward pass; these three are traced by ``torch.compile`` and must be plain
    tensor code. The hooks of steps and masks run without autograd.
    """

    short_name: str = ""
    """The name of a built-in method in YAML and on command lines."""
    sparse_forward: bool = False
    """Whether the method makes the forward weight N:M along `in`."""
    sparse_dgrad: bool = False
    """Whether the method makes the backward weight N:M along `out`."""
    transposable: bool = False
    """Whether the forward mask is N:M along `out`, too, in layers where dgrad can be N:M."""
    paper_counts_masked: bool = False
    """Whether the paper counts GEMMs as sparse that are masked, but not N:M along the contraction axis."""
    trains_weight: bool = True
    """Whether the weight itself is trained. If not, it may be frozen: its layer is masked all the same if an optimizer
    holds the weight, and this optimizer trains ``layer.parameters``."""
    latent: bool = True
    """Whether pruned entries of the parameter hold values that matter."""
    passes_read_buffers: bool = True
    """Whether forward or backward passes read ``layer.buffers``; if not, the buffers may change their number and shapes
    without another compiled graph."""
    headline: str = "kept_magnitude"
    """The statistic for progress bars: one of the sparsifier's or the method's own."""
    fixed: tuple[str, ...] = ()
    """Settings that a saved state depends on: resuming with other values is refused."""

    # The settings that schedule() turns into training steps.
    _scheduled: ClassVar[tuple[str, ...]] = ()
    # Why follow() refuses parts of a user's schedule, by part.
    _refused: ClassVar[Mapping[str, str]] = {}

    # What follows from the class itself: nobody sets it.
    uses_masks: ClassVar[bool] = False
    """Whether the method prunes by the layer's masks: a :class:`MaskMethod`."""
    selects_entries: ClassVar[bool] = False
    """Whether W_F and W_B are W under the layer's masks: kernels then mask while they pack, and processes mask their
    shards. It is so for a :class:`MaskMethod` that overrides none of the hooks which make weights, and for
    :class:`Dense`."""
    has_training_weight: ClassVar[bool] = False
    """Whether the class overrides :meth:`training_weight`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Derive what follows from the hooks that a class overrides, as plain attributes: compiled graphs read them."""
        super().__init_subclass__(**kwargs)
        # Compared as functions: a hook that a class between this one and Method overrides counts, too.
        cls.has_training_weight = cls.training_weight is not Method.training_weight
        # A class selects entries if all of its weights are made by the hooks of one that does.
        bases = [base for base in cls.__mro__[1:] if issubclass(base, Method)]
        selecting = [base for base in bases if base.selects_entries]
        if selecting:
            cls.selects_entries = any(
                all(getattr(cls, hook) is getattr(base, hook) for hook in _WEIGHT_HOOKS)
                for base in selecting
            )
        # At equal places one class defines both, and its promise is about its own gradient.
        if _place(cls, "weight_gradient") < _place(cls, "gradient_at_pruned"):
            # What a base class says of its gradient need not hold for another one.
            cls.gradient_at_pruned = Method.gradient_at_pruned  # type: ignore[method-assign]

    # ------------------------------------------------------------------------ the plan of a training

    def schedule(self, planned_steps: int | None) -> Steps:
        """The training steps at which something begins or ends; resolved once and kept as ``layer.progress.schedule``.

        At each of them :meth:`update` is called for every layer, whether or not it made a step.

        Raises:
            ValueError: If that takes the number of planned steps, and it is not known.
        """
        return tuple(
            resolve_moment(self, name, getattr(self, name), planned_steps)
            for name in self._scheduled
        )

    def layer_schedule(self, layer: NMLayer, planned_steps: int | None) -> Steps:
        """The schedule of one layer, for a method whose moments depend on its pattern; :meth:`schedule` by default."""
        return self.schedule(planned_steps)

    def phases(self, layer: NMLayer) -> Phases:
        """What the moments of ``layer.progress.schedule`` mean: when the method has masks, and until when they move."""
        return Phases()

    def follow(self, schedule: Schedule) -> Method:
        """The method for a user's ``schedule``, by default itself: the package begins and ends its masks.

        It calls :meth:`init_masks` then, and no hook of a step while a layer is dense. Without masks, and before
        :meth:`init_masks`, :meth:`forward_weight` must return the weight itself. A method that plans dense phases by
        itself returns ``schedule.handed_to(self)``.

        Raises:
            ValueError: If the method cannot follow a part of it, see :meth:`~lightning_nm.schedule.Schedule.refuse`.
        """
        schedule.refuse(self, **self._refused)
        # The schedule's dense phases lie at both ends of the training, where the method's own would be.
        for name in ("dense_start", "dense_end"):
            refuse_second(self, name)
        return self

    def check(self, planned_steps: int | None) -> None:
        """Refuse settings that cannot work with this plan, by a ``ValueError``; warn of those that have no effect."""

    # --------------------------------------------------------------------------------- the optimizer

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse an optimizer that the method cannot work with, by a ``ValueError`` that names it and the layer."""

    def check_optimizer_state(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse to go on without state that the optimizer should have by now, by a ``ValueError`` that says how.

        It is called before the first batch of a fit, when masks and optimizers have what a checkpoint holds of them.
        A plain loop calls ``sparsifier.training.check_optimizer_states()`` for it.
        """

    # ----------------------------------------------------------------------------------------- masks

    def init_masks(self, layer: NMLayer) -> None:
        """Choose the first masks of a layer whose weight has just been set or loaded; the weight is not written to.

        It is called again at each pattern of a user's ``schedule``, which is ``layer.pattern`` then. A weight keeps its
        pruned entries until the next step ends: a fit that fails before has changed nothing, and a saved state that
        keeps more entries may be loaded next.
        """

    def update(self, layer: NMLayer) -> None:
        """Move the masks: at the end of a batch with a step of this layer, and at every step of the layer's schedule.

        ``layer.step`` counts the layer's optimizer steps, ``layer.progress.updated_at`` is the last update's, and
        ``layer.progress.clock`` counts training steps, this one included. A method that does not
        override it is asked at the steps of the schedule alone, and has its first masks of :meth:`init_masks` there.
        """
        if layer.masks.bits is None:
            self.init_masks(layer)

    def finish(self, layer: NMLayer) -> None:
        """Called when the planned training has ended: do what was scheduled for its end.

        The clock may lie before the planned end: it does not count the steps that a gradient scaler skipped.
        """

    def current_pattern(self, layer: NMLayer) -> NMPattern | None:
        """The pattern of the masks now, for a method whose N changes while it trains; ``layer.pattern`` by default.

        ``None`` while the masks hold to no N:M, as those that shrink entry by entry. Then no GEMM counts as N:M, the
        fraction of kept entries is measured, and ``violations`` of the sparsifier goes by the layer's pattern.
        """
        # As layer.pattern, which is asked for in every pass of every layer.
        return layer.progress.pattern or layer.spec.pattern

    # --------------------------------------------------------------------------------------- weights

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W_F, of the weight's shape; built with a select, so that pruned entries are +0.0."""
        return weight

    def backward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W_B, of the weight's shape; the forward weight unless overridden."""
        return self.forward_weight(layer, weight)

    def training_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """What both GEMMs use in place of W_F and W_B while the layer's module is in training mode; W_F by default.

        For methods that train by other values than those of the model, such as random or soft masks. State dicts,
        files, statistics and evaluation have W_F. Where it is overridden, the GEMMs of layers count as dense.
        """
        return self.forward_weight(layer, weight)

    # ------------------------------------------------------------------------------------- gradients

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> Gradients:
        """Turn ``dL/dW_F`` into the gradients of the weight and of ``layer.parameters``, in that order.

        ``grad`` may be overwritten. The default is the straight-through estimator: the weight receives it unchanged.
        """
        return (grad, *[None] * len(layer.parameters))

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

    def penalty(self, layer: NMLayer) -> Tensor | None:
        """A scalar term added to the loss once per real optimizer step; ``None`` for no term.

        Its gradient is added after all-reduce and unscaling and before clipping, so that it means the same under
        accumulation, mixed precision and data parallelism.
        """
        return None

    # ------------------------------------------------------------------------------------- each step

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

    # ---------------------------------------------------------------------------------- what is told

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """Further statistics of these layers, whose methods are of this class; logged as ``nm/...``."""
        return {}

    def defined_hooks(self) -> frozenset[str]:
        """The hooks of a step that this method overrides; the others are not called."""
        found = set()
        for name in _STEP_HOOKS:
            hook = getattr(self, name)
            # A bound method keeps its function; one that was set on the object may be a plain function.
            if getattr(hook, "__func__", hook) is not getattr(Method, name):
                found.add(name)
        return frozenset(found)

    def __repr__(self) -> str:
        return with_settings(self)


class Dense(Method):
    """No masks: the baseline of comparisons, by the same code."""

    short_name = "dense"
    # Without masks, the noise of a gradient estimator is all that there is to see.
    headline = "grad_snr"
    # W_F and W_B are W: every entry is selected.
    selects_entries = True


class MaskMethod(Method):
    """W_F is W under the forward mask, W_B is W under the backward mask."""

    sparse_forward = True
    uses_masks = True
    selects_entries = True

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """``where(forward_mask, W, 0)``."""
        mask = layer.masks.forward_view
        return weight if mask is None else masked(weight, mask)

    def backward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """``where(backward_mask, W, 0)``; W_F for a layer without a backward mask."""
        mask = layer.masks.backward
        return self.forward_weight(layer, weight) if mask is None else masked(weight, mask)


class SparseToSparse(MaskMethod):
    """Without latent weights: pruned entries are zero in the parameter after every step, and get no gradient.

    All of the gradient is kept in a window for which :meth:`needs_dense_gradient` asked, for the method to use it.
    """

    latent = False

    def gradient_at_pruned(self, layer: NMLayer) -> bool:
        """Whether there is no mask yet, or the method asked for the dense gradient of this window."""
        return not layer.masks.has_forward or layer.progress.dense_gradient

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> Gradients:
        """The gradient at kept entries, 0 at pruned ones; all of it in a window whose gradient is dense."""
        return (kept_gradient(layer, grad), *[None] * len(layer.parameters))

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Keep pruned entries at zero, whatever the optimizer did."""
        layer.zero_pruned()
