"""The settings of a sparse training, for loggers and for ``repr``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_nm.sparsifier import NMSparsifier

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_nm.estimators import GradientEstimator
    from lightning_nm.methods import Method
    from lightning_nm.nn.selection.selection import Rule


def hyperparameters(sparsifier: NMSparsifier, prefix: str = "nm") -> dict[str, Any]:
    """Pattern, method, estimator and their settings: ``nm/...`` for the general ones, ``nm/rules/<k>/...`` for rules.

    Example:
        >>> from torch import nn
        >>> found = hyperparameters(NMSparsifier(nn.Linear(8, 8), "2:4", "sr-ste"))
        >>> found["nm/pattern"], found["nm/method"], found["nm/method/decay"], found["nm/grad_estimator"]
        ('2:4', 'sr-ste', 0.0002, 'none')
    """
    *rules, general = sparsifier.rules
    found = _of_rule(general, prefix)
    for number, rule in enumerate(rules):
        found |= _of_rule(rule, f"{prefix}/rules/{number}")
    if sparsifier.config.preset is not None:
        found[f"{prefix}/preset"] = sparsifier.config.preset
    if sparsifier.exclude:
        found[f"{prefix}/exclude"] = ", ".join(sparsifier.exclude)
    return found


def _of_rule(rule: Rule, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rule.include is not None:
        found[f"{prefix}/include"] = ", ".join(rule.include)
    found[f"{prefix}/pattern"] = str(rule.pattern)
    found[f"{prefix}/conv_layout"] = rule.conv_layout
    found |= _of_part(rule.method, f"{prefix}/method")
    found |= _of_part(rule.estimator, f"{prefix}/grad_estimator")
    return found


def _of_part(part: Method | GradientEstimator | None, key: str) -> dict[str, Any]:
    """The name and the public attributes of a method or an estimator."""
    if part is None:
        return {key: "none"}
    found: dict[str, Any] = {key: getattr(part, "short_name", "") or type(part).__name__}
    for name, value in vars(part).items():
        if not name.startswith("_"):
            # Loggers take no other types, such as schedules and tensors.
            found[f"{key}/{name}"] = value if isinstance(value, (bool, int, float)) else str(value)
    return found


def log_hyperparameters(trainer: pl.Trainer, sparsifier: NMSparsifier, name: str | None) -> None:
    """Add the settings to the hyperparameters of the Trainer's loggers; as ``nm/<name>/...`` if there is a name."""
    settings = hyperparameters(sparsifier, f"nm/{name}" if name else "nm")
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(settings, metrics={})  # without these it logs hp_metric = -1
        else:
            logger.log_hyperparams(settings)
