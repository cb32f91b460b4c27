"""Each test of exports runs in an empty folder of its own, with the command."""

import pytest

from lightning_nm.cli import main


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def command(capsys):
    """Run ``lightning-nm`` with these words, which must end with this status, and return what it printed."""

    def run(words, status=0):
        capsys.readouterr()
        assert main(words.split()) == status
        return "".join(capsys.readouterr())

    return run
