"""Which kernel runs which product: the known kernels, their measurement, and the decisions."""

from lightning_nm.kernels.router.router import Router, routing

__all__ = ["Router", "routing"]
