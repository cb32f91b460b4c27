"""Measure the CPU kernels on this machine: ``python -m benchmarks.cpu [PART ...]``, all parts by default.

``products``: forward, dgrad of a row mask and wgrad at kept entries, next to the dense GEMMs that torch has (its own
and oneDNN's, with operands already in oneDNN's form) and torch's CSR GEMM. The gain is against the fastest dense
GEMM of the same precision. ``few``: one token, where a GEMM reads the weight once. ``pack``: layouts and values.
``convolutions``: forward, dgrad and wgrad together, next to torch's.
``auto``: forward and backward of a layer whose kernels `auto` chose, next to a dense layer.
``peers``: forward and backward of a layer next to sparseprop and sparselab, if these are installed.
``steps``: whole training steps in a Trainer, next to a dense Trainer in the faster of float32 and bf16-mixed.

Everything that is compared is interleaved; medians are printed. Quote no figure from a loaded machine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from benchmarks.cpu.auto import measure_auto
from benchmarks.cpu.convolutions import SHAPES as SHAPES_OF_CONVOLUTIONS
from benchmarks.cpu.convolutions import measure_convolution
from benchmarks.cpu.peers import measure_peers
from benchmarks.cpu.products import Row, measure
from benchmarks.cpu.steps import CASES, measure_step
from lightning_nm.kernels.cpu import library

PATTERNS = ["1:16", "1:8", "1:4", "2:4"]
SHAPES = [(1024, 1024), (4096, 1024), (1024, 4096)]


def print_rows(rows: Iterable[Row]) -> list[Row]:
    """Print a table in Markdown, each row when it is measured; return the rows."""
    kept = []
    print(
        "| product | in -> out | tokens | dtype | N:M | fastest dense, ms | fastest sparse, ms | gain | all, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        kept.append(row)
        (dense, dense_ms), (sparse, sparse_ms) = row.dense, row.sparse
        every = ", ".join(f"{name} {ms:.2f}" for name, ms in row.ms.items())
        cells = [row.product, row.shape, str(row.tokens), row.dtype, row.pattern]
        cells += [f"{dense_ms:.2f} {dense}", f"{sparse_ms:.2f} {sparse}", f"{row.gain:.2f}x", every]
        print("| " + " | ".join(cells) + " |", flush=True)
    return kept


def print_packs(rows: Iterable[Row]) -> list[Row]:
    """Print what packing costs, in the same way."""
    kept = []
    print("| in -> out | N:M | dense product, ms | packing, ms (share of the product) |")
    print("|---|---|---|---|")
    for row in rows:
        kept.append(row)
        dense = row.dense[1]
        parts = [
            f"{name} {ms:.2f} ({ms / dense:.1%})"
            for name, ms in row.ms.items()
            if name.startswith("cpu-")
        ]
        print(f"| {row.shape} | {row.pattern} | {dense:.2f} | {', '.join(parts)} |", flush=True)
    return kept


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.cpu", description=(__doc__ or "").split("\n")[0]
    )
    parts = ["products", "few", "pack", "convolutions", "auto", "peers", "steps"]
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=parts)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--patterns", nargs="+", default=PATTERNS)
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--seconds", type=float, default=60, help="of each pair of trainings")
    parser.add_argument("--methods", nargs="+", help="of the steps; all by default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    machine = {
        "cpu": library.cpu_name(),
        "instructions": library.unavailable() or library.LEVELS[library.level()],
        "threads": args.threads,
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), "\n")
    found: dict[str, object] = {"machine": machine}
    dtypes = [getattr(torch, name) for name in args.dtypes]
    settings = {
        "products": (["forward", "dgrad", "wgrad"], SHAPES, args.tokens, dtypes, args.patterns),
        "few": (["forward"], [(4096, 4096)], 1, dtypes, args.patterns),
        "pack": (["pack"], SHAPES[:1], args.tokens, dtypes[:1], args.patterns),
    }
    for part, setting in settings.items():
        if part in args.parts:
            rows = (print_packs if part == "pack" else print_rows)(measure(*setting, args.repeats))
            print()
            found[part] = [row._asdict() for row in rows]
    if "convolutions" in args.parts:
        found["convolutions"] = []
        print(
            "| convolution | dtype | N:M | forward, dgrad, wgrad: dense / sparse ms | gain of the three |"
        )
        print("|---|---|---|---|---|")
        for dtype in dtypes:
            for conv, images in SHAPES_OF_CONVOLUTIONS:
                row = measure_convolution(conv, images, args.patterns[0], dtype, args.repeats)
                found["convolutions"].append(row)  # type: ignore[attr-defined]
                times = ", ".join(
                    "{:.1f} / {:.1f}".format(*row[name]) for name in ("forward", "dgrad", "wgrad")
                )
                name = str(dtype).removeprefix("torch.")
                print(
                    f"| {row['shape']} | {name} | {row['pattern']} | {times} | {row['gain']:.2f}x |",
                    flush=True,
                )
        print()
    if "auto" in args.parts:
        found["auto"] = []
        print("| in -> out | N:M | dense layer, ms | auto, ms | gain | kernels |")
        print("|---|---|---|---|---|---|")
        for shape in SHAPES:
            for pattern in args.patterns:
                row = measure_auto(*shape, args.tokens, pattern, args.repeats)
                found["auto"].append(row)  # type: ignore[attr-defined]
                kernels = ", ".join(f"{gemm} {kernel}" for gemm, kernel in row["kernels"].items())
                cells = [
                    row["shape"],
                    pattern,
                    f"{row['dense_ms']:.1f}",
                    f"{row['auto_ms']:.1f}",
                    f"{row['gain']:.2f}x",
                ]
                print("| " + " | ".join([*cells, kernels]) + " |", flush=True)
        print()
    if "peers" in args.parts:
        found["peers"] = {}
        print("| N:M | forward and backward of 1024 -> 1024, ms |")
        print("|---|---|")
        for pattern in args.patterns:
            ms = measure_peers(1024, 1024, args.tokens, pattern, args.repeats)
            found["peers"][pattern] = ms  # type: ignore[index]
            print(
                f"| {pattern} | {', '.join(f'{name} {time:.1f}' for name, time in ms.items())} |",
                flush=True,
            )
        print()
    if "steps" in args.parts:
        print(
            "| width | N:M | method | dense step, ms | sparse step, ms | gain | dense float32 over sparse |"
        )
        print("|---|---|---|---|---|---|---|")
        found["steps"] = []
        for case in (case for case in CASES if args.methods is None or case.method in args.methods):
            step = measure_step(case, args.seconds, args.threads)
            found["steps"].append(step)  # type: ignore[attr-defined]
            cells = [str(step[name]) for name in ("width", "pattern", "method")]
            cells += [
                f"{step['dense_ms']:.0f} {step['precision']}",
                f"{step['sparse_ms']:.0f}",
                f"{step['gain']:.2f}x",
            ]
            print("| " + " | ".join([*cells, f"{step['gain_float32']:.2f}x"]) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
