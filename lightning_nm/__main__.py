"""``python -m lightning_nm`` and ``lightning-nm``."""

import sys

from lightning_nm.cli import main as _main


def main() -> None:
    """Run the command line and exit with its status."""
    sys.exit(_main())


if __name__ == "__main__":
    main()
