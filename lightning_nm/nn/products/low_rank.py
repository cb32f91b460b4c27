r"""Low-rank adapters beside the weight of a linear layer: their product, and what is left of them after a training.

.. math:: Y = X W_F^T + (X R^T) L^T, \quad L\ [out, rank], \quad R\ [rank, in].

While a method trains them, L and R are parameters of its layer (``Method.low_rank``). When the masks are removed, a
:class:`LowRank` with their values stays in the module, so that the model computes the same. State dicts have neither:
their keys are those of the dense model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.names import plain_name

LEFT = "adapter_left"
"""The name of L among the parameters of a layer."""
RIGHT = "adapter_right"
"""The name of R."""

_CHILD = "low_rank"  # the name of the module that is left beside the weight


class Factors(NamedTuple):
    """The factors of a low-rank matrix.

    Attributes:
        left: L, ``[out, rank]``.
        right: R, ``[rank, in]``.
    """

    left: Tensor
    right: Tensor


def low_rank_product(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``(x R^T) L^T``, ``[..., out]``, of ``x [..., in]``, cast under autocast as two linear layers are."""
    return F.linear(F.linear(x, right), left)


def present_factors(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return the low-rank factors that the method of a layer has now; ``None`` if there are none.

    Args:
        layer: The layer, or a packed weight, which has no method.
    """
    if not isinstance(layer, NMLayer):
        return None
    return layer.spec.method.low_rank(layer)


class LowRank(nn.Module):
    """Adds ``(x R^T) L^T`` to the output of the linear layer that it is put into.

    L and R are buffers that state dicts leave out.

    Args:
        factors: L ``[out, rank]`` and R ``[rank, in]``; they are copied.
    """

    left: Tensor
    right: Tensor

    def __init__(self, factors: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        left, right = factors
        self.register_buffer("left", left.detach().clone(), persistent=False)
        self.register_buffer("right", right.detach().clone(), persistent=False)

    @property
    def factors(self) -> Factors:
        """L and R."""
        return Factors(self.left, self.right)

    def extra_repr(self) -> str:
        """The sizes, as ``print(model)`` shows them."""
        out, rank = self.left.shape
        return f"in={self.right.shape[1]}, out={out}, rank={rank}"

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(x R^T) L^T``."""
        return low_rank_product(x, self.left, self.right)


def _add_output(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
    (x,) = (*args, *kwargs.values())
    return output + getattr(module, _CHILD)(x)


def put_low_rank(module: nn.Module, factors: tuple[Tensor, Tensor]) -> None:
    """Let a linear layer without masks add a low-rank product to its output, in the place of one that it adds now."""
    take_low_rank(module)
    child = LowRank(factors)
    module.add_module(_CHILD, child)
    module.register_forward_hook(_add_output, with_kwargs=True)


def take_low_rank(module: nn.Module) -> Factors | None:
    """Undo :func:`put_low_rank`; return the factors, ``None`` if there are none."""
    child = low_rank_of(module)
    if child is None:
        return None
    delattr(module, _CHILD)
    # The number of the hook is not kept: a copy of the module would have to find its own.
    for number, hook in list(module._forward_hooks.items()):
        if hook is _add_output:
            del module._forward_hooks[number]
            module._forward_hooks_with_kwargs.pop(number, None)
    return child.factors


def low_rank_of(module: nn.Module) -> LowRank | None:
    """The adapter that :func:`put_low_rank` put into a module; ``None`` if there is none."""
    child = module._modules.get(_CHILD)
    return child if isinstance(child, LowRank) else None


def low_rank_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with an adapter of :func:`put_low_rank`, by name."""
    found = {}
    for name, module in model.named_modules():
        if low_rank_of(module) is not None:
            found[plain_name(name)] = module
    return found


def saved_factors(state: Mapping[str, Any]) -> dict[str, Factors]:
    """The low-rank factors in the state of a sparsifier, by layer name; those whose L is zero still are left out."""
    found = {}
    for name, layer in state.get("layers", {}).items():
        parameters = layer.get("parameters", {})
        if LEFT in parameters and bool(parameters[LEFT].any()):
            found[name] = Factors(parameters[LEFT], parameters[RIGHT])
    return found


def replace_low_rank(model: nn.Module, factors: Mapping[str, Factors]) -> None:
    """Put low-rank factors into the modules of a model by name, and take those of all others.

    Raises:
        ValueError: If the model has no such linear layer; nothing is changed then.
    """
    modules: dict[str, Any] = {plain_name(name): module for name, module in model.named_modules()}
    for name, (left, right) in factors.items():
        # A packed weight has a shape and a device, too.
        weight = getattr(modules.get(name), "weight", None)
        sizes = {len(left), right.shape[1]}
        if weight is None or len(weight.shape) != 2 or {*weight.shape} != sizes:
            raise ValueError(
                f"low-rank adapters of layer '{name}' are {list(left.shape)} and {list(right.shape)}, and "
                f"{type(model).__name__} has no linear layer of this name and size: build the model that was trained"
            )
    for module in low_rank_modules(model).values():
        take_low_rank(module)
    for name, (left, right) in factors.items():
        device = modules[name].weight.device
        put_low_rank(modules[name], (left.to(device), right.to(device)))


def initial_right(rank: int, columns: int, like: Tensor, generator: torch.Generator) -> Tensor:
    r"""R as LoRA begins (arXiv 2106.09685): uniform in :math:`\pm 1 / \sqrt{in}`, ``[rank, in]``, of `like`'s dtype."""
    bound = columns**-0.5
    values = torch.empty(rank, columns, dtype=torch.float32, device=generator.device)
    values.uniform_(-bound, bound, generator=generator)
    return values.to(like.device, like.dtype)
