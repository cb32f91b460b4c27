"""Latency over file size of dense and packed models, one picture for each measured model."""

from __future__ import annotations

from functools import partial
from typing import Any

from matplotlib.figure import Figure

from benchmarks.pictures.style import FONT, INK, QUIET, SERIES, Picture, plain
from benchmarks.tables.inference import MODELS, precision
from benchmarks.tables.markdown import read_json

COLOURS = (SERIES[0], SERIES[2], SERIES[1])  # of fp32, bf16 and int8
# Where a point's name stands, so that those of the three precisions do not overlap.
_LABELS = {"fp32": ((6, -9), "left"), "bf16": ((6, -12), "left"), "int8": ((-6, 3), "right")}


def data(file: str) -> Any:
    """``{shape: [[variant, megabytes, milliseconds], ...]}``: a packed model in the faster of eager and compiled.

    A dense variant has the file of its precision, one in int8 that of its runtime.
    """
    measured = read_json(file)
    sizes = {name: size / 1e6 for name, (size, _) in measured["bytes"].items()}
    found: dict[str, list[list[Any]]] = {}
    for shape, ms in measured["ms"].items():
        packed: dict[str, float] = {}
        found[shape] = []
        for name, milliseconds in ms.items():
            base = name.partition(",")[0]
            if base.startswith("packed"):
                packed[base] = min(milliseconds, packed.get(base, milliseconds))
            elif precision(name) == "int8":
                found[shape].append([name, sizes[base], milliseconds])
            else:
                found[shape].append([name, sizes[f"dense {precision(name)}"], milliseconds])
        found[shape] += [[name, sizes[name], milliseconds] for name, milliseconds in packed.items()]
    return found


def draw(figure: Figure, found: Any) -> None:
    """A panel for each shape of the input."""
    panels = figure.subplots(1, len(found), squeeze=False)[0]
    for axes, (shape, points) in zip(panels, found.items(), strict=True):
        plain(axes, f"{shape.replace('x', ' x ')} tokens")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for number, dtype in enumerate(("fp32", "bf16", "int8")):
            own = [point for point in points if precision(point[0]) == dtype]
            if not own:
                continue
            packed = sorted((x, y, name) for name, x, y in own if name.startswith("packed"))
            dense = [(x, y) for name, x, y in own if not name.startswith("packed")]
            colour = COLOURS[number]
            axes.plot(
                [x for x, *_ in packed],
                [y for _, y, _ in packed],
                color=colour,
                marker="o",
                label=f"packed {dtype}",
            )
            axes.scatter(
                *zip(*dense, strict=True), color=colour, marker="x", s=45, label=f"dense {dtype}"
            )
            for x, y, name in packed:
                at, side = _LABELS[dtype]
                style: Any = {"fontsize": FONT - 1, "color": colour, "ha": side}
                axes.annotate(name.split()[1], (x, y), at, textcoords="offset points", **style)
        fastest = min(point[2] for point in points if not point[0].startswith("packed"))
        axes.axhline(
            fastest, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)), label="fastest dense"
        )
        ticks = [10, 30, 100, 300]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        low, high = min(point[2] for point in points), max(point[2] for point in points)
        steps = [
            k * 10**e for e in range(-1, 5) for k in (1, 2, 5) if low / 1.6 < k * 10**e < high * 1.6
        ]
        axes.set_yticks(steps, [f"{step:g}" for step in steps])
        axes.set_ylim(low / 1.5, high * 1.3)
        axes.set_xlim(
            min(point[1] for point in points) / 2.2, max(point[1] for point in points) * 1.3
        )
        axes.minorticks_off()
        axes.set_xlabel("file, MB", fontsize=FONT, color=INK)
    panels[0].set_ylabel("latency, ms", fontsize=FONT, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=4, fontsize=FONT, frameon=False
    )


def pictures() -> dict[str, Picture]:
    """A picture for each model."""
    return {
        f"inference-{model}": Picture(partial(data, file), draw, (9, 4), file)
        for model, file in MODELS.items()
    }
