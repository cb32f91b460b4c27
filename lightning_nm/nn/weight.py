"""A weight viewed as ``[out, in]`` rows, whatever its layout, and this process's shard of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from lightning_nm.functional.evolution import BlockGrid

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


class Layout(str, Enum):
    """How the blocks of a weight lie, by the text that saved states, packed files and messages show.

    As *rows*, dimension 0 is `out` and forward blocks lie along dimension 1; the rows of experts follow one another.

    Example:
        >>> Layout("experts-transposed").row_sizes((4, 8, 16))
        (64, 8)
    """

    # Forward blocks along dimension 1, dgrad blocks along dimension 0.
    PLAIN = "plain"
    # The same after flatten(1): the order of some papers' convolutions.
    FLAT = "flat"
    # [in, out]
    TRANSPOSED = "transposed"
    # [experts, out, in], each expert's matrix plain.
    EXPERTS = "experts"
    # [experts, in, out], each expert's matrix transposed.
    EXPERTS_TRANSPOSED = "experts-transposed"

    def __init__(self, text: str) -> None:
        self.is_transposed = text.endswith("transposed")
        self.has_experts = text.startswith("experts")

    def __str__(self) -> str:
        return str(self.value)

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor; a view where memory allows one: of ``"experts-transposed"`` a copy."""
        if self.is_transposed:
            tensor = tensor.transpose(-2, -1)
        if self.has_experts:
            return tensor.flatten(0, 1)
        return tensor.flatten(1) if self is Layout.FLAT else tensor

    def row_sizes(self, shape: Sequence[int]) -> tuple[int, int]:
        """The first two sizes of the :meth:`rows` of a tensor of this shape."""
        # A meta tensor has a shape and no memory: rows() itself tells the sizes.
        out, inputs, *_ = self.rows(torch.empty(shape, dtype=torch.float32, device="meta")).shape
        return out, inputs

    def from_rows(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """Undo :meth:`rows` for a tensor of this shape, whose dimension 0 may be cut."""
        if self is Layout.FLAT:
            return rows.unflatten(1, shape[1:])
        if self.has_experts:
            # The outputs of an expert are the second size of [experts, out, in] and the third of [experts, in, out].
            rows = rows.unflatten(0, (-1, shape[2 if self.is_transposed else 1]))
        return rows.transpose(-2, -1) if self.is_transposed else rows


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes hold this tensor together, as ``fully_shard`` and ``parallelize_module`` leave parameters."""
    return isinstance(tensor, DTensor)


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
    # FSDP's placement is then torch's _StridedShard, which alone has a split_factor: the stable sort puts it last.
    order.sort(key=lambda k: hasattr(sharded.placements[k], "split_factor"))
    for k in order:
        dim = _dimension(sharded.placements[k])
        if dim is None:
            continue
        # DTensor cuts as chunk() does: into equal parts, of which the last may be shorter or missing.
        chunks = full.chunk(sharded.device_mesh.size(k), dim)
        here = coordinate[k]
        # The last processes may hold nothing.
        full = chunks[here] if here < len(chunks) else full.narrow(dim, 0, 0)
    return full


def as_sharded(local: Tensor, like: Tensor) -> Tensor:
    """The local shards of all processes as one tensor, sharded as another one; a plain tensor is not sharded."""
    if not isinstance(like, DTensor):
        return local
    # Shards may be of unequal sizes: without the shape and the stride of the whole, from_local() would take all others
    # to be as large as this one. Its check would be a collective.
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


@torch.inference_mode(False)
@torch.no_grad()
def sum_of_shards(local_sum: Tensor, like: Tensor) -> Tensor:
    """Add up what every process summed over its shard of a tensor; to be called in all of them.

    Args:
        local_sum: The sum over this process's shard, or several sums.
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


class PlainWeight:
    """A weight that this process holds whole.

    Views of it, and of tensors of its shape, as rows of outputs: see :class:`Layout`.

    Args:
        module: The module that owns the parameter, looked up at each use: FSDP replaces it while the module runs.
        name: The parameter's name in the module.
        layout: How its blocks lie.
    """

    is_sharded: ClassVar[bool] = False
    """Whether processes hold the weight together."""
    wrappers: Sequence[nn.Module] = ()
    """The FSDP modules around it."""

    def __init__(self, module: nn.Module, name: str, layout: Layout) -> None:
        self.module = module
        self.name = name
        self.layout = layout

    @property
    def param(self) -> nn.Parameter:
        """The parameter as the module holds it now, for its identity: its values may be sharded."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    # The same property by the names under which a sharded weight distinguishes its forms.

    optimizer_param = param
    """The parameter as optimizers hold it, to be read between forward and backward passes alone."""
    weight = param
    """The parameter; within :meth:`full` a plain tensor, even if it is sharded."""

    def full(self, *, gradient: bool = False) -> AbstractContextManager[None]:
        """Within, :attr:`weight` is the full weight, and changes of it reach the parameter; nested calls do nothing.

        All processes must enter, and must all read ``weight`` there, or none. ``gradient`` gathers the gradient, too.
        """
        return nullcontext()

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight, also while it is sharded."""
        return self.param.shape

    @property
    def memory_order(self) -> Tensor | None:
        """A tensor in whose memory order the mask bits lie; ``None`` for row-major bits."""
        # A convolution's weight may be channels last: passes that walk weight and bits together need bits in its order.
        return self.param

    def rows(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor so that dimension 0 is `out` and forward blocks lie along dimension 1."""
        return self.layout.rows(tensor)

    def matrix(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor as ``[out, in]``: :meth:`rows`, without the single tap of a 1x1 convolution."""
        rows = tensor if self.layout is Layout.PLAIN else self.layout.rows(tensor)
        return rows.flatten(1)

    def matrix_shape(self, weight: Tensor) -> tuple[int, int]:
        """The shape of :meth:`matrix` of the parameter as GEMMs get it, also of a shard."""
        rows = weight if self.layout is Layout.PLAIN else self.layout.rows(weight)
        return len(rows), rows.shape[1:].numel()

    def unrows(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`rows`."""
        return self.layout.from_rows(tensor, self.shape)

    def blocks(self, m: int) -> BlockGrid:
        """Where the blocks lie in a row-major tensor of the weight's shape."""
        weight = torch.empty(self.shape, dtype=torch.float32, device="meta")
        # [experts, in, out] is numbered as the weight of a convolution whose taps are the outputs of an expert.
        if self.layout is not Layout.EXPERTS_TRANSPOSED:
            weight = self.rows(weight)
        return BlockGrid.of(weight, m)

    @torch.no_grad()
    def by_rows(self, mask_of: Callable[[Tensor], Tensor]) -> Tensor:
        """A bool mask of the weight's shape, computed row by row: ``mask_of`` reads the same row of the weight alone.

        ``mask_of`` gets and returns what :meth:`rows` views. Where processes shard the weight by rows, each masks its
        own, and they gather the mask instead of the weight.
        """
        return self.unrows(mask_of(self.rows(self.weight.detach())))

    @property
    def local(self) -> Tensor:
        """The values of the weight that this process holds, detached: to be written in place."""
        return self.param.detach()

    @property
    def local_grad(self) -> Tensor | None:
        """The part of its gradient that this process holds."""
        return self.param.grad

    def shard_of(self, full: Tensor) -> Tensor:
        """A view of those entries of a weight-shaped tensor whose values are in :attr:`local`."""
        return full


class ShardedWeight(PlainWeight):
    """A weight that ``fully_shard`` or ``parallelize_module`` has sharded.

    Within :meth:`full` it is gathered when :attr:`weight` is first read, and what changed is written back.

    Args:
        module: As of a plain weight.
        name: As of a plain weight.
        layout: As of a plain weight.
        wrappers: The FSDP modules around it.
    """

    is_sharded = True

    def __init__(
        self, module: nn.Module, name: str, layout: Layout, wrappers: Sequence[nn.Module]
    ) -> None:
        super().__init__(module, name, layout)
        self.wrappers = wrappers
        self._in_full = False
        self._with_gradient = False
        # The full weight, its gradient and the versions of both, as they were gathered.
        self._gathered: tuple[nn.Parameter, Tensor | None, list[int]] | None = None

    @property
    def optimizer_param(self) -> nn.Parameter:
        """The sharded parameter, also where FSDP has left the full one in the module."""
        reshard(self.wrappers)
        return self.param

    @property
    def weight(self) -> nn.Parameter:
        """The full parameter, a plain tensor, within :meth:`full`; outside of it the sharded one."""
        if not self._in_full:
            return self.param
        if self._gathered is None:
            with torch.inference_mode(False):
                # Out of inference mode, so that it has the version counter by which _write_back() sees changes.
                weight = nn.Parameter(gather(self.param), self.param.requires_grad)
                grad = self.param.grad if self._with_gradient else None
                weight.grad = None if grad is None else gather(grad)
            self._gathered = weight, weight.grad, _versions(weight, weight.grad)
        return self._gathered[0]

    @property
    def memory_order(self) -> None:
        """The mask bits of the whole weight are row-major."""

    @contextmanager
    def full(self, *, gradient: bool = False) -> Iterator[None]:
        """Within, :attr:`weight` is a plain tensor, see :meth:`PlainWeight.full`."""
        if self._in_full:
            yield
            return
        reshard(self.wrappers)
        self._in_full = True
        self._with_gradient = gradient
        try:
            yield
            # Not after an exception, which leaves the parameter as it was.
            self._write_back()
        finally:
            self._in_full = False
            self._gathered = None

    @torch.no_grad()
    def _write_back(self) -> None:
        """Write changes of the full weight into the local shard; the next read gathers again."""
        if self._gathered is None:
            return
        parameter = self.param
        weight, grad, versions_before = self._gathered
        self._gathered = None
        versions = _versions(weight, weight.grad)
        if versions[0] != versions_before[0]:
            # Every process has made the same change to its copy of the whole, so nothing has to be sent.
            local_values(parameter).copy_(local_shard(weight.detach(), parameter))
        is_same_gradient = weight.grad is grad and versions[1:] == versions_before[1:]
        if not self._with_gradient or is_same_gradient:
            return
        if weight.grad is None:
            parameter.grad = None
        elif parameter.grad is None:
            # A clone, because the shard is a view and would keep the memory of the whole gradient.
            local_grad = local_shard(weight.grad, parameter).clone()
            parameter.grad = as_sharded(local_grad, parameter)
        else:
            # In place: others, as an optimizer, may hold this tensor.
            local_values(parameter.grad).copy_(local_shard(weight.grad, parameter))

    @torch.no_grad()
    def by_rows(self, mask_of: Callable[[Tensor], Tensor]) -> Tensor:
        """A mask that each process makes of its own rows, see :meth:`PlainWeight.by_rows`."""
        parameter: Any = self.param
        dimension_of_rows = 1 if self.layout is Layout.TRANSPOSED else 0
        cut = {_dimension(placement) for placement in parameter.placements}
        # Blocks lie within rows: a process that has whole rows has whole blocks.
        if not cut <= {dimension_of_rows, None}:
            return super().by_rows(mask_of)
        local_mask = self.unrows(mask_of(self.rows(self.local)))
        # Collectives know no bool.
        local_bytes = local_mask.to(torch.uint8).contiguous()
        return gather(as_sharded(local_bytes, parameter)).ne(0)

    @property
    def local(self) -> Tensor:
        """The local shard, detached: to be written in place."""
        # Within full() the whole weight may have changes that the shard lacks.
        self._write_back()
        return local_values(self.optimizer_param)

    @property
    def local_grad(self) -> Tensor | None:
        """The local shard of the gradient."""
        self._write_back()
        grad = self.optimizer_param.grad
        return None if grad is None else local_values(grad)

    def shard_of(self, full: Tensor) -> Tensor:
        """A view of this process's shard of a weight-shaped tensor."""
        return local_shard(full, self.param)


def _versions(*tensors: Tensor | None) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]
