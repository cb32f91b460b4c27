"""Starts the sides as processes and lets them train in turn, so that noise of the machine hits both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median
from time import perf_counter
from typing import Any

from studies.speed.curves import Curve
from studies.speed.processes import context
from studies.speed.side import PRECISIONS, Grant, Precision, Setting, run

PILOT_STEPS, PILOT_S, MOST_PILOT_STEPS = 3, 4.0, 12
"""Counted steps of each precision: at least 3, then more until so many seconds are over or there are 12."""
TOO_SLOW = 3.0
"""How much slower the first step of a precision must be for it to get no second one."""
BLOCK_S = 3.0
"""Seconds of training after which the other side has its turn; a step is never cut."""
LEAST_STEPS = 20
"""Steps that each side makes at least, however long they take."""

Watch = Callable[[str], None]


class SideError(RuntimeError):
    """A side failed; the message is the side's."""


class Side:
    """A side's process, its connection and its curve."""

    def __init__(self, process: BaseProcess | None, connection: Connection, curve: Curve) -> None:
        self.process, self.connection, self.curve = process, connection, curve
        self.idle = False

    def grant(self, grant: Grant) -> None:
        """Let the side make the steps of a grant; return when they are made."""
        self.wait()
        self.connection.send(grant)
        self.idle = False
        self.wait()

    def wait(self) -> None:
        """Take the side's messages until it waits for a grant."""
        while not self.idle:
            kind, *content = self._receive()
            if kind == "step":
                self.curve.add(*content)
            elif kind == "idle":
                self.idle = True
                self.curve.kernels = content[0]
            else:
                raise SideError(f"the {self.curve.name} side sent {kind!r} while it trained")

    def finish(self) -> None:
        """End the training, and wait for the validation loss."""
        self.wait()
        self.connection.send(None)
        kind, *content = self._receive()
        if kind != "validated":
            raise SideError(
                f"the {self.curve.name} side sent {kind!r} instead of a validation loss"
            )
        self.curve.val_loss = content[0]

    def _receive(self) -> Any:
        name = f"the {self.curve.name} side ({self.curve.precision})"
        try:
            message = self.connection.recv()
        except EOFError:
            raise SideError(
                f"{name} ended: its process was killed, perhaps for want of memory"
            ) from None
        if message[0] == "error":
            raise SideError(f"{name} failed: {message[1]}")
        return message


@contextmanager
def sides(setting: Setting, *wanted: tuple[str, Precision]) -> Iterator[list[Side]]:
    """Processes of sides, each a name (``"sparse"`` or ``"dense"``) and a precision; killed at the end."""
    start = context()
    started: list[Side] = []
    try:
        for name, precision in wanted:
            here, there = start.Pipe()
            process = start.Process(
                target=run, args=(setting, name == "sparse", precision, there), daemon=True
            )
            process.start()
            there.close()
            started.append(Side(process, here, Curve(name, precision, setting.tokens)))
        yield started
    finally:
        for side in started:
            if side.process is not None:
                side.process.kill()
                side.process.join()
            side.connection.close()


def faster_precision(
    candidates: list[Side], watch: Watch, clock: Callable[[], float] = perf_counter
) -> dict[Precision, float]:
    """Median seconds of a step in each precision, the fastest first.

    The sides make a step in turn. The first one does not count, but a precision that is three times slower in it makes
    no other.
    """

    def step() -> None:
        for side in candidates:
            watch(f"measuring dense steps in {side.curve.precision}")
            side.grant(Grant(steps=1))

    step()
    best = min(map(_first, candidates))
    too_slow = {
        side.curve.precision: _first(side) for side in candidates if _first(side) > TOO_SLOW * best
    }
    candidates = [side for side in candidates if side.curve.precision not in too_slow]
    begin, steps = clock(), 0
    while (
        len(candidates) > 1
        and (steps < PILOT_STEPS or clock() - begin < PILOT_S)
        and steps < MOST_PILOT_STEPS
    ):
        step()
        steps += 1
    found = {
        side.curve.precision: median(side.curve.seconds or [_first(side)]) for side in candidates
    }
    return dict(sorted(found.items(), key=lambda item: item[1])) | too_slow


def _first(side: Side) -> float:
    assert side.curve.start_s is not None
    return side.curve.start_s


def pilot(setting: Setting, watch: Watch) -> dict[Precision, float]:
    """:func:`faster_precision` of the dense side on this machine."""
    with sides(setting, *(("dense", precision) for precision in PRECISIONS)) as candidates:
        return faster_precision(candidates, watch)


def race(pair: list[Side], seconds: float, watch: Watch) -> None:
    """Let two sides train in turn, each for so many seconds and for twenty steps at least, then validate both.

    The side with fewer seconds of training is next. The first step of each does not count.

    Args:
        pair: The sides.
        seconds: Of training, of each side.
        watch: Is told what happens.
    """
    for side in pair:
        watch(
            f"first step of the {side.curve.name} side"
            + ", measuring kernels" * (side.curve.name == "sparse")
        )
        side.grant(Grant(steps=1))
    while waiting := [side for side in pair if not _has_enough(side.curve, seconds)]:
        side = min(waiting, key=lambda side: side.curve.total_s)
        side.grant(Grant(steps=1, seconds=min(BLOCK_S, seconds)))
        watch(progress(pair))
    for side in pair:
        watch(f"validating the {side.curve.name} side")
        side.finish()


def _has_enough(curve: Curve, seconds: float) -> bool:
    """Whether a side has trained as long as asked for, and made the steps that a comparison needs."""
    return curve.total_s >= seconds and len(curve.seconds) >= LEAST_STEPS


def progress(pair: list[Side]) -> str:
    """Steps and losses so far, in one line."""
    return " | ".join(
        f"{s.curve.name} {len(s.curve.losses)} steps, loss {s.curve.loss_at(len(s.curve.losses)):.3f}"
        for s in pair
        if s.curve.losses
    )
