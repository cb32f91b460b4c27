"""Packed layers: the classes that modules take, one for each kind of layer."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_nm.nn.adapters import (
    Adapter,
    NMConv1d,
    NMConv2d,
    NMConv3d,
    NMLinear,
    NMMultiheadAttention,
    NMTransposedLinear,
    find_adapter,
)
from lightning_nm.nn.adapters.attention import AttentionForward
from lightning_nm.nn.packed.weight import PackedWeight


class PackedLayer(nn.Module):
    """Mixed into a module's class whose weights are packed; a :class:`PackedWeight` replaces each parameter.

    The forward is that of the module's adapter, whose :func:`~lightning_nm.nn.nm_linear` and
    :func:`~lightning_nm.nn.nm_conv` take packed weights in the place of masked layers.
    """

    nm_base: ClassVar[type[nn.Module]]  # the class that the module had before
    nm_unmaskable: ClassVar[str] = (
        "packed already, for inference: to prune, train or pack it anew, load lightning_nm.unpacked_state_dict(model) "
        "into a model that is not packed"
    )

    @property
    def nm_layers(self) -> dict[str, PackedWeight]:
        """The packed weights by the names of their parameters."""
        return {
            name: module
            for name, module in self._modules.items()
            if isinstance(module, PackedWeight)
        }

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no importable name: pickle and deepcopy make it again from the class it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).nm_base,), *reduced[2:]


class PackedEmbedding(PackedLayer):
    """``nn.Embedding`` whose matrix is in int8; the rows that are looked up are dequantised."""

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up."""
        weight = self.nm_layers["weight"]
        weight.refuse_training()
        values, scales = weight.values, weight.scales
        assert values is not None
        assert scales is not None
        rows = values.squeeze(-1)[input].float() * scales[input].unsqueeze(-1)
        return rows.to(weight.dtype)


class PackedMultiheadAttention(AttentionForward, PackedLayer):
    """``nn.MultiheadAttention`` with packed projections, or a packed ``out_proj`` alone."""

    project = NMMultiheadAttention.project


class PackedAdapted(PackedLayer):
    """A module of another adapter, which may call ``super()``: it is mixed in, too."""

    # An adapter's own are for masked layers.
    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict
    _apply = nn.Module._apply


class PackedLightningModule(nn.Module):
    """Mixed into the class of a LightningModule whose layers are packed, so that fitting it is refused at once.

    Lightning's fit leaves modules in evaluation mode, in which packed layers run: it would end at the first backward
    pass, by torch's error that no tensor requires gradients.
    """

    nm_base: ClassVar[type[nn.Module]]  # the class that the module had before

    def setup(self, stage: str) -> None:
        """Refuse to fit the module while no parameter requires gradients, by a ``RuntimeError``."""
        super().setup(stage)  # type: ignore[misc]
        # The dense parameters of a packed model may be trained: then the user made them require gradients.
        if stage == "fit" and not any(each.requires_grad for each in self.parameters()):
            raise next(m for m in self.modules() if isinstance(m, PackedWeight)).training_error()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As of a packed layer.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_lightning_module, (type(self).nm_base,), *reduced[2:]


def refuse_to_fit(model: nn.Module) -> None:
    """Let a packed model refuse to be fitted, if it is a LightningModule."""
    # Known by its hooks: this part of the package does not import Lightning.
    is_lightning = hasattr(model, "training_step") and hasattr(model, "setup")
    if is_lightning and not isinstance(model, PackedLightningModule):
        model.__class__ = _mixed(PackedLightningModule, type(model))


@functools.cache
def _mixed(*bases: type[nn.Module], forward: Any = None) -> type[nn.Module]:
    """The class of these bases, the last of which is the module's own; made at first use, and once."""
    attributes: dict[str, Any] = {"nm_base": bases[-1], "__module__": __name__}
    if forward is not None:
        attributes["forward"] = forward
    return type(f"Packed{bases[-1].__name__}", bases, attributes)


def _new_lightning_module(base: type[nn.Module]) -> nn.Module:
    """An empty module, for pickle and deepcopy to fill."""
    cls = _mixed(PackedLightningModule, base)
    return cls.__new__(cls)


_BORROWED = (NMLinear, NMTransposedLinear, NMConv1d, NMConv2d, NMConv3d)
"""Adapters of which packed layers need the forward alone."""


def packed_adapter(kind: type[nn.Module]) -> type[Adapter] | None:
    """The adapter for a module class whose products can be packed; ``None`` if there is none.

    Classes with a forward of their own have none, and those that look rows up.
    """
    found = find_adapter(kind)
    if found is None or kind.forward is not found[1].forward or found[0].role == "embedding":
        return None
    return found[0]


def holds_embedding(kind: type[nn.Module]) -> bool:
    """Whether modules of a class look rows up as ``nn.Embedding`` does."""
    return issubclass(kind, nn.Embedding) and kind.forward is nn.Embedding.forward


def packed_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class that mixes a packed layer into ``base``, and its adapter or the adapter's forward."""
    if holds_embedding(base):
        return _mixed(PackedEmbedding, base)
    adapter = packed_adapter(base)
    if adapter is None:
        raise TypeError(f"no packed layer for {base.__name__}")
    if adapter in _BORROWED:
        return _mixed(PackedLayer, base, forward=adapter.forward)
    if adapter is NMMultiheadAttention:
        return _mixed(PackedMultiheadAttention, base)
    return _mixed(PackedAdapted, adapter, base)


def _new(base: type[nn.Module], *_: bool) -> nn.Module:
    """An empty module of the packed class, for pickle and deepcopy to fill; pickles of 0.3 have a second argument."""
    cls = packed_class(base)
    return cls.__new__(cls)
