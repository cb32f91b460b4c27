"""Each test of exports runs in an empty folder of its own, with the command."""

import pytest

from lightning_nm.cli import main


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(capsys):
    """Run ``lightning-nm`` with these words: its exit status, and what it printed."""

    def run(words):
        capsys.readouterr()
        status = main(words.split())
        return status, "".join(capsys.readouterr())

    return run
