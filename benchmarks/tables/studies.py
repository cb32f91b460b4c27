"""Tables of studies, by the code of ``lightning-nm study`` itself, from the trainings in ``benchmarks/results``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.tables.markdown import ROOT, Tables, read_csv
from benchmarks.tables.markdown import table as markdown_table
from lightning_nm.commands.study import analysis
from lightning_nm.commands.study.analysis import Section, sections
from lightning_nm.commands.study.spec import Spec, read

# The time of a fit, on whichever machine, says nothing; trainings are missing only where a table says so.
LEFT_OUT = ("fit, s", "missing")


def study(name: str) -> tuple[Spec, list[Section]]:
    """A study and the sections of its report."""
    spec = read(ROOT / "studies" / f"{name}.yaml")
    return spec, sections(spec, read_csv(f"study-{name.replace('/', '-')}.csv"))


def means(name: str) -> str:
    """The means of every variant."""
    spec, found = study(name)
    return _joined(found, [analysis.means(spec, section) for section in found])


def differences(name: str, *baselines: str, only: Sequence[str] = ()) -> str:
    """The paired differences to some baselines, by default all; or the named ones alone."""
    _, found = study(name)
    shown = []
    for section in found:
        header, *kept = analysis.differences(section)
        if baselines:
            kept = [row for row in kept if row[0].rpartition(" - ")[2] in baselines]
        shown.append([header, *(row for row in kept if not only or row[0] in only)])
    return _joined(found, shown)


def _joined(found: Sequence[Section], shown: Sequence[list[list[str]]]) -> str:
    """The tables of all grid points as one, with the point in the first column if there are several."""
    header, points = shown[0][0], len(found) > 1
    missing = any(
        dict(zip(header, row, strict=True)).get("missing", "0") != "0"
        for _, *rows in shown
        for row in rows
    )
    kept = [
        i
        for i, name in enumerate(header)
        if name not in LEFT_OUT or (name == "missing" and missing)
    ]
    rows = []
    for section, (_, *cells) in zip(found, shown, strict=True):
        title = [section.title.removeprefix("pattern ")] * points
        rows += [title + [row[i] for i in kept] for row in cells]
    return markdown_table(["N:M"] * points + [header[i] for i in kept], rows)


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
