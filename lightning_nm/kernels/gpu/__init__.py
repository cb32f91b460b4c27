"""Kernels for NVIDIA GPUs, one file each. They have only ever run in software: no result of theirs is from a GPU."""
