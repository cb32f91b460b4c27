"""studies/speed on tiny models, with scripted times; its speeds mean nothing here."""

import json
import math
import multiprocessing as mp
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml

import lightning_nm
from lightning_nm.demo import GPT
from studies.speed import command
from studies.speed.curves import Comparison, Curve, findings
from studies.speed.race import Side, SideError, faster_precision, race
from studies.speed.side import Grant, Setting, train
from tests.support.event_files import Events

ROOT = Path(__file__).parent.parent.parent
TINY = Setting(width=32, layers=1, tokens=64, context=16, threads=1, val_batches=1, budget_s=0.0)


def curve(name, seconds, losses, **facts):
    return Curve(name, "32-true", 100, 1.0, list(seconds), list(losses), **facts)


class Scripted:
    """The connection of a side whose steps take given seconds and whose losses fall from 4 by 0.1 a step."""

    def __init__(self, seconds, clock=None, dies_after=None, last=("validated", 1.5)):
        self.seconds, self.clock, self.dies_after, self.last = (
            seconds,
            clock or [0.0],
            dies_after,
            last,
        )
        self.steps, self.received, self.inbox = 0, 0, [("idle", {})]

    def send(self, grant):
        if grant is None:
            self.inbox.append(self.last)
            return
        steps, spent = 0, 0.0
        while steps < grant.steps or spent < grant.seconds:
            steps, spent = steps + 1, spent + self.seconds
            self.inbox.append(("step", self.seconds, 4 - 0.1 * (self.steps + steps)))
        self.steps += steps
        self.clock[0] += spent
        self.inbox.append(("idle", {"sparse share": 0.5, "share of": "measured times"}))

    def recv(self):
        if self.received == self.dies_after:
            raise KeyboardInterrupt
        self.received += self.inbox[0][0] == "step"
        return self.inbox.pop(0)


def side(name, connection, precision="32-true"):
    return Side(None, connection, Curve(name, precision, 100))


def test_losses_at_equal_steps_and_equal_seconds():
    """20 sparse steps of half a second and 10 dense ones of one second."""
    sparse = curve("sparse", [0.5] * 20, range(20, 0, -1))
    dense = curve("dense", [1.0] * 10, range(10, 0, -1))
    found = Comparison.of(sparse, dense)
    assert (found.steps, found.seconds, found.speed) == (10, 10, 2)
    assert found.at_steps == (11.5, 1.5)  # the last 15 % of 10 steps are 2
    assert found.at_seconds == (2.5, 1.5)  # those that end from 8.5 s to 10 s: 4 steps, 2 steps
    assert sparse.tokens_per_s == 200
    assert sparse.middle_half_ms == (500, 500)


def test_the_first_step_is_not_counted():
    found = Curve("sparse", "32-true", 100)
    found.add(30.0, 6.0)
    found.add(1.0, 5.0)
    assert (found.start_s, found.seconds, found.losses) == (30.0, [1.0], [5.0])
    assert found.loss_after(0.5) == 5.0, "before the first step of a window the last one counts"


@pytest.mark.parametrize(
    ("sparse_s", "words"),
    [(0.5, "2.00 times as fast"), (1.0, "NOT faster"), (2.0, "SLOWER")],
    ids=str,
)
def test_findings_say_what_is_not_better(sparse_s, words):
    sparse = curve("sparse", [sparse_s] * 40, [3.0] * 40, val_loss=3.0)
    dense = curve("dense", [1.0] * 40, [2.0] * 40, val_loss=2.0)
    text = " ".join(findings(sparse, dense))
    assert words in text
    assert text.count("learned less") == 2
    assert "loss is higher: 3.000, dense 2.000" in text
    assert "No GEMM ran on a sparse kernel" in text
    assert "few" not in text
    better = " ".join(findings(curve("sparse", [1.0], [1.0]), dense))
    assert "lower training loss: 1.000, dense 2.000" in better
    assert "1 steps are few" in better


def test_a_speed_comes_with_its_spread():
    sparse = curve("sparse", [0.4, 0.45, 0.5, 0.55, 0.6] * 12, [3.0] * 60)
    dense = curve("dense", [1.0] * 60, [2.0] * 60)
    words = "2.00 times as fast as the dense side (1.82 to 2.22 by the spread of the steps)"
    assert words in " ".join(findings(sparse, dense))
    (said,) = findings(Curve("sparse", "32-true", 1), dense)
    assert "Nothing to compare" in said


def test_sides_take_turns_for_equal_seconds():
    clock = [0.0]
    pair = [side("sparse", Scripted(0.5, clock)), side("dense", Scripted(2.0, clock))]
    race(pair, 60.0, lambda what: None)
    sparse, dense = (one.curve for one in pair)
    assert sparse.total_s == pytest.approx(60, abs=3.5)
    assert dense.total_s == pytest.approx(60, abs=3.5)
    assert sparse.val_loss == dense.val_loss == 1.5


@pytest.mark.parametrize("low", [0.5, 0.9])
def test_noise_takes_the_place_of_a_speed(low):
    """Dense steps of 1 s; sparse ones of which every other takes longer."""
    sparse = curve("sparse", [low, 1.6] * 20, [3.0] * 40)
    dense = curve("dense", [1.0] * 40, [3.0] * 40)
    (said,) = (line for line in findings(sparse, dense) if "side is" in line)
    assert said.startswith(f"Too noisy to say which side is faster: 0.62 to {1 / low:.2f} times")


def test_the_interval_of_a_median_covers_the_true_one():
    """Of 400 samples of 25 exponential numbers, whose median is log 2; 95 % within four standard errors."""
    draws = torch.empty(400, 25).exponential_(generator=torch.Generator().manual_seed(0)).tolist()
    intervals = [curve("sparse", each, each).median_interval_s for each in draws]
    covered = sum(low <= math.log(2) <= high for low, high in intervals) / len(intervals)
    assert covered > 0.95 - 4 * (0.95 * 0.05 / 400) ** 0.5


@pytest.mark.parametrize(("bf16_s", "steps"), [(0.8, 4), (1.2, 4), (5.0, 1)])
def test_the_faster_precision_is_measured(bf16_s, steps):
    clock = [0.0]
    full, half = Scripted(1.0, clock), Scripted(bf16_s, clock)
    found = faster_precision(
        [side("dense", full), side("dense", half, "bf16-mixed")], print, lambda: clock[0]
    )
    assert found == {"32-true": 1.0, "bf16-mixed": bf16_s}
    assert next(iter(found)) == ("bf16-mixed" if bf16_s < 1 else "32-true")
    assert half.steps == steps


def run(monkeypatch, out, dies_after=None, *more):
    """The command with scripted sides: its status."""
    clock = [0.0]

    @contextmanager
    def scripted(setting, *wanted):
        yield [
            side(name, Scripted(0.5 if name == "sparse" else 1.0, clock, dies_after), p)
            for name, p in wanted
        ]

    monkeypatch.setattr(command, "sides", scripted)
    return command.main(["--seconds", "1e-9", "--precision", "32-true", "--out", str(out), *more])


@pytest.mark.parametrize(("dies_after", "status"), [(None, 0), (4, 130)])
def test_files_are_written_also_after_ctrl_c(monkeypatch, tmp_path, capsys, dies_after, status):
    for _ in range(2):  # a second run replaces the files of the first
        assert run(monkeypatch, tmp_path / "out", dies_after) == status
    printed = capsys.readouterr().out
    assert "tokens per second" in printed
    assert ("Interrupted: " in printed) == bool(status)
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert content["interrupted"] == bool(status)
    assert content["setting"]["pattern"] == "1:16"
    assert content["machine"]["torch"] == torch.__version__
    assert content["machine"]["lightning_nm"] == lightning_nm.__version__
    assert content["command"].startswith(
        "python -m studies.speed --seconds 1e-9 --precision 32-true"
    )
    sparse = content["sides"]["sparse"]
    assert set(sparse["seconds"]) == {0.5}
    events = Events(tmp_path / "out" / "sparse")
    assert [event.value for event in events.scalars["loss/over_ms"]] == pytest.approx(
        sparse["losses"]
    )
    assert events.steps("loss/over_ms") == [500 * (k + 1) for k in range(len(sparse["seconds"]))]
    assert ("val_loss" in events.scalars) == (not status)
    if not status:
        first, last = (events.scalars["loss/over_steps"][k].wall_time for k in (0, -1))
        assert last - first == pytest.approx(0.5 * (len(sparse["seconds"]) - 1), abs=1e-3)
        assert Events(tmp_path / "out" / "dense").steps("loss/over_steps") == list(
            range(1, len(content["sides"]["dense"]["seconds"]) + 1)
        )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--width 100", "multiple of 64"),
        ("--width 64 --pattern 1:24", "not a multiple of the 24"),
        ("--pattern 5:4", "N must be smaller than M"),
        ("--tokens 1000", "not a multiple of --context 256"),
        ("--tokens 9000192", "more than the text's"),
        ("--method foo", "invalid choice"),
        ("--seconds 0", "--seconds must be positive"),
        ("--context 2000000 --tokens 2000000", "too short for a context"),
    ],
)
def test_wrong_arguments_are_named(words, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as stop:
        command.main([*words.split(), "--out", str(tmp_path)])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def trained(setting, sparse, precision="32-true"):
    """A side in this process, granted 3 steps: its messages."""
    here, there = mp.Pipe()
    here.send(Grant(steps=3))
    here.send(None)
    train(setting, sparse, precision, there)
    messages = []
    while here.poll():
        messages.append(here.recv())
    return messages


@pytest.mark.filterwarnings("ignore")
def test_a_side_trains_and_reports_each_step():
    dense, sparse = (trained(TINY, is_sparse) for is_sparse in (False, True))
    for messages in (dense, sparse):
        kinds = [message[0] for message in messages]
        assert kinds == ["idle", "step", "step", "step", "idle", "validated"]
    assert dense[1][2] != sparse[1][2]
    assert "kernels" in sparse[4][1]
    assert not dense[4][1]


@pytest.mark.filterwarnings("ignore")
def test_a_side_sends_its_error():
    *_, (kind, message) = trained(TINY._replace(pattern="1:7"), True)
    assert kind == "error"
    failed = side("sparse", Scripted(1.0, last=("error", message)))
    with pytest.raises(
        SideError, match=r"the sparse side \(32-true\) failed: ValueError: no layer can be masked"
    ):
        failed.finish()


def test_the_config_trains_the_model_of_the_comparison():
    found = yaml.safe_load((ROOT / "configs" / "speed-asp.yaml").read_text())
    setting, data = Setting(), found["data"]["init_args"]
    assert data["context"] == setting.context
    assert data["context"] * data["batch_size"] == setting.tokens
    hparams = GPT().hparams
    names = {"dim": "width", "depth": "layers", "heads": "heads", "lr": "lr"}
    assert all(hparams[one] == getattr(setting, other) for one, other in names.items())
    masks = found["trainer"]["callbacks"][0]["init_args"]
    assert (masks["method"], masks["scale"]) == (setting.method, setting.scale)


OPTIONS = ("seconds", "width", "layers", "tokens", "context", "threads", "out")


@pytest.mark.slow
def test_the_command_runs_in_processes(tmp_path, capsys):
    sizes = TINY._asdict() | {"seconds": 1, "out": tmp_path}
    words = [f"--{name}={sizes[name]}" for name in OPTIONS]
    assert command.main(words) == 0
    assert "A dense step takes" in capsys.readouterr().out
    content = json.loads((tmp_path / "speed.json").read_text())
    assert all(found["seconds"] and found["val_loss"] for found in content["sides"].values())
