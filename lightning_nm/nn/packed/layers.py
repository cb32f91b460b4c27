"""Packed layers: the classes that modules take, one for each kind of layer."""

from __future__ import annotations

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
from lightning_nm.nn.adapters.conv import padded_input
from lightning_nm.nn.packed.ops import packed_conv, packed_embedding, packed_linear, training_error
from lightning_nm.nn.packed.tensor import Role
from lightning_nm.nn.packed.weight import PackedWeight


class PackedLayer(nn.Module):
    """Mixed into a module's class whose weights are packed; a :class:`PackedWeight` replaces each parameter."""

    nm_base: ClassVar[type[nn.Module]]  # the class that the module had before
    nm_unmaskable: ClassVar[str] = (
        "packed already, for inference: to prune, train or pack it anew, load lightning_nm.unpacked_state_dict(model) "
        "into a model that is not packed"
    )
    packed_role: ClassVar[Role] = "linear"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no importable name: pickle and deepcopy make it again from the class it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).nm_base,), *reduced[2:]


class PackedLinear(PackedLayer):
    """``nn.Linear``, and with :attr:`packed_role` ``"transposed"`` the ``Conv1D`` of ``transformers``."""

    def forward(self, input: Tensor) -> Tensor:
        """``input @ W^T + bias``."""
        layer: Any = self
        return packed_linear(input, layer.weight, layer.bias)


class PackedTransposedLinear(PackedLinear):
    """``transformers.pytorch_utils.Conv1D``."""

    packed_role = "transposed"


class PackedConv(PackedLayer):
    """Convolutions in one to three dimensions."""

    packed_role = "convolution"

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with W."""
        conv: Any = self
        x, padding, unbatched = padded_input(conv, input, conv.weight.dim() - 2)
        y = packed_conv(x, conv.weight, conv.bias, conv.stride, padding, conv.dilation, conv.groups)
        return y.squeeze(0) if unbatched else y


class PackedEmbedding(PackedLayer):
    """``nn.Embedding`` whose matrix is in int8; the rows that are looked up are dequantised."""

    packed_role = "embedding"

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up."""
        layer: Any = self
        return packed_embedding(input, layer.weight)


class PackedMultiheadAttention(AttentionForward, PackedLayer):
    """``nn.MultiheadAttention`` with packed projections, or a packed ``out_proj`` alone."""

    def project(
        self, x: Tensor, parameter: str, bias: Tensor | None, rows: tuple[int, int] | None = None
    ) -> Tensor:
        """``x @ W^T + bias`` of a projection, or of some rows of it."""
        weight = getattr(self, parameter)
        if isinstance(weight, PackedWeight):
            return packed_linear(x, weight, bias, rows)
        return super().project(x, parameter, bias, rows)


class PackedAdapted(PackedLayer):
    """A module of a registered adapter, mixed in before the adapter.

    The adapter's ``forward`` runs its products by :func:`~lightning_nm.nn.nm_linear` and
    :func:`~lightning_nm.nn.nm_conv`, which take packed weights in the place of layers.
    """

    @property
    def nm_layers(self) -> dict[str, PackedWeight]:
        """The packed weights by the names of their parameters."""
        return {
            name: module
            for name, module in self._modules.items()
            if isinstance(module, PackedWeight)
        }

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
            raise training_error(next(m for m in self.modules() if isinstance(m, PackedWeight)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As of a packed layer.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new_lightning_module, (type(self).nm_base,), *reduced[2:]


def refuse_to_fit(model: nn.Module) -> None:
    """Let a packed model refuse to be fitted, if it is a LightningModule."""
    # Known by its hooks: this part of the package does not import Lightning.
    is_lightning = hasattr(model, "training_step") and hasattr(model, "setup")
    if is_lightning and not isinstance(model, PackedLightningModule):
        model.__class__ = _lightning_class(type(model))


def _lightning_class(base: type[nn.Module]) -> type[nn.Module]:
    bases = (PackedLightningModule, base)
    if bases not in _CLASSES:
        attributes = {"nm_base": base, "__module__": __name__}
        _CLASSES[bases] = type(f"Packed{base.__name__}", bases, attributes)
    return _CLASSES[bases]


def _new_lightning_module(base: type[nn.Module]) -> nn.Module:
    """An empty module, for pickle and deepcopy to fill."""
    cls = _lightning_class(base)
    return cls.__new__(cls)


_KINDS: dict[type[Adapter], type[PackedLayer]] = {
    NMLinear: PackedLinear,
    NMTransposedLinear: PackedTransposedLinear,
    **dict.fromkeys((NMConv1d, NMConv2d, NMConv3d), PackedConv),
    NMMultiheadAttention: PackedMultiheadAttention,
}
_CLASSES: dict[tuple[type[nn.Module], ...], type[nn.Module]] = {}  # by the bases of each


def packed_kind(kind: type[nn.Module]) -> type[PackedLayer] | None:
    """The packed layer for a module class; ``None`` if there is none, or it has a forward of its own."""
    found = find_adapter(kind)
    if found is None or kind.forward is not found[1].forward:
        return None
    adapter, _ = found
    if adapter.role == "embedding":
        return None
    return _KINDS.get(adapter, PackedAdapted)


def holds_embedding(kind: type[nn.Module]) -> bool:
    """Whether modules of a class look rows up as ``nn.Embedding`` does."""
    return issubclass(kind, nn.Embedding) and kind.forward is nn.Embedding.forward


def packed_class(base: type[nn.Module]) -> type[nn.Module]:
    """The class that mixes the packed layer into ``base``, and a registered adapter; made at first use, and once."""
    attributes: dict[str, Any] = {"nm_base": base, "__module__": __name__}
    kind = packed_kind(base)
    if holds_embedding(base):
        kind = PackedEmbedding
    if kind is None:
        raise TypeError(f"no packed layer for {base.__name__}")
    bases: tuple[type[nn.Module], ...] = (kind, base)
    if kind is PackedAdapted:
        found = find_adapter(base)
        assert found is not None
        bases = (kind, found[0], base)
    if bases not in _CLASSES:
        _CLASSES[bases] = type(f"Packed{base.__name__}", bases, attributes)
    return _CLASSES[bases]


def _new(base: type[nn.Module], *_: bool) -> nn.Module:
    """An empty module of the packed class, for pickle and deepcopy to fill; pickles of 0.3 have a second argument."""
    cls = packed_class(base)
    return cls.__new__(cls)
