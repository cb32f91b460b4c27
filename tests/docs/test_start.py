"""The first page runs as it stands, from the first line to the answers of the exported model."""

import re

import lightning.pytorch as pl
import pytest

from tests.docs.blocks import QuietTrainer, blocks, execute, read, run_commands


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_from_nothing_to_answers(tmp_path, monkeypatch, capsys):
    page, _, _ = read("start.md").partition("\n## Without Lightning\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(pl, "Trainer", QuietTrainer)
    training, serving = page.split("## Check the checkpoint")
    names = execute(training)
    printed = capsys.readouterr().out
    (table,) = blocks("text", page)
    shown = {line.rstrip() for line in printed.splitlines()}
    assert set(table.splitlines()) <= shown
    for line in re.findall(r"^\| `([^`…]+)", training, re.MULTILINE):
        assert re.search(rf"^ {line}", printed, re.MULTILINE), line
    assert re.search(r"^masked: \d", printed, re.MULTILINE)

    run_commands("".join(block for block in blocks("", serving)))
    assert re.search(r"^OK", capsys.readouterr().out, re.MULTILINE)
    serving, _, resuming = serving.partition("## Resume")
    execute(serving, **names)
    (share,) = re.findall(
        r"^(\d+)% of the held-out examples are right$", capsys.readouterr().out, re.MULTILINE
    )
    assert int(share) > 60

    begun = []
    names["Classifier"].on_train_start = lambda self: begun.append(self.trainer.global_step)
    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        execute(resuming.replace("max_epochs=2", "max_epochs=1"), **names)
    # The shorter plan stands for a crash after an epoch; masks freeze by the plan that the training began with.
    with pytest.warns(UserWarning, match=r"began with BAME scheduled at steps \(0, 37\)"):
        execute(resuming, **names)
    assert begun == [0, 56]  # steps of an epoch
