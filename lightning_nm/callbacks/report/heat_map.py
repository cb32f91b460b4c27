"""Heat maps layer x step, drawn with Pillow, which TensorBoard's images need anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

PLOT_WIDTH, PLOT_HEIGHT = 640, 560  # of the map without labels, in pixels; few rows make it lower, many rows higher
MOST_ROWS = 1000  # more layers than this share rows
ROW, LINE, LETTER = 18, 15, 12  # pixels of a row at most, of a line of text, of a letter
NAME = 44  # characters of a name
MARGIN = 10
GREY, BLACK = (208, 208, 208), (32, 32, 32)
# From dark to light at equal steps of lightness: viridis at eighths.
RAMP = np.array(
    [
        *([68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140]),
        *([40, 174, 128], [94, 201, 98], [173, 220, 48], [253, 231, 37]),
    ],
    dtype=np.float64,
)


def colours(shares: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the colours of numbers in [0, 1], uint8 with a last axis of 3; NaN is grey."""
    places = np.nan_to_num(np.clip(shares, 0, 1)) * (len(RAMP) - 1)
    channels = [np.interp(places, np.arange(len(RAMP)), RAMP[:, channel]) for channel in range(3)]
    found = np.stack(channels, -1).round().astype(np.uint8)
    found[np.isnan(shares)] = GREY
    return found


def ticks(first: float, last: float, most: int = 6) -> list[float]:
    """Return at most about so many round numbers between two numbers: multiples of 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(0, 345)
        [0, 100, 200, 300]
    """
    if last <= first:
        return [first]
    rough = (last - first) / most
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    digits = max(0, -math.floor(math.log10(width)))
    found = [round(width * k, digits) for k in range(math.ceil(first / width), math.floor(last / width) + 1)]
    return [int(number) if number == int(number) else number for number in found]


def column_of_pixel(steps: Sequence[int], width: int) -> NDArray[np.int64]:
    """Return the column that each of ``width`` pixels shows; a column reaches from the step before it to its own."""
    edges = np.linspace(_start(steps), steps[-1], width + 1)
    return np.minimum(np.searchsorted(np.asarray(steps), (edges[:-1] + edges[1:]) / 2), len(steps) - 1)


def _start(steps: Sequence[int]) -> int:
    """The step before the first column, which is as wide as the second one."""
    return steps[0] - (steps[1] - steps[0] if len(steps) > 1 else 1)


def draw_heat_map(title: str, layers: Sequence[str], steps: Sequence[int], values: Tensor, root: bool) -> Any:
    """Draw a statistic of layers over steps.

    Args:
        title: The heading.
        layers: Names of the rows, from the top.
        steps: The steps of the columns, rising.
        values: ``[columns, layers]``; NaN is grey.
        root: Colour by the square root, from 0 on, so that small values differ; else from the least to the largest.

    Returns:
        uint8 array ``[3, height, width]``. With more than 40 layers not every row is named; more than 1000 share rows.

    Raises:
        ImportError: Without Pillow.
    """
    from PIL import Image, ImageDraw

    rows = values.double().numpy().T
    share = math.ceil(len(layers) / MOST_ROWS)
    if share > 1:
        rows = np.stack([_mean(rows[k : k + share]) for k in range(0, len(layers), share)])
    height = max(1, min(ROW, PLOT_HEIGHT // len(rows)))
    known = rows[~np.isnan(rows)]
    low, high = (0.0 if root else float(known.min()), float(known.max())) if known.size else (0.0, 1.0)

    font = _font()
    names = _short(layers)[::share]
    every = math.ceil(LINE / height)  # rows from one name to the next
    notes = [f"one name for {every * share} layers"] if every * share > 1 else []
    notes += [f"mean of {share} layers in a row"] if share > 1 else []
    left = MARGIN + math.ceil(max(font.getlength(name) for name in names[::every])) + MARGIN
    top, bottom = MARGIN + 2 * LINE, MARGIN + 2 * LINE + height * len(rows)
    right = left + PLOT_WIDTH
    size = (right + 120, max(bottom, top + 120) + 3 * LINE + MARGIN)
    image = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(image)

    draw.text((left, MARGIN), "; ".join([title, *notes]), BLACK, font)
    shares = _shares(rows, low, high, root)[:, column_of_pixel(steps, PLOT_WIDTH)]
    image.paste(Image.fromarray(colours(np.repeat(shares, height, 0))), (left, top))
    for k in range(0, len(rows), every):
        middle = top + k * height + height // 2
        draw.text((left - 6 - font.getlength(names[k]), middle - LINE // 2), names[k], BLACK, font)
        draw.line((left - 4, middle, left - 1, middle), BLACK)
    first, last = _start(steps), steps[-1]
    for step in ticks(max(first, 0), last):
        x = left + int((step - first) / (last - first) * (PLOT_WIDTH - 1))
        draw.line((x, bottom, x, bottom + 3), BLACK)
        draw.text((x - font.getlength(str(step)) / 2, bottom + 5), str(step), BLACK, font)
    draw.text((left + PLOT_WIDTH / 2 - font.getlength("step") / 2, bottom + 5 + LINE), "step", BLACK, font)
    _draw_bar(image, draw, font, (right + 24, top, max(bottom, top + 120)), (low, high), root)
    return np.asarray(image).transpose(2, 0, 1)


def _draw_bar(
    image: Any, draw: Any, font: Any, place: tuple[int, int, int], bounds: tuple[float, float], root: bool
) -> None:
    """Draw the colours of values, at ``place``: left, top, bottom."""
    from PIL import Image

    (left, top, bottom), (low, high) = place, bounds
    if high <= low:
        image.paste(Image.fromarray(colours(np.full((16, 14), 0.5))), (left, top))
        draw.text((left + 20, top + 1), f"{low:.3g}", BLACK, font)
        return
    image.paste(Image.fromarray(colours(np.repeat(np.linspace(1, 0, bottom - top)[:, None], 14, 1))), (left, top))
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + (high - low) * (share**2 if root else share)
        y = bottom - 1 - share * (bottom - top - 1)
        draw.line((left + 14, y, left + 17, y), BLACK)
        draw.text((left + 20, y - LINE / 2), f"{value:.3g}", BLACK, font)


def _shares(rows: NDArray[np.float64], low: float, high: float, root: bool) -> NDArray[np.float64]:
    if high <= low:
        return np.where(np.isnan(rows), np.nan, 0.5)
    shares = (rows - low) / (high - low)
    return np.sqrt(np.maximum(shares, 0)) if root else shares


def _mean(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The mean of rows, ignoring NaN."""
    known = ~np.isnan(rows)
    sums, counts = np.where(known, rows, 0).sum(0), known.sum(0)
    return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def _font() -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.load_default(LETTER)
    except TypeError:  # Pillow before 10.1 has one size
        return ImageFont.load_default()


def _short(names: Sequence[str]) -> list[str]:
    """Shorten long names, if need be by what all of them start with, in characters that every font of Pillow has."""
    names = [name.encode("ascii", "replace").decode() for name in names]
    if max(map(len, names)) > NAME and len(names) > 1:
        parts = [name.split(".") for name in names]
        common = next((k for k, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1), 0)
        names = ["..." + ".".join(part[common:]) if common else ".".join(part) for part in parts]
    half = NAME // 2
    return [name if len(name) <= NAME else f"{name[:half]}...{name[3 - half :]}" for name in names]
