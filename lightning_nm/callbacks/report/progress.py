"""What the progress bar says of the masks."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_nm.sparsifier import NMSparsifier

PREFIX = "nm_"


def progress_bar_statistics(sparsifier: NMSparsifier, statistics: Mapping[str, float]) -> dict[str, float]:
    """The figures for the bar by short names: density, flip rate, and what each method is watched by.

    The names begin with ``nm_``: a metric of the model called `density` is another one.

    Args:
        sparsifier: The masked model.
        statistics: Its :meth:`~lightning_nm.NMSparsifier.stats`.
    """
    names = {"density": "density", "flips": "flip_rate"}
    names.update({layer.method.headline: layer.method.headline for layer in sparsifier.layers.values()})
    return {PREFIX + short: statistics[name] for short, name in names.items() if name in statistics}
