"""Tables of the studies of SuPar: learning rates, and dense and sparse models of as many nonzeros."""

from __future__ import annotations

from functools import partial

from benchmarks.tables.markdown import Tables, read_csv, table
from benchmarks.tables.studies import differences, means

RATE = "model.init_args.block_lr"
METRIC = "test_bits_per_byte"
NONZEROS = "scale/equal-nonzeros-python-source"


def losses_by_rate() -> dict[str, dict[float, float]]:
    """Bits per byte of every variant of the search, by the learning rate of the blocks relative to the others'."""
    found: dict[str, dict[float, float]] = {}
    for row in read_csv("study-scale-learning-rate-python-source.csv"):
        found.setdefault(row["variant"], {})[row[RATE]] = row[METRIC]
    return found


def learning_rates() -> str:
    """One row a variant, one column a learning rate; each variant's best is bold."""
    losses = losses_by_rate()
    rates = sorted({rate for curve in losses.values() for rate in curve})
    rows = []
    for variant, curve in losses.items():
        best = min(curve.values())
        cells = []
        for rate in rates:
            text = f"{curve[rate]:.3f}"
            cells.append(f"**{text}**" if curve[rate] == best else text)
        rows.append([variant, *cells])
    return table(["variant", *(f"{rate:g}" for rate in rates)], rows)


TABLES: Tables = {
    "scale-learning-rates": learning_rates,
    "scale-nonzeros-means": partial(means, NONZEROS),
    "scale-nonzeros-differences": partial(differences, NONZEROS),
}
