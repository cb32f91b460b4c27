"""How many calls, files and changes of file one masked linear layer takes: a measure of how hard the code is to follow.

    PYTHONPATH=. python -m benchmarks.calls

Counts Python calls into functions of ``lightning_nm`` (lambdas and generator expressions included; other comprehensions
not, which are calls before Python 3.12 only). A change of file is a call into another file than the call before it.
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
from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import BAME, NMSparsifier
from lightning_nm.kernels import Router, routing

PACKAGE = str(Path(lightning_nm.__file__).parent)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


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
        if frame.f_code.co_name in COMPREHENSIONS:
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


def bi_mask_step() -> tuple[Trace, Trace]:
    """An optimizer step under Bi-Mask, and a backward pass that is routed to a simulated kernel."""
    torch.manual_seed(0)
    model = nn.Linear(32, 64)
    sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sparsifier.register(optimizer)

    def step() -> None:
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()

    for _ in range(2):  # the second step finds everything in place
        model(torch.randn(16, 32)).square().mean().backward()
        stepped = trace(step)
    router = Router("sparse", backends=[SimulatedSparseKernel()])
    with torch.autograd.set_multithreading_enabled(False), routing(router):
        for _ in range(2):
            loss = model(torch.randn(16, 32, requires_grad=True)).square().mean()
            routed = trace(loss.backward)
    return stepped, routed


def bame_step() -> Trace:
    """An optimizer step of BAME that exchanges entries."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    method = BAME(stop=100, evidence_rate=1.0, budget=1.0)
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sparsifier.register(optimizer)

    def step() -> None:
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()

    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        found = trace(step)
    assert sparsifier.stats()["adapted_blocks"] > 0, "no exchange was traced"
    return found


def routed_batch() -> Trace:
    """A whole batch, forward, backward and step, of a layer at 1:16 on the CPU kernels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256))
    sparsifier = NMSparsifier(model, "1:16", "asp", skip_first_last=False).attach()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sparsifier.register(optimizer)
    router = Router("sparse")

    def batch() -> None:
        x = torch.randn(128, 256, requires_grad=True)
        model(x).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        optimizer.zero_grad()

    with torch.autograd.set_multithreading_enabled(False), routing(router):
        for _ in range(3):
            found = trace(batch)
    return found


def loaded_state() -> str:
    """How many functions of the package get the state that ``load_state_dict`` loads, and in how many files."""
    model = nn.Linear(64, 64)
    sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
    state = sparsifier.state_dict()
    model.load_state_dict(model.state_dict())
    holders: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE):
            return
        if any(value is state for value in frame.f_locals.values()):
            holders.append(f"{path.removeprefix(PACKAGE)}:{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        sparsifier.load_state_dict(state)
    finally:
        sys.setprofile(None)
    files = {holder.partition(":")[0] for holder in holders}
    return f"{len(holders)} calls in {len(files)} files get it: {', '.join(holders)}"


def main() -> None:
    """Print the counts."""
    stepped, routed = bi_mask_step()
    print("bi-mask step            ", stepped)
    print("routed backward         ", routed)
    found = bame_step()
    print("BAME step with exchanges", found)
    for name, count in sorted(found.files.items()):
        print(f"    {name} {count}")
    batch = routed_batch()
    print("routed batch, 1:16 asp  ", batch)
    for name, count in sorted(batch.files.items()):
        print(f"    {name} {count}")
    print("state to load           ", loaded_state())


if __name__ == "__main__":
    main()
