"""The device, the libraries, and which kernels work: the first part of ``lightning-nm doctor``."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.console import Console

from lightning_nm.callbacks.tables import plain_table
from lightning_nm.commands.output import columns_table, print_line
from lightning_nm.kernels import KernelRegistry
from lightning_nm.kernels.cpu import library
from lightning_nm.kernels.gpu import triton_use
from lightning_nm.kernels.tuner import environment_of, reason_or_error


def examine() -> dict[str, Any]:
    """Return what is known of CUDA's current device, else of the CPU, as primitives.

    Example:
        >>> machine = examine()
        >>> machine["kernels"][0]["name"], machine["kernels"][0]["works"]
        ('reference', True)
    """
    device = torch.device("cpu")
    capability = triton = None
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        major, minor = torch.cuda.get_device_capability(device)
        capability = f"{major}.{minor}"
        triton = triton_use.unavailable()  # empty if Triton kernels run
    kernels = []
    for kernel in KernelRegistry().kernels.values():
        # A kernel that raises does not work, and its error is the reason.
        reason = reason_or_error(partial(kernel.probe, device))
        remark = reason_or_error(partial(kernel.remark, device))
        state = {"name": kernel.name, "works": not reason, "reason": reason, "remark": remark}
        kernels.append(state)
    return {
        **asdict(environment_of(device)),
        "capability": capability,
        "cpu": _cpu() if device.type == "cpu" else None,
        "triton": triton,
        "kernels": kernels,
    }


def _cpu() -> dict[str, Any]:
    # The library is compiled at installation; without a compiler there is none.
    usable = not library.unavailable()
    # On Linux a container or `taskset` may allow fewer cores than the machine has.
    can_tell = hasattr(os, "sched_getaffinity")
    return {
        "model": library.cpu_name(),
        "instructions": library.LEVELS[library.level()] if usable else None,
        "asked": os.environ.get("LIGHTNING_NM_ISA") or None,
        "cores": len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "parallel": usable and library.parallel() is not None,  # the kernels, on torch's threads
        "amx": library.has_amx(),
    }


def print_machine(machine: dict[str, Any], console: Console) -> None:
    """Print the device, the libraries and each kernel."""
    table = plain_table("machine", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in _cpu_rows(machine) if machine["cpu"] else _gpu_rows(machine):
        table.add_row(*row)
    console.print(table)

    table = columns_table("kernels", ("kernel", "works", "why"), {"why": 20})
    for kernel in machine["kernels"]:
        why = "; ".join(filter(None, (kernel["reason"], kernel["remark"])))
        if kernel["name"] == "reference":
            why = "the dense product on masked operands, always available"
        works, style = ("yes", None) if kernel["works"] else ("no", "dim")
        why = why or "passed its numeric check on this device"
        table.add_row(kernel["name"], works, why, style=style)
    console.print(table)
    # The first one is the dense product.
    if not any(kernel["works"] for kernel in machine["kernels"][1:]):
        print_line(console, "No sparse kernel works here: a training runs every product dense.")


def _gpu_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    triton = "its kernels prepare operands, and make BAME's passes"
    if machine["triton"]:
        triton = f"{machine['triton']}: torch prepares operands, and makes BAME's passes"
    return [
        ("device", f"{machine['device']}, compute capability {machine['capability']}"),
        *((name, machine[name] or "none") for name in ("driver", "torch", "cuda", "cusparselt")),
        ("triton", triton),
    ]


def _cpu_rows(machine: dict[str, Any]) -> list[tuple[str, str]]:
    cpu = machine["cpu"]
    instructions = cpu["instructions"] or "none, the kernels do not work"
    if cpu["asked"]:
        instructions += f" (LIGHTNING_NM_ISA={cpu['asked']})"
    threads = f"{cpu['threads']}"
    if cpu["parallel"]:
        threads += ", for dense products and kernels"
    elif cpu["instructions"]:
        threads += " for dense products; the kernels use one: more need torch 2.10 or later"
    rows = [
        ("device", f"CPU, {cpu['model']}"),
        ("instructions", instructions),
        ("cores", f"{cpu['cores']} that this process may use"),
        ("threads", threads),
    ]
    if cpu["amx"]:
        amx = "for dense products of many tokens in bfloat16: N:M ones cannot use it"
        rows.append(("AMX", amx))
    return [*rows, ("torch", machine["torch"])]
