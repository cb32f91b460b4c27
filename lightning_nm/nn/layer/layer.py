"""One masked weight: its parts, and what methods and operators ask of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.kernels.api import HasHandle
from lightning_nm.nn.layer.gemms import Gemms, LayerCosts, layer_gemms
from lightning_nm.nn.layer.masks import LayerMasks
from lightning_nm.nn.layer.noise import LayerNoise
from lightning_nm.nn.layer.observation import GradientObservation
from lightning_nm.nn.layer.progress import LayerProgress
from lightning_nm.nn.layer.sharding import is_sharded
from lightning_nm.nn.layer.spec import LayerSpec
from lightning_nm.nn.layer.view import WeightView
from lightning_nm.nn.layer.weight import ShardedWeight


class NMLayer(HasHandle):
    """Sparsity state of one weight. Each part is modified only by the class that defines it.

    Methods read ``spec`` (what was decided on the weight), ``masks``, ``progress`` (counters and schedules) and
    ``view`` (the weight as rows of outputs), and call :meth:`set_masks`.

    Args:
        spec: The selection's decisions.
        seed: Base of the layer's random choices.
        wrappers: The FSDP modules around the layer's module.
    """

    first_row = 0
    """The first output row, counted from that of the weight which the random numbers belong to."""
    routes_gradients = True
    """Whether products route their weight gradients through the method."""

    def __init__(
        self, spec: LayerSpec, *, seed: int = 0, wrappers: Sequence[nn.Module] = ()
    ) -> None:
        self.spec = spec
        self.view = WeightView(self)
        """The weight as rows of outputs, and its local shard."""
        self.shards: ShardedWeight | None = None
        """Access to a weight that processes hold together; ``None`` for an ordinary one."""
        if is_sharded(self.param):
            self.shards = ShardedWeight(spec.module, spec.parameter, wrappers)
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
        self.handle_tensor = torch.empty(
            self.handle, 0, dtype=torch.float32, device=self.param.device
        )
        """An empty tensor whose size is the layer's handle."""
        self.experts: list[NMLayer] = []
        """A layer for each expert of a weight of several, made by their first product."""

    def __getstate__(self) -> dict[str, Any]:
        # A copy makes its own.
        return {**vars(self), "experts": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.view = WeightView(self)  # a copy's view is of the copy
        self.handle_tensor = self.handle_tensor.new_empty(self.handle, 0)

    def __repr__(self) -> str:
        return f"NMLayer({self.name!r}, pattern={self.pattern}, method={self.spec.method})"

    @property
    def name(self) -> str:
        """Name in the model."""
        return self.spec.name

    @property
    def pattern(self) -> NMPattern:
        """The N:M pattern of the masks now: that of the present stage of the schedule, else the layer's own."""
        return self.progress.pattern or self.spec.pattern

    @property
    def step(self) -> int:
        """Real optimizer steps of the weight so far."""
        return self.progress.step

    @property
    def param(self) -> nn.Parameter:
        """The latent parameter as the module holds it, for its identity: its values may be sharded."""
        parameter = self.spec.module._parameters[self.spec.parameter]
        assert parameter is not None
        return parameter

    @property
    def optimizer_param(self) -> nn.Parameter:
        """The parameter as optimizers hold it, to be read between forward and backward passes alone."""
        return self.param if self.shards is None else self.shards.parameter

    @property
    def weight(self) -> nn.Parameter:
        """The latent parameter; within :meth:`full` a plain tensor, even if it is sharded."""
        return self.param if self.shards is None else self.shards.weight

    def full(self, *, gradient: bool = False) -> AbstractContextManager[None]:
        """Within, :attr:`weight` is the full weight; all processes must enter, see :class:`ShardedWeight`."""
        return nullcontext() if self.shards is None else self.shards.full(gradient=gradient)

    @property
    def forward_mask(self) -> Tensor | None:
        """Bool mask of the weight's shape; ``None`` when the forward weight is not masked."""
        return self.masks.forward

    @torch.no_grad()
    def set_masks(self, forward: Tensor | None, backward: Tensor | None = None) -> None:
        """Move the masks in place and count the forward bits that changed.

        Args:
            forward: Bool mask of the weight's shape; ``None`` for a dense forward weight. It is ignored where the
                forward GEMM cannot be N:M.
            backward: Bool mask of the weight's shape; ``None`` when dgrad uses the forward weight.
        """
        if self.spec.forward_reason:
            forward = None
        self.masks.set(forward, backward, self.param if self.shards is None else None)

    def forward_weight(self) -> Tensor:
        """W_F, the values that the forward GEMM uses, detached; gathered if it is sharded."""
        with torch.no_grad(), self.full():
            return self.spec.method.forward_weight(self, self.weight.detach())

    def backward_weight(self) -> Tensor:
        """W_B, the values that the dgrad GEMM uses, detached; gathered if it is sharded.

        Of a layer that draws them (:attr:`draws_backward`) it is their expectation, W_F.
        """
        with torch.no_grad(), self.full():
            return self.spec.method.backward_weight(self, self.weight.detach())

    @property
    def draws_backward(self) -> bool:
        """Whether the dgrad GEMM now uses a random draw of the weight that is N:M along `out`; not in a dense phase."""
        spec = self.spec
        if not spec.may_draw_backward:
            return False
        # A forward weight that cannot be N:M has no phases: it is dense at all times.
        has_phases = spec.method.uses_masks and not spec.forward_reason
        return self.masks.has_forward or not has_phases

    def draw_noise(self, number: int | None = None) -> None:
        """Draw the next noise of estimator and backward weight; nothing where neither is random."""
        if self.spec.estimator is not None or self.spec.may_draw_backward:
            self.noise.draw(self.param.device, number)

    def generator(self) -> torch.Generator:
        """A generator that depends on the seed, the layer and the step alone: equal on all ranks and after a resume."""
        return self.noise.generator(self.progress.step)

    def gemms(self) -> Gemms:
        """What each of the three GEMMs does now."""
        return layer_gemms(self)

    def tensors(self) -> list[Tensor]:
        """Every tensor beside the weight that training needs: the persistent memory of the layer."""
        read = self.read_tensors()
        if self.spec.method.passes_read_buffers:
            return read
        return [*read, *self.buffers.values()]

    def read_tensors(self) -> list[Tensor]:
        """The tensors beside the weight that forward and backward passes read."""
        found = self.masks.tensors()
        if self.spec.method.passes_read_buffers:
            found += self.buffers.values()
        return [*found, *self.parameters.values()]

    def to_weight_device(self) -> None:
        """Move the layer's tensors to the weight's device."""
        device = self.param.device
        for part in (self.masks, self.noise, self.observation):
            part.to(device)
        self.handle_tensor = self.handle_tensor.to(device)
        self.buffers = {name: tensor.to(device) for name, tensor in self.buffers.items()}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    def with_parts(self, **parts: Any) -> NMLayer:
        """A copy of this layer that shares all parts but those given."""
        other = copy.copy(self)
        for name, part in parts.items():
            setattr(other, name, part)
        return other

    def adopt(self, other: NMLayer) -> None:
        """Take over the masks, buffers and parameters of a copy; known parameters are written in place."""
        self.masks = other.masks
        self.buffers = other.buffers
        with torch.no_grad():
            for name, parameter in other.parameters.items():
                if name in self.parameters:
                    # An optimizer may hold this object.
                    self.parameters[name].copy_(parameter)
                else:
                    self.parameters[name] = parameter


def init_masks(layer: NMLayer) -> None:
    """Choose the masks for a weight that has just been set or loaded; none in a dense stage of the user's schedule."""
    if layer.progress.is_dense:
        layer.set_masks(None)
    else:
        layer.spec.method.init_masks(layer)
