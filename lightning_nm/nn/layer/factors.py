"""A dense weight gradient as the factors of its products, of which a few rows are multiplied out at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Product(NamedTuple):
    """The part ``dY^T X`` of a weight gradient, and the versions of both factors when they were kept."""

    first_row: int
    dy_to: Tensor
    x_ti: Tensor
    versions: tuple[int, int]


class GradientFactors:
    r"""The gradient :math:`dW = \sum_k dY_k^T X_k` of a weight ``[out, in]`` since the last optimizer step.

    X and dY of a layer are small where a batch has few tokens: :math:`T (in + out)` numbers for T tokens. Once they
    would take more memory than dW, they are multiplied out, and dW is kept in their place.

    Args:
        name: Name of the layer, for errors.
        out: Rows of the weight.
        width: Columns of the weight.
    """

    def __init__(self, name: str, out: int, width: int) -> None:
        self.name = name
        self.out = out
        self.width = width
        self._products: list[_Product] = []
        self._dtype = torch.float32
        self._whole: Tensor | None = None

    def __bool__(self) -> bool:
        """Whether anything was added."""
        return bool(self._products) or self._whole is not None

    def add(self, dy_to: Tensor, x_ti: Tensor, dtype: torch.dtype, first_row: int = 0) -> None:
        """Add the gradient of one product of the layer.

        Args:
            dy_to: ``dY [tokens, rows]``, the gradient of the output.
            x_ti: ``X [tokens, in]``, the input.
            dtype: The dtype of the weight, to which each product is rounded, as autograd does.
            first_row: The first row of the weight that belongs to dY.

        Raises:
            RuntimeError: For float16, whose gradients a scaler multiplies by a number that is not known here.
        """
        if torch.float16 in (dy_to.dtype, x_ti.dtype):
            raise RuntimeError(
                f"layer '{self.name}' multiplies in float16, whose gradients are scaled, which storage='packed' does "
                "not know while masks move: use bfloat16 or float32, or storage='dense'"
            )
        dy_to = dy_to.detach()
        x_ti = x_ti.detach()
        self._dtype = dtype
        versions = (dy_to._version, x_ti._version)
        self._products.append(_Product(first_row, dy_to, x_ti, versions))
        whole_bytes = self.out * self.width * dtype.itemsize
        if self._whole is not None or self._bytes() > whole_bytes:
            self._whole = self._multiplied(0, self.out)
            self._products.clear()

    def _bytes(self) -> int:
        factors = [factor for p in self._products for factor in (p.dy_to, p.x_ti)]
        return sum(factor.numel() * factor.element_size() for factor in factors)

    def rows(self, begin: int, end: int) -> Tensor | None:
        """Rows ``begin:end`` of the gradient, a new tensor ``[end - begin, in]``; ``None`` if nothing was added.

        Raises:
            RuntimeError: If an input or a gradient was overwritten since it was added.
        """
        return self._multiplied(begin, end) if self else None

    def _multiplied(self, begin: int, end: int) -> Tensor:
        total = None if self._whole is None else self._whole[begin:end].clone()
        for product in self._products:
            first_row, dy_to, x_ti, versions = product
            if (dy_to._version, x_ti._version) != versions:
                raise RuntimeError(
                    f"the input of layer '{self.name}' or the gradient of its output was changed in place before the "
                    "optimizer's step, which storage='packed' still needs while masks move: change a copy of it"
                )
            # The rows of this part among those that were asked for.
            first = max(begin, first_row)
            last = min(end, first_row + dy_to.shape[1])
            if first >= last:
                continue
            part = dy_to[:, first - first_row : last - first_row].t() @ x_ti
            part = part.to(self._dtype)
            if total is None and (first, last) == (begin, end):
                total = part
                continue
            if total is None:
                total = part.new_zeros(end - begin, self.width)
            total[first - begin : last - begin] += part
        if total is None:
            some = self._products[0].x_ti
            total = some.new_zeros(end - begin, self.width, dtype=self._dtype)
        return total

    def clear(self) -> None:
        """Forget the gradient."""
        self._products.clear()
        self._whole = None
