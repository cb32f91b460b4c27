"""The event files of a run, read back."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_nm.callbacks.report.history import MAPS, LayerHistory

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TEXT = "/text_summary"  # the end of the tags that SummaryWriter gives texts

Table = list[list[str]]
"""Rows of cells; the first row is the head."""


@dataclass
class Series:
    """A scalar over the steps, rising; values may be NaN or infinite.

    Example:
        >>> series = Series([9, 19, 29], [2.0, math.nan, 1.0])
        >>> series.finite, series.first_bad
        ([(2.0, 9), (1.0, 29)], 19)
    """

    steps: list[int]
    values: list[float]

    @property
    def finite(self) -> list[tuple[float, int]]:
        """The finite values with their steps."""
        pairs = zip(self.values, self.steps, strict=True)
        return [(value, step) for value, step in pairs if math.isfinite(value)]

    @property
    def first_bad(self) -> int | None:
        """The first step with a value that is not finite."""
        for value, step in zip(self.values, self.steps, strict=True):
            if not math.isfinite(value):
                return step
        return None


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
    """Return the event files that lie in a folder itself, in the order in which they were written.

    Example:
        >>> event_files(Path("no_such_folder"))
        []
    """
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())


def read_log(folder: Path) -> Log:
    """Read the event files of a folder.

    Raises:
        ImportError: Without tensorboard.
        ValueError: If there are none, naming the folder and what is expected.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = event_files(folder)
    if not files:
        raise ValueError(_nothing_in(folder))
    # A file that ends in the middle of an event, as of an interrupted run, is no reason to worry.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # How many events of a tag are kept; 0 for all. Images and histograms are not read.
    sizes = {
        "scalars": 0,
        "tensors": 0,
        "images": 1,
        "histograms": 1,
        "compressedHistograms": 1,
    }
    # Events of steps that were trained again are told apart by `latest`; TensorBoard would drop them, and say nothing.
    events = EventAccumulator(str(folder), sizes, purge_orphaned_data=False).Reload()
    log = Log([path.name for path in files])
    _read_scalars(log, events)
    _read_texts(log, events)
    _read_maps(log, events)
    return log


def _read_scalars(log: Log, events: EventAccumulator) -> None:
    rewound: set[int] = set()
    for tag in events.Tags()["scalars"]:
        kept, went_back = latest(events.Scalars(tag))
        rewound |= went_back
        plain_tag = re.sub(r"^.+-(?=nm/)", "", tag)  # without a logger's prefix
        steps = [event.step for event in kept]
        values = [float(event.value) for event in kept]
        log.scalars[plain_tag] = Series(steps, values)
    log.rewound = sorted(rewound)


def _read_texts(log: Log, events: EventAccumulator) -> None:
    for tag in events.Tags()["tensors"]:
        if tag.endswith(TEXT):
            (text,) = events.Tensors(tag)[-1].tensor_proto.string_val
            log.texts[tag.removesuffix(TEXT)] = text.decode("utf-8", "replace")


def _read_maps(log: Log, events: EventAccumulator) -> None:
    """Join columns with the names of their rows, which hold until other names follow, in the order of writing."""
    from tensorboard.util.tensor_util import make_ndarray

    for tag in events.Tags()["tensors"]:
        if tag != "nm/maps" and not tag.startswith("nm/maps/"):
            continue
        suffix = tag.removeprefix("nm/maps")
        rows = []
        for event in events.Tensors(f"nm/map_rows{suffix}{TEXT}"):
            (text,) = event.tensor_proto.string_val
            names = json.loads(text.decode().strip("`json\n"))
            rows.append((event.step, names))
        history = LayerHistory()
        for event in events.Tensors(tag):
            column = torch.tensor(make_ndarray(event.tensor_proto))
            fitting = [
                names
                for step, names in rows
                if step <= event.step and len(names) == column.shape[1]
            ]
            if fitting:
                history.add(event.step, fitting[-1], column)
        log.maps[suffix.removeprefix("/")] = history


def latest(events: Iterable[Any]) -> tuple[list[Any], set[int]]:
    """Return the events whose steps rise, in which later ones replace those of their steps and after, and such steps.

    A step that is logged again at once, as by two loggers' calls in one step, is no restart.

    Example:
        >>> from types import SimpleNamespace
        >>> kept, back = latest([SimpleNamespace(step=step) for step in (9, 19, 29, 19, 29)])
        >>> [event.step for event in kept], back
        ([9, 19, 29], {19})
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

    Example:
        >>> log = Log([], scalars={"nm/flip_rate/net.0": Series([9], [0.25])})
        >>> layer_scalars(log)["flip_rate"].layers
        ['net.0']
    """
    series_of_statistic: dict[str, dict[str, Series]] = {}
    for tag, series in log.scalars.items():
        names = re.fullmatch("nm/([^/]+)/(.+)", tag)
        if names is not None:
            statistic, layer = names.groups()
            series_of_statistic.setdefault(statistic, {})[layer] = series

    place_in_model = {row[0]: place for place, row in enumerate(log.table("nm/layers"))}
    found = {}
    for statistic, series_of_layer in series_of_statistic.items():
        layers = sorted(series_of_layer, key=lambda layer: (place_in_model.get(layer, 0), layer))
        found[statistic] = _history({layer: series_of_layer[layer] for layer in layers})
    return found


def _history(series_of_layer: dict[str, Series]) -> LayerHistory:
    """Columns of one statistic; NaN where a layer has no value at a step."""
    steps: set[int] = set()
    value_of_step = []  # of each layer
    for series in series_of_layer.values():
        steps.update(series.steps)
        value_of_step.append(dict(zip(series.steps, series.values, strict=True)))
    history = LayerHistory()
    for step in sorted(steps):
        column = torch.full((len(MAPS), len(series_of_layer)), torch.nan)
        column[0] = torch.tensor([values.get(step, math.nan) for values in value_of_step])
        history.add(step, list(series_of_layer), column)
    return history


def markdown_rows(text: str) -> Table:
    r"""Return the cells of a Markdown table, without the line below its head.

    Example:
        >>> markdown_rows("| a | b |\n| --- | --- |\n| 1\\|2 |   |")
        [['a', 'b'], ['1|2', '']]
    """
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    del lines[1:2]
    return [_cells(line) for line in lines]


def _cells(line: str) -> list[str]:
    escaped = re.split(r"(?<!\\)\|", line[1:-1])
    return [re.sub(r"\\([\\|*_])", r"\1", cell).strip() for cell in escaped]


def _nothing_in(folder: Path) -> str:
    expected = "a folder with event files of TensorBoardLogger (events.out.tfevents.*), such as runs/<name>/version_0"
    if not folder.exists():
        return f"there is no folder '{folder}': expected {expected}"
    if not folder.is_dir():
        return f"'{folder}' is a file: expected {expected}"
    fault = f"'{folder}' holds no event files: expected {expected}"
    below = sorted({path.parent for path in folder.rglob("*tfevents*") if path.is_file()})
    if not below:
        return fault
    some = [str(path) for path in below[:5]]
    if len(below) > 5:
        some.append("...")
    return f"{fault}; there are some in {', '.join(some)}"
