"""Tables of layers, kernels, statistics and the environment, in a terminal and in Markdown; hyperparameters."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_nm.estimators import GradientEstimator
from lightning_nm.kernels import GemmKey, Router
from lightning_nm.kernels.api import uses_of_pack
from lightning_nm.kernels.router import GemmUse
from lightning_nm.kernels.tuner import environment_of
from lightning_nm.methods import MaskMethod, Method
from lightning_nm.nn.layer import NMLayer
from lightning_nm.nn.selection import NO_MATRICES, Rule
from lightning_nm.nn.weight import known_shape, plain_name
from lightning_nm.schedule import DENSE, Schedule, describe
from lightning_nm.sparsifier import NMSparsifier
from lightning_nm.spelling import grouped
from lightning_nm.training.statistics import mean_flip_rate, share_of_products, shares_of


def environment(trainer: Trainer) -> dict[str, str]:
    """Return versions, the device as kernels see it, precision, strategy and processes.

    Example:
        >>> import lightning.pytorch as pl
        >>> found = environment(pl.Trainer(logger=False, accelerator="cpu"))
        >>> found["precision"], found["strategy"], found["processes"]
        ('32-true', 'SingleDeviceStrategy', '1')
    """
    device = trainer.strategy.root_device
    found = environment_of(device)
    parts = {
        "lightning-nm": version("lightning-nm"),
        "torch": found.torch,
        "lightning": version("lightning"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{device.type}: {found.device}",
        "driver": found.driver,
        "CUDA": found.cuda,
        "cuSPARSELt": found.cusparselt,
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "processes": str(trainer.world_size),
        "batches per step": str(trainer.accumulate_grad_batches),
    }
    # Without a GPU there is no driver, and libraries may be missing.
    return {name: part for name, part in parts.items() if part}


def router_of(trainer: Trainer) -> Router | None:
    """Return the router of the Trainer's precision plugin; ``None`` for plugins that route no GEMMs.

    Example:
        >>> import lightning.pytorch as pl
        >>> print(router_of(pl.Trainer(logger=False, accelerator="cpu")))
        None
    """
    # Plugins of other packages may have an attribute of this name.
    router = getattr(trainer.precision_plugin, "router", None)
    return router if isinstance(router, Router) else None


def hyperparameters(sparsifier: NMSparsifier, prefix: str = "nm") -> dict[str, Any]:
    """Return pattern, method, estimator and their settings by name.

    The names are ``nm/...`` for the general settings, and ``nm/rules/<k>/...`` for those of rules, or start with
    another ``prefix``.

    Example:
        >>> from torch import nn
        >>> found = hyperparameters(NMSparsifier(nn.Linear(8, 8), "2:4", "sr-ste"))
        >>> found["nm/pattern"], found["nm/method"], found["nm/method/decay"], found["nm/grad_estimator"]
        ('2:4', 'sr-ste', 'relative', 'none')
    """
    # The general rule comes last, because the first one that matches a layer decides.
    *rules, general = sparsifier.settings.rules
    found = _rule_settings(general, prefix)
    for number, rule in enumerate(rules):
        found |= _rule_settings(rule, f"{prefix}/rules/{number}")
    if sparsifier.scale is not None:
        found[f"{prefix}/scale"] = sparsifier.scale
    if sparsifier.config.preset is not None:
        found[f"{prefix}/preset"] = sparsifier.config.preset
    if sparsifier.settings.exclude:
        found[f"{prefix}/exclude"] = ", ".join(sparsifier.settings.exclude)
    return found


def _rule_settings(rule: Rule, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rule.include is not None:
        found[f"{prefix}/include"] = ", ".join(rule.include)
    found[f"{prefix}/pattern"] = str(rule.pattern)
    found[f"{prefix}/conv_layout"] = rule.conv_layout
    found |= _part_settings(rule.method, f"{prefix}/method")
    found |= _part_settings(rule.estimator, f"{prefix}/grad_estimator")
    # Only where they are used: most trainings have none.
    schedule = rule.schedule or Schedule()
    for part in schedule.parts:
        value = getattr(schedule, part)  # a moment as it is, the ramp as text
        if part == "ramp":
            value = ", ".join(map(str, value))
            if schedule.ramp_ends is not None:
                value += f" until {', '.join(map(str, schedule.ramp_ends))}"
        found[f"{prefix}/schedule/{part}"] = value
    if rule.dgrad is not None:
        found |= _part_settings(rule.dgrad, f"{prefix}/dgrad")
    return found


def _part_settings(part: Method | GradientEstimator | None, key: str) -> dict[str, Any]:
    """The name and the public attributes of a method or an estimator."""
    if part is None:
        return {key: "none"}
    found: dict[str, Any] = {key: _part_name(part)}
    for attribute, value in vars(part).items():
        if not attribute.startswith("_"):
            # Loggers take no other types, such as schedules and tensors.
            is_plain = isinstance(value, (bool, int, float))
            found[f"{key}/{attribute}"] = value if is_plain else str(value)
    return found


def _part_name(part: Method | GradientEstimator) -> str:
    """The short name of a method or an estimator; those of users may have none."""
    return getattr(part, "short_name", "") or type(part).__name__


def log_hyperparameters(trainer: Trainer, sparsifier: NMSparsifier, name: str | None) -> None:
    """Add the settings to the hyperparameters of the Trainer's loggers; as ``nm/<name>/...`` if there is a name."""
    prefix = f"nm/{name}" if name else "nm"
    for logger in trainer.loggers:
        # Without metrics TensorBoard's logger would log hp_metric = -1.
        options: Any = {"metrics": {}} if isinstance(logger, TensorBoardLogger) else {}
        logger.log_hyperparams(hyperparameters(sparsifier, prefix), **options)


@dataclass
class KernelRow:
    """One GEMM of the masked layers, with its kernel and measured times; None where a time is unknown.

    Attributes:
        product: The GEMM and its sizes, as rows x depth x columns.
        calls: How often it ran, on all kernels together.
        kernel: The kernel that ran it last.
        why: The reason for that kernel.
        dense_ms: Milliseconds of the dense GEMM.
        sparse_ms: Milliseconds of the sparse GEMM, without packing.
        pack_ms: Milliseconds of packing its operand once.
        pack_uses: GEMMs that share one packed operand.

    Example:
        >>> row = KernelRow("fwd 64x64x64", 10, "cpu-csr", "", dense_ms=3.0, sparse_ms=1.0, pack_ms=1.0, pack_uses=2)
        >>> row.sparse_and_pack_ms, row.gain
        (1.5, 2.0)
    """

    product: str
    calls: int
    kernel: str
    why: str
    dense_ms: float | None = None
    sparse_ms: float | None = None
    pack_ms: float | None = None
    pack_uses: int = 1

    @property
    def sparse_and_pack_ms(self) -> float | None:
        """Milliseconds of a call with its part of packing: ``sparse + pack / pack_uses``."""
        if self.sparse_ms is None or self.pack_ms is None:
            return None
        return self.sparse_ms + self.pack_ms / self.pack_uses

    @property
    def gain(self) -> float | None:
        """How many times as fast as the dense GEMM: ``dense / (sparse + pack / pack_uses)``."""
        sparse_ms = self.sparse_and_pack_ms
        return None if self.dense_ms is None or sparse_ms is None else self.dense_ms / sparse_ms


def kernel_rows(router: Router) -> list[KernelRow]:
    """Return one row for each GEMM, in the order of first use; equal GEMMs of several layers share it."""
    uses_of_key: dict[GemmKey, list[GemmUse]] = {}
    for used in router.used():
        uses_of_key.setdefault(used.product.key, []).append(used)
    rows = []
    for key, uses in uses_of_key.items():
        # Uses are by layer and kernel. A kernel may change during a fit, from the first batch, which is dense, to the
        # measured one: the row is of the last one, and says how often others ran before.
        last = uses[-1]
        # What holds for the GEMM, such as a size that no kernel takes, comes before any measurement.
        reasons = [
            used.product.reason
            or (used.decision.reason if used.decision else "first batch, not measured yet")
            for used in uses
            if used.kernel == last.kernel
        ]
        before = [used for used in uses if used.kernel != last.kernel]
        if before:
            others = ", ".join(dict.fromkeys(used.kernel for used in before))
            calls = sum(used.calls for used in before)
            reasons.append(f"{calls} calls before that on {others}")
        calls = sum(used.calls for used in uses)
        why = "; ".join(dict.fromkeys(reasons))  # equal reasons of several layers once
        row = KernelRow(_name(key, uses_of_key), calls, last.kernel, why)
        if last.decision is not None:
            row.dense_ms = last.decision.dense_ms
            row.sparse_ms = last.decision.sparse_ms
            row.pack_ms = last.decision.pack_ms
            row.pack_uses = uses_of_pack(key, router.pack_reuse(key.device))
        rows.append(row)
    return rows


def _name(key: GemmKey, keys: Iterable[GemmKey]) -> str:
    """The name of a GEMM: its kind and sizes, and where others of ``keys`` have the same, what else differs."""
    name, *properties = _properties(key)
    equal = [other for other in map(_properties, keys) if other[0] == name]
    differing = [text for text in properties if text and any(text not in other for other in equal)]
    return " ".join([name, *differing])


def _properties(key: GemmKey) -> list[str]:
    """Kind and sizes of a GEMM, and everything else in which two GEMMs may differ, as texts."""
    return [
        f"{key.gemm} {key.rows}x{key.depth}x{key.columns}",
        str(key.pattern),
        str(key.dtype).removeprefix("torch."),
        key.sparsity,
        key.device,
        "permuted" if key.permuted else "",
        "drawn" if key.drawn else "",
        str(key.conv or ""),
    ]


def kernel_columns(router: Router) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the cells of the table of kernels; without times if none was measured."""
    rows = kernel_rows(router)
    times = {"dense ms": "{:.3f}", "sparse ms": "{:.3f}", "gain": "{:.2f}x"}
    if not any(row.dense_ms for row in rows):
        times = {}
    head = ("rows x depth x columns", "calls", *times, "kernel", "why")
    cells = []
    for row in rows:
        measured = (row.dense_ms, row.sparse_and_pack_ms, row.gain)
        texts = [
            "-" if value is None else form.format(value)
            for form, value in zip(times.values(), measured, strict=False)
        ]
        cells.append((row.product, str(row.calls), *texts, row.kernel, row.why))
    return head, cells


def print_kernels(router: Router, console: Console | None = None) -> None:
    """Print the table and the fraction of GEMM time that ran sparse; a warning if nothing did."""
    console = console or Console()
    if router.unavailable_reason:  # there is no row with anything but the dense GEMM
        console.print(
            "[yellow]warning:[/] every GEMM was dense, no sparse kernel works here: "
            f"{router.unavailable_reason}"
        )
        return
    head, rows = kernel_columns(router)
    # The table fits into 80 columns, so a reason is the number of a note. Why a GEMM is sparse is in its gain, so
    # only dense ones get a note; every reason is in TensorBoard.
    dense = router.registry.reference.name
    notes = _numbered(why for *_, kernel, why in rows if kernel == dense)
    texts = {"rows x depth x columns": 0, "kernel": 0}
    table = columns_table("N:M kernels", head, texts, {*head} - {*texts})
    for *cells, why in rows:
        table.add_row(*cells, str(notes.get(why, "")))
    if "gain" in head:
        table.caption = "times of a call, packing included; gain: dense / sparse"
        table.caption_justify = "left"
    console.print(table)
    for reason, number in notes.items():
        console.print(f"{number}: {reason}", markup=False, highlight=False)
    share, basis = router.sparse_share()
    console.print(
        f"fraction of the masked layers' GEMM time on sparse kernels: {share:.1%} (by {basis})"
    )
    if not share:
        # A router that found nothing faster is inactive, and so is its counting.
        later = "; later calls are not counted" if router.all_dense else ""
        console.print(
            "[yellow]warning:[/] no GEMM ran on a sparse kernel, so this precision plugin gained nothing; the notes "
            f"say why{later}"
        )


# Ways of counting the FLOPs of a training step, and what each counts.
COUNTINGS = {
    "arithmetic": "nonzero operands and needed outputs; dense is 1",
    "paper": "as the N:M papers count; dense is 1",
    "eligible": "GEMMs that N:M hardware could skip; not a time",
}

_LAYER_COLUMNS = ("layer", "shape", "pattern", "method", "fwd", "dgrad", "wgrad", "why")

PREFIX = "nm_"  # of the statistics in the progress bar, to keep them apart from the model's metrics


def columns_table(
    title: str,
    heads: Iterable[str],
    folded: Mapping[str, int],
    right: Iterable[str] = (),
    *,
    show_header: bool = True,
) -> Table:
    """Return an empty table in which only texts are broken: a number on two lines would be misread.

    Args:
        title: Above the table.
        heads: Of its columns.
        folded: The columns that take several lines in a narrow terminal, and the least width of each.
        right: The columns that are aligned to the right.
        show_header: Whether the heads are printed.

    Example:
        >>> columns_table("N:M layers", ("layer", "shape"), {}).title
        'N:M layers'
    """
    table = Table(
        title=title,
        title_justify="left",
        show_header=show_header,
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for head in heads:
        table.add_column(
            head,
            justify="right" if head in right else "left",
            no_wrap=head not in folded,
            overflow="fold",
            min_width=folded.get(head),
        )
    return table


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return a table in Markdown.

    Example:
        >>> print(markdown_table(["layer", "shape"], [["net_1", "8 x 8"]]))
        | layer | shape |
        | --- | --- |
        | net\_1 | 8 x 8 |
    """
    lines = []
    for cells in (head, ["---" for _ in head], *rows):
        # In one line, with Markdown's special characters escaped; an empty cell needs a space.
        texts = [re.sub(r"([\\|*_])", r"\\\1", " ".join(cell.split())) or " " for cell in cells]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def layer_table(sparsifier: NMSparsifier, width: int = 80) -> Table:
    """Return the table of layers: how each weight's three GEMMs run, and why, as numbers of :func:`layer_reasons`.

    Layers that differ in the numbers within their names alone share a row. Where a name does not fit into the width, a
    pattern or method that all masked layers have goes into the title; then names are broken, at dots alone.
    """
    numbers = layer_reasons(sparsifier)
    rows: list[Sequence[str]] = [_LAYER_COLUMNS]
    for *cells, reason in grouped(layer_rows(sparsifier)):
        rows.append((*cells, f"({numbers[reason]})" if reason else ""))
    columns = {head: [head, *cells] for head, *cells in zip(*rows, strict=True)}
    names, patterns = columns.pop("layer"), columns["pattern"]

    def other_width() -> int:
        """The width of all columns but the names, with the padding of each and of the table."""
        return 3 + sum(2 + max(map(len, cells)) for cells in columns.values())

    title = "N:M layers"
    if other_width() + max(map(len, names)) > width:
        for head in ("pattern", "method"):
            masked = {*columns[head]} - {head, "-"}
            if len(masked) == 1:
                title += f", {head} {masked.pop()}"
                del columns[head]
    names = [broken_name(name, width - other_width()) for name in names]

    table = columns_table(title, ("layer", *columns), {})
    _, *body = zip(patterns, names, *columns.values(), strict=True)
    for pattern, *row in body:
        table.add_row(*row, style="dim" if pattern == "-" else None)
    # Even if the console is narrower: rich would cut the cells; a terminal breaks lines that are too long, and a file
    # holds them whole.
    table.width = other_width() + max(len(line) for name in names for line in name.splitlines())
    return table


def layer_reasons(sparsifier: NMSparsifier) -> dict[str, int]:
    """Return the reasons in the table of layers, each once, with their numbers from 1 on."""
    return _numbered(reason for *_, reason in layer_rows(sparsifier) if reason)


def _numbered(reasons: Iterable[str]) -> dict[str, int]:
    """Different reasons in their order, with numbers from 1 on."""
    return {reason: number for number, reason in enumerate(dict.fromkeys(reasons), 1)}


def layer_rows(sparsifier: NMSparsifier) -> Iterator[tuple[str, ...]]:
    """Yield every weight in the order of the model: layer, shape, pattern, method, forward, dgrad, wgrad, reason."""
    rows: dict[str, tuple[str, ...]] = {}
    for name, layer in sparsifier.layers.items():
        gemms = layer.gemms()._asdict()
        rows[name] = (
            _shape(layer.view.shape),
            str(layer.spec.pattern),
            _part_name(layer.spec.method),
            *(gemm.label for gemm in gemms.values()),
            "; ".join(f"{kind}: {gemm.reason}" for kind, gemm in gemms.items() if gemm.reason),
        )
    model = sparsifier.model
    parameters = model.named_parameters(remove_duplicate=False)
    shapes = {plain_name(name): known_shape(parameter) for name, parameter in parameters}
    for name, reason in sparsifier.skipped.items():
        if reason != NO_MATRICES:
            # A layer has its module's name; a parameter that is not called "weight" follows it.
            shape = shapes.get(f"{name}.weight", shapes.get(name, ()))
            text = "?" if shape is None else _shape(shape)
            rows[name] = (text, "-", "-", "dense", "dense", "dense", reason)
    place = {plain_name(name): k for k, (name, _) in enumerate(model.named_modules())}

    def order(name: str) -> int:
        # The weight of a module that has several is called after its parameter.
        module = name if name in place else name.rpartition(".")[0]
        return place.get(module, len(place))  # a module may have been replaced

    # Sorting keeps the order of the weights of one module.
    for name in sorted(rows, key=order):
        yield name, *rows[name]


def layers_markdown(sparsifier: NMSparsifier, router: Router | None) -> str:
    """Return the table of layers in Markdown, with the kernels of a router after its first GEMMs."""
    kernels = {  # the last one of each GEMM, if it changed
        (used.product.layer, used.product.key.gemm): used.kernel
        for used in (router.used() if router else ())
    }
    rows = []
    for name, *cells in layer_rows(sparsifier):
        texts = [f"{gemm}: {kernel}" for (layer, gemm), kernel in kernels.items() if layer == name]
        # GEMMs that no router has seen ran as torch computes them.
        rows.append((name, *cells, ", ".join(texts) or "dense GEMM"))
    return markdown_table((*_LAYER_COLUMNS, "kernel"), rows)


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
    for layer in sparsifier.layers.values():
        spec, progress = layer.spec, layer.progress
        if progress.stages:
            end = "; the trained model is dense" if progress.stages[-1][1] == DENSE else ""
            lines.append(f"schedule: {describe(progress.stages, spec.pattern)}{end}")
        phases = spec.method.phases(layer)
        start = "masks at the latest from" if phases.is_latest else "masks from"
        for part, what, window, after in (
            (spec.method, start, phases.sparse, "; the model is dense after that"),
            (spec.estimator, "from", progress.estimator_schedule, ", then wgrad is dense"),
        ):
            if window:
                # The first step of a phase and, if it ends, the last one.
                until = f" to {window[1]}{after}" if len(window) == 2 else ""
                lines.append(f"{type(part).__name__}: {what} training step {window[0]}{until}")
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
        size = sum(p.nbytes for p in parameters)
        entries = sum(layer.view.shape.numel() for layer in layers)
        memory = f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
        lines.append(
            f"{method} trains {count:,} parameters of its own, {count / entries:.3g} for each masked weight: "
            f"{memory}, and as much for their gradients and for each tensor of the optimizer's state"
        )
    return lines


def _share(shares: dict[str, float]) -> str:
    """A fraction of the model as text."""
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
    names = [
        (name or type(sparsifier.model).__name__,)
        for name, reason in sparsifier.skipped.items()
        if reason == NO_MATRICES
    ]
    if names:
        yield f"no rows for {', '.join(name for (name,) in grouped(names))}: {NO_MATRICES}"
    if sparsifier.selection.first_last:
        yield "skip_first_last=False masks the first and the last layer, too"
    if sparsifier.scale is not None:
        # Layers of different patterns have different factors.
        rates = {
            config.base_density / layer.spec.pattern.density for layer in sparsifier.layers.values()
        }
        initial = "their values as they are"
        if sparsifier.initial_factors:
            initial = f"their initial values {_times(sparsifier.initial_factors.values())}"
        yield f"scale={sparsifier.scale!r}: learning rates of masked weights {_times(rates)}, {initial}"
    for preset in sparsifier.settings.presets:
        yield f"preset {config.preset}, {preset}"
    yield from phases(sparsifier)
    yield from owned_parameters(sparsifier)


def print_layers(sparsifier: NMSparsifier, console: Console | None = None) -> None:
    """Print the table of layers and the masked fraction of the model; warn if it is small."""
    console = console or Console()
    console.print(layer_table(sparsifier, console.width), crop=False, soft_wrap=True)
    for note in _notes(sparsifier):
        # Names of layers may look like rich's markup.
        console.print(note, style="dim", soft_wrap=True, highlight=False, markup=False)
    layers = sparsifier.selection.layers
    masked = sparsifier.shares()
    if masked["parameters"]:
        console.print(f"masked: {_share(masked)}")
        # No batch may have run yet. Embeddings take no GEMMs, so their parameters do not count.
        part, share = "weight FLOPs", masked.get("flops")
        if share is None:
            part = "parameters outside of embeddings"
            share = share_of_products(sparsifier.model, layers)
        if share < 0.5:
            console.print(
                f"[yellow]warning:[/] less than half of the model's {part} is masked, so little can be gained; the "
                "last column gives the reasons",
                soft_wrap=True,
            )
    with_estimator = [
        layer for layer in layers if layer.spec.estimator and layer.param.requires_grad
    ]
    estimated = shares_of(sparsifier.model, with_estimator, sparsifier.macs)
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
    yield "density", f"{stats['density']:.4f}", "fraction of weights that the forward masks keep"
    yield "N:M violations", f"{sparsifier.violations():,}", "blocks with more than N nonzeros"
    flips = f"{stats['flip_rate']:.1e}, mean {mean_flip_rate(sparsifier.selection.layers):.1e}"
    changed = "fraction of forward mask bits that changed; mean over steps"
    yield "flip rate, last update", flips, changed
    if any(layer.masks.has_backward for layer in sparsifier.layers.values()):
        kept = "fraction of the forward mask that the backward mask keeps"
        yield "overlap", f"{stats['overlap']:.4f}", kept
    yield "kept magnitude", f"{stats['kept_magnitude']:.4f}", "sum of |W_F| over sum of |W|"
    if "grad_snr" in stats:
        error = "norm of dW over the norm of its estimate's error"
        yield "gradient SNR", f"{stats['grad_snr']:.2f}", error
    ratios = sparsifier.flops_ratios(mean=True)
    for kind, meaning in COUNTINGS.items():
        yield f"training FLOPs, {kind}", f"{ratios[kind]:.3f}x", meaning


def print_summary(sparsifier: NMSparsifier, trainer: Trainer, console: Console) -> None:
    """Print the summary and the paths of the log and the checkpoint."""
    heads = ("statistic", "value", "meaning")
    texts = {"statistic": 0, "meaning": 0}
    table = columns_table("N:M summary", heads, texts, ["value"], show_header=False)
    table.columns[-1].style = "dim"
    for row in summary_rows(sparsifier, dict(trainer.callback_metrics)):
        table.add_row(*row)
    console.print(table)
    total = len(sparsifier.layers)
    dense = 0  # layers of methods that have masks at other times, but not now
    unfinished = []  # methods whose mask is still denser than the pattern
    for layer in sparsifier.layers.values():
        method = layer.spec.method
        if layer.spec.forward_reason:
            continue
        if not layer.masks.has_forward:
            dense += isinstance(method, MaskMethod)
        elif method.current_pattern(layer) != layer.spec.pattern:
            unfinished.append(type(method).__name__)
    if dense:
        console.print(
            f"[yellow]warning:[/] the trained model is dense in {dense} of {total} layers: their masks have not "
            "started yet, or have ended (dense_end)"
        )
    if unfinished:
        console.print(
            f"[yellow]warning:[/] the trained model is not N:M in {len(unfinished)} of {total} layers: the masks of "
            f"{', '.join(sorted(set(unfinished)))} had not reached their pattern when the training ended"
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
