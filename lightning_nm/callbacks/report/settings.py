"""The settings of a sparse training as hyperparameters of loggers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import TensorBoardLogger

from lightning_nm.functional.schedule import Schedule
from lightning_nm.sparsifier import NMSparsifier

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_nm.estimators import GradientEstimator
    from lightning_nm.methods import Method
    from lightning_nm.nn.selection.selection import Rule


def hyperparameters(sparsifier: NMSparsifier, prefix: str = "nm") -> dict[str, Any]:
    """Return pattern, method, estimator and their settings by name.

    The names are ``nm/...`` for the general settings, and ``nm/rules/<k>/...`` for those of rules, or start with
    another ``prefix``.

    Example:
        >>> from torch import nn
        >>> found = hyperparameters(NMSparsifier(nn.Linear(8, 8), "2:4", "sr-ste"))
        >>> found["nm/pattern"], found["nm/method"], found["nm/method/decay"], found["nm/grad_estimator"]
        ('2:4', 'sr-ste', 0.0002, 'none')
    """
    # The general rule comes last, because the first one that matches a layer decides.
    *rules, general = sparsifier.rules
    found = _rule_settings(general, prefix)
    for number, rule in enumerate(rules):
        found.update(_rule_settings(rule, f"{prefix}/rules/{number}"))
    if sparsifier.config.preset is not None:
        found[f"{prefix}/preset"] = sparsifier.config.preset
    if sparsifier.exclude:
        found[f"{prefix}/exclude"] = ", ".join(sparsifier.exclude)
    return found


def _rule_settings(rule: Rule, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if rule.include is not None:
        found[f"{prefix}/include"] = ", ".join(rule.include)
    found[f"{prefix}/pattern"] = str(rule.pattern)
    found[f"{prefix}/conv_layout"] = rule.conv_layout
    found.update(_part_settings(rule.method, f"{prefix}/method"))
    found.update(_part_settings(rule.estimator, f"{prefix}/grad_estimator"))
    # Only where they are used: most trainings have none.
    if rule.schedule is not None:
        for part in rule.schedule.parts:
            found[f"{prefix}/schedule/{part}"] = _part_of_schedule(rule.schedule, part)
    if rule.dgrad is not None:
        found.update(_part_settings(rule.dgrad, f"{prefix}/dgrad"))
    return found


def _part_of_schedule(schedule: Schedule, part: str) -> Any:
    """A moment as it is; the ramp as text."""
    if part != "ramp":
        return getattr(schedule, part)
    patterns = ", ".join(map(str, schedule.ramp))
    if schedule.ramp_ends is None:
        return patterns
    return f"{patterns} until {', '.join(map(str, schedule.ramp_ends))}"


def _part_settings(part: Method | GradientEstimator | None, key: str) -> dict[str, Any]:
    """The name and the public attributes of a method or an estimator."""
    if part is None:
        return {key: "none"}
    # Methods and estimators of users may have no short name.
    name = getattr(part, "short_name", "") or type(part).__name__
    found: dict[str, Any] = {key: name}
    for attribute, value in vars(part).items():
        if attribute.startswith("_"):
            continue
        # Loggers take no other types, such as schedules and tensors.
        is_plain = isinstance(value, (bool, int, float))
        found[f"{key}/{attribute}"] = value if is_plain else str(value)
    return found


def log_hyperparameters(trainer: pl.Trainer, sparsifier: NMSparsifier, name: str | None) -> None:
    """Add the settings to the hyperparameters of the Trainer's loggers; as ``nm/<name>/...`` if there is a name."""
    prefix = f"nm/{name}" if name else "nm"
    settings = hyperparameters(sparsifier, prefix)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            # Without metrics this logger would log hp_metric = -1.
            logger.log_hyperparams(settings, metrics={})
        else:
            logger.log_hyperparams(settings)
