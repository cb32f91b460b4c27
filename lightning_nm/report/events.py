"""The event files of a run, read back."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_nm.callbacks.report.history import MAPS, LayerHistory

Table = list[list[str]]
"""Rows of cells; the first row is the head."""


@dataclass
class Series:
    """A scalar over the steps, rising; values may be NaN or infinite."""

    steps: list[int]
    values: list[float]

    @property
    def finite(self) -> list[tuple[float, int]]:
        """The finite values with their steps."""
        return [(value, step) for step, value in zip(self.steps, self.values, strict=True) if math.isfinite(value)]

    @property
    def first_bad(self) -> int | None:
        """The first step with a value that is not finite."""
        return next((s for s, value in zip(self.steps, self.values, strict=True) if not math.isfinite(value)), None)


@dataclass
class Log:
    """What the event files of a folder hold.

    Attributes:
        files: Their names, in order.
        scalars: By tag; without a logger's prefix for the tags of ``nm/``.
        texts: The last text of each tag.
        maps: The columns of the heat maps, by the name of the callback, which is empty if there is one.
        rewound: The steps to which a restart went back. Of steps that were trained again the last values count.
    """

    files: list[str]
    scalars: dict[str, Series] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    maps: dict[str, LayerHistory] = field(default_factory=dict)
    rewound: list[int] = field(default_factory=list)

    def table(self, tag: str) -> Table:
        """Return the Markdown table that a text starts with; empty without that text."""
        return markdown_rows(self.texts.get(tag, ""))


def event_files(folder: Path) -> list[Path]:
    """Return the event files that lie in a folder itself, in the order in which they were written."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())


def read_log(folder: Path) -> Log:
    """Read the event files of a folder.

    Raises:
        ImportError: Without tensorboard.
        ValueError: If there are none, naming the folder and what is expected.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    files = event_files(folder)
    if not files:
        raise ValueError(_nothing_in(folder))
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # what a file that ends in the middle of an event causes
    sizes = {"scalars": 0, "tensors": 0, "images": 1, "histograms": 1, "compressedHistograms": 1}
    events = EventAccumulator(str(folder), sizes, purge_orphaned_data=False).Reload()
    tags = events.Tags()
    log = Log([path.name for path in files])
    rewound: set[int] = set()
    for tag in tags["scalars"]:
        kept, back = latest(events.Scalars(tag))
        rewound |= back
        plain = re.sub(r"^.+-(?=nm/)", "", tag)
        log.scalars[plain] = Series([event.step for event in kept], [float(event.value) for event in kept])
    for tag in tags["tensors"]:
        if tag.endswith("/text_summary"):
            (text,) = events.Tensors(tag)[-1].tensor_proto.string_val
            log.texts[tag.removesuffix("/text_summary")] = text.decode("utf-8", "replace")
    for tag in tags["tensors"]:
        if tag == "nm/maps" or tag.startswith("nm/maps/"):
            rows = [
                (event.step, json.loads(event.tensor_proto.string_val[0].decode().strip("`json\n")))
                for event in events.Tensors(f"{tag.replace('maps', 'map_rows', 1)}/text_summary")
            ]
            columns = [(event.step, make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
            log.maps[tag.removeprefix("nm/maps").removeprefix("/")] = _history(rows, columns)
    log.rewound = sorted(rewound)
    return log


def latest(events: Iterable[Any]) -> tuple[list[Any], set[int]]:
    """Return the events whose steps rise, in which later ones replace those of their steps and after, and such steps.

    A step that is logged again at once, as by two loggers' calls in one step, is no restart.
    """
    kept: list[Any] = []
    back = set()
    for event in events:
        if kept and event.step < kept[-1].step:
            back.add(event.step)
        while kept and kept[-1].step >= event.step:
            kept.pop()
        kept.append(event)
    return kept, back


def layer_scalars(log: Log) -> dict[str, LayerHistory]:
    """Return the statistics that were logged for every layer (``log_layers``), as heat maps have them.

    Each history has one statistic, at the place of the first of :data:`MAPS`.
    """
    order = {row[0]: place for place, row in enumerate(log.table("nm/layers"))}  # the model's
    layers = sorted({_layer_of(tag) for tag in log.scalars} - {""}, key=lambda name: (order.get(name, 0), name))
    found: dict[str, LayerHistory] = {}
    for statistic in dict.fromkeys(tag.split("/")[1] for tag in log.scalars if _layer_of(tag)):
        series = {name: log.scalars.get(f"nm/{statistic}/{name}") for name in layers}
        values = {
            name: dict(zip(one.steps, one.values, strict=True)) for name, one in series.items() if one is not None
        }
        history = LayerHistory()
        for step in sorted({step for one in values.values() for step in one}):
            column = torch.full((len(MAPS), len(values)), torch.nan)
            column[0] = torch.tensor([one.get(step, math.nan) for one in values.values()])
            history.add(step, list(values), column)
        found[statistic] = history
    return found


def _layer_of(tag: str) -> str:
    """The layer of a scalar of one layer, else empty."""
    parts = tag.split("/", 2)
    return parts[2] if len(parts) == 3 and parts[0] == "nm" else ""


def _history(rows: list[tuple[int, list[str]]], columns: list[tuple[int, Any]]) -> LayerHistory:
    """Join columns with the names of their rows, which hold until other names follow, in the order of writing."""
    history = LayerHistory()
    for step, column in columns:
        fitting = [names for at, names in rows if at <= step and len(names) == column.shape[1]]
        if fitting:
            history.add(step, fitting[-1], torch.tensor(column))
    return history


def markdown_rows(text: str) -> Table:
    r"""Return the cells of a Markdown table, without the line below its head.

    Example:
        >>> markdown_rows("| a | b |\n| --- | --- |\n| 1\\|2 |   |")
        [['a', 'b'], ['1|2', '']]
    """
    return list(_rows(line for line in text.splitlines() if line.startswith("|")))


def _rows(lines: Iterable[str]) -> Iterator[list[str]]:
    for number, line in enumerate(lines):
        if number != 1:
            cells = re.split(r"(?<!\\)\|", line.strip()[1:-1])
            yield [re.sub(r"\\([\\|*_])", r"\1", cell).strip() for cell in cells]


def _nothing_in(folder: Path) -> str:
    expected = "a folder with event files of TensorBoardLogger (events.out.tfevents.*), such as runs/<name>/version_0"
    if not folder.exists():
        return f"there is no folder '{folder}': expected {expected}"
    if not folder.is_dir():
        return f"'{folder}' is a file: expected {expected}"
    below = sorted({path.parent for path in folder.rglob("*tfevents*") if path.is_file()})
    hint = f"; there are some in {', '.join(map(str, below[:5]))}{', ...' if len(below) > 5 else ''}" if below else ""
    return f"'{folder}' holds no event files: expected {expected}{hint}"
