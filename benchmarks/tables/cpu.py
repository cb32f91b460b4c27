"""Tables of ``python -m benchmarks.cpu``, on the CPUs that were measured."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.tables.markdown import Tables, read_json, table, time_text

XEON, EPYC = "cpu-xeon-avx512.json", "cpu-epyc-avx512-bf16.json"
SECOND_EPYC = "cpu-epyc-2-avx512-bf16.json"
AMX = "cpu-xeon-amx.json"
STEPS = {
    "Intel Xeon, AVX-512": XEON,
    "AMD EPYC, AVX512_BF16": EPYC,
    "a second EPYC": SECOND_EPYC,
    "a Xeon with AMX": AMX,
}
"""The CPUs that whole steps were measured on."""
SPARSE = ("cpu-permute", "cpu-csr")
_FLOAT = "float32"
_ALL = "products, few, pack, auto 1 thread"
PRODUCTS = {
    "Xeon, float32": (XEON, "products 1 thread", "float32"),
    "EPYC, float32": (EPYC, _ALL, "float32"),
    "EPYC, bfloat16": (EPYC, _ALL, "bfloat16"),
}
"""The GEMMs of one thread that were measured: their file, its part and the dtype."""


def dense_ms(ms: dict[str, float]) -> float:
    """The fastest dense time of a GEMM."""
    return min(time for name, time in ms.items() if name.startswith("dense"))


def fastest(ms: dict[str, float]) -> tuple[float, float]:
    """The fastest dense time of a GEMM, and the fastest sparse one."""
    return dense_ms(ms), min(ms[name] for name in SPARSE if name in ms)


def steps(file: str, part: str) -> str:
    """Whole training steps."""
    rows = read_json(file)[part]["steps"]
    mixed = any(row["precision"] != "32-true" for row in rows)
    header = ["width", "N:M", "method", "dense step, ms", "sparse step, ms", "gain"]
    header += ["dense in float32 over sparse"] * mixed + ["steps of each side"]
    cells = []
    for row in rows:
        own = [str(row["width"]), row["pattern"], f"`{row['method']}`", f"{row['dense_ms']:.0f}"]
        own += [f"{row['sparse_ms']:.0f}", f"{row['gain']:.2f}x"]
        cells.append(own + [f"{row['gain_float32']:.2f}x"] * mixed + [str(row["steps"])])
    return table(header, cells)


def steps_summary() -> str:
    """The gain of a whole training step on each CPU."""
    gains: dict[tuple[str, str, int], dict[str, str]] = {}
    for cpu, file in STEPS.items():
        for row in read_json(file)["steps 2 threads"]["steps"]:
            case = (row["method"], row["pattern"], row["width"])
            gains.setdefault(case, {})[cpu] = f"{row['gain']:.2f}x"
    rows = []
    for (method, pattern, width), of_cpu in gains.items():
        found = [of_cpu.get(cpu, "-") for cpu in STEPS]
        rows.append([f"`{method}`", pattern, str(width), *found])
    return table(["method", "N:M", "width", *STEPS], rows)


def products_summary() -> str:
    """The least and the largest gain of each GEMM over the shapes."""
    gains: dict[tuple[str, str], dict[str, list[float]]] = {}
    for title, (file, part, dtype) in PRODUCTS.items():
        for row in read_json(file)[part]["products"]:
            if row["dtype"] == dtype:
                dense, sparse = fastest(row["ms"])
                own = gains.setdefault((row["pattern"], row["product"]), {})
                own.setdefault(title, []).append(dense / sparse)
    rows = []
    for (pattern, product), own in gains.items():
        ends = [[f"{end:.1f}" for end in (min(own[title]), max(own[title]))] for title in PRODUCTS]
        rows.append([pattern, product, *(" to ".join(dict.fromkeys(pair)) + "x" for pair in ends)])
    rows.sort(key=lambda row: -int(row[0].split(":")[1]) / int(row[0].split(":")[0]))
    return table(["N:M", "product", *PRODUCTS], rows)


def products(file: str, part: str, dtype: str, key: str = "products") -> str:
    """Dense and sparse milliseconds of the three GEMMs, and the gain, by shape."""
    rows = [row for row in read_json(file)[part][key] if row["dtype"] == dtype]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys((row["product"], row["pattern"]) for row in rows))
    shapes.sort(key=lambda shape: [int(size) for size in shape.split(" -> ")])
    found = {(row["product"], row["pattern"], row["shape"]): fastest(row["ms"]) for row in rows}
    cells = []
    for product, pattern in names:
        pairs = [found[product, pattern, shape] for shape in shapes]
        texts = [
            f"{time_text(dense)} / {time_text(sparse)}: {dense / sparse:.1f}x"
            for dense, sparse in pairs
        ]
        cells.append([product, pattern, *texts])
    return table(["product", "N:M", *shapes], cells)


def threads(file: str, one: str, two: str, pattern: str) -> str:
    """The GEMMs with one thread and with two, in two processes."""
    data = read_json(file)
    before = {
        (row["product"], row["shape"]): row
        for row in data[one]["products"]
        if row["pattern"] == pattern
    }
    cells = []
    for row in data[two]["products"]:
        pairs = zip(
            fastest(before[row["product"], row["shape"]]["ms"]), fastest(row["ms"]), strict=True
        )
        texts = [f"{time_text(a)} / {time_text(b)}: {a / b:.2f}x" for a, b in pairs]
        cells.append([row["product"], row["shape"], *texts])
    sides = [f"{side}, 1 thread / 2 threads, ms" for side in ("dense", "sparse")]
    return table(["product", "in -> out", *sides], cells)


def convolutions(file: str, part: str) -> str:
    """The three GEMMs of convolutions."""
    rows = read_json(file)[part]["convolutions"]
    cells = []
    for number, row in enumerate(rows):
        times = ", ".join(
            "{:.1f} / {:.1f}".format(*row[name]) for name in ("forward", "dgrad", "wgrad")
        )
        dtype = (
            "float32" if number < 4 else "bfloat16"
        )  # the benchmark's order; its rows do not name the dtype
        cells.append([row["shape"], dtype, row["pattern"], times, f"{row['gain']:.2f}x"])
    header = [
        "convolution",
        "dtype",
        "N:M",
        "forward, dgrad, wgrad: dense / sparse ms",
        "gain of the three",
    ]
    return table(header, cells)


def auto(file: str, part: str) -> str:
    """What `kernels: auto` makes of a layer."""
    cells = []
    for row in read_json(file)[part]["auto"]:
        chosen = {
            gemm: f"`{kernel}`" if kernel in SPARSE else "dense"
            for gemm, kernel in row["kernels"].items()
        }
        dense = set(chosen.values()) == {"dense"}
        kernels = (
            "all dense"
            if dense
            else ", ".join(f"{gemm} {kernel}" for gemm, kernel in chosen.items())
        )
        times = [f"{row['dense_ms']:.0f}", f"{row['auto_ms']:.0f}", f"{row['gain']:.2f}x"]
        cells.append([row["shape"], row["pattern"], *times, kernels])
    return table(["in -> out", "N:M", "dense layer, ms", "auto, ms", "gain", "kernels"], cells)


def few(file: str, part: str) -> str:
    """One token."""
    rows = read_json(file)[part]["few"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    found: dict[tuple[str, str], Any] = {
        (row["pattern"], row["dtype"]): fastest(row["ms"]) for row in rows
    }
    header = [
        "N:M",
        *(title for dtype in dtypes for title in (f"{dtype}, dense / sparse ms", "gain")),
    ]
    cells = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        pairs = [found[pattern, dtype] for dtype in dtypes]
        texts = [
            text
            for dense, own in pairs
            for text in (f"{dense:.2f} / {own:.2f}", f"{dense / own:.1f}x")
        ]
        cells.append([pattern, *texts])
    return table(header, cells)


def pack(file: str, part: str) -> str:
    """What layouts and values cost."""
    columns = [f"{kernel} {what}" for kernel in SPARSE for what in ("layout", "values")]
    cells = []
    for row in read_json(file)[part]["pack"]:
        dense = dense_ms(row["ms"])
        costs = [
            f"{row['ms'][name]:.1f} ms, {100 * row['ms'][name] / dense:.0f} %" for name in columns
        ]
        cells.append([row["pattern"], f"{dense:.1f}", *costs])
    header = [
        "N:M",
        "dense product, ms",
        *(f"{what} of `{kernel}`" for kernel in SPARSE for what in ("layout", "values")),
    ]
    return table(header, cells)


def peers(file: str, part: str) -> str:
    """A layer next to other libraries."""
    data = read_json(file)[part]["peers"]
    names = list(next(iter(data.values())))
    rows = [[pattern, *(f"{ms[name]:.0f}" for name in names)] for pattern, ms in data.items()]
    return table(["N:M", *(f"{name}, ms" for name in names)], rows)


TABLES: Tables = {
    "cpu-steps-summary": steps_summary,
    "cpu-products-summary": products_summary,
    "xeon-steps": partial(steps, XEON, "steps 2 threads"),
    "xeon-products": partial(products, XEON, "products 1 thread", _FLOAT),
    "xeon-products-bfloat16": partial(
        products, XEON, "products 1 thread", "bfloat16", "products bfloat16"
    ),
    "xeon-products-avx2": partial(products, XEON, "products avx2 1 thread", _FLOAT),
    "xeon-threads": partial(threads, XEON, "products 1 thread", "products 2 threads", "1:16"),
    "xeon-convolutions": partial(convolutions, XEON, "products 1 thread"),
    "xeon-auto": partial(auto, XEON, "auto 1 thread"),
    "xeon-few": partial(few, XEON, "products 1 thread"),
    "xeon-pack": partial(pack, XEON, "products 1 thread"),
    "xeon-peers": partial(peers, XEON, "peers 1 thread"),
    "epyc-steps": partial(steps, EPYC, "steps 2 threads"),
    "epyc-2-steps": partial(steps, SECOND_EPYC, "steps 2 threads"),
    "amx-steps": partial(steps, AMX, "steps 2 threads"),
    "epyc-products-bfloat16": partial(products, EPYC, _ALL, "bfloat16"),
    "epyc-products": partial(products, EPYC, _ALL, _FLOAT),
    "epyc-convolutions": partial(convolutions, EPYC, "convolutions 1 thread"),
    "epyc-auto": partial(auto, EPYC, _ALL),
    "epyc-few": partial(few, EPYC, _ALL),
    "epyc-pack": partial(pack, EPYC, _ALL),
}
