"""Low-rank adapters that a training left beside N:M weights: merge, drop, save or load them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.export.atomic_write import replacing
from lightning_nm.export.checkpoint import read_checkpoint
from lightning_nm.export.files import read_file
from lightning_nm.export.safetensors_file import write_safetensors
from lightning_nm.export.sources import Source
from lightning_nm.nn.adapters import Adapter
from lightning_nm.nn.layer.names import key_of_layer, plain_name
from lightning_nm.nn.products.low_rank import (
    Factors,
    low_rank_modules,
    low_rank_of,
    replace_low_rank,
    saved_factors,
    take_low_rank,
)

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of peft's keys
_RIGHT, _LEFT = ".lora_A.weight", ".lora_B.weight"


@torch.no_grad()
def merge_adapters(model: nn.Module) -> list[str]:
    r"""Add the low-rank adapters of a model to its weights, :math:`W + L R`, and remove them.

    **The merged weights are dense**, and no longer N:M. Without masks and packed weights alone.

    Args:
        model: A model with adapters: after a training, or by :func:`load_adapters`.

    Returns:
        The names of the layers, none if there are no adapters.

    Raises:
        ValueError: If masks are installed, or a weight is packed; nothing is changed then.

    Example:
        >>> from lightning_nm.nn.products.low_rank import put_low_rank
        >>> model = nn.Sequential(nn.Linear(4, 2))
        >>> put_low_rank(model[0], (torch.ones(2, 1), torch.ones(1, 4)))
        >>> merge_adapters(model), model
        (['0'], Sequential(
          (0): Linear(in_features=4, out_features=2, bias=True)
        ))
    """
    _refuse_masks(model)
    modules: Mapping[str, Any] = low_rank_modules(model)
    for name, module in modules.items():
        if not isinstance(module.weight, Tensor):
            raise ValueError(
                f"the weight of '{name}' is packed, and would be dense with its adapter: merge before you pack, or "
                "keep the adapter beside the weight"
            )
    for module in modules.values():
        factors = take_low_rank(module)
        assert factors is not None
        module.weight.copy_(merged(module.weight, factors, transposed=_is_transposed(module)))
    return list(modules)


def merged(weight: Tensor, factors: Factors, *, transposed: bool) -> Tensor:
    """``W + L R`` of a weight ``[out, in]`` or, if it is transposed, ``[in, out]``, in its dtype."""
    left, right = factors
    # Half precision would round the product before the sum.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    product = left.to(dtype) @ right.to(dtype)
    if transposed:
        product = product.t()
    return (weight + product.to(weight.device)).to(weight.dtype)


def _is_transposed(module: nn.Module) -> bool:
    """Whether the weight of a layer is ``[in, out]``: that of a ``Conv1D`` of transformers, which may be square."""
    return not hasattr(module, "in_features")


def drop_adapters(model: nn.Module) -> list[str]:
    """Remove the low-rank adapters of a model, which then computes what its N:M weights do alone.

    Returns:
        The names of the layers, none if there are no adapters.
    """
    modules = low_rank_modules(model)
    for module in modules.values():
        take_low_rank(module)
    return list(modules)


def save_adapters(model: nn.Module, folder: str | os.PathLike[str]) -> list[str]:
    r"""Write the low-rank adapters of a model as a LoRA adapter of peft, into a folder beside its N:M weights.

    ``PeftModel.from_pretrained(model, folder)`` reads it, and so does :func:`load_adapters`, without peft. L and R are
    peft's B and A, and its scaling is 1.

    Args:
        model: A model with adapters.
        folder: The folder; files of an older adapter in it are replaced.

    Returns:
        The names of the layers.

    Raises:
        ValueError: If the model has no adapters, or masks are installed.
        OSError: If the files cannot be written.
    """
    _refuse_masks(model)
    factors = {}
    transposed = []
    modules: Mapping[str, Any] = low_rank_modules(model)
    for name, module in modules.items():
        child = low_rank_of(module)
        assert child is not None
        factors[name] = child.factors
        transposed.append(_is_transposed(module))
    if not factors:
        raise ValueError(
            f"{type(model).__name__} has no low-rank adapters to save: train with SLoPe(adapters=...) to the end, or "
            "call lightning_nm.load_adapters(model, checkpoint)"
        )
    write_adapters(factors, Path(folder), transposed=transposed)
    return list(factors)


def write_adapters(
    factors: Mapping[str, Factors], folder: Path, *, transposed: Iterable[bool] = ()
) -> None:
    """Write factors as a LoRA adapter of peft.

    Args:
        factors: By the name of the layer.
        folder: Where to.
        transposed: Of each layer, whether its weight is ``[in, out]``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {name: len(right) for name, (_, right) in factors.items()}
    rank = max(ranks.values())
    config = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        # peft multiplies by alpha / r.
        "lora_alpha": rank,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(transposed),
        "target_modules": list(factors),
    }
    tensors = {}
    for name, (left, right) in factors.items():
        tensors[f"{_PREFIX}{name}{_RIGHT}"] = right.detach().cpu().contiguous()
        tensors[f"{_PREFIX}{name}{_LEFT}"] = left.detach().cpu().contiguous()
    entries = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}
    write_safetensors(folder / _WEIGHTS, entries, tensors.items(), {"format": "pt"})
    with replacing(folder / _CONFIG) as new:
        new.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapters(model: nn.Module, source: str | os.PathLike[str]) -> list[str]:
    """Put the low-rank adapters of a checkpoint beside the weights of a model, which it holds without them.

    Args:
        model: The model with the checkpoint's weights, also packed. Adapters that it has now are replaced.
        source: A Lightning checkpoint or the state of a sparsifier; or a folder of :func:`save_adapters`.

    Returns:
        The names of the layers.

    Raises:
        ValueError: If the source has no adapters, the model lacks one of their layers, or masks are installed.

    Example::

        >>> model = nn.Linear(4, 2)
        >>> load_adapters(model, "last.ckpt")  # doctest: +SKIP
        ['encoder.0.linear1', 'encoder.0.linear2']
    """
    _refuse_masks(model)
    path = Path(source)
    if (path / _WEIGHTS).is_file():
        factors = _read_folder(path / _WEIGHTS)
    else:
        factors = factors_of(read_checkpoint(path)[1])
    if not factors:
        raise ValueError(
            f"'{source}' holds no low-rank adapters: they are in checkpoints of SLoPe(adapters=...) from its last steps"
        )
    replace_low_rank(model, factors)
    return list(factors)


def factors_of(states: Iterable[Mapping[str, Any]]) -> dict[str, Factors]:
    """The low-rank factors in the sparsifier states of a checkpoint, by layer name."""
    found = {}
    for state in states:
        for name, factors in saved_factors(state).items():
            found[plain_name(name)] = factors
    return found


def merge_into(source: Source, factors: Mapping[str, Factors]) -> Source:
    """A checkpoint with the low-rank factors added to its weights, which are dense then: it has no state any more."""
    weights = dict(source.weights)
    keys = {plain_name(key): key for key in weights}
    transposed = transposed_in(source, factors)
    for (name, pair), is_transposed in zip(factors.items(), transposed, strict=True):
        key = keys[key_of_layer(name, "weight")]
        weights[key] = merged(weights[key], pair, transposed=is_transposed)
    return source._replace(weights=weights, states=[])


def transposed_in(source: Source, factors: Mapping[str, Factors]) -> list[bool]:
    """Of each layer with low-rank factors, whether the checkpoint has its weight as ``[in, out]``."""
    layers = {}
    for state in source.states:
        for name, layer in state["layers"].items():
            layers[plain_name(name)] = layer
    return [layers[name]["layout"] == "transposed" for name in factors]


def _read_folder(path: Path) -> dict[str, Factors]:
    tensors = read_file(path)
    found = {}
    for key, right in tensors.items():
        if key.endswith(_RIGHT):
            name = key.removeprefix(_PREFIX).removesuffix(_RIGHT)
            found[name] = Factors(tensors[f"{_PREFIX}{name}{_LEFT}"], right)
    return found


def _refuse_masks(model: nn.Module) -> None:
    """Raise a ``ValueError`` if masks are installed: the adapters are the method's parameters then."""
    for name, module in model.named_modules():
        if isinstance(module, Adapter):
            raise ValueError(
                f"masks are installed in '{plain_name(name)}', whose method trains the adapters: call it after fit, or "
                "after bake() and detach() of the sparsifier"
            )
