"""The report in headless Chromium: charts are drawn, the console is empty, nothing is loaded."""

import json
import re
import shutil
import subprocess

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from lightning_nm.callbacks.report.tensorboard import (
    markdown_table,
    write_map_column,
    write_map_rows,
)
from lightning_nm.cli import main

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OFFLINE = [
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--disable-background-networking",
]
PROBE = """<script>addEventListener("load", () => {
  const loaded = performance.getEntriesByType("resource").map(entry => entry.name);
  document.body.setAttribute("data-loaded", JSON.stringify(loaded));
});</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


def open_page(path, profile):
    """Return the document after its scripts ran, what it loaded, and the lines of the console."""
    probed = path.with_suffix(".probed.html")
    probed.write_text(
        path.read_text(encoding="utf-8").replace("<body>", f"<body>{PROBE}"), encoding="utf-8"
    )
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        f"--user-data-dir={profile}",
    ]
    command += [
        *OFFLINE,
        "--enable-logging=stderr",
        "--virtual-time-budget=10000",
        "--dump-dom",
        probed.as_uri(),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    loaded = re.search(r'data-loaded="([^"]*)"', result.stdout)
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return result.stdout, json.loads(loaded[1].replace("&quot;", '"')) if loaded else None, console


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page of two runs, one of which names its layers and metrics as badly as it can."""
    path = tmp_path_factory.mktemp("page")
    for run, name in (
        ("a", "blocks.0.fc"),
        ("b", "<img src=http://localhost/x onerror=console.log(1)></script>"),
    ):
        writer = SummaryWriter(str(path / run))
        rows = [[name, "4x4", "2:4", "ste", "2:4", "dense", "dense", "", "dense product"]]
        writer.add_text(
            "nm/layers",
            markdown_table(("layer", "shape", "pattern", "method", *"abcd", "kernel"), rows),
        )
        write_map_rows(writer, [name, "other"], 1)
        for step in range(40):
            writer.add_scalar("train_loss", float("nan") if step == 7 else 1 / (step + 1), step)
            writer.add_scalar(name, step, step)
            writer.add_scalar("nm/flip_rate", 0.1 / (step + 1), step)
            write_map_column(writer, torch.rand(3, 2), step)
        writer.close()
    assert main(["report", str(path / "a"), str(path / "b"), "-o", str(path / "report.html")]) == 0
    return path / "report.html"


def test_the_page_opens_without_a_network(page, tmp_path):
    document, loaded, console = open_page(page, tmp_path)
    assert console == []
    assert loaded == []
    charts = document.split('class="chart js-plotly-plot"')[1:]
    assert len(charts) == page.read_text(encoding="utf-8").count('class="chart"') > 8
    for chart in charts:
        curves = re.findall(r'class="js-line"[^>]* d="M[-\d.]+,[-\d.]+L', chart)
        cells = re.findall(r'<image [^>]*href="data:image/png;base64,[^"]{60,}', chart)
        assert curves or cells
    assert len(re.findall("<image ", document)) == 6, "three heat maps of each run"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("<script>throw new Error('broken')</script>", "broken"),
        ("<img src='http://localhost/x.png'>", "Content Security Policy"),
        ("<script src='other.js'></script>", "Content Security Policy"),
    ],
)
def test_the_check_can_fail(page, tmp_path, broken, said):
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        page.read_text(encoding="utf-8").replace("<header>", f"{broken}<header>"), encoding="utf-8"
    )
    assert said in " ".join(open_page(wrong, tmp_path / "profile")[2])
