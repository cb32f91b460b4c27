"""Benchmarks of the CPU kernels: products, weights read once, and whole training steps."""
