"""Benchmarks of the CPU kernels: GEMMs, weights read once, and whole training steps."""
