"""What data parallelism sends of the gradients: of a masked weight the kept entries alone, if no others are needed."""

# No `annotations` from the future: DistributedDataParallel reads those of a hook and wants types, not strings.

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nm.functional.evolution import as_blocks, from_blocks
from lightning_nm.nn.layer import NMLayer


class GradientWire:
    """The state of :func:`kept_entries_hook`: which weights are masked, and how many bytes were sent.

    Args:
        dtype: What gradients are sent as; ``None`` sends them as they are.
        group: The processes that train one model together; all by default.

    Example::

        wire = GradientWire()
        parallel = DistributedDataParallel(model)
        parallel.register_comm_hook(wire, kept_entries_hook)
        wire.add(sparsifier.layers.values())
    """

    def __init__(self, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.dtype = dtype
        self.group = group
        self.sent = 0
        """Bytes of gradients sent since :meth:`settle`."""
        self.dense = 0
        """Bytes that the same gradients have."""
        self.ratio: float | None = None
        """The one over the other, of the last step."""
        self._layers: dict[int, NMLayer] = {}
        self._entries: dict[int, tuple[Tensor, int, Tensor]] = {}

    def add(self, layers: Iterable[NMLayer]) -> None:
        """Send of these layers' weights what their methods need."""
        self._layers.update((id(layer.param), layer) for layer in layers)

    def remove(self, layers: Iterable[NMLayer]) -> None:
        """Send these layers' gradients whole again."""
        gone = {id(layer) for layer in layers}
        self._layers = {key: layer for key, layer in self._layers.items() if id(layer) not in gone}
        self._entries = {key: entries for key, entries in self._entries.items() if key in self._layers}

    def settle(self) -> float | None:
        """End a step: its :attr:`ratio`, and 0 bytes from here on."""
        if self.dense:
            self.ratio = self.sent / self.dense
        self.sent = self.dense = 0
        return self.ratio

    def sparse(self, parameter: Tensor) -> NMLayer | None:
        """The layer whose weight this is, if its kept entries are all that is needed of its gradient now."""
        layer = self._layers.get(id(parameter))
        if layer is None or layer.param is not parameter:
            return None
        return None if layer.forward_mask_view is None or layer.method.gradient_at_pruned(layer) else layer

    def entries(self, layer: NMLayer) -> Tensor:
        """Where the kept entries of each block lie, ``[blocks, N]``, kept until the masks move: N / M bytes a weight.

        A block that keeps fewer is filled up with the first pruned ones, so that no size depends on a value.
        """
        marks = layer.masks.bits
        assert marks is not None
        key = id(layer.param)
        known = self._entries.get(key)
        if known is None or known[0] is not marks or known[1] != marks._version:
            known = self._entries[key] = (marks, marks._version, kept_entries(layer))
        return known[2]


def kept_entries(layer: NMLayer) -> Tensor:
    """Positions of the kept entries within each block, uint8 or int16 ``[blocks, N]``, kept ones first."""
    kept, (n, m) = layer.forward_mask_view, (layer.pattern.n, layer.pattern.m)
    assert kept is not None
    blocks = as_blocks(layer.rows(kept), m)
    # All keys of a block differ, so the order is the same in every process.
    place = torch.arange(2 * m, m, -1, dtype=torch.int16, device=blocks.device)
    chosen = torch.where(blocks, place, place - m).topk(n, dim=1, sorted=True).indices
    return chosen.to(torch.uint8 if m <= 256 else torch.int16)


def kept_entries_hook(
    wire: GradientWire,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """A communication hook of DistributedDataParallel: averages a bucket, of masked weights the kept entries alone.

    What is not sent becomes exactly 0. The parameters tell whose gradients a bucket holds: buckets are made anew after
    the first step. Under accumulation a bucket holds the sum of all micro-batches. Sizes depend on N:M and on what
    :func:`~lightning_nm.distributed.consistency.checksum` compares, so processes that agree there send equally much.

    Args:
        wire: Which weights are masked.
        bucket: What DistributedDataParallel hands over.

    Returns:
        The future of ``bucket.buffer()`` with the averages.
    """
    buffer, parameters = bucket.buffer(), bucket.parameters()
    layers = [wire.sparse(parameter) for parameter in parameters]
    whole = not any(layers)
    grads = [] if whole else [_as_stored(*pair) for pair in zip(bucket.gradients(), parameters, strict=True)]
    if whole:
        message = buffer
    else:
        message = torch.cat([_sent(grad, layer, wire) for grad, layer in zip(grads, layers, strict=True)])
    message = message.div_(dist.get_world_size(wire.group)).to(wire.dtype or message.dtype)
    wire.sent += message.numel() * message.element_size()
    wire.dense += buffer.numel() * buffer.element_size()
    # On a GPU the rest runs on another stream: it may use only what outlives it, as what the wire and the bucket hold.
    entries = [None if layer is None else wire.entries(layer) for layer in layers]

    def spread(future: torch.futures.Future[Any]) -> Tensor:
        mean: Tensor = future.value()[0]
        if whole:
            return buffer if mean is buffer else buffer.copy_(mean)
        parts = mean.split([grad.numel() if e is None else e.numel() for grad, e in zip(grads, entries, strict=True)])
        for grad, layer, places, part in zip(grads, layers, entries, parts, strict=True):
            if layer is None or places is None:
                grad.copy_(part.view(grad.shape))
            else:
                grad.copy_(_received(part.to(grad.dtype), layer, places))
        return buffer

    return dist.all_reduce(message, group=wire.group, async_op=True).get_future().then(spread)


def _as_stored(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the order of its parameter's memory, as it lies in the bucket, which says row-major of all."""
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return grad.as_strided(parameter.shape, parameter.stride()) if dense else grad


def _sent(grad: Tensor, layer: NMLayer | None, wire: GradientWire) -> Tensor:
    """What is sent of a gradient, one-dimensional."""
    if layer is None:
        return grad.reshape(-1)
    kept, places, m = layer.forward_mask_view, wire.entries(layer).long(), layer.pattern.m
    assert kept is not None
    values = as_blocks(layer.rows(grad), m).gather(1, places)
    return torch.where(as_blocks(layer.rows(kept), m).gather(1, places), values, 0).flatten()


def _received(values: Tensor, layer: NMLayer, places: Tensor) -> Tensor:
    """The gradient, of the weight's shape, whose entries at these places were received."""
    blocks = values.new_zeros(len(places), layer.pattern.m).scatter_(1, places.long(), values.view(places.shape))
    return layer.unrows(from_blocks(blocks, layer.rows(layer.param).shape))
