"""What a module of experts reads as its weight while it runs: a tensor whose products go through the op seam.

Products, and what leads to them (indexing, transposing, casting), are recognised. Any other operator gets W_F, if the
layer's dgrad and wgrad are those of W_F and dY; otherwise it is refused, and never computed with wrong gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_nm.nn.adapters.experts.products import ExpertsInUse
from lightning_nm.nn.layer import NMLayer

Handler = Callable[..., Any]

# Attributes and functions that depend on shape, dtype and device alone.
_VALUES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})
_METADATA = {
    *(
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "is_contiguous",
        "storage_offset",
        "__len__",
    ),
    *("element_size", "data_ptr", "is_floating_point", "is_complex", "get_device", "type"),
    *("new_zeros", "new_empty", "new_ones", "new_full", "new_tensor"),
    *("zeros_like", "empty_like", "ones_like", "full_like", "rand_like", "randn_like"),
}


class Part(NamedTuple):
    """Which part of the weight, and in which form."""

    use: ExpertsInUse
    experts: int | Tensor | None = None  # one expert, int64 indices of any shape, or all of them
    flipped: bool = False  # whether the last two dimensions are swapped
    dtype: torch.dtype | None = None  # what it is cast to

    @property
    def layer(self) -> NMLayer:
        """The masked layer."""
        return self.use.layer

    @property
    def leading(self) -> tuple[int, ...]:
        """The dimensions before the matrix."""
        if isinstance(self.experts, int):
            return ()
        return (len(self.use.weight),) if self.experts is None else tuple(self.experts.shape)

    @property
    def contracts_in(self) -> bool:
        """Whether ``x @ part`` contracts the axis along which the forward blocks lie."""
        return self.flipped == (self.layer.spec.layout == "experts")


class ExpertWeight(Tensor):
    """A layer's weight, or a part of it, within the forward pass of its module."""

    _nm: Part

    @classmethod
    def of(cls, part: Part) -> ExpertWeight:
        """The tensor for a part of a weight: only its shape, dtype and device are ever read."""
        weight, leading = part.use.weight, part.leading
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            if part.dtype is None and not isinstance(part.experts, Tensor):
                seen = weight.detach() if part.experts is None else weight.detach()[part.experts]
            else:
                nothing = torch.full(
                    (), float("nan"), dtype=part.dtype or weight.dtype, device=weight.device
                )
                seen = nothing.expand(*leading, *weight.shape[-2:])
            made = _Unread.apply(
                weight, seen.mT if part.flipped else seen, part.layer.name
            ).as_subclass(cls)
        made._nm = part
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a known operator on what it stands for, and any other one on W_F where that is right."""
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func) or _HANDLERS.get(str(func))
        found = NotImplemented if handler is None else handler(*args, **kwargs)
        return _run_on_values(func, args, kwargs) if found is NotImplemented else found


class _Unread(torch.autograd.Function):
    """Passes a tensor on; a gradient that comes back went past the operators that know the layer."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seen: Tensor, name: str) -> Tensor:
        ctx.layer_name = name
        return seen.view_as(seen)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            f"the weight of layer '{ctx.layer_name}' was read by code that its masks do not reach, such as a custom "
            f"autograd function or a compiled kernel: name '{ctx.layer_name}' in `exclude`, or choose another "
            "implementation of the experts (in transformers: model.set_experts_implementation('grouped_mm'))"
        )


def _run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    name = getattr(func, "__name__", str(func))
    attribute = (
        getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
    )
    layers = {part.layer.name: part.layer for part in _parts((args, kwargs))}
    if name == "data_ptr" and args[0].device.type != "cpu":
        raise _unsupported(next(iter(layers.values())), "data_ptr(), as of a kernel of its own")
    with torch._C.DisableTorchFunctionSubclass():
        if name in _METADATA or (attribute and attribute not in _VALUES):
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            for layer in layers.values():
                if _has_own_gradients(layer):
                    raise _unsupported(layer, attribute or name)
        return func(*_values(args), **_values(kwargs))


def _has_own_gradients(layer: NMLayer) -> bool:
    """Whether dX or dW differ from what autograd makes of a product with W_F."""
    method = layer.method
    return layer.estimator is not None or layer.masks.has_backward or method.has_own_backward_weight


def _unsupported(layer: NMLayer, operator: str) -> RuntimeError:
    why = "its gradient estimator" if layer.estimator is not None else "its backward weight"
    return RuntimeError(  # torch turns a TypeError of an arithmetic operator into another one
        f"layer '{layer.name}' is used by the operator '{operator}', which cannot run with {why}: use F.linear, "
        "matmul, bmm, einsum with one expert axis, or grouped_mm with the weight or an indexed expert, choose a method "
        f"without one (such as sr-ste) and no estimator, or name '{layer.name}' in `exclude`"
    )


def _parts(tree: Any) -> list[Part]:
    if isinstance(tree, ExpertWeight):
        return [tree._nm]
    if isinstance(tree, dict):
        tree = list(tree.values())
    return (
        [part for leaf in tree for part in _parts(leaf)] if isinstance(tree, (list, tuple)) else []
    )


def _values(tree: Any) -> Any:
    """The same arguments with W_F in the place of each weight."""
    if isinstance(tree, ExpertWeight):
        use, experts, flipped, dtype = tree._nm
        made = use.forward_weight()
        made = made if experts is None else made[experts]
        made = made if dtype is None else made.to(dtype)
        return made.mT if flipped else made
    if isinstance(tree, dict):
        return {key: _values(value) for key, value in tree.items()}
    return type(tree)(map(_values, tree)) if type(tree) in (list, tuple) else tree


_HANDLERS: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Make a function run these operators, those that this torch has, for arguments that its signature takes.

    Operators of other libraries go by name. The function may return ``NotImplemented``; the operator then runs on W_F.
    """

    def register(handler: Handler) -> Handler:
        signature = inspect.signature(handler)

        @wraps(handler)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                return NotImplemented
            return handler(*args, **kwargs)

        _HANDLERS.update({function: checked for function in functions if function is not None})
        return handler

    return register
