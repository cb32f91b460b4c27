"""The three GEMMs of a linear layer: which operand is N:M, and along which axis."""

from __future__ import annotations

from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.pictures.style import FONT, INK, KEPT, LINE, PRUNED, QUIET, Picture, blank


class Product(NamedTuple):
    """A GEMM ``left @ right``: the sparse operand with its blocks along the axis that is summed over."""

    title: str
    formula: str
    left: str
    right: str
    result: str
    summed: str
    sparse: str


PRODUCTS = (
    Product(
        "forward", "Y = X Wᵀ", "X\ntokens × in", "Wᵀ\nin × out", "Y\ntokens × out", "in", "right"
    ),
    Product(
        "dgrad", "dX = dY W", "dY\ntokens × out", "W\nout × in", "dX\ntokens × in", "out", "right"
    ),
    Product(
        "wgrad",
        "dW = dYᵀ X",
        "dYᵀ\nout × tokens",
        "X\ntokens × in",
        "dW\nout × in",
        "tokens",
        "left",
    ),
)
# Which GEMMs a method makes sparse on N:M hardware.
METHODS = {
    "ste, sr-ste, asp, bame": (True, False, False),
    "transposable": (True, True, False),
    "bi-mask": (True, True, False),
    "dense + mvue": (False, False, True),
    "transposable + mvue": (True, True, True),
}
HOW = {
    "transposable": (1, "one mask"),
    "bi-mask": (1, "rows permuted"),
    "dense + mvue": (2, "sampled dY"),
}
HOW |= {"transposable + mvue": (2, "sampled dY")}


def data() -> Any:
    """What the diagram says."""
    return [[product._asdict() for product in PRODUCTS], METHODS, HOW]


def draw(figure: Figure, found: Any) -> None:
    """The GEMMs above, and the methods below."""
    top, bottom = figure.subplots(2, 1, height_ratios=[1.15, 1])
    blank(top)
    bottom.set_axis_off()
    top.set_xlim(0, 30)
    top.set_ylim(8, -1.6)
    for number, product in enumerate(PRODUCTS):
        _product(top, 0.4 + 10 * number, product)
    bottom.set_xlim(0, 30)
    bottom.set_ylim(len(METHODS) + 0.2, -1.1)
    bottom.text(0.4, -0.5, "method and estimator", fontsize=FONT, color=QUIET, va="center")
    for column, product in enumerate(PRODUCTS):
        bottom.text(
            13 + 6.2 * column,
            -0.5,
            product.title,
            fontsize=FONT,
            color=QUIET,
            ha="center",
            va="center",
        )
    for row, (name, sparse) in enumerate(METHODS.items()):
        bottom.plot([0.4, 29.6], [row, row], color=LINE, linewidth=0.8)
        bottom.text(0.4, row + 0.5, name, fontsize=FONT, color=INK, va="center")
        for column, is_sparse in enumerate(sparse):
            place, how = HOW.get(name, (-1, ""))
            text = "dense" if not is_sparse else f"N:M, {how}" if place == column else "N:M"
            weight = "bold" if is_sparse else "normal"
            colour = KEPT if is_sparse else QUIET
            x = 13 + 6.2 * column
            bottom.text(
                x,
                row + 0.5,
                text,
                fontsize=FONT,
                color=colour,
                weight=weight,
                ha="center",
                va="center",
            )


def _product(axes: Axes, x: float, product: Product) -> None:
    """Two operands, the sparse one with its blocks, and the axis that is summed over."""
    axes.text(
        x,
        -1,
        f"{product.title}:  {product.formula}",
        fontsize=FONT + 1,
        color=INK,
        weight="bold",
        va="center",
    )
    _matrix(axes, x, product.left, along="x" if product.sparse == "left" else "")
    axes.text(x + 4.27, 2, "×", fontsize=FONT + 3, color=INK, ha="center", va="center")
    _matrix(axes, x + 4.65, product.right, along="y" if product.sparse == "right" else "")
    where = "in each row" if product.sparse == "left" else "in each column"
    axes.text(
        x,
        7.1,
        f"sums over {product.summed}: N of M {where}",
        fontsize=FONT,
        color=KEPT,
        va="center",
    )


def _matrix(axes: Axes, x: float, text: str, along: str) -> None:
    name, shape = text.split("\n")
    for i in range(4):
        for j in range(4):
            position, other = (j, i) if along == "x" else (i, j)
            kept = along and position in ((0, 2), (1, 2), (0, 3), (1, 3))[other]
            colour = KEPT if kept else PRUNED if along else "#c9d4e5"
            axes.add_patch(Rectangle((x + j, i), 0.92, 0.92, facecolor=colour))
    axes.text(x + 2, 4.65, name, fontsize=FONT, color=INK, ha="center", va="center", weight="bold")
    axes.text(x + 2, 5.7, shape, fontsize=FONT - 1, color=QUIET, ha="center", va="center")


PICTURE = Picture(data, draw, (9, 5.2))
