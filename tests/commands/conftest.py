import pytest


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch, tmp_path):
    """The working folder is ``here``; decisions of kernels are kept in ``home``."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.yaml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write
