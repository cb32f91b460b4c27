"""A training with dense or packed storage that a test cuts where it likes."""

import torch

from lightning_nm import NMSparsifier
from tests.support.kinds import make


class StorageRun:
    """A module, its sparsifier and, once it is started, its optimizer."""

    def __init__(
        self,
        kind,
        method,
        make_optimizer,
        storage,
        planned_steps,
        pattern="2:4",
        *,
        dtype=torch.float32,
        scale=None,
    ):
        self.module, self.x = make(kind, dtype)
        self.sparsifier = NMSparsifier(
            self.module,
            pattern,
            method,
            skip_first_last=False,
            planned_steps=planned_steps,
            scale=scale,
            storage=storage,
        )
        self.make_optimizer = make_optimizer
        self.optimizer = None

    def start(self):
        self.sparsifier.attach()
        self.optimizer = self.make_optimizer(self.module.parameters())
        self.sparsifier.register(self.optimizer)
        return self

    def step(self):
        self.sparsifier.before_step(self.optimizer)
        self.optimizer.step()
        self.sparsifier.step()
