"""STEP: dense training by Adam until its second moment has settled, then masks with that moment frozen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_nm.functional.masks import wide_dtype
from lightning_nm.methods.base import Method
from lightning_nm.methods.checks import check_number, check_option
from lightning_nm.methods.optimizer_state import coupled_decay, group_of, will_be_skipped
from lightning_nm.methods.ste import STE
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.weight import local_values, sum_of_shards
from lightning_nm.schedule import (
    Moment,
    Phases,
    Schedule,
    Steps,
    check_moment,
    resolve_moment,
    resolve_window,
)

Mean = Literal["arithmetic", "geometric"]

CHANGES = "changes"
"""The buffer of the last mean changes of the second moment, newest last: float32, up to the length of the window."""
FROZEN_AT = "frozen_at"
"""The buffer of the optimizer's step after which the second moment was frozen, of no axes."""
LARGEST_STEP = 10.0
r"""The largest masked step of an entry over the learning rate.

Adam's own is at most :math:`(1 - \beta_1) / \sqrt{(1 - \beta_2) (1 - \beta_1^2 / \beta_2)}`, 7.3 with its default
betas: a large gradient also enlarges its second moment. A frozen one stays small.
"""


@dataclass
class _Group:
    """The layers of one step of one optimizer, which switch together."""

    layers: dict[str, NMLayer] = field(default_factory=dict)
    threshold: float = 0.0
    settled: bool | None = None  # None until it is asked


@dataclass
class _Pending:
    """What a layer keeps from the beginning of an optimizer's step to the end of the batch."""

    change: Tensor | None = None  # mean change of the second moment, or of its logarithm
    second: Tensor | None = None  # the frozen second moment, while its entry in the state is scaled
    grad: Tensor | None = None  # the gradient, while it is in the first moment
    group: _Group | None = None


class STEP(STE):
    r"""Precondition by a settled second moment (Lu et al., ICML 2023, arXiv 2302.01172): for Adam and AdamW.

    Under Adam, masks spoil the second moment v, which learns from masked gradients. STEP trains densely until v has
    settled, and then trains by STE with v frozen:

    1. Dense Adam. :math:`Z_t = \mathrm{mean} |v_t - v_{t-1}|` over the entries of all layers of one optimizer, or the
       geometric mean. The switch comes when the average of Z over the last :math:`\lfloor 1 / (1 - \beta_2) \rfloor`
       steps, or over those known so far, is below the threshold, at the earliest after ``dense_start`` and at the
       latest after ``latest``.
    2. STE, and :math:`W \leftarrow W - \eta \hat m_t / (\sqrt{v^*} + \epsilon)`, with the first moment of the masked
       gradients and :math:`v^* = v_T / (1 - \beta_2^T)` of the switch. Weight decay is the optimizer's own.

    An entry whose gradient was zero until the switch, as of a ReLU that was never active, has :math:`v^* = 0`, and
    would step by :math:`\eta \hat m / \epsilon` once it has one. The paper has no means against that; here no entry
    steps by more than :math:`10\, \eta` (:data:`LARGEST_STEP`), weight decay aside: :math:`v^*` counts as at least
    :math:`(\hat m_t / 10)^2`.

    The second moment is frozen for the weights of this method's layers alone: biases and other layers keep Adam's. The
    state of the optimizer stays an ordinary one, in which ``exp_avg_sq`` does not change any more. While a masked step
    lasts, there is a copy of the second moment and one of the gradient. As long as training is dense, each layer keeps
    a number for every step of the window. After the switch an optimizer without the state of the dense phase is
    refused before the first batch, so a second fit needs ``ckpt_path``, or the same optimizer.

    Args:
        dense_start: The earliest switch: training steps, or a fraction of them (the paper's 10 %).
        latest: The latest switch, in the same units (the paper's 50 %). Plans of FLOPs are made with it.
        threshold: What the average of Z must fall below; ``None`` for the optimizer's epsilon, as in the paper.
        mean: ``"arithmetic"`` or ``"geometric"``: the paper's two options. In the latter an entry that does not
            change counts as the smallest normal number.
        dense_end: How long training is dense again at the end, by ordinary Adam from v_T: **the trained model is
            dense then**.

    Raises:
        TypeError: If a moment is no number.
        ValueError: For an unknown ``mean``, a ``threshold`` that is not positive, and what :class:`STE` refuses; when
            training starts, if ``latest`` is before ``dense_start``, there is no dense step before it, or the number of
            planned steps is needed and not known; when the optimizer is registered, if it is not Adam or AdamW, has
            ``amsgrad``, or has ``beta1=0``; when a fit starts, if there are masks and the optimizer is new.

    Example:
        >>> STEP().schedule(planned_steps=1000)
        (100, 500)
    """

    short_name = "step"
    # The buffers serve the optimizer's step: passes use W under its mask alone.
    passes_read_buffers = False

    def __init__(
        self,
        dense_start: Moment = 0.1,
        latest: Moment = 0.5,
        threshold: float | None = None,
        mean: Mean = "arithmetic",
        dense_end: Moment = 0,
    ) -> None:
        super().__init__(dense_start, dense_end)
        check_moment("latest", latest)
        check_option("mean", mean, Mean)
        if threshold is not None:
            why = "the second moment never stands still; None takes the optimizer's epsilon"
            check_number("threshold", threshold, why)
        self.latest = latest
        self.threshold = threshold
        self.mean = mean
        self._groups: dict[int, _Group] = {}  # by the id of the optimizer, within a batch

    # ------------------------------------------------------------------------------------------------------- schedule

    def schedule(self, planned_steps: int | None) -> Steps:
        """The training steps of the earliest and the latest switch, and that at which ``dense_end`` begins, if any."""
        # The masks come at `latest` at the latest, so this is the window that is certain to be sparse.
        window = resolve_window(self, self.latest, self.dense_end, planned_steps, "latest")
        latest = window[0] if window else 0
        earliest = resolve_moment(self, "dense_start", self.dense_start, planned_steps)
        if latest < 1:
            raise ValueError(
                f"STEP needs a second moment before the masks come: latest={self.latest} leaves no dense step; use "
                "'ste' for masks from the first step on"
            )
        if earliest > latest:
            raise ValueError(
                f"STEP cannot switch: its earliest step, {earliest} by dense_start={self.dense_start}, comes after the "
                f"latest, {latest} by latest={self.latest}"
            )
        return (earliest, latest, *window[1:])

    def follow(self, schedule: Schedule) -> Method:
        """Take the dense end, and stages of a ramp after the switch."""
        schedule.refuse(
            self,
            dense_start="it ends its dense phase itself, by the second moment. Give STEP(dense_start=..., "
            "latest=...), the earliest and the latest step of that",
        )
        return schedule.handed_to(self)

    def phases(self, layer: NMLayer) -> Phases:
        """From the latest switch to the dense phase at the end."""
        # The earliest switch is left out: whether masks come before the latest one is not known.
        return Phases(layer.progress.schedule[1:], is_latest=True)

    # ---------------------------------------------------------------------------------------------------------- masks

    def init_masks(self, layer: NMLayer) -> None:
        """No mask before the switch; after it, the masks of weights that replace trained ones."""
        if layer.masks.has_forward:
            self.select(layer)
        else:
            super().init_masks(layer)

    def update(self, layer: NMLayer) -> None:
        """Switch if the second moments have settled; after the switch select the masks again."""
        group = layer.pending.group if layer.pending else None
        layer.pending = None
        # All optimizers of the batch have stepped, and the layers hold what they need of it.
        self._groups.clear()
        latest, *dense_from = self.phases(layer).sparse
        clock = layer.progress.clock
        if dense_from and clock >= dense_from[0]:
            layer.set_masks(None)
        elif layer.masks.has_forward or clock >= latest or self._switches(layer, group):
            # Masks that have come stay until the dense end, even if the second moments change again.
            self.select(layer)
        # Changes lead to the switch alone. Without masks nothing is frozen: in the dense end Adam goes on from v_T.
        if layer.masks.has_forward:
            layer.buffers.pop(CHANGES, None)
        else:
            layer.buffers.pop(FROZEN_AT, None)

    def _switches(self, layer: NMLayer, group: _Group | None) -> bool:
        """Whether the second moments have settled by this training step."""
        earliest = layer.progress.schedule[0]
        # A layer that made no step in this batch waits for a batch in which it does, or for `latest`.
        if group is None or layer.progress.clock < earliest:
            return False
        # One answer for all layers of the optimizer, whichever of them asks first.
        if group.settled is None:
            group.settled = self._average_change(group) < group.threshold
        return group.settled

    def _average_change(self, group: _Group) -> float:
        """The average of Z over the window, for all layers of an optimizer together."""
        # In the order of the names, so that the sum does not depend on the order of the steps.
        names = sorted(group.layers)
        changes = [group.layers[name].buffers[CHANGES] for name in names]
        # A layer that was added later knows fewer steps.
        known = min(len(each) for each in changes)
        device = changes[0].device
        recent = torch.stack([each[-known:].to(device) for each in changes])  # [layers, steps]
        # Z is a mean over entries, so a layer counts by its size.
        sizes = [group.layers[name].view.shape.numel() for name in names]
        fractions = torch.tensor(sizes, dtype=recent.dtype, device=device) / sum(sizes)
        of_steps = fractions @ recent
        # These are means of logarithms: the mean is geometric over entries, and arithmetic over steps.
        if self.mean == "geometric":
            of_steps = of_steps.exp()
        return float(of_steps.mean())

    # ------------------------------------------------------------------------------------------------------ optimizer

    def check_optimizer(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse what is neither Adam nor AdamW, ``amsgrad``, and a first moment without memory."""
        why = ""
        if not isinstance(optimizer, (Adam, AdamW)):
            why = "is neither Adam nor AdamW of torch.optim"
        else:
            group = group_of(layer, optimizer)
            if group.get("amsgrad"):
                why = "has amsgrad=True, whose maximum would grow although the second moment is frozen"
            elif float(group["betas"][0]) == 0:
                why = "has beta1=0, and the frozen second moment needs a first moment"
        if why:
            raise ValueError(
                f"{type(optimizer).__name__} {why} (layer '{layer.name}'), so method 'step' cannot freeze its second "
                "moment: use Adam or AdamW, or a method for any optimizer, as 'sr-ste' or 'decaying'"
            )

    def check_optimizer_state(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Refuse a new optimizer once there are masks: it has no second moment that could be frozen."""
        # A layer that was never trained, in an optimizer that was, is no mistake of the user's.
        if layer.masks.has_forward and not optimizer.state:
            raise ValueError(
                f"{type(optimizer).__name__} is new, and has no second moment of layer '{layer.name}', whose masks "
                "have come: method 'step' cannot go on without the optimizer's state. Resume from the last training's "
                "checkpoint (fit(ckpt_path=...)), use the same optimizer again, or begin again with a new callback"
            )

    def after_clipping(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Before the switch measure the change of the second moment; after it prepare a step that leaves it alone."""
        if will_be_skipped(optimizer):
            return
        parameter = layer.view.optimizer_param
        state = optimizer.state.get(parameter, {})
        last: _Pending | None = layer.pending
        if last is not None and last.second is not None:
            # The last step ended without after_step(), which a step that trains nothing does.
            local_values(state["exp_avg_sq"]).copy_(last.second)
        layer.pending = _Pending()
        latest = self.phases(layer).sparse[0]
        if layer.masks.has_forward and parameter.grad is not None:
            # Not for a weight without a gradient, which makes no step.
            layer.pending = self._freeze(layer, optimizer)
        elif not layer.masks.has_forward and layer.progress.clock < latest:
            # From `latest` on changes decide nothing: a layer without masks is in the dense end, or is never masked.
            layer.pending.change = self._measure(layer, optimizer)

    def _measure(self, layer: NMLayer, optimizer: Optimizer) -> Tensor:
        """The change of one layer's second moment in the coming step, averaged over its entries."""
        parameter = layer.view.optimizer_param
        beta2 = float(group_of(layer, optimizer)["betas"][1])
        values = local_values(parameter)
        # Half precision would lose small changes.
        dtype = wide_dtype(values)
        if parameter.grad is None:
            # Adam leaves the moments of a weight without a gradient alone.
            change = torch.zeros_like(values, dtype=dtype)
        else:
            change = _adams_gradient(layer, optimizer).to(dtype).square()
            second = optimizer.state.get(parameter, {}).get("exp_avg_sq")
            # Before Adam's first step v is 0.
            if second is not None:
                change -= local_values(second)
            # v_t - v_{t-1} = (1 - beta2) (g^2 - v_{t-1})
            change.abs_().mul_(1 - beta2)
        if self.mean == "geometric":
            # The logarithm of 0 is not finite.
            change.clamp_(min=torch.finfo(torch.float32).tiny).log_()
        # Every process has the mean over the whole weight, and so the same switch.
        return sum_of_shards(change.sum(), parameter) / layer.view.shape.numel()

    def _freeze(self, layer: NMLayer, optimizer: Optimizer) -> _Pending:
        r"""Let the coming step of Adam be :math:`\eta \hat m / (\sqrt{v^*} + \epsilon)`.

        The gradient is put into the first moment beforehand, as :math:`m + g (1 - \beta_1) / \beta_1`, so that a step
        with no gradient makes of it what Adam makes of m and g. The second moment is then only multiplied by
        :math:`\beta_2`; before, it is scaled so that the bias correction of this step gives :math:`v^*`, and raised
        where the step would be longer than :data:`LARGEST_STEP`.
        """
        parameter = layer.view.optimizer_param
        assert parameter.grad is not None
        group = group_of(layer, optimizer)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        state = optimizer.state.get(parameter, {})
        second = state.get("exp_avg_sq")
        if second is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} has no second moment of layer '{layer.name}', whose masks have come: "
                "resume with the state of the optimizer, or, if the layer was frozen until now, give it another method "
                "in `rules`"
            )
        second = local_values(second)
        gradient = local_values(parameter.grad)
        # after_step() puts these two back. The first moment stays as the step makes it.
        pending = _Pending(second=second.clone(), grad=gradient.clone())
        first = local_values(state["exp_avg"])
        first.add_(_adams_gradient(layer, optimizer), alpha=(1 - beta1) / beta1)

        # As tensors: reading numbers of a GPU would wait for it.
        precise = torch.float32 if second.device.type == "mps" else torch.float64
        steps = torch.as_tensor(state["step"], dtype=precise, device=second.device)
        # Set in the first masked step: v* was made by so many steps.
        if FROZEN_AT not in layer.buffers:
            layer.buffers[FROZEN_AT] = steps.clone()
        frozen_at = layer.buffers[FROZEN_AT].to(second.device, precise)
        frozen_correction = 1 - beta2**frozen_at
        coming_correction = 1 - beta2 ** (steps + 1)
        # Adam multiplies this by beta2 and divides by the coming correction, which gives v_T / (1 - beta2^T).
        second.mul_(coming_correction / (frozen_correction * beta2))
        # (m / LARGEST_STEP)^2, both moments corrected, for the second moment that the step multiplies by beta2.
        of_first = beta1 / (1 - beta1 ** (steps + 1)) / LARGEST_STEP
        smallest = first.square().mul_(of_first.square() * coming_correction / beta2)
        torch.maximum(second, smallest, out=second)

        # With a gradient of 0 Adam only multiplies both moments by their betas.
        gradient.zero_()
        decay = coupled_decay(optimizer, group)
        if decay:
            # What Adam is about to add to the gradient is in the first moment already.
            sign = 1 if group.get("maximize") else -1
            gradient.add_(local_values(parameter), alpha=sign * decay)
        return pending

    def after_step(self, layer: NMLayer, optimizer: Optimizer) -> None:
        """Put the second moment and the gradient back; keep the change of a dense step."""
        pending: _Pending = layer.pending or _Pending()
        parameter = layer.view.optimizer_param
        if pending.second is not None:
            local_values(optimizer.state[parameter]["exp_avg_sq"]).copy_(pending.second)
            pending.second = None
        # A loop may log the gradient, or go on adding to it.
        if pending.grad is not None and parameter.grad is not None:
            local_values(parameter.grad).copy_(pending.grad)
            pending.grad = None
        if pending.change is None:
            return
        settings = group_of(layer, optimizer)
        newest = pending.change.float().reshape(1)
        pending.change = None
        changes = torch.cat([layer.buffers.get(CHANGES, newest[:0]), newest])
        # The steps over which the second moment averages. In floating point 1 / (1 - 0.999) is just below 1000.
        length = math.floor(1 / (1 - float(settings["betas"][1])) * (1 + 1e-9))
        # A copy: a slice is a view, and a checkpoint would save all of the memory behind it.
        layer.buffers[CHANGES] = changes[-length:].clone()
        # Join the layers of the same step of the same optimizer.
        group = self._groups.get(id(optimizer))
        # A layer that is in the group already makes another step in this batch.
        if group is None or layer.name in group.layers:
            group = self._groups[id(optimizer)] = _Group()
        group.layers[layer.name] = layer
        threshold = float(settings["eps"]) if self.threshold is None else self.threshold
        # The parameter groups of an optimizer may differ in epsilon: the largest one decides.
        group.threshold = max(group.threshold, threshold)
        pending.group = group


def _adams_gradient(layer: NMLayer, optimizer: Optimizer) -> Tensor:
    """The gradient that enters both moments: with Adam's weight decay, and of the sign of its descent."""
    parameter = layer.view.optimizer_param
    assert parameter.grad is not None
    group = group_of(layer, optimizer)
    gradient = local_values(parameter.grad)
    if group.get("maximize"):
        gradient = -gradient
    decay = coupled_decay(optimizer, group)
    return gradient.add(local_values(parameter), alpha=decay) if decay else gradient
