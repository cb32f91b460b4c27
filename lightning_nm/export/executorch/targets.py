"""The targets of an export by ExecuTorch, the packages that it needs, and which weights Ethos-U85 stores as 2:4.

The rules are those of the weight encoder of Vela, the compiler for Ethos-U (ethos-u-vela 5.1, Apache-2.0), and the
tests compare them with what it does: at least two zeros in every four consecutive entries along the input depth of each
kernel tap, no entry of -128, and an operator that is a convolution or a matrix product with a constant weight, but no
depthwise convolution.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor
from torch.nn.functional import pad

from lightning_nm.functional import count_violations
from lightning_nm.pattern import NMPattern
from lightning_nm.spelling import did_you_mean

EXTRA = "pip install -e '.[ethos-u]' in a checkout of lightning_nm"

TARGETS = ("cpu", *(f"ethos-u85-{macs}" for macs in (128, 256, 512, 1024, 2048)))
"""A CPU, and the NPUs with 2:4 sparse weights by their multiply-accumulate units."""

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
    # Found, not imported: an import takes long, and may fail for other reasons.
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise ImportError(f"target '{target}' needs {', '.join(missing)}: {EXTRA}")


_BLOCKS = NMPattern(2, 4)


def reason_of_weight(weight: Tensor) -> str:
    """Why Vela does not store a quantised weight as 2:4; empty if it can.

    ``min over blocks b of four along dim 1 of #{j in b : w[j] == 0} >= 2``, where the last block of a depth that is no
    multiple of 4 is filled with zeros.

    Args:
        weight: int8 of shape ``[out, in / groups, *kernel]``, of a convolution or a matrix.

    Example:
        >>> import torch
        >>> reason_of_weight(torch.tensor([[3, 0, 0, -7]], dtype=torch.int8))
        ''
        >>> reason_of_weight(torch.tensor([[3, 1, 0, -7]], dtype=torch.int8))
        '1 of 1 blocks of 4 along the input depth have fewer than 2 zeros'
    """
    if int(weight.min()) < -127:
        return "it has entries of -128, which the sparse format cannot hold"
    depth = weight.shape[1]
    rest = -depth % _BLOCKS.m
    # The input depth comes last, in whole blocks of each tap.
    padded = pad(weight.movedim(1, -1), (0, rest))
    faults = int(count_violations(padded, _BLOCKS))
    if not faults:
        return ""
    blocks = padded.numel() // _BLOCKS.m
    reason = f"{faults} of {blocks} blocks of 4 along the input depth have fewer than 2 zeros"
    if rest:
        reason += f"; the depth {depth} is no multiple of 4"
    return reason
