"""Draw the pictures of the documentation into docs/: ``python -m benchmarks.pictures [NAME ...]``.

``--check`` draws nothing, and exits with 1 if a picture was drawn from other data than the present.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.pictures import (
    coordinates,
    cycles,
    fronts,
    gemms,
    inference,
    length,
    permutation,
    scale,
    shares,
    smollm2,
    speed,
    speed_up,
    training,
)
from benchmarks.pictures.style import Picture, stamp_of
from benchmarks.tables.markdown import ROOT

PICTURES: dict[str, Picture] = {
    "speed-up": speed_up.PICTURE,
    "three-gemms": gemms.PICTURE,
    "bi-mask-permutation": permutation.PICTURE,
    "speed": speed.PICTURE,
    "coordinate-check": coordinates.PICTURE,
    "scale": scale.PICTURE,
    "length": length.PICTURE,
    "fronts": fronts.PICTURE,
    "step-shares": shares.PICTURE,
    "smollm2": smollm2.PICTURE,
    "smollm2-training": training.PICTURE,
    **cycles.pictures(),
    **inference.pictures(),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw or check; 1 if a check fails."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.pictures", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument(
        "--check", action="store_true", help="draw nothing; exit with 1 if a picture has other data"
    )
    options = parser.parse_args(argv)
    for name in options.names:
        if name not in PICTURES:
            parser.error(f"there is no picture {name!r}; pictures: {', '.join(PICTURES)}")
    stale = []
    for name in options.names or PICTURES:
        path, picture = ROOT / "docs" / f"{name}.png", PICTURES[name]
        if not picture.can_be_drawn():
            print(
                f"skipped: docs/{name}.png, because benchmarks/results/{picture.results} is not there"
            )
        elif not options.check:
            picture.save(path)
            print(f"drawn: docs/{name}.png")
        elif not path.exists() or stamp_of(path) != picture.stamp():
            stale.append(name)
    if stale:
        print(
            f"Drawn from other data: {', '.join(stale)}. Run `python -m benchmarks.pictures`",
            file=sys.stderr,
        )
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
