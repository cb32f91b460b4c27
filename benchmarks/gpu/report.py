"""Answers as they come: each question stands alone, and what fails is an answer, too."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.apart import messages
from benchmarks.gpu.setting import NotAsked, Setting

Answer = dict[str, object]
Question = Callable[[Setting], object]


class Report:
    """Asks the questions of a part, within a time.

    Args:
        setting: Where.
        seconds: The time; questions that come after its end are not asked.
        record: Takes the name of each question and its answer, ``{"value": ...}``, ``{"error": ...}`` or
            ``{"not asked": ...}``, with the seconds it took.
        only: First words of the names of the questions to ask, all of them if empty.
    """

    def __init__(
        self,
        setting: Setting,
        seconds: float,
        record: Callable[[str, Answer], object],
        only: Sequence[str] = (),
    ) -> None:
        self.setting = setting
        self.record = record
        self.only = only
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def ask(
        self, name: str, question: Question, *, apart: bool = False, seconds: float = 60
    ) -> object:
        """Ask one question, and record the answer or why there is none.

        Args:
            name: Under which the answer is recorded.
            question: Called with the setting; returns plain values: numbers, strings, lists and dictionaries.
            apart: Whether it may crash, and has to be asked in a process of its own; it can be pickled.
            seconds: The longest that a process of its own may take.

        Returns:
            The answer; None without one.
        """
        if self.only and name.split()[0] not in self.only:
            return None
        start = time.monotonic()
        try:
            if self.left <= 0:
                answer: Answer = {"not asked": "the time was up"}
            elif apart and not self.setting.dry_run:
                (answer,) = messages(_ask, question, self.setting, seconds=min(seconds, self.left))
            else:
                answer = _answer(question, self.setting)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
        self.record(name, answer | {"seconds": round(time.monotonic() - start, 2)})
        return answer.get("value")


# Not in __main__: a process that is forked from a server does not import that module.
def run_part(
    send: Callable[[tuple[str, Answer]], object],
    module: str,
    setting: Setting,
    seconds: float,
    only: Sequence[str],
) -> None:
    """Run one part, and send each answer as it is known."""
    part: Any = importlib.import_module(module)
    part.run(Report(setting, seconds, lambda name, answer: send((name, answer)), only))


def _answer(question: Question, setting: Setting) -> Answer:
    try:
        return {"value": plain(question(setting))}
    except NotAsked as reason:
        return {"not asked": str(reason)}


def _ask(send: Callable[[Answer], None], question: Question, setting: Setting) -> None:
    send(_answer(question, setting))


def plain(value: object) -> object:
    """Bring values into what JSON knows: floats of four digits, infinity and NaN as text.

    Example::

        >>> plain({"a": (1.23456, float("inf")), 2: None})
        {'a': [1.235, 'inf'], '2': None}
    """
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        rounded = float(f"{value:.4g}")  # the largest floats round to infinity
        return rounded if math.isfinite(rounded) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
