"""BAME: the method, its evidence and its exchanges."""

from lightning_nm.methods.bame.method import BAME

__all__ = ["BAME"]
