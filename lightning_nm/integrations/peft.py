"""LoRA adapters of peft on N:M weights, so that the merged weight is N:M, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lightning_nm.functional import count_violations
from lightning_nm.functional.pattern import NMPattern, PatternLike
from lightning_nm.functional.select import masked
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.names import plain_name
from lightning_nm.nn.layer.sharding import is_sharded
from lightning_nm.nn.packed import PackedWeight
from lightning_nm.nn.selection.low_rank import KeepsMask, masked_delta
from lightning_nm.nn.selection.selection import as_globs

_SHOWN = 8  # layers in an error


def mask_adapters(
    model: nn.Module, pattern: PatternLike | None = None, *, exclude: str | Sequence[str] = ()
) -> list[str]:
    r"""Let the LoRA adapters of a model train a delta under the masks of their N:M base weights.

    A layer with the base weight W computes :math:`y = x W^T + s \, x (M \odot (B A))^T`, where M marks the nonzeros of
    W and s is peft's scaling. ``merge_adapter()`` and ``merge_and_unload()`` then add :math:`s \, M \odot (B A)`, so
    the merged weight has the zeros of W and is the function that was trained. SPP (arXiv 2405.16057) has the same aim;
    it multiplies the weight by a low-rank matrix, where this masks LoRA's sum.

    Call it after ``get_peft_model`` or ``PeftModel.from_pretrained``, before training, and again whenever the model is
    built anew: masks are not saved, they are the nonzeros of the base weight. Modules and parameters stay the same
    objects, and the keys of state dicts stay the same. ``save_pretrained`` adds a field to ``adapter_config.json``, by
    which peft warns whoever loads the adapter that ``mask_adapters`` must be called.

    Args:
        model: Any module that contains peft layers.
        pattern: The pattern that the base weights must have. ``None``: of a weight that a sparsifier masks its own,
            of others 2:4.
        exclude: Globs over names of adapted layers that keep ordinary adapters, such as those on dense weights.

    Returns:
        The names of the layers.

    Raises:
        ValueError: If the model has no adapter; if the base weight of one is not N:M, is trained, or has adapters
            merged into it; or if an adapter is no plain or rank-stabilised LoRA of a linear layer, a ``Conv1D`` of
            transformers or an ungrouped convolution. All such layers are named, and nothing is changed.

    Example::

        >>> from peft import LoraConfig, get_peft_model
        >>> from lightning_nm.functional import is_nm, nm_prune
        >>> model = nn.Sequential(nn.Linear(8, 4))
        >>> model[0].weight.data = nm_prune(model[0].weight.data, "2:4")
        >>> adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
        >>> mask_adapters(adapted)
        ['base_model.model.0']
        >>> is_nm(adapted.merge_and_unload()[0].weight, "2:4")
        True
    """
    wanted = None if pattern is None else NMPattern.parse(pattern)
    globs = as_globs(exclude, "exclude") or ()
    adapted = {}
    excluded = False
    for full_name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        name = plain_name(full_name)
        if any(fnmatchcase(name, glob) for glob in globs):
            excluded = True
        else:
            adapted[name] = module
    if not adapted:
        fault = (
            "`exclude` leaves no adapted layer" if excluded else "the model has no adapter of peft"
        )
        raise ValueError(f"{fault}: call get_peft_model() before mask_adapters()")

    # All layers are checked before the first one is changed.
    faults = []
    for name, module in adapted.items():
        fault = _fault(module, wanted)
        if fault:
            faults.append(f"'{name}': {fault}")
    if faults:
        shown = "; ".join(faults[:_SHOWN])
        if len(faults) > _SHOWN:
            shown += f"; and {len(faults) - _SHOWN} more"
        raise ValueError(
            f"{len(faults)} of {len(adapted)} adapted layers cannot keep N:M: {shown}. Name layers that may be "
            "dense in `exclude`"
        )
    for module in adapted.values():
        _mask(module)
    for config in _configs(model):
        if type(config) is LoraConfig:
            config.__class__ = _MarkedConfig
    return list(adapted)


def unmask_adapters(model: nn.Module) -> None:
    """Undo :func:`mask_adapters`: the adapters are peft's own again, and merging them makes the weight dense."""
    for module in model.modules():
        if isinstance(module, _MaskedLora):
            module.__class__ = module.nm_base  # type: ignore[assignment]
            del module.nm_mask
    for config in _configs(model):
        if isinstance(config, _MarkedConfig):
            config.__class__ = LoraConfig


@dataclass
class _MarkedConfig(LoraConfig):
    """The configuration of masked adapters: ``save_pretrained`` writes a field that peft does not know.

    peft reads such a file, and warns by the field's name, which says what is to be done.
    """

    lightning_nm_mask_adapters_must_be_called: bool = True


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a model's adapters, each once."""
    found: dict[int, Any] = {}
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        if isinstance(configs, dict):
            found |= {id(config): config for config in configs.values()}
    return list(found.values())


def _fault(module: Any, wanted: NMPattern | None) -> str:
    """Why the adapters of a layer cannot be masked; empty if they can."""
    kind = _kind(module)
    if kind not in _MASKED:
        return f"{kind.__module__}.{kind.__name__} is no LoRA of a linear layer or a convolution"
    if module.lora_variant:
        variants = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        return f"{', '.join(variants)} is not LoRA's plain sum W + s B A"
    base = module.get_base_layer()
    weight = base.weight
    if isinstance(weight, PackedWeight):
        return "its base weight is packed, for inference: adapt the model that was packed"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its base weight is quantised, {weight.dtype}"
    if is_sharded(weight):
        return "its base weight is sharded: call mask_adapters() before sharding"
    if getattr(base, "groups", 1) > 1:
        return "peft cannot merge adapters of grouped convolutions"
    if weight.requires_grad:
        return "its base weight is trained: freeze it, requires_grad_(False)"
    if module.merged:
        return "adapters are merged into its base weight: call unmerge_adapter() first"
    layer = _masked_layer(base)
    pattern = wanted or (NMPattern(2, 4) if layer is None else layer.pattern)
    rows = _base_weight(base)
    # Conv1D of transformers keeps [in, out].
    if getattr(module, "fan_in_fan_out", False):
        rows = rows.t()
    # Blocks of a convolution lie along `in` or along the flattened filter.
    blocked = [view for view in (rows, rows.flatten(1)) if view.shape[1] % pattern.m == 0]
    if not blocked:
        return f"in = {rows.shape[1]} has no blocks of {pattern}"
    violations = min(int(count_violations(view, pattern, dim=1)) for view in blocked)
    if not violations:
        return ""
    blocks = rows.numel() // pattern.m
    return f"its base weight is not {pattern}: {violations} of {blocks} blocks hold more"


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class in peft."""
    return module.nm_base if isinstance(module, _MaskedLora) else type(module)


def _masked_layer(base: nn.Module) -> NMLayer | None:
    """The layer of a sparsifier that masks the base weight."""
    return getattr(base, "nm_layers", {}).get("weight")


def _base_weight(base: Any) -> Tensor:
    """The values that the base layer uses."""
    layer = _masked_layer(base)
    return base.weight.detach() if layer is None else layer.forward_weight()


def _mask(module: Any) -> None:
    base = module.get_base_layer()
    layer = _masked_layer(base)
    mask = None if layer is None else layer.forward_mask
    if mask is None:
        mask = _base_weight(base).ne(0)
    module.__class__ = _MASKED[_kind(module)]
    module.nm_mask = mask


class _MaskedLora(KeepsMask):
    """Mixed into a LoRA layer of peft; the other adapters that it gets later are masked, too."""

    nm_base: type[nn.Module]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's output, plus that of the active adapters unless they are merged or disabled."""
        layer: Any = self
        # peft calls the base layer alone, or _mixed_batch_forward.
        if layer.disable_adapters or layer.merged or kwargs.get("adapter_names") is not None:
            return super().forward(x, *args, **kwargs)
        result = layer.base_layer(x, *args, **_for_base(kwargs))
        dtype = result.dtype
        for name in layer.active_adapters:
            if name in layer.lora_A:
                result = result + self._adapter_output(x, name)
        return result.to(dtype)

    def _mixed_batch_forward(
        self, x: Tensor, *args: Any, adapter_names: list[str], **kwargs: Any
    ) -> Tensor:
        layer: Any = self
        result = layer.base_layer(x, *args, **_for_base(kwargs))
        for name in dict.fromkeys(adapter_names):
            # "__base__" is the name of no adapter.
            if name in layer.lora_A:
                chosen = [row for row, other in enumerate(adapter_names) if other == name]
                output = self._adapter_output(x[chosen], name).to(result.dtype)
                result = result.index_add(
                    0, torch.tensor(chosen, dtype=torch.int64, device=x.device), output
                )
        return result

    def _adapter_output(self, x: Tensor, name: str) -> Tensor:
        layer: Any = self
        x = layer._cast_input_dtype(x, layer.lora_A[name].weight.dtype)
        x = layer.lora_dropout[name](x)
        output = self._delta_output(x, name)
        bias = layer.lora_B[name].bias
        if bias is None:
            return output
        # The axes of a convolution's output follow that of its channels.
        spatial_axes = layer.get_base_layer().weight.dim() - 2
        return output + (bias * layer.scaling[name]).view(-1, *[1] * spatial_axes)

    def _delta_output(self, x: Tensor, name: str) -> Tensor:
        raise NotImplementedError

    def get_delta_weight(self, adapter: str) -> Tensor:
        """What merging an adapter adds to the base weight: +0.0 outside of the mask."""
        return masked(super().get_delta_weight(adapter), self.nm_mask)  # type: ignore[misc]

    def merge(self, *args: Any, **kwargs: Any) -> None:
        """Merge adapters as peft does.

        Raises:
            ValueError: If the base weight has other nonzeros than when it was masked.
        """
        layer: Any = self
        nonzero = _base_weight(layer.get_base_layer()).ne(0)
        if bool((nonzero & ~self.nm_mask).any()):
            raise ValueError(
                f"the base weight of this {self.nm_base.__name__} has other nonzeros than when its adapters were "
                "masked: call mask_adapters() after loading weights, and train with these masks"
            )
        super().merge(*args, **kwargs)  # type: ignore[misc]

    def resolve_lora_variant(self, **kwargs: Any) -> None:
        """Refuse to add an adapter whose delta is not s B A, by a ``ValueError``."""
        variant = super().resolve_lora_variant(**kwargs)  # type: ignore[misc]
        if variant is not None:
            raise ValueError(
                f"{type(variant).__name__} is not LoRA's plain sum W + s B A, which this layer masks: call "
                "unmask_adapters() first, or add a plain adapter"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        layer: Any = self
        self.nm_mask = self.nm_mask.to(layer.get_base_layer().weight.device)
        return self


def _for_base(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without the arguments that only variants of LoRA read."""
    return {
        name: value
        for name, value in kwargs.items()
        if name not in ("adapter_names", *lora.VARIANT_KWARG_KEYS)
    }


class _MaskedLinear(_MaskedLora, lora.Linear):
    nm_base = lora.Linear

    def _delta_output(self, x: Tensor, name: str) -> Tensor:
        layer: Any = self
        mask = self.nm_mask.t() if layer.fan_in_fan_out else self.nm_mask
        return masked_delta(
            x, layer.lora_A[name].weight, layer.lora_B[name].weight, mask, layer.scaling[name]
        )


class _MaskedConv(_MaskedLora):
    def _delta_output(self, x: Tensor, name: str) -> Tensor:
        layer: Any = self
        with torch.autocast(x.device.type, enabled=False):  # as merging makes it
            delta = self.get_delta_weight(name)
        return layer.get_base_layer()._conv_forward(x, delta, None)


class _MaskedConv1d(_MaskedConv, lora.Conv1d):
    nm_base = lora.Conv1d


class _MaskedConv2d(_MaskedConv, lora.Conv2d):
    nm_base = lora.Conv2d


class _MaskedConv3d(_MaskedConv, lora.Conv3d):
    nm_base = lora.Conv3d


_MASKED: dict[type[nn.Module], type[Any]] = {
    kind.nm_base: kind for kind in (_MaskedLinear, _MaskedConv1d, _MaskedConv2d, _MaskedConv3d)
}
