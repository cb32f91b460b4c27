"""The device, the libraries, and which kernels work."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.router.cache import Environment, environment_of
from lightning_nm.kernels.router.registry import KernelRegistry, reason_or_error


@dataclass(frozen=True)
class KernelState:
    """The state of a kernel on a device."""

    name: str
    works: bool  # whether it passed its numeric probe
    reason: str  # why it did not, else empty
    remark: str  # what users should know about it on this device, usually empty


@dataclass(frozen=True)
class Cpu:
    """A CPU as the kernels use it."""

    model: str
    instructions: str | None  # the instruction set that the kernels use; None without their library
    asked: str | None  # the value of LIGHTNING_NM_ISA; None if it is not set
    cores: int  # logical cores that this process may use
    threads: int  # of torch
    parallel: bool  # whether the kernels run on torch's threads; else on one


@dataclass(frozen=True)
class Machine:
    """A device with its libraries and kernels."""

    environment: Environment
    capability: str | None  # compute capability, such as "9.0"; None without CUDA
    kernels: tuple[KernelState, ...]
    cpu: Cpu | None = None  # None if the device is a GPU

    def to_dict(self) -> dict[str, Any]:
        """As primitives, for JSON."""
        kernels = [asdict(kernel) for kernel in self.kernels]
        cpu = None if self.cpu is None else asdict(self.cpu)
        return {
            **asdict(self.environment),
            "capability": self.capability,
            "cpu": cpu,
            "kernels": kernels,
        }


def examine(registry: KernelRegistry | None = None, device: torch.device | None = None) -> Machine:
    """Probe every kernel, by default those of the package, on a device, by default CUDA's current one, else the CPU.

    Example::

        >>> [kernel.name for kernel in examine(KernelRegistry([]), torch.device("cpu")).kernels if kernel.works]
        ['reference']
    """
    if device is None:
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
    states = []
    for kernel in (registry or KernelRegistry()).kernels.values():
        reason, remark = (
            reason_or_error(partial(ask, device)) for ask in (kernel.probe, kernel.remark)
        )
        states.append(KernelState(kernel.name, not reason, reason, remark))
    capability = (
        ".".join(map(str, torch.cuda.get_device_capability(device)))
        if device.type == "cuda"
        else None
    )
    return Machine(
        environment_of(device), capability, tuple(states), _cpu() if device.type == "cpu" else None
    )


def _cpu() -> Cpu:
    usable = not library.unavailable()
    return Cpu(
        library.cpu_name(),
        library.LEVELS[library.level()] if usable else None,
        os.environ.get("LIGHTNING_NM_ISA") or None,
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        torch.get_num_threads(),
        usable and library.parallel() is not None,
    )
