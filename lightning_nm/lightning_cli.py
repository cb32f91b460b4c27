"""LightningCLI for all subcommands: it knows the demo's classes, and reports bad arguments as usage errors."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

EXTRA = "The command line needs the extra `cli`: pip install 'lightning-nm[cli]'"


def lightning_cli() -> type[LightningCLI]:
    """Return the class; raises ``ImportError`` without jsonargparse, for which :data:`EXTRA` is the hint."""
    # Lightning 2.6 calls a name that torch 2.13 deprecates; users can do nothing about it.
    warnings.filterwarnings(
        "ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning
    )
    from lightning.pytorch.cli import LightningCLI

    import lightning_nm.demo  # noqa: F401  # makes its classes available by their short names

    class CLI(LightningCLI):
        def instantiate_classes(self) -> None:
            try:
                super().instantiate_classes()
            except ValueError as error:
                # jsonargparse takes an error that a class raises for a bad argument for a mismatch of types.
                if "Does not validate against any of the Union subtypes" not in str(error):
                    raise
                self.parser.error(str(error))

    return CLI
