"""Kernels for NVIDIA GPUs, one file each.

They have run on one H200 (``docs/gpu.md``), `hopper_triton` in software alone.
"""
