"""The random states of every process are in the checkpoint, and come back."""

import random

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
from tests.support.lightning_models import Data, Inspect, SaveAt, make_trainer, new_model
from tests.support.processes import in_processes

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)


def draw():
    return [
        torch.rand(1).item(),
        np.random.randn(),
        np.random.rand(),
        random.random(),
        random.gauss(0, 1),
    ]


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


def run(tmp_path, *callbacks, seed=0, ckpt_path=None, **options):
    drawn = []
    trainer = make_trainer(
        tmp_path, [*callbacks, Inspect(lambda *_: drawn.append(draw()))], **options
    )
    trainer.fit(new_model(seed), Data(), ckpt_path=ckpt_path)
    return drawn


@pytest.mark.parametrize("batch", [3, 6])
def test_streams_continue_after_a_resume(tmp_path, batch):
    # saved before the draw of the same batch
    straight = run(tmp_path, RNGState(), SaveAt(tmp_path / "a.ckpt", batch))
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert len(checkpoint["nm_rng_states"]) == 1
    resumed = run(tmp_path, RNGState(), seed=5, ckpt_path=tmp_path / "a.ckpt")
    assert len(resumed) == 12 - batch
    # The straight run drew once more for the batch at which it saved.
    pl.seed_everything(9, verbose=False)
    set_rng_state(checkpoint["nm_rng_states"][0])
    assert draw() == straight[batch - 1]
    assert not set(map(tuple, straight)) & set(map(tuple, run(tmp_path, seed=5, max_epochs=1)))


def test_the_checkpoint_of_the_last_callback_continues_bit_for_bit(tmp_path):
    def fit(ckpt_path=None):
        drawn = []
        look, save = Inspect(lambda *_: drawn.append(draw())), SaveAt(tmp_path / "a.ckpt", 4)
        trainer = make_trainer(tmp_path, [RNGState(), look, *([] if ckpt_path else [save])])
        trainer.fit(new_model(5 if ckpt_path else 0), Data(), ckpt_path=ckpt_path)
        return drawn

    assert fit()[4:] == fit(tmp_path / "a.ckpt")


def test_a_second_fit_without_a_checkpoint_is_left_alone(tmp_path):
    keep = RNGState()
    run(tmp_path, keep, SaveAt(tmp_path / "a.ckpt", 3), max_epochs=1)
    run(tmp_path, keep, ckpt_path=tmp_path / "a.ckpt", max_epochs=1)
    assert run(tmp_path, keep, seed=3, max_epochs=1) == run(tmp_path, seed=3, max_epochs=1)


def test_a_checkpoint_that_is_only_tested_is_left_alone(tmp_path):
    run(tmp_path, RNGState(), SaveAt(tmp_path / "a.ckpt", 3), max_epochs=1)
    keep = RNGState()
    make_trainer(tmp_path, [keep]).test(
        new_model(3), Data(), ckpt_path=tmp_path / "a.ckpt", verbose=False
    )
    assert run(tmp_path, keep, seed=3, max_epochs=1) == run(tmp_path, seed=3, max_epochs=1)


def test_a_checkpoint_without_states_is_said(tmp_path):
    run(tmp_path, SaveAt(tmp_path / "a.ckpt", 3), max_epochs=1)
    with pytest.warns(UserWarning, match="saved without RNGState"):
        run(tmp_path, RNGState(), ckpt_path=tmp_path / "a.ckpt", max_epochs=1)


def test_a_checkpoint_of_more_processes_gives_this_one_its_state(tmp_path):
    straight = run(tmp_path, RNGState(), SaveAt(tmp_path / "a.ckpt", 6), max_epochs=2)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["nm_rng_states"] += [rng_state(), rng_state()]
    torch.save(checkpoint, tmp_path / "three.ckpt")
    with pytest.warns(
        UserWarning, match=r"of 3 processes, this run has 1: .* ranks \[1, 2\] are not used"
    ):
        resumed = run(tmp_path, RNGState(), seed=5, ckpt_path=tmp_path / "three.ckpt")
    assert resumed == run(tmp_path, RNGState(), seed=6, ckpt_path=tmp_path / "a.ckpt")
    assert len(straight) == 12

    checkpoint["nm_rng_states"][0] = None
    torch.save(checkpoint, tmp_path / "none.ckpt")
    with (
        pytest.warns(UserWarning, match="of 3 processes"),
        pytest.warns(UserWarning, match="without the random states of rank 0"),
    ):
        run(tmp_path, RNGState(), ckpt_path=tmp_path / "none.ckpt")


def test_devices_that_are_missing_are_said(tmp_path):
    run(tmp_path, RNGState(), SaveAt(tmp_path / "a.ckpt", 6), max_epochs=2)
    checkpoint = torch.load(tmp_path / "a.ckpt", weights_only=True)
    checkpoint["nm_rng_states"][0]["cuda"] = [torch.zeros(16, dtype=torch.uint8)]
    torch.save(checkpoint, tmp_path / "cuda.ckpt")
    with pytest.warns(UserWarning, match="1 CUDA devices in the checkpoint and 0 devices here"):
        run(tmp_path, RNGState(), ckpt_path=tmp_path / "cuda.ckpt")


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
    """Draws in each batch, each rank from a stream of its own; saves after an epoch and writes what was drawn."""

    def __init__(self, folder, name, save_at=None, seed=0):
        self.folder, self.name, self.save_at, self.seed, self.drawn = (
            folder,
            name,
            save_at,
            seed,
            [],
        )

    def on_fit_start(self, trainer, pl_module):
        pl.seed_everything(self.seed + trainer.global_rank, verbose=False)

    def on_train_epoch_end(self, trainer, pl_module):
        self.drawn.append(draw())
        if trainer.current_epoch == self.save_at:
            trainer.save_checkpoint(f"{self.folder}/{self.name}.ckpt")

    def on_fit_end(self, trainer, pl_module):
        torch.save(self.drawn, f"{self.folder}/{self.name}-{trainer.global_rank}.pt")


def fit_small(devices, callbacks, ckpt_path=None, **options):
    pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **{"max_epochs": 4, "log_every_n_steps": 1, **options},
    ).fit(Small(), ckpt_path=ckpt_path)


def drawn(folder, name, ranks):
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore"
)  # of Lightning about samplers, and of this run's other number of processes
def test_each_process_gets_its_own_state_back(tmp_path):
    saved = tmp_path / "straight.ckpt"
    in_processes(
        2, tmp_path / "a", fit_small, 2, [RNGState(), Draws(tmp_path, "straight", save_at=1)]
    )
    straight = drawn(tmp_path, "straight", 2)
    assert straight[0] != straight[1]
    assert len(torch.load(saved, weights_only=True)["nm_rng_states"]) == 2
    in_processes(
        2, tmp_path / "b", fit_small, 2, [RNGState(), Draws(tmp_path, "two", seed=7)], saved
    )
    assert drawn(tmp_path, "two", 2) == [steps[2:] for steps in straight]
    fit_small(1, [RNGState(), Draws(tmp_path, "one", seed=7)], saved)
    (one,) = drawn(tmp_path, "one", 1)
    assert [draws[1:] for draws in one] == [
        draws[1:] for draws in straight[0][2:]
    ]  # dropout of more batches
    # With one rank more than were saved, the new one goes on as it was seeded.
    in_processes(
        3, tmp_path / "c", fit_small, 3, [RNGState(), Draws(tmp_path, "three", seed=7)], saved
    )
    three = drawn(tmp_path, "three", 3)
    assert [[draws[1:] for draws in steps] for steps in three[:2]] == [
        [draws[1:] for draws in steps[2:]] for steps in straight
    ]
    pl.seed_everything(9, verbose=False)
    assert three[2][0][1:] == draw()[1:]


class OnlySome(pl.Callback):
    """Some ranks write a checkpoint alone, between two of all; without the barrier that ends Lightning's own saving."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        connector = trainer._checkpoint_connector
        if trainer.global_rank in ((0, 1), (1,), (0,), (0, 1))[batch_idx]:
            torch.save(
                connector.dump_checkpoint(), f"{self.folder}/{batch_idx}-{trainer.global_rank}.ckpt"
            )


def alone_at_times(folder):
    fit_small(2, [RNGState(timeout=2.0), OnlySome(folder)], max_epochs=1)


@pytest.mark.slow
def test_ranks_that_save_alone_wait_for_nobody_for_ever(tmp_path):
    in_processes(2, tmp_path / "run", alone_at_times, tmp_path)
    all_ranks, _, rank_0, later = (
        torch.load(path, weights_only=True)["nm_rng_states"]
        for path in (tmp_path / name for name in ("0-0.ckpt", "1-1.ckpt", "2-0.ckpt", "3-0.ckpt"))
    )
    assert None not in all_ranks
    for states in (rank_0, later):  # the process group cannot be used after a timeout
        assert states[0] is not None
        assert states[1] is None
    assert not torch.equal(rank_0[0]["torch"], all_ranks[0]["torch"])


@pytest.mark.filterwarnings(
    "ignore:.*fit.ckpt_path="
)  # Lightning looks for a checkpoint of its own accord
def test_a_checkpoint_made_by_an_exception_holds_the_state(tmp_path):
    def stop(trainer, module):
        if trainer.global_step == 3:
            raise RuntimeError("out of luck")

    save = OnExceptionCheckpoint(str(tmp_path), "crash")
    trainer = make_trainer(tmp_path, [RNGState(), save, Inspect(stop)], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer.fit(new_model(), Data())
    assert torch.load(tmp_path / "crash.ckpt", weights_only=True)["nm_rng_states"][0] is not None
