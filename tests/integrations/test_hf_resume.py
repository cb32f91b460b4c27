"""NMTrainerCallback: exact resumes, exceptions, and folders that are refused."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file

from lightning_nm import ASP, BAME, MVUE, STEP, TransposableMask
from tests.support.hf_models import bert, gpt2, llama, mixtral, new
from tests.support.hf_runs import (
    SAVES,
    Early,
    Stop,
    assert_equal,
    assert_resumes,
    checkpoint,
    is_ordinary,
    is_sparse,
    sparse,
    train,
)

pytestmark = pytest.mark.filterwarnings(
    # Accelerate on torch 2.13.
    "ignore:.*is deprecated:FutureWarning",
)

RAMP = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [3]}


@pytest.mark.parametrize(
    ("make", "method", "options"),
    [
        (gpt2, "sr-ste", {"estimator": MVUE()}),
        (gpt2, BAME(every=1), {}),
        pytest.param(bert, ASP(start=0.5), {}, marks=pytest.mark.slow),
        pytest.param(bert, TransposableMask(), {}, marks=pytest.mark.slow),
        pytest.param(gpt2, STEP(dense_start=1, latest=1), {}, marks=pytest.mark.slow),
        pytest.param(llama, "bi-mask", {}, marks=pytest.mark.slow),
        pytest.param(mixtral, "bi-mask", {"estimator": MVUE()}, marks=pytest.mark.slow),
        pytest.param(gpt2, "asp", {"schedule": RAMP}, marks=pytest.mark.slow),
    ],
)
def test_a_resume_is_exact(make, method, options):
    """In the middle of an epoch, with dropout, momentum, a learning rate that falls and accumulated gradients."""
    callback = partial(sparse, copy.deepcopy(method), **options)
    assert_resumes(make, callback, gradient_accumulation_steps=2)


def interrupted(folder, method="sr-ste", step=2):
    """The model and the callback of a training that an exception ended after some of its four steps."""
    model, callback = new(gpt2), sparse(method)
    with pytest.raises(KeyboardInterrupt):
        train(model, folder, [callback, Stop(step)], **SAVES)
    return model, callback


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sr-ste", BAME(every=1), ASP(start=0.5)])
def test_a_resume_finds_the_folder_by_itself(method):
    """In the same process, over the masks that the exception left, which the checkpoint may lack."""
    whole = new(gpt2)
    train(whole, "whole", [sparse(method)], **SAVES)
    model, callback = interrupted("part", method, 3)
    train(model, "part", [callback], "part/checkpoint-1", **SAVES)
    assert_equal(whole.state_dict(), model.state_dict())
    assert is_ordinary(model)


def test_a_resume_that_ends_at_once_leaves_the_sparse_weights():
    folder, model = checkpoint("."), new(gpt2)
    with pytest.raises(KeyboardInterrupt), sparse() as callback:
        train(model, ".", [callback, Early()], str(folder))
    saved = load_file(folder / "model.safetensors")
    assert_equal({name: model.state_dict()[name] for name in saved}, saved)


def test_what_fails_before_the_first_step_costs_no_weight():
    model = new(gpt2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt), sparse() as callback:
        train(model, ".", [callback, Early()])
    assert_equal(before, model.state_dict())
    assert is_ordinary(model)


def test_another_training_follows_an_exception():
    """With masks on the model, it saves and computes as without them."""
    model, first = interrupted(".")
    assert not is_ordinary(model)
    batch = {"input_ids": torch.arange(8)[None]}
    logits = model.eval()(**batch).logits
    model.save_pretrained("saved")
    copied = copy.deepcopy(model)
    with first:
        pass  # ends the training, as a block would that the exception left
    assert is_ordinary(model)
    assert is_sparse(model)
    saved = type(model).from_pretrained("saved").eval()
    for each in (model, copied, saved):
        assert torch.equal(each(**batch).logits, logits)


@pytest.mark.slow
def test_masks_that_an_exception_left_give_way():
    model, _ = interrupted("first")
    train(model, "second", [sparse("bi-mask")])
    assert is_ordinary(model)
    assert is_sparse(model)


def resume(folder, callback, output=None):
    model = new(gpt2)
    try:
        train(model, output or folder.parent, [callback], str(folder))
    finally:
        assert is_ordinary(model)


def test_folders_that_cannot_be_resumed_are_refused():
    folder = checkpoint("run")
    path = folder / "nm_sparsifier.pt"
    content, state = path.read_bytes(), torch.load(path, weights_only=True)

    def cut():
        path.write_bytes(content[: len(content) // 2])

    def step_1():
        torch.save({**state, "global_step": 1}, path)

    def whole():
        path.write_bytes(content)

    for change, options, output, message in (
        (whole, {}, "elsewhere", "there is no 'elsewhere/checkpoint-2/nm_spa.*resume_from="),
        (whole, {"method": "bi-mask"}, None, "method sr-ste in the checkpoint, bi-mask here"),
        (whole, {"exclude": "*c_attn*"}, None, "is masked only in the checkpoint"),
        (cut, {}, None, "cannot read"),
        (step_1, {}, None, "saved at step 1, but the training resumes at step 2"),
        (path.unlink, {}, None, "saved without NMTrainerCallback, to train sparse from its weig"),
    ):
        change()
        with pytest.raises(ValueError, match=message):
            resume(folder, sparse(**options), output)
    whole()
    resume(folder, sparse(resume_from=folder), Path("elsewhere"))


@pytest.mark.slow
def test_weights_of_another_run_are_refused():
    folder, other = checkpoint("run"), checkpoint("other", "ste")
    (other / "nm_sparsifier.pt").write_bytes((folder / "nm_sparsifier.pt").read_bytes())
    message = "cannot resume with the state in .*do not belong to the weights"
    with pytest.raises(ValueError, match=message):
        resume(other, sparse())
