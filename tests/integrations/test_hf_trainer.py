"""NMTrainerCallback in the Trainer of transformers."""

import copy
import gc
import sys

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from torch import nn
from transformers import TrainerCallback

from lightning_nm import ASP, BAME, MVUE, SRSTE, NMSparsifier, TransposableMask
from lightning_nm import functional as nmf
from lightning_nm.export import verify
from lightning_nm.integrations import NMTrainerCallback
from lightning_nm.methods import MaskMethod
from lightning_nm.nn import Adapter
from tests.hf_models import bert, gpt2, llama, mixtral, new, trainer

pytestmark = pytest.mark.filterwarnings(
    # Accelerate on torch 2.13.
    "ignore:.*is deprecated:FutureWarning",
)


@pytest.fixture(autouse=True, scope="module")
def _old_objects():
    """Each training collects garbage, which takes longest in what was imported."""
    gc.freeze()
    yield
    gc.unfreeze()


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


class Recorder(TrainerCallback):
    """Keeps what the model is called with."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def keep(module, args, kwargs):
            if module.training:
                self.calls.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()})

        self.handle = model.register_forward_pre_hook(keep, with_kwargs=True)

    def on_train_end(self, *args, **kwargs):
        self.handle.remove()


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


@pytest.mark.parametrize("estimator", [None, MVUE()])
def test_it_trains_as_a_plain_loop(tmp_path, estimator):
    """With accumulation, and clipping before the decay of SR-STE."""
    recorder, options = Recorder(), {"max_grad_norm": 0.1, "lr_scheduler_type": "constant", "seed": 3}
    model = new(lambda: gpt2(dropout=0.0))
    callbacks = [recorder, sparse(SRSTE(decay=0.1), estimator, seed=5)]
    there = trainer(model, tmp_path, callbacks, gradient_accumulation_steps=2, **options)
    there.train()

    twin = new(lambda: gpt2(dropout=0.0)).train()
    sparsifier = NMSparsifier(twin, "2:4", SRSTE(decay=0.1), estimator, seed=5).attach()
    decayed = there.get_decay_parameter_names(twin)
    groups = [
        {"params": [p for n, p in twin.named_parameters() if (n in decayed) == wanted], "weight_decay": 0.0}
        for wanted in (True, False)
    ]
    optimizer = type(there.optimizer.optimizer)(groups, lr=1e-2, fused=there.optimizer.param_groups[0]["fused"])
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


RESUMED = [
    (gpt2, "sr-ste", MVUE()),
    (gpt2, BAME(every=1), None),
    (llama, "bi-mask", None),
    (bert, ASP(start=0.5), None),
    (bert, TransposableMask(), None),
    (mixtral, "bi-mask", MVUE()),
]


@pytest.mark.parametrize(
    ("make", "method", "estimator"),
    [pytest.param(*row, marks=[pytest.mark.slow] if number > 1 else []) for number, row in enumerate(RESUMED)],
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
    trainer(part, tmp_path / "part", [callback], **options).train(resume_from_checkpoint=str(middle))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, part.state_dict()[name]), name
    for file in ("nm_sparsifier.pt", "optimizer.pt"):
        states = [
            torch.load(tmp_path / folder / "checkpoint-4" / file, weights_only=True) for folder in ("whole", "part")
        ]
        assert_equal(*states)
    assert is_sparse(part)
    assert is_ordinary(part)


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
    trainer(whole, tmp_path / "whole", [sparse(method)], save_strategy="steps", save_steps=1).train()
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


def checkpoint(tmp_path, method="sr-ste"):
    trainer(new(gpt2), tmp_path, [sparse(method)], max_steps=2, save_strategy="steps", save_steps=2).train()
    return tmp_path / "checkpoint-2"


def resume(folder, callback, output=None, **options):
    model = new(gpt2)
    try:
        trainer(model, output or folder.parent, [callback], **options).train(resume_from_checkpoint=str(folder))
    finally:
        assert is_ordinary(model)


def test_a_folder_that_cannot_be_resumed_is_refused(tmp_path):
    folder = checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match=r"there is no '.*elsewhere/checkpoint-2/nm_sparsifier.pt'.*resume_from="):
        resume(folder, sparse(), tmp_path / "elsewhere")
    resume(folder, sparse(resume_from=folder), tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="method SRSTE in the checkpoint, BiMask here"):
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
    with pytest.raises(ValueError, match="saved without NMTrainerCallback, to train sparse from its weights"):
        resume(folder, sparse())


@pytest.mark.slow
def test_weights_of_another_run_are_refused(tmp_path):
    folder, other = checkpoint(tmp_path / "run"), checkpoint(tmp_path / "other", "ste")
    (other / "nm_sparsifier.pt").write_bytes((folder / "nm_sparsifier.pt").read_bytes())
    with pytest.raises(ValueError, match=r"cannot resume with the state in .*do not belong to the weights"):
        resume(other, sparse())


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
    with pytest.raises(ValueError, match=r"Owner owns parameters at layer 'transformer.h.0.attn.c_attn'"):
        trainer(model, tmp_path, [sparse(Owner())]).train()
    assert is_ordinary(model)


def test_data_parallel_is_refused(tmp_path):
    model = new(gpt2)
    run = trainer(model, tmp_path, [callback := sparse()])
    run.args._n_gpu = 2
    with pytest.raises(ValueError, match=r"with 2 GPUs in one process the Trainer uses nn.DataParallel: .* torchrun"):
        callback.on_train_begin(run.args, run.state, run.control, model=model, optimizer=run.create_optimizer())


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharded_trainings_are_refused(tmp_path, kind):
    model = new(gpt2)
    run = trainer(model, tmp_path, [callback := sparse()])
    optimizer = run.create_optimizer()
    optimizer.accelerator_state = type("State", (), {"distributed_type": kind})
    with pytest.raises(ValueError, match=f"does not work under {kind}"):
        callback.on_train_begin(run.args, run.state, run.control, model=model, optimizer=optimizer)


BEST = {"load_best_model_at_end": True, "metric_for_best_model": "eval_accuracy", "greater_is_better": True}
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
    return model, *(load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (best, 4))


@pytest.mark.parametrize("method", ["sr-ste", pytest.param(TransposableMask(update_every=1), marks=pytest.mark.slow)])
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
            seen[state.global_step] = {name: value.clone() for name, value in model.state_dict().items()}

    options = {**EACH_STEP, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    run = trainer(model, tmp_path, [sparse(), Keep()], **options, learning_rate=0.3)
    run.train()
    best = run.state.best_global_step
    assert best < 4
    assert_equal(dict(model.state_dict()), seen[best])


def test_a_best_model_of_a_dense_phase_is_reported(tmp_path):
    with pytest.warns(UserWarning, match="are not N:M sparse: they are those of .*checkpoint-1', in a dense phase"):
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
    trainer(model, tmp_path, [sparse("bi-mask", MVUE())], bf16=True, gradient_accumulation_steps=2).train()
    assert model.lm_head.weight.dtype == torch.float32
    assert is_sparse(model)


def test_the_table_of_layers(tmp_path, capsys):
    trainer(new(bert), tmp_path, [sparse(show_tables=True)], max_steps=1).train()
    assert "N:M layers" in capsys.readouterr().out


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs the extra `hf`: pip install 'lightning-nm\[hf\]'"):
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
    assert {verdict.key for verdict in parts.verdicts if verdict.verdict == "N:M"} == {v.key for v in found.verdicts}
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
