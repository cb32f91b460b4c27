"""Whether a tensor is as it was when something was made of it, without reading its values."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def memory_state(tensor: Tensor) -> Hashable:
    """A value that differs after a tensor got other memory or another view of it, or was written to.

    The memory is told by a weak reference to the storage: while the value is kept, no other storage is equal to it,
    even if it got the same address. torch counts writes to the tensor and its views, but neither those through
    ``tensor.data`` or numpy, nor any write to a tensor of inference mode.

    Example::

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(3))
        >>> before = memory_state(weight)
        >>> weight.data = weight.data.clone()
        >>> memory_state(weight) == before
        False
    """
    version = -1 if tensor.is_inference() else tensor._version
    storage = StorageWeakRef(tensor.untyped_storage())
    # FSDP gives the memory of a storage back, and takes other memory for it.
    address = tensor.data_ptr()
    view = (tensor.dtype, tuple(tensor.shape), tensor.stride())
    return storage, address, version, view
