"""The settings of a sparse training, for loggers and for ``repr``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_nm.sparsifier import NMSparsifier

if TYPE_CHECKING:
    import lightning.pytorch as pl


def hyperparameters(sparsifier: NMSparsifier, prefix: str = "nm") -> dict[str, Any]:
    """Pattern, method, estimator and their settings: ``nm/...`` for the general ones, ``nm/rules/<k>/...`` for rules.

    Example:
        >>> from torch import nn
        >>> found = hyperparameters(NMSparsifier(nn.Linear(8, 8), "2:4", "sr-ste"))
        >>> found["nm/pattern"], found["nm/method"], found["nm/method/decay"], found["nm/grad_estimator"]
        ('2:4', 'sr-ste', 0.0002, 'none')
    """
    *rules, general = sparsifier.rules
    found: dict[str, Any] = {}
    for place, rule in ((prefix, general), *((f"{prefix}/rules/{number}", rule) for number, rule in enumerate(rules))):
        if rule.include is not None:
            found[f"{place}/include"] = ", ".join(rule.include)
        found[f"{place}/pattern"] = str(rule.pattern)
        found[f"{place}/conv_layout"] = rule.conv_layout
        for key, part in (("method", rule.method), ("grad_estimator", rule.estimator)):
            found[f"{place}/{key}"] = "none" if part is None else getattr(part, "short_name", "") or type(part).__name__
            for name, value in vars(part).items() if part is not None else ():
                if not name.startswith("_"):
                    found[f"{place}/{key}/{name}"] = value if isinstance(value, (bool, int, float)) else str(value)
    if sparsifier.config.preset is not None:
        found[f"{prefix}/preset"] = sparsifier.config.preset
    if sparsifier.exclude:
        found[f"{prefix}/exclude"] = ", ".join(sparsifier.exclude)
    return found


def log_hyperparameters(trainer: pl.Trainer, sparsifier: NMSparsifier, name: str | None) -> None:
    """Add the settings to the hyperparameters of the Trainer's loggers; as ``nm/<name>/...`` if there is a name."""
    settings = hyperparameters(sparsifier, f"nm/{name}" if name else "nm")
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(settings, metrics={})  # without these it logs hp_metric = -1
        else:
            logger.log_hyperparams(settings)
