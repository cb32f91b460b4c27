"""NMTrainerCallback in the Trainer of transformers."""

import copy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from torch import nn
from transformers import Trainer, TrainerCallback

from lightning_nm import ASP, MVUE, SRSTE, NMSparsifier, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.export import verify
from lightning_nm.methods import MaskMethod
from tests.support.hf_models import arguments, bert, gpt2, llama, mixtral, new, trainer
from tests.support.hf_runs import assert_equal, is_ordinary, is_sparse, sparse

pytestmark = pytest.mark.filterwarnings(
    # Accelerate on torch 2.13.
    "ignore:.*is deprecated:FutureWarning",
)


def without_dropout():
    return gpt2(dropout=0.0)


class Recorder(TrainerCallback):
    """Keeps what the model is called with."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def keep(module, args, kwargs):
            if module.training:
                self.calls.append(copy.deepcopy(kwargs))

        self.handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()


def test_it_trains_as_a_plain_loop():
    """With accumulation, and clipping before the decay of SR-STE."""
    recorder, model = Recorder(), new(without_dropout)
    options = {"max_grad_norm": 0.1, "lr_scheduler_type": "constant", "seed": 3}
    callbacks = [recorder, sparse(SRSTE(decay=0.1), MVUE(), seed=5)]
    there = trainer(model, ".", callbacks, gradient_accumulation_steps=2, **options)
    there.train()

    twin = new(without_dropout).train()
    sparsifier = NMSparsifier(twin, "2:4", SRSTE(decay=0.1), MVUE(), seed=5).attach()
    decayed = there.get_decay_parameter_names(twin)
    groups = [
        {"params": [p for n, p in twin.named_parameters() if (n in decayed) == wanted]}
        for wanted in (True, False)
    ]
    fused = there.optimizer.param_groups[0]["fused"]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=fused, weight_decay=0.0)
    sparsifier.register(optimizer)
    assert len(recorder.calls) == 8
    for number, call in enumerate(recorder.calls):
        twin(**call).loss.backward()
        if number % 2:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
            sparsifier.before_step(optimizer)
            optimizer.step()
        sparsifier.step()
        if number % 2:
            twin.zero_grad()
    sparsifier.bake()
    sparsifier.detach()
    assert_equal(twin.state_dict(), model.state_dict())
    assert is_sparse(model)


# ----------------------------------------------------------------------------------------------------- what is refused


class Owner(MaskMethod):
    def init_masks(self, layer):
        layer.parameters["scale"] = nn.Parameter(torch.ones(1))


class Reads(nn.Module):
    """Reads the weight of its first layer."""

    def __init__(self):
        super().__init__()
        self.read, self.called, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, labels=None):
        hidden = self.called(nn.functional.linear(x, self.read.weight))
        logits = self.head(hidden.relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train_reading(model, callbacks):
    rows = [{"x": torch.randn(16), "labels": torch.tensor(k % 4)} for k in range(16)]
    Trainer(model, arguments(".", max_steps=2), train_dataset=rows, callbacks=callbacks).train()


def train(model, callbacks, **options):
    trainer(model, ".", callbacks, **options).train()


def train_in(model, callbacks, n_gpu=1, kind="NO"):
    """The start of a training with so many GPUs, or in processes of this kind."""
    run = trainer(model, ".", callbacks)
    run.args._n_gpu = n_gpu
    optimizer = run.create_optimizer()
    optimizer.accelerator_state = type("State", (), {"distributed_type": kind})
    callbacks[0].on_train_begin(run.args, run.state, run.control, model=model, optimizer=optimizer)


@pytest.mark.parametrize(
    ("start", "make", "callbacks", "options", "message"),
    [
        (train, gpt2, ["sr-ste", "bi-mask"], {}, "two NMTrainerCallbacks: use one with `rules`"),
        (train, gpt2, [Owner()], {}, "Owner owns parameters at layer 'transformer.h.0.attn.c_att"),
        (
            train_in,
            gpt2,
            ["ste"],
            {"n_gpu": 2},
            "with 2 GPUs in one process the Trainer uses nn.DataParallel: .* torchrun",
        ),
        (train_in, gpt2, ["ste"], {"kind": "FSDP"}, "does not work under FSDP"),
        (train_in, gpt2, ["ste"], {"kind": "DEEPSPEED"}, "does not work under DEEPSPEED"),
        # Before its first step.
        (train_reading, Reads, ["ste"], {}, "have a gradient, but were not called: 'read'"),
    ],
)
def test_what_is_refused_leaves_the_model(start, make, callbacks, options, message):
    model = new(make)
    before = copy.deepcopy(model.state_dict())
    made = [sparse(method) for method in callbacks]
    with pytest.raises(ValueError, match=message):
        start(model, made, **options)
    assert is_ordinary(model)
    assert_equal(before, model.state_dict())
    assert made[0].sparsifier is None


def test_the_trainer_goes_on_with_what_the_message_names():
    model = Reads()
    train_reading(model, [sparse(exclude="read")])
    assert is_ordinary(model)


def test_a_masked_model_is_refused():
    model = new(gpt2)
    sparsifier = NMSparsifier(model, "2:4", "ste").attach()
    with pytest.raises(ValueError, match=r"layer 'transformer.h.0.attn.c_attn' is masked already"):
        train(model, [sparse()])
    sparsifier.detach()
    train(model, [sparse()], max_steps=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "asb"}, "method 'asb' does not exist"),
        ({"conv_layout": "rows"}, "conv_layout='rows'"),
    ],
)
def test_bad_arguments_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        sparse(**options)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs the extra `hf`: pip install -e '\.\[hf\]'"):
        exec("from lightning_nm.integrations import NMTrainerCallback")


# ------------------------------------------------------------------------------------------------------ the best model


EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def train_with_best(method, best):
    """The model, and the files of the best checkpoint and of the last."""
    model = new(bert)
    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_accuracy"}
    run = trainer(model, ".", [sparse(method)], **EACH_STEP, **options)
    scores = iter([float(step == best) for step in range(1, 5)])
    run.compute_metrics = lambda _: {"accuracy": next(scores)}
    run.train()
    assert run.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert is_ordinary(model)
    found, last = (load_file(f"checkpoint-{step}/model.safetensors") for step in (best, 4))
    assert_equal({name: model.state_dict()[name] for name in found}, found)
    assert any(not torch.equal(last[name], found[name]) for name in found)
    return model, last


@pytest.mark.parametrize(
    "method", ["sr-ste", pytest.param(TransposableMask(update_every=1), marks=pytest.mark.slow)]
)
def test_the_best_model_is_sparse(method):
    """Though it is loaded over the masks of the last step."""
    model, _ = train_with_best(method, 2)
    assert is_sparse(model)


def test_a_best_model_of_a_dense_phase_is_reported():
    message = "are not N:M sparse: they are those of .*checkpoint-1', in a dense phase"
    with pytest.warns(UserWarning, match=message):
        model, last = train_with_best(ASP(start=0.5), 1)
    assert not is_sparse(model)
    assert nmf.is_nm(last["bert.pooler.dense.weight"], "2:4")


@pytest.mark.slow
def test_the_best_experts_are_loaded():
    """The Trainer does not: their checkpoint has other names."""
    model, seen = new(mixtral), {}

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen[state.global_step] = copy.deepcopy(model.state_dict())

    options = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    run = trainer(model, ".", [sparse(), Keep()], **EACH_STEP, **options, learning_rate=0.3)
    run.train()
    best = run.state.best_global_step
    assert best < 4
    assert_equal(dict(model.state_dict()), dict(seen[best]))


# ----------------------------------------------------------------------------------------- what is evaluated and logged


def test_evaluation_and_saving_use_the_sparse_weights(capsys):
    model = new(llama)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    callback = sparse("bi-mask", log_layers=True, show_tables=True)
    run = trainer(model, ".", [callback], **options)
    run.train()
    assert "N:M layers" in capsys.readouterr().out
    losses = [log["eval_loss"] for log in run.state.log_history if "eval_loss" in log]
    assert run.evaluate()["eval_loss"] == losses[1]
    loaded = type(model).from_pretrained("checkpoint-2")
    assert is_sparse(loaded)
    assert trainer(loaded, ".", []).evaluate()["eval_loss"] == losses[0]
    run.save_model("final")
    assert_equal(type(model).from_pretrained("final").state_dict(), model.state_dict())
    logs = [log for log in run.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert all(log["nm/density"] == 0.5 for log in logs)
    assert logs[0]["nm/density/model.layers.1.mlp.up_proj"] == 0.5


def test_later_callbacks_get_the_statistics():
    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            found.append(set(logs))

    found = []
    train(new(gpt2), [sparse(), Log()], max_steps=2, logging_steps=2)
    (training, end) = found
    assert {"loss", "nm/density", "nm/flip_rate", "nm/train_flops_ratio"} <= training
    assert not any(name.startswith("nm/") for name in end)


@pytest.mark.slow
def test_schedules_are_shares_of_max_steps():
    run = trainer(new(gpt2), ".", [sparse(ASP(start=0.5))], max_steps=4)
    run.train()
    densities = [log["nm/density"] for log in run.state.log_history if "loss" in log]
    assert densities == [1.0, 0.5, 0.5, 0.5]


def test_a_frozen_body_stays_dense():
    model = new(bert)
    frozen, trained = model.bert.encoder.layer
    frozen.requires_grad_(False)
    before = copy.deepcopy(frozen.state_dict())
    train(model, [sparse()], max_steps=1)
    assert_equal(before, frozen.state_dict())
    assert nmf.is_nm(trained.output.dense.weight, "2:4")


def test_mixed_precision():
    model = new(llama)
    train(model, [sparse("bi-mask", MVUE())], bf16=True, gradient_accumulation_steps=2)
    assert model.lm_head.weight.dtype == torch.float32
    assert is_sparse(model)


def test_verify_reads_the_folders():
    """Those of checkpoints name the masked layers; a model in several files needs the pattern."""
    model = new(gpt2)
    train(model, [sparse()], max_steps=1, save_strategy="steps", save_steps=1)
    found = verify("checkpoint-1")
    assert found.ok
    assert {verdict.verdict for verdict in found.verdicts} == {"N:M"}
    model.save_pretrained("parts", max_shard_size="8KB")
    assert len(list(Path("parts").glob("model-0000?-of-*.safetensors"))) > 1
    parts = verify("parts", "2:4", min_share=0.5)
    assert parts.ok
    keys = {verdict.key for verdict in parts.verdicts if verdict.verdict == "N:M"}
    assert keys == {verdict.key for verdict in found.verdicts}
    assert parts.share == found.share


@pytest.mark.parametrize("clipped", [False, True])
def test_the_decay_is_not_scaled_in_float16(clipped):
    """Clipping unscales the gradients; without it the callback does."""
    model = new(without_dropout)
    run = trainer(model, ".", [callback := sparse(SRSTE(decay=0.1))])
    run.create_optimizer()
    run.state.max_steps = 1
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = AcceleratedOptimizer(run.optimizer, scaler=scaler)
    with callback:
        callback.on_train_begin(run.args, run.state, run.control, model=model, optimizer=optimizer)
        ids = torch.arange(8)[None]
        expected = copy.deepcopy(model)
        expected(input_ids=ids, labels=ids).loss.backward()
        scaler.scale(model(input_ids=ids, labels=ids).loss).backward()
        if clipped:
            scaler.unscale_(run.optimizer)
        callback.on_pre_optimizer_step(run.args, run.state, run.control, optimizer=optimizer)
        layer = callback.sparsifier.layers["transformer.h.0.mlp.c_fc"]
        plain = expected.transformer.h[0].mlp.c_fc.weight.grad
        decay = 0.1 * layer.weight.detach() * ~layer.forward_mask
        torch.testing.assert_close(layer.weight.grad, plain + decay)
        optimizer.step()
        assert layer.step == 1
