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
    sparsifier = NMSparsifier(make(family), "2:4", exclude=EXCLUDE.get(family)).attach()
    masked = [name.removeprefix("model.") for name in sparsifier.layers]
    skipped = {
        name.removeprefix("model."): reason.replace("'model.", "'")
        for name, reason in sparsifier.skipped.items()
    }
    return masked, skipped


def template(name):
    """A layer's name without its place in the stack."""
    return re.sub(r"\.\d+(?=\.|$)", ".#", name)


def _names(names):
    """The names of layers, those within one stack joined."""
    stacks: dict[str, list[str]] = {}
    for name in dict.fromkeys(map(template, names)):
        stack, within, rest = name.rpartition("#.")
        stacks.setdefault(stack + within, []).append(rest)
    return ", ".join(
        f"`{stack}{{{', '.join(rests)}}}`"
        if stack and len(rests) > 1
        else ", ".join(f"`{stack}{rest}`" for rest in rests)
        for stack, rests in stacks.items()
    )


def share(family, masked):
    """The share of the parameters of the family's default model in layers that are called as the masked ones are."""
    templates = {template(name) for name in masked}
    sizes = {name: parameter.numel() for name, parameter in whole(family).named_parameters()}
    inside = sum(
        size for name, size in sizes.items() if template(name.removesuffix(".weight")) in templates
    )
    return inside / sum(sizes.values()), sum(sizes.values())


def table():
    """The table as lines of Markdown."""
    lines = ["| family | masked | dense | share |", "| --- | --- | --- | --- |"]
    for family in FAMILIES:
        masked, skipped = selection(family)
        part, size = share(family, masked)
        others: dict[str, list[str]] = {}
        for name, reason in skipped.items():
            # That lookups are masked by their exact name is told once, below the table.
            short, _, _ = reason.partition(": it is masked only if `include` has its exact name")
            others.setdefault(short, []).append(name)
        dense = "; ".join(f"{_names(names)} ({reason})" for reason, names in others.items())
        lines.append(
            f"| {family} | {_names(masked)} | {dense} | {part:.1%} of {size / 1e6:,.0f} M |"
        )
    return lines


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("\n".join(table()))
