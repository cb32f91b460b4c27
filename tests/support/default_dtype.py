"""Running code under another default dtype, and finding the operations of the package that take it."""

import contextlib
import sys
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_nm

PACKAGE = str(Path(lightning_nm.__file__).parent)
TORCH = str(Path(torch.__file__).parent)

OTHERS = (torch.bfloat16, torch.float16, torch.float64)
"""What a precision plugin may make of the default dtype."""


class _Operations(TorchDispatchMode):
    """Notes the operations whose result has the default dtype, though no argument has or names it."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **kwargs or {})
        default = torch.get_default_dtype()
        if any(_dtype(each) == default for each in tree_leaves(result)):
            given = tree_leaves((args, kwargs))
            if default not in given and default not in map(_dtype, given):
                self._note(operation)
        return result

    def _note(self, operation):
        """Keep the line of the package that called it, unless others did: an optimizer's own tensors are torch's."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
            self.found.add(f"{frame.f_code.co_filename}:{frame.f_lineno}: {operation}")


def _dtype(value):
    return value.dtype if isinstance(value, torch.Tensor) else None


@contextlib.contextmanager
def default_dtype(dtype):
    """Set the default dtype; no operation that the package calls may take it, unless it is float32."""
    operations = _Operations()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with contextlib.nullcontext() if dtype == torch.float32 else operations:
            yield
    finally:
        torch.set_default_dtype(before)
    assert not operations.found, "\n".join(sorted(operations.found))


def same(a, b):
    """Whether two nested structures hold equal tensors of the same dtypes, and equal other values."""
    left, right = tree_leaves(a), tree_leaves(b)
    return len(left) == len(right) and all(map(_same_leaf, left, right))


def _same_leaf(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    return a == b or (a != a and b != b)
