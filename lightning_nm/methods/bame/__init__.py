"""BAME: the method, its exchanges, and what they do to the optimizer's state."""

from lightning_nm.methods.bame.method import BAME

__all__ = ["BAME"]
