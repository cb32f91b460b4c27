"""Statistics of the masks in the progress bar."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_nm.sparsifier import NMSparsifier

PREFIX = "nm_"


def progress_bar_statistics(sparsifier: NMSparsifier, statistics: Mapping[str, float]) -> dict[str, float]:
    """Return density, flip rate and the ``headline`` statistic of each method by short names.

    The names begin with ``nm_``, so that they do not collide with metrics of the model.

    Args:
        sparsifier: The masked model.
        statistics: Its :meth:`~lightning_nm.NMSparsifier.stats`.
    """
    names = {"density": "density", "flips": "flip_rate"}
    names.update({layer.method.headline: layer.method.headline for layer in sparsifier.layers.values()})
    return {PREFIX + short: statistics[name] for short, name in names.items() if name in statistics}
