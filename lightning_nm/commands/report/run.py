"""A run folder: its events, settings and checkpoints, and what of them is missing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_nm.commands.report.events import Log, Series, read_log
from lightning_nm.export import Verdict, verify


@dataclass
class Run:
    """What a run folder holds, as :func:`read_run` returns it.

    Example:
        >>> scalars = {"train_loss": Series([0], [2.0]), "nm/flip_rate": Series([0], [0.1])}
        >>> run = Run(Path("runs/a"), "a", Log([], scalars=scalars))
        >>> list(run.metrics), list(run.statistics)
        (['train_loss'], ['flip_rate'])

    Attributes:
        path: The folder.
        label: A short name, which differs from those of the other runs of a page.
        log: Its event files.
        settings: ``hparams.yaml``, flat.
        config: The text of ``config.yaml``, which LightningCLI saves; empty without it.
        checkpoints: Names and bytes of the checkpoints below the folder, the newest last.
        saved: What the newest checkpoint says of itself.
        verdicts: Whether its weights are N:M sparse.
        missing: What cannot be shown, and why.
    """

    path: Path
    label: str
    log: Log
    settings: dict[str, str] = field(default_factory=dict)
    config: str = ""
    checkpoints: list[tuple[str, int]] = field(default_factory=list)
    saved: dict[str, str] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, Series]:
        """The scalars that the model logged, without the package's and Lightning's own."""
        found = {}
        for tag, series in self.log.scalars.items():
            # Lightning's logger writes -1 for a hyperparameter metric that the model does not log.
            is_placeholder = tag == "hp_metric" and set(series.values) == {-1.0}
            if tag != "epoch" and not tag.startswith("nm/") and not is_placeholder:
                found[tag] = series
        return found

    @property
    def statistics(self) -> dict[str, Series]:
        """The statistics of the masks of the whole model, by name."""
        found = {}
        for tag, series in self.log.scalars.items():
            name = tag.removeprefix("nm/")
            if name != tag and "/" not in name:  # a second slash precedes a layer
                found[name] = series
        return found

    @property
    def flops(self) -> dict[str, str]:
        """Multiply-adds of training over those of dense training, from the summary: by way of counting."""
        rows = self.log.table("nm/summary")[1:]  # without the head
        return {row[0]: row[1] for row in rows if row[0].startswith("training FLOPs")}


def read_run(path: str | Path, label: str = "") -> Run:
    """Read a run folder.

    Raises:
        ImportError: Without tensorboard.
        ValueError: If the folder has no event files.
    """
    folder = Path(path)
    run = Run(folder, label or folder.name, read_log(folder))
    _read_settings(run)
    _read_checkpoints(run)
    run.missing += _missing(run)
    return run


def labels(paths: Iterable[str | Path]) -> list[str]:
    """Return the ends of paths, as short as they differ.

    Example:
        >>> labels(["runs/a/version_0", "runs/b/version_0"])
        ['a/version_0', 'b/version_0']
    """
    parts_of_paths = [Path(path).resolve().parts for path in paths]
    longest = max((len(parts) for parts in parts_of_paths), default=2)
    # A version alone, such as `version_0`, says little, so that two parts are the least.
    for length in range(2, longest + 1):
        found = ["/".join(parts[-length:]) for parts in parts_of_paths]
        if len(set(found)) == len(found):
            return found
    # A path was given twice.
    return [f"{'/'.join(parts[-2:])} ({number})" for number, parts in enumerate(parts_of_paths, 1)]


class _Settings(yaml.SafeLoader):
    """A loader that reads objects of any class as their text."""


def _text_of_object(loader: yaml.SafeLoader, tag: str, node: yaml.Node) -> str:
    # Hyperparameters may be any objects, which PyYAML tags by their class. None is created here.
    value = node.value if isinstance(node, yaml.ScalarNode) else ""
    _, _, class_name = tag.rpartition(":")
    return f"{class_name} {value}".strip()


# An empty prefix is that of every tag.
_Settings.add_multi_constructor("", _text_of_object)


def _read_settings(run: Run) -> None:
    """Fill in the hyperparameters and the config, or why they are missing."""
    path = run.path / "hparams.yaml"
    if path.exists():
        try:
            found = yaml.load(path.read_text(encoding="utf-8"), _Settings) or {}
            run.settings = dict(_flat("", found))
        except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
            run.missing.append(f"hparams.yaml cannot be read: {error}")
        else:
            if not run.settings:
                run.missing.append("hparams.yaml is empty: the model saved no hyperparameters")
    config = run.path / "config.yaml"
    if config.is_file():
        run.config = config.read_text(encoding="utf-8", errors="replace")


def _flat(prefix: str, value: Any) -> Iterable[tuple[str, str]]:
    """Join the keys of nested settings by dots."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            if key == "_instantiator":  # Lightning's own, of LightningCLI
                continue
            name = f"{prefix}.{key}" if prefix else str(key)
            yield from _flat(name, part)
    elif prefix:  # else the whole file is no mapping, or an empty one
        yield prefix, str(value)


def _read_checkpoints(run: Run) -> None:
    """Fill in the checkpoints, what the newest says of itself, and the check of its weights."""
    paths = [path for path in run.path.rglob("*.ckpt") if not _is_within_checkpoint(path)]
    paths.sort(key=lambda path: path.stat().st_mtime)
    run.checkpoints = [(str(path.relative_to(run.path)), _size(path)) for path in paths]
    if not paths:
        run.missing.append(
            "there is no checkpoint (*.ckpt) in the folder: the weights are not verified"
        )
        return
    newest = paths[-1]
    # Lightning's keys, and what the page calls them.
    names = {"epoch": "epoch", "global_step": "step", "pytorch-lightning_version": "lightning"}
    try:
        content = _read_checkpoint(newest)
        run.saved = {name: str(content[key]) for key, name in names.items() if key in content}
        run.verdicts = verify(newest).verdicts
    except Exception as error:  # of any file that is no checkpoint of ours
        run.missing.append(f"the weights of {run.checkpoints[-1][0]} are not verified: {error}")


def _is_within_checkpoint(path: Path) -> bool:
    """Whether a file is a part of a distributed checkpoint, which is a folder."""
    return any(parent.suffix == ".ckpt" for parent in path.parents)


def _read_checkpoint(path: Path) -> Any:
    """What a checkpoint holds; of a distributed one, what it holds beside tensors."""
    if path.is_dir():
        return torch.load(path / "meta.pt", map_location="cpu", weights_only=True)
    # Mapped: the tensors of a large checkpoint are not read for a few numbers.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def _size(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _missing(run: Run) -> list[str]:
    """What a page of the run would be expected to show and cannot, or what is unusual in it."""
    log = run.log
    found = []
    if not log.scalars:
        found.append("the event files hold no scalars: the run ended before its first log")
    for tag, series in log.scalars.items():
        step = series.first_bad
        if step is not None:
            found.append(
                f"{tag} is not finite from step {step} on or at times; curves have gaps there"
            )
    if log.rewound:
        steps = ", ".join(map(str, log.rewound))
        found.append(
            f"the run went back to step {steps}: of steps that were trained again, the last values are shown"
        )
    if not (run.path / "hparams.yaml").is_file():
        found.append("there is no hparams.yaml: no settings to show")
    if run.statistics:
        found += _missing_of_masks(log)
    else:
        why = "a dense run, or one whose NMSparsityCallback has `monitor: false`"
        found.append(f"there are no statistics of masks (nm/*): {why}")
    return found


def _missing_of_masks(log: Log) -> list[str]:
    """What the callback of this package did not log."""
    found = []
    if "nm/layers" not in log.texts:
        found.append(
            "there is no table of layers (nm/layers): `layer_table: false`, or an older version"
        )
    elif "nm/summary" not in log.texts:
        found.append(
            "there is no summary (nm/summary): the fit was interrupted, goes on, or is of an older version"
        )
    if not log.maps:
        why = "`heat_maps: false`, or an older version; heat maps below are those of `log_layers`, if any"
        found.append(f"there are no columns of heat maps (nm/maps): {why}")
    return found
