"""The rich tables before and after a fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from lightning_nm.functional.schedule import DENSE, describe
from lightning_nm.methods import MaskMethod
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.layer.layout import known_shape
from lightning_nm.nn.layer.names import plain_name
from lightning_nm.nn.selection.ranges import grouped
from lightning_nm.nn.selection.selection import NO_MATRICES
from lightning_nm.sparsifier import NMSparsifier

if TYPE_CHECKING:
    import lightning.pytorch as pl

# Ways of counting the FLOPs of a training step, and what each counts.
COUNTINGS = {
    "arithmetic": "nonzero operands and needed outputs; dense is 1",
    "paper": "as the N:M papers count; dense is 1",
    "eligible": "GEMMs that N:M hardware could skip; not a time",
}

_LAYER_COLUMNS = ("shape", "pattern", "method", "fwd", "dgrad", "wgrad", "why")  # after the names

PREFIX = "nm_"  # of the statistics in the progress bar, to keep them apart from the model's metrics


def plain_table(title: str, *, show_header: bool = True) -> Table:
    """Return an empty table in the style of all tables of a fit.

    Example:
        >>> plain_table("N:M layers").title
        'N:M layers'
    """
    return Table(
        title=title,
        title_justify="left",
        show_header=show_header,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def layer_table(sparsifier: NMSparsifier, width: int = 80) -> Table:
    """Return the table of layers: how each weight's three GEMMs run, and why, as numbers of :func:`layer_reasons`.

    Layers that differ in the numbers within their names alone share a row. Where a name does not fit into the width, a
    pattern or method that all masked layers have goes into the title; then names are broken, at dots alone.
    """
    numbers = layer_reasons(sparsifier)
    rows = []
    for name, *cells, reason in grouped(layer_rows(sparsifier)):
        number = f"({numbers[reason]})" if reason else ""
        row = dict(zip(_LAYER_COLUMNS, [*cells, number], strict=True))
        rows.append((name, row, row["pattern"] == "-"))

    title = "N:M layers"
    columns = list(_LAYER_COLUMNS)
    longest_name = max(len(name) for name, _, _ in rows)
    if _width_beside_names(rows, columns) + longest_name > width:
        for column in ("pattern", "method"):
            values = {row[column] for _, row, is_dense in rows if not is_dense}
            if len(values) == 1:
                title += f", {column} {values.pop()}"
                columns.remove(column)

    table = plain_table(title)
    for head in ("layer", *columns):
        table.add_column(head, no_wrap=True)
    other_width = _width_beside_names(rows, columns)
    name_width = 0
    for name, row, is_dense in rows:
        broken = broken_name(name, width - other_width)
        name_width = max(name_width, *(len(line) for line in broken.splitlines()))
        table.add_row(broken, *map(row.get, columns), style="dim" if is_dense else None)
    table.min_width = other_width + name_width
    return table


def _width_beside_names(
    rows: Sequence[tuple[str, dict[str, str], bool]], columns: Sequence[str]
) -> int:
    """The width of all columns but the first: only names may be broken."""
    width = 3  # the padding of the first column and of the table
    for head in columns:
        width += max(len(cell) for cell in (head, *(row[head] for _, row, _ in rows)))
        width += 2  # the padding
    return width


def layer_reasons(sparsifier: NMSparsifier) -> dict[str, int]:
    """Return the reasons in the table of layers, each once, with their numbers from 1 on."""
    # A dictionary keeps the order of the rows and has each reason once.
    reasons = dict.fromkeys(row[-1] for row in layer_rows(sparsifier) if row[-1])
    return {reason: number for number, reason in enumerate(reasons, 1)}


class Whole:
    """Renders a table at its full width, even if the console is narrower."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # rich would cut the cells; a terminal breaks lines that are too long, and a file holds them whole.
        width = max(options.max_width, self.table.min_width or 0)
        yield from console.render(self.table, options.update(width=width))


def layer_rows(sparsifier: NMSparsifier) -> Iterator[tuple[str, ...]]:
    """Yield every weight in the order of the model: layer, shape, pattern, method, forward, dgrad, wgrad, reason."""
    rows = {name: _row(sparsifier, layer) for name, layer in sparsifier.layers.items()}
    shapes = {}
    for name, parameter in sparsifier.model.named_parameters(remove_duplicate=False):
        shapes[plain_name(name)] = known_shape(parameter)
    for name, reason in sparsifier.skipped.items():
        if reason == NO_MATRICES:
            continue
        # A layer has its module's name; a parameter that is not called "weight" follows it.
        shape = shapes.get(f"{name}.weight", shapes.get(name, ()))
        text = "?" if shape is None else _shape(shape)
        rows[name] = (text, "-", "-", "dense", "dense", "dense", reason)
    place = {plain_name(name): k for k, (name, _) in enumerate(sparsifier.model.named_modules())}

    def order(name: str) -> int:
        # The weight of a module that has several is called after its parameter.
        module = name if name in place else name.rpartition(".")[0]
        return place.get(module, len(place))  # a module may have been replaced

    # Sorting keeps the order of the weights of one module.
    for name in sorted(rows, key=order):
        yield name, *rows[name]


def _row(sparsifier: NMSparsifier, layer: NMLayer) -> tuple[str, ...]:
    """The cells of a masked layer, after its name."""
    operands = []
    reasons = []
    for kind, gemm in layer.gemms()._asdict().items():
        operands.append(gemm.label)
        if gemm.reason:
            reasons.append(f"{kind}: {gemm.reason}")
    method = layer.spec.method.short_name or type(layer.spec.method).__name__
    pattern = str(layer.spec.pattern)
    return _shape(layer.view.shape), pattern, method, *operands, "; ".join(reasons)


def broken_name(name: str, width: int) -> str:
    """Break a name into lines at dots, so that no line is longer than a width if its parts allow that.

    Example:
        >>> print(broken_name("model.layers.{0..31}.self_attn.q_proj x32", 24))
        model.layers.{0..31}.
        self_attn.q_proj x32
    """
    lines = [""]
    # Dots within braces, as in a range of layers, do not end a part.
    for part in re.findall(r"(?:\{[^}]*\}|[^.{])+\.?|\.", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _shape(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)


def phases(sparsifier: NMSparsifier) -> list[str]:
    """Return lines that describe the phases of methods and estimators, each once."""
    lines = []

    def add(part: object, what: str, window: Sequence[int], after: str) -> None:
        # The first step of a phase and, if it ends, the last one.
        until = f" to {window[1]}{after}" if len(window) == 2 else ""
        lines.append(f"{type(part).__name__}: {what} training step {window[0]}{until}")

    for layer in sparsifier.layers.values():
        method = layer.spec.method
        stages = layer.progress.stages
        if stages:
            end = "; the trained model is dense" if stages[-1][1] == DENSE else ""
            lines.append(f"schedule: {describe(stages, layer.spec.pattern)}{end}")
        window = method.sparse_window(layer)
        if window and (method.dense_start or method.dense_end):
            start = "masks at the latest from" if method.may_start_early else "masks from"
            add(method, start, window, "; the model is dense after that")
        window = layer.progress.estimator_schedule
        if window:
            add(layer.spec.estimator, "from", window, ", then wgrad is dense")
    return list(dict.fromkeys(lines))


def owned_parameters(sparsifier: NMSparsifier) -> list[str]:
    """Return a line for each method that owns parameters: how many, and the memory that they take."""
    owners: dict[str, list[NMLayer]] = {}
    for layer in sparsifier.layers.values():
        if layer.parameters:
            owners.setdefault(type(layer.spec.method).__name__, []).append(layer)
    lines = []
    for method, layers in owners.items():
        parameters = [p for layer in layers for p in layer.parameters.values()]
        count = sum(p.numel() for p in parameters)
        entries = sum(layer.view.shape.numel() for layer in layers)
        size = sum(p.nbytes for p in parameters)
        memory = f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
        lines.append(
            f"{method} trains {count:,} parameters of its own, {count / entries:.3g} for each masked weight: "
            f"{memory}, and as much for their gradients and for each tensor of the optimizer's state"
        )
    return lines


def _share(shares: dict[str, float]) -> str:
    """A share of the model as text."""
    parameters = f"{shares['parameters']:.1%} of the model's parameters"
    if "flops" not in shares:
        return f"{parameters}, FLOPs not known before a batch"
    return f"{parameters}, {shares['flops']:.1%} of its weight FLOPs"


def _times(factors: Iterable[float]) -> str:
    """One factor, or the least and the largest."""
    texts = [f"{factor:.3g}" for factor in sorted(factors)]
    return f"x{texts[0]}" if texts[0] == texts[-1] else f"x{texts[0]} to x{texts[-1]}"


def _notes(sparsifier: NMSparsifier) -> Iterator[str]:
    """The lines below the table of layers."""
    config = sparsifier.config
    for reason, number in layer_reasons(sparsifier).items():
        yield f"({number}) {reason}"
    # Modules whose parameters need no rows, such as a class token.
    names = [name for name, reason in sparsifier.skipped.items() if reason == NO_MATRICES]
    if names:
        shown = grouped((name or type(sparsifier.model).__name__,) for name in names)
        yield f"no rows for {', '.join(name for (name,) in shown)}: {NO_MATRICES}"
    if sparsifier.selection.first_last:
        yield "skip_first_last=False masks the first and the last layer, too"
    if config.scale is not None:
        # Layers of different patterns have different factors.
        rates = {
            config.base_density / layer.spec.pattern.density for layer in sparsifier.layers.values()
        }
        initial = "their values as they are"
        if sparsifier.initial_factors:
            initial = f"their initial values {_times(sparsifier.initial_factors.values())}"
        yield f"scale={config.scale!r}: learning rates of masked weights {_times(rates)}, {initial}"
    for preset in sparsifier.settings.presets:
        yield f"preset {config.preset}, {preset}"
    yield from phases(sparsifier)
    yield from owned_parameters(sparsifier)


def print_layers(sparsifier: NMSparsifier, console: Console | None = None) -> None:
    """Print the table of layers and the masked share of the model; warn if it is small."""
    console = console or Console()
    console.print(Whole(layer_table(sparsifier, console.width)), crop=False, soft_wrap=True)
    for note in _notes(sparsifier):
        # Names of layers may look like rich's markup.
        console.print(note, style="dim", soft_wrap=True, highlight=False, markup=False)
    masked = sparsifier.shares()
    if masked["parameters"]:
        console.print(f"masked: {_share(masked)}")
        # No batch may have run yet. Embeddings take no products, so their parameters do not count.
        part = "weight FLOPs" if "flops" in masked else "parameters outside of embeddings"
        share = masked["flops"] if "flops" in masked else sparsifier.share_of_products()
        if share < 0.5:
            console.print(
                f"[yellow]warning:[/] less than half of the model's {part} is masked, so little can be gained; the "
                "last column gives the reasons",
                soft_wrap=True,
            )
    estimated = sparsifier.shares(gradients=True)
    if estimated["parameters"]:
        console.print(f"N:M gradients: {_share(estimated)}")


def summary_rows(
    sparsifier: NMSparsifier, metrics: dict[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Yield the statistics of a finished fit: name, value, meaning."""
    # The monitor's own statistics are among the metrics, too; they follow as they are now.
    for name, value in metrics.items():
        if not name.startswith(("nm/", PREFIX)):
            yield name, f"{float(value):.4f}", "last value that the model logged"
    stats = sparsifier.stats()
    yield "density", f"{stats['density']:.4f}", "share of weights that the forward masks keep"
    yield "N:M violations", f"{sparsifier.violations():,}", "blocks with more than N nonzeros"
    flips = f"{stats['flip_rate']:.1e}, mean {sparsifier.mean_flip_rate():.1e}"
    yield (
        "flip rate, last update",
        flips,
        "share of forward mask bits that changed; mean over steps",
    )
    if any(layer.masks.has_backward for layer in sparsifier.layers.values()):
        yield (
            "overlap",
            f"{stats['overlap']:.4f}",
            "share of the forward mask that the backward mask keeps",
        )
    yield "kept magnitude", f"{stats['kept_magnitude']:.4f}", "sum of |W_F| over sum of |W|"
    if "grad_snr" in stats:
        yield (
            "gradient SNR",
            f"{stats['grad_snr']:.2f}",
            "norm of dW over the norm of its estimate's error",
        )
    ratios = sparsifier.mean_flops_ratios()
    for kind, meaning in COUNTINGS.items():
        yield f"training FLOPs, {kind}", f"{ratios[kind]:.3f}x", meaning


def print_summary(
    sparsifier: NMSparsifier, trainer: pl.Trainer, console: Console | None = None
) -> None:
    """Print the summary and the paths of the log and the checkpoint."""
    console = console or Console()
    table = plain_table("N:M summary", show_header=False)
    table.add_column("statistic")
    table.add_column("value", justify="right")
    table.add_column("meaning", style="dim", overflow="fold")
    for row in summary_rows(sparsifier, dict(trainer.callback_metrics)):
        table.add_row(*row)
    console.print(table)
    total = len(sparsifier.layers)
    able = [layer for layer in sparsifier.layers.values() if not layer.spec.forward_reason]
    # Of methods that have masks at other times, but not now.
    dense = [layer for layer in able if layer.forward_mask is None]
    dense = [layer for layer in dense if isinstance(layer.spec.method, MaskMethod)]
    if dense:
        console.print(
            f"[yellow]warning:[/] the trained model is dense in {len(dense)} of {total} layers: their masks have not "
            "started yet, or have ended (dense_end)"
        )
    # Of methods whose mask is still denser than the pattern.
    unfinished = {
        layer.name: type(layer.spec.method).__name__
        for layer in able
        if layer.masks.has_forward
        and layer.spec.method.current_pattern(layer) != layer.spec.pattern
    }
    if unfinished:
        console.print(
            f"[yellow]warning:[/] the trained model is not N:M in {len(unfinished)} of {total} layers: the masks of "
            f"{', '.join(sorted({*unfinished.values()}))} had not reached their pattern when the training ended"
        )
    # Not every checkpoint callback has these attributes, and ModelCheckpoint's are empty until it has saved.
    checkpoint = trainer.checkpoint_callback
    path = getattr(checkpoint, "best_model_path", "") or getattr(checkpoint, "last_model_path", "")
    if path:
        console.print(f"checkpoint: {path}", soft_wrap=True)
    for logger in trainer.loggers:
        if logger.save_dir is not None:
            folder = getattr(logger, "log_dir", logger.save_dir)
            console.print(f"log ({type(logger).__name__}): {folder}", soft_wrap=True)
