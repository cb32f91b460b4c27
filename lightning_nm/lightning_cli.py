"""LightningCLI as all subcommands use it: with the demo's classes, and with errors of arguments told as such."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

EXTRA = "The command line needs the extra `cli`: pip install 'lightning-nm[cli]'"


def lightning_cli() -> type[LightningCLI]:
    """Make the class, which needs jsonargparse.

    Raises:
        ImportError: If it is missing; :data:`EXTRA` says how to get it.
    """
    # Lightning 2.6 calls a name that torch 2.13 deprecates; users can do nothing about it.
    warnings.filterwarnings(
        "ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated", category=FutureWarning
    )
    from lightning.pytorch.cli import LightningCLI

    import lightning_nm.demo  # noqa: F401  # its classes answer to their short names

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

    return CLI
