"""Code of pages whose features have tests elsewhere: it runs, its YAML is valid, its commands have these options."""

import importlib
import re
import shlex

import lightning.pytorch as pl
import pytest
import yaml

from lightning_nm import MaskMonitor, NMSparsityCallback
from lightning_nm.cli import main
from lightning_nm.commands.study.spec import read as read_study
from tests.docs.blocks import DOCS, ROOT, QuietTrainer, blocks, read


def test_the_monitor_is_set(monkeypatch):
    page = read("tensorboard.md")
    (settings,), (code,) = blocks("yaml", page), blocks("python", page)
    (callback,) = yaml.safe_load(settings)["trainer"]["callbacks"]
    monitor = callback["init_args"]["monitor"]
    assert (callback["class_path"], monitor["class_path"]) == (
        "lightning_nm.NMSparsityCallback",
        "lightning_nm.MaskMonitor",
    )
    NMSparsityCallback(**callback["init_args"] | {"monitor": MaskMonitor(**monitor["init_args"])})
    monkeypatch.setattr(pl, "Trainer", QuietTrainer)
    names = {"pl": pl, "NMSparsityCallback": NMSparsityCallback, "MaskMonitor": MaskMonitor}
    exec(code, names)
    assert sum(isinstance(each, MaskMonitor) for each in names["trainer"].callbacks) == 1


def test_the_study_is_valid(tmp_path):
    study, search = blocks("yaml", read("studies.md"))
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "studies").mkdir()
    file = tmp_path / "studies" / "my.yaml"
    file.write_text(study)
    assert len(list(read_study(file).cells())) == 6
    file.write_text(study + search)
    assert read_study(file).search.keys() == {"model.init_args.lr", "model.init_args.dropout"}


READMES = [
    ROOT / folder / "README.md"
    for folder in (
        "benchmarks/results/tables",
        "benchmarks/gpu",
        "benchmarks/peers",
        "configs/imagenet",
        "tests/golden",
    )
]
OPTIONS = [
    ("studies.md", 1, "study"),
]


@pytest.mark.parametrize(("page", "count", "command"), OPTIONS)
def test_commands_have_these_options(page, count, command, tmp_path, monkeypatch, capsys):
    """Their files are missing here, which is the only complaint."""
    lines = [
        line
        for block in blocks("", read(page))
        for line in block.splitlines()
        if line.startswith("lightning-nm")
    ]
    assert len(lines) == count
    monkeypatch.chdir(tmp_path)
    for line in lines:
        _, *words = shlex.split(line)
        assert words[0] == command
        assert main(words) == 2
        assert "usage:" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "page",
    [*sorted(DOCS.rglob("*.md")), *READMES],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_modules_and_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for folder in ("tests", "benchmarks", "configs", "studies", "lightning_nm"):
        for name in re.findall(rf"(?<![\w/.-])({folder}/[\w/.-]+\.(?:py|yaml|json|c|h))\b", text):
            assert (ROOT / name).is_file(), name
    for name in re.findall(r"python -m (benchmarks\.\w+)", text):
        importlib.import_module(name)
