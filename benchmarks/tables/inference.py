"""Tables of ``python -m benchmarks.inference --json``: latency, file and memory of dense and packed models."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from benchmarks import rivals
from benchmarks.tables.markdown import Tables, read_json, table, time_text

MODELS = {"decoder": "inference-decoder.json", "minilm": "inference-minilm.json"}


def precision(variant: str) -> str:
    """``fp32``, ``bf16`` or ``int8``.

    Example:
        >>> precision("dense bf16, compiled"), precision("packed 1:16 fp32")
        ('bf16', 'fp32')
    """
    found = re.search(r"\b(fp32|bf16|int8)\b", variant)
    if found is None:
        raise ValueError(f"the variant {variant!r} names no precision, fp32, bf16 or int8")
    return found[1]


def fastest_dense(ms: dict[str, float], dtype: str | None = None) -> tuple[str, float]:
    """The fastest dense variant in floating point, or of one precision, which may be int8."""
    wanted = ("fp32", "bf16") if dtype is None else (dtype,)
    dense = {name: time for name, time in ms.items() if not name.startswith("packed")}
    return min(
        ((name, time) for name, time in dense.items() if precision(name) in wanted),
        key=lambda i: i[1],
    )


def latency(file: str) -> str:
    """Milliseconds of every variant, and the gains of packed ones."""
    shapes: dict[str, dict[str, float]] = read_json(file)["ms"]
    has_rivals = any(rivals.fastest(ms) for ms in shapes.values())
    titles = ["gain over the fastest dense", "over the fastest dense of its precision"]
    if has_rivals:
        titles.append("over the fastest dense int8")
    header = ["batch x tokens", "variant", "ms", *titles]
    rows = []
    for shape, ms in shapes.items():
        for name, time in ms.items():
            gains = [""] * len(titles)
            if name.startswith("packed"):
                others = [fastest_dense(ms), fastest_dense(ms, precision(name))]
                if has_rivals:
                    others.append(fastest_dense(ms, "int8"))
                gains = [f"{dense / time:.2f}x ({other})" for other, dense in others]
            elif name == fastest_dense(ms)[0]:
                gains[0] = "the fastest dense"
            rows.append([shape.replace("x", " x "), name, f"{time:.2f}", *gains])
    return table(header, rows)


def summary(file: str) -> str:
    """The gains of packed variants alone: over the fastest dense one of any precision, and of the same."""
    shapes: dict[str, dict[str, float]] = read_json(file)["ms"]
    packed = [name for name in next(iter(shapes.values())) if name.startswith("packed")]
    rows = []
    for name in packed:
        cells = []
        for ms in shapes.values():
            every, own = fastest_dense(ms)[1], fastest_dense(ms, precision(name))[1]
            cells.append(f"{ms[name]:.1f} ms: {every / ms[name]:.2f}x, {own / ms[name]:.2f}x")
        rows.append([name.removeprefix("packed "), *cells])
    return table(["packed", *(shape.replace("x", " x ") for shape in shapes)], rows)


def sizes(file: str) -> str:
    """Bytes of the files, and resident bytes of a process that answers once."""
    weighed: dict[str, Any] = read_json(file)["bytes"]
    dense = {
        precision(name): size
        for name, (size, _) in weighed.items()
        if not name.startswith("packed")
    }
    rows = []
    for name, (size, memory) in weighed.items():
        # Every runtime has an int8 file of its own.
        if rivals.is_rival(name):
            rows.append([name, f"{size / 1e6:.1f}", "-", "-"])
            continue
        resident = "-" if memory is None else f"{memory / 1e6:.1f}"
        rows.append([name, f"{size / 1e6:.1f}", f"{size / dense[precision(name)]:.2f}", resident])
    return table(["variant", "file, MB", "of dense in its precision", "resident, MB"], rows)


def of_rivals(file: str) -> str:
    """The dense model in int8 by other runtimes: file, difference of the output, and milliseconds of each shape."""
    measured = read_json(file)
    shapes: dict[str, dict[str, float]] = measured["ms"]
    differences: dict[str, dict[str, float]] = measured.get("differences", {})
    names = [name for name in next(iter(shapes.values())) if rivals.is_rival(name)]
    rows = []
    for name in names:
        size = measured["bytes"].get(name, [None])[0]
        worst = max(each[name] for each in differences.values() if name in each)
        times = [f"{ms[name]:.2f}" if name in ms else "-" for ms in shapes.values()]
        rows.append([name, "" if size is None else f"{size / 1e6:.1f}", f"{worst:.3f}", *times])
    columns = [f"{shape.replace('x', ' x ')}, ms" for shape in shapes]
    return table(["dense in int8", "file, MB", "relative difference", *columns], rows)


def cold(file: str) -> str:
    """Seconds and largest memory of a process's first requests, when nothing has been measured yet."""
    answered: dict[str, tuple[float, int]] = read_json(file)["cold"]
    rows = [
        [name, f"{seconds:.2f}", f"{most / 1e6:.1f}"] for name, (seconds, most) in answered.items()
    ]
    return table(["variant, kernels", "24 requests, s", "largest resident, MB"], rows)


def fastest(file: str) -> str:
    """The fastest way to run the model of each precision and pattern: its file, its latencies, its gain over int8."""
    measured = read_json(file)
    shapes: dict[str, dict[str, float]] = measured["ms"]
    megabytes = {name: size / 1e6 for name, (size, _) in measured["bytes"].items()}
    rows = []
    for precision_of_row in ("fp32", "bf16", "int8"):
        times = [fastest_dense(ms, precision_of_row)[1] for ms in shapes.values()]
        sizes_of_row = [
            size
            for name, size in megabytes.items()
            if not name.startswith("packed") and precision(name) == precision_of_row
        ]
        cells = [f"{time_text(time)} ms" for time in times]
        rows.append([f"dense, {_NAMES[precision_of_row]}", f"{min(sizes_of_row):.0f} MB", *cells])
    for pattern in ("2:4", "1:4", "1:16"):
        name = f"packed {pattern} int8"
        cells = []
        for ms in shapes.values():
            time = min(each for other, each in ms.items() if other.startswith(name))
            dense = fastest_dense(ms, "int8")[1]
            cells.append(f"{time_text(time)} ms, **{dense / time:.1f}x**")
        rows.append([f"{pattern}, int8", f"{megabytes[name]:.0f} MB", *cells])
    columns = [shape.removeprefix("1x").replace("x", " x ") for shape in shapes]
    return table(["weights", "file", *(f"tokens: {column}" for column in columns)], rows)


_NAMES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}
_DECODER = MODELS["decoder"]
_HAS_INT8 = any(rivals.fastest(ms) for ms in read_json(_DECODER)["ms"].values())

TABLES: Tables = {
    **({"decoder-fastest": partial(fastest, _DECODER)} if _HAS_INT8 else {}),
    "decoder-amx-fastest": partial(fastest, "inference-decoder-amx.json"),
    "minilm-fastest": partial(fastest, MODELS["minilm"]),
    **{f"inference-{model}-latency": partial(latency, file) for model, file in MODELS.items()},
    **{f"inference-{model}-gains": partial(summary, file) for model, file in MODELS.items()},
    **{f"inference-{model}-sizes": partial(sizes, file) for model, file in MODELS.items()},
    **{f"inference-{model}-rivals": partial(of_rivals, file) for model, file in MODELS.items()},
    **{f"inference-{model}-cold": partial(cold, file) for model, file in MODELS.items()},
}
