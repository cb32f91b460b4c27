r"""A weight of which kept entries alone are stored: once its mask stands still, or while its method moves both.

The parameter that module and optimizer hold is then ``values [out, columns / M, N]``: the entries that each block
keeps, in the order of their positions. Its gradient and the optimizer's state have this shape, too. Blocks are numbered
as by :func:`~lightning_nm.functional.evolution.as_blocks`; a convolution's columns are its taps times its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lightning_nm.functional.evolution import as_blocks, from_blocks
from lightning_nm.functional.mask_storage import FORWARD_BIT
from lightning_nm.functional.nm_format import MAX_M
from lightning_nm.kernels.cpu import packed as one_pass
from lightning_nm.nn.layer.factors import GradientFactors
from lightning_nm.nn.layer.masks import LayerMasks

if TYPE_CHECKING:  # for the types only: a layer holds its storage
    from lightning_nm.nn.layer.layer import NMLayer


class PackedStorage:
    """The kept entries of one weight, and where they lie.

    Args:
        layer: A layer with a forward mask, for which :func:`unpackable` has no reason.

    Attributes:
        positions: The place of each kept entry in its block, ascending, uint8 ``[out, columns / M, N]``.
        shape: The shape of the dense weight.
        rows_shape: The shape of the dense weight as :meth:`~lightning_nm.nn.layer.view.WeightView.rows`.
        dense_parameter: The parameter that held the dense weight; it is without values until :meth:`unpack`.
        parameter: The parameter with the kept entries.
        factors: The dense gradient of this window, where the method asks for one though the mask is packed.
        undo: Gives module and optimizers the dense parameter back, or ``None`` if that cannot be done in a training.
    """

    @torch.no_grad()
    def __init__(self, layer: NMLayer) -> None:
        self._layer = layer
        dense = layer.param
        mask = layer.masks.forward
        assert mask is not None
        self.shape = dense.shape
        self._stride = dense.stride()
        self.rows_shape = layer.view.rows(dense.detach()).shape
        self.undo: Callable[[], object] | None = None
        self._weight: nn.Parameter | None = None  # the dense weight within full()
        blocks_bm = as_blocks(layer.view.rows(mask), layer.pattern.m)
        # In each block the kept entries come first, in their own order.
        order = blocks_bm.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        kept = order[:, : layer.pattern.n].to(torch.uint8)
        out = self.rows_shape[0]
        self.positions = kept.reshape(out, -1, layer.pattern.n).contiguous()
        values = self.pack(dense.detach())
        self.parameter = nn.Parameter(values, requires_grad=dense.requires_grad)
        self.dense_parameter = dense
        width = self.rows_shape[1:].numel()
        self.factors = GradientFactors(layer.name, out, width)

    @torch.no_grad()
    def pack(self, full: Tensor) -> Tensor:
        """The entries of a weight-shaped tensor that the mask keeps, ``[out, columns / M, N]``; a new tensor."""
        m = self._layer.pattern.m
        blocks_bm = as_blocks(self._layer.view.rows(full), m)
        packed = one_pass.collect(blocks_bm, self.positions)
        if packed is None:
            positions_bn = self.positions.flatten(0, 1).long()
            packed = blocks_bm.gather(1, positions_bn).view(self.positions.shape)
        return packed

    @torch.no_grad()
    def unpack(self, values: Tensor) -> Tensor:
        """The weight-shaped tensor with these values at kept entries and +0.0 elsewhere; a new tensor.

        Its strides are those of the dense weight, on which the results of torch's products depend in the last bit.
        """
        full = self.unpack_by_rows(values)
        if full.stride() != self._stride:
            full = torch.empty_strided(
                self.shape, self._stride, dtype=full.dtype, device=full.device
            ).copy_(full)
        return full

    @torch.no_grad()
    def unpack_by_rows(self, values: Tensor) -> Tensor:
        """:meth:`unpack`, with the rows one after another in memory: in the order of the kept entries."""
        blocks_bm = _spread(values, self.positions, self._layer.pattern.m)
        return self._layer.view.unrows(from_blocks(blocks_bm, self.rows_shape))

    @torch.no_grad()
    def unpack_rows(self, values: Tensor, begin: int, end: int) -> Tensor:
        """Rows ``begin:end`` of :meth:`unpack` of a weight without taps, ``[end - begin, in]``."""
        values_of_rows = values[begin:end]
        positions = self.positions[begin:end]
        blocks_bm = _spread(values_of_rows, positions, self._layer.pattern.m)
        return blocks_bm.view(end - begin, -1)

    @torch.no_grad()
    def bits_of_rows(self, begin: int, end: int) -> Tensor:
        """Rows ``begin:end`` of the mask of a weight without taps, 1 for kept entries, uint8 ``[end - begin, in]``."""
        return self.unpack_rows(torch.full_like(self.positions, FORWARD_BIT), begin, end)

    @torch.no_grad()
    def exchange(
        self,
        blocks: Tensor,
        pruned: Tensor,
        regrown: Tensor,
        tensors: Sequence[tuple[Tensor, Tensor | float]],
    ) -> None:
        """In each of some blocks, let a pruned entry take the place of a kept one; the order stays ascending.

        Args:
            blocks: The numbers of the blocks, int64 ``[K]``, each once.
            pruned: The kept entry of each block that is pruned, int64 ``[K]``.
            regrown: The pruned entry that is kept instead, int64 ``[K]``.
            tensors: Tensors of the shape of the parameter, as itself and its state, and what the regrown entries of
                each are set to, ``[K]`` or a number.
        """
        n = self.positions.shape[-1]
        positions_bn = self.positions.view(-1, n)
        kept_kn = positions_bn[blocks].long()
        slot_k1 = (kept_kn == pruned.unsqueeze(1)).to(torch.uint8).argmax(1, keepdim=True)
        kept_kn.scatter_(1, slot_k1, regrown.unsqueeze(1))
        kept_kn, order_kn = kept_kn.sort(1)
        positions_bn[blocks] = kept_kn.to(torch.uint8)
        for tensor, start in tensors:
            values_bn = tensor.detach().view(-1, n)
            values_kn = values_bn[blocks]
            start_k = torch.as_tensor(start, dtype=tensor.dtype, device=tensor.device)
            values_kn.scatter_(1, slot_k1, start_k.expand(len(blocks)).unsqueeze(1))
            values_bn[blocks] = values_kn.gather(1, order_kn)

    def dense(self) -> Tensor:
        """The dense weight, W and W_F in one; a new tensor."""
        return self.unpack(self.parameter.detach())

    @property
    def weight(self) -> nn.Parameter:
        """The dense weight within :meth:`full`; outside of it a new one, whose changes are lost."""
        if self._weight is not None:
            return self._weight
        return nn.Parameter(self.dense(), requires_grad=False)

    @contextmanager
    def full(self) -> Iterator[None]:
        """Within, :attr:`weight` is the dense weight, made when it is read; changes of kept entries reach the values.

        Nested calls do nothing.
        """
        if self._weight is not None:
            yield
            return
        self._weight = weight = nn.Parameter(self.dense(), requires_grad=False)
        before = weight._version
        try:
            yield
            if weight._version != before:
                with torch.no_grad():
                    self.parameter.copy_(self.pack(weight))
        finally:
            self._weight = None

    @torch.no_grad()
    def restore(self) -> nn.Parameter:
        """Give the dense parameter its values back, and return it."""
        self.dense_parameter.data = self.dense()
        return self.dense_parameter

    def to(self, device: torch.device) -> None:
        """Move the positions to a device; the values are the module's."""
        self.positions = self.positions.to(device)


def _spread(values: Tensor, positions: Tensor, m: int) -> Tensor:
    """Blocks ``[blocks, M]`` with values ``[..., N]`` at these positions and +0.0 elsewhere; a new tensor."""
    blocks_bm = one_pass.spread(values, positions, m)
    if blocks_bm is None:
        positions_bn = positions.reshape(-1, positions.shape[-1]).long()
        blocks_bm = values.new_zeros(len(positions_bn), m)
        blocks_bm.scatter_(1, positions_bn, values.reshape(positions_bn.shape))
    return blocks_bm


class PackedMasks(LayerMasks):
    """The forward mask of a packed weight: its bits are made of the positions when they are read.

    It moves by :meth:`PackedStorage.exchange` alone, with the values.

    Args:
        masks: The masks so far, for their counts.
        storage: Has the positions.
    """

    def __init__(self, masks: LayerMasks, storage: PackedStorage) -> None:
        self._storage = storage
        super().__init__()
        self.has_forward = True
        self.total_flips = masks.total_flips
        self.flips = None if masks.flips is None else torch.zeros_like(masks.flips)

    @property
    def bits(self) -> Tensor:
        """uint8, of the weight's shape; a new tensor."""
        positions = self._storage.positions
        return self._storage.unpack_by_rows(torch.full_like(positions, FORWARD_BIT))

    @bits.setter
    def bits(self, bits: Tensor | None) -> None:
        if bits is not None:
            raise RuntimeError("the mask of a packed weight does not move by itself")

    @property
    def state(self) -> Hashable:
        """As of other masks; the bits are not read for it."""
        return self.generation

    def tensors(self) -> list[Tensor]:
        """The positions."""
        return [self._storage.positions]

    def set(
        self, forward: Tensor | None, backward: Tensor | None, like: Tensor | None = None
    ) -> None:
        """Refuse to move, by a ``RuntimeError``."""
        raise RuntimeError("the mask of a packed weight does not move by itself")

    def to(self, device: torch.device) -> None:
        """Move every tensor to a device."""
        self._storage.to(device)
        for name in ("flips", "total_flips"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != device:
                setattr(self, name, tensor.to(device))


def pack_layer(layer: NMLayer) -> PackedStorage:
    """Store the kept entries of a layer alone from now on; its module then holds another parameter."""
    storage = PackedStorage(layer)
    layer.storage = storage
    layer.masks = PackedMasks(layer.masks, storage)
    layer.spec.module._parameters[layer.spec.parameter] = storage.parameter
    return storage


def unpack_layer(layer: NMLayer) -> None:
    """Undo :func:`pack_layer`: the module holds the parameter of before again, with the values of now."""
    storage = layer.storage
    assert storage is not None
    dense = storage.restore()
    packed = layer.masks
    masks = LayerMasks()
    masks.set(packed.forward, None, dense)
    flips = 0 if packed.flips is None else int(packed.flips)
    total_flips = 0 if packed.total_flips is None else int(packed.total_flips)
    masks.load(flips, total_flips, packed.backward_density, dense.device)
    layer.spec.module._parameters[layer.spec.parameter] = dense
    layer.storage = None
    layer.masks = masks


@torch.no_grad()
def unpackable(layer: NMLayer) -> str:
    """Why the kept entries of a layer cannot be stored alone now; empty if they can."""
    spec = layer.spec
    if layer.view.is_sharded:
        return "processes hold its weight in shards"
    if spec.tied:
        return "modules share its weight"
    if spec.layout.startswith("experts"):
        return "its weight is that of several experts"
    if getattr(type(spec.module), "role", "") == "embedding":
        return "it is looked up by rows"
    if layer.progress.has_more_stages:
        return "its schedule has further stages"
    if not spec.method.rests:
        return "its method is not known to come to rest"
    if not spec.method.is_at_rest(layer) and not spec.method.moves_packed(layer):
        return "its mask may still move"
    if layer.masks.has_backward or layer.parameters:
        return "its method keeps more than one mask"
    if layer.pattern.m > MAX_M:
        return f"its blocks are longer than {MAX_M}"
    mask = layer.masks.forward
    if mask is None:
        return spec.forward_reason or "it has no mask"
    blocks_bm = as_blocks(layer.view.rows(mask), layer.pattern.m)
    if not bool((blocks_bm.sum(1) == layer.pattern.n).all()):
        return f"some of its blocks keep fewer than {layer.pattern.n} entries"
    return ""
