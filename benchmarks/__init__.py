"""Timings; each module is a command, for example ``python -m benchmarks.masks``."""
