"""The command line: LightningCLI's subcommands and our own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence

from lightning_nm.export.verify import main as verify

_OWN: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "verify": (verify, "check that a checkpoint's weights are N:M sparse"),
}


def main(args: Sequence[str] | None = None) -> int:
    """Run ``lightning-nm SUBCOMMAND ...``; ``fit``, ``validate``, ``test`` and ``predict`` are LightningCLI's.

    Args:
        args: Command-line words; those of the process by default.

    Returns:
        The exit status.
    """
    words = list(sys.argv[1:] if args is None else args)
    if words and words[0] in _OWN:
        return _OWN[words[0]][0](words[1:])
    # Lightning 2.6 calls a name that torch 2.13 deprecates; users can do nothing about it.
    warnings.filterwarnings(
        "ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning
    )
    if not words or words[0] in ("-h", "--help"):
        print("lightning-nm: N:M sparse training on PyTorch Lightning\n\nsubcommands of its own:")
        for name, (_, text) in _OWN.items():
            print(f"    {name:10} {text}")
        print()
        args = words = ["--help"]
    try:
        from lightning.pytorch.cli import LightningCLI

        import lightning_nm.demo  # noqa: F401  # its classes answer to their short names
    except ImportError as error:
        print(f"{error}\nThe command line needs the extra `cli`: pip install 'lightning-nm[cli]'", file=sys.stderr)
        return 2

    class CLI(LightningCLI):
        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except ValueError as error:
                # What a class says of its arguments is raised while objects are made, where jsonargparse takes it for a
                # mismatch of types.
                if "Does not validate against any of the Union subtypes" not in str(error):
                    raise
                self.parser.error(str(error))

    CLI(
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"prog": "lightning-nm"},
        args=args if args is None else words,
    )
    return 0
