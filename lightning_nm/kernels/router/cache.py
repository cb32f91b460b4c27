"""Decisions, which kernel runs which product: their environment, their file, and sharing them between processes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.utils import collect_env

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.kernels.api import Convolution, GemmKey, bucketed
from lightning_nm.kernels.cpu.library import (
    LEVELS,
    compiled_from,
    cpu_name,
    has_amx,
    level,
    unavailable,
)
from lightning_nm.kernels.gpu.cusparselt import library_version

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

SCHEMA = 2

Source = Literal["measured", "forced", "default", "postponed"]
"""Timed on the device; requested by the mode; the reference because no other kernel can run, or because there was no
time left to measure."""


@dataclass(frozen=True)
class Environment:
    """Where decisions were measured; they are reused only in an equal environment.

    Example::

        >>> str(Environment("H200", "580.65", "2.13.0", "13.0", "801"))
        'device H200, driver 580.65, torch 2.13.0, cuda 13.0, cusparselt 801'
    """

    device: str  # its name; the others are versions, None for what is missing
    driver: str | None
    torch: str
    cuda: str | None  # that torch was built for
    cusparselt: str | None  # the loaded library

    def __str__(self) -> str:
        # The text is the key of the decisions in their file.
        parts = []
        for field in fields(self):
            value = getattr(self, field.name) or "none"
            parts.append(f"{field.name} {value}")
        return ", ".join(parts)


def environment_of(device: torch.device) -> Environment:
    """Describe a device of this machine; a CPU by its model, instruction set, library and threads."""
    if device.type == "cpu":
        # Another instruction set, build of the library or number of threads is another speed.
        kernels = "no kernels"
        if not unavailable():
            kernels = f"{LEVELS[level()]}; library {compiled_from()}"
        # Virtual machines report one name for CPUs with AMX and without, whose dense products differ in speed.
        parts = [cpu_name(), *(["AMX"] if has_amx() else []), kernels]
        # The limit of oneDNN, which computes torch's dense products.
        if limit := os.environ.get("ONEDNN_MAX_CPU_ISA"):
            parts.append(f"oneDNN up to {limit}")
        name = "; ".join([*parts, f"threads: {torch.get_num_threads()}"])
        return Environment(name, None, torch.__version__, None, None)
    if device.type != "cuda":
        return Environment(device.type, None, torch.__version__, torch.version.cuda, None)
    cusparselt = library_version()
    return Environment(
        device=torch.cuda.get_device_name(device),
        driver=collect_env.get_nvidia_driver_version(collect_env.run),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cusparselt=None if cusparselt is None else str(cusparselt),
    )


@dataclass(frozen=True)
class Decision:
    """The kernel of a product and why, with measured times, None where they are unknown."""

    kernel: str
    dense_ms: float | None
    sparse_ms: float | None  # of the best sparse product without packing, chosen or not
    pack_ms: float | None  # of packing its operand once
    reason: str  # why this kernel, and why not others
    source: Source
    # When it holds: available kernels, uses of a pack, margin, whether products must be deterministic.
    terms: str = ""

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Decision:
        """Read what :func:`dataclasses.asdict` and JSON made of a decision.

        Raises:
            TypeError: If it is none.
        """
        decision = cls(**entry)
        # Dataclasses check no types, and a file may have been edited.
        texts = (decision.kernel, decision.reason, decision.source, decision.terms)
        times = (decision.dense_ms, decision.sparse_ms, decision.pack_ms)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{entry!r} is no decision")
        if not all(time is None or isinstance(time, (int, float)) for time in times):
            raise TypeError(f"{entry!r} has a time that is no number")
        return decision


def decisions_file(path: str | os.PathLike[str] | None) -> Path | None:
    """The file at a path, which may begin with ``~``; ``None`` if the user has no home directory."""
    if path is None:
        return None
    try:
        return Path(path).expanduser()
    except RuntimeError:  # there is no home directory, as for some users of containers
        return None


class Decisions(MutableMapping[GemmKey, Decision]):
    """The decisions of one environment.

    Keys whose tokens are in one bucket (:func:`~lightning_nm.kernels.api.token_bucket`) are the same key, and so are
    those of two devices of one type: the GPUs of a machine are assumed to be equal.

    One thread may add decisions while others read them: iterating goes through those that were there when it began.

    Example::

        >>> from lightning_nm import NMPattern
        >>> decisions = Decisions(environment_of(torch.device("cpu")))
        >>> key = GemmKey("forward", 64, 32, 1000, torch.float32, NMPattern(2, 4), "cpu")
        >>> decisions[key] = Decision("cpu-csr", 1.0, 0.5, 0.1, "measured", "measured")
        >>> decisions[GemmKey("forward", 64, 32, 1024, torch.float32, NMPattern(2, 4), "cpu")].kernel
        'cpu-csr'
    """

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self._decisions: dict[GemmKey, Decision] = {}

    def __getitem__(self, key: GemmKey) -> Decision:
        return self._decisions[stored_key(key)]

    def __setitem__(self, key: GemmKey, decision: Decision) -> None:
        self._decisions[stored_key(key)] = decision

    def __delitem__(self, key: GemmKey) -> None:
        del self._decisions[stored_key(key)]

    def __iter__(self) -> Iterator[GemmKey]:
        return iter(list(self._decisions))  # the copy is made without switching to another thread

    def __len__(self) -> int:
        return len(self._decisions)

    @classmethod
    def load(cls, path: str | os.PathLike[str], environment: Environment) -> Decisions:
        """Read the decisions of an environment; a file that is missing, damaged or of another schema has none."""
        decisions = cls(environment)
        # Whatever is wrong with the file: the products are measured again, and saving says what is wrong.
        with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            entries = _read(Path(path)).get(str(environment), {})
            found = {_read_key(text): Decision.from_dict(entry) for text, entry in entries.items()}
            decisions._decisions = found  # all or none
        return decisions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Add the decisions to a file; those of other environments and of other keys stay in it.

        The file is replaced atomically. Processes and threads that save at the same time take turns, except on Windows
        and on file systems without locks, where the decisions of one may be lost.

        Raises:
            ValueError: If the file exists and does not hold decisions; one of another schema is replaced.
            OSError: If the file cannot be written.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            self._save(path)

    def _save(self, path: Path) -> None:
        """Add the decisions to a file, which is locked by the caller."""
        try:
            environments = _read(path)
        except (FileNotFoundError, _OtherSchemaError):
            environments = {}
        # Read again at each save: another process may have added decisions.
        entries = environments.setdefault(str(self.environment), {})
        for key, decision in self.items():
            # A postponed product is still to be measured, here or by the next training.
            if decision.source != "postponed":
                entries[_written_key(key)] = asdict(decision)
        content = {"schema": SCHEMA, "environments": environments}
        # A reader sees the old file or the new one, never a part: renaming is atomic.
        new = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            new.write_text(json.dumps(content, indent=1) + "\n")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)  # left if writing or renaming failed


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes and threads out that lock the folder, where the system has such locks."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # which unlocks


class _OtherSchemaError(ValueError):
    """The file holds decisions of another release."""


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the entries of a file, by environment."""
    text = path.read_text()
    try:
        content = json.loads(text)
        schema = content["schema"]
        environments = content["environments"]
        if not isinstance(environments, dict):
            raise TypeError("`environments` is not a mapping")
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} does not hold decisions: give another path, or remove it"
        ) from error
    if schema != SCHEMA:
        raise _OtherSchemaError(f"{path} is of schema {schema!r}, not {SCHEMA}")
    return cast("dict[str, dict[str, Any]]", environments)


def _written_key(key: GemmKey) -> str:
    """A key as the text that names its entry in a file: its fields in JSON."""
    values = {
        **vars(key),
        "dtype": str(key.dtype).removeprefix("torch."),
        "pattern": str(key.pattern),
    }
    return json.dumps(values)


def _read_key(text: str) -> GemmKey:
    """Undo :func:`_written_key`; raise a ValueError, a TypeError or an AttributeError for another text."""
    values = json.loads(text)
    dtype = getattr(torch, values["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{values['dtype']} is no dtype")
    conv = values["conv"]
    if conv is not None:
        # JSON turned tuples into lists, which cannot be part of a key.
        conv = Convolution._make(tuple(x) if isinstance(x, list) else x for x in conv)
    pattern = NMPattern.parse(values["pattern"])
    return GemmKey(**{**values, "dtype": dtype, "pattern": pattern, "conv": conv})


@lru_cache(maxsize=1 << 14)
def stored_key(key: GemmKey) -> GemmKey:
    """The key under which a decision is stored: a bucket of tokens and a device type."""
    return replace(bucketed(key), device=torch.device(key.device).type)


def share(decisions: Decisions) -> Decisions:
    """Return the decisions of the first process, with their environment, in every process.

    Processes that decide for themselves may choose differently where two kernels are equally fast. Every process must
    call this. Without :mod:`torch.distributed` it returns `decisions`.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return decisions
    box = [decisions]
    dist.broadcast_object_list(box, src=0)
    return box[0]
