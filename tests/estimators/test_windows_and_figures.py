"""When estimators work, what they are said to cost, and how good their gradients are measured to be."""

import io
import math
import warnings

import pytest
import torch
from rich.console import Console
from torch import nn

from lightning_nm import (
    ASP,
    BAME,
    MVUE,
    ApproxMVUE,
    NMSparsifier,
    NMSparsityCallback,
    TopN,
    TransposableMask,
)
from lightning_nm.callbacks.tables import print_layers
from lightning_nm.training.statistics import shares_of
from tests.support.lightning_models import Data, Inspect, make_trainer, new_model
from tests.support.method_loop import Loop, mlp


def loop(estimator, method="dense", pattern="2:4", **options):
    options = {"planned_steps": None, "shape": (32, 16), **options}
    model = options.pop("model", None) or mlp(16, 32, 32, 8)
    sgd = lambda p: torch.optim.SGD(p, 0.05)  # noqa: E731
    return Loop(method, pattern, sgd, model, grad_estimator=estimator, **options)


def table_of(sparsifier):
    console = Console(width=160, file=io.StringIO())
    print_layers(sparsifier, console)
    return console.file.getvalue()


@pytest.mark.parametrize("windows", [1, 4])
def test_wgrad_is_dense_before_and_after_the_window(windows):
    run = loop(MVUE("1:2", dense_start=2, dense_end=0.3), planned_steps=10)
    assert {layer.progress.estimator_schedule for layer in run.layers.values()} == {(2, 7)}
    exact, labels = [], []
    for _ in range(10):
        twin = loop(None)
        twin.model.load_state_dict(run.model.state_dict())
        twin.sparsifier.training.clock = run.sparsifier.clock
        twin.backward()
        labels.append(run.layer.gemms().wgrad.label)
        run.backward(windows)
        pairs = zip(run.model.parameters(), twin.model.parameters(), strict=True)
        exact.append(all(torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7) for p, q in pairs))
        run.step()
    assert exact == [True] * 2 + [False] * 5 + [True] * 3
    assert labels == ["dense"] * 2 + ["1:2"] * 5 + ["dense"] * 3
    ratios = run.sparsifier.flops_ratios(mean=True).values()
    assert [*ratios] == pytest.approx([1 - 5 / 10 / 6] * 3)


@pytest.mark.parametrize(
    ("method", "pattern", "estimator", "expected"),
    [
        ("dense", "2:4", MVUE(), (5 / 6, 5 / 6, 5 / 6)),
        ("transposable", "2:4", MVUE(), (0.5, 0.5, 0.5)),
        ("sr-ste", "1:4", TopN("1:2"), (1 / 3, 1.75 / 3, 1.75 / 3)),
        # dW is needed at kept entries only: of the halved multiply-adds another three quarters
        (ASP(), "1:4", ApproxMVUE(), (0.625 / 3, 1.75 / 3, 1.75 / 3)),
        # In the paper's count BAME's dW has the lesser of both.
        (BAME(5, 6), "1:4", MVUE("2:4"), (0.625 / 3, 0.25, 1.75 / 3)),
    ],
)
def test_flops(method, pattern, estimator, expected):
    ratios = loop(estimator, method, pattern).sparsifier.flops_ratios()
    assert [ratios[kind] for kind in ("arithmetic", "paper", "eligible")] == pytest.approx(expected)


def test_a_frozen_layer_is_skipped_and_said_so():
    model = mlp(16, 32, 32, 8)
    model[2].weight.requires_grad_(False)
    run = loop("mvue", "transposable", model=model, frozen="mask")
    table = table_of(run.sparsifier)
    (row,) = [line for line in table.splitlines() if line.strip().startswith("2 ")]
    assert row.split()[4:8] == ["2:4", "2:4", "none", "(1)"]
    assert "(1) wgrad: frozen, so no weight gradient" in table
    run.train(2)
    assert model[2].weight.grad is None
    assert run.layers["2"].progress.observed is None
    model[2].weight.requires_grad_()
    assert run.layers["2"].gemms().wgrad.label == "2:4"


@pytest.mark.parametrize("windows", [1, 2])
def test_grad_snr_is_the_norm_over_the_error(windows):
    run, twin = loop(MVUE("1:2"), grad_snr_every=1), mlp(16, 32, 32, 8)
    parts = run.batch(0).chunk(windows)
    sums = dict.fromkeys(run.layers, (0.0, 0.0))
    for number, x in enumerate(parts):
        if number:
            run.sparsifier.step()  # a micro-batch has ended
        for model in (run.model, twin):
            model.zero_grad()
            model(x).square().mean().backward()
        for name, layer in run.layers.items():
            exact, found = twin[int(name)].weight.grad, layer.weight.grad
            whole, error = (each.square().sum().item() for each in (exact, found - exact))
            sums[name] = (sums[name][0] + whole, sums[name][1] + error)
    found = {name: values["grad_snr"] for name, values in run.sparsifier.layer_stats().items()}
    expected = {name: math.sqrt(whole / error) for name, (whole, error) in sums.items()}
    assert found == pytest.approx(expected, rel=1e-4)
    whole, error = map(sum, zip(*sums.values(), strict=True))
    stats = run.sparsifier.stats()
    assert stats["grad_snr"] == pytest.approx(math.sqrt(whole / error), rel=1e-4)
    assert stats["grad_density"] <= 0.5  # ReLU leaves blocks with no gradient at all


def has_snr(run):
    return "grad_snr" in run.sparsifier.stats()


def observing(run):
    return [name for name, layer in run.layers.items() if layer.progress.observing]


@pytest.mark.parametrize(
    ("estimator", "every", "expected"),
    [("mvue", 2, [True] * 5), (MVUE(dense_start=2), 100, [False, False, True, True, True])],
)
def test_observations_are_there_whenever_figures_are_read(estimator, every, expected):
    """An estimator that begins between two turns is observed at once."""
    run = loop(estimator, grad_snr_every=every)
    assert [has_snr(run) for _ in run.steps(5)] == expected


@pytest.mark.parametrize("same_process", [False, True])
def test_a_resumed_run_observes_in_its_first_step(same_process):
    """Not only at the next turn, step 100."""
    run = loop("mvue", grad_snr_every=100).train(3)
    states = run.states()
    states[1]["stepped"] = True  # saved between the optimizer's step and the end of the batch
    if not same_process:
        run = loop("mvue", grad_snr_every=100)
    run.load(states)
    assert not has_snr(run), "an earlier figure is of other weights"
    assert run.sparsifier.step()
    turns = []
    for _ in range(3):
        turns.append(observing(run))
        run.train(1)
        assert {"grad_snr", "grad_density"} <= run.sparsifier.stats().keys()
    assert turns == [list(run.layers), [], []]


def test_layers_take_turns_in_being_observed_and_observing_changes_nothing():
    runs, turns = [], []
    for every in (0, 3):
        run = loop("mvue", model=mlp(*[16] * 7), grad_snr_every=every)
        turns.append([])
        for _ in range(7):
            turns[-1].append("".join(observing(run)))
            run.train(1)
        runs.append(run)
    assert turns[0] == [""] * 7
    assert turns[1] == ["0246", "", "", "02810", "", "", "46810"]
    plain, observed = runs
    assert not has_snr(plain)
    stats = observed.sparsifier.stats()
    assert 0 < stats["grad_density"] <= 0.5
    assert stats["grad_snr"] > 0
    assert all(map(torch.equal, plain.model.parameters(), observed.model.parameters()))


def test_a_loaded_state_keeps_the_estimators_schedule():
    run, resumed = (loop(MVUE("1:2", dense_end=0.5), planned_steps=n) for n in (20, 40))
    message = r"MVUE scheduled at steps \(0, 10\), which stays; .* \(0, 20\)"
    with pytest.warns(UserWarning, match=message):
        resumed.load(run.train(4).states())
    assert resumed.layer.progress.estimator_schedule == (0, 10)


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_shares_tell_masks_from_gradients():
    model = nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 16))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste", "mvue", skip_first_last=False).attach()
    total = sum(p.numel() for p in model.parameters())
    assert sparsifier.shares() == {"parameters": 160 / total}
    layers = sparsifier.layers.values()
    assert shares_of(model, layers, {}) == {"parameters": 320 / total}
    assert "masked: 46.2% of" in table_of(sparsifier)
    assert "N:M gradients: 92.5% of" in table_of(sparsifier)
    sparsifier.detach()
    message = r"'1' is named by `include` but cannot be masked: in 10 .*`method: dense`"
    with pytest.raises(ValueError, match=message):
        NMSparsifier(model, "2:4", "sr-ste", "mvue", include=["0", "1"]).attach()


def test_masked_layers_that_were_not_called_yet_are_in_the_table():
    run = loop(None, "sr-ste", include="4")
    run.model[0](torch.randn(4, 16))
    assert "parameters, 0.0% of its weight FLOPs" in table_of(run.sparsifier)
    message = "less than half of the model's weight FLOPs is masked"
    assert message in table_of(run.sparsifier)


def test_an_overflow_does_not_spoil_the_figures():
    run = loop("mvue", grad_snr_every=1)
    run.model(torch.full((32, 16), 1e30)).square().sum().backward()
    assert not has_snr(run)
    run.backward()
    assert 0 < run.sparsifier.stats()["grad_snr"] < math.inf


@pytest.mark.slow
def test_a_compiled_model_is_not_observed_and_compiles_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    run, counter = loop("mvue", grad_snr_every=2), CompileCounterWithBackend("aot_eager")
    run.model = torch.compile(run.model, fullgraph=True, backend=counter)
    assert not has_snr(run.train(4))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def fit(tmp_path, nm, model=None, **options):
    trainer = make_trainer(tmp_path, [nm], **{"max_epochs": 1, **options})
    trainer.fit(model or new_model(), Data())
    return trainer


def test_a_second_fit_in_the_dense_phase_is_said(tmp_path):
    nm = NMSparsityCallback("2:4", "sr-ste", MVUE(dense_end=0.5), show_tables=False)
    model = new_model()
    fit(tmp_path, nm, model)
    message = "MVUE is in the dense phase that began at training step 3; .* new callback"
    with pytest.warns(UserWarning, match=message):
        fit(tmp_path, nm, model)


def test_a_smoke_run_takes_any_schedule(tmp_path):
    method, estimator = TransposableMask(dense_start=100), MVUE(dense_start=5, dense_end=50)
    nm = NMSparsityCallback("2:4", method, estimator, show_tables=False)
    seen = []

    def look(trainer, module):
        layer = nm.sparsifier.layers["net.6"]
        progress = layer.progress
        schedules = (progress.schedule, progress.estimator_schedule)
        seen.append((*schedules, layer.step, layer.forward_mask, progress.estimating))

    make_trainer(tmp_path, [nm, Inspect(look)], fast_dev_run=True).fit(new_model(), Data())
    assert seen == [((100,), (5, (1 << 30) - 50), 1, None, False)]


@pytest.mark.parametrize("estimator", [MVUE("1:32"), MVUE("1:32", dense_start=2)])
def test_too_few_tokens_are_said(tmp_path, estimator):
    def callback():
        return NMSparsityCallback("2:4", "dense", estimator, show_tables=False)

    # net.3 has enough: batch x positions
    message = r"fewer tokens.*: \{'net\.6': '16 tokens, blocks of 32'\}"
    with pytest.warns(UserWarning, match=message):
        fit(tmp_path, callback())
    model = new_model()
    model.net[6].weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fewer tokens")
        fit(tmp_path, callback(), model)


def test_statistics_reach_the_trainer(tmp_path):
    options = {"grad_snr_every": 1, "log_layers": True, "show_tables": False}
    nm = NMSparsityCallback("2:4", "transposable", "mvue", **options)
    found = fit(tmp_path, nm).callback_metrics
    assert found["nm/grad_snr"] > 0
    assert 0 < found["nm/grad_density"] <= 0.5
    assert "nm/grad_snr/net.6" in found
    assert found["nm/train_flops_ratio"] < 0.66  # without the estimator it is above
