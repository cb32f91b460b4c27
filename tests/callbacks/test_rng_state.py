"""The random states of every process are in the checkpoint, and come back."""

import random
import re
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import nn

from lightning_nm import RNGState
from lightning_nm.callbacks.rng_state import rng_state, set_rng_state
from tests.support.lightning_models import (
    Data,
    FailsAt,
    Inspect,
    SaveAt,
    fit,
    make_trainer,
    new_model,
)
from tests.support.processes import in_processes

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def draw():
    own = [np.random.randn(), np.random.rand(), random.random(), random.gauss(0, 1)]
    return [torch.rand(1).item(), *own]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 700), st.booleans())
def test_states_go_round_at_any_point_of_the_streams(seed, drawn, odd):
    pl.seed_everything(seed, verbose=False)
    np.random.rand(drawn)
    for _ in range(drawn + odd):  # both keep every second normal number
        random.gauss(0, 1)
        np.random.randn()
        torch.randn(1)
    state = rng_state()
    expected = [draw() for _ in range(3)]
    pl.seed_everything(1, verbose=False)
    set_rng_state(state)
    assert [draw() for _ in range(3)] == expected


@pytest.fixture
def run(tmp_path):
    """Fits, and returns what was drawn after each batch, before the callbacks that come later."""

    def run(*callbacks, seed=0, later=(), ckpt_path=None, **options):
        look = Inspect(lambda *_: draw())
        fit(tmp_path, [*callbacks, look, *later], new_model(seed), None, ckpt_path, **options)
        return look.seen

    return run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("batch", [3, 6])
def test_streams_continue_after_a_resume(run, path, batch):
    straight = run(RNGState(), later=[SaveAt(path, batch)])
    (state,) = torch.load(path)["nm_rng_states"]
    assert run(RNGState(), seed=5, ckpt_path=path) == straight[batch:]
    set_rng_state(state)
    # Without the callback they are others.
    assert not set(map(tuple, straight)) & set(map(tuple, run(seed=5, max_epochs=1)))


@pytest.mark.parametrize("uses", ["fit", "test"])
def test_a_second_fit_without_a_checkpoint_is_left_alone(run, path, tmp_path, uses):
    """After one that resumed, and after a checkpoint was tested."""
    keep = RNGState()
    run(keep, SaveAt(path, 3), max_epochs=1)
    if uses == "fit":
        run(keep, ckpt_path=path, max_epochs=1)
    else:
        trainer = make_trainer(tmp_path, [keep])
        trainer.test(new_model(3), Data(), ckpt_path=path, verbose=False)
    assert run(keep, seed=3, max_epochs=1) == run(seed=3, max_epochs=1)


def test_a_checkpoint_without_states_is_said(run, path):
    run(SaveAt(path, 3), max_epochs=1)
    with pytest.warns(UserWarning, match="saved without RNGState"):
        run(RNGState(), ckpt_path=path, max_epochs=1)


def more_processes(states):
    states += [rng_state(), rng_state()]


def rank_0_missing(states):
    states[:] = [None, rng_state(), rng_state()]


def a_device(states):
    states[0]["cuda"] = [torch.zeros(16, dtype=torch.uint8)]


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (more_processes, [r"of 3 processes, this run has 1: .* ranks \[1, 2\] are not used"]),
        (rank_0_missing, ["of 3 processes", "without the random states of rank 0"]),
        (a_device, ["1 CUDA devices in the checkpoint and 0 devices here"]),
    ],
)
def test_states_that_do_not_fit_are_said_and_the_others_used(run, path, change, texts):
    straight = run(RNGState(), later=[SaveAt(path, 6)])
    checkpoint = torch.load(path)
    change(checkpoint["nm_rng_states"])
    torch.save(checkpoint, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = run(RNGState(), seed=5, ckpt_path=path)
    said = " ".join(str(one.message) for one in caught)
    assert all(re.search(text, said) for text in texts), said
    assert (resumed == straight[6:]) == (change is not rank_0_missing)


def test_states_of_devices_are_kept_in_their_order(monkeypatch):
    streams = {0: torch.tensor([1, 2]), 1: torch.tensor([3, 4])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: streams[device].clone())
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda words, device: streams.update({device: words})
    )
    state = rng_state([0, 1])
    streams.update({0: torch.tensor([7]), 1: torch.tensor([8])})
    set_rng_state(state, [1])  # one device only: the first state
    assert (streams[0].tolist(), streams[1].tolist()) == ([7], [1, 2])
    set_rng_state(state, [0, 1])
    assert (streams[0].tolist(), streams[1].tolist()) == ([1, 2], [3, 4])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_stream_goes_round():
    state = rng_state([0])
    expected = torch.rand(8, device="cuda")
    set_rng_state(state, [0])
    assert torch.equal(torch.rand(8, device="cuda"), expected)


def test_an_impossible_timeout_is_refused():
    with pytest.raises(ValueError, match="timeout=0"):
        RNGState(timeout=0)


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")  # Lightning looks for a checkpoint
def test_a_checkpoint_made_by_an_exception_holds_the_state(tmp_path):
    save = OnExceptionCheckpoint(str(tmp_path), "crash")
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, [RNGState(), save, FailsAt("on_train_batch_end", 3)])
    assert torch.load(tmp_path / "crash.ckpt")["nm_rng_states"][0] is not None


# ---------------------------------------------------------------------------------------------------------- processes


class Small(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.arange(32.0).view(8, 4), batch_size=1, generator=torch.Generator()
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Draws(pl.Callback):
    """Draws after each epoch, each rank from a stream of its own, and saves after the second one."""

    def __init__(self, path, seed):
        self.path, self.seed, self.drawn = path, seed, []

    def on_fit_start(self, trainer, pl_module):
        pl.seed_everything(self.seed + trainer.global_rank, verbose=False)

    def on_train_epoch_end(self, trainer, pl_module):
        self.drawn.append(draw())
        if trainer.current_epoch == 1 and self.path:
            trainer.save_checkpoint(self.path)


def drawn(devices, path, resumes=False):
    """What this rank draws in four epochs, or after the second one."""
    draws = Draws(None if resumes else path, seed=7 if resumes else 0)
    strategy = "ddp" if devices > 1 else "auto"
    options = {"devices": devices, "strategy": strategy, "max_epochs": 4, "log_every_n_steps": 1}
    make_trainer(".", [RNGState(), draws], **options).fit(
        Small(), ckpt_path=path if resumes else None
    )
    return draws.drawn


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of this run's other number of processes
def test_each_process_gets_its_own_state_back(tmp_path):
    path = tmp_path / "straight.ckpt"
    straight = in_processes(2, tmp_path / "a", drawn, 2, path)
    assert straight[0] != straight[1]
    assert len(torch.load(path)["nm_rng_states"]) == 2
    rest = [steps[2:] for steps in straight]
    assert in_processes(2, tmp_path / "b", drawn, 2, path, True) == rest
    # On another number of processes dropout draws for other batches: torch's numbers are others.
    without_torch = [[draws[1:] for draws in steps] for steps in rest]
    assert [draws[1:] for draws in drawn(1, path, True)] == without_torch[0]
    # With one rank more than were saved, the new one goes on as it was seeded.
    three = in_processes(3, tmp_path / "c", drawn, 3, path, True)
    assert [[draws[1:] for draws in steps] for steps in three[:2]] == without_torch
    pl.seed_everything(9, verbose=False)
    assert three[2][0][1:] == draw()[1:]


class OnlySome(pl.Callback):
    """Some ranks write a checkpoint alone, between two of all; without the barrier that ends Lightning's own saving."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rank = trainer.global_rank
        if rank in ((0, 1), (1,), (0,), (0, 1))[batch_idx]:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint()
            torch.save(checkpoint["nm_rng_states"], f"{self.folder}/{batch_idx}-{rank}.pt")


def alone_at_times(folder):
    callbacks = [RNGState(timeout=2.0), OnlySome(folder)]
    make_trainer(".", callbacks, devices=2, strategy="ddp", max_epochs=1).fit(Small())


@pytest.mark.slow
def test_ranks_that_save_alone_wait_for_nobody_for_ever(tmp_path):
    in_processes(2, tmp_path / "run", alone_at_times, tmp_path)
    all_ranks, _, rank_0, later = (
        torch.load(tmp_path / name) for name in ("0-0.pt", "1-1.pt", "2-0.pt", "3-0.pt")
    )
    assert None not in all_ranks
    for states in (rank_0, later):  # the process group cannot be used after a timeout
        assert states[0] is not None
        assert states[1] is None
    assert not torch.equal(rank_0[0]["torch"], all_ranks[0]["torch"])
