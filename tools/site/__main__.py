"""Build the site into ``site/``: ``python -m tools.site``. A warning, such as of a broken link, is an error."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.site.pages import ROOT, stage


def main() -> int:
    """Gather the pages, and build the site from them."""
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        command = [
            sys.executable,
            "-m",
            "properdocs",
            "build",
            "--strict",
            "--clean",
            "--config-file",
            "mkdocs.yml",
        ]
        environment = os.environ | {"SITE_PAGES": folder, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
