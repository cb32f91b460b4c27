"""NMTrainerCallback in the Trainer of transformers."""

import copy
import sys

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


class Recorder(TrainerCallback):
    """Keeps what the model is called with."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def keep(module, args, kwargs):
            if module.training:
                self.calls.append(
                    {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
                )

        self.handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()


@pytest.mark.parametrize("estimator", [None, MVUE()])
def test_it_trains_as_a_plain_loop(tmp_path, estimator):
    """With accumulation, and clipping before the decay of SR-STE."""
    recorder, options = (
        Recorder(),
        {"max_grad_norm": 0.1, "lr_scheduler_type": "constant", "seed": 3},
    )
    model = new(lambda: gpt2(dropout=0.0))
    callbacks = [recorder, sparse(SRSTE(decay=0.1), estimator, seed=5)]
    there = trainer(model, tmp_path, callbacks, gradient_accumulation_steps=2, **options)
    there.train()

    twin = new(lambda: gpt2(dropout=0.0)).train()
    sparsifier = NMSparsifier(twin, "2:4", SRSTE(decay=0.1), estimator, seed=5).attach()
    decayed = there.get_decay_parameter_names(twin)
    groups = [
        {
            "params": [p for n, p in twin.named_parameters() if (n in decayed) == wanted],
            "weight_decay": 0.0,
        }
        for wanted in (True, False)
    ]
    optimizer = type(there.optimizer.optimizer)(
        groups, lr=1e-2, fused=there.optimizer.param_groups[0]["fused"]
    )
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
    for name, value in twin.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert is_sparse(model)


def test_two_callbacks_are_refused(tmp_path):
    model = new(gpt2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="two NMTrainerCallbacks: use one with `rules`"):
        trainer(model, tmp_path, [sparse(), sparse("bi-mask")]).train()
    assert is_ordinary(model)
    assert_equal(before, model.state_dict())


def test_a_masked_model_is_refused(tmp_path):
    model = new(gpt2)
    sparsifier = NMSparsifier(model, "2:4", "ste").attach()
    with pytest.raises(ValueError, match=r"layer 'transformer.h.0.attn.c_attn' is masked already"):
        trainer(model, tmp_path, [sparse()]).train()
    sparsifier.detach()
    trainer(model, tmp_path, [sparse()], max_steps=1).train()


def test_bad_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="method 'asb' does not exist"):
        sparse("asb")
    with pytest.raises(ValueError, match="conv_layout='rows'"):
        sparse(conv_layout="rows")


class Owner(MaskMethod):
    def init_masks(self, layer):
        layer.parameters["scale"] = nn.Parameter(torch.ones(1))


def test_methods_that_own_parameters_are_refused(tmp_path):
    model = new(gpt2)
    with pytest.raises(
        ValueError, match=r"Owner owns parameters at layer 'transformer.h.0.attn.c_attn'"
    ):
        trainer(model, tmp_path, [sparse(Owner())]).train()
    assert is_ordinary(model)


def test_data_parallel_is_refused(tmp_path):
    model = new(gpt2)
    run = trainer(model, tmp_path, [callback := sparse()])
    run.args._n_gpu = 2
    with pytest.raises(
        ValueError,
        match=r"with 2 GPUs in one process the Trainer uses nn.DataParallel: .* torchrun",
    ):
        callback.on_train_begin(
            run.args, run.state, run.control, model=model, optimizer=run.create_optimizer()
        )


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_trainings_are_refused(tmp_path, kind):
    model = new(gpt2)
    run = trainer(model, tmp_path, [callback := sparse()])
    optimizer = run.create_optimizer()
    optimizer.accelerator_state = type("State", (), {"distributed_type": kind})
    with pytest.raises(ValueError, match=f"does not work under {kind}"):
        callback.on_train_begin(run.args, run.state, run.control, model=model, optimizer=optimizer)


BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_accuracy",
    "greater_is_better": True,
}
EACH_STEP = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def train_with_best(tmp_path, method, best):
    """The model, and the files of the best checkpoint and of the last."""
    model = new(bert)
    run = trainer(model, tmp_path, [sparse(method)], **EACH_STEP, **BEST)
    scores = iter([float(step == best) for step in range(1, 5)])
    run.compute_metrics = lambda _: {"accuracy": next(scores)}
    run.train()
    assert run.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert is_ordinary(model)
    return model, *(
        load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (best, 4)
    )


@pytest.mark.parametrize(
    "method", ["sr-ste", pytest.param(TransposableMask(update_every=1), marks=pytest.mark.slow)]
)
def test_the_best_model_is_sparse(tmp_path, method):
    """Though it is loaded over the masks of the last step."""
    model, best, last = train_with_best(tmp_path, method, 2)
    assert_equal({name: model.state_dict()[name] for name in best}, best)
    assert is_sparse(model)
    assert any(not torch.equal(last[name], best[name]) for name in best)


@pytest.mark.slow
def test_the_best_experts_are_loaded(tmp_path):
    """The Trainer does not: their checkpoint has other names."""
    model, seen = new(mixtral), {}

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen[state.global_step] = {
                name: value.clone() for name, value in model.state_dict().items()
            }

    options = {**EACH_STEP, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    run = trainer(model, tmp_path, [sparse(), Keep()], **options, learning_rate=0.3)
    run.train()
    best = run.state.best_global_step
    assert best < 4
    assert_equal(dict(model.state_dict()), seen[best])


def test_a_best_model_of_a_dense_phase_is_reported(tmp_path):
    with pytest.warns(
        UserWarning, match="are not N:M sparse: they are those of .*checkpoint-1', in a dense phase"
    ):
        model, best, last = train_with_best(tmp_path, ASP(start=0.5), 1)
    assert_equal({name: model.state_dict()[name] for name in best}, best)
    assert not is_sparse(model)
    assert nmf.is_nm(last["bert.pooler.dense.weight"], "2:4")


def test_evaluation_and_saving_use_the_sparse_weights(tmp_path):
    model = new(llama)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    run = trainer(model, tmp_path, [sparse(log_layers=True)], **options)
    run.train()
    losses = [log["eval_loss"] for log in run.state.log_history if "eval_loss" in log]
    assert run.evaluate()["eval_loss"] == losses[1]
    loaded = type(model).from_pretrained(tmp_path / "checkpoint-2")
    assert is_sparse(loaded)
    assert trainer(loaded, tmp_path, []).evaluate()["eval_loss"] == losses[0]
    run.save_model(tmp_path / "final")
    assert_equal(type(model).from_pretrained(tmp_path / "final").state_dict(), model.state_dict())
    logs = [log for log in run.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [1, 2, 3, 4]
    assert all(log["nm/density"] == 0.5 for log in logs)
    assert logs[0]["nm/density/model.layers.1.mlp.up_proj"] == 0.5


def test_later_callbacks_get_the_statistics(tmp_path):
    class Log(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            found.append(set(logs))

    found = []
    trainer(new(gpt2), tmp_path, [sparse(), Log()], max_steps=2, logging_steps=2).train()
    (train, end) = found
    assert {"loss", "nm/density", "nm/flip_rate", "nm/train_flops_ratio"} <= train
    assert not any(name.startswith("nm/") for name in end)


@pytest.mark.slow
def test_schedules_are_shares_of_max_steps(tmp_path):
    run = trainer(new(gpt2), tmp_path, [sparse(ASP(start=0.5))], max_steps=4)
    run.train()
    densities = [log["nm/density"] for log in run.state.log_history if "loss" in log]
    assert densities == [1.0, 0.5, 0.5, 0.5]


def test_a_frozen_body_stays_dense(tmp_path):
    model = new(bert)
    model.bert.encoder.layer[0].requires_grad_(False)
    before = copy.deepcopy(model.bert.encoder.layer[0].state_dict())
    trainer(model, tmp_path, [sparse()], max_steps=1).train()
    assert_equal(before, model.bert.encoder.layer[0].state_dict())
    assert nmf.is_nm(model.bert.encoder.layer[1].output.dense.weight, "2:4")


def test_mixed_precision(tmp_path):
    model = new(llama)
    trainer(
        model, tmp_path, [sparse("bi-mask", MVUE())], bf16=True, gradient_accumulation_steps=2
    ).train()
    assert model.lm_head.weight.dtype == torch.float32
    assert is_sparse(model)


def test_the_table_of_layers(tmp_path, capsys):
    trainer(new(bert), tmp_path, [sparse(show_tables=True)], max_steps=1).train()
    assert "N:M layers" in capsys.readouterr().out


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs the extra `hf`: pip install -e '\.\[hf\]'"):
        exec("from lightning_nm.integrations import NMTrainerCallback")


@pytest.mark.parametrize("make", [gpt2, bert])
def test_verify_reads_the_folders(tmp_path, make):
    """Those of checkpoints name the masked layers; a model in several files needs the pattern."""
    model = new(make)
    trainer(model, tmp_path, [sparse()], max_steps=1, save_strategy="steps", save_steps=1).train()
    found = verify(tmp_path / "checkpoint-1")
    assert found.ok
    assert {verdict.verdict for verdict in found.verdicts} == {"N:M"}
    model.save_pretrained(tmp_path / "parts", max_shard_size="8KB")
    assert len(list((tmp_path / "parts").glob("model-0000?-of-*.safetensors"))) > 1
    parts = verify(tmp_path / "parts", "2:4", min_share=0.5)
    assert parts.ok
    assert {verdict.key for verdict in parts.verdicts if verdict.verdict == "N:M"} == {
        v.key for v in found.verdicts
    }
    assert parts.share == found.share


@pytest.mark.parametrize("clipped", [False, True])
def test_the_decay_is_not_scaled_in_float16(tmp_path, clipped):
    """Clipping unscales the gradients; without it the callback does."""
    model = new(lambda: gpt2(dropout=0.0))
    run = trainer(model, tmp_path, [callback := sparse(SRSTE(decay=0.1))])
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


class Reads(nn.Module):
    """Reads the weight of its first layer."""

    def __init__(self):
        super().__init__()
        self.read, self.called, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, labels=None):
        hidden = self.called(nn.functional.linear(x, self.read.weight))
        logits = self.head(hidden.relu())
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_weight_that_other_code_reads_ends_the_training_before_its_first_step(tmp_path):
    torch.manual_seed(0)
    model = Reads()
    before = copy.deepcopy(model.state_dict())
    rows = [{"x": torch.randn(16), "labels": torch.tensor(k % 4)} for k in range(16)]

    def run(callback):
        given = arguments(tmp_path, max_steps=2, save_strategy="no")
        there = Trainer(model, given, train_dataset=rows, callbacks=[callback])
        there.train()
        return there

    callback = sparse()
    with pytest.raises(ValueError, match="have a gradient, but were not called: 'read'"):
        run(callback)
    assert callback.sparsifier is None
    assert is_ordinary(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # The Trainer goes on with what the message names.
    run(sparse(exclude="read"))
    assert is_ordinary(model)
