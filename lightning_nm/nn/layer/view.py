"""A weight as rows of outputs, whatever its layout, and the part of it that this process holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_nm.functional.select import mask_, masked
from lightning_nm.kernels.blocks import BlockGrid
from lightning_nm.kernels.cpu import evolution
from lightning_nm.nn.layer.layout import from_rows, locate, rows_of
from lightning_nm.nn.layer.sharding import as_sharded, gather, sharded_dimensions

if TYPE_CHECKING:  # for the types only: a layer makes its view
    from lightning_nm.nn.layer.layer import NMLayer


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
