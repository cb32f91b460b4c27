r"""SuPar: initial weights and learning rates for the number of entries that a mask keeps (arXiv 2405.15743).

A masked weight of density :math:`\rho` sums over :math:`\rho` times as many inputs as a dense one. With the values and
the learning rate of a dense weight its output begins too small and moves too slowly. For hyperparameters that suit the
density :math:`\rho_0`, the variance of the kept entries becomes :math:`\sigma^2 \rho_0 / \rho`, and the learning rate
:math:`\eta \rho_0 / \rho`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_nm.nn.costs import kept_share
from lightning_nm.nn.layer import NMLayer
from lightning_nm.training.optimizers import RegisteredOptimizer

Scale = Literal["supar", "supar-lr"]

_KNOWN = (Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, SGD)
_KNOWN_ELSEWHERE = re.compile(
    # Lion by any package: its step is the sign of a moment times the rate.
    r"bitsandbytes\.(Paged)?(Adagrad|AdamW?|Lion|RMSprop|SGD)(8bit|32bit)?|torchao\._?AdamW?(4bit|8bit|Fp8)?|\w+\.Lion"
)
"""Optimizers outside of torch, as ``package.Class``.

A class that is called Adam may be another one: that of galore_torch projects gradients to a low rank, and apex keeps
copies of the parameters by their positions in the groups.
"""
_RATES = ("lr", "initial_lr", "max_lr", "min_lr")
"""Learning rates in a group; schedulers keep the latter three there."""


class _Initial(NamedTuple):
    """The initial values of a weight that was rescaled and not trained since, and the factor."""

    before: Tensor
    factor: float


# By parameter.
_rescaled = WeakTensorKeyDictionary()


def check_scale(scale: str | None, base_density: float) -> None:
    """Refuse an unknown ``scale`` or an impossible ``base_density`` by a ``ValueError``."""
    if scale not in (None, "auto", *get_args(Scale)):
        raise ValueError(f"scale={scale!r} is unknown: use 'auto', 'supar', 'supar-lr' or None")
    if not 0 < base_density <= 1:
        raise ValueError(
            f"base_density={base_density} must lie in (0, 1]: the density that the learning rate suits"
        )


@torch.no_grad()
def rescale_initial(layer: NMLayer, base_density: float = 1.0) -> float:
    r"""Multiply an untrained weight so that its kept entries make up for the pruned ones; return the factor.

    The factor is :math:`\sqrt{\rho_0 \lVert W \rVert^2 / \lVert W_F \rVert^2}`: the sum over the kept entries then has
    the variance of the dense sum. Under a random mask it is :math:`\sqrt{\rho_0 / \rho}`, as in the paper. A mask of
    the largest entries has raised their variance already, so the factor is smaller: at 1:16 and uniform values 2.45
    instead of 4. A weight whose pruned entries are zero keeps its values, whatever ``base_density``.

    A weight that was rescaled and not changed since is left alone: the fit before this one failed.

    Args:
        layer: A layer with a forward mask.
        base_density: :math:`\rho_0`, the density that the initial values suit.
    """
    if is_rescaled(layer):
        return _rescaled[layer.view.optimizer_param].factor
    before = layer.view.local.clone()
    with layer.full():
        square = _square(layer.weight)
        kept_square = _square(layer.forward_weight())
        factor = 1.0
        # A weight that is N:M already was trained or pruned: its values are not initial ones.
        if kept_square and kept_square != square:
            factor = math.sqrt(base_density * square / kept_square)
        layer.weight.mul_(factor)
    forget_initial(layer)
    if factor != 1:
        _rescaled[layer.view.optimizer_param] = _Initial(before, factor)
    return factor


@torch.no_grad()
def is_rescaled(layer: NMLayer) -> bool:
    """Whether the weight still has the values that :func:`rescale_initial` gave it, wherever its memory is now."""
    initial = _rescaled.get(layer.view.optimizer_param)
    if initial is None:
        return False
    values = layer.view.local
    return initial.before.shape == values.shape and torch.equal(
        values, (initial.before * initial.factor).to(values)
    )


@torch.no_grad()
def restore_initial(layer: NMLayer) -> None:
    """Give a weight back the values from before :func:`rescale_initial`, unless it was changed since."""
    if is_rescaled(layer):
        layer.view.local.copy_(_rescaled[layer.view.optimizer_param].before)
    forget_initial(layer)


def forget_initial(layer: NMLayer) -> None:
    """Free the values from before :func:`rescale_initial`: the weight is trained from now on."""
    _rescaled.pop(layer.view.optimizer_param, None)


def _square(tensor: Tensor) -> float:
    # In float64: squares of small values in half precision would vanish.
    return float(tensor.detach().double().square().sum())


class ScaledLearningRates:
    """Multiplies the learning rates of masked weights by ``base_density / density`` while an optimizer steps.

    The step is made by a :meth:`view` of the optimizer, whose groups are split by factor, with other learning rates in
    the parts. Those of the optimizer itself stay as they are: schedulers, logs and checkpoints see the user's groups
    and rates, also if the step raises an exception. Decoupled weight decay is multiplied with the learning rate, as in
    the paper's code.

    Args:
        base_density: The density that the learning rates suit.
    """

    def __init__(self, base_density: float = 1.0) -> None:
        self.base_density = base_density

    def check_optimizer(self, optimizer: Optimizer, layers: Sequence[NMLayer]) -> None:
        """Refuse an optimizer of any of these layers unless it steps each entry by itself, in proportion to its rate.

        This is known of classes, not found out: a step of a probe might communicate, or step what the optimizer wraps.

        Raises:
            ValueError: With the optimizer's and a layer's name.
        """
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        masked = [
            layer.name
            for layer in layers
            if layer.spec.maskable and id(layer.view.optimizer_param) in held
        ]
        names = [
            f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
            # Classes that inherit from a known one count as it does.
            for kind in type(optimizer).__mro__
        ]
        known = isinstance(optimizer, _KNOWN) or any(map(_KNOWN_ELSEWHERE.fullmatch, names))
        if masked and not known:
            name = type(optimizer).__name__
            raise ValueError(
                f"scale='supar' multiplies the learning rate of layer '{masked[0]}' and others by a rule that "
                "holds for optimizers that step each entry by itself, in proportion to the learning rate. That is "
                "known of SGD, Adam, AdamW, Adamax, NAdam, RAdam, Adagrad, RMSprop and Lion, but not for "
                f"{name}: use one of them, let {name} inherit from one of torch's if the same is true of it, or use "
                "scale=None"
            )

    def factor(self, layer: NMLayer) -> float:
        """The factor of a layer's learning rate now; its density is 1 in a dense phase."""
        return self.base_density / (kept_share(layer) if layer.masks.has_forward else 1.0)

    def view(self, optimizer: Optimizer) -> Any:
        """An optimizer that shares its state and all else with another one, but may have other groups."""
        kind: Any = type(optimizer)
        # Not by __init__, which would make groups and state. One __dict__ for both: a step sets all on the optimizer.
        view: Any = object.__new__(_view_class(kind))
        view.__dict__ = optimizer.__dict__
        view.nm_of = optimizer
        view.param_groups = optimizer.param_groups
        view.nm_origins = []  # of each part: the group that it is of, and its factor
        return view

    def scale(self, view: Any, layers: Iterable[NMLayer]) -> None:
        """Give a view the groups of a step of these layers."""
        factors = {id(layer.view.optimizer_param): self.factor(layer) for layer in layers}
        parts: list[dict[str, Any]] = []
        origins: list[tuple[dict[str, Any], float]] = []
        for group in view.nm_of.param_groups:
            of_each = [factors.get(id(parameter), 1.0) for parameter in group["params"]]
            # A group without parameters stays, as one part.
            for factor in dict.fromkeys(of_each or [1.0]):
                part = dict(group)
                for key in group.keys() & {"params", "param_names"}:
                    pairs = zip(group[key], of_each, strict=True)
                    part[key] = [member for member, own in pairs if own == factor]
                for key in _rates_of(group):
                    part[key] = group[key] * factor
                parts.append(part)
                origins.append((group, factor))
        # Else the view steps by the groups themselves.
        if any(factor != 1 for _, factor in origins):
            view.param_groups = parts
            view.nm_origins = origins

    def write_back(self, view: Any) -> None:
        """Take over what a step wrote to the groups of a view, such as a counter."""
        # The view of another sparsifier on the same optimizer may lie between.
        while hasattr(view, "nm_of"):
            written = set()
            # Without factors there are no origins: the step wrote to the groups themselves.
            for part, (group, factor) in zip(view.param_groups, view.nm_origins, strict=False):
                # A counter has advanced alike in all parts of a group.
                if id(group) in written:
                    continue
                written.add(id(group))
                rates = _rates_of(group)
                for key, value in part.items():
                    if key in ("params", "param_names"):
                        continue
                    if key not in rates:
                        group[key] = value
                    elif isinstance(value, (int, float)) and value != group[key] * factor:
                        group[key] = value / factor  # the optimizer changed its rate itself
            view = view.nm_of

    @contextmanager
    def shown(self, known: RegisteredOptimizer) -> Iterator[None]:
        """Within, the optimizer itself has the groups of its step, for methods that read their learning rates."""
        optimizer = known.optimizer
        view = self.view(optimizer)
        self.scale(view, known.layers)
        groups = list(optimizer.param_groups)
        try:
            # In place: the optimizer and its wrappers share the list.
            optimizer.param_groups[:] = view.param_groups
            yield
        finally:
            optimizer.param_groups[:] = groups
            self.write_back(view)


def _rates_of(group: dict[str, Any]) -> list[str]:
    """The keys of a group's learning rates."""
    return [key for key in _RATES if isinstance(group.get(key), (int, float, Tensor))]


@cache
def _view_class(kind: type[Any]) -> type[Any]:
    """A subclass whose ``param_groups`` do not lie in the ``__dict__`` that a view shares with its optimizer."""
    own = {
        "__slots__": ("param_groups", "nm_of", "nm_origins"),
        # What an optimizer gives back when it is deleted, it gives back itself.
        "__del__": lambda view: None,
    }
    return type(kind.__name__, (kind,), own)
