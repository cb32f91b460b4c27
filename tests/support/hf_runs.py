"""Trainings with NMTrainerCallback, and what they leave."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import TrainerCallback

from lightning_nm import functional as nmf
from lightning_nm.integrations import NMTrainerCallback
from lightning_nm.nn import Adapter
from tests.support.hf_models import gpt2, new, trainer


def sparse(method="sr-ste", estimator=None, **options):
    return NMTrainerCallback("2:4", method, estimator, **{"show_tables": False} | options)


def is_ordinary(model):
    return not any(isinstance(module, Adapter) for module in model.modules())


def is_sparse(model):
    """Whether the attention and MLP weights are 2:4 along their inputs."""
    layers = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and any(f".{part}." in name for part in ("h", "layer", "layers"))
        if ".mlp.gate." not in name  # of a mixture
    ]
    assert layers
    transposed = "GPT2" in type(model).__name__
    return all(nmf.is_nm(weight, "2:4", dim=0 if transposed else 1) for _, weight in layers)


class Stop(TrainerCallback):
    """Raises an exception at a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise KeyboardInterrupt


class Early(TrainerCallback):
    """Raises an exception before the first step."""

    def on_step_begin(self, *args, **kwargs):
        raise KeyboardInterrupt


def assert_equal(a, b):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


def train(model, folder, callbacks, resume=None, **options):
    run = trainer(model, folder, callbacks, **options)
    run.train(resume_from_checkpoint=resume)
    return run


SAVES = {"save_strategy": "steps", "save_steps": 1}
MIDDLE = "whole/checkpoint-2"


def assert_resumes(make, callback, **options):
    """A training of four steps that resumes after the second one ends as the whole one, bit for bit."""
    options = SAVES | options
    whole = new(make)
    train(whole, "whole", [callback()], **options)
    torch.manual_seed(99)
    part = make()
    train(part, "part", [callback(resume_from=MIDDLE)], MIDDLE, **options)
    assert_equal(whole.state_dict(), part.state_dict())
    for file in ("nm_sparsifier.pt", "optimizer.pt"):
        states = (
            torch.load(f"{folder}/checkpoint-4/{file}", weights_only=True)
            for folder in ("whole", "part")
        )
        assert_equal(*states)
    assert is_sparse(part)
    assert is_ordinary(part)


def checkpoint(folder, method="sr-ste"):
    """The folder of a checkpoint after two steps."""
    train(new(gpt2), folder, [sparse(method)], max_steps=2, save_strategy="steps", save_steps=2)
    return Path(folder) / "checkpoint-2"
