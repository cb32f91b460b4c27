"""Tensors that are sharded over processes: local shards, and full tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes hold this tensor together, as ``fully_shard`` and ``parallelize_module`` leave parameters."""
    return isinstance(tensor, DTensor)


def sharded_dimensions(tensor: Tensor) -> set[int]:
    """The dimensions of a tensor that are cut."""
    if not isinstance(tensor, DTensor):
        return set()
    dimensions = {_dimension(placement) for placement in tensor.placements}
    return {dim for dim in dimensions if dim is not None}


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
    placements = tensor.placements
    first = 0
    if fsdp:
        # Its dimensions of the mesh come first: one that is cut, perhaps after one that replicates.
        first = 2 if placements[0].is_replicate() else 1
    cuts: dict[int, int] = {}
    for k in range(first, len(placements)):
        dim = _dimension(placements[k])
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
    order = list(range(len(sharded.placements)))
    order.sort(key=lambda k: hasattr(sharded.placements[k], "split_factor"))
    for k in order:
        dim = _dimension(sharded.placements[k])
        if dim is None:
            continue
        chunks = full.chunk(sharded.device_mesh.size(k), dim)
        here = coordinate[k]
        # The last processes may hold nothing.
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
        # The full weight, its gradient and the versions of both, as they were gathered.
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
        parameter = self._parameter
        weight, grad, versions_before = self._read
        self._read = None
        versions = _versions(weight, weight.grad)
        if versions[0] != versions_before[0]:
            local_values(parameter).copy_(local_shard(weight.detach(), parameter))
        if not self._gradient:
            return
        is_same_gradient = weight.grad is grad and versions[1:] == versions_before[1:]
        if is_same_gradient:
            return
        if weight.grad is None:
            parameter.grad = None
        elif parameter.grad is None:
            local_grad = local_shard(weight.grad, parameter).clone()
            parameter.grad = as_sharded(local_grad, parameter)
        else:
            # In place: others, as an optimizer, may hold this tensor.
            local_values(parameter.grad).copy_(local_shard(weight.grad, parameter))


def _versions(*tensors: Tensor | None) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]


@torch.inference_mode(False)
@torch.no_grad()
def sum_of_shards(local_sum: Tensor, like: Tensor) -> Tensor:
    """Add up what every process summed over its shard of a tensor; to be called in all of them.

    Args:
        local_sum: The sum over this process's shard, without axes.
        like: The tensor; where it is not sharded, the sum is returned as it is.
    """
    if not isinstance(like, DTensor):
        return local_sum
    # Processes that hold the same shard have the same sum.
    placements = [
        Replicate() if _dimension(placement) is None else Partial() for placement in like.placements
    ]
    summed = DTensor.from_local(local_sum, like.device_mesh, placements, run_check=False)
    return summed.full_tensor()
