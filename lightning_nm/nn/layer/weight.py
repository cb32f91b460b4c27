"""A weight that processes hold together: its local shard, and the full weight for as long as it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_nm.nn.layer.sharding import GatheredParameter, local_shard, local_values, reshard


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
