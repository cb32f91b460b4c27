"""Sparse kernels that may run a product: those that work here, support it, and compute it right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from lightning_nm.kernels.base import GemmKernel, GemmKey
from lightning_nm.kernels.keys import multiply_adds
from lightning_nm.kernels.trial import check


class Candidates:
    """The sparse kernels and the reference, by name.

    Kernels may come from outside, and what they raise is an objection like any other.

    Args:
        kernels: The sparse kernels, in order of preference.

    Raises:
        ValueError: If two have one name, or one is called as the reference.
    """

    def __init__(self, kernels: Sequence[GemmKernel]) -> None:
        self.by_name = {kernel.name: kernel for kernel in (GemmKernel(), *kernels)}
        if len(self.by_name) != len(kernels) + 1:
            names = ", ".join(kernel.name for kernel in kernels)
            raise ValueError(f"kernels={names}: each needs a name of its own, and 'reference' is always there")
        self._probes: dict[tuple[str, str], str] = {}

    def __str__(self) -> str:
        return ", ".join(self.by_name)

    def objection(self, name: str, key: GemmKey) -> str:
        """Why a kernel cannot run a product on the key's device, where it is probed once; empty if it can."""
        kernel = self.by_name.get(name)
        if kernel is None:
            return f"{name} is not among the kernels"
        place = (name, key.device)
        if place not in self._probes:
            self._probes[place] = _answer(partial(kernel.probe, torch.device(key.device)))
        objection = self._probes[place] or _answer(partial(kernel.supports, key))
        return objection and f"{name}: {objection}"

    def legal(self, key: GemmKey, notes: list[str]) -> Iterator[GemmKernel]:
        """Yield the sparse kernels that compute a product right, each checked when it is asked for.

        Args:
            key: The product.
            notes: Takes the reasons against the others.
        """
        if not multiply_adds(key):
            notes.append("the product is empty")
            return
        for name, kernel in list(self.by_name.items())[1:]:
            objection = self.objection(name, key)
            if not objection and (error := _answer(partial(check, kernel, key))):
                objection = f"{name}: {error}"
            if objection:
                notes.append(objection)
            else:
                yield kernel


def failure(error: Exception) -> str:
    """Say what was raised."""
    return f"{type(error).__name__}: {error}"


def _answer(question: Callable[[], str]) -> str:
    try:
        return question()
    except Exception as error:
        return failure(error)
