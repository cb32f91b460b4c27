"""NMTrainerCallback: exact resumes, exceptions, and folders that are refused."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from safetensors.torch import load_file

from lightning_nm import ASP, BAME, MVUE, STEP, TransposableMask
from tests.support.hf_models import bert, gpt2, llama, mixtral, new, trainer
from tests.support.hf_runs import (
    Early,
    Stop,
    assert_equal,
    checkpoint,
    is_ordinary,
    is_sparse,
    sparse,
)

pytestmark = pytest.mark.filterwarnings(
    # Accelerate on torch 2.13.
    "ignore:.*is deprecated:FutureWarning",
)

RESUMED = [
    (gpt2, "sr-ste", MVUE()),
    (gpt2, BAME(every=1), None),
    (llama, "bi-mask", None),
    (bert, ASP(start=0.5), None),
    (bert, TransposableMask(), None),
    (mixtral, "bi-mask", MVUE()),
    (gpt2, STEP(dense_start=1, latest=1), None),
]


@pytest.mark.parametrize(
    ("make", "method", "estimator"),
    [
        pytest.param(*row, marks=[pytest.mark.slow] if number > 1 else [])
        for number, row in enumerate(RESUMED)
    ],
)
def test_a_resume_is_exact(tmp_path, make, method, estimator):
    """In the middle of an epoch, with dropout, momentum, a learning rate that falls and accumulated gradients."""
    options = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    whole = new(make)
    trainer(whole, tmp_path / "whole", [sparse(method, estimator)], **options).train()
    torch.manual_seed(99)
    part = make()
    middle = tmp_path / "whole" / "checkpoint-2"
    callback = sparse(method, estimator, resume_from=middle)
    trainer(part, tmp_path / "part", [callback], **options).train(
        resume_from_checkpoint=str(middle)
    )
    for name, value in whole.state_dict().items():
        assert torch.equal(value, part.state_dict()[name]), name
    for file in ("nm_sparsifier.pt", "optimizer.pt"):
        states = [
            torch.load(tmp_path / folder / "checkpoint-4" / file, weights_only=True)
            for folder in ("whole", "part")
        ]
        assert_equal(*states)
    assert is_sparse(part)
    assert is_ordinary(part)


@pytest.mark.slow
def test_a_resume_within_a_ramp_is_exact(tmp_path):
    schedule = {"dense_start": 1, "ramp": ["3:4"], "ramp_ends": [3]}
    options = {"save_strategy": "steps", "save_steps": 1}
    whole = new(gpt2)
    callback = sparse("asp", schedule=schedule)
    trainer(whole, tmp_path / "whole", [callback], **options).train()
    part = gpt2()
    middle = tmp_path / "whole" / "checkpoint-2"
    callback = sparse("asp", schedule=schedule, resume_from=middle)
    trainer(part, tmp_path / "part", [callback], **options).train(
        resume_from_checkpoint=str(middle)
    )
    assert_equal(whole.state_dict(), part.state_dict())
    assert is_sparse(part)


def interrupted(tmp_path, method="sr-ste", step=2):
    """The model and the callback of a training that an exception ended after some of its four steps."""
    model, callback = new(gpt2), sparse(method)
    run = trainer(model, tmp_path, [callback, Stop(step)], save_strategy="steps", save_steps=1)
    with pytest.raises(KeyboardInterrupt):
        run.train()
    return model, callback


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sr-ste", BAME(every=1), ASP(start=0.5)])
def test_a_resume_finds_the_folder_by_itself(tmp_path, method):
    """In the same process, over the masks that the exception left, which the checkpoint may lack."""
    whole = new(gpt2)
    trainer(
        whole, tmp_path / "whole", [sparse(method)], save_strategy="steps", save_steps=1
    ).train()
    model, callback = interrupted(tmp_path / "part", method, 3)
    folder = tmp_path / "part" / "checkpoint-1"
    run = trainer(model, tmp_path / "part", [callback], save_strategy="steps", save_steps=1)
    run.train(resume_from_checkpoint=str(folder))
    assert_equal(whole.state_dict(), model.state_dict())
    assert is_ordinary(model)


def test_a_resume_that_ends_at_once_leaves_the_sparse_weights(tmp_path):
    folder = checkpoint(tmp_path)
    model = new(gpt2)
    with pytest.raises(KeyboardInterrupt), sparse() as callback:
        trainer(model, tmp_path, [callback, Early()]).train(resume_from_checkpoint=str(folder))
    saved = load_file(folder / "model.safetensors")
    assert_equal({name: model.state_dict()[name] for name in saved}, saved)


def test_an_exception_leaves_ordinary_modules(tmp_path):
    model = new(gpt2)
    with pytest.raises(KeyboardInterrupt), sparse() as callback:
        trainer(model, tmp_path, [callback, Stop(2)]).train()
    assert is_ordinary(model)
    assert is_sparse(model)


def test_another_training_follows_an_exception(tmp_path):
    """With masks on the model, it saves and computes as without them."""
    model, first = interrupted(tmp_path)
    assert not is_ordinary(model)
    batch = {"input_ids": torch.arange(8)[None]}
    model.eval()
    logits = model(**batch).logits
    model.save_pretrained(tmp_path / "saved")
    copied = copy.deepcopy(model)
    first.finish()
    assert is_ordinary(model)
    assert is_sparse(model)
    assert torch.equal(model(**batch).logits, logits)
    assert torch.equal(copied(**batch).logits, logits)
    saved = type(model).from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(saved(**batch).logits, logits)


@pytest.mark.slow
def test_masks_that_an_exception_left_give_way(tmp_path):
    model, _ = interrupted(tmp_path / "first")
    trainer(model, tmp_path / "second", [sparse("bi-mask")]).train()
    assert is_ordinary(model)
    assert is_sparse(model)


def test_what_fails_before_the_first_step_costs_no_weight(tmp_path):
    model = new(gpt2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyboardInterrupt), sparse() as callback:
        trainer(model, tmp_path, [callback, Early()]).train()
    assert_equal(before, model.state_dict())
    assert is_ordinary(model)


def resume(folder, callback, output=None, **options):
    model = new(gpt2)
    try:
        trainer(model, output or folder.parent, [callback], **options).train(
            resume_from_checkpoint=str(folder)
        )
    finally:
        assert is_ordinary(model)


def test_a_folder_that_cannot_be_resumed_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"there is no '.*elsewhere/checkpoint-2/nm_sparsifier.pt'.*resume_from="
    ):
        resume(folder, sparse(), tmp_path / "elsewhere")
    resume(folder, sparse(resume_from=folder), tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="method sr-ste in the checkpoint, bi-mask here"):
        resume(folder, sparse("bi-mask"))
    with pytest.raises(ValueError, match="is masked only in the checkpoint"):
        resume(folder, sparse(exclude="*c_attn*"))
    path = folder / "nm_sparsifier.pt"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="cannot read"):
        resume(folder, sparse())
    path.write_bytes(content)
    state = torch.load(path, weights_only=True)
    torch.save({**state, "global_step": 1}, path)
    with pytest.raises(ValueError, match="saved at step 1, but the training resumes at step 2"):
        resume(folder, sparse())
    path.unlink()
    with pytest.raises(
        ValueError, match="saved without NMTrainerCallback, to train sparse from its weights"
    ):
        resume(folder, sparse())


@pytest.mark.slow
def test_weights_of_another_run_are_refused(tmp_path):
    folder, other = checkpoint(tmp_path / "run"), checkpoint(tmp_path / "other", "ste")
    (other / "nm_sparsifier.pt").write_bytes((folder / "nm_sparsifier.pt").read_bytes())
    with pytest.raises(
        ValueError, match=r"cannot resume with the state in .*do not belong to the weights"
    ):
        resume(other, sparse())
