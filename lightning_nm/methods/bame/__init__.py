"""BAME: the method, and its exchanges of entries."""

from lightning_nm.methods.bame.method import BAME

__all__ = ["BAME"]
