"""Experts whose weights are one 3-D parameter: their grouped GEMM, and the modules that run theirs by it.

Each expert is a matrix with masks, blocks and random numbers of its own. The method routes the gradient of all experts
together, once for each grouped GEMM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_nm.kernels.api import GemmName
from lightning_nm.nn.adapters.adapter import (
    Adapter,
    Args,
    Kwargs,
    WeightSpec,
    find_adapter,
    register_adapter,
)
from lightning_nm.nn.layer import LayerMasks, NMLayer
from lightning_nm.nn.products import nm_linear
from lightning_nm.nn.weight import Layout, PlainWeight

Kind = TypeVar("Kind", bound=type[nn.Module])

INPUT_HOOKS: dict[NMLayer, Callable[[int, Tensor], None]] = {}
"""Called with an expert's number and its tokens ``[tokens, in]`` before each product with a masked layer."""


# The tokens are cut at ends that are data, as Python numbers: no graph can hold that.
@torch.compiler.disable
def nm_grouped_linear(x: Tensor, module: nn.Module, parameter: str, offs: Tensor) -> Tensor:
    r"""Return :math:`X_e W_e^T` of each expert e, masked while the weight is, and dense otherwise.

    Args:
        x: ``[tokens, in]``: the tokens of expert 0, then those of expert 1, and so on.
        module: The module that holds the weight. Its class is known by :func:`register_experts`.
        parameter: The weight's name there.
        offs: Integers ``[experts]``, where the tokens of each expert end, as in ``torch.nn.functional.grouped_mm``.

    Returns:
        ``[tokens, out]``, zeros after the last end.

    Raises:
        TypeError: If the module's class is not registered.
        ValueError: If there is not one end for each expert, the ends do not increase from 0 to the number of tokens, or
            the tokens have other features than the weight.
    """
    weight = getattr(module, parameter)
    found = find_adapter(type(module))
    if found is None or not issubclass(found[0], NMExperts):
        raise TypeError(
            f"nm_grouped_linear takes a module of registered experts: call lightning_nm.nn.register_experts("
            f"{type(module).__name__})"
        )
    if x.dim() != 2 or offs.is_floating_point():
        raise ValueError(
            f"nm_grouped_linear takes tokens [tokens, in] and integer ends, not {tuple(x.shape)} and {offs.dtype}"
        )
    ends = offs.tolist()
    if any(not before <= end <= len(x) for before, end in pairwise([0, *ends])):
        raise ValueError(
            f"offs={ends} are not where the {len(x)} tokens of each expert end, one after another: of numbers of "
            "tokens these are counts.cumsum(0)"
        )
    transposed = found[0].is_transposed(module, parameter)
    number, *sizes = weight.shape
    width = sizes[0 if transposed else 1]
    # One piece more than there are ends: the tokens after the last end belong to no expert.
    *pieces, rest = x.tensor_split(ends)
    if len(pieces) != number or x.shape[-1] != width:
        held = "in, out" if transposed else "out, in"
        raise ValueError(
            f"'{parameter}' {tuple(weight.shape)} is registered as [experts, {held}], which {len(pieces)} ends and "
            f"tokens {tuple(x.shape)} do not fit; register_experts(..., transposed={not transposed}) is for the other "
            "order"
        )
    product = _product(module, parameter, weight, transposed=transposed)
    # An expert without tokens runs no GEMM: unbind() gives its matrix a gradient of zeros.
    made = [product(expert, piece) for expert, piece in enumerate(pieces) if len(piece)]
    if not made:
        # An empty GEMM still has the right width, dtype and gradient.
        made.append(product(0, x[:0]))
    if len(rest):
        made.append(made[0].new_zeros(len(rest), made[0].shape[1]))
    return torch.cat(made)


def _product(
    module: nn.Module, parameter: str, weight: Any, *, transposed: bool
) -> Callable[[int, Tensor], Tensor]:
    """Return the GEMM of one expert, as a function of its number and its tokens."""
    layer = getattr(module, "nm_layers", {}).get(parameter)
    if layer is None:
        dense = (weight.mT if transposed else weight).unbind()
        return lambda expert, x: F.linear(x, dense[expert])
    if not isinstance(layer, NMLayer):  # packed
        return lambda expert, x: layer.parts[expert].linear(x, None, None)
    if not layer.experts:
        made: dict[str, Tensor] = {}
        layer.experts.extend(ExpertLayer(layer, number, made) for number in range(len(weight)))
    layer.experts[0].made.clear()  # freed: this pass makes its own
    matrices = _Routed.apply(layer, weight, *layer.parameters.values()).unbind()
    layer.costs.record_product(0)  # the weight is multiplied by, even if no expert has tokens

    def masked(expert: int, x: Tensor) -> Tensor:
        if layer in INPUT_HOOKS:
            INPUT_HOOKS[layer](expert, x)
        layer.costs.record_product(len(x) * matrices[expert].numel())
        return nm_linear(x, matrices[expert], None, layer.experts[expert])

    return masked


class _ExpertWeight(PlainWeight):
    """The matrix of one expert in a weight of several."""

    def __init__(self, whole: PlainWeight, expert: int, layout: Layout) -> None:
        super().__init__(whole.module, whole.name, layout)
        self.expert = expert

    @property
    def param(self) -> Any:
        """The expert's part of the parameter, detached, for its shape and whether it is trained."""
        parameter = super().param
        return parameter.detach()[self.expert].requires_grad_(parameter.requires_grad)


class ExpertLayer(NMLayer):
    """One expert as a layer of its own: a view of its part of the masks and values of the layer of all experts.

    It has a handle of its own, so that kernels keep packed operands for each expert.

    Args:
        layer: The layer of all experts.
        expert: The number of this one.
        made: The weights of all experts that a method made, freed by the next pass; one for all of them.
    """

    routes_gradients = False  # those of all experts are routed together

    def __init__(self, layer: NMLayer, expert: int, made: dict[str, Tensor]) -> None:
        # Not by super().__init__(): what is not set here is that of the layer of all experts, see __getattr__.
        self.layer = layer
        self.expert = expert
        self.made = made
        rows, _ = layer.spec.layout.row_sizes(layer.view.shape)
        self._out = rows // layer.spec.groups
        # It tells the expert's random numbers from those of others.
        self.first_row = expert * self._out
        layout = Layout.TRANSPOSED if layer.spec.layout.is_transposed else Layout.PLAIN
        self.spec = replace(layer.spec, layout=layout, groups=1)
        self.view = _ExpertWeight(layer.view, expert, layout)
        self.parameters = {}  # their gradients are made with the whole weight's
        self._masks: LayerMasks | None = None
        self._generation = 0

    def __getattr__(self, name: str) -> Any:
        # Counters, noise and buffers.
        return getattr(self.layer, name)

    @property
    def masks(self) -> LayerMasks:  # type: ignore[override]
        """The expert's part of the masks, a view."""
        masks = self.layer.masks
        if self._masks is None or self._generation != masks.generation:
            # Kept until the masks move: a part that is made again has another cache key, by which no pack is found.
            self._masks = masks.of_group(self.expert, self._out)
            self._generation = masks.generation
        return self._masks

    @property
    def handle_tensor(self) -> Tensor:  # type: ignore[override]
        """An empty tensor whose size is this layer's handle."""
        return self.layer.handle_tensor.new_empty(self.handle, 0)

    def values_of(self, which: GemmName, weight: Tensor) -> Tensor:
        """The values of this expert, perhaps a part of what the method makes of the entries of all, once."""
        if self.spec.method.selects_entries:
            return super().values_of(which, weight)
        if which not in self.made:
            with torch.no_grad():
                # Of the whole weight, because what the method keeps in its buffers is of the whole weight, too.
                self.made[which] = self.layer.values_of(which, self.layer.param.detach())
        return self.made[which][self.expert]


class _Routed(torch.autograd.Function):
    """Passes the latent weight on; in the backward pass, after those of all experts, the method routes its gradient."""

    @staticmethod
    def forward(ctx: Any, layer: NMLayer, weight: Tensor, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(weight)
        # A view: autograd does not take an input for an output.
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        # The dgrad of all experts is over: what was made for it is freed.
        ctx.layer.experts[0].made.clear()
        ctx.layer.progress.trained_by_layer = True
        return None, *ctx.layer.spec.method.weight_gradient(ctx.layer, weight, grads[0])


class NMExperts(Adapter):
    """A module whose forward multiplies weights ``[experts, out, in]``, or transposed, by :func:`nm_grouped_linear`.

    :func:`register_experts` makes a subclass for a class.
    """

    wraps_forward = True
    transposed: ClassVar[bool | Collection[str]] = False
    """Whether weights are ``[experts, in, out]``, or the names of those that are."""
    parameters_masked: ClassVar[Collection[str] | None] = None
    """The names of the weights; ``None`` takes all parameters of three dimensions."""

    @classmethod
    def specs(cls, module: Any, conv_layout: str) -> Iterator[WeightSpec]:
        """The weights, with the output rows of each expert in one group, so that no dgrad block crosses two experts."""
        if cls.wraps_forward:  # with names that a user has given
            given = () if isinstance(cls.transposed, bool) else cls.transposed
            unknown = {*given, *(cls.parameters_masked or ())} - module._parameters.keys()
            if unknown:
                raise ValueError(
                    f"register_experts({type(module).__name__}) names {', '.join(sorted(unknown))}, but its parameters "
                    f"are {', '.join(module._parameters)}"
                )
        for name, parameter in module._parameters.items():
            is_chosen = cls.parameters_masked is None or name in cls.parameters_masked
            if is_chosen and holds_matrices(parameter):
                transposed = cls.is_transposed(module, name)
                layout = Layout.EXPERTS_TRANSPOSED if transposed else Layout.EXPERTS
                yield WeightSpec(name, layout, len(parameter))

    @classmethod
    def is_transposed(cls, module: Any, parameter: str) -> bool:
        """Whether a weight is ``[experts, in, out]``."""
        if isinstance(cls.transposed, bool):
            return cls.transposed
        return parameter in cls.transposed

    @classmethod
    def macs(
        cls, module: Any, parameter: str, args: Args, kwargs: Kwargs, output: Any
    ) -> int | None:
        """Return what the GEMMs with the weight counted in the module's last call."""
        layer = module.nm_layers.get(parameter) if isinstance(module, Adapter) else None
        return None if layer is None else layer.costs.last_call

    # torch.compile breaks its graph around the experts, whose counts of tokens are data.
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward.

        Raises:
            RuntimeError: If it made no product with a masked weight that the masks know of.
        """
        layers = [layer for layer in self.nm_layers.values() if isinstance(layer, NMLayer)]
        for layer in layers:
            layer.costs.last_call = None
        output = type(self).nm_base.forward(self, *args, **kwargs)
        for layer in layers:
            if layer.costs.last_call is None:
                raise RuntimeError(
                    f"the forward of {type(self).nm_base.__name__} did not multiply by '{layer.name}' with "
                    "lightning_nm.nn.nm_grouped_linear, so that its masks have no effect: call that, leave it "
                    f"out of register_experts(parameters=[...]), or name '{layer.name}' in `exclude`"
                )
        return output


@register_adapter
class NMTransformersExperts(NMExperts):
    """Experts of transformers, for all classes that run by its ``ExpertsInterface``.

    While a module is masked, its forward is this implementation of the interface, whichever the model's configuration
    names.
    """

    wraps_forward = False
    parameters_masked = ("gate_up_proj", "up_proj", "down_proj")

    @classmethod
    def handled(cls, kind: type[nn.Module]) -> type[nn.Module] | None:
        """Return the class itself if its forward is the one that looks the implementation up."""
        # By the module that defines the forward, which transformers gives to each such class: nothing is imported.
        namespace = getattr(kind.forward, "__globals__", {})
        return kind if namespace.get("__name__") == "transformers.integrations.moe" else None

    @classmethod
    def is_transposed(cls, module: Any, parameter: str) -> bool:
        """Whether a weight is ``[experts, in, out]``, which the module says."""
        return module.is_transposed

    @classmethod
    def macs(cls, module: Any, parameter: str, args: Args, kwargs: Kwargs, output: Any) -> int:
        """Return those of the tokens that the router sent to the module's experts."""
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        return chosen.numel() * getattr(module, parameter)[0].numel()

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, weighted.

        Args:
            hidden_states: ``[tokens, hidden]``.
            top_k_index: The experts of each token, int64 ``[tokens, k]``; numbers past the last expert give 0.
            top_k_weights: Their weights ``[tokens, k]``, or those of all experts ``[tokens, experts]``.
        """
        module: Any = self
        tokens, k = top_k_index.shape
        if top_k_weights.shape[1] != k:
            top_k_weights = top_k_weights.gather(1, top_k_index)
        number = module.down_proj.shape[0]
        # As the interface's own sort: the order of an expert's tokens decides what an estimator draws of them.
        experts, order = top_k_index.flatten().sort()
        # Numbers past the last expert come last in the order, after the last offset, so no GEMM takes their tokens.
        offs = experts.bincount(minlength=number)[:number].cumsum(0)

        def product(x: Tensor, name: str) -> Tensor:
            x = x.to(getattr(module, name).dtype)
            # As those of transformers' own default, which autocast does not know.
            with torch.autocast(x.device.type, enabled=False):
                made = nm_grouped_linear(x, module, name, offs)
            if module.has_bias:
                bias = getattr(module, f"{name}_bias")[experts.clamp(max=number - 1)]
                made = (made + bias).to(made.dtype)
            return made

        # transformers 5.0 has experts with a gate alone.
        x = hidden_states[order // k]  # choices t k, ..., t k + k - 1 are of token t
        if getattr(module, "has_gate", True):
            x = module._apply_gate(product(x, "gate_up_proj"))
        else:
            x = module.act_fn(product(x, "up_proj"))
        y = product(x, "down_proj")
        if getattr(module, "has_post_expert_norm", False):
            y = module.post_expert_norm(y)
        # No GEMM took the tokens of numbers past the last expert, but a bias was added to their zeros.
        y = y.masked_fill((experts >= number).unsqueeze(-1), 0)
        y = y * top_k_weights.flatten()[order].unsqueeze(-1)
        # Back to the order in which the tokens came.
        y = torch.empty_like(y).index_copy(0, order, y)
        return y.view(tokens, k, -1).sum(1).to(hidden_states.dtype)


def register_experts(
    kind: Kind | None = None,
    *,
    transposed: bool | Collection[str] = False,
    parameters: Collection[str] | None = None,
) -> Any:
    """Make a module class known whose forward multiplies 3-D weights by :func:`nm_grouped_linear`; also a decorator.

    Args:
        kind: The module class; its ``forward`` stays as it is.
        transposed: Whether the weights are ``[experts, in, out]`` instead of ``[experts, out, in]``, or the names of
            those that are.
        parameters: The names of the weights; all 3-D floating-point parameters by default.

    Example::

        >>> from lightning_nm import NMSparsifier
        >>> @register_experts(transposed=True)
        ... class MoE(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up = nn.Parameter(torch.randn(4, 8, 16))
        ...     def forward(self, x, offs):
        ...         return nm_grouped_linear(x, self, "up", offs)
        >>> list(NMSparsifier(MoE(), "2:4", "sr-ste").attach().layers)
        ['up']
    """
    if kind is None:  # called as @register_experts(...)
        return lambda kind: register_experts(kind, transposed=transposed, parameters=parameters)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_experts takes a module class, not {kind!r}")
    # A single name is a list of one: within a text, parts of it would be found, too.
    transposed = (transposed,) if isinstance(transposed, str) else transposed
    parameters = (parameters,) if isinstance(parameters, str) else parameters
    choices = {"handles": kind, "transposed": transposed, "parameters_masked": parameters}
    register_adapter(type(f"NM{kind.__name__}Adapter", (NMExperts,), choices))
    return kind


def holds_matrices(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Whether a parameter of three dimensions holds matrices of floating-point values."""
    if parameter is None or nn.parameter.is_lazy(parameter) or parameter.dim() != 3:
        return False
    # With a size of 1 they are vectors, such as positions, and not matrices.
    return parameter.is_floating_point() and min(parameter.shape[1:]) > 1
