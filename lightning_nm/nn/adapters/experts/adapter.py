"""Modules that hold the weights of experts as 3-D parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from lightning_nm.nn.adapters.base import Adapter, WeightSpec, original_class, register_adapter
from lightning_nm.nn.adapters.experts import operators  # noqa: F401  (registers the operators)
from lightning_nm.nn.adapters.experts.products import ExpertsInUse
from lightning_nm.nn.adapters.experts.weight import ExpertWeight, Part
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import Layout

Kind = TypeVar("Kind", bound=type[nn.Module])

_TRANSPOSED = frozenset({"Llama4TextExperts"})
"""Classes of transformers that hold ``[experts, in, out]`` and do not tell so by an attribute."""


@register_adapter
class NMExperts(Adapter):
    """Any module with weights ``[experts, out, in]`` or ``[experts, in, out]``, whose ``forward`` stays its own.

    While it runs, reading such a parameter gives an
    :class:`~lightning_nm.nn.adapters.experts.weight.ExpertWeight`, whose products are those of masked layers, expert by
    expert. Elsewhere it is the parameter. Modules are adapted without being
    registered if their attributes or a name say that they hold experts, or if `include` names a parameter;
    :func:`register_experts` makes a class known.
    """

    handles = nn.Module
    by_parameters = True
    wraps_forward = True
    transposed: ClassVar[bool | Collection[str] | None] = None
    """Whether weights are ``[experts, in, out]``, or the names of those that are; ``None`` asks the module."""
    parameters_masked: ClassVar[Collection[str] | None] = None
    """The names of the weights; ``None`` takes all parameters of three dimensions."""

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """Every 3-D floating-point parameter of matrices, its output rows in one group for each expert."""
        for name, parameter in module._parameters.items():
            is_chosen = cls.parameters_masked is None or name in cls.parameters_masked
            if not is_chosen or not _holds_matrices(parameter):
                continue
            layout: Layout = "experts"
            if cls._is_transposed(module, name):
                layout = "experts-transposed"
            # One group for each expert: no dgrad block crosses two of them.
            yield WeightSpec(name, layout, len(parameter))

    @classmethod
    def _is_transposed(cls, module: Any, parameter: str) -> bool:
        """Whether a parameter is ``[experts, in, out]``."""
        if cls.transposed is None:
            # "is True": the attribute of some other class may be a method.
            says_so = getattr(module, "is_transposed", False) is True
            return says_so or original_class(module).__name__ in _TRANSPOSED
        if isinstance(cls.transposed, bool):
            return cls.transposed
        return parameter in cls.transposed

    @classmethod
    def recognizes(cls, name: str, module: nn.Module, parameter: str) -> bool:
        """Whether a parameter is known to hold experts.

        The module must have the attributes that transformers gives its experts, or "expert" must be in the name of its
        class, in its own, or in the parameter's, and the parameter must hold more than one matrix.
        """
        is_registered = not cls.by_parameters
        # The attributes that transformers gives its experts.
        is_of_transformers = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        if is_registered or is_of_transformers:
            return True
        if len(getattr(module, parameter)) <= 1:
            return False
        names = (original_class(module).__name__, name.rpartition(".")[2], parameter)
        return any("expert" in each.lower() for each in names)

    @classmethod
    def macs(
        cls, module: Any, parameter: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> int | None:
        """Return what the products with the weight counted in the module's last call."""
        layer = module.nm_layers.get(parameter) if isinstance(module, Adapter) else None
        return None if layer is None else layer.costs.last_call

    @classmethod
    def wrapping(cls) -> dict[str, Any]:
        """Return the forward pass and the reading of attributes for adapted classes."""
        # torch.compile breaks its graph around the experts, whose counts of tokens are data.
        return {"forward": torch.compiler.disable(_forward), "__getattr__": _getattr}


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the module's own forward, in which each of its masked weights is an :class:`ExpertWeight`."""
    state = vars(self)
    # The module may call itself; each call has products of its own.
    outer = state.get("nm_in_use")
    in_use: dict[str, ExpertsInUse] = {}
    state["nm_in_use"] = in_use
    try:
        return type(self).nm_base.forward(self, *args, **kwargs)
    finally:
        del state["nm_in_use"]
        if outer is not None:
            state["nm_in_use"] = outer
        for use in in_use.values():
            use.close()


def _getattr(self: Any, name: str) -> Any:
    """Return an attribute that is not in the module's dict, as parameters are not."""
    in_use = vars(self).get("nm_in_use")
    if in_use is None or name not in self.nm_layers:
        return type(self).nm_base.__getattr__(self, name)
    if name not in in_use:
        layer = self.nm_layers[name]
        # A packed layer has products of its own.
        in_use[name] = ExpertsInUse(layer) if isinstance(layer, NMLayer) else layer.in_use()
    return ExpertWeight.of(Part(in_use[name]))


def register_experts(
    kind: Kind | None = None,
    *,
    transposed: bool | Collection[str] = False,
    parameters: Collection[str] | None = None,
) -> Any:
    """Make a module class known that holds the weights of experts in 3-D parameters; usable as a decorator.

    Args:
        kind: The module class; its ``forward`` stays as it is.
        transposed: Whether the weights are ``[experts, in, out]`` instead of ``[experts, out, in]``, or the names of
            those that are.
        parameters: The names of the weights; all 3-D floating-point parameters by default.

    Example::

        >>> from lightning_nm import NMSparsifier
        >>> @register_experts(transposed=True)
        ... class MoE(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = nn.Parameter(torch.randn(4, 8, 16))
        ...     def forward(self, x):  # [4, tokens, 8]
        ...         return torch.bmm(x, self.up)
        >>> list(NMSparsifier(MoE(), "2:4").attach().layers)
        ['up']
    """

    def register(kind: Kind) -> Kind:
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise TypeError(f"register_experts takes a module class, not {kind!r}")
        if kind.forward is nn.Module.forward:
            raise TypeError(
                f"{kind.__name__} has no forward, so other modules read its weights: register theirs"
            )
        choices = {
            "handles": kind,
            "by_parameters": False,
            "transposed": transposed,
            "parameters_masked": parameters,
        }
        register_adapter(type(f"NM{kind.__name__}Adapter", (NMExperts,), choices))
        return kind

    # With a class it has been called as @register_experts, else as @register_experts(...).
    decorator: Callable[[Kind], Kind] = register
    return decorator if kind is None else register(kind)


def _holds_matrices(parameter: nn.Parameter | None) -> bool:
    """Whether a parameter holds matrices of floating-point values."""
    if parameter is None or nn.parameter.is_lazy(parameter) or parameter.dim() != 3:
        return False
    return parameter.is_floating_point() and min(parameter.shape[1:]) > 1
