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
    r"""What the event files of a folder hold, as :func:`read_log` returns it.

    Example:
        >>> log = Log(["events.out.tfevents.1"], texts={"nm/layers": "| layer |\n| --- |\n| head |"})
        >>> log.table("nm/layers")
        [['layer'], ['head']]

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
    """Read the event files of a folder, without the images and histograms in them.

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
    kept_events = {
        "scalars": 0,
        "tensors": 0,
        "images": 1,
        "histograms": 1,
        "compressedHistograms": 1,
    }
    # Events of steps that were trained again are told apart by `latest`; TensorBoard would drop them, and say nothing.
    events = EventAccumulator(str(folder), kept_events, purge_orphaned_data=False)
    events.Reload()
    log = Log([path.name for path in files])
    _read_scalars(log, events)
    _read_texts(log, events)
    _read_maps(log, events)
    return log


def _read_scalars(log: Log, events: EventAccumulator) -> None:
    """Fill in the scalars, and the steps at which the run was restarted."""
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
    """Fill in the last text of each tag."""
    for tag in events.Tags()["tensors"]:
        if tag.endswith(TEXT):
            last_event = events.Tensors(tag)[-1]
            (text,) = last_event.tensor_proto.string_val
            log.texts[tag.removesuffix(TEXT)] = text.decode("utf-8", "replace")


def _read_maps(log: Log, events: EventAccumulator) -> None:
    """Fill in the heat maps: columns with the names of their rows, which hold until other names follow."""
    from tensorboard.util.tensor_util import make_ndarray

    for tag in events.Tags()["tensors"]:
        if tag != "nm/maps" and not tag.startswith("nm/maps/"):
            continue
        suffix = tag.removeprefix("nm/maps")
        names_from_step = _read_row_names(events, suffix)
        history = LayerHistory()
        for event in events.Tensors(tag):
            column = torch.tensor(
                make_ndarray(event.tensor_proto), dtype=torch.float32
            )  # [statistics, layers]
            fitting = []
            for step, names in names_from_step:
                if step <= event.step and len(names) == column.shape[1]:
                    fitting.append(names)
            if fitting:
                history.add(event.step, fitting[-1], column)
        log.maps[suffix.removeprefix("/")] = history


def _read_row_names(events: EventAccumulator, suffix: str) -> list[tuple[int, list[str]]]:
    """The names of a heat map's rows, with the steps from which they hold."""
    found = []
    for event in events.Tensors(f"nm/map_rows{suffix}{TEXT}"):
        (text,) = event.tensor_proto.string_val
        # A code block of Markdown: TensorBoard's page shows it as it is.
        names = json.loads(text.decode().strip("`json\n"))
        found.append((event.step, names))
    return found


def latest(events: Iterable[Any]) -> tuple[list[Any], set[int]]:
    """Return events with rising steps, and the steps to which a restart went back.

    An event replaces the earlier ones of its step and of later steps. A step that is logged again at once, as by two
    loggers' calls in one step, is no restart.

    Example:
        >>> from types import SimpleNamespace
        >>> kept, back = latest([SimpleNamespace(step=step) for step in (9, 19, 29, 19, 29)])
        >>> [event.step for event in kept], back
        ([9, 19, 29], {19})
    """
    kept: list[Any] = []
    back = set()
    for event in events:
        # What was logged after this step belongs to the training that the restart discarded.
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
    # By statistic and layer, from tags such as `nm/flip_rate/encoder.0`.
    series_of_statistic: dict[str, dict[str, Series]] = {}
    for tag, series in log.scalars.items():
        names = re.fullmatch("nm/([^/]+)/(.+)", tag)
        if names is not None:
            statistic, layer = names.groups()
            series_of_statistic.setdefault(statistic, {})[layer] = series

    # The table of layers has the model's order; scalars have none that means anything.
    rows = log.table("nm/layers")
    place_in_model = {row[0]: place for place, row in enumerate(rows)}

    def place_and_name(layer: str) -> tuple[int, str]:
        return place_in_model.get(layer, 0), layer

    found = {}
    for statistic, series_of_layer in series_of_statistic.items():
        layers = sorted(series_of_layer, key=place_and_name)
        found[statistic] = _history({layer: series_of_layer[layer] for layer in layers})
    return found


def _history(series_of_layer: dict[str, Series]) -> LayerHistory:
    """Columns of one statistic; NaN where a layer has no value at a step."""
    steps: set[int] = set()
    values_by_step = []  # of each layer
    for series in series_of_layer.values():
        steps.update(series.steps)
        values_by_step.append(dict(zip(series.steps, series.values, strict=True)))
    history = LayerHistory()
    for step in sorted(steps):
        values = [value_at.get(step, math.nan) for value_at in values_by_step]
        # A history has all of MAPS; those beside the first stay unknown.
        column = torch.full(
            (len(MAPS), len(series_of_layer)), torch.nan, dtype=torch.float32
        )  # [statistics, layers]
        column[0] = torch.tensor(values, dtype=torch.float32)
        history.add(step, list(series_of_layer), column)
    return history


def markdown_rows(text: str) -> Table:
    r"""Return the cells of a Markdown table, without the line below its head.

    Example:
        >>> markdown_rows("| a | b |\n| --- | --- |\n| 1\\|2 |   |")
        [['a', 'b'], ['1|2', '']]
    """
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    del lines[1:2]  # of dashes, if there is a table
    return [_cells(line) for line in lines]


def _cells(line: str) -> list[str]:
    between = line[1:-1]  # the outer bars
    cells = re.split(r"(?<!\\)\|", between)  # at bars without a backslash before them
    return [_unescaped(cell).strip() for cell in cells]


def _unescaped(cell: str) -> str:
    return re.sub(r"\\([\\|*_])", r"\1", cell)


def _nothing_in(folder: Path) -> str:
    """What is wrong with a folder without event files, and where there are some."""
    expected = "a folder with event files of TensorBoardLogger (events.out.tfevents.*), such as runs/<name>/version_0"
    if not folder.exists():
        return f"there is no folder '{folder}': expected {expected}"
    if not folder.is_dir():
        return f"'{folder}' is a file: expected {expected}"
    fault = f"'{folder}' holds no event files: expected {expected}"
    # Often the folder above that of a version was given.
    below = sorted({path.parent for path in folder.rglob("*tfevents*") if path.is_file()})
    if not below:
        return fault
    most_shown = 5
    some = [str(path) for path in below[:most_shown]]
    if len(below) > most_shown:
        some.append("...")
    return f"{fault}; there are some in {', '.join(some)}"
