"""A scan of a model as rich tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from lightning_nm.callbacks.report.tables import Whole, plain_table, print_note
from lightning_nm.functional.budget import Choice
from lightning_nm.methods.sensitivity import Sensitivity
from lightning_nm.nn.selection.ranges import grouped

_MEASURES = {
    "errors": "relative output error",
    "retained": "retained magnitude",
}


def print_sensitivity(result: Sensitivity, console: Console) -> None:
    """Print a row per layer and a column per pattern for each measure, and what was left out."""
    for attribute in _MEASURES:
        values = {name: getattr(layer, attribute) for name, layer in result.layers.items()}
        if any(values.values()):
            table = _table(_title(attribute, result), result, values)
            console.print(Whole(table), crop=False, soft_wrap=True)
    for name in result.uncalibrated:
        print_note(console, f"{name}: no calibration token reaches it; |W - W_F| / |W| is shown")
    for name, reason in grouped(result.skipped.items()):
        print_note(console, f"{name} is left out: {reason}")


def _title(attribute: str, result: Sensitivity) -> str:
    """What is measured; only the errors depend on the score."""
    title = _MEASURES[attribute]
    return f"{title}, entries by {result.score}" if attribute == "errors" else title


def _table(title: str, result: Sensitivity, values: Mapping[str, Mapping[str, float]]) -> Table:
    """One measure of all layers."""
    patterns = [str(pattern) for pattern in result.patterns]
    rows = []
    for name, layer in result.layers.items():
        cells = []
        for pattern in patterns:
            # A pattern whose blocks do not fit has no value.
            value = values[name].get(pattern)
            cells.append("-" if value is None else f"{value:.4f}")
        rows.append((name, f"{layer.size:,}", *cells))
    return _filled(title, ("layer", "entries", *patterns), rows)


def print_choices(result: Sensitivity, choices: Mapping[str, Choice], console: Console) -> None:
    """Print the chosen patterns, and the share of the model's weights that they keep."""
    rows = []
    kept = float(sum(result.dense_sizes.values()))
    total = kept
    for name, choice in choices.items():
        size = result.layers[name].size
        kept += size * choice.density
        total += size
        rows.append(
            (
                name,
                f"{size:,}",
                choice.pattern,
                f"{choice.density:.3f}",
                f"{choice.value:.4f}",
                choice.why,
            )
        )
    heads = ("layer", "entries", "pattern", "kept", "measured", "why")
    console.print(Whole(_filled("chosen patterns", heads, rows)), crop=False, soft_wrap=True)
    dense = f"{sum(result.dense_sizes.values()):,} of {int(total):,} entries stay dense in any case"
    console.print(f"kept: {kept / total:.4f} of all entries; {dense}", highlight=False)


def _filled(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table that is as wide as its cells: a line that rich folds or cuts cannot be read by programs."""
    table = plain_table(title)
    padding = 2
    table.min_width = padding
    for place, head in enumerate(heads):
        lengths = [len(row[place]) for row in rows]
        table.min_width += padding + max([len(head), *lengths])
        is_text = head in ("layer", "pattern", "why")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
