"""The targets of an export by ExecuTorch, and the packages that it needs."""

from __future__ import annotations

from importlib.util import find_spec

from lightning_nm.functional.spelling import did_you_mean

EXTRA = "pip install -e '.[ethos-u]' in a checkout of lightning_nm"

ETHOS_U85 = tuple(f"ethos-u85-{macs}" for macs in (128, 256, 512, 1024, 2048))
"""The NPUs with 2:4 sparse weights, by their multiply-accumulate units."""

TARGETS = ("cpu", *ETHOS_U85)

# Vela compiles for them, but their weight formats have no 2:4.
_WITHOUT_SPARSITY = ("ethos-u55", "ethos-u65")


def check_target(target: str) -> None:
    """Refuse a target that is not in :data:`TARGETS`.

    Raises:
        ValueError: With the known targets, and the one that may have been meant.

    Example:
        >>> check_target("ethos-u85-255")
        Traceback (most recent call last):
        ValueError: there is no target 'ethos-u85-255', only cpu, ethos-u85-128, ethos-u85-256, ethos-u85-512, \
ethos-u85-1024, ethos-u85-2048; did you mean 'ethos-u85-256'?
    """
    if target in TARGETS:
        return
    known = ", ".join(TARGETS)
    if target.startswith(_WITHOUT_SPARSITY):
        raise ValueError(f"target '{target}' has no 2:4 sparse weights; the targets are {known}")
    hint = did_you_mean(target, TARGETS)
    raise ValueError(f"there is no target '{target}', only {known}{hint}")


def require_packages(target: str) -> None:
    """Refuse an export that no installed package can make.

    Raises:
        ImportError: With the packages and the extra that installs them.
    """
    needed = ["executorch", "torchao"]
    if target != "cpu":
        needed += ["ethosu", "tosa_serializer"]  # of ethos-u-vela and tosa-tools
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ImportError(f"target '{target}' needs {', '.join(missing)}: {EXTRA}")
