"""The version is written once."""

import re
from importlib.metadata import version
from pathlib import Path

import lightning_nm


def test_the_package_tells_the_version_that_it_is_built_with():
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_nm.__version__)
    assert lightning_nm.__version__ == version("lightning-nm")
    assert 'dynamic = ["version"]' in (Path(__file__).parents[1] / "pyproject.toml").read_text()
