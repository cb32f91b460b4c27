"""The products of masked layers: dense ones on masked operands, and those that a router gives to kernels."""
