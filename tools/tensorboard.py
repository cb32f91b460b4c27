"""The picture of TensorBoard in the README, light and dark: ``python -m tools.tensorboard runs``.

The folder is that of a run with layers in its log, such as of ``make demo``. The curves of its masks are a page of
TensorBoard in Chromium, which must be installed; below them is the log's heat map of flip rates.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.tables.markdown import ROOT

WINDOW = (1560, 420)
"""Pixels of the page at a scale of 1, which the screenshot doubles."""
CURVES = (361, 74, 1440, 356)
"""Left, top, right and bottom of the three charts of masks on that page."""
HEAT_MAP = "nm/flip_rate_map"
PORT = 6123
BACKGROUND = {"light": "#ffffff", "dark": "#303030"}


def main() -> None:
    """Write ``docs/tensorboard.png`` and ``docs/tensorboard-dark.png``."""
    parser = argparse.ArgumentParser("python -m tools.tensorboard", description=__doc__)
    parser.add_argument("folder", type=Path, help="with one run, as --logdir of TensorBoard")
    folder = parser.parse_args().folder
    heat_map = last_image(folder, HEAT_MAP)
    with serving(folder):
        for theme, suffix in (("light", ""), ("dark", "-dark")):
            left, top, right, bottom = (2 * edge for edge in CURVES)
            curves = screenshot(dark=theme == "dark").crop((left, top, right, bottom))
            path = ROOT / "docs" / f"tensorboard{suffix}.png"
            above(curves, heat_map, BACKGROUND[theme]).save(path, optimize=True)
            print(f"written: {path}")


def last_image(folder: Path, tag: str) -> Image.Image:
    """The last image of a tag in the event files below a folder."""
    for events in sorted(folder.rglob("events.out.*")):
        log = EventAccumulator(str(events), size_guidance={"images": 0})
        log.Reload()
        if tag in log.Tags()["images"]:
            return Image.open(io.BytesIO(log.Images(tag)[-1].encoded_image_string)).convert("RGB")
    sys.exit(f"no event file below {folder} has the image {tag}")


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """TensorBoard on a folder, until the block ends."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder)]
    server = subprocess.Popen([*command, "--port", str(PORT), "--load_fast", "false"])
    try:
        for _ in range(60):
            time.sleep(0.5)
            try:
                urllib.request.urlopen(f"http://localhost:{PORT}/data/runs").close()
            except OSError:
                continue
            break
        yield
    finally:
        server.terminate()


def screenshot(dark: bool) -> Image.Image:
    """The page of custom scalars, at two pixels for each of its own."""
    browser = shutil.which("chromium") or sys.exit("Chromium is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "page.png")
        subprocess.run(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--hide-scrollbars",
                "--force-device-scale-factor=2",
                f"--window-size={WINDOW[0]},{WINDOW[1]}",
                "--virtual-time-budget=15000",  # milliseconds that the page may load
                f"--screenshot={path}",
                f"http://localhost:{PORT}/?darkMode={str(dark).lower()}#custom_scalars",
            ],
            check=True,
            capture_output=True,
        )
        return Image.open(path).convert("RGB")


def above(upper: Image.Image, lower: Image.Image, background: str) -> Image.Image:
    """One picture above another one of the same width."""
    height = round(lower.height * upper.width / lower.width)
    lower = lower.resize((upper.width, height), Image.Resampling.LANCZOS)
    both = Image.new("RGB", (upper.width, upper.height + height), background)
    both.paste(upper, (0, 0))
    both.paste(lower, (0, upper.height))
    return both


if __name__ == "__main__":
    main()
