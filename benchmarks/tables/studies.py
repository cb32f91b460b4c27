"""Tables of studies, by the code of ``lightning-nm study`` itself, from the trainings in ``benchmarks/results``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.tables.markdown import ROOT, Tables, read_csv
from benchmarks.tables.markdown import table as markdown_table
from lightning_nm.commands.study import analysis
from lightning_nm.commands.study.analysis import Section, sections
from lightning_nm.commands.study.spec import Spec, read


def study(name: str) -> tuple[Spec, list[Section]]:
    """A study and the sections of its report."""
    spec = read(ROOT / "studies" / f"{name}.yaml")
    return spec, sections(spec, read_csv(f"study-{name.replace('/', '-')}.csv"))


def means(name: str) -> str:
    """The means of every variant."""
    return _joined(name, lambda row: " - " not in row)


def differences(name: str, *baselines: str, only: Sequence[str] = ()) -> str:
    """The paired differences to some baselines, by default all; or the named ones alone."""

    def is_shown(row: str) -> bool:
        baseline = row.rpartition(" - ")[2]
        return (
            " - " in row and (not baselines or baseline in baselines) and (not only or row in only)
        )

    return _joined(name, is_shown)


def _joined(name: str, is_shown: Callable[[str], bool]) -> str:
    """The tables of all grid points as one, with the point in the first column if there are several."""
    spec, found = study(name)
    header = analysis.table(spec, found[0])[0]
    rows = [
        [section.title.removeprefix("pattern "), *row]
        for section in found
        for row in analysis.table(spec, section)[1:]
        if is_shown(row[0])
    ]
    # The time of a fit, on whichever machine, says nothing.
    kept = [
        i
        for i, column in enumerate(["N:M", *header])
        if column != "fit, s" and {row[i] for row in rows} != {"-"} and (i or len(found) > 1)
    ]
    return markdown_table(
        [["N:M", *header][i] for i in kept], [[row[i] for i in kept] for row in rows]
    )


def gain_over(
    name: str,
    variant: str,
    baseline: str,
    unit: str,
    scale: float = 1.0,
    pattern: str | None = None,
) -> str:
    """One paired difference with its interval, as text."""
    _, found = study(name)
    section = next(each for each in found if pattern is None or pattern in each.title)
    difference = next(
        each.difference
        for each in section.comparisons
        if (each.variant, each.baseline) == (variant, baseline)
    )
    digits = 1 if unit == "points" else 3
    values = [scale * value for value in (difference.mean, difference.low, difference.high)]
    return "{:+.{d}f} [{:+.{d}f}, {:+.{d}f}] {unit}".format(*values, d=digits, unit=unit)


def flops_ratio(name: str, variant: str, baseline: str, pattern: str | None = None) -> str:
    """Training FLOPs of a variant over those of another, as the papers count."""
    rows = [
        row
        for row in read_csv(f"study-{name}.csv")
        if pattern is None or row.get("pattern") == pattern
    ]
    of = {row["variant"]: row["flops_paper"] for row in rows if "flops_paper" in row}
    ratio = of[variant] / of[baseline]
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}"


def summary() -> str:
    """What the studies found, one line for each comparison."""
    images, text, denser = "bame-fashion-mnist", "bame-help-topics", "bame-help-topics-denser"
    seconds = "seconds-help-topics"
    rows = []
    for name, task, pattern, variant, baseline in (
        (images, "images, CNN, SGD", "1:16", "bame", "sr-ste"),
        (images, "images, CNN, SGD", "1:16", "bame", "fixed"),
        (text, "text, transformer, AdamW", "1:16", "bame", "sr-ste"),
        (text, "text, transformer, AdamW", "1:16", "bame", "fixed"),
        (denser, "text, transformer, AdamW", "1:8", "bame", "sr-ste"),
        (denser, "text, transformer, AdamW", "2:4", "bame", "sr-ste"),
    ):
        unit, scale = ("points", 100.0) if name == images else ("bits", 1.0)
        who = f"`{variant}` - {'a fixed mask' if baseline == 'fixed' else f'`{baseline}`'}"
        found = gain_over(name, variant, baseline, unit, scale, pattern)
        rows.append(
            [task, pattern, who, found, flops_ratio(name, variant, baseline, pattern), f"`{name}`"]
        )
    for variant, baseline, pattern, who in (
        ("asp-1:8-384", "dense-384", "1:8", "`asp` - dense of the same width"),
        ("asp-1:4-256", "dense-128", "1:4", "best sparse - best dense of any width"),
    ):
        found = gain_over(seconds, variant, baseline, "bits")
        rows.append(["text, GPT, 40 s on 2 cores", pattern, who, found, "", f"`{seconds}`"])
    return markdown_table(["task", "N:M", "comparison", "difference", "FLOPs", "study"], rows)


_SECONDS = (
    "asp-1:4-256 - dense-128",
    "asp-1:4-256 - dense-256",
    "asp-1:8-384 - dense-384",
    "bame-1:8-384 - dense-384",
)
TABLES: Tables = {
    "studies-summary": summary,
    **{
        f"{name}-means": partial(means, name)
        for name in (
            "bame-help-topics",
            "bame-fashion-mnist",
            "bame-help-topics-denser",
            "seconds-help-topics",
        )
    },
    "bame-help-topics-differences": partial(differences, "bame-help-topics"),
    "bame-fashion-mnist-differences": partial(differences, "bame-fashion-mnist"),
    "bame-help-topics-denser-differences": partial(differences, "bame-help-topics-denser"),
    "seconds-help-topics-differences": partial(differences, "seconds-help-topics", only=_SECONDS),
}
