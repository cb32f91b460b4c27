"""The base class of every method: which weights the forward and the dgrad GEMM use, and when the masks move."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_nm.kernels.operands import masked_backward, masked_forward
from lightning_nm.nn.layer import Gemm, Gemms, NMLayer
from lightning_nm.schedule import Moment


class Method:
    """A method decides the values W_F and W_B that a layer's GEMMs use, when masks move, and how dW reaches W.

    The base class keeps every weight dense. A method overrides what differs; one instance serves many layers, so
    whatever belongs to one layer is kept on the :class:`~lightning_nm.nn.layer.NMLayer` (``set_masks``,
    ``permutation``, ``parameters``).

    The order of calls is: :meth:`check` and :meth:`check_optimizer` before anything else, :meth:`init` once; then for
    each real optimizer step :meth:`before_step` (gradients are complete, unscaled and not yet clipped), the optimizer's
    step, :meth:`after_step`, and at the end of the batch :meth:`update`. A step that a gradient scaler skips has a
    :meth:`before_step` alone. Within a step, :meth:`forward_weight` runs in every forward, :meth:`backward_weight` and
    :meth:`weight_gradient` in every backward; these three are traced by ``torch.compile`` and so must be plain tensor
    code.
    """

    sparse_forward: bool = False
    """Whether the method makes the forward weight N:M along `in`."""
    sparse_dgrad: bool = False
    """Whether the method makes the backward weight N:M along `out`."""

    dense_start: Moment = 0
    """How long training stays dense before the first masks, for a method that can: training steps, or a share."""
    dense_end: Moment = 0
    """How long it is dense again at the end, likewise."""

    latent: bool = True
    """Whether pruned entries of the parameter hold values that matter."""

    headline: str = "kept_magnitude"
    """The statistic that tells most of the method, for progress bars: one of the sparsifier's or the method's own."""

    fixed: tuple[str, ...] = ()
    """Settings that a saved state depends on: resuming with other values is refused. Other settings may change."""

    def schedule(self, planned_steps: int | None) -> tuple[int, ...]:
        """The training steps at which something begins or ends; resolved once and kept as ``layer.schedule``.

        At each of them :meth:`update` is called for every layer, whether or not it made a step.

        Raises:
            ValueError: If that takes the number of planned steps, and it is not known.
        """
        return ()

    def check(self, planned_steps: int | None) -> None:
        """Refuse settings that cannot work with this plan, by a ``ValueError``; warn of those that have no effect."""

    def needs_dense_gradient(self, layer: NMLayer) -> bool:
        """Whether the window that begins at ``layer.clock`` needs dL/dW_F at pruned entries, too.

        The answer is put into ``layer.dense_gradient``, which :meth:`weight_gradient` may read.
        """
        return False

    def gradient_at_pruned(self, layer: NMLayer) -> bool:
        """Whether the step of the present window needs the weight's gradient at entries that the forward mask prunes.

        ``False`` promises that 0 does there: data parallelism may then leave these entries out (``nm_ddp``). The answer
        must be the same in all processes, and so may depend on the layer's clocks, schedule, ``dense_gradient`` and on
        whether there is a mask, not on the weights.
        """
        return True

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse an optimizer that the method cannot work with, by a ``ValueError`` that names it and the layer."""

    def init(self, layer: NMLayer) -> None:
        """Choose the first masks of a layer whose weight has just been set or loaded."""

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W_F, of the weight's shape; built with a select, so that pruned entries are +0.0."""
        return weight

    def forward_part(self, layer: NMLayer, here: Tensor) -> Tensor | None:
        """W_F at the entries of W that this process holds; ``None`` if it takes all of W, which is then gathered."""
        return here if type(self).forward_weight is Method.forward_weight else None

    def backward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """W_B, of the weight's shape; the forward weight unless overridden."""
        return self.forward_weight(layer, weight)

    def forward_operand(self, layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W_F as a kernel for N:M operands packs it: ``[out, in]``, contiguous."""
        return layer.matrix(self.forward_weight(layer, weight)).to(dtype).contiguous()

    def backward_operand(self, layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W_B^T as a kernel packs it: ``[in, out]``, contiguous, its columns in the order of ``layer.permutation``.

        Without a backward mask of its own a layer has no permutation.
        """
        rows = layer.matrix(self.backward_weight(layer, weight)).to(dtype)
        if layer.own_backward and layer.permutation is not None:
            rows = rows[layer.permutation]
        return rows.t().contiguous()

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Turn ``dL/dW_F`` into the gradients of the weight and of ``layer.parameters``, in that order.

        ``grad`` belongs to the method, which may overwrite it. The default is the straight-through estimator: the
        weight receives the gradient of W_F unchanged.
        """
        return (grad, *(None for _ in layer.parameters))

    def penalty(self, layer: NMLayer) -> Tensor | None:
        """A scalar term added to the loss once per real optimizer step; ``None`` for no term.

        Its gradient joins the gradients of the weight and of ``layer.parameters`` after all-reduce and unscaling and
        before clipping, so that it means the same under accumulation, mixed precision and data parallelism.
        """
        return None

    def before_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Shape the complete gradient just before the optimizer uses it."""
        with torch.enable_grad():
            penalty = self.penalty(layer)
            if penalty is None:
                return
            owners = [p for p in (layer.weight, *layer.parameters.values()) if p.requires_grad]
            grads = torch.autograd.grad(penalty, owners, allow_unused=True)
        for owner, grad in zip(owners, grads, strict=True):
            if grad is not None:
                owner.grad = grad if owner.grad is None else owner.grad.add_(grad)

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Repair the weight right after an optimizer step, as methods without latent weights must.

        ``layer.step`` has advanced. A method whose masks belong to one certain step moves them here; what follows the
        weights at leisure belongs into :meth:`update`.
        """

    def update(self, layer: NMLayer) -> None:
        """Move the masks: at the end of a batch with a step of this layer, and at every step in ``layer.schedule``.

        ``layer.step`` counts the layer's optimizer steps, ``layer.updated_at`` is the last update's, and
        ``layer.clock`` counts training steps, this one included.
        """

    def gemms(self, layer: NMLayer) -> Gemms:
        """What each GEMM does at present and what it costs."""
        return Gemms(Gemm("dense"), Gemm("dense"), self._wgrad(layer))

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """Further statistics of these layers together, all of which use methods of this class; logged as ``nm/...``."""
        return {}

    @staticmethod
    def _wgrad(layer: NMLayer, own: Gemm = Gemm("dense")) -> Gemm:  # noqa: B008  # a constant
        """The wgrad GEMM: sparse only through an estimator; ``own`` is what it is without one."""
        if not layer.param.requires_grad:
            return Gemm("none", "frozen, so no weight gradient")
        if layer.estimator is None:
            return own
        if not layer.estimating:
            return own._replace(reason="; ".join(filter(None, ("dense phase", own.reason))))
        gemm = layer.estimator.gemm(layer)
        return gemm._replace(arithmetic=gemm.arithmetic * own.arithmetic, paper=min(gemm.paper, own.paper))

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if not key.startswith("_"))
        return f"{type(self).__name__}({settings})"


class Dense(Method):
    """No masks at all: the baseline that every comparison needs, through the same code path."""

    headline = "grad_snr"


class MaskMethod(Method):
    """W_F is W under the forward mask, W_B is W under the backward mask."""

    sparse_forward = True

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """``where(forward_mask, W, 0)``."""
        mask = layer.kept
        return weight if mask is None else torch.where(mask, weight, 0)

    def forward_part(self, layer: NMLayer, here: Tensor) -> Tensor | None:
        """The same, entry by entry."""
        mask = layer.kept
        if type(self).forward_weight is not MaskMethod.forward_weight:
            return None
        return here if mask is None else torch.where(layer.part(mask), here, 0)

    def backward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """``where(backward_mask, W, 0)``; W_F for a layer without a backward mask."""
        mask = layer.backward_mask
        return self.forward_weight(layer, weight) if mask is None else torch.where(mask, weight, 0)

    def forward_operand(self, layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W_F in one pass over the weight and its masks."""
        marks = layer.marks
        own = type(self).forward_weight is not MaskMethod.forward_weight
        if own or marks is None or marks.stride() != weight.stride() or layer.forward_reason:
            return super().forward_operand(layer, weight, dtype)
        return masked_forward(layer.matrix(weight), layer.matrix(marks), dtype)

    def backward_operand(self, layer: NMLayer, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W_B^T in one pass over the weight and its masks."""
        marks = layer.marks
        own = (type(self).forward_weight, type(self).backward_weight) != (
            MaskMethod.forward_weight,
            MaskMethod.backward_weight,
        )
        unmasked = layer.forward_reason and not layer.own_backward
        if own or marks is None or marks.stride() != weight.stride() or unmasked:
            return super().backward_operand(layer, weight, dtype)
        order = layer.permutation if layer.own_backward else None
        return masked_backward(layer.matrix(weight), layer.matrix(marks), dtype, order, own_backward=layer.own_backward)

    def gemms(self, layer: NMLayer) -> Gemms:
        """Forward N:M along `in`; dgrad N:M along `out` only with a backward mask; wgrad dense."""
        pattern, density = str(layer.pattern), layer.pattern.density
        if layer.marks is None or layer.forward_reason:
            forward = Gemm("dense", layer.forward_reason or "dense phase")
        else:
            forward = Gemm(pattern, "", density, density, density)
        if layer.own_backward:
            measured = density if layer.backward_density is None else layer.backward_density
            dgrad = Gemm(pattern, "", measured, density, density)
        elif forward.treatment == pattern:
            dgrad = Gemm("masked", layer.dgrad_reason or "not N:M along out", arithmetic=density)
        else:
            dgrad = Gemm("dense", layer.dgrad_reason)
        return Gemms(forward, dgrad, self._wgrad(layer))
