"""A training process that dies by SIGKILL at a chosen moment; light, because a fork server imports it."""

import os
import signal
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_nm import RNGState
from tests.support.lightning_models import callback, fit, new_model

METHODS = ("sr-ste", "bi-mask", "bame", "three-gemms")
REGIONS = {
    "anywhere": ("loops/fit_loop.py", "run"),
    "step": ("torch/optim/sgd.py", "step"),
    "mask move": ("lightning_nm/sparsifier.py", "step"),
    "torch.save": ("torch/serialization.py", "save"),
    "writing": ("fabric/utilities/cloud_io.py", "_atomic_save"),
    "replacing": ("shutil.py", "move"),
}
"""Functions within which a process dies: the end of their file's path, and their name."""


class Moments:
    """Counts the calls and returns of all functions, C functions included, while each region is running.

    Args:
        kill_in: The region to die in; ``None`` only counts.
        kill_at: The number of the event, over all times that the region runs.
    """

    def __init__(self, kill_in=None, kill_at=0):
        self.kill_in, self.kill_at = kill_in, kill_at
        self.events = dict.fromkeys(REGIONS, 0)
        self._depth = dict.fromkeys(REGIONS, 0)
        self._names = {}
        for region, (path, name) in REGIONS.items():
            self._names.setdefault(name, []).append((path, region))

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if event in ("call", "return") and code.co_name in self._names:
            for path, region in self._names[code.co_name]:
                if code.co_filename.endswith(path):
                    self._depth[region] += 1 if event == "call" else -1
        for region, depth in self._depth.items():
            if depth:
                self.events[region] += 1
                if region == self.kill_in and self.events[region] == self.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)


class Profile(pl.Callback):
    """Counts while the fit runs."""

    def __init__(self, moments):
        self.moments = moments

    def on_fit_start(self, trainer, pl_module):
        sys.setprofile(self.moments)


def train(folder, method, accumulate, kill_in=None, kill_at=0):
    """Train from the last checkpoint in the folder, or from the beginning; write the result and the counts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(folder)
    last = folder / "last.ckpt"
    moments = Moments(kill_in, kill_at)
    save = ModelCheckpoint(folder, "{step}-{epoch}", every_n_train_steps=1, save_last=True)
    model = new_model(0 if not last.exists() else 7)
    callbacks = [callback(method), RNGState(), save, Profile(moments)]
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate}
    trainer, _ = fit(folder, callbacks, model, None, last if last.exists() else None, **options)
    sys.setprofile(None)
    optimizer = trainer.optimizers[0].state_dict()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer, "step": trainer.global_step},
        folder / "result.pt",
    )
    torch.save(moments.events, folder / "events.pt")
