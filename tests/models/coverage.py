"""What is masked of each family: ``python -m tests.models.coverage`` prints the table of docs/models.md."""

from __future__ import annotations

import logging
import re
import warnings

import torch

from lightning_nm import NMSparsifier
from tests.models.families import EXCLUDE, FAMILIES, make, whole


def selection(family):
    """The names of masked layers, and of the others with the reason."""
    sparsifier = NMSparsifier(make(family), "2:4", "bi-mask", exclude=EXCLUDE.get(family)).attach()
    masked = [name.removeprefix("model.") for name in sparsifier.layers]
    skipped = {
        name.removeprefix("model."): reason.replace("'model.", "'")
        for name, reason in sparsifier.skipped.items()
    }
    return masked, skipped


def template(name):
    """A layer's name without its place in the stack, and without the number of the stack."""
    return re.sub(r"\d+(?=\.)|(?<=\.)\d+$", "#", name)


def _joined(names):
    """Dotted names, each a list of its parts, with those of one beginning in braces."""
    groups: dict[str, list[list[str]]] = {}
    for head, *rest in names:
        groups.setdefault(head, []).append(rest)
    joined = []
    for head, rests in groups.items():
        if [] in rests:
            joined.append(head)
        inner = _joined([rest for rest in rests if rest])
        if len(inner) > 1:
            joined.append(f"{head}.{{{', '.join(inner)}}}")
        elif inner:
            joined.append(f"{head}.{inner[0]}")
    return joined


def _names(names):
    """The names of layers, those within one stack joined."""
    templates = dict.fromkeys(map(template, names))
    return ", ".join(f"`{name}`" for name in _joined([name.split(".") for name in templates]))


def share(family, masked):
    """The fraction of the parameters of the family's default model in layers that are called as the masked ones are."""
    templates = {template(name) for name in masked}
    sizes = {name: parameter.numel() for name, parameter in whole(family).named_parameters()}
    inside = sum(
        size for name, size in sizes.items() if template(name.removesuffix(".weight")) in templates
    )
    return inside / sum(sizes.values()), sum(sizes.values())


def table():
    """The table as lines of Markdown, and one line with the reasons that it numbers."""
    lines = ["| family | masked | dense | fraction |", "| --- | --- | --- | --- |"]
    numbers: dict[str, int] = {}
    for family in FAMILIES:
        masked, skipped = selection(family)
        part, size = share(family, masked)
        others: dict[int, list[str]] = {}
        for name, reason in skipped.items():
            # What follows differs from layer to layer: the class, the weight that shares it.
            short = re.split(r": it is masked only if|, and shares its weight| for \w+$", reason)[0]
            others.setdefault(numbers.setdefault(short, len(numbers) + 1), []).append(name)
        dense = "; ".join(f"{_names(names)} ({number})" for number, names in others.items())
        lines.append(
            f"| {family} | {_names(masked)} | {dense} | {part:.1%} of {size / 1e6:,.0f} M |"
        )
    return [*lines, "; ".join(f"({number}) {reason}" for reason, number in numbers.items())]


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("\n".join(table()))
