"""A process that is killed resumes from its last checkpoint as if it had never died."""

import pickle
import random
import signal

import pytest
import torch

from lightning_nm.export import read_checkpoint
from tests.support.crashing import METHODS, REGIONS, train
from tests.support.lightning_models import Data, SaveAt, callback, make_trainer, new_model
from tests.support.processes import forkserver

TRIALS = 20
UNREADABLE = (RuntimeError, EOFError, OSError, pickle.UnpicklingError)
"""What torch.load raises; for all but a few lengths the first, with "failed finding central directory"."""
SETTINGS = [(method, accumulate) for method in METHODS for accumulate in (1, 2)]


@pytest.fixture(scope="module")
def processes():
    """Forks new processes from one that has imported everything and trained nothing."""
    context = forkserver("tests.support.crashing")

    def run(folder, *args, **kwargs):
        folder.mkdir(exist_ok=True)
        process = context.Process(target=train, args=(str(folder), *args), kwargs=kwargs)
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
            known[method, accumulate] = (
                torch.load(here / "result.pt", weights_only=True),
                torch.load(here / "events.pt", weights_only=True),
            )
        return known[method, accumulate]

    return result


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def moment(trial):
    """Settings, region and share of the region's events: regions and settings take turns, the rest is drawn."""
    draw = random.Random(1000 + trial)
    return SETTINGS[trial % len(SETTINGS)], list(REGIONS)[trial % len(REGIONS)], draw.random()


def test_trials_reach_every_region_and_method():
    drawn = [moment(trial) for trial in range(TRIALS)]
    assert {region for _, region, _ in drawn} == set(REGIONS)
    assert {setting for setting, _, _ in drawn} == set(SETTINGS)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(TRIALS))
def test_a_killed_process_resumes_bit_for_bit(processes, straight, tmp_path, trial):
    (method, accumulate), region, share = moment(trial)
    expected, events = straight(method, accumulate)
    kill_at = 1 + int(share * events[region] * 0.999)
    assert processes(tmp_path / "run", method, accumulate, region, kill_at) == -signal.SIGKILL
    assert not (tmp_path / "run" / "result.pt").exists()
    for path in (tmp_path / "run").glob("*.ckpt"):
        torch.load(path, weights_only=True)  # none is partial
    assert processes(tmp_path / "run", method, accumulate) == 0
    assert same(torch.load(tmp_path / "run" / "result.pt", weights_only=True), expected)


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
    assert same(torch.load(tmp_path / "run" / "result.pt", weights_only=True), expected)


@pytest.mark.slow
def test_a_checkpoint_that_is_copied_from_another_file_system_may_be_partial_and_is_refused(
    processes, straight, tmp_path
):
    """Why the temporary folder should lie beside the checkpoints."""
    _, events = straight("sr-ste", 1)
    refused = 0
    for trial in range(12):
        folder = tmp_path / str(trial)
        kill_at = 1 + events["replacing"] * (trial + 1) // 16
        assert (
            processes(folder, "sr-ste", 1, "replacing", kill_at, across_devices=True)
            == -signal.SIGKILL
        )
        for path in folder.glob("*.ckpt"):
            try:
                content = torch.load(path, weights_only=True)
            except UNREADABLE:
                refused += 1
            else:
                assert {
                    "state_dict",
                    "optimizer_states",
                    "nm_rng_states",
                    "callbacks",
                } <= content.keys()
    assert refused


def saved(tmp_path):
    path = tmp_path / "whole.ckpt"
    make_trainer(tmp_path, [callback("sr-ste"), SaveAt(path, 3)], max_epochs=1).fit(
        new_model(), Data()
    )
    return path.read_bytes()


def test_a_truncated_checkpoint_is_refused(tmp_path):
    draw, whole, part = random.Random(0), saved(tmp_path), tmp_path / "part.ckpt"
    for length in [0, 1, 4, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(45))]:
        part.write_bytes(whole[:length])
        with pytest.raises(UNREADABLE):
            torch.load(part, weights_only=True)
        with pytest.raises(ValueError, match=r"cannot read '.*part\.ckpt'"):
            read_checkpoint(part)
    for length in (0, len(whole) // 2, len(whole) - 1):
        part.write_bytes(whole[:length])
        model = new_model(1)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(
            ValueError, match=r"cannot read '.*part\.ckpt': it is (empty|truncated)"
        ):
            make_trainer(tmp_path, [callback("sr-ste")]).fit(model, Data(), ckpt_path=part)
        assert same(model.state_dict(), before)


def test_a_hole_in_a_checkpoint_is_refused(tmp_path):
    whole, part = bytearray(saved(tmp_path)), tmp_path / "part.ckpt"
    bias = (
        torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]["net.8.weight"]
        .numpy()
        .tobytes()
    )
    assert (
        whole.count(bias) >= 1
    )  # of a layer that is not masked, so no sum of the callback's covers it
    start = whole.index(bias)
    whole[start : start + len(bias)] = bytes(len(bias))
    part.write_bytes(whole)
    assert not torch.load(part, weights_only=True)["state_dict"][
        "net.8.weight"
    ].any()  # torch does not notice
    for act in (
        lambda: make_trainer(tmp_path, [callback("sr-ste")]).fit(
            new_model(1), Data(), ckpt_path=part
        ),
        lambda: make_trainer(tmp_path, [callback("sr-ste")]).test(
            new_model(1), Data(), ckpt_path=part
        ),
        lambda: read_checkpoint(part),
    ):
        with pytest.raises(
            ValueError, match=r"part\.ckpt' is damaged: .*record 'archive/data/\d+'"
        ):
            act()
    torch.serialization.set_crc32_options(False)
    try:
        read_checkpoint(part)
    finally:
        torch.serialization.set_crc32_options(True)
