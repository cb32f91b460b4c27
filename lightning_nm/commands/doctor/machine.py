"""The device, the libraries, and which kernels work."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from lightning_nm.kernels import GemmKernel
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.kernels.router.cache import Environment, environment_of
from lightning_nm.kernels.router.registry import KernelRegistry, reason_or_error


@dataclass(frozen=True)
class KernelState:
    """The state of a kernel on a device.

    Example::

        >>> KernelState("reference", works=True, reason="", remark="").works
        True
    """

    name: str
    works: bool  # whether it passed its numeric probe
    reason: str  # why it did not, else empty
    remark: str  # what users should know about it on this device, usually empty


@dataclass(frozen=True)
class Cpu:
    """A CPU as the kernels use it.

    Example::

        >>> cpu = Cpu("Xeon", instructions="avx2", asked=None, cores=16, threads=8, parallel=True)
        >>> cpu.threads
        8
    """

    model: str
    instructions: str | None  # the instruction set that the kernels use; None without their library
    asked: str | None  # the value of LIGHTNING_NM_ISA; None if it is not set
    cores: int  # logical cores that this process may use
    threads: int  # of torch
    parallel: bool  # whether the kernels run on torch's threads; else on one
    amx: bool = False  # whether dense products in bfloat16 have AMX


@dataclass(frozen=True)
class Machine:
    """A device with its libraries and kernels, as :func:`examine` returns it.

    Example::

        >>> machine = examine(KernelRegistry([]), torch.device("cpu"))
        >>> machine.capability is None, machine.to_dict()["kernels"][0]["name"]
        (True, 'reference')
    """

    environment: Environment
    capability: str | None  # compute capability, such as "9.0"; None without CUDA
    kernels: tuple[KernelState, ...]
    cpu: Cpu | None = None  # None if the device is a GPU
    triton: str | None = None
    """Why no Triton kernel runs, empty if they do; ``None`` if the device is a CPU."""

    def to_dict(self) -> dict[str, Any]:
        """Return the machine as primitives, for JSON."""
        kernels = [asdict(kernel) for kernel in self.kernels]
        cpu = None if self.cpu is None else asdict(self.cpu)
        return {
            **asdict(self.environment),
            "capability": self.capability,
            "cpu": cpu,
            "triton": self.triton,
            "kernels": kernels,
        }


def examine(registry: KernelRegistry | None = None, device: torch.device | None = None) -> Machine:
    """Probe every kernel, by default those of the package, on a device, by default CUDA's current one, else the CPU.

    Example::

        >>> [kernel.name for kernel in examine(KernelRegistry([]), torch.device("cpu")).kernels if kernel.works]
        ['reference']
    """
    if device is None:
        device = _current_device()
    if registry is None:
        registry = KernelRegistry()
    states = [_probe(kernel, device) for kernel in registry.kernels.values()]
    capability = None
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"{major}.{minor}"
    cpu = _cpu() if device.type == "cpu" else None
    triton = triton_use.unavailable() if device.type == "cuda" else None
    return Machine(environment_of(device), capability, tuple(states), cpu, triton)


def _current_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _probe(kernel: GemmKernel, device: torch.device) -> KernelState:
    # A kernel that raises does not work, and its error is the reason.
    reason = reason_or_error(partial(kernel.probe, device))
    remark = reason_or_error(partial(kernel.remark, device))
    return KernelState(kernel.name, works=not reason, reason=reason, remark=remark)


def _cpu() -> Cpu:
    # The library is compiled at installation; without a compiler there is none.
    usable = not library.unavailable()
    instructions = library.LEVELS[library.level()] if usable else None
    return Cpu(
        model=library.cpu_name(),
        instructions=instructions,
        asked=os.environ.get("LIGHTNING_NM_ISA") or None,
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        parallel=usable and library.parallel() is not None,
        amx=library.has_amx(),
    )


def _usable_cores() -> int:
    # On Linux a container or `taskset` may allow fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
