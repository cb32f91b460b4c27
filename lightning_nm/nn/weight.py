"""Where a weight lives, how its blocks lie, and how to reach its values when processes shard it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_nm.nn.sharding import Whole, as_sharded, gather, held, is_sharded, part, reshard, sharded_dimensions

Layout = Literal["plain", "flat", "transposed"]


class WeightAccess:
    """A parameter of a module, looked up at each use, because wrappers such as FSDP replace it.

    A sharded parameter (``fully_shard``) has three sides. ``param`` is what module and optimizer hold. ``here`` is the
    part of its values in this process, which elementwise code reads and writes. ``weight`` is all of it, within
    :meth:`whole` alone, which gathers it when it is read. A parameter that is not sharded is all three.

    Args:
        module: The module that owns the parameter.
        parameter: The parameter's name in the module.
        layout: How blocks lie, see :class:`~lightning_nm.nn.layer.NMLayer`.
    """

    def __init__(self, module: nn.Module, parameter: str, layout: Layout) -> None:
        self.module = module
        self.parameter = parameter
        self.layout: Layout = layout
        self.sharded = is_sharded(self.param)
        """Whether processes hold the parameter's values together."""
        self.wrappers: Sequence[nn.Module] = ()
        """The FSDP modules around it, which put the whole parameter into the place of the sharded one for a while."""
        self._whole: Whole | None = None

    @property
    def param(self) -> nn.Parameter:
        """The latent parameter as the module holds it, for its identity and shape: its values may be sharded."""
        return getattr(self.module, self.parameter)

    @property
    def home(self) -> nn.Parameter:
        """The parameter as optimizers hold it, to be asked for between forward and backward passes alone."""
        if self.sharded:
            reshard(self.wrappers)
        return self.param

    @property
    def weight(self) -> nn.Parameter:
        """The latent parameter; within :meth:`whole` a plain tensor, even if it is sharded."""
        return self.param if self._whole is None else self._whole.weight

    @property
    def here(self) -> Tensor:
        """The values of the parameter that this process holds, detached: to be written in place."""
        self._settle()
        return held(self.home)

    @property
    def grad_here(self) -> Tensor | None:
        """The part of its gradient that this process holds."""
        self._settle()
        grad = self.home.grad
        return None if grad is None else held(grad)

    def _settle(self) -> None:
        """What was changed of the whole comes first; who reads ``weight`` later, gathers it anew."""
        if self._whole is not None:
            self._whole.put_back()

    def part(self, whole: Tensor) -> Tensor:
        """View of those entries of a weight-shaped tensor whose values are :attr:`here`."""
        return part(whole, self.param) if self.sharded else whole

    @contextmanager
    def whole(self, *, gradient: bool = False) -> Iterator[None]:
        """Within, ``weight`` is a plain tensor, and what is changed reaches the parameter; nested calls do nothing.

        To be entered in all processes, which must read ``weight`` there, or not, alike.

        Args:
            gradient: Its gradient goes with it.
        """
        if not self.sharded or self._whole is not None:
            yield
            return
        self._whole = whole = Whole(self.home, gradient)
        try:
            yield
            whole.put_back()
        finally:
            self._whole = None

    def rows(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor so that dimension 0 is `out` and forward blocks lie along dimension 1."""
        if self.layout == "flat":
            return tensor.flatten(1)
        return tensor.t() if self.layout == "transposed" else tensor

    def matrix(self, tensor: Tensor) -> Tensor:
        """View a weight-shaped tensor as ``[out, in]``: :meth:`rows`, without the single tap of a 1x1 convolution."""
        return self.rows(tensor).flatten(1)

    def unrows(self, tensor: Tensor) -> Tensor:
        """Undo :meth:`rows`."""
        if self.layout == "flat":
            return tensor.unflatten(1, self.param.shape[1:])
        return tensor.t() if self.layout == "transposed" else tensor

    def locate(self, index: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Turn an index into :meth:`rows` of a weight-shaped tensor into one of the tensor itself, to write through."""
        if self.layout == "flat":
            return index[0], *torch.unravel_index(index[1], self.param.shape[1:])
        return index[::-1] if self.layout == "transposed" else index

    @torch.no_grad()
    def by_rows(self, mask: Callable[[Tensor], Tensor]) -> Tensor:
        """A bool mask of the weight's shape, each of whose rows depends on the same row of the weight alone.

        Processes that shard the weight by rows make the mask of theirs and gather its bytes instead of the weight.

        Args:
            mask: Makes it of the weight, both as :meth:`rows` views them.
        """
        if self.sharded and sharded_dimensions(self.param) <= {1 if self.layout == "transposed" else 0}:
            found = self.unrows(mask(self.rows(self.here)))
            return gather(as_sharded(found.to(torch.uint8).contiguous(), self.param)).ne(0)
        return self.unrows(mask(self.rows(self.weight.detach())))
