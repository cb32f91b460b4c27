"""Packed layers: the classes that modules take, one for each kind of layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_nm.functional.nm_format import PACKED_DTYPES
from lightning_nm.nn.adapters import (
    FUSED_PATHS,
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
from lightning_nm.nn.packed.experts import PackedExperts
from lightning_nm.nn.packed.kernel_choice import Budget, Kernels
from lightning_nm.nn.packed.tensor import EXPERTS, PackedTensor, Role
from lightning_nm.nn.packed.weight import PackedWeight
from lightning_nm.nn.selection import candidates_of
from lightning_nm.nn.weight import Layout, parameter_key, plain_name


class _Swapped(nn.Module):
    """Mixed into the class of a module of a packed model."""

    nm_base: ClassVar[type[nn.Module]]  # the class that the module had before

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class has no importable name: pickle and deepcopy make it again from the class it was made of.
        reduced: Any = super().__reduce_ex__(protocol)
        return _new, (type(self).nm_base,), *reduced[2:]


class PackedLayer(_Swapped):
    """Mixed into a module's class whose weights are packed; a :class:`PackedWeight` replaces each parameter.

    The forward is that of the module's adapter, whose :func:`~lightning_nm.nn.nm_linear` and
    :func:`~lightning_nm.nn.nm_conv` take packed weights in the place of masked layers.
    """

    nm_unmaskable: ClassVar[str] = (
        "packed already, for inference: to prune, train or pack it again, load lightning_nm.unpacked_state_dict(model) "
        "into a model that is not packed"
    )

    @property
    def nm_layers(self) -> dict[str, Any]:
        """The packed weights by the names of their parameters, among other children; it is asked at every call."""
        return self._modules


class PackedEmbedding(PackedLayer):
    """``nn.Embedding`` whose matrix is in int8; the rows that are looked up are dequantised."""

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up."""
        weight: Any = self.weight
        weight.refuse_training()
        rows = weight.values.squeeze(-1)[input].float() * weight.scales[input].unsqueeze(-1)
        found: Tensor = rows.to(weight.dtype)
        return found


class PackedMultiheadAttention(AttentionForward, PackedLayer):
    """``nn.MultiheadAttention`` with packed projections, or a packed ``out_proj`` alone."""

    project = NMMultiheadAttention.project


class PackedAdapted(PackedLayer):
    """A module of another adapter, which may call ``super()``: it is mixed in, too."""

    # An adapter's own are for masked layers.
    _save_to_state_dict = nn.Module._save_to_state_dict
    _load_from_state_dict = nn.Module._load_from_state_dict
    _apply = nn.Module._apply


class PackedLightningModule(_Swapped):
    """Mixed into the class of a LightningModule whose layers are packed, so that fitting it is refused at once.

    Lightning's fit leaves modules in evaluation mode, in which packed layers run: it would end at the first backward
    pass, by torch's error that no tensor requires gradients.
    """

    def setup(self, stage: str) -> None:
        """Refuse to fit the module while no parameter requires gradients, by a ``RuntimeError``."""
        super().setup(stage)  # type: ignore[misc]
        # The dense parameters of a packed model may be trained: then the user made them require gradients.
        if stage == "fit" and not any(each.requires_grad for each in self.parameters()):
            raise next(m for m in self.modules() if isinstance(m, PackedWeight)).training_error()


def refuse_to_fit(model: nn.Module) -> None:
    """Let a packed model refuse to be fitted, if it is a LightningModule."""
    if _is_lightning(type(model)) and not isinstance(model, PackedLightningModule):
        model.__class__ = _mixed(PackedLightningModule, type(model))


def _is_lightning(kind: type[nn.Module]) -> bool:
    # Known by its hooks: this part of the package does not import Lightning.
    return hasattr(kind, "training_step") and hasattr(kind, "setup")


_CLASSES: dict[tuple[Any, ...], type[nn.Module]] = {}


def _mixed(*bases: Any, forward: Any = None) -> type[nn.Module]:
    """The class of these bases, the last of which is the module's own; made at first use, and once."""
    if bases not in _CLASSES:
        attributes: dict[str, Any] = {"nm_base": bases[-1], "__module__": __name__}
        if forward is not None:
            attributes["forward"] = forward
        _CLASSES[bases] = type(f"Packed{bases[-1].__name__}", bases, attributes)
    return _CLASSES[bases]


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
    if adapter is None and _is_lightning(base):
        return _mixed(PackedLightningModule, base)
    if adapter is None:
        raise TypeError(f"no packed layer for {base.__name__}")
    if adapter in _BORROWED:
        return _mixed(PackedLayer, base, forward=adapter.forward)
    if adapter is NMMultiheadAttention:
        return _mixed(PackedMultiheadAttention, base)
    return _mixed(PackedAdapted, adapter, base)


def _new(base: type[nn.Module]) -> nn.Module:
    """An empty module of the packed class, for pickle and deepcopy to fill."""
    cls = packed_class(base)
    return cls.__new__(cls)


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


def put(place: Place, packed: PackedTensor, name: str, kernels: Kernels, budget: Budget) -> None:
    """Replace a parameter by its packed weight, and the class of its module."""
    module, parameter, _, role = place
    kind = PackedExperts if role in EXPERTS else PackedWeight
    weight = kind(packed, name, role, kernels, budget)
    weight.train(module.training)
    if not isinstance(module, PackedLayer):
        module.__class__ = packed_class(type(module))
    del module._parameters[parameter]
    setattr(module, parameter, weight)


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
