"""What only a GPU can say; ``python -m benchmarks.gpu`` asks all of it, see benchmarks/gpu/README.md."""
