"""The command line: LightningCLI's subcommands and our own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from lightning_nm.commands.doctor import main as doctor
from lightning_nm.commands.export import main as export
from lightning_nm.commands.flops import main as flops
from lightning_nm.commands.lightning_cli import NMLightningCLI, require_extra
from lightning_nm.commands.study.command import main as study
from lightning_nm.commands.verify import main as verify
from lightning_nm.export.graphs import find_modules_here
from lightning_nm.spelling import did_you_mean

# The function of each subcommand and its line in the help.
_OWN: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "doctor": (doctor, "list the kernels that work on this machine, and the gain of a training"),
    "export": (export, "make a packed model of a sparse checkpoint, or a file for another runtime"),
    "flops": (flops, "count the multiply-adds of a model and of its planned training"),
    "study": (study, "train variants on paired seeds, and report their differences with intervals"),
    "verify": (verify, "check that a checkpoint's weights are N:M sparse"),
}

_LIGHTNING = ("fit", "validate", "test", "predict")
_BUILD_TRAININGS = ("doctor", "flops", "study")
"""Own subcommands that build a training from YAML files."""


def main(args: Sequence[str] | None = None) -> int:
    """Run ``lightning-nm SUBCOMMAND ...`` and return its exit status.

    ``fit``, ``validate``, ``test`` and ``predict`` are LightningCLI's. ``args`` are those of the process by default.
    """
    words = list(sys.argv[1:] if args is None else args)
    subcommand = words[0] if words else ""
    if subcommand in _LIGHTNING or subcommand in _BUILD_TRAININGS:
        # A `class_path` of a config may name a module of the working folder, which an installed script does not search.
        find_modules_here()
    if subcommand in _OWN:
        run, _ = _OWN[subcommand]
        return run(words[1:])
    if words == ["--version"]:
        print(f"lightning-nm {version('lightning-nm')}")
        return 0
    # What is left is LightningCLI's: its subcommands, its options and its help.
    is_option = subcommand.startswith("-")
    if words and not is_option and subcommand not in _LIGHTNING:
        known = [*_LIGHTNING, *_OWN]
        print(
            f"lightning-nm: there is no subcommand '{subcommand}', only {', '.join(known)}"
            f"{did_you_mean(subcommand, known)}",
            file=sys.stderr,
        )
        return 2  # as argparse for a usage error
    asks_for_help = not words or subcommand in ("-h", "--help")
    if asks_for_help:
        _print_own_subcommands()
    if not words:
        # Also for `args`: with None LightningCLI would read the arguments of the process, and ask for a subcommand.
        words = ["--help"]
        args = words
    try:
        # Asked here: lightning.pytorch.cli can be imported without the extra, only its class cannot be used.
        require_extra()
    except ImportError as error:
        print(error, file=sys.stderr)
        # The help that needs no extra is printed already.
        return 0 if asks_for_help else 2
    # LightningCLI warns of arguments that are given while the process has some.
    given_words = None if args is None else words
    # Without `overwrite` a second run in the same folder ends with an error: the config of the first one is there.
    NMLightningCLI(
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "lightning-nm"},
        args=given_words,
    )
    return 0


def _print_own_subcommands() -> None:
    # LightningCLI's help, which lists its own, follows.
    print("lightning-nm: N:M sparse training on PyTorch Lightning\n\nsubcommands of its own:")
    for name, (_, text) in _OWN.items():
        print(f"    {name:11} {text}")
    print()
