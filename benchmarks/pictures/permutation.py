"""Bi-Mask's permutation: a small weight whose backward mask keeps more when its rows are permuted."""

from __future__ import annotations

from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.pictures.style import FONT, INK, KEPT, LOST, PRUNED, QUIET, Picture, blank
from lightning_nm import functional as nmf

SIZE = 8
PATTERN = "2:4"


def data() -> Any:
    """The rows in the old and the new order, and which entries the forward mask and both backward masks keep."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(1, 100, (SIZE, SIZE), generator=generator).float()
    forward = nmf.nm_mask(weight, PATTERN)
    identity = torch.arange(SIZE)
    found = nmf.search_permutation(weight, forward, PATTERN, candidates=200, generator=generator)
    orders = {"rows as they are": identity, "rows permuted": found}
    return {
        "forward": forward.int().tolist(),
        **{
            title: {
                "rows": order.tolist(),
                "kept": nmf.backward_mask(weight, forward, PATTERN, order).int().tolist(),
            }
            for title, order in orders.items()
        },
    }


def draw(figure: Figure, found: Any) -> None:
    """The weight before and after the permutation."""
    panels = figure.subplots(1, 2)
    forward = found.pop("forward")
    total = sum(map(sum, forward))
    for axes, (title, order) in zip(panels, found.items(), strict=True):
        lost = total - sum(map(sum, order["kept"]))
        blank(axes)
        axes.text(
            -0.6,
            -1.25,
            f"{title}: {lost} of {total} kept entries lost",
            fontsize=FONT + 1,
            color=INK,
        )
        _matrix(axes, forward, order)
    kinds = {"kept by both masks": KEPT, "kept by the forward mask alone": LOST, "pruned": PRUNED}
    handles = [
        Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor="white") for colour in kinds.values()
    ]
    figure.legend(
        handles, list(kinds), loc="outside lower center", ncols=3, fontsize=FONT, frameon=False
    )


def _matrix(axes: Axes, forward: list[list[int]], order: dict[str, Any]) -> None:
    for position, row in enumerate(order["rows"]):
        y = position + 0.35 * (position // 4)
        for column in range(SIZE):
            kept, passed = order["kept"][row][column], forward[row][column]
            colour = KEPT if kept else LOST if passed else PRUNED
            x = column + 0.35 * (column // 4)
            axes.add_patch(Rectangle((x, y), 0.92, 0.92, facecolor=colour))
        axes.text(-0.25, y + 0.5, str(row), ha="right", va="center", fontsize=FONT, color=INK)
    for block in range(SIZE // 4):
        y = block * 4.35 + 2
        axes.text(SIZE + 0.6, y, "2 of 4\nper column", va="center", fontsize=FONT - 1, color=QUIET)
    axes.text(-0.25, -0.35, "row", ha="right", va="center", fontsize=FONT - 1, color=QUIET)
    axes.set_xlim(-1, SIZE + 2.8)
    axes.set_ylim(SIZE + 0.5, -2)


PICTURE = Picture(data, draw, (9, 4))
