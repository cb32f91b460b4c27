"""How many calls, files and changes of file one masked linear layer takes: a measure of how hard the code is to follow.

    PYTHONPATH=. python -m benchmarks.calls

Counts Python calls into functions of ``lightning_nm`` (lambdas and generator expressions included). A change of file is
a call into another file than the call before it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import lightning_nm
from lightning_nm import NMSparsifier
from lightning_nm.kernels import Router, SimulatedSparseKernel, routing

PACKAGE = str(Path(lightning_nm.__file__).parent)


class Trace(NamedTuple):
    """What a call of a function went through."""

    calls: int
    files: dict[str, int]
    changes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.calls} calls in {len(self.files)} files, {self.changes} changes of file, {self.depth} deep"


def trace(function: Callable[[], Any]) -> Trace:
    """Count the package's calls within one call of a function; backward passes must run in this thread."""
    order: list[str] = []
    files: dict[str, int] = {}
    depth = deepest = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal depth, deepest
        path = frame.f_code.co_filename
        if not path.startswith(PACKAGE) or event not in ("call", "return"):
            return
        name = path.removeprefix(PACKAGE)
        if event == "call":
            files[name] = files.get(name, 0) + 1
            order.append(name)
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    changes = sum(a != b for a, b in pairwise(order))
    return Trace(sum(files.values()), files, changes, deepest)


def main() -> None:
    """Print the counts."""
    torch.manual_seed(0)
    model = nn.Linear(32, 64)
    sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.register(optimizer)

    def step() -> None:
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()

    for _ in range(2):
        model(torch.randn(16, 32)).square().mean().backward()
        found = trace(step)
    print("bi-mask step     ", found)
    for name, count in sorted(found.files.items()):
        print(f"    {name} {count}")
    router = Router("sparse", backends=[SimulatedSparseKernel()])
    with torch.autograd.set_multithreading_enabled(False), routing(router):
        for _ in range(2):
            loss = model(torch.randn(16, 32, requires_grad=True)).square().mean()
            found = trace(loss.backward)
    print("routed backward  ", found)


if __name__ == "__main__":
    main()
