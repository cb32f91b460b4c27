"""A communication hook of DDP that sends only the gradients at kept entries of masked weights, where that is enough."""

# No `annotations` from the future: DistributedDataParallel reads those of a hook and wants types, not strings.

from collections.abc import Hashable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_nm.nn.layer import NMLayer, blocks_of, from_blocks_of


class CommHookState:
    """The state of :func:`kept_entries_hook`: the masked layers, and the number of bytes sent.

    Args:
        dtype: The dtype in which gradients are sent; their own by default.

    Example::

        state = CommHookState()
        parallel = DistributedDataParallel(model)
        parallel.register_comm_hook(state, kept_entries_hook)
        state.add(sparsifier.layers.values())
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.sent = 0
        """Bytes of gradients sent since :meth:`end_step`."""
        self.dense = 0
        """Bytes that the same gradients have."""
        self.ratio: float | None = None
        """Sent bytes over dense bytes in the last step."""
        # By the id of the weight, as buckets have it: `==` of tensors compares their entries.
        self._layers: dict[int, NMLayer] = {}
        # Weak: the state belongs to the strategy, and outlives the layers of a fit.
        self._entries: WeakKeyDictionary[NMLayer, tuple[Hashable, Tensor]] = WeakKeyDictionary()

    def add(self, layers: Iterable[NMLayer]) -> None:
        """Send only the kept entries of these layers' gradients where their methods need no others."""
        self._layers.update((id(layer.param), layer) for layer in layers)

    def remove(self, layers: Iterable[NMLayer]) -> None:
        """Send full gradients of these layers again."""
        removed = set(layers)
        self._layers = {key: layer for key, layer in self._layers.items() if layer not in removed}

    def end_step(self) -> float | None:
        """End a step: reset the bytes and return their :attr:`ratio`."""
        if self.dense:
            self.ratio = self.sent / self.dense
        self.sent = 0
        self.dense = 0
        return self.ratio

    def sparse(self, parameter: Tensor) -> NMLayer | None:
        """Return the layer of a weight if only the kept entries of its gradient are needed now."""
        layer = self._layers.get(id(parameter))
        # The module may hold another parameter by now, and a new tensor may have the id of an old one.
        if layer is None or layer.param is not parameter:
            return None
        method = layer.spec.method
        is_sparse = (
            # Without a mask every entry is kept, and some methods read the gradient of pruned entries, too.
            layer.masks.has_forward
            and not method.gradient_at_pruned(layer)
            # Without an N the size of a message would depend on the masks.
            and method.current_pattern(layer) is not None
        )
        return layer if is_sparse else None

    def entries(self, layer: NMLayer) -> Tensor:
        """Return :func:`kept_entries` of a layer, cached until its masks change."""
        state = (layer.masks.cache_key, layer.spec.method.current_pattern(layer))
        if layer not in self._entries or self._entries[layer][0] != state:
            self._entries[layer] = state, kept_entries(layer)
        return self._entries[layer][1]


def kept_entries(layer: NMLayer) -> Tensor:
    """Return the positions of the kept entries within each block, uint8 or int16 ``[blocks, N]``.

    Blocks that keep fewer entries are filled up with the first pruned ones, so that sizes do not depend on values.
    """
    kept = layer.masks.forward_view
    assert kept is not None
    pattern = layer.spec.method.current_pattern(layer)
    assert pattern is not None  # CommHookState.sparse() leaves such layers out
    m = pattern.m
    blocks = blocks_of(layer, kept)
    # No two keys of a block are equal, so the order is the same in every process.
    # Keys of kept entries go from 2M down to M + 1, those of pruned ones from M down to 1: kept ones come first.
    place = torch.arange(2 * m, m, -1, dtype=torch.int16, device=blocks.device)
    chosen = torch.where(blocks, place, place - m).topk(pattern.n, dim=1, sorted=True).indices
    return chosen.to(torch.uint8 if m <= 256 else torch.int16)  # positions are 0 to M - 1


def kept_entries_hook(
    state: CommHookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients; of masked weights only the kept entries are sent, and the others become 0.

    Under accumulation a bucket holds the sum of all micro-batches. The size of the message depends on N:M and on what
    :func:`~lightning_nm.training.ranks.checksum` compares, so it is the same in all consistent
    processes. The result is the future of ``bucket.buffer()`` with the averages.
    """
    # Buckets are rebuilt after the first step, so the parameters must tell whose gradients this one holds.
    buffer = bucket.buffer()
    parameters = bucket.parameters()
    layers = [state.sparse(parameter) for parameter in parameters]
    # On a GPU `unpack` runs on another stream: it may only use tensors that outlive it, as those of state and bucket.
    entries = [None if layer is None else state.entries(layer) for layer in layers]
    grads: list[Tensor] = []
    message = buffer
    if any(layers):
        grads = list(map(_as_stored, bucket.gradients(), parameters))
        message = torch.cat(list(map(_pack, grads, layers, entries)))
    # Divided before they are sent: half precision would overflow by the sum.
    message = message.div_(dist.get_world_size())
    message = message.to(state.dtype or message.dtype)
    state.sent += message.numel() * message.element_size()
    # Without this hook the buffer itself would be sent.
    state.dense += sum(parameter.numel() for parameter in parameters) * buffer.element_size()

    def unpack(future: torch.futures.Future[Any]) -> Tensor:
        mean: Tensor = future.value()[0]  # the value is a list of one tensor
        if not grads:
            # The message was the buffer itself, unless it was sent in another dtype.
            return buffer if mean is buffer else buffer.copy_(mean)
        sizes = [
            (grad if positions is None else positions).numel()
            for grad, positions in zip(grads, entries, strict=True)
        ]
        for grad, layer, positions, part in zip(
            grads, layers, entries, mean.split(sizes), strict=True
        ):
            if layer is None or positions is None:
                grad.copy_(part.view(grad.shape))
            else:
                grad.copy_(_unpack(part.to(grad.dtype), layer, positions))
        return buffer

    return dist.all_reduce(message, async_op=True).get_future().then(unpack)


def _as_stored(grad: Tensor, parameter: Tensor) -> Tensor:
    """View a bucket's gradient, which claims to be row-major, in the memory order of its parameter."""
    # empty_like() keeps the strides of a parameter without gaps alone.
    if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
        return grad
    return grad.as_strided(parameter.shape, parameter.stride())


def _pack(grad: Tensor, layer: NMLayer | None, positions: Tensor | None) -> Tensor:
    """The part of a gradient that is sent, one-dimensional."""
    if layer is None or positions is None:
        return grad.reshape(-1)
    kept = layer.masks.forward_view
    assert kept is not None
    positions = positions.long()
    values = blocks_of(layer, grad).gather(1, positions)
    # Blocks that keep fewer than N entries are filled up with pruned ones, whose average is to be 0.
    is_kept = blocks_of(layer, kept).gather(1, positions)
    return torch.where(is_kept, values, 0).flatten()


def _unpack(values: Tensor, layer: NMLayer, positions: Tensor) -> Tensor:
    """The gradient, of the weight's shape, from the values at the positions of :func:`kept_entries`."""
    blocks = values.new_zeros(len(positions), layer.pattern.m)
    blocks.scatter_(1, positions.long(), values.view(positions.shape))
    return from_blocks_of(layer, blocks)
