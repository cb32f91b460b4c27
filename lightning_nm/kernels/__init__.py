"""GEMM kernels: how a product with an N:M operand is executed."""
