"""CAST: dense training under a decay of the entries that are to go, which becomes N:M at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from lightning_nm.functional import pack_mask, unpack_mask
from lightning_nm.functional.select import masked, merged
from lightning_nm.methods.base import (
    Gradients,
    SparseToSparse,
    has_ended,
    kept_gradient,
    largest_entries,
    set_tensor,
    weighted_mean,
)
from lightning_nm.methods.checks import check_count, check_number, refuse_tensor_parallel
from lightning_nm.methods.optimizer_state import coupled_decay, group_of, will_be_skipped
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import local_values
from lightning_nm.schedule import Moment, Phases, Steps, check_moment

KEPT = "kept"
"""The name of the buffer with the entries that are not decayed, one bit each."""
SCALE = "scale"
"""The name of the parameter with the weight scale."""


@dataclass
class _BeforeStep:
    """What the optimizer's step finds replaced; both copies are local shards."""

    holder: Tensor  # the optimizer's tensor, to tell it from one that was loaded since
    moment: Tensor  # the running mean of gradients before this one
    grad: Tensor


class CAST(SparseToSparse):
    r"""Continuous adaptive sparse training (Huang et al., arXiv 2509.25996) of a trained model, under Adam or AdamW.

    **Until** ``end`` **the model is dense.** Its forward weight is :math:`A \odot W`, where the learnable scale A has
    ``scale_groups`` numbers for each row of W, 1 at first. The optimizer's step becomes that of AdamS. With the
    gradient G, and the fraction :math:`\alpha = t / T` of the T steps before ``end`` that are done,

    .. math::

        \mu &\leftarrow \beta_1 \mu + (1 - \beta_1) G \\
        \tilde\mu &= \mu \text{ at the N largest entries of each block}, \quad
                     (1 - \alpha) \mu + \alpha \lambda \, \mathrm{sign}(W) \text{ at the others} \\
        V &\leftarrow \beta_2 V + (1 - \beta_2) \tilde\mu^2, \quad
        W \leftarrow W - \frac{\eta \, \tilde\mu / (1 - \beta_1^t)}{\sqrt{V / (1 - \beta_2^t)} + \epsilon}.

    The largest entries are found again every ``refresh_every`` steps. At ``end`` the others are set to zero: the
    forward weight is N:M from then on, with the masks of that moment. By then they should be small: the statistic
    ``decayed_magnitude`` tells what the projection takes away.

    The paper's authors have published no code. The formulas are those of its algorithm 1, as a public reproduction
    quotes it; beta and epsilon are the optimizer's own. These are ours: blocks keep exactly N where magnitudes are
    equal; a gradient is clipped before it enters the moment; ``end`` may lie before the end of the training, and the
    kept entries train on under fixed masks. The paper's distillation is a loss, and is the model's to add.

    V is the mean square of the moment, not of the gradient. First steps are therefore up to :math:`1 / (1 - \beta_1)`
    times as large as Adam's: warm the learning rate up. The optimizer trains A, too, and applies AdamW's weight decay
    to both: zero gradients by ``optimizer.zero_grad()``, since the model does not know A's.

    Args:
        decay: :math:`\lambda`, relative to the size of gradients (the paper's 4e-7 for Llama-2-7B). Raise it if
            ``decayed_magnitude`` is far from 0 at the end.
        refresh_every: Optimizer steps between two selections of the decayed entries (the paper's 10).
        scale_groups: Numbers of the scale for each row (the paper's 2), one for each of as many runs of columns; 1 in
            layers whose columns they do not divide. 0 for no scale: FSDP2, tensor parallelism and the Trainer of
            transformers refuse methods that own parameters.
        end: When the model becomes N:M: an integer is a training step, a float a fraction of the planned ones. A
            training that stops before its planned end leaves the model dense.

    Raises:
        TypeError: If ``end`` is neither an integer nor a float.
        ValueError: For a setting out of its range; when training starts, if ``end`` is a fraction and the number of
            steps is not known, and for an optimizer other than Adam and AdamW.

    Example:
        >>> CAST(end=0.9).schedule(planned_steps=1000)
        (900,)
    """

    short_name = "cast"
    latent = True  # until its end
    # KEPT is for the optimizer's step: passes use A * W, under a mask from `end` on.
    passes_read_buffers = False
    fixed = ("scale_groups",)
    headline = "decayed_magnitude"
    _scheduled = ("end",)
    _refused = {
        "dense_start": "it trains densely until its `end` anyway",
        "ramp": "it has no masks before its `end`, and one pattern from there on",
        "dense_end": "all of its training leads to an N:M model at its `end`. Train on without a callback for a dense "
        "model",
    }

    def __init__(
        self,
        decay: float = 4e-7,
        refresh_every: int = 10,
        scale_groups: int = 2,
        end: Moment = 1.0,
    ) -> None:
        check_number("decay", decay, "it pulls entries to zero", zero=True)
        check_count("refresh_every", refresh_every, 1)
        check_count("scale_groups", scale_groups, 0)
        check_moment("end", end)
        if not end:
            raise ValueError(
                f"end={end} leaves no step in which entries decay: use the method 'asp' for a fixed mask, or a later "
                "`end`"
            )
        self.decay = decay
        self.refresh_every = refresh_every
        self.scale_groups = scale_groups
        self.end = end

    def phases(self, layer: NMLayer) -> Phases:
        """The forward weight is dense until the end of the decay."""
        return Phases(layer.progress.schedule)

    def schedule(self, planned_steps: int | None) -> Steps:
        """The training step at which the model becomes N:M."""
        (end,) = super().schedule(planned_steps)
        # A small fraction may round to 0, by which alpha = t / T would divide.
        return (max(end, 1),)

    def check(self, planned_steps: int | None) -> None:
        """Refuse an end that the training does not reach: the model would stay dense."""
        (end,) = self.schedule(planned_steps)
        if planned_steps is not None and end > planned_steps:
            raise ValueError(
                f"CAST's end={self.end} is step {end} of {planned_steps}, so the model would stay dense: use a "
                "fraction of the training, such as end=1.0"
            )

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse what is not Adam or AdamW, and those of their settings that change the gradient within the step."""
        name = type(optimizer).__name__
        if not isinstance(optimizer, (Adam, AdamW)):
            raise ValueError(
                f"CAST makes an optimizer's step that of AdamS, which it can do for Adam and AdamW, but not for {name} "
                f"(layer '{layer.name}'): use one of them, or another method"
            )
        group = group_of(layer, optimizer)
        if coupled_decay(optimizer, group):
            raise ValueError(
                f"{name} adds weight_decay={group['weight_decay']} to the gradient of layer '{layer.name}', which "
                "CAST's step has no place for: use AdamW, or weight_decay=0"
            )
        if group.get("maximize"):
            raise ValueError(
                f"{name} with maximize=True climbs, and CAST's decay would grow the entries of layer '{layer.name}': "
                "minimize the negative objective"
            )

    def init_masks(self, layer: NMLayer) -> None:
        """Start with the scale 1, and find the entries to decay."""
        layer.pending = None
        layer.buffers.clear()
        layer.set_masks(None)
        if layer.spec.forward_reason:
            return
        if self.scale_groups:
            refuse_tensor_parallel(layer, "a scale that is not cut with it, unless scale_groups=0")
            weight = layer.weight
            out, columns, *_ = layer.view.rows(weight.detach()).shape
            groups = 1 if columns % self.scale_groups else self.scale_groups
            ones = torch.ones(out, groups, dtype=weight.dtype, device=weight.device)
            set_tensor(layer.parameters, SCALE, nn.Parameter(ones))
        # Weights that are loaded after the end get their masks at once.
        if has_ended(layer):
            self._choose_mask(layer)
        else:
            layer.buffers[KEPT] = pack_mask(largest_entries(layer))

    def _choose_mask(self, layer: NMLayer) -> None:
        """Keep the largest entries from now on."""
        # The mask takes the place of KEPT.
        layer.buffers.clear()
        layer.set_masks(largest_entries(layer))

    def _project(self, layer: NMLayer) -> None:
        """Set the smaller entries to zero, for good."""
        self._choose_mask(layer)
        layer.zero_pruned()

    def update(self, layer: NMLayer) -> None:
        """Find the entries to decay again when it is time; make the weight N:M at the end."""
        # A mask that is there is final.
        if layer.spec.forward_reason or layer.masks.has_forward:
            return
        if has_ended(layer):
            self._project(layer)
        elif layer.progress.crossed(self.refresh_every):
            layer.buffers[KEPT] = pack_mask(largest_entries(layer))

    def finish(self, layer: NMLayer) -> None:
        """Make the weight N:M if its end was not reached."""
        if not layer.spec.forward_reason and not layer.masks.has_forward:
            self._project(layer)

    # Said again, since weight_gradient() is overridden below: it, too, has 0 at pruned entries once there is a mask.
    gradient_at_pruned = SparseToSparse.gradient_at_pruned

    def forward_weight(self, layer: NMLayer, weight: Tensor) -> Tensor:
        """``A * W``, and +0.0 at pruned entries once there is a mask."""
        scale = self._scale(layer, weight)
        scaled = weight if scale is None else weight * scale
        mask = layer.masks.forward_view
        return scaled if mask is None else masked(scaled, mask)

    def weight_gradient(self, layer: NMLayer, weight: Tensor, grad: Tensor) -> Gradients:
        """The gradients of W, which is ``A * grad`` under the mask, and of A."""
        grad = kept_gradient(layer, grad)
        scale = self._scale(layer, weight)
        if scale is None:
            return (grad,)
        # By the chain rule dL/dW = A dL/dW_F, and dL/dA sums W dL/dW_F over the entries that share a number.
        own_scale = layer.parameters[SCALE]
        out, groups = own_scale.shape
        # A group's columns are neighbours, with all of their taps.
        by_group = layer.view.rows(grad * weight).reshape(out, groups, -1)
        return grad * scale, by_group.sum(2)

    @staticmethod
    def _scale(layer: NMLayer, weight: Tensor) -> Tensor | None:
        """A for each entry of the weight, in its shape; ``None`` without a scale."""
        scale = layer.parameters.get(SCALE)
        if scale is None:
            return None
        out, columns, *taps = layer.view.rows(weight).shape
        # From [out, groups] to every entry: a run of columns, with all of its taps, has one number.
        by_column = scale.repeat_interleave(columns // scale.shape[1], dim=1)
        by_row = by_column.view(out, columns, *[1] * len(taps))
        return layer.view.unrows(by_row.expand(out, columns, *taps))

    def after_clipping(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Give the optimizer a moment and a gradient with which its own step is that of AdamS.

        Both are the decayed moment. The step's new moment is then that moment again, and its mean square is added to V.
        """
        grad = layer.view.local_grad
        # A layer whose forward GEMM stays dense is trained by Adam's own step.
        if grad is None or layer.spec.forward_reason or will_be_skipped(optimizer):
            return
        parameter = layer.view.optimizer_param
        group = group_of(layer, optimizer)
        state = optimizer.state[parameter]
        if not state:
            _start(state, parameter, group)
        holder = state["exp_avg"]
        moment = local_values(holder)
        left: _BeforeStep | None = layer.pending
        if left is not None and left.holder is holder:
            # The last step raised an exception: what it replaced was not put back.
            moment.copy_(left.moment)
        before = _BeforeStep(holder, moment.clone(), grad.clone())
        layer.pending = before
        _add_gradient(moment, grad, group)
        if KEPT in layer.buffers:
            (end,) = layer.progress.schedule
            kept = unpack_mask(layer.buffers[KEPT], tuple(layer.view.shape))
            signs = layer.view.local.to(moment.dtype).sign()
            # Steps that are done: the first one does not decay yet.
            ramp = min(layer.progress.step / end, 1.0)  # alpha
            # Adam divides by the root of the mean square: at a large alpha a decayed entry moves by about the learning
            # rate towards zero, whatever the size of its gradient is.
            decayed = moment * (1 - ramp) + (ramp * self.decay) * signs
            moment.copy_(merged(layer.view.shard_of(kept), moment, decayed))
        grad.copy_(moment)

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Put moment and gradient back, the moment with the gradient in it; keep pruned entries at zero."""
        before: _BeforeStep | None = layer.pending
        layer.pending = None
        if before is not None:
            moment = local_values(before.holder)
            moment.copy_(before.moment)
            # The running mean goes on without the decay, which enters single steps alone.
            _add_gradient(moment, before.grad, group_of(layer, optimizer))
            grad = layer.view.local_grad
            if grad is not None:
                grad.copy_(before.grad)
        super().after_step(layer, optimizer)

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """``decayed_magnitude``: the fraction of the sum of :math:`|W|` that the projection would set to zero.

        0 once the model is N:M.
        """
        parts = []
        for layer in layers:
            if layer.spec.forward_reason:
                continue
            with layer.full(), torch.no_grad():
                magnitude = layer.weight.detach().abs().double()
                decayed = magnitude[~largest_entries(layer)].sum()
                parts.append((float(decayed), float(magnitude.sum())))
        return weighted_mean("decayed_magnitude", parts) or {"decayed_magnitude": 0.0}


def _add_gradient(moment: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
    """Add a gradient to the running mean, as Adam does."""
    beta = group["betas"][0]
    moment.lerp_(grad.to(moment.dtype), 1 - beta)


def _start(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    """Make the state that Adam makes in its first step, in which AdamS needs the moment already."""
    # As torch makes it: on the device where kernels read it there, else on the CPU.
    on_device = bool(group.get("capturable") or group.get("fused"))
    device = parameter.device if on_device else "cpu"
    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
    names = ["exp_avg", "exp_avg_sq"]
    if group.get("amsgrad"):
        names.append("max_exp_avg_sq")
    for name in names:
        state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
