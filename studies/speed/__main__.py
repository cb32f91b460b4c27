"""``python -m studies.speed``, see :mod:`studies.speed.command`."""

import sys
from time import perf_counter

from studies.speed.processes import preload


def main() -> int:
    """Import what the sides need in the process they are forked from, and here at the same time."""
    begin = perf_counter()
    preload()
    from studies.speed.command import main

    return main(begin=begin)


if __name__ == "__main__":
    sys.exit(main())
