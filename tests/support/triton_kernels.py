"""Triton kernels in its interpreter, and compiled without a GPU.

Whether kernels are interpreted is settled when Triton is imported, so the environment decides which tests run.
"""

import os

import pytest
import torch

from lightning_nm.kernels.gpu import triton_use

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

needs_interpreter = pytest.mark.skipif(
    bool(triton_use.unavailable()) or not INTERPRETED,
    reason="needs Triton and TRITON_INTERPRET=1",
)
needs_compiler = pytest.mark.skipif(
    bool(triton_use.unavailable()) or INTERPRETED,
    reason="needs Triton, and no TRITON_INTERPRET",
)


def interpreted(x, dtype):
    """Cast float32 as Triton's interpreter does: to bfloat16 it cuts where hardware and torch round to nearest."""
    return (
        (x.view(torch.int32) & -(1 << 16)).view(torch.float32).to(dtype)
        if dtype == torch.bfloat16
        else x.to(dtype)
    )


def assembly(kernel, types, constants, aligned=False, **options):
    """PTX for an H100; ``aligned`` as Triton finds addresses and sizes that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = (
        {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in types}
        if aligned
        else None
    )
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


class _NoDevice:
    """What Triton asks of a driver to compile for an H100."""

    def get_current_device(self):
        return -1  # of no device: what is compiled is kept under this number

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch):
    """Kernels are compiled for an H100 where they are launched, but do not run: their PTX by name."""
    from triton.runtime import JITFunction, driver

    found = {}
    run = JITFunction.run

    def compile_alone(self, *args, grid, warmup, **options):
        found[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **options).asm["ptx"]

    monkeypatch.setattr(driver, "_active", _NoDevice())
    monkeypatch.setattr(JITFunction, "run", compile_alone)
    return found
