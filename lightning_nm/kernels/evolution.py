"""BAME's passes over a weight, each of which reads and writes every tensor once: which code runs them.

:mod:`lightning_nm.kernels.cpu.evolution` has them for CPUs, in C, and :mod:`lightning_nm.kernels.gpu.evolution_triton`
for CUDA tensors, by functions of the same arguments, so that the choice is one of a module. Other tensors are left to
the torch operations of :mod:`lightning_nm.methods.bame`, which define the results. A training step calls:

* ``gather_evidence`` before the optimizer's step: U and V advance by the gradient, which is masked then;
* ``exchange`` after it: the weight is masked, the best exchange of every block is found (``best`` of the Triton
  kernels), the blocks that change are chosen and changed;
* ``keep_evidence``: U and V go to where they stay until the next step.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from lightning_nm.kernels.cpu import evolution as cpu_passes
from lightning_nm.kernels.gpu import triton_use


def passes_for(first: Tensor, *others: Tensor | None) -> ModuleType | None:
    """Return the module whose passes take these tensors; ``None`` if torch operations must do.

    A pass takes tensors of one device in row-major order: weights, gradients and optimizer state of float32, bfloat16
    or float16, U and V of float32, and masks of bytes.
    """
    if torch.compiler.is_compiling():
        return None
    tensors = first, *others
    # The first question is the cheaper one, and answers most.
    on_cpu = first.device.type == "cpu" and "TRITON_INTERPRET" not in os.environ
    if on_cpu or not triton_use.runs_on(first.device):
        return cpu_passes if cpu_passes.runs(*tensors) else None
    for tensor in tensors:
        if tensor is not None and (tensor.device != first.device or not tensor.numel()):
            return None
    if not cpu_passes.is_row_major(*tensors, device_type=first.device.type):
        return None
    return triton_use.kernels("evolution_triton")
