"""One masked weight: its parts, and what methods and operators ask of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_nm.functional import FlopsKind, GemmDensity
from lightning_nm.functional.pattern import NMPattern
from lightning_nm.functional.select import masked
from lightning_nm.kernels.router.handles import HasHandle
from lightning_nm.nn.layer.gemms import Gemms, LayerCosts, layer_gemms
from lightning_nm.nn.layer.layout import from_rows, locate, rows_of
from lightning_nm.nn.layer.masks import LayerMasks
from lightning_nm.nn.layer.noise import LayerNoise
from lightning_nm.nn.layer.observation import GradientObservation
from lightning_nm.nn.layer.progress import LayerProgress
from lightning_nm.nn.layer.sharding import (
    as_sharded,
    gather,
    is_sharded,
    local_shard,
    sharded_dimensions,
)
from lightning_nm.nn.layer.spec import LayerSpec
from lightning_nm.nn.layer.weight import ShardedWeight

if TYPE_CHECKING:  # for the types only: imports point one way
    from lightning_nm.estimators.base import GradientEstimator
    from lightning_nm.methods.base import Method


_MOVED = {
    "marks": "call set_masks()",
    "own_backward": "call set_masks()",
    "permutation": "call masks.set_permutation()",
    "backward_density": "call masks.measure_backward()",
    "handover": "set `pending`",
    "dense_gradient": "define Method.needs_dense_gradient()",
}
"""Attributes that methods used to assign, and what replaces them."""


class NMLayer(HasHandle):
    """A weight under an N:M method, composed of parts that are assigned by their own files alone.

    Args:
        spec: The selection's decisions.
        seed: Base of the layer's random choices.
        wrappers: The FSDP modules around the layer's module.
    """

    def __init__(
        self, spec: LayerSpec, *, seed: int = 0, wrappers: Sequence[nn.Module] = ()
    ) -> None:
        self.spec = spec
        self.shards = (
            ShardedWeight(spec.module, spec.parameter, wrappers) if is_sharded(self.param) else None
        )
        """Access to a weight that processes hold together; ``None`` for an ordinary one."""
        self.masks = LayerMasks()
        self.noise = LayerNoise(seed, spec.name, by_process=spec.tensor_parallel)
        self.progress = LayerProgress()
        self.costs = LayerCosts()
        self.observation = GradientObservation()
        self.buffers: dict[str, Tensor] = {}
        """Further tensors of the method; they are saved as they are and follow the weight's device."""
        self.parameters: dict[str, nn.Parameter] = {}
        """Parameters that the method owns; the sparsifier hands them to the optimizer of the weight."""
        self.pending: Any = None
        """What the method keeps from one call of a step to the next, such as a pending exchange; never saved."""
        self.replaced_state: dict[str, Any] | None = None
        """The state before other weights were loaded, until the masks move: it comes back if its weights do."""
        self.handle_tensor = torch.empty(self.handle, 0, device=self.param.device)
        """An empty tensor whose size is the layer's handle."""
        self.experts: dict[int, NMLayer] = {}
        """The layers of single experts that products have used.

        Made by :func:`~lightning_nm.nn.adapters.experts.expert.expert_of`.
        """

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.experts = {}
        self.handle_tensor = self.handle_tensor.new_empty(self.handle, 0)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _MOVED:
            raise AttributeError(f"NMLayer.{name} cannot be set: {_MOVED[name]}")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"NMLayer({self.name!r}, pattern={self.pattern}, method={self.method})"

    @property
    def name(self) -> str:
        """Name in the model."""
        return self.spec.name

    @property
    def module(self) -> nn.Module:
        """The module that owns the parameter."""
        return self.spec.module

    @property
    def parameter(self) -> str:
        """The parameter's name in the module."""
        return self.spec.parameter

    @property
    def pattern(self) -> NMPattern:
        """The N:M pattern."""
        return self.spec.pattern

    @property
    def method(self) -> Method:
        """The method."""
        return self.spec.method

    @property
    def estimator(self) -> GradientEstimator | None:
        """The gradient estimator; ``None`` uses dY itself."""
        return self.spec.estimator

    @property
    def groups(self) -> int:
        """Groups of output rows that no dgrad block crosses."""
        return self.spec.groups

    @property
    def forward_reason(self) -> str:
        """Why the forward GEMM cannot be N:M; empty when it can."""
        return self.spec.forward_reason

    @property
    def dgrad_reason(self) -> str:
        """Why the dgrad GEMM cannot be N:M; empty when it can."""
        return self.spec.dgrad_reason

    @property
    def maskable(self) -> bool:
        """Whether the method makes the forward or the backward weight of this layer N:M at some time."""
        forward, dgrad = self.method.sparse_forward, self.method.sparse_dgrad
        return (forward and not self.forward_reason) or (dgrad and not self.dgrad_reason)

    @property
    def param(self) -> nn.Parameter:
        """The latent parameter as the module holds it, for its identity and shape: its values may be sharded."""
        # Not by getattr: while a module of experts runs, its attribute is an ExpertWeight.
        parameter = self.spec.module._parameters[self.spec.parameter]
        assert parameter is not None
        return parameter

    @property
    def optimizer_param(self) -> nn.Parameter:
        """The parameter as optimizers hold it, to be read between forward and backward passes alone."""
        return self.param if self.shards is None else self.shards.parameter

    @property
    def sharded(self) -> bool:
        """Whether processes hold the parameter's values together."""
        return self.shards is not None

    @property
    def weight(self) -> nn.Parameter:
        """The latent parameter; within :meth:`full` a plain tensor, even if it is sharded."""
        return self.param if self.shards is None else self.shards.weight

    @property
    def local_weight(self) -> Tensor:
        """The values of the parameter that this process holds, detached: to be written in place."""
        return self.param.detach() if self.shards is None else self.shards.local

    @property
    def local_grad(self) -> Tensor | None:
        """The part of its gradient that this process holds."""
        return self.param.grad if self.shards is None else self.shards.local_grad

    def local_shard(self, full: Tensor) -> Tensor:
        """View of those entries of a weight-shaped tensor whose values are in :attr:`local_weight`."""
        return full if self.shards is None else self.shards.shard_of(full)

    def full(self, *, gradient: bool = False) -> AbstractContextManager[None]:
        """Within, :attr:`weight` is the full weight; all processes must enter, see :class:`ShardedWeight`."""
        return nullcontext() if self.shards is None else self.shards.full(gradient=gradient)

    def rows(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor so that dimension 0 is `out` and forward blocks lie along dimension 1."""
        return rows_of(tensor, self.spec.layout)

    def matrix(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor as ``[out, in]``: :meth:`rows`, without the single tap of a 1x1 convolution."""
        return self.rows(tensor).flatten(1)

    def unrows(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`rows`."""
        return from_rows(tensor, self.spec.layout, self.param.shape)

    def locate(self, index: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Turn an index into :meth:`rows` of a weight-shaped tensor into one of the tensor itself, to write through."""
        return locate(index, self.spec.layout, self.param.shape)

    @torch.no_grad()
    def by_rows(self, mask: Callable[[Tensor], Tensor]) -> Tensor:
        """A bool mask of the weight's shape, each row of which ``mask`` makes of the same row of the weight alone.

        ``mask`` gets and returns what :meth:`rows` views. Where processes shard the weight by rows, each masks its
        own, and they gather the mask instead of the weight.
        """
        if self.sharded and sharded_dimensions(self.param) <= {
            1 if self.spec.layout == "transposed" else 0
        }:
            found = self.unrows(mask(self.rows(self.local_weight)))
            return gather(as_sharded(found.to(torch.uint8).contiguous(), self.param)).ne(0)
        return self.unrows(mask(self.rows(self.weight.detach())))

    @property
    def forward_mask(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when the forward weight is not masked."""
        return self.masks.forward

    @property
    def forward_mask_view(self) -> Tensor | None:
        """:attr:`forward_mask` for use at once: it may share memory with the masks, which move in place."""
        return self.masks.forward_view

    @property
    def backward_mask(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when dgrad uses the forward weight."""
        return self.masks.backward

    @property
    def permutation(self) -> Tensor | None:
        """Order of the output rows in which the backward mask is N:M, int64 ``[out]``."""
        return self.masks.permutation

    @torch.no_grad()
    def set_masks(self, forward: Tensor | None, backward: Tensor | None = None) -> None:
        """Move the masks in place and count the forward bits that changed; for both see :attr:`forward_mask`."""
        forward = None if self.spec.forward_reason else forward
        self.masks.set(forward, backward, self.param if self.shards is None else None)

    def forward_weight(self) -> Tensor:
        """W_F, the values that the forward GEMM uses, detached; gathered if it is sharded."""
        with torch.no_grad(), self.full():
            return self.method.forward_weight(self, self.weight.detach())

    def backward_weight(self) -> Tensor:
        """W_B, the values that the dgrad GEMM uses, detached; gathered if it is sharded."""
        with torch.no_grad(), self.full():
            return self.method.backward_weight(self, self.weight.detach())

    @torch.no_grad()
    def local_forward_weight(self) -> Tensor:
        """The local shard of W_F, detached; gathers the weight only if the method computes W_F from all of it."""
        if self.shards is None or not self.spec.method.selects_entries:
            return self.local_shard(self.forward_weight())
        mask = self.forward_mask_view
        return (
            self.local_weight if mask is None else masked(self.local_weight, self.local_shard(mask))
        )

    @property
    def step(self) -> int:
        """Real optimizer steps of the weight so far."""
        return self.progress.step

    @property
    def updated_at(self) -> int:
        """The step at which the masks last moved."""
        return self.progress.updated_at

    @property
    def clock(self) -> int:
        """Training steps so far, of all layers together: batches after which any optimizer had stepped."""
        return self.progress.clock

    @property
    def schedule(self) -> tuple[int, ...]:
        """The training steps at which the method begins or ends something."""
        return self.progress.schedule

    @property
    def dense_gradient(self) -> bool:
        """Whether the window before the next step needs dL/dW_F at pruned entries, too."""
        return self.progress.dense_gradient

    @property
    def estimating(self) -> bool:
        """Whether the estimator works in this window."""
        return self.progress.estimating

    def crossed(self, every: int, first: int = 0) -> bool:
        """Whether one of the steps ``first, first + every, ...`` after step 0 lies in ``(updated_at, step]``."""
        return (
            self.step >= first and (self.step - first) // every > (self.updated_at - first) // every
        )

    def generator(self) -> torch.Generator:
        """A generator that depends on the seed, the layer and the step alone: equal on all ranks and after a resume."""
        return self.noise.generator(self.step)

    def draw_noise(self, number: int | None = None) -> None:
        """Draw the estimator's next noise; nothing without an estimator."""
        if self.spec.estimator is not None:
            self.noise.draw(self.param.device, number)

    def estimate(self, grad: Tensor, seed: Tensor) -> Tensor:
        """E(dY) for ``dY [tokens, out]``, by the layer's estimator.

        Raises:
            TypeError: If that is of another shape or dtype.
        """
        assert self.estimator is not None
        pruned = self.estimator.estimate(self, grad, seed)
        if pruned.shape != grad.shape or pruned.dtype != grad.dtype:
            raise TypeError(
                f"{type(self.estimator).__name__} made {pruned.dtype} {tuple(pruned.shape)} of the output gradient at "
                f"layer '{self.name}', which is {grad.dtype} {tuple(grad.shape)}: keep the shape and the dtype"
            )
        return pruned

    def tensors(self) -> list[Tensor]:
        """Every tensor beside the weight that training needs: the persistent memory of the layer."""
        read = self.read_tensors()
        return read if self.spec.method.passes_read_buffers else [*read, *self.buffers.values()]

    def read_tensors(self) -> list[Tensor]:
        """The tensors beside the weight that forward and backward passes read."""
        buffers = self.buffers.values() if self.spec.method.passes_read_buffers else ()
        found = [self.masks.bits, self.masks.permutation, *buffers, *self.parameters.values()]
        return [tensor for tensor in found if tensor is not None]

    def to_weight_device(self) -> None:
        """Move the layer's tensors to the weight's device."""
        device = self.param.device
        for part in (self.masks, self.noise, self.observation):
            part.to(device)
        self.handle_tensor = self.handle_tensor.to(device)
        self.buffers = {name: tensor.to(device) for name, tensor in self.buffers.items()}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    @property
    def first_row(self) -> int:
        """The first output row, counted from that of the weight which the random numbers belong to."""
        return 0

    @property
    def routes_gradients(self) -> bool:
        """Whether products route their weight gradients through the method."""
        return True

    def local_view(self, sharded: Tensor) -> NMLayer:
        """This layer for the local shard of ``sharded``, whose passes are not observed."""
        view = copy.copy(self)
        view.masks = self.masks.with_bits(
            None if self.masks.bits is None else local_shard(self.masks.bits, sharded)
        )
        view.observation = GradientObservation()
        return view

    def with_state(
        self, masks: LayerMasks, buffers: dict[str, Tensor], parameters: dict[str, nn.Parameter]
    ) -> NMLayer:
        """This layer with other masks, buffers and parameters of the method."""
        other = copy.copy(self)
        other.masks, other.buffers, other.parameters = masks, buffers, parameters
        return other

    def remember_state(self, state: dict[str, Any]) -> None:
        """Keep the state that loaded weights replace, if none is kept since the masks last moved."""
        self.replaced_state = self.replaced_state or state

    def forget_replaced_state(self) -> None:
        """The masks moved, or another state was loaded: weights that come back find no state."""
        self.replaced_state = None

    def adopt(self, other: NMLayer) -> None:
        """Take over the masks, buffers and parameters of :meth:`with_state`; known parameters are written in place."""
        self.masks, self.buffers = other.masks, other.buffers
        with torch.no_grad():
            for name, parameter in other.parameters.items():
                if name in self.parameters:  # an optimizer may hold this object
                    self.parameters[name].copy_(parameter)
                else:
                    self.parameters[name] = parameter

    def gemms(self) -> Gemms:
        """What each of the three GEMMs does now."""
        return layer_gemms(self)

    def mean_densities(self) -> dict[FlopsKind, GemmDensity]:
        """What the GEMMs cost on average over the steps so far; now if there were none."""
        return self.costs.mean() or self.gemms().densities()
