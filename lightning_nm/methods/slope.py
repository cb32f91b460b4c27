"""SLoPe: a fixed forward mask, and a backward mask that the pruned weight is pruned by once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_nm.functional import backward_mask
from lightning_nm.functional.schedule import Moment, UnknownLength
from lightning_nm.functional.spelling import check_keys
from lightning_nm.methods.asp import ASP
from lightning_nm.methods.base import check_count, check_number, refuse_tensor_parallel
from lightning_nm.nn.adapters import find_adapter
from lightning_nm.nn.adapters.base import original_class
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.products.low_rank import LEFT, RIGHT, initial_right


class AdapterSpec(TypedDict):
    """The ``adapters`` of :class:`SLoPe`, as users write it.

    Example:
        >>> adapters: AdapterSpec = {"rank": 8, "last": 0.01}
    """

    rank: int
    last: float


class SLoPe(ASP):
    r"""Double-pruned training (Mozaffari et al., ICLR 2025, arXiv 2405.16325).

    The forward mask F keeps the largest entries along `in` and never moves. There is no latent weight: pruned entries
    get no gradient, and are set to zero after every step. The backward weight is that weight pruned again, so that
    every M consecutive rows keep at most their N largest entries per column:

    .. math:: Y = X (F \odot W)^T, \quad dX = dY (B \odot W), \quad B = F \land \mathrm{nm\_mask}_{out}(|F \odot W|),
              \quad g = F \odot dY^T X.

    B is selected again every ``refresh_every`` steps; the values under it follow the weight at every step. The input
    gradient is biased by the entries that only the forward keeps: at 2:4 and random weights three of sixteen. B is
    Bi-Mask's, with rows in their own order and a forward mask that stands still.

    **With** ``adapters`` every masked linear layer has a low-rank product beside its weight for the last steps:

    .. math:: Y = X (F \odot W)^T + (X R^T) L^T, \quad dX = dY (B \odot W) + (dY L) R,

    where L ``[out, rank]`` is zero at first and R ``[rank, in]`` uniform in :math:`\pm 1 / \sqrt{in}`, as in LoRA. The
    optimizer of the weight trains both, in its parameter group: zero gradients by ``optimizer.zero_grad()``, since the
    model does not know them. They exist from the first step on, and have neither a gradient nor weight decay before
    the last steps. The authors' code divides the product by the rank; here the learning rate alone scales it.

    F and B are N:M to the end, and so is the model's state dict: **it does not hold the adapters**. The callback's
    state does. After the training a module adds the product of its adapter still;
    :func:`~lightning_nm.merge_adapters`, :func:`~lightning_nm.drop_adapters`, :func:`~lightning_nm.save_adapters`,
    :func:`~lightning_nm.load_adapters` and ``lightning-nm export --adapters`` take it from there.

    Args:
        refresh_every: Optimizer steps between two selections of the backward mask (the paper's 100).
        first_refresh: Optimizer steps before the first selection after that of the start; ``None`` for
            ``refresh_every``. The authors' code selects after 99, 199, ... steps, so its number is 99.
        start: When to prune: an integer is a training step, a float a share of the planned ones. The paper prunes
            before the first step.
        init: ``"magnitude"`` keeps the largest entries. ``"zeros"`` keeps the nonzeros of a model that is already N:M
            sparse.
        adapters: ``{"rank": 8, "last": 0.01}``: low-rank adapters of this rank for the last share of the planned
            training steps, at least for one (the paper's 0.01). Only for linear layers. ``None`` for none.

    Raises:
        TypeError: If ``adapters`` is no mapping, and what :class:`ASP` refuses.
        ValueError: If ``refresh_every``, ``first_refresh`` or the rank is below 1, ``last`` is not above 0 and at most
            1, ``adapters`` has other keys, and what :class:`ASP` refuses. When training starts, with ``adapters``: if
            the number of steps is not known, masks come only later than the adapters, or a masked layer is none that
            can have an adapter, by its name.

    Example:
        >>> SLoPe(adapters={"rank": 8, "last": 0.01}).schedule(planned_steps=1000)
        (0, 990)
    """

    short_name = "slope"
    restores_masks = True
    sparse_dgrad = True
    headline = "overlap"
    fixed = ("adapters",)

    def __init__(
        self,
        refresh_every: int = 100,
        first_refresh: int | None = None,
        start: Moment = 0,
        init: Literal["magnitude", "zeros"] = "magnitude",
        adapters: AdapterSpec | None = None,
    ) -> None:
        super().__init__(start, init)
        for name, value in (("refresh_every", refresh_every), ("first_refresh", first_refresh)):
            if value is not None:
                check_count(name, value, 1)
        self.refresh_every = refresh_every
        self.first_refresh = first_refresh
        self.adapters = _checked(adapters)

    @property
    def refused_schedule(self) -> Mapping[str, str]:  # type: ignore[override]
        """What adapters beside an N:M weight cannot follow, either."""
        refused = dict(super().refused_schedule)
        if self.adapters:
            refused["dense_end"] = (
                "its adapters lie beside N:M weights at the end. Leave adapters out"
            )
        return refused

    def schedule(self, planned_steps: int | None) -> tuple[int, ...]:
        """The step at which to prune, and with adapters that from which they work."""
        begin = super().schedule(planned_steps)
        if not self.adapters:
            return begin
        last = self.adapters["last"]
        if planned_steps is None:
            raise UnknownLength(
                f"SLoPe's adapters are for the last {last} of the planned training steps",
                "leave adapters out",
            )
        steps = max(round(last * planned_steps), 1)
        return (begin[0] if begin else 0, max(planned_steps - steps, 0))

    def sparse_window(self, layer: NMLayer) -> tuple[int, ...]:
        """The training step from which the layer is N:M: to the end, with adapters or without."""
        return tuple(step for step in layer.progress.schedule[:1] if step)

    def check(self, planned_steps: int | None) -> None:
        """Refuse adapters that begin before the masks, beside what :class:`ASP` warns of."""
        super().check(planned_steps)
        if not self.adapters:
            return
        start, adapted = self.schedule(planned_steps)
        if adapted < start:
            raise ValueError(
                f"SLoPe's adapters of the last {self.adapters['last']} begin at step {adapted} of {planned_steps}, "
                f"before start={self.start} prunes at step {start}: use a smaller `last`, or an earlier `start`"
            )

    def check_stages(self, layer: NMLayer) -> None:
        """Refuse a stage of a user's ``schedule`` that begins when adapters are trained: its masks are others."""
        if not self.adapters or not layer.progress.stages:
            return
        begin, name = layer.progress.stages[-1]
        _, adapted = layer.progress.schedule
        if adapted < begin:
            raise ValueError(
                f"SLoPe's adapters begin at step {adapted}, before the schedule's last stage, '{name}', at step "
                f"{begin} (layer '{layer.name}'): use a smaller `last`, or an earlier stage"
            )

    def init_masks(self, layer: NMLayer) -> None:
        """Choose the mask if training has begun to prune; let the adapters begin anew."""
        super().init_masks(layer)
        if not self.adapters or layer.spec.forward_reason:
            return
        _refuse_adapters(layer)
        self._init_adapters(layer)

    @torch.no_grad()
    def _init_adapters(self, layer: NMLayer) -> None:
        rank = self.adapters["rank"]
        weight = layer.weight.detach()
        out, columns = layer.view.rows_shape(weight)
        if rank > min(out, columns):
            raise ValueError(
                f"SLoPe's adapters have rank {rank}, and the weight of layer '{layer.name}', {out} x {columns}, has at "
                f"most {min(out, columns)}: use a smaller rank, or name the layer in `exclude`"
            )
        left = weight.new_zeros(out, rank)
        right = initial_right(rank, columns, weight, layer.generator())
        for name, values in ((LEFT, left), (RIGHT, right)):
            if name in layer.parameters:
                # An optimizer may hold this object.
                layer.parameters[name].copy_(values)
            else:
                layer.parameters[name] = nn.Parameter(values)

    def low_rank(self, layer: NMLayer) -> tuple[Tensor, Tensor] | None:
        """L and R in the last steps."""
        if not self.trains_parameters(layer):
            return None
        return layer.parameters[LEFT], layer.parameters[RIGHT]

    def trains_parameters(self, layer: NMLayer) -> bool:
        """Whether the adapters' steps have begun."""
        is_last = layer.progress.reached == 2  # after the start and the beginning of the adapters
        return is_last and LEFT in layer.parameters

    def _choose_mask(self, layer: NMLayer) -> None:
        super()._choose_mask(layer)
        self._choose_backward(layer)

    @torch.no_grad()
    def update(self, layer: NMLayer) -> None:
        """Prune when the clock reaches ``start``; select the backward mask anew when it is time."""
        was_pruned = layer.masks.bits is not None
        super().update(layer)
        first = self.first_refresh or self.refresh_every
        if was_pruned and layer.progress.crossed(self.refresh_every, first):
            self._choose_backward(layer)

    def _choose_backward(self, layer: NMLayer) -> None:
        """Select the backward mask from the weight as it is now; the forward mask stays."""
        if layer.spec.dgrad_reason:
            return
        forward = layer.masks.forward
        backward = self._backward_of(layer, forward)
        if forward is None:
            # The forward product cannot be N:M in this layer, and is dense.
            layer.set_masks(None, backward)
        else:
            layer.masks.set_backward(backward)
        # Reading the density waits for the device, which is rare enough.
        layer.masks.measure_backward(backward)

    @staticmethod
    def _backward_of(layer: NMLayer, forward: Tensor | None) -> Tensor:
        weight_rows = layer.view.rows(layer.weight.detach())
        forward_rows = None if forward is None else layer.view.rows(forward)
        backward_rows = backward_mask(
            weight_rows, forward_rows, layer.pattern, groups=layer.spec.groups
        )
        return layer.view.unrows(backward_rows)

    def statistics(self, layers: Sequence[NMLayer]) -> dict[str, float]:
        """``adapter_share``: the Frobenius norm of L R over that of W_F, of all layers together; at first 0."""
        adapted = [layer for layer in layers if LEFT in layer.parameters]
        if not adapted:
            return {}
        beside = kept = 0.0
        for layer in adapted:
            left = layer.parameters[LEFT].detach().double()
            right = layer.parameters[RIGHT].detach().double()
            # |L R|^2 = tr(L^T L R R^T), without the matrix of the weight's shape.
            beside += float(((left.t() @ left) * (right @ right.t())).sum())
            kept += float(layer.forward_weight().double().square().sum())
        return {"adapter_share": (beside / kept) ** 0.5 if kept else 0.0}


def _checked(adapters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of the adapters; empty for none."""
    if adapters is None or adapters == {}:
        return {}
    known = list(AdapterSpec.__annotations__)
    check_keys("adapters", adapters, known)
    for key in known:
        if key not in adapters:
            raise ValueError(
                f'adapters={dict(adapters)} lacks {key!r}: give, for example, {{"rank": 8, "last": 0.01}}'
            )
    rank, last = adapters["rank"], adapters["last"]
    check_count("rank", rank, 1)
    check_number("last", last)
    if not 0 < last <= 1:
        raise ValueError(
            f"last={last} must be a share of the training steps, above 0 and at most 1: the paper's is 0.01"
        )
    return {"rank": rank, "last": last}


def _refuse_adapters(layer: NMLayer) -> None:
    """Raise a ``ValueError`` for a layer beside whose weight no adapter can lie."""
    refuse_tensor_parallel(layer, "low-rank adapters of the whole weight")
    module = layer.spec.module
    found = find_adapter(type(module))
    reason = ""
    if isinstance(module, NonDynamicallyQuantizableLinear):
        reason = "attention reads its output projection without calling it"
    elif found is None or not vars(found[0]).get("takes_low_rank"):
        reason = f"it is no linear layer, but the '{layer.spec.parameter}' of a {original_class(module).__name__}"
    elif layer.spec.tied:
        reason = "its weight is tied to that of another module"
    if reason:
        raise ValueError(
            f"SLoPe's adapters cannot lie beside the weight of layer '{layer.name}': {reason}. Name the layer in "
            "`exclude`, or give it a method without adapters by `rules`, such as "
            f'{{"include": "{layer.name}", "method": "slope"}}'
        )
