"""Which weights of a model can be packed, and putting packed weights in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_nm.functional.nm_format import PACKED_DTYPES
from lightning_nm.nn.adapters import FUSED_PATHS, Adapter, find_adapter
from lightning_nm.nn.packed.layers import (
    PackedLayer,
    holds_embedding,
    packed_adapter,
    packed_class,
)
from lightning_nm.nn.packed.tensor import Role
from lightning_nm.nn.packed.weight import PackedWeight
from lightning_nm.nn.selection import candidates_of
from lightning_nm.nn.weight import Layout, parameter_key, plain_name

SAME_BLOCKS = {Layout.EXPERTS: Layout.FLAT, Layout.EXPERTS_TRANSPOSED: Layout.PLAIN}
"""The layouts of experts, and those in which a weight of three axes has the same blocks in files."""


class Place(NamedTuple):
    """A parameter that can be packed.

    Args:
        module: Its module.
        parameter: Its name there.
        layout: Where the blocks lie that the module's products contract.
        role: What the module is.
    """

    module: nn.Module
    parameter: str
    layout: Layout
    role: Role

    @property
    def layouts(self) -> list[Layout]:
        """Where the blocks may lie in files: those of a convolution also in the flattened filter."""
        return [self.layout, Layout.FLAT] if self.role == "convolution" else [self.layout]

    @property
    def weight(self) -> nn.Parameter:
        """The parameter."""
        found: nn.Parameter = self.module._parameters[self.parameter]  # type: ignore[assignment]
        return found


def places_of(model: nn.Module) -> tuple[dict[str, Place], dict[str, str]]:
    """The weights of a model that can be packed, by their keys in the state dict, and why others cannot.

    Raises:
        ValueError: If a sparsifier's masks are installed.
    """
    for name, module in model.named_modules():
        if _is_masked(module):
            raise ValueError(
                f"layer '{name}' is masked by a sparsifier: call sparsifier.bake() and .detach() first"
            )
    return places_and_reasons(model)


def places_and_reasons(model: nn.Module) -> tuple[dict[str, Place], dict[str, str]]:
    """As :func:`places_of`; layers that are masked or packed are among those that cannot be packed."""
    found: dict[str, Place] = {}
    owners = _owner_counts(model)
    reasons: dict[str, str] = {}
    candidates, skipped = candidates_of(model)
    for candidate in candidates:
        module, parameter = candidate.module, candidate.spec.parameter
        key = parameter_key(candidate.module_name, parameter)
        weight = module._parameters.get(parameter)
        if _is_masked(module):
            reasons[key] = "masked by a sparsifier"
        elif packed_adapter(type(module)) is None:
            reasons[key] = f"no packed layer for {type(module).__name__}"
        elif weight is None or nn.parameter.is_lazy(weight) or weight.dim() < 2:
            reasons[key] = "its weight is not an ordinary parameter"
        elif weight.dtype not in PACKED_DTYPES:
            reasons[key] = f"its weight is {weight.dtype}"
        elif isinstance(weight, DTensor):
            reasons[key] = "its weight is sharded"
        elif owners[id(weight)] > 1:
            reasons[key] = "its weight is shared with another module"
        else:
            own_layout = Layout(candidate.spec.layout)
            layout = SAME_BLOCKS.get(own_layout, own_layout)
            role: Role = "transposed" if own_layout.is_transposed else "linear"
            if own_layout.has_experts:
                role = "experts-transposed" if own_layout.is_transposed else "experts"
            elif weight.dim() > 2:
                role = "convolution"
            found[key] = Place(module, parameter, layout, role)
    return found, {**skipped, **reasons}


def embeddings_of(model: nn.Module) -> dict[str, Place]:
    """The embeddings of a model that can be held in int8, by the keys of their weights in the state dict.

    Not those whose weight another module shares, which multiplies by it, or that have a forward of their own.
    """
    found: dict[str, Place] = {}
    owners = _owner_counts(model)
    for name, module in model.named_modules():
        if not holds_embedding(type(module)) or module.max_norm is not None or _is_masked(module):
            continue
        weight = module._parameters.get("weight")
        if weight is not None and owners[id(weight)] == 1 and not isinstance(weight, DTensor):
            key = parameter_key(plain_name(name), "weight")
            found[key] = Place(module, "weight", Layout.PLAIN, "embedding")
    return found


def _owner_counts(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter, by its id."""
    owners: dict[int, int] = {}
    for each in model.modules():
        for tensor in each._parameters.values():
            owners[id(tensor)] = owners.get(id(tensor), 0) + 1
    return owners


def _is_masked(module: nn.Module) -> bool:
    return (
        isinstance(module, Adapter)
        and not isinstance(module, PackedLayer)
        and bool(module.nm_layers)
    )


def put(place: Place, weight: PackedWeight) -> None:
    """Replace a parameter by its packed weight, and the class of its module."""
    module = place.module
    weight.train(module.training)
    if not isinstance(module, PackedLayer):
        module.__class__ = packed_class(type(module))
    del module._parameters[place.parameter]
    setattr(module, place.parameter, weight)


def call_packed_children(model: nn.Module) -> None:
    """Let modules that read the weights of their children call them, and switch off fused paths, which read them."""
    for module in model.modules():
        found = find_adapter(type(module))
        children = () if found is None else found[0].reads_children
        reads = any(isinstance(getattr(module, child, None), PackedLayer) for child in children)
        if reads and not isinstance(module, PackedLayer):
            module.__class__ = packed_class(type(module))
    for module in model.modules():
        for kind, attribute, off in FUSED_PATHS:
            if isinstance(module, kind) and any(
                isinstance(part, PackedLayer) for part in module.modules()
            ):
                setattr(module, attribute, off)


def packed_weights(
    model: nn.Module, *, all_names: bool = False
) -> Iterator[tuple[str, PackedWeight]]:
    """The packed weights of a model by the keys that they have in the dense state dict.

    Args:
        model: A model.
        all_names: Whether a weight of a module that the model holds under several names comes with each of its keys,
            as in a state dict. By default it comes once, with its first key.
    """
    for name, module in model.named_modules(remove_duplicate=not all_names):
        if isinstance(module, PackedWeight):
            yield name, module
