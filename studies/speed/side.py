"""One side: a process whose Trainer makes steps when it is told to, and reports each of them."""

from __future__ import annotations

import logging
import signal
import warnings
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch

from lightning_nm import BAME, NMMixedPrecision, NMPrecision, NMSparsityCallback
from lightning_nm.demo import GPT, HelpTopics
from lightning_nm.kernels import Router

Precision = Literal["32-true", "bf16-mixed"]
PRECISIONS: tuple[Precision, ...] = ("32-true", "bf16-mixed")
SCALES = ("supar", "none")
METHODS = (
    "asp",
    "bame",
    "bame-half",
    "bame-frozen",
    "ste",
    "sr-ste",
    "transposable",
    "bi-mask",
)
"""Those of the sparse side. ``bame`` adapts its masks in every step, ``bame-half`` in every other one; ``bame-frozen``
is BAME after that phase."""


class Setting(NamedTuple):
    """What both sides train on: a GPT of `layers` blocks, and `tokens` bytes of text in a step.

    Attributes:
        width: Features of a token.
        layers: Decoder blocks.
        tokens: Tokens of a step, a multiple of `context`.
        context: Tokens of a window.
        pattern: The sparse side's pattern.
        method: The sparse side's method.
        scale: Whether the sparse side's initial weights and learning rates are those of the dense side, scaled to its
            density (``"supar"``), or the same numbers (``"none"``).
        lr: Peak learning rate.
        threads: Threads of each side, only one of which runs at a time; 0 for torch's choice.
        seed: Seed of the weights, the order of the text, and the masks.
        val_batches: Batches of held-out text after the training.
        budget_s: Seconds that the sparse side may measure kernels.
    """

    width: int = 768
    layers: int = 2
    tokens: int = 2048
    context: int = 256
    pattern: str = "1:16"
    method: str = "asp"
    scale: str = "supar"
    lr: float = 1e-3
    threads: int = 0
    seed: int = 0
    val_batches: int = 4
    budget_s: float = 25.0

    @property
    def heads(self) -> int:
        """Attention heads, of 64 features where the width has them."""
        return max(1, self.width // 64)


class Grant(NamedTuple):
    """What a side may do before it waits again: so many steps, and steps until so many seconds are over."""

    steps: int = 0
    seconds: float = 0.0


class Baton(pl.Callback):
    """Waits for a grant whenever the last one is used up, and sends every step; placed last among the callbacks.

    A step's seconds are those since the step before, without the time spent waiting. It sends ``("step", seconds,
    loss)`` for each step and ``("idle", facts)`` before it waits. The reply is a :class:`Grant`, or ``None`` to end
    training.
    """

    def __init__(self, connection: Connection, router: Router | None) -> None:
        self.connection, self.router = connection, router
        self.grant: Grant | None = None
        self.steps, self.seconds = 0, 0.0
        self.last = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for the first grant."""
        self._wait(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Send the step; wait if the grant is used up."""
        loss = float(outputs["loss"])
        now = perf_counter()
        seconds, self.last = now - self.last, now
        self.connection.send(("step", seconds, loss))
        self.steps, self.seconds = self.steps + 1, self.seconds + seconds
        assert self.grant is not None
        if self.steps >= self.grant.steps and self.seconds >= self.grant.seconds:
            self._wait(trainer)

    def _wait(self, trainer: pl.Trainer) -> None:
        self.connection.send(("idle", kernel_facts(self.router)))
        self.grant = self.connection.recv()
        if self.grant is None:
            trainer.should_stop = True
        self.steps, self.seconds = 0, 0.0
        self.last = perf_counter()


def kernel_facts(router: Router | None) -> dict[str, Any]:
    """The fraction of GEMM time on sparse kernels, and the kernel of each GEMM; nothing without a router."""
    if router is None:
        return {}
    share, basis = router.sparse_share()
    # The first batch's forward is dense, before kernels are measured.
    used = [u for u in router.used() if u.kernel != "reference" or u.decision is not None]
    return {
        "sparse share": share,
        "share of": basis,
        "unavailable": router.unavailable_reason,
        "not measured": sum(
            u.decision.source == "postponed" for u in used if u.decision is not None
        ),
        "kernels": {f"{u.product.key.gemm} {_sizes(u.product.key)}": u.kernel for u in used},
    }


def _sizes(key: Any) -> str:
    return f"{key.rows}x{key.depth}x{key.columns}"


def make_trainer(
    setting: Setting, sparse: bool, precision: Precision, connection: Connection
) -> pl.Trainer:
    """A Trainer that does nothing but the training; the dense side's is Lightning's own."""
    options: dict[str, Any] = {"precision": precision}
    callbacks: list[pl.Callback] = []
    router = None
    if sparse:
        arguments: dict[str, Any] = {"kernels": "auto", "budget_s": setting.budget_s}
        plugin: NMPrecision | NMMixedPrecision
        if precision == "32-true":
            plugin = NMPrecision(**arguments)
        else:
            plugin = NMMixedPrecision(precision, device="cpu", **arguments)
        # The number of steps is not known, so BAME's moments cannot be fractions of it.
        bame = {
            "bame": BAME(stop=1 << 30),
            "bame-half": BAME(stop=1 << 30, every=2, gradient_every=2),
            "bame-frozen": BAME(stop=0),
        }
        method: Any = bame.get(setting.method, setting.method)
        masks = NMSparsityCallback(
            setting.pattern,
            method,
            scale="supar" if setting.scale == "supar" else None,
            seed=setting.seed,
            show_tables=False,
            monitor=False,
        )
        callbacks, options, router = [masks], {"plugins": [plugin]}, plugin.router
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        max_steps=-1,
        check_val_every_n_epoch=1 << 30,
        num_sanity_val_steps=0,
        limit_val_batches=setting.val_batches,
        callbacks=[*callbacks, Baton(connection, router)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def train(setting: Setting, sparse: bool, precision: Precision, connection: Connection) -> None:
    """Train as granted, then send ``("validated", loss)``; an exception is sent as ``("error", message)``."""
    try:
        if setting.threads:
            torch.set_num_threads(setting.threads)
        torch.manual_seed(setting.seed)
        model = GPT(
            context=setting.context,
            dim=setting.width,
            depth=setting.layers,
            heads=setting.heads,
            lr=setting.lr,
        )
        data = HelpTopics(setting.context, setting.tokens // setting.context, seed=setting.seed)
        trainer = make_trainer(setting, sparse, precision, connection)
        trainer.fit(model, data)
        (found,) = trainer.validate(model, data, verbose=False)
        connection.send(("validated", found["val_loss"]))
    except (BrokenPipeError, EOFError):  # the other end is gone
        return
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))


def run(setting: Setting, sparse: bool, precision: Precision, connection: Connection) -> None:
    """:func:`train` in a process of its own, silent; Ctrl-C is for the process that compares."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    train(setting, sparse, precision, connection)
