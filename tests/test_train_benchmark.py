"""benchmarks/train.py on tiny models; its speeds mean nothing here."""

import doctest
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import train, train_model
from benchmarks.gpu.simulated import SimulatedSparseKernel
from benchmarks.train import Run
from benchmarks.train_model import TINY

# torch.compile asks for the gradient of tensors that are no leaves, and hides the warning.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

CPU = torch.device("cpu")
EAGER = TINY._replace(backend="eager", depth=1)
TEXT = train_model.random_text(16, 64)


def trained(variant):
    return train.train(variant, EAGER, 0.0, TEXT, CPU, [SimulatedSparseKernel()])


def test_runs_differ_by_their_variant_alone():
    """Two dense runs are equal, and so are ours by whatever kernels; a masked one is another training."""
    dense, again = trained("dense"), trained("dense")
    reference, sparse, drawn = (
        trained(f"transposable{kind}") for kind in (":reference", ":sparse", "+mvue:sparse")
    )
    assert dense.losses == again.losses
    assert len(dense.losses) == len(dense.seconds) == 2
    assert reference.losses == pytest.approx(sparse.losses, rel=1e-3)
    assert reference.losses != dense.losses
    assert [run.figures["sparse share"] for run in (reference, sparse, drawn)] == pytest.approx(
        [0, 2 / 3, 1]
    )
    assert [run.figures["weights"] for run in (dense, drawn)] == [dense.figures["weights"]] * 2


def test_a_variant_that_is_none_says_how_to_write_one():
    for variant in ("", "bi-mask", "bi-mask:", "+mvue:auto", "bi-mask+top-n:auto", ":auto"):
        with pytest.raises(ValueError, match="METHOD:KERNELS"):
            train.parse(variant)
    with pytest.raises(SystemExit):
        train.main(["--variants", "bi-mask"])


SECONDS = st.lists(st.integers(1, 9), min_size=1, max_size=40)


@given(SECONDS, st.integers(0, 200))
def test_losses_are_those_of_the_last_ten_steps_in_time(seconds, end):
    run = Run([float(step) for step in seconds], [float(2**k) for k in range(len(seconds))], {})
    made = max(sum(sum(seconds[: k + 1]) <= end for k in range(len(seconds))), 1)
    expected = [2.0**k for k in range(made)][-10:]
    assert run.loss_at(made) == pytest.approx(sum(expected) / len(expected))
    assert run.loss_after(float(end)) == run.loss_at(made)


@given(st.lists(SECONDS, min_size=1, max_size=4))
def test_runs_are_compared_within_what_all_have(found):
    runs = {
        str(k): Run([float(s) for s in row], [float(j) for j in range(len(row))], {})
        for k, row in enumerate(found)
    }
    compared = train.compare(runs)
    assert compared["at"] == {"seconds": min(map(sum, found)), "steps": min(map(len, found))}
    assert compared["0"]["x"] == 1
    for name, run in runs.items():
        assert compared[name]["loss at equal steps"] == run.loss_at(min(map(len, found)))
    shortest = min(runs.values(), key=lambda run: sum(run.seconds))
    assert shortest.loss_after(compared["at"]["seconds"]) == shortest.loss_at(len(shortest.seconds))


def test_the_command_writes_what_it_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.torch.cuda, "is_available", lambda: False)
    sizes = [f"--{name}={value}" for name, value in EAGER._asdict().items()]
    path = tmp_path / "results" / "train.json"
    train.main(
        ["--variants", "dense", "ste:auto", "dense", "--seconds", "0", "--json", str(path), *sizes]
    )
    result = json.loads(path.read_text())
    assert list(result["runs"]) == ["dense", "ste:auto", "dense again"]
    assert result["settings"]["device"].startswith("cpu")
    for run in result["runs"].values():
        assert len(run["losses"]) == len(run["seconds"]) == run["figures"]["steps"] == 2
        tokens = EAGER.batch * EAGER.context
        assert run["figures"]["tokens per second"] == pytest.approx(
            tokens / (sum(run["seconds"]) / 2)
        )
    assert "| dense again |" in capsys.readouterr().out


def test_examples():
    result = doctest.testmod(train)
    assert result.attempted
    assert not result.failed
