"""A process that is killed resumes from its last checkpoint as if it had never died."""

import pickle
import random
import signal

import pytest
import torch
from torch.utils._pytree import tree_leaves

from lightning_nm.export import read_checkpoint
from tests.support.crashing import METHODS, REGIONS, train
from tests.support.lightning_models import (
    Data,
    SaveAt,
    assert_equal_models,
    callback,
    fit,
    make_trainer,
    new_model,
)
from tests.support.processes import forkserver

TRIALS = 20
UNREADABLE = (RuntimeError, EOFError, OSError, pickle.UnpicklingError)
"""What torch.load raises; for all but a few lengths the first, with "failed finding central directory"."""
SETTINGS = [(method, accumulate) for method in METHODS for accumulate in (1, 2)]


@pytest.fixture(scope="module")
def processes():
    """Forks new processes from one that has imported everything and trained nothing."""
    context = forkserver("tests.support.crashing")

    def run(folder, *args):
        folder.mkdir(exist_ok=True)
        process = context.Process(target=train, args=(str(folder), *args))
        process.start()
        process.join(120)
        assert process.exitcode is not None, "the process hangs"
        return process.exitcode

    return run


@pytest.fixture(scope="module")
def straight(processes, tmp_path_factory):
    """Result and events of the runs that nobody killed."""
    folder, known = tmp_path_factory.mktemp("straight"), {}

    def result(method, accumulate):
        if (method, accumulate) not in known:
            here = folder / f"{method}-{accumulate}"
            assert processes(here, method, accumulate) == 0
            known[method, accumulate] = [
                torch.load(here / name) for name in ("result.pt", "events.pt")
            ]
        return known[method, accumulate]

    return result


def assert_same(folder, expected):
    found = torch.load(folder / "result.pt")
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_killed_process_resumes_bit_for_bit(processes, straight, tmp_path, trial):
    # Settings and regions take turns, so that each occurs; the moment within a region is drawn.
    method, accumulate = SETTINGS[trial % len(SETTINGS)]
    region = list(REGIONS)[trial % len(REGIONS)]
    expected, events = straight(method, accumulate)
    kill_at = 1 + int(random.Random(1000 + trial).random() * events[region] * 0.999)
    folder = tmp_path / "run"
    assert processes(folder, method, accumulate, region, kill_at) == -signal.SIGKILL
    assert not (folder / "result.pt").exists()
    for path in folder.glob("*.ckpt"):
        torch.load(path)  # none is partial
    assert processes(folder, method, accumulate) == 0
    assert_same(folder, expected)


@pytest.mark.slow
def test_a_process_that_is_killed_again_and_again_resumes_bit_for_bit(
    processes, straight, tmp_path
):
    expected, events = straight("bi-mask", 1)
    draw, codes = random.Random(0), []
    while not codes or codes[-1]:
        assert len(codes) < 40
        kill_at = draw.randrange(events["anywhere"] // 8, events["anywhere"] // 2)
        codes.append(processes(tmp_path / "run", "bi-mask", 1, "anywhere", kill_at))
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert len(codes) > 2
    assert_same(tmp_path / "run", expected)


@pytest.fixture
def whole(tmp_path):
    """A checkpoint's path, its bytes, and the path of another."""
    path = tmp_path / "whole.ckpt"
    fit(tmp_path, [callback("sr-ste"), SaveAt(path, 3)], max_epochs=1)
    return path, path.read_bytes(), tmp_path / "part.ckpt"


def test_a_truncated_checkpoint_is_refused(tmp_path, whole):
    _, content, part = whole
    draw, size = random.Random(0), len(content)
    for length in [0, 1, 4, size - 1, *(draw.randrange(size) for _ in range(45))]:
        part.write_bytes(content[:length])
        with pytest.raises(UNREADABLE):
            torch.load(part)
        with pytest.raises(ValueError, match=r"cannot read '.*part\.ckpt'"):
            read_checkpoint(part)
    for length in (0, size // 2, size - 1):
        part.write_bytes(content[:length])
        model = new_model(1)
        with pytest.raises(ValueError, match=r"read '.*part\.ckpt': it is (empty|truncated)"):
            fit(tmp_path, [callback("sr-ste")], model, ckpt_path=part)
        assert_equal_models(model, new_model(1))


def test_a_hole_in_a_checkpoint_is_refused(tmp_path, whole):
    path, content, part = whole
    # Of a layer that is not masked, so no sum of the callback's covers it.
    weight = torch.load(path)["state_dict"]["net.8.weight"].numpy().tobytes()
    assert weight in content
    part.write_bytes(content.replace(weight, bytes(len(weight)), 1))
    assert not torch.load(part)["state_dict"]["net.8.weight"].any(), "torch does not notice"
    trainer = make_trainer(tmp_path, [callback("sr-ste")])
    for read in (
        lambda: trainer.fit(new_model(1), Data(), ckpt_path=part),
        lambda: trainer.test(new_model(1), Data(), ckpt_path=part),
        lambda: read_checkpoint(part),
    ):
        with pytest.raises(
            ValueError, match=r"part\.ckpt' is damaged: .*record 'archive/data/\d+'"
        ):
            read()
    torch.serialization.set_crc32_options(False)
    try:
        read_checkpoint(part)
    finally:
        torch.serialization.set_crc32_options(True)
