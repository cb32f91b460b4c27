"""``lightning-nm report``: one HTML page about one run or several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

EXTRA = "Reports need the extra `report`: pip install -e '.[report]' in a checkout of lightning_nm"


def main(args: Sequence[str]) -> int:
    """Run ``lightning-nm report``.

    Returns:
        0, or 2 if a folder cannot be reported or the page cannot be written; stderr says why.
    """
    options = _parser().parse_args(list(args))
    try:
        size = _write(options.runs, options.output)
    except (ImportError, ValueError, OSError) as error:
        advice = f"\n{EXTRA}" if isinstance(error, ImportError) else ""
        print(f"lightning-nm report: {error}{advice}", file=sys.stderr)
        return 2
    print(f"Written to {options.output} ({size / 1e6:.1f} MB)")
    return 0


def _write(folders: Sequence[Path], output: Path) -> int:
    """Write the page and return its size in bytes."""
    # The extra's packages: that one is missing should not show after long reading.
    import jinja2  # noqa: F401
    import plotly  # noqa: F401
    import tensorboard  # noqa: F401

    from lightning_nm.commands.report.page import render
    from lightning_nm.commands.report.run import labels, read_run
    from lightning_nm.export.atomic_write import replacing

    if output.is_dir():
        raise ValueError(f"-o {output} is a folder: name a file, such as {output / 'report.html'}")
    runs = []
    for folder, label in zip(folders, labels(folders), strict=True):
        runs.append(read_run(folder, label))
    page = render(runs, version("lightning-nm")).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    # An interrupted run of this command leaves the former page as it is.
    with replacing(output) as new:
        new.write_bytes(page)
    return len(page)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-nm report",
        description="Write one HTML page about a run: settings, environment, layers, kernels, curves, and heat maps of "
        "the masks of each layer over the steps; about several runs, also their comparison. It is made from the event "
        "files, hparams.yaml and checkpoints in the folder alone, and opens without a network. Exits with 0, or with 2 "
        "if a folder holds no event files.",
    )
    runs = "a folder with event files of TensorBoardLogger, such as runs/<name>/version_0"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=runs)
    output = "the page to write; report.html by default"
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=Path, default=Path("report.html"), help=output
    )
    return parser
