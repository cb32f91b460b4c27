"""The notebooks are committed as they ran: with pictures, without errors and without a machine's names."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
NOISE = re.compile(
    r"/tmp/tmp|/home/|/root/|\.venv|site-packages|Tip:|litlogger|GPU available|Warning",
    re.IGNORECASE,
)


def cells(path):
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def texts(output):
    """Everything of an output that is text."""
    data = output.get("data", {})
    for part in (
        output.get("text", ""),
        *(data.get(kind, "") for kind in ("text/plain", "text/html")),
    ):
        yield "".join(part)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_ran_in_order_and_without_an_error(path):
    assert [cell["execution_count"] for cell in cells(path)] == list(
        range(1, len(cells(path)) + 1)
    ), "refresh.py"
    for cell in cells(path):
        for output in cell["outputs"]:
            assert output["output_type"] != "error"
            assert output.get("name") != "stderr", "".join(output["text"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_are_there_and_noise_is_not(path):
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        for text in texts(output):
            assert not NOISE.search(text), text[:300]
    assert path.stat().st_size < 500_000
