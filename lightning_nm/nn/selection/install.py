"""Put a plan into a model and take it out again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_nm.nn.adapters import FUSED_PATHS, Adapter, adapted_class, find_adapter
from lightning_nm.nn.layer import NMLayer

_SAVED = "_nm_fast_path"


def install(model: nn.Module, layers: Iterable[NMLayer]) -> None:
    """Swap the classes of the layers' modules, and switch off fused paths that would bypass them."""
    for layer in layers:
        for module, parameter in layer.spec.holders:
            _adapt(module)
            vars(module)["nm_layers"][parameter] = layer
    for module in model.modules():
        if _needed_around(module):
            _adapt(module)
    for module in model.modules():
        for kind, attribute, off in FUSED_PATHS:
            if (
                isinstance(module, kind)
                and _is_masked(module)
                and attribute not in vars(module).get(_SAVED, {})
            ):
                vars(module).setdefault(_SAVED, {})[attribute] = getattr(module, attribute)
                setattr(module, attribute, off)


def uninstall(model: nn.Module, layers: Iterable[NMLayer]) -> None:
    """Give the layers' modules their classes back; what other sparsifiers installed stays."""
    for layer in layers:
        for module, parameter in layer.spec.holders:
            if isinstance(module, Adapter):
                module.nm_layers.pop(parameter, None)
    # Children come after their parents, which may be needed around them.
    for module in reversed(list(model.modules())):
        if isinstance(module, Adapter) and not module.nm_layers and not _needed_around(module):
            module.__class__ = type(module).nm_base  # type: ignore[assignment]
            del module.nm_layers
    for module in model.modules():
        if _SAVED in vars(module) and not _is_masked(module):
            for attribute, value in vars(module).pop(_SAVED).items():
                setattr(module, attribute, value)


def _adapt(module: nn.Module) -> None:
    if not isinstance(module, Adapter):
        module.__class__ = adapted_class(type(module))
        vars(module)["nm_layers"] = {}


def _needed_around(module: nn.Module) -> bool:
    found = find_adapter(type(module))
    return found is not None and found[0].needed_around(module)


def _is_masked(module: nn.Module) -> bool:
    return any(isinstance(part, Adapter) for part in module.modules())
