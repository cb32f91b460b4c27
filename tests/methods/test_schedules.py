"""`schedule`: every method that takes it trains in its stages, resumes exactly in each, and is counted as it is."""

import io
import re
from itertools import pairwise, product
from typing import get_args

import pytest
import torch
from rich.console import Console
from torch import nn

import lightning_nm
from lightning_nm import (
    ASP,
    BAME,
    MVUE,
    STE,
    DecayingMask,
    NMPattern,
    NMPrecision,
    NMSparsifier,
    NMSparsityCallback,
    RigL,
    SparsityConfig,
    TransposableMask,
)
from lightning_nm import functional as nmf
from lightning_nm.callbacks.fit_checks import is_scheduled
from lightning_nm.callbacks.tables import hyperparameters, print_layers
from lightning_nm.nn.costs import mean_densities
from lightning_nm.nn.selection import Rule
from lightning_nm.schedule import DENSE, FINAL, stage_at
from lightning_nm.short_names import MethodName, resolve_method
from lightning_nm.training.phases import charge_plan, finished_phases
from tests.support.contract import KERNEL, METHODS, sgd_or_adam
from tests.support.kinds import KINDS, make
from tests.support.lightning_models import (
    Data,
    SaveAt,
    assert_equal_models,
    make_trainer,
    new_model,
)
from tests.support.method_loop import Loop, mlp
from tests.support.outside import SoftThreshold
from tests.support.pairs import mostly_slow

STEPS = 9
PARTS = ("dense_start", "ramp", "dense_end")
WHOLE = {"dense_start": 2, "ramp": ["3:4"], "dense_end": 2}
"""Dense, 3:4 from step 2, the pattern from step 4 or 5, and dense from step 7."""
RAMP = {"ramp": ["3:4"], "ramp_ends": [4]}
TAKERS = [
    *("ste", "sr-ste", "s-ste", "asp", "transposable"),
    *("bi-mask", "slope", "bame", "bame-bi-mask", "rigl"),
]
"""Rows of the contract whose methods take every part."""
CASES = list(product(TAKERS, ("linear", "conv2d-groups", "attention", "experts")))


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2)


def loop(method, schedule=WHOLE, make=adamw, **options):
    options = {"planned_steps": STEPS, **options}
    return Loop(method, make=make, schedule=schedule, **options)


def check_stage(layer, clock):
    """The masks, the weight and the GEMMs are those of the stage."""
    stage = stage_at(layer.progress.stages, clock)
    assert layer.progress.stage == stage
    if layer.spec.forward_reason:
        return
    forward = layer.gemms().forward
    if stage == DENSE:
        assert forward.reason == "dense phase"
        assert not layer.masks.has_forward
        assert not layer.masks.has_backward
        assert torch.equal(layer.forward_weight(), layer.weight)
        return
    pattern = layer.spec.pattern if stage == FINAL else NMPattern.parse(stage)
    assert layer.pattern == pattern
    assert nmf.is_nm(layer.view.rows(layer.forward_weight()), pattern, dim=1)
    if layer.masks.has_forward:
        assert forward.pattern == pattern
        assert layer.masks.density == pytest.approx(pattern.density)


@pytest.mark.parametrize(("method", "kind"), mostly_slow(CASES, every=4))
def test_stages_follow_each_other_and_resume_exactly(method, kind):
    def start(seed):
        module, _ = make(kind, torch.float32, seed=seed)
        optimizer = lambda p: sgd_or_adam(method, p, 0.05, momentum=0.9)  # noqa: E731
        options = {"model": module, "shape": KINDS[kind][1]}
        return loop(METHODS[method](), make=optimizer, **options)

    run, saved = start(0), {}
    assert [name for _, name in run.layer.progress.stages] == ["dense", "3:4", "final", "dense"]
    for clock in run.steps(STEPS):
        for layer in run.layers.values():
            check_stage(layer, clock)
        saved[clock] = run.states()
    for clock in (1, 3, 6, 8):
        resumed = start(1).load(saved[clock]).train(STEPS - clock)
        assert all(map(torch.equal, run.model.parameters(), resumed.model.parameters()))
        ratios = (each.sparsifier.flops_ratios(mean=True) for each in (run, resumed))
        assert next(ratios) == next(ratios)


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("ste", STE(dense_start=2, dense_end=2)),
        ("transposable", TransposableMask(2, dense_start=2, dense_end=2)),
        ("asp", ASP(start=2)),
    ],
)
def test_dense_phases_are_those_that_methods_have_by_themselves(method, own):
    schedule = {"dense_start": 2, "dense_end": 0 if method == "asp" else 2}
    by_schedule, by_method = (
        loop(*each).train(STEPS).model.state_dict()
        for each in ((METHODS[method](), schedule), (own, None))
    )
    # The schedule also ends the state of pruned entries, which trains none of them.
    exact = {} if method == "asp" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(by_schedule, by_method, **exact)


@pytest.mark.filterwarnings("ignore:RigL never moves", "ignore:BAME", "ignore:.*stand still")
@pytest.mark.parametrize("method", ["asp", "slope", "rigl", "bame"])
def test_fixed_masks_narrow_and_dense_phases_begin_without_old_state(method):
    # Masks that would move by themselves stand still.
    made = {"bame": BAME(stop=1, every=50, evidence="batch"), "rigl": RigL(50, stop=60)}
    run, kept = loop(made.get(method, method), {**RAMP, "dense_end": 2}), []
    param = run.layer.param
    for clock in run.steps(STEPS):
        mask = run.layer.forward_mask
        if clock == 7:
            gone = ~kept[-1]
            for values in (param, run.state["exp_avg"], run.state["exp_avg_sq"]):
                assert not values[gone].any()
        if mask is not None:
            kept.append(mask)
            assert clock < 4 or not param[~mask].any()
        if clock == 4:
            # Entries that a narrower pattern prunes are flips.
            assert float(run.layer.masks.flips) / mask.numel() == 0.25
    for before, after in pairwise(kept):
        assert not (after & ~before).any(), "nested"
    assert not kept[-1].equal(kept[0])
    assert param[~kept[-1]].count_nonzero() > 100, "trained again"
    assert finished_phases(list(run.layers.values())) == [
        "the schedule's dense end began at training step 7"
    ]


REFUSED = {"cast": PARTS, "lbc": PARTS, "maxq": PARTS, "mask-logits": PARTS}
REFUSED |= {"step": ("dense_start",), "decaying": ("ramp",)}


@pytest.mark.parametrize("method", get_args(MethodName))
@pytest.mark.parametrize("part", PARTS)
def test_every_method_takes_each_part_or_refuses_it_by_name(method, part):
    schedule, message = {part: WHOLE[part]}, None
    if method == "dense":
        message = f"schedule has {part}, but no layer gets masks"
    elif part in REFUSED.get(method, ()):
        message = f"schedule has {part}, which method '{method}' refuses"
    if message:
        with pytest.raises(ValueError, match=message):
            SparsityConfig("2:4", method, schedule=schedule)
        return
    layer = loop(resolve_method(method), schedule, planned_steps=300).layer
    has_own = method in ("decaying", "step")
    assert bool(layer.progress.stages) != (has_own and part != "ramp")
    handed = WHOLE[part] if has_own and part == "dense_end" else 0
    assert getattr(layer.spec.method, "dense_end", 0) == handed


def test_a_method_that_plans_by_dense_phases_gets_them():
    own = DecayingMask(stop=5)
    layer = loop(own, {"dense_start": 3, "dense_end": 2}).layer
    method = layer.spec.method
    assert (own.dense_start, own.dense_end) == (0, 0)
    assert (method.dense_start, method.dense_end, method.stop) == (3, 2, 5)
    assert layer.progress.schedule == (3, 5, 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": STE(dense_start=3)}, r"STE\(dense_start=3.*next to that of the schedule"),
        ({"method": ASP(start=3)}, r"ASP\(start=3.*give dense_start in `schedule`"),
        ({"method": DecayingMask(dense_end=3), "schedule": {"dense_end": 1}}, "dense_end=3"),
        ({"grad_estimator": MVUE(dense_end=2)}, r"MVUE\(.*dense_end=2"),
        ({"method": "transposable", "preset": "fst"}, "dense_end=0.16.*leave it out"),
        ({"method": "transposable", "preset": "fst"}, "give the method itself without the preset"),
        ({"pattern": "3:4"}, "from 3:4 to 3:4"),
        ({"pattern": "2:8"}, "from 3:4 to 2:8"),
        ({"rules": [{"include": "0", "pattern": "1:16"}]}, "from 3:4 to 1:16.*rule of 0: give it"),
        ({"rules": [{"include": "2", "method": "lbc"}]}, "'lbc' refuses.*rule of 2: give it a"),
        ({"schedule": {"rampp": []}}, "no key 'rampp' .*; did you mean 'ramp'"),
        ({"method": SoftThreshold()}, "SoftThreshold makes its zeros without the layers' masks"),
        ({"method": ASP(init="zeros")}, "which method 'asp' refuses: init='zeros'"),
        ({"method": "dense", "grad_estimator": "mvue"}, "has ramp, but no layer gets masks: leave"),
    ],
)
def test_bad_combinations_are_refused_at_once(options, words):
    given = {"pattern": "2:4", "method": "sr-ste", "schedule": WHOLE, **options}
    with pytest.raises(ValueError, match=words):
        NMSparsityCallback(**given)


@pytest.mark.parametrize("method", [RigL(every=1, stop=4), BAME(stop=4)])
def test_masks_that_come_too_late_to_move_are_refused_before_training(method):
    model = mlp(16, 32, 16)
    with pytest.raises(ValueError, match=r"would never move.*come at step 5.*layer '0'"):
        loop(method, {"dense_start": 5}, model=model)
    assert type(model[0]) is nn.Linear
    # Without a dense start, `stop` is the method's own affair.
    with pytest.warns(UserWarning, match="never moves"):
        loop(RigL(every=1, stop=0), {"dense_end": 2})


@pytest.mark.parametrize("made", [BAME(every=2), RigL(every=2, stop=0.66)])
def test_masks_of_the_last_pattern_that_never_move_are_warned_of(made):
    with pytest.warns(UserWarning, match=r"the 2:4 masks of \w+ stand still.*step 40.*step 40"):
        loop(made, {**RAMP, "ramp_ends": [40]}, planned_steps=61)
    loop(made, {**RAMP, "ramp_ends": [39]}, planned_steps=61)


def test_rules_have_schedules_of_their_own():
    rules = [
        {"include": "0", "pattern": "1:16", "schedule": {"ramp": ["4:16"]}},
        {"include": "2", "schedule": None},
    ]
    layers = loop("ste", rules=rules).layers
    assert [name for _, name in layers["0"].progress.stages] == ["4:16", "final"]
    assert layers["2"].progress.stages == ()


@pytest.mark.parametrize(
    ("method", "schedule", "sparse"),
    [("sr-ste", WHOLE, range(2, 7)), ("dense", {"dense_start": 2}, range(2, 10))],
)
def test_estimators_are_dense_in_dense_phases_and_keep_the_pattern(method, schedule, sparse):
    run = loop(method, schedule, grad_estimator="mvue")
    for clock in run.steps(STEPS):
        assert run.layer.progress.estimating == (clock in sparse)
        assert str(run.layer.spec.estimator.pattern_of(run.layer)) == "2:4"


@pytest.mark.parametrize("method", ["asp", "transposable", "rigl", "bi-mask"])
def test_the_plan_of_flops_is_what_training_costs(method):
    trained, planned = loop(METHODS[method]()).train(STEPS), loop(METHODS[method]())
    charge_plan(list(planned.layers.values()), STEPS)
    # The fraction that a backward mask keeps is measured, on other weights.
    tolerance = 0.05 if method == "bi-mask" else 1e-9
    for name, layer in trained.layers.items():
        costs = mean_densities(layer)
        for kind, densities in mean_densities(planned.layers[name]).items():
            assert vars(costs[kind]) == pytest.approx(vars(densities), abs=tolerance)


def test_a_resumed_run_keeps_its_stages_and_refuses_another_ramp():
    run = loop("ste").train(STEPS)
    states = run.states()
    words = "began with the schedule dense from training step 0, 3:4 from training step 2, .* stays"
    with pytest.warns(UserWarning, match=f"{words}; .*step 3"):
        again = loop("ste", {**WHOLE, "dense_start": 3}).load(states)
    assert again.layer.progress.stages == run.layer.progress.stages
    with pytest.raises(ValueError, match="ramp 3:4 in the checkpoint, none here"):
        loop("ste", {"dense_start": 2}).load(states)
    for layer in states[1]["layers"].values():  # as a training without a schedule saves it
        layer["stages"], layer["stage"] = [], FINAL
    with pytest.raises(ValueError, match="ramp none in the checkpoint, 3:4 here"):
        loop("ste").load(states)
    assert loop("ste", None).load(states).layer.progress.stages == ()


def test_it_is_seen_in_the_table_and_in_the_log():
    sparsifier = loop("asp", {**WHOLE, "dense_end": 0.2}).sparsifier
    out = io.StringIO()
    print_layers(sparsifier, Console(file=out, width=200))
    text = "schedule: dense from training step 0, 3:4 from training step 2, 2:4 from training step"
    assert text in out.getvalue()
    assert out.getvalue().count("schedule:") == 1
    assert "dense from training step 7; the trained model is dense" in out.getvalue()
    found = hyperparameters(sparsifier)
    assert [found[f"nm/schedule/{part}"] for part in PARTS] == [2, "3:4", 0.2]
    config = sparsifier.config
    assert SparsityConfig.from_dict(config.to_dict()) == config


def fit(tmp_path, schedule, *callbacks, path=None, **options):
    model = new_model(dropout=0.0)
    masks = NMSparsityCallback("2:4", "asp", schedule=schedule, show_tables=False)
    make_trainer(tmp_path, [masks, *callbacks], **options).fit(model, Data(), ckpt_path=path)
    return model


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_trainer_resumes_exactly_within_a_ramp(tmp_path):
    schedule, path = {**WHOLE, "dense_end": 0.2}, tmp_path / "saved.ckpt"
    whole = fit(tmp_path, schedule, SaveAt(path, 3))
    assert_equal_models(whole, fit(tmp_path, schedule, path=path))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kernels_of_each_pattern_are_measured(tmp_path):
    """The kernel takes 2:4 alone: nothing is faster sparse before."""
    plugin = NMPrecision(kernels="auto", backends=[KERNEL()], decisions=None)
    fit(tmp_path, {"ramp": ["3:4"]}, plugins=[plugin])
    decided = [used for used in plugin.router.used() if used.decision is not None]
    assert {str(used.product.key.pattern) for used in decided} == {"3:4", "2:4"}


@pytest.mark.slow
def test_compiled_layers_follow_the_pattern():
    torch._dynamo.reset()
    plain, run = (loop("s-ste", model=mlp(16, 32, 16).double()) for _ in range(2))
    model = run.model
    run.model = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in zip(plain.steps(STEPS), run.steps(STEPS), strict=True):
        torch.testing.assert_close(model.state_dict(), plain.model.state_dict())
    torch._dynamo.reset()


@pytest.mark.parametrize("name", get_args(MethodName))
def test_what_a_message_tells_to_write_needs_no_length(name):
    """All fractions that a method has by default are replaced at once."""
    method = resolve_method(name)
    if not is_scheduled(Rule(None, NMPattern(2, 4), method)):
        return
    with pytest.raises(ValueError, match="not known: write") as error:
        method.schedule(planned_steps=None)
    told = re.search(r"not known: write (\w+)\((.*)\), with", str(error.value))
    settings = dict(setting.split("=") for setting in told[2].split(", "))
    moments = {key: int(value) for key, value in settings.items()}
    method = getattr(lightning_nm, told[1])(**moments)
    assert method.short_name == name
    assert 10_000 in method.schedule(planned_steps=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": {"dense_start": 0.1}}, "the schedule's dense_start=0.1 .*as an integer"),
        ({"schedule": {"ramp": ["3:4"]}}, "the schedule's ramp .*give ramp_ends as integers"),
        ({"grad_estimator": MVUE(dense_start=0.1)}, r"write MVUE\(dense_start=10000\)"),
    ],
)
def test_other_shares_of_an_unknown_length_name_a_way_out(options, message):
    sparsifier = NMSparsifier(nn.Linear(8, 8), "2:4", "sr-ste", skip_first_last=False, **options)
    with pytest.raises(ValueError, match=f"{message}.*or pass planned_steps to NMSparsifier"):
        sparsifier.attach()
