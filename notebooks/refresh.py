"""Execute the notebooks and save them with their outputs, without what differs from machine to machine.

Usage: python notebooks/refresh.py [NOTEBOOK ...]
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat

FOLDER = Path(__file__).parent


def refresh(path: Path) -> None:
    """Execute a notebook and save it."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)  # a kernel adds its version
    nbclient.NotebookClient(
        notebook,
        timeout=600,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    notebook.metadata = nbformat.from_dict(metadata)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = _plain(output["text"])
            for kind in ("text/plain", "text/html"):
                if kind in output.get("data", {}):
                    output["data"][kind] = _plain(output["data"][kind])
    nbformat.write(notebook, path)


def _plain(text: str) -> str:
    """Replace temporary folders, whose names are random."""
    return re.sub(re.escape(tempfile.gettempdir()) + r"/tmp\w+", "/tmp/run", text)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FOLDER.glob("*.ipynb")):
        refresh(Path(name))
        print(f"{name}: {Path(name).stat().st_size / 1e3:.0f} kB")
