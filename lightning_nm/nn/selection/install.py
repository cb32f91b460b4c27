"""Put a plan into a model and take it out again."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from lightning_nm.nn.adapters import FUSED_PATHS, Adapter, adapted_class, find_adapter
from lightning_nm.nn.layer import NMLayer

# Key in a module's dict for the attributes that switch its fused paths, as they were: name -> value.
_FAST_PATH = "_nm_fast_path"


def install(model: nn.Module, layers: Iterable[NMLayer]) -> None:
    """Swap the classes of the layers' modules, and switch off fused paths that would bypass them."""
    for layer in layers:
        for module, parameter in layer.spec.holders:
            _adapt(module)
            vars(module)["nm_layers"][parameter] = layer
    # A second pass: whether a parent is needed shows once its children are adapted.
    for module in model.modules():
        if _needed_around(module):
            _adapt(module)
    for module in model.modules():
        if _holds_masks(module):
            _switch_off_fused_paths(module)


def _switch_off_fused_paths(module: nn.Module) -> None:
    """Set the attributes that keep torch from reading the weights of a module's parts in one kernel."""
    for kind, attribute, off in FUSED_PATHS:
        if not isinstance(module, kind):
            continue
        saved = vars(module).setdefault(_FAST_PATH, {})
        # Another sparsifier may have switched it off: what was saved first is the module's own value.
        if attribute not in saved:
            saved[attribute] = getattr(module, attribute)
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
        if _FAST_PATH in vars(module) and not _holds_masks(module):
            saved = vars(module).pop(_FAST_PATH)
            for attribute, value in saved.items():
                setattr(module, attribute, value)


def _adapt(module: nn.Module) -> None:
    """Swap the class of a module, unless that was done before."""
    if not isinstance(module, Adapter):
        module.__class__ = adapted_class(type(module))
        # Past any __setattr__ of the module's own class.
        vars(module)["nm_layers"] = {}


def _needed_around(module: nn.Module) -> bool:
    """Whether a module must be adapted for the sake of its children."""
    found = find_adapter(type(module))
    if found is None:
        return False
    adapter, _ = found
    return adapter.needed_around(module)


def _holds_masks(module: nn.Module) -> bool:
    """Whether a module or a part of it is adapted."""
    return any(isinstance(part, Adapter) for part in module.modules())
