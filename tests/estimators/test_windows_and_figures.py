"""When estimators work, what they are said to cost, and how good their gradients are measured to be."""

import copy
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


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)
    )


def attach(model, estimator, method="dense", pattern="2:4", **options):
    return NMSparsifier(
        model, pattern, method, estimator, skip_first_last=False, **options
    ).attach()


def train(model, sparsifier, steps, look=None, accumulate=1):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sparsifier.register(optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        for k in range(accumulate):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * accumulate + k))
            model(x).square().mean().backward()
            if k + 1 == accumulate:
                sparsifier.before_step(optimizer)
                optimizer.step()
                if look:
                    look(step)
            sparsifier.step()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_wgrad_is_dense_before_and_after_the_window(accumulate):
    model = network()
    sparsifier = attach(model, MVUE("1:2", dense_start=2, dense_end=0.3), planned_steps=10)
    assert [layer.progress.estimator_schedule for layer in sparsifier.layers.values()] == [
        (2, 7)
    ] * 3
    exact, treatments = [], []

    def look(step):
        twin = network()
        twin.load_state_dict(before[-1])
        for k in range(accumulate):
            x = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * accumulate + k))
            twin(x).square().mean().backward()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        exact.append(all(torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-7) for p, q in pairs))
        treatments.append(sparsifier.layers["0"].gemms().wgrad.label)
        before.append(copy.deepcopy(model.state_dict()))

    before = [copy.deepcopy(model.state_dict())]
    train(model, sparsifier, 10, look, accumulate)
    assert exact == [True] * 2 + [False] * 5 + [True] * 3
    assert treatments == ["dense"] * 2 + ["1:2"] * 5 + ["dense"] * 3
    ratios = sparsifier.flops_ratios(mean=True)
    for kind in ("arithmetic", "paper", "eligible"):
        assert ratios[kind] == pytest.approx(1 - 5 / 10 / 6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MVUE("5:4"), "5:4"),
        (lambda: MVUE("4:4"), "4:4"),
        (lambda: TopN("0:4"), "0:4"),
        (lambda: MVUE(dense_start=-1), "dense_start=-1"),
        (lambda: MVUE(dense_end=1.2), r"dense_end=1\.2 is not a share"),
        (lambda: ApproxMVUE(dense_start=0.5, dense_end=0.5), "whole training dense"),
        (lambda: MVUE(dense_start=1.0), "whole training dense"),
        (lambda: MVUE(dense_end=1.0), "whole training dense"),
    ],
)
def test_bad_estimators(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_windows_fail_before_anything_is_touched():
    for options, message in (
        ({}, r"MVUE's dense_end=0\.1 is a share .* leave dense_end out"),
        ({"planned_steps": 0}, "would never be sparse"),
    ):
        model = network()
        kinds = [type(m) for m in model.modules()]
        with pytest.raises(ValueError, match=message):
            attach(model, MVUE(dense_end=0.1), **options)
        assert [type(m) for m in model.modules()] == kinds
    with pytest.raises(
        ValueError, match="dense_start=6 ends at step 6 and dense_end=5 begins at step 5 of 10"
    ):
        attach(network(), MVUE(dense_start=6, dense_end=5), planned_steps=10)
    with pytest.raises(
        ValueError,
        match=r"dense_end=5 counts from the end .* not known: leave dense_end out",
    ):
        attach(network(), MVUE(dense_end=5))


@pytest.mark.parametrize(
    ("method", "pattern", "estimator", "expected"),
    [
        ("dense", "2:4", MVUE(), (5 / 6, 5 / 6, 5 / 6)),
        ("transposable", "2:4", MVUE(), (0.5, 0.5, 0.5)),
        (
            "sr-ste",
            "1:4",
            TopN("1:2"),
            ((0.25 + 0.25 + 0.5) / 3, (0.25 + 1 + 0.5) / 3, (0.25 + 1 + 0.5) / 3),
        ),
        # dW is needed at kept entries only: of the halved multiply-adds another three quarters
        (
            ASP(),
            "1:4",
            ApproxMVUE(),
            ((0.25 + 0.25 + 0.125) / 3, (0.25 + 1 + 0.5) / 3, (0.25 + 1 + 0.5) / 3),
        ),
    ],
)
def test_flops(method, pattern, estimator, expected):
    model = network()
    ratios = attach(model, estimator, method, pattern).flops_ratios()
    assert [ratios[kind] for kind in ("arithmetic", "paper", "eligible")] == pytest.approx(expected)


def test_flops_of_bame_take_the_lesser_of_both():
    model = network()
    sparsifier = attach(model, MVUE("2:4"), BAME(start=5, stop=6), "1:4")
    wgrad = sparsifier.layers["0"].gemms().wgrad
    assert (wgrad.label, wgrad.arithmetic, wgrad.paper, wgrad.eligible) == (
        "2:4",
        0.125,
        0.25,
        0.5,
    )


def test_a_frozen_layer_is_skipped_and_said_so():
    model = network()
    model[2].weight.requires_grad_(False)
    sparsifier = attach(model, "mvue", "transposable", frozen="mask")
    console = Console(width=160, file=io.StringIO())
    print_layers(sparsifier, console)
    (row,) = [
        line for line in console.file.getvalue().splitlines() if line.strip().startswith("2 ")
    ]
    assert row.split()[4:8] == ["2:4", "2:4", "none", "(1)"]
    assert "(1) wgrad: frozen, so no weight gradient" in console.file.getvalue()
    train(model, sparsifier, 2)
    assert model[2].weight.grad is None
    assert sparsifier.layers["2"].progress.observed is None
    model[2].weight.requires_grad_()
    assert sparsifier.layers["2"].gemms().wgrad.label == "2:4"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_grad_snr_is_the_norm_over_the_error(accumulate):
    model, twin = network(), network()
    sparsifier = attach(model, MVUE("1:2"), grad_snr_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sparsifier.register(optimizer)
    sums = dict.fromkeys(sparsifier.layers, (0.0, 0.0))
    for k in range(accumulate):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(k))
        for m in (model, twin):
            m.zero_grad()
            m(x).square().mean().backward()
        for name in sparsifier.layers:
            exact, found = twin[int(name)].weight.grad, model[int(name)].weight.grad
            sums[name] = (
                sums[name][0] + exact.square().sum().item(),
                sums[name][1] + (found - exact).square().sum().item(),
            )
        if k + 1 < accumulate:
            sparsifier.step()
    found = {name: values["grad_snr"] for name, values in sparsifier.layer_stats().items()}
    assert found == pytest.approx(
        {name: math.sqrt(e / d) for name, (e, d) in sums.items()}, rel=1e-4
    )
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    assert sparsifier.stats()["grad_snr"] == pytest.approx(math.sqrt(total[0] / total[1]), rel=1e-4)
    assert sparsifier.stats()["grad_density"] <= 0.5  # ReLU leaves blocks with no gradient at all


def test_observations_are_there_whenever_figures_are_read():
    model = network()
    sparsifier = attach(model, "mvue", grad_snr_every=2)
    there = []
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sparsifier.register(optimizer)
    for _ in range(5):
        model(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
        sparsifier.step()
        there.append("grad_snr" in sparsifier.stats())
    assert there == [True] * 5


@pytest.mark.parametrize("same_process", [False, True])
def test_a_resumed_run_observes_in_its_first_step(same_process):
    """Not only at the next turn, step 100."""
    model = network()
    sparsifier = attach(model, "mvue", grad_snr_every=100)
    train(model, sparsifier, 3)
    weights = copy.deepcopy(model.state_dict())
    state = {
        **sparsifier.state_dict(),
        "stepped": True,
    }  # saved between the optimizer's step and the end of the batch
    if not same_process:
        model = network()
        sparsifier = attach(model, "mvue", grad_snr_every=100)
    model.load_state_dict(weights)
    sparsifier.load_state_dict(state)
    assert "grad_snr" not in sparsifier.stats()  # an earlier figure is of other weights
    sparsifier.register(torch.optim.SGD(model.parameters(), 0.05))
    assert sparsifier.step()
    turns = []

    def look(step):
        turns.append(
            [name for name, layer in sparsifier.layers.items() if layer.progress.observing]
        )
        assert {"grad_snr", "grad_density"} <= sparsifier.stats().keys()

    train(model, sparsifier, 3, look)
    assert turns == [list(sparsifier.layers), [], []]


def test_an_estimator_that_begins_between_two_turns_is_observed_at_once():
    model = network()
    sparsifier = attach(model, MVUE(dense_start=2), grad_snr_every=100, planned_steps=10)
    there = []
    train(model, sparsifier, 4, lambda step: there.append("grad_snr" in sparsifier.stats()))
    assert there == [False, False, True, True]


def test_a_loaded_state_keeps_the_estimators_schedule():
    def start(planned):
        model = network()
        return model, attach(model, MVUE("1:2", dense_end=0.5), planned_steps=planned)

    model, sparsifier = start(20)
    train(model, sparsifier, 4)
    fresh, resumed = start(40)
    fresh.load_state_dict(model.state_dict())
    with pytest.warns(
        UserWarning, match=r"MVUE scheduled at steps \(0, 10\), which stays; .* \(0, 20\)"
    ):
        resumed.load_state_dict(sparsifier.state_dict())
    assert resumed.layers["0"].progress.estimator_schedule == (0, 10)


def test_a_second_fit_in_the_dense_phase_is_said(tmp_path):
    model = new_model()
    nm = NMSparsityCallback("2:4", "sr-ste", MVUE(dense_end=0.5), show_tables=False)
    make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())
    with pytest.warns(
        UserWarning,
        match="MVUE is in the dense phase that began at training step 3; .* new callback",
    ):
        make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())


@pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")
def test_shares_tell_masks_from_gradients():
    model = nn.Sequential(nn.Linear(16, 10), nn.Linear(10, 16))
    sparsifier = attach(model, "mvue", "sr-ste")
    sizes = {name: layer.weight.numel() for name, layer in sparsifier.layers.items()}
    total = sum(p.numel() for p in model.parameters())
    assert sparsifier.shares() == {"parameters": sizes["0"] / total}
    layers = sparsifier.layers.values()
    assert shares_of(model, layers, {}) == {"parameters": sum(sizes.values()) / total}
    console = Console(width=160, file=io.StringIO())
    print_layers(sparsifier, console)
    assert "masked: 46.2% of" in console.file.getvalue()
    assert "N:M gradients: 92.5% of" in console.file.getvalue()
    sparsifier.detach()
    with pytest.raises(
        ValueError, match=r"'1' is named by `include` but cannot be masked: in 10 .*`method: dense`"
    ):
        attach(model, "mvue", "sr-ste", include=["0", "1"])


def test_an_overflow_does_not_spoil_the_figures():
    model = network()
    sparsifier = attach(model, "mvue", grad_snr_every=1)
    model(torch.full((32, 16), 1e30)).square().sum().backward()
    assert "grad_snr" not in sparsifier.stats()
    model(torch.randn(32, 16)).square().sum().backward()
    assert 0 < sparsifier.stats()["grad_snr"] < math.inf


def test_masked_layers_that_were_not_called_yet_are_in_the_table():
    model = network()
    sparsifier = attach(model, None, "sr-ste", include="4")
    model[0](torch.randn(4, 16))
    console = Console(width=160, file=io.StringIO())
    print_layers(sparsifier, console)
    assert "parameters, 0.0% of its weight FLOPs" in console.file.getvalue()
    assert "less than half of the model's weight FLOPs is masked" in console.file.getvalue()


def test_a_smoke_run_takes_any_schedule(tmp_path):
    nm = NMSparsityCallback(
        "2:4", TransposableMask(dense_start=100), MVUE(dense_start=5, dense_end=50)
    )
    seen = []

    def look(trainer, module):
        layer = nm.sparsifier.layers["net.6"]
        seen.append(
            (
                layer.progress.schedule,
                layer.progress.estimator_schedule,
                layer.step,
                layer.forward_mask,
                layer.progress.estimating,
            )
        )

    make_trainer(tmp_path, [nm, Inspect(look)], fast_dev_run=True).fit(new_model(), Data())
    assert seen == [((100,), (5, (1 << 30) - 50), 1, None, False)]


def test_layers_take_turns_in_being_observed_and_observing_changes_nothing():
    def run(every):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), *(nn.Linear(16, 16) for _ in range(5)))
        sparsifier = attach(model, "mvue", grad_snr_every=every)
        turns = []

        def look(step):
            turns.append(
                [name for name, layer in sparsifier.layers.items() if layer.progress.observing]
            )

        train(model, sparsifier, 7, look)
        return list(model.parameters()), turns, sparsifier.stats()

    plain, none, stats = run(0)
    assert none == [[]] * 7
    assert "grad_snr" not in stats
    observed, turns, stats = run(3)
    assert turns == [
        ["0", "1", "2", "3"],
        [],
        [],
        ["0", "1", "4", "5"],
        [],
        [],
        ["2", "3", "4", "5"],
    ]
    assert stats["grad_density"] == pytest.approx(0.5)
    assert stats["grad_snr"] > 0
    for a, b in zip(plain, observed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_a_compiled_model_is_not_observed_and_compiles_once():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = network()
    sparsifier = attach(model, "mvue", grad_snr_every=2)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    sparsifier.register(optimizer)
    for _ in range(4):
        compiled(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    assert counter.frame_count == 1
    assert "grad_snr" not in sparsifier.stats()
    torch._dynamo.reset()


@pytest.mark.parametrize("estimator", [MVUE("1:32"), MVUE("1:32", dense_start=2)])
def test_too_few_tokens_are_said(tmp_path, estimator):
    nm = NMSparsityCallback(
        "2:4", "dense", estimator, show_tables=False
    )  # net.3 has enough: batch x positions
    with pytest.warns(
        UserWarning, match=r"fewer tokens.*: \{'net\.6': '16 tokens, blocks of 32'\}"
    ):
        make_trainer(tmp_path, [nm], max_epochs=1).fit(new_model(), Data())
    model = new_model()
    model.net[6].weight.requires_grad_(False)
    nm = NMSparsityCallback("2:4", "dense", estimator, show_tables=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fewer tokens")
        make_trainer(tmp_path, [nm], max_epochs=1).fit(model, Data())


def test_statistics_reach_the_trainer(tmp_path):
    nm = NMSparsityCallback(
        "2:4", "transposable", "mvue", grad_snr_every=1, log_layers=True, show_tables=False
    )
    trainer = make_trainer(tmp_path, [nm], max_epochs=1)
    trainer.fit(new_model(), Data())
    assert trainer.callback_metrics["nm/grad_snr"] > 0
    assert 0 < trainer.callback_metrics["nm/grad_density"] <= 0.5
    assert "nm/grad_snr/net.6" in trainer.callback_metrics
    assert (
        trainer.callback_metrics["nm/train_flops_ratio"] < 0.66
    )  # without the estimator it is above
