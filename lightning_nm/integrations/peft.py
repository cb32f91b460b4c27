"""LoRA adapters of peft on N:M weights, so that the merged weight is N:M, too.

A masked adapter is saved with a type of its own, which peft knows once this module is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
import torch.nn.functional as F
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftType
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.hotswap import CONFIG_KEYS_TO_CHECK
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_nm.functional import count_violations
from lightning_nm.functional.select import masked
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import as_globs
from lightning_nm.nn.weight import is_sharded, plain_name
from lightning_nm.packed.module import PackedWeight
from lightning_nm.pattern import NMPattern, PatternLike
from lightning_nm.spelling import some_of

_TYPE = "MASKED_LORA: import lightning_nm.integrations.peft before loading it"
"""``peft_type`` in the ``adapter_config.json`` of masked adapters.

peft looks the type up in a table. Where it is not there, this is what peft's ``KeyError`` says.
"""


def mask_adapters(
    model: nn.Module, pattern: PatternLike | None = None, *, exclude: str | Sequence[str] = ()
) -> list[str]:
    r"""Let the LoRA adapters of a model train a delta under the masks of their N:M base weights.

    A layer with the base weight W computes :math:`y = x W^T + s \, x (M \odot (B A))^T`, where M marks the nonzeros of
    W and s is peft's scaling. ``merge_adapter()`` and ``merge_and_unload()`` then add :math:`s \, M \odot (B A)`, so
    the merged weight has the zeros of W and is the function that was trained. SPP (arXiv 2405.16057) has the same aim;
    it multiplies the weight by a low-rank matrix, where this masks LoRA's sum.

    Call it after ``get_peft_model``, before training. Modules and parameters stay the same objects, and the keys of
    state dicts stay the same. ``save_pretrained`` writes a type of its own and the patterns of the masked layers into
    ``adapter_config.json``: where this module is imported, peft loads such an adapter with its masks, elsewhere it
    raises a ``KeyError``. The masks are not saved: they are the nonzeros of the base weight.

    Args:
        model: Any module that contains peft layers.
        pattern: The pattern that the base weights must have. ``None``: of a weight that a sparsifier masks its own,
            of others 2:4.
        exclude: Globs over names of adapted layers that keep ordinary adapters, such as those on dense weights.

    Returns:
        The names of the layers.

    Raises:
        ValueError: If the model has no adapter, or is a part of the one that peft knows; if the base weight of one is
            not N:M, is trained, or has adapters merged into it; or if an adapter is no plain or rank-stabilised LoRA of
            a linear layer, a ``Conv1D`` of transformers or an ungrouped convolution. All such layers are named, and
            nothing is changed.

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
    found = {
        name: module
        for name, module in _by_name(model).items()
        if isinstance(module, BaseTunerLayer)
    }
    adapted = {
        name: module
        for name, module in found.items()
        if not any(fnmatchcase(name, glob) for glob in globs)
    }
    if not adapted:
        fault = "`exclude` leaves no adapted layer" if found else "the model has no adapter of peft"
        raise ValueError(f"{fault}: call get_peft_model() before mask_adapters()")

    # All layers are checked before the first one is changed.
    faults = {
        name: _adapter_fault(module) or _base_fault(module.get_base_layer(), wanted)
        for name, module in adapted.items()
    }
    _refuse(faults, "Name layers that may be dense in `exclude`")
    hosts = list(_hosts(model))
    known = {module for host, _ in hosts for module in host.modules()}
    for name, module in adapted.items():
        if module not in known:
            raise ValueError(
                f"the model is a part of the one that peft adapted, whose save_pretrained() would not know that "
                f"'{name}' is masked: pass all of it to mask_adapters()"
            )
    for _, configs in hosts:
        _check_configs(configs)
    for module in adapted.values():
        _mask(module, wanted)
    for host, configs in hosts:
        _write_configs(host, configs)
    return list(adapted)


def unmask_adapters(model: nn.Module) -> None:
    """Undo :func:`mask_adapters`: the adapters are peft's own again, and merging them makes the weight dense."""
    for module in model.modules():
        if isinstance(module, _MaskedLora):
            module.__class__ = module.nm_base  # type: ignore[assignment]
            del module.nm_mask, module.nm_pattern
    for host, configs in _hosts(model):
        _write_configs(host, configs)


@dataclass
class _MaskedConfig(LoraConfig):
    """The configuration of masked adapters: that of LoRA in memory, of a type of its own in a file.

    Many places of peft and transformers compare the type with LoRA's.
    """

    nm_patterns: dict[str, str] = field(default_factory=dict)  # of the masked layers

    def to_dict(self) -> dict[str, Any]:
        """What is written to ``adapter_config.json``."""
        return {**super().to_dict(), "peft_type": _TYPE}


def _hosts(model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Any]]]:
    """The modules that peft put adapters into, and the adapters' configurations by name."""
    for module in model.modules():
        configs = vars(module).get("peft_config")
        # peft's tuner, around the model that it adapts, has the same dict.
        if isinstance(configs, dict) and not isinstance(module, BaseTuner):
            yield module, configs


def _write_configs(host: nn.Module, configs: dict[str, Any]) -> None:
    """Let the configurations of adapters that lie on masked layers say so, and no others.

    The user's own object may be used for another model, so it is replaced.
    """
    modules: dict[str, Any] = _by_name(host)
    for adapter, config in configs.items():
        patterns = {
            name: str(module.nm_pattern)
            for name, module in modules.items()
            if isinstance(module, _MaskedLora) and adapter in getattr(module, "lora_A", ())
        }
        if patterns or isinstance(config, _MaskedConfig):
            config = configs[adapter] = copy.copy(config)
            config.__class__ = _MaskedConfig if patterns else LoraConfig
            config.nm_patterns = patterns


def _check_configs(configs: dict[str, Any]) -> None:
    """Refuse configurations of a class whose files could not say that adapters are masked."""
    for adapter, config in configs.items():
        if isinstance(config, LoraConfig) and type(config) not in (LoraConfig, _MaskedConfig):
            raise ValueError(
                f"the configuration of adapter '{adapter}' is a {type(config).__name__}, which would be saved as an "
                "adapter that is not masked: use a LoraConfig"
            )


def _by_name(model: nn.Module) -> dict[str, nn.Module]:
    return {plain_name(name): module for name, module in model.named_modules()}


def _inject_adapter(
    tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    """Add an adapter to a model, as peft does, and mask the layers that its loaded configuration names.

    An adapter that joins masked layers is masked, and its configuration says so.
    """
    config = tuner.peft_config[adapter_name]
    texts = getattr(config, "nm_patterns", {})
    patterns = {name: NMPattern.parse(text) for name, text in texts.items()}
    modules = _by_name(tuner.model)
    if any(isinstance(module, _MaskedLora) for module in modules.values()):
        _check_configs({adapter_name: config})
    faults = {
        name: _base_fault(modules.get(name), pattern)
        for name, pattern in patterns.items()
        # Replicated layers are made with the adapter.
        if name in modules or not config.layer_replication
    }
    _refuse(faults, _OTHER_BASE)
    # Up to here nothing has changed. What kind of adapter a layer gets shows only once it is there.
    _inject_ordinary(tuner, model, adapter_name, *args, **kwargs)
    modules = _by_name(tuner.model)
    _refuse({name: _adapter_fault(modules.get(name)) for name in patterns}, _OTHER_BASE)
    for name, pattern in patterns.items():
        _mask(modules[name], pattern)
    _write_configs(tuner.model, tuner.peft_config)


_MISSING = "the model has no such layer"
_OTHER_BASE = "The adapter was trained on an N:M model with such layers: load it onto that one"

# All of peft's ways to add an adapter come here. It calls nothing of a configuration's or a layer's class that sees the
# other adapters of a model, which may be of another kind.
_inject_ordinary = BaseTuner.inject_adapter
BaseTuner.inject_adapter = _inject_adapter
PEFT_TYPE_TO_CONFIG_MAPPING[_TYPE] = _MaskedConfig
# Swapping the values of one adapter for another's adds none: what must be equal then.
CONFIG_KEYS_TO_CHECK[PeftType.LORA].append("nm_patterns")


def _refuse(faults: dict[str, str], advice: str) -> None:
    """Raise a ``ValueError`` of the layers that have a fault."""
    found = [f"'{name}': {fault}" for name, fault in faults.items() if fault]
    if found:
        raise ValueError(
            f"{len(found)} of {len(faults)} adapted layers cannot keep N:M: {some_of(found)}. {advice}"
        )


def _adapter_fault(module: Any) -> str:
    """Why adapters cannot be masked, whatever the base weight is; empty if they can."""
    if module is None:
        return _MISSING
    kind = getattr(module, "nm_base", type(module))  # the class in peft
    if kind not in _MASKED:
        return f"{kind.__module__}.{kind.__name__} is no LoRA of a linear layer or a convolution"
    if module.lora_variant:
        variants = sorted({type(variant).__name__ for variant in module.lora_variant.values()})
        return f"{', '.join(variants)} is not LoRA's plain sum W + s B A"
    if module.merged:
        return "adapters are merged into its base weight: call unmerge_adapter() first"
    # A packed weight is no tensor.
    if getattr(module.get_base_layer().weight, "requires_grad", False):
        return "its base weight is trained: freeze it, requires_grad_(False)"
    return ""


def _base_fault(base: Any, wanted: NMPattern | None) -> str:
    """Why the weight that adapters lie on cannot be kept N:M; empty if it can."""
    if isinstance(base, BaseTunerLayer):
        if not isinstance(base, _MaskedLora):
            return "it has adapters that are not masked: call mask_adapters() first"
        base = cast(Any, base).get_base_layer()
    weight = getattr(base, "weight", None)
    if weight is None:
        return _MISSING
    if isinstance(weight, PackedWeight):
        return "its base weight is packed, for inference: adapt the model that was packed"
    if not weight.is_floating_point() or weight.element_size() < 2:
        return f"its base weight is quantised, {weight.dtype}"
    if is_sharded(weight):
        return "its base weight is sharded: call mask_adapters() before sharding"
    if getattr(base, "groups", 1) > 1:
        return "peft cannot merge adapters of grouped convolutions"
    pattern = _pattern(base, wanted)
    rows = _base_weight(base)
    # It keeps [in, out].
    if isinstance(base, Conv1D):
        rows = rows.t()
    # Blocks of a convolution lie along `in` or along the flattened filter.
    blocked = [view for view in (rows, rows.flatten(1)) if view.shape[1] % pattern.m == 0]
    if not blocked:
        return f"in = {rows.shape[1]} has no blocks of {pattern}"
    # A convolution counts as N:M if it is so in one of the two layouts.
    violations = min(int(count_violations(view, pattern, dim=1)) for view in blocked)
    if violations:
        blocks = rows.numel() // pattern.m
        return f"its base weight is not {pattern}: {violations} of {blocks} blocks hold more"
    return ""


def _pattern(base: nn.Module, wanted: NMPattern | None) -> NMPattern:
    layer = _masked_layer(base)
    return wanted or (NMPattern(2, 4) if layer is None else layer.pattern)


def _masked_layer(base: nn.Module) -> NMLayer | None:
    """The layer of a sparsifier that masks the base weight."""
    return getattr(base, "nm_layers", {}).get("weight")


def _base_weight(base: Any) -> Tensor:
    """The values that the base layer uses."""
    layer = _masked_layer(base)
    return base.weight.detach() if layer is None else layer.forward_weight()


def _mask(module: Any, wanted: NMPattern | None) -> None:
    base = module.get_base_layer()
    layer = _masked_layer(base)
    # A sparsifier's mask also has the kept entries that happen to be zero.
    mask = None if layer is None else layer.forward_mask
    module.__class__ = _MASKED[getattr(module, "nm_base", type(module))]
    module.nm_mask = _base_weight(base).ne(0) if mask is None else mask
    module.nm_pattern = _pattern(base, wanted)


def masked_delta(x: Tensor, a: Tensor, b: Tensor, mask: Tensor, scaling: float) -> Tensor:
    r""":math:`y = s \, x (M \odot (B A))^T`, without keeping a tensor of the weight's shape for the backward pass.

    With G = dY^T X, the gradients are :math:`dA = s \, B^T (M \odot G)`, :math:`dB = s \, (M \odot G) A^T` and
    :math:`dX = s \, dY (M \odot (B A))`. B A is made again in the backward pass.

    Args:
        x: ``[..., in]``, floating point; under autocast it is cast, and the delta is after it was made.
        a: A, ``[rank, in]``.
        b: B, ``[out, rank]``, of the dtype of A.
        mask: M, bool ``[out, in]``.
        scaling: s.

    Returns:
        ``[..., out]`` in the dtype that ``F.linear`` would return.
    """
    device = x.device.type
    # Float64 is left alone, as autocast leaves it.
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    # Autocast would also cast the GEMM of B and A, which merging makes in their own dtype.
    with torch.autocast(device, enabled=False):
        x_ti = x.reshape(-1, x.shape[-1])
        y_to = _MaskedDelta.apply(x_ti, a, b, mask, scaling)
        return y_to.view(*x.shape[:-1], y_to.shape[-1])


def _delta(a_ri: Tensor, b_or: Tensor, mask_oi: Tensor, scaling: float) -> Tensor:
    """Return the masked change of the base weight, ``[out, in]``."""
    return masked((b_or @ a_ri) * scaling, mask_oi)


class _MaskedDelta(torch.autograd.Function):
    """The GEMM with the delta, which is made twice instead of saved.

    Letters name dimensions: t tokens, i inputs, o outputs, r rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ti: Tensor, a_ri: Tensor, b_or: Tensor, mask_oi: Tensor, scaling: float
    ) -> Tensor:
        ctx.save_for_backward(x_ti, a_ri, b_or, mask_oi)
        ctx.scaling = scaling
        # A and B keep their own dtype, often float32, until their product is made. The delta has no name of its own
        # in that dtype: its memory is given back before the GEMM.
        return F.linear(x_ti, _delta(a_ri, b_or, mask_oi, scaling).to(x_ti.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (dy_to,) = grads
        x_ti, a_ri, b_or, mask_oi = ctx.saved_tensors
        needs_x, needs_a, needs_b, *_ = ctx.needs_input_grad
        dx_ti = da_ri = db_or = None
        if needs_x:
            dx_ti = dy_to @ _delta(a_ri, b_or, mask_oi, ctx.scaling).to(x_ti.dtype)
        if needs_a or needs_b:
            # The gradient of the unmasked product B A.
            grad_oi = masked((dy_to.t() @ x_ti).to(a_ri.dtype), mask_oi) * ctx.scaling
            da_ri = b_or.t() @ grad_oi
            db_or = grad_oi @ a_ri.t()
        return dx_ti, da_ri, db_or, None, None


class _MaskedLora(nn.Module):
    """Mixed into a LoRA layer of peft; the other adapters that it gets later are masked, too."""

    nm_base: type[nn.Module]

    nm_mask: Tensor
    """Bool, of the base weight's shape: its nonzeros. A selection knows by it that merging keeps the zeros."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's output, plus that of the active adapters unless they are merged or disabled."""
        # peft calls the base layer alone, or _mixed_batch_forward.
        if self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x, *args, **_for_base(kwargs))
        dtype = result.dtype
        for name in self.active_adapters:
            if name in self.lora_A:
                result = result + self._adapter_output(x, name)
        return result.to(dtype)

    def _mixed_batch_forward(
        self: Any, x: Tensor, *args: Any, adapter_names: list[str], **kwargs: Any
    ) -> Tensor:
        result = self.base_layer(x, *args, **_for_base(kwargs))
        for name in dict.fromkeys(adapter_names):
            # "__base__" is the name of no adapter.
            if name in self.lora_A:
                chosen = [row for row, other in enumerate(adapter_names) if other == name]
                output = self._adapter_output(x[chosen], name).to(result.dtype)
                result = result.index_add(
                    0, torch.tensor(chosen, dtype=torch.int64, device=x.device), output
                )
        return result

    def _adapter_output(self: Any, x: Tensor, name: str) -> Tensor:
        x = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
        output = self._delta_output(self.lora_dropout[name](x), name)
        bias = self.lora_B[name].bias
        if bias is None:
            return output
        # The axes of a convolution's output follow that of its channels.
        spatial_axes = self.get_base_layer().weight.dim() - 2
        return output + (bias * self.scaling[name]).view(-1, *[1] * spatial_axes)

    def get_delta_weight(self: Any, adapter: str) -> Tensor:
        """What merging an adapter adds to the base weight: +0.0 outside of the mask."""
        return masked(super().get_delta_weight(adapter), self.nm_mask)  # type: ignore[misc]

    def merge(self: Any, *args: Any, **kwargs: Any) -> None:
        """Merge adapters as peft does.

        Raises:
            ValueError: If the base weight has other nonzeros than when it was masked.
        """
        nonzero = _base_weight(self.get_base_layer()).ne(0)
        if bool((nonzero & ~self.nm_mask).any()):
            raise ValueError(
                f"the base weight of this {self.nm_base.__name__} has other nonzeros than when its adapters were "
                "masked: call mask_adapters() after loading weights, and train with these masks"
            )
        super().merge(*args, **kwargs)  # type: ignore[misc]

    def resolve_lora_variant(self: Any, **kwargs: Any) -> None:
        """Refuse to add an adapter whose delta is not s B A, by a ``ValueError``."""
        variant = super().resolve_lora_variant(**kwargs)  # type: ignore[misc]
        if variant is not None:
            raise ValueError(
                f"{type(variant).__name__} is not LoRA's plain sum W + s B A, which this layer masks: call "
                "unmask_adapters() first, or add a plain adapter"
            )

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        # The mask is no buffer, which would be one more key of the state dict.
        self.nm_mask = self.nm_mask.to(self.get_base_layer().weight.device)
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

    def _delta_output(self: Any, x: Tensor, name: str) -> Tensor:
        # It has the shape of the base weight, [in, out] in a Conv1D; there, too, A is [rank, in] and B [out, rank].
        mask = self.nm_mask.t() if self.fan_in_fan_out else self.nm_mask
        return masked_delta(
            x, self.lora_A[name].weight, self.lora_B[name].weight, mask, self.scaling[name]
        )


class _MaskedConv(_MaskedLora):
    def _delta_output(self: Any, x: Tensor, name: str) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # as merging makes it
            delta = self.get_delta_weight(name)
        # The base layer's own, for its stride, padding and dilation.
        return self.get_base_layer()._conv_forward(x, delta, None)


class _MaskedConv1d(_MaskedConv, lora.Conv1d):
    nm_base = lora.Conv1d


class _MaskedConv2d(_MaskedConv, lora.Conv2d):
    nm_base = lora.Conv2d


class _MaskedConv3d(_MaskedConv, lora.Conv3d):
    nm_base = lora.Conv3d


_MASKED: dict[type[nn.Module], type[Any]] = {
    kind.nm_base: kind for kind in (_MaskedLinear, _MaskedConv1d, _MaskedConv2d, _MaskedConv3d)
}
