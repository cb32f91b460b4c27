"""A weight as rows of outputs, whatever its layout, and the part of it that this process holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from lightning_nm.functional.evolution import BlockGrid
from lightning_nm.functional.select import mask_, masked
from lightning_nm.kernels.cpu import evolution

if TYPE_CHECKING:  # for the types only
    from lightning_nm.nn.layer import NMLayer


_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """The name of a module, a parameter or a glob without the wrappers of ``torch.compile``, checkpointing and FSDP.

    A wrapped layer then draws the same random numbers, and globs and saved states match it.
    """
    parts = name.split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def layer_name(module: str, parameter: str) -> str:
    """The public name of a weight: its module's, with the parameter's appended when that is not ``weight``."""
    # A weight of the model itself has no module to be called after.
    if module and parameter == "weight":
        return module
    return parameter_key(module, parameter)


def parameter_key(module: str, parameter: str) -> str:
    """The parameter's key in the state dict."""
    if not module:
        return parameter
    return f"{module}.{parameter}"


def key_of_layer(name: str, parameter: str) -> str:
    """The state-dict key of a weight from its public name."""
    last = name.rpartition(".")[2]
    if last == parameter:
        return name
    return f"{name}.{parameter}"


Layout = Literal["plain", "flat", "transposed", "experts", "experts-transposed"]
"""``"plain"``: forward blocks along dimension 1, dgrad blocks along dimension 0. ``"flat"``: the same after
``flatten(1)`` (the order of some papers' convolutions). ``"transposed"``: the same for the transposed weight.
``"experts"``: ``[experts, out, in]``, each expert's matrix plain. ``"experts-transposed"``: ``[experts, in, out]``,
each expert's matrix transposed."""

ConvLayout = Literal["channels", "flat"]
"""How the blocks of convolutions lie: along `in` for a fixed kernel tap, or along the flattened ``(in, *kernel)``."""


def misfit(axis: str, size: int, block: int, cuts: int = 1) -> str:
    """Why blocks do not fit into each of the equal parts of an axis, and which would; empty if they do.

    Example:
        >>> misfit("in", 30, 4)
        'in 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)'
    """
    if size % (cuts * block) == 0:
        return ""
    divided = f"{size}" if cuts == 1 else f"{size} / {cuts} processes"
    # Larger blocks are rarely wanted: only a width without a divisor up to 16 is told its smallest one.
    fitting = [m for m in range(2, size + 1) if size % (cuts * m) == 0]
    shown = [str(m) for m in fitting if m <= 16] or [str(m) for m in fitting[:1]]
    advice = f" (M = {', '.join(shown)} would fit)" if shown else ""
    return f"{axis} {divided} % {block} != 0{advice}"


def known_shape(tensor: Tensor) -> tuple[int, ...] | None:
    """The shape of a parameter; ``None`` for a lazy one before its first batch, whose shape torch refuses to tell."""
    return None if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def known_size(tensor: Tensor) -> int:
    """The number of entries of a parameter; 0 for a lazy one before its first batch."""
    return 0 if nn.parameter.is_lazy(tensor) else tensor.numel()


# Every function below has one case for each layout, in the order of `Layout`.


def rows_of(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor with dimension 0 as `out` and forward blocks along dimension 1; the rows of experts one after another.

    A view where memory allows one: that of ``"experts-transposed"`` is a copy.
    """
    if layout == "plain":
        return tensor
    if layout == "flat":
        return tensor.flatten(1)
    if layout == "transposed":
        return tensor.t()
    if layout == "experts":
        return tensor.flatten(0, 1)
    return tensor.transpose(1, 2).flatten(0, 1)


def row_sizes(shape: Sequence[int], layout: Layout) -> tuple[int, int]:
    """The first two sizes of :func:`rows_of` a tensor of this shape."""
    if layout == "plain":
        return shape[0], shape[1]
    if layout == "flat":
        return shape[0], math.prod(shape[1:])
    if layout == "transposed":
        return shape[1], shape[0]
    experts, second, third = shape
    if layout == "experts":
        return experts * second, third
    return experts * third, second


def from_rows(rows: Tensor, layout: Layout, shape: Sequence[int]) -> Tensor:
    """Undo :func:`rows_of` for a tensor of this shape, whose dimension 0 may be cut."""
    if layout == "plain":
        return rows
    if layout == "flat":
        return rows.unflatten(1, shape[1:])
    if layout == "transposed":
        return rows.t()
    if layout == "experts":
        return rows.unflatten(0, (-1, shape[1]))
    return rows.unflatten(0, (-1, shape[2])).transpose(1, 2)


def locate(index: tuple[Tensor, ...], layout: Layout, shape: Sequence[int]) -> tuple[Tensor, ...]:
    """Turn an index into :func:`rows_of` a tensor of this shape into one of the tensor itself."""
    if layout == "plain":
        return index  # with further dimensions for the taps of a convolution
    row, column = index
    if layout == "flat":
        return row, *torch.unravel_index(column, tuple(shape[1:]))
    if layout == "transposed":
        return column, row
    if layout == "experts":
        rows_of_expert = shape[1]
        return row // rows_of_expert, row % rows_of_expert, column
    rows_of_expert = shape[2]
    return row // rows_of_expert, column, row % rows_of_expert


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


class ShardedWeight:
    """A parameter that ``fully_shard`` or ``parallelize_module`` has sharded.

    :attr:`parameter` is what module and optimizer hold, :attr:`local` its shard in this process. :attr:`weight` is the
    full weight within :meth:`full`, gathered when it is read.

    Args:
        module: The module that owns the parameter, looked up at each use: FSDP replaces it while the module runs.
        name: The parameter's name in the module.
        wrappers: The FSDP modules around it.
    """

    def __init__(self, module: nn.Module, name: str, wrappers: Sequence[nn.Module]) -> None:
        self.module = module
        self.name = name
        self.wrappers = wrappers
        self._gathered: GatheredParameter | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as optimizers hold it, to be read between forward and backward passes alone."""
        reshard(self.wrappers)
        return self._held

    @property
    def weight(self) -> nn.Parameter:
        """The full parameter, a plain tensor, within :meth:`full`; outside of it the sharded one."""
        return self._held if self._gathered is None else self._gathered.weight

    @property
    def local(self) -> Tensor:
        """The local shard, detached: to be written in place."""
        self._write_back()
        return local_values(self.parameter)

    @property
    def local_grad(self) -> Tensor | None:
        """The local shard of the gradient."""
        self._write_back()
        grad = self.parameter.grad
        return None if grad is None else local_values(grad)

    def shard_of(self, full: Tensor) -> Tensor:
        """View of those entries of a weight-shaped tensor whose values are in :attr:`local`."""
        return local_shard(full, self._held)

    @property
    def _held(self) -> nn.Parameter:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    @contextmanager
    def full(self, *, gradient: bool = False) -> Iterator[None]:
        """Within, :attr:`weight` is a plain tensor, and changes of it reach the parameter; nested calls do nothing.

        All processes must enter, and must all read ``weight`` there, or none. ``gradient`` gathers the gradient, too.
        """
        if self._gathered is not None:
            yield
            return
        self._gathered = gathered = GatheredParameter(self.parameter, gradient)
        try:
            yield
            gathered.write_back()
        finally:
            self._gathered = None

    def _write_back(self) -> None:
        """Write changes of the full weight into the shards; the next read gathers again."""
        if self._gathered is not None:
            self._gathered.write_back()


class WeightView:
    """Views of a layer's weight, and of tensors of its shape.

    Blocks lie in different ways in a linear weight, a convolution's, a transposed one and those of experts. As rows,
    dimension 0 is `out` and forward blocks lie along dimension 1.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: NMLayer) -> None:
        self._layer = layer

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight, also while it is sharded."""
        return self._layer.param.shape

    def rows(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor so that dimension 0 is `out` and forward blocks lie along dimension 1."""
        return rows_of(tensor, self._layer.spec.layout)

    def matrix(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor as ``[out, in]``: :meth:`rows`, without the single tap of a 1x1 convolution."""
        return rows_of(tensor, self._layer.spec.layout).flatten(1)

    def matrix_shape(self, weight: Tensor) -> tuple[int, int]:
        """The shape of :meth:`matrix` of the parameter as products get it, also of a shard."""
        shape = self.rows(weight).shape
        return shape[0], shape[1:].numel()

    def forward_of(self, weight: Tensor) -> Tensor:
        """W_F, or the method's training weight, of the weight's shape, from the parameter as products get it."""
        layer = self._layer
        method = layer.spec.method
        if method.has_training_weight and layer.spec.module.training:
            return method.training_weight(layer, weight)
        return method.forward_weight(layer, weight)

    def backward_of(self, weight: Tensor) -> Tensor:
        """W_B, or the method's training weight, of the weight's shape, from the parameter as products get it."""
        layer = self._layer
        method = layer.spec.method
        if method.has_training_weight and layer.spec.module.training:
            return method.training_weight(layer, weight)
        return method.backward_weight(layer, weight)

    def unrows(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`rows`."""
        return from_rows(tensor, self._layer.spec.layout, self.shape)

    def locate(self, index: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Turn an index into :meth:`rows` of a weight-shaped tensor into one of the tensor itself, to write through."""
        return locate(index, self._layer.spec.layout, self.shape)

    @torch.no_grad()
    def by_rows(self, mask_of: Callable[[Tensor], Tensor]) -> Tensor:
        """A bool mask of the weight's shape, each row of which ``mask_of`` makes of the same row of the weight alone.

        ``mask_of`` gets and returns what :meth:`rows` views. Where processes shard the weight by rows, each masks its
        own, and they gather the mask instead of the weight.
        """
        layer = self._layer
        dimension_of_rows = 1 if layer.spec.layout == "transposed" else 0
        if not self.is_sharded or not sharded_dimensions(layer.param) <= {dimension_of_rows}:
            return self.unrows(mask_of(self.rows(layer.weight.detach())))
        local_mask = self.unrows(mask_of(self.rows(self.local)))
        # Collectives know no bool.
        local_bytes = local_mask.to(torch.uint8).contiguous()
        return gather(as_sharded(local_bytes, layer.param)).ne(0)

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold the weight together."""
        return self._layer.shards is not None

    @property
    def local(self) -> Tensor:
        """The values of the weight that this process holds, detached: to be written in place."""
        shards = self._layer.shards
        return self._layer.param.detach() if shards is None else shards.local

    @property
    def local_grad(self) -> Tensor | None:
        """The part of its gradient that this process holds."""
        shards = self._layer.shards
        return self._layer.param.grad if shards is None else shards.local_grad

    def shard_of(self, full: Tensor) -> Tensor:
        """A view of those entries of a weight-shaped tensor whose values are in :attr:`local`."""
        shards = self._layer.shards
        return full if shards is None else shards.shard_of(full)

    def grid(self, weight: Tensor) -> BlockGrid | None:
        """Where the blocks of a row-major weight lie in memory; ``None`` where that cannot be said."""
        layer = self._layer
        # [experts, in, out] is numbered as the weight of a convolution whose taps are the outputs of an expert.
        rows = weight if layer.spec.layout == "experts-transposed" else self.rows(weight)
        return BlockGrid.of(rows, layer.pattern.m)

    @torch.no_grad()
    def zero_pruned(self, local: Tensor) -> None:
        """Set the entries of a tensor like :attr:`local` that the forward mask prunes to +0.0, in place."""
        masks = self._layer.masks
        mask = masks.forward_view
        assert mask is not None
        assert masks.bits is not None
        if self.is_sharded or not evolution.mask_(local, masks.bits):
            mask_(local, self.shard_of(mask))

    @torch.no_grad()
    def local_forward_weight(self) -> Tensor:
        """The local shard of W_F, detached; gathers the weight only if the method computes W_F from all of it."""
        layer = self._layer
        if layer.shards is None or not layer.spec.method.selects_entries:
            return self.shard_of(layer.forward_weight())
        mask = layer.masks.forward_view
        if mask is None:
            return self.local
        return masked(self.local, self.shard_of(mask))
