"""The tables of the documentation, made from the committed results of the benchmarks and studies."""
