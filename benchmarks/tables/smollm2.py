"""The tables of ``python -m benchmarks.smollm2``: a language model dense by several runtimes, and packed."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.markdown import Tables, read_json, table, time_text

FILE = "smollm2.json"
MEASURES = {
    "first 64": "64 tokens in, ms",
    "first 512": "512 tokens in, ms",
    "token": "each token out, ms",
    "step of 8": "of 8 prompts, ms",
}
FRONT_DOOR = {
    "torch bfloat16": "dense bfloat16, torch",
    "openvino int8": "dense int8, OpenVINO",
    "onnxruntime int8": "dense int8, ONNX Runtime",
    "llama.cpp Q8_0": "dense 8 bits, llama.cpp",
    "llama.cpp Q4_0": "dense 4 bits, llama.cpp",
    "packed 2:4 int8": "**2:4, int8**",
    "packed 1:4 int8": "**1:4, int8**",
}
"""Rows of README's table."""


def rows_by_name() -> dict[str, dict[str, Any]]:
    """The rows that were measured."""
    return {row["name"]: row for row in read_json(FILE)["rows"]}


def _cells(row: dict[str, Any], measures: list[str]) -> list[str]:
    size = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.0f} MB"
    perplexity = "-" if row["perplexity"] is None else f"{row['perplexity']:.1f}"
    times = [time_text(row["ms"][name]) if name in row["ms"] else "-" for name in measures]
    return [size, perplexity, *times]


def runtimes() -> str:
    """Every row."""
    rows = [[name, *_cells(row, list(MEASURES))] for name, row in rows_by_name().items()]
    return table(["runtime", "file", "perplexity", *MEASURES.values()], rows)


def front_door() -> str:
    """Some rows: what people run, and what this package makes of the model."""
    found = rows_by_name()
    measures = ["first 512", "token"]
    rows = [[title, *_cells(found[name], measures)] for name, title in FRONT_DOOR.items()]
    header = ["weights, runtime", "file", "perplexity", "512 tokens in, ms", "each token out, ms"]
    return table(header, rows)


TABLES: Tables = {"smollm2": runtimes, "front-door": front_door}
