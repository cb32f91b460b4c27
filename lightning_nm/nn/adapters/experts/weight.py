"""The tensor that a module of experts reads as its weight while it runs: its products are masked operators.

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

# Attributes that are read by __get__ and depend on the values.
_VALUE_ATTRIBUTES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})

# Functions that depend on shape, dtype and device alone.
_METADATA = {
    # shape
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "__len__",
    # memory
    "stride",
    "is_contiguous",
    "storage_offset",
    "element_size",
    "data_ptr",
    # dtype and device
    "is_floating_point",
    "is_complex",
    "get_device",
    "type",
    # other tensors like this one
    "new_zeros",
    "new_empty",
    "new_ones",
    "new_full",
    "new_tensor",
    "zeros_like",
    "empty_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
}


class Part(NamedTuple):
    """A part of a layer's weight, and the form that the module gave it."""

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
        if self.experts is None:
            return (len(self.use.weight),)
        return tuple(self.experts.shape)

    @property
    def contracts_in(self) -> bool:
        """Whether ``x @ part`` contracts the axis along which the forward blocks lie."""
        return self.flipped == (self.layer.spec.layout == "experts")


class ExpertWeight(Tensor):
    """A layer's weight, or a part of it, within the forward pass of its module."""

    _nm: Part

    @classmethod
    def of(cls, part: Part) -> ExpertWeight:
        """Return the tensor for a part of a weight: only its shape, dtype and device are ever read."""
        weight = part.use.weight
        with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
            if part.dtype is None and not isinstance(part.experts, Tensor):
                seen = weight.detach()
                if part.experts is not None:
                    seen = seen[part.experts]
            else:
                # One NaN, expanded to the shape, takes no memory, and shows up if it is read all the same.
                dtype = part.dtype or weight.dtype
                nan = torch.full((), float("nan"), dtype=dtype, device=weight.device)
                seen = nan.expand(*part.leading, *weight.shape[-2:])
            if part.flipped:
                seen = seen.mT
            made = _Unread.apply(weight, seen, part.layer.name).as_subclass(cls)
        made._nm = part
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a known operator on what it stands for, and any other one on W_F where that is right."""
        kwargs = kwargs or {}
        # Operators of other libraries are registered by name.
        handler = _HANDLERS.get(func) or _HANDLERS.get(str(func))
        if handler is not None:
            result = handler(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return _run_on_values(func, args, kwargs)


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
    """Run an operator on W_F, or on the tensor that shows its shape if that is enough.

    Raises:
        RuntimeError: If the gradients of the operator would not be those of the layer.
    """
    name = getattr(func, "__name__", str(func))
    # Reading an attribute calls the __get__ of its descriptor, which has the attribute's name.
    attribute = ""
    if name == "__get__":
        descriptor = getattr(func, "__self__", None)
        attribute = getattr(descriptor, "__name__", "")
    layers = {part.layer.name: part.layer for part in _parts((args, kwargs))}
    # On a GPU, only a kernel of somebody's own asks for the address: it would read the wrong values.
    if name == "data_ptr" and args[0].device.type != "cpu":
        raise _unsupported(next(iter(layers.values())), "data_ptr(), as of a kernel of its own")
    is_metadata = name in _METADATA or (attribute != "" and attribute not in _VALUE_ATTRIBUTES)
    with torch._C.DisableTorchFunctionSubclass():
        if is_metadata:
            return func(*args, **kwargs)
        if torch.is_grad_enabled():
            for layer in layers.values():
                if _has_own_gradients(layer):
                    raise _unsupported(layer, attribute or name)
        return func(*_values(args), **_values(kwargs))


def _has_own_gradients(layer: NMLayer) -> bool:
    """Whether dX or dW differ from what autograd makes of a product with W_F."""
    method = layer.spec.method
    return (
        layer.spec.estimator is not None
        or layer.masks.has_backward
        or layer.draws_backward
        or method.has_own_backward_weight
    )


def _unsupported(layer: NMLayer, operator: str) -> RuntimeError:
    """Return the error for an operator whose gradients would be wrong."""
    why = "its gradient estimator" if layer.spec.estimator is not None else "its backward weight"
    # No TypeError: torch turns that of an arithmetic operator into another one.
    return RuntimeError(
        f"layer '{layer.name}' is used by the operator '{operator}', which cannot run with {why}: use F.linear, "
        "matmul, bmm, einsum with one expert axis, or grouped_mm with the weight or an indexed expert, choose a method "
        f"without one (such as sr-ste) and no estimator, or name '{layer.name}' in `exclude`"
    )


def _parts(tree: Any) -> list[Part]:
    """Return the parts of weights among the arguments of an operator, in lists and dicts, too."""
    if isinstance(tree, ExpertWeight):
        return [tree._nm]
    if isinstance(tree, dict):
        tree = list(tree.values())
    if not isinstance(tree, (list, tuple)):
        return []
    found = []
    for leaf in tree:
        found += _parts(leaf)
    return found


def _values(tree: Any) -> Any:
    """Return the same arguments with W_F in the place of each weight."""
    if isinstance(tree, ExpertWeight):
        use, experts, flipped, dtype = tree._nm
        made = use.forward_weight()
        if experts is not None:
            made = made[experts]
        if dtype is not None:
            made = made.to(dtype)
        return made.mT if flipped else made
    if isinstance(tree, dict):
        return {key: _values(value) for key, value in tree.items()}
    # Not their subclasses: torch.Size and named tuples hold no weights, and are made in other ways.
    if type(tree) in (list, tuple):
        return type(tree)(_values(leaf) for leaf in tree)
    return tree


# Operator, or the name of one of another library -> function that stands in for it.
_HANDLERS: dict[Any, Handler] = {}


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    """Return a decorator that makes a function stand in for operators, for arguments that its signature takes.

    The function may return ``NotImplemented``; the operator then runs on W_F.

    Args:
        *functions: Operators of torch, ``None`` for one that this torch does not have, and names of operators of other
            libraries.
    """

    def register(handler: Handler) -> Handler:
        signature = inspect.signature(handler)

        @wraps(handler)
        def checked(*args: Any, **kwargs: Any) -> Any:
            # Only the binding: a TypeError of the handler itself is an error.
            try:
                signature.bind(*args, **kwargs)
            except TypeError:
                return NotImplemented
            return handler(*args, **kwargs)

        for function in functions:
            if function is not None:
                _HANDLERS[function] = checked
        return handler

    return register
