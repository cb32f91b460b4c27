"""Tensors that are sharded over processes: local shards, and full tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes hold this tensor together, as ``fully_shard`` and ``parallelize_module`` leave parameters."""
    return isinstance(tensor, DTensor)


def sharded_dimensions(tensor: Tensor) -> set[int]:
    """The dimensions of a tensor that are cut."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return {dim for dim in map(_dimension, placements) if dim is not None}


def _dimension(placement: Placement) -> int | None:
    """The dimension that a mesh dimension cuts: there are kinds of shards of which ``is_shard`` knows nothing."""
    return getattr(placement, "dim", None)


# DTensors cannot be detached, and what is made has no version counter, while inference mode is on.


@torch.inference_mode(False)
@torch.no_grad()
def local_values(tensor: Tensor) -> Tensor:
    """The local shard, detached; it shares memory with the tensor."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cuts_in_forward(tensor: Tensor, *, fsdp: bool) -> dict[int, int]:
    """How many parts tensor parallelism cuts each dimension of a parameter into while its module runs.

    With ``fsdp``, FSDP manages the parameter and gathers its own shards for the forward pass.
    """
    if not isinstance(tensor, DTensor):
        return {}
    placements = list(enumerate(tensor.placements))
    if (
        fsdp
    ):  # its dimensions of the mesh come first: one that is cut, perhaps after one that replicates
        placements = placements[1 + placements[0][1].is_replicate() :]
    cuts: dict[int, int] = {}
    for k, placement in placements:
        dim = _dimension(placement)
        if dim is not None:
            cuts[dim] = cuts.get(dim, 1) * tensor.device_mesh.size(k)
    return cuts


def local_shard(full: Tensor, sharded: Tensor) -> Tensor:
    """View of the shard of a full tensor that this process would hold if it were sharded as ``sharded`` is."""
    if not isinstance(sharded, DTensor):
        return full
    coordinate = sharded.device_mesh.get_coordinate()
    assert coordinate is not None
    # Where two dimensions of the mesh cut one of the tensor, FSDP cuts what tensor parallelism has cut before.
    strided = [hasattr(placement, "split_factor") for placement in sharded.placements]
    for k in sorted(range(len(strided)), key=lambda k: strided[k]):
        dim = _dimension(sharded.placements[k])
        if dim is not None:
            chunks, here = full.chunk(sharded.device_mesh.size(k), dim), coordinate[k]
            full = chunks[here] if here < len(chunks) else full.narrow(dim, 0, 0)
    return full


def as_sharded(local: Tensor, like: Tensor) -> Tensor:
    """The local shards of all processes as one tensor, sharded as another one; a plain tensor is not sharded."""
    if not isinstance(like, DTensor):
        return local
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


@torch.inference_mode(False)
@torch.no_grad()
def gather(tensor: Tensor) -> Tensor:
    """The full tensor, detached, in every process; to be called in all of them."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reshard(modules: Sequence[nn.Module]) -> None:
    """Put the sharded parameters back: FSDP may leave full or differently sharded ones between forward passes."""
    for module in modules:
        assert isinstance(module, FSDPModule)
        module.reshard()


class GatheredParameter:
    """A sharded parameter, perhaps with its gradient, as a plain one: gathered when first read, and written back."""

    def __init__(self, parameter: nn.Parameter, gradient: bool) -> None:
        self._parameter = parameter
        self._gradient = gradient
        self._read: tuple[nn.Parameter, Tensor | None, list[int]] | None = None

    @property
    def weight(self) -> nn.Parameter:
        """The full parameter; the first read must be in all processes."""
        if self._read is None:
            with torch.inference_mode(False):
                weight = nn.Parameter(gather(self._parameter), self._parameter.requires_grad)
                grad = self._parameter.grad if self._gradient else None
                weight.grad = None if grad is None else gather(grad)
            self._read = weight, weight.grad, _versions(weight, weight.grad)
        return self._read[0]

    @torch.no_grad()
    def write_back(self) -> None:
        """Write changes into the local shard."""
        if self._read is None:
            return
        (weight, grad, before), self._read = self._read, None
        now = _versions(weight, weight.grad)
        if now[0] != before[0]:
            local_values(self._parameter).copy_(local_shard(weight.detach(), self._parameter))
        if not self._gradient or (weight.grad is grad and now[1:] == before[1:]):
            return
        if weight.grad is not None and self._parameter.grad is not None:  # which others may hold
            local_values(self._parameter.grad).copy_(local_shard(weight.grad, self._parameter))
        else:
            here = (
                None if weight.grad is None else local_shard(weight.grad, self._parameter).clone()
            )
            self._parameter.grad = None if here is None else as_sharded(here, self._parameter)


def _versions(*tensors: Tensor | None) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]
