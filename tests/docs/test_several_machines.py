"""The page on several processes runs as it stands in two gloo processes, its last part in one."""

import contextlib
import io
import os
import re

import lightning.pytorch as pl
import pytest

from lightning_nm import functional as nmf
from tests.docs.blocks import QuietTrainer, blocks, execute, read
from tests.support.processes import in_processes

PARTS = read("several-machines.md").split("## Another number of processes")


def in_each_process(folder, page):
    os.chdir(folder)
    pl.Trainer = QuietTrainer
    # Read here: a fork server that an earlier test started writes to that test's standard output.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = execute(page)
    shares = [
        int(share) for share in re.findall(r"sent: 0\.(\d\d) of the bytes", printed.getvalue())
    ]
    weight = names["trainer"].lightning_module.net[0].weight
    return {
        "processes": names["trainer"].world_size,
        "rows": weight.to_local().shape[0],
        "per cent sent": shares,
    }


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The dirpath has changed"
)  # a resumed run has a folder of its own
def test_in_two_processes_and_then_in_one(tmp_path, monkeypatch):
    ranks = in_processes(2, tmp_path / "run", in_each_process, str(tmp_path), PARTS[0])
    for rank in ranks:
        assert (rank["processes"], rank["rows"]) == (2, 32)  # of 64, tensor-parallel
    sent = {share for rank in ranks for share in rank["per cent sent"]}
    assert sent
    assert sent <= set(range(13, 40))  # 1/8 of the masked weights, and all others

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pl, "Trainer", QuietTrainer)
    names = {}
    for part in (
        blocks("python", PARTS[0])[0].split("nm = ")[0],
        "options = {'log_every_n_steps': 4}",
    ):
        exec(part, names)
    names = execute(PARTS[1], **names)
    assert names["trainer"].global_step == 2 * 16
    assert nmf.is_nm(names["trainer"].lightning_module.net[2].weight, "2:4")
