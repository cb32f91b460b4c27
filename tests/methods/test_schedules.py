"""`schedule`: every method that takes it trains in its stages, resumes exactly in each, and is counted as it is."""

import copy
import io
import re
from itertools import pairwise
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
from lightning_nm.callbacks.checks import is_scheduled
from lightning_nm.callbacks.tables import hyperparameters, print_layers
from lightning_nm.nn.costs import mean_densities
from lightning_nm.nn.selection import Rule
from lightning_nm.schedule import DENSE, FINAL, Schedule, stage_at
from lightning_nm.short_names import MethodName, resolve_method
from lightning_nm.training.phases import charge_plan, finished_phases
from tests.support.contract import KERNEL, METHODS, sgd_or_adam
from tests.support.kinds import make
from tests.support.lightning_models import (
    Data,
    SaveAt,
    assert_equal_models,
    make_trainer,
    new_model,
)
from tests.support.outside import SoftThreshold
from tests.support.pairs import mostly_slow

STEPS = 9
PARTS = ("dense_start", "ramp", "dense_end")
WHOLE = {"dense_start": 2, "ramp": ["3:4"], "dense_end": 2}
"""Dense, 3:4 from step 2, the pattern from step 4 or 5, and dense from step 7."""
TAKERS = [
    "ste",
    "sr-ste",
    "s-ste",
    "asp",
    "transposable",
    "bi-mask",
    "slope",
    "bame",
    "bame-bi-mask",
    "rigl",
]
"""Rows of the contract whose methods take every part."""
INPUT = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
WITHOUT_LATENT = ("asp", "slope", "bame", "rigl")
CASES = [
    (method, kind)
    for method in TAKERS
    for kind in ("linear", "conv2d-groups", "attention", "experts")
]


def attach(model, method, schedule=WHOLE, pattern="2:4", **options):
    made = METHODS[method]() if isinstance(method, str) else method
    options = {"planned_steps": STEPS, "skip_first_last": False, **options}
    return NMSparsifier(model, pattern, made, schedule=schedule, **options).attach()


def steps(model, sparsifier, optimizer, x, clocks):
    """Train, and yield after each step."""
    for clock in clocks:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(clock), dtype=x.dtype)
        optimizer.zero_grad()
        model(x + 0.1 * noise).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        yield clock + 1


def check_stage(layer, clock):
    """The masks, the weight and the products are those of the stage."""
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
    pattern = layer.spec.pattern if stage == "final" else NMPattern.parse(stage)
    assert layer.pattern == pattern
    assert nmf.is_nm(layer.view.rows(layer.forward_weight()), pattern, dim=1)
    if layer.masks.has_forward:
        assert forward.pattern == pattern
        assert layer.masks.density == pytest.approx(pattern.density)


@pytest.mark.parametrize(("method", "kind"), mostly_slow(CASES, every=4))
def test_stages_follow_each_other_and_resume_exactly(method, kind):
    model, x = make(kind, torch.float32)
    sparsifier = attach(model, method)
    optimizer = sgd_or_adam(method, model.parameters(), 0.05, momentum=0.9)
    sparsifier.register(optimizer)
    names = [name for _, name in next(iter(sparsifier.layers.values())).progress.stages]
    assert names == ["dense", "3:4", "final", "dense"]
    saved = {}
    for clock in steps(model, sparsifier, optimizer, x, range(STEPS)):
        for layer in sparsifier.layers.values():
            check_stage(layer, clock)
        saved[clock] = copy.deepcopy([o.state_dict() for o in (model, sparsifier, optimizer)])

    for clock in (1, 3, 6, 8):
        resumed, _ = make(kind, torch.float32, seed=1)
        again = attach(resumed, method)
        other = sgd_or_adam(method, resumed.parameters(), 0.05, momentum=0.9)
        again.register(other)
        for part, state in zip((resumed, again, other), saved[clock], strict=True):
            part.load_state_dict(copy.deepcopy(state))
        for _ in steps(resumed, again, other, x, range(clock, STEPS)):
            pass
        for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)
        assert again.flops_ratios(mean=True) == sparsifier.flops_ratios(mean=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def run(method, schedule, look=lambda clock: None, **options):
    model = net()
    sparsifier = attach(model, method, schedule, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sparsifier.register(optimizer)
    for clock in steps(model, sparsifier, optimizer, INPUT, range(STEPS)):
        look(clock, sparsifier, optimizer)
    return model, sparsifier


@pytest.mark.parametrize(
    ("method", "phased"),
    [
        ("ste", lambda: STE(dense_start=2, dense_end=2)),
        ("transposable", lambda: TransposableMask(2, dense_start=2, dense_end=2)),
        ("asp", lambda: ASP(start=2)),
    ],
)
def test_dense_phases_are_those_that_methods_have_by_themselves(method, phased):
    schedule = {"dense_start": 2, "dense_end": 0 if method == "asp" else 2}
    by_schedule, _ = run(method, schedule, lambda *_: None)
    by_method, _ = run(phased(), None, lambda *_: None)
    if method == "asp":
        # The schedule also ends the state of pruned entries, which trains none of them.
        torch.testing.assert_close(by_schedule.state_dict(), by_method.state_dict())
        return
    for a, b in zip(by_schedule.parameters(), by_method.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:RigL never moves", "ignore:BAME", "ignore:.*stand still")
@pytest.mark.parametrize("method", WITHOUT_LATENT)
def test_fixed_masks_narrow_and_dense_phases_begin_without_old_state(method):
    kept = []
    schedule = {"ramp": ["3:4"], "ramp_ends": [4], "dense_end": 2}
    # Masks that would move by themselves stand still.
    made = {"bame": BAME(stop=1, every=50, evidence="batch"), "rigl": RigL(50, stop=60)}

    def look(clock, sparsifier, optimizer):
        layer = sparsifier.layers["0"]
        mask = layer.forward_mask
        if mask is None:
            if clock == 7:
                gone = ~kept[-1]
                state = optimizer.state[layer.param]
                assert not state["exp_avg"][gone].any()
                assert not state["exp_avg_sq"][gone].any()
                assert not layer.param[gone].any()
            return
        kept.append(mask.clone())
        if clock >= 4:
            assert not layer.param[~mask].any()

    model, sparsifier = run(made.get(method, method), schedule, look)
    for before, after in pairwise(kept):
        assert not (after & ~before).any(), "nested"
    assert not kept[-1].equal(kept[0])
    # Trained again: not zero any more.
    assert model[0].weight[~kept[-1]].count_nonzero() > 100
    assert finished_phases(list(sparsifier.layers.values())) == [
        "the schedule's dense end began at training step 7"
    ]


def refused_parts(method):
    """The parts of a schedule that a method refuses to follow."""
    refused = {}
    for part in PARTS:
        try:
            method.follow(Schedule.parse({part: WHOLE[part]}))
        except ValueError as error:
            refused[part] = str(error)
    for part, error in refused.items():
        assert f"schedule has {part}, which method '{method.short_name}' refuses" in error
    return set(refused)


@pytest.mark.parametrize("method", get_args(MethodName))
@pytest.mark.parametrize("part", PARTS)
def test_every_method_takes_each_part_or_refuses_it_by_name(method, part):
    schedule = {part: WHOLE[part]}
    refused = refused_parts(resolve_method(method))
    if method == "dense":
        with pytest.raises(ValueError, match=f"schedule has {part}, but no layer gets masks"):
            SparsityConfig("2:4", method, schedule=schedule)
    elif part in refused:
        with pytest.raises(ValueError, match=f"schedule has {part}, which method '{method}'"):
            SparsityConfig("2:4", method, schedule=schedule)
    else:
        planned = 300
        made = attach(net(), resolve_method(method), schedule, planned_steps=planned)
        layer = made.layers["0"]
        has_own = method in ("decaying", "step")
        assert bool(layer.progress.stages) != (has_own and part != "ramp")
        assert getattr(layer.spec.method, "dense_end", 0) == (
            WHOLE[part] if has_own and part == "dense_end" else 0
        )


REFUSED = {"cast": PARTS, "lbc": PARTS, "maxq": PARTS, "mask-logits": PARTS}
REFUSED |= {"step": ("dense_start",), "decaying": ("ramp",)}


def test_what_is_refused_is_as_documented():
    for method in get_args(MethodName):
        assert refused_parts(resolve_method(method)) == set(REFUSED.get(method, ()))
    assert refused_parts(ASP(init="zeros")) == {"dense_start", "ramp"}


def test_a_method_that_plans_by_dense_phases_gets_them():
    own = DecayingMask(stop=5)
    made = attach(net(), own, {"dense_start": 3, "dense_end": 2})
    method = made.layers["0"].spec.method
    assert method is not own
    assert (own.dense_start, own.dense_end) == (0, 0)
    assert (method.dense_start, method.dense_end, method.stop) == (3, 2, 5)
    assert made.layers["0"].progress.schedule == (3, 5, 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": STE(dense_start=3)}, r"STE\(dense_start=3.*next to that of the schedule"),
        ({"method": ASP(start=3)}, r"ASP\(start=3.*give dense_start in `schedule`"),
        ({"method": DecayingMask(dense_end=3), "schedule": {"dense_end": 1}}, "dense_end=3"),
        ({"grad_estimator": MVUE(dense_end=2)}, r"MVUE\(.*dense_end=2"),
        ({"method": "transposable", "preset": "fst"}, "dense_end=0.16.*leave it out"),
        ({"pattern": "3:4"}, "from 3:4 to 3:4"),
        ({"pattern": "2:8"}, "from 3:4 to 2:8"),
        ({"rules": [{"include": "0", "pattern": "1:16"}]}, "from 3:4 to 1:16.*rule of 0: give it"),
        ({"rules": [{"include": "2", "method": "lbc"}]}, "'lbc' refuses.*rule of 2: give it a"),
        ({"schedule": {"rampp": []}}, "no key 'rampp' .*; did you mean 'ramp'"),
        ({"method": SoftThreshold()}, "SoftThreshold makes its zeros without the layers' masks"),
        ({"method": ASP(init="zeros")}, "which method 'asp' refuses: init='zeros'"),
        (
            {"method": "dense", "grad_estimator": "mvue"},
            "schedule has ramp, but no layer gets masks: leave that out",
        ),
        ({"method": "transposable", "preset": "fst"}, "give the method itself without the preset"),
    ],
)
def test_bad_combinations_are_refused_at_once(options, words):
    given = {"pattern": "2:4", "method": "sr-ste", "schedule": WHOLE, **options}
    with pytest.raises(ValueError, match=words):
        NMSparsityCallback(**given)


@pytest.mark.parametrize("method", ["rigl", "bame"])
def test_masks_that_come_too_late_to_move_are_refused_before_training(method):
    model = net()
    made = RigL(every=1, stop=4) if method == "rigl" else BAME(stop=4)
    with pytest.raises(ValueError, match=r"would never move.*come at step 5.*layer '0'"):
        attach(model, made, {"dense_start": 5})
    assert type(model[0]) is nn.Linear
    # Without a dense start, `stop` is the method's own affair.
    with pytest.warns(UserWarning, match="never moves"):
        attach(model, RigL(every=1, stop=0), {"dense_end": 2})


@pytest.mark.parametrize("made", [BAME(every=2), RigL(every=2, stop=0.66)])
def test_masks_of_the_last_pattern_that_never_move_are_warned_of(made):
    with pytest.warns(UserWarning, match=r"the 2:4 masks of \w+ stand still.*step 40.*step 40"):
        attach(net(), made, {"ramp": ["3:4"], "ramp_ends": [40]}, planned_steps=61)
    attach(net(), made, {"ramp": ["3:4"], "ramp_ends": [39]}, planned_steps=61)


def test_rules_have_schedules_of_their_own():
    rules = [
        {"include": "0", "pattern": "1:16", "schedule": {"ramp": ["4:16"]}},
        {"include": "2", "schedule": None},
    ]
    made = attach(net(), "ste", WHOLE, rules=rules)
    assert [name for _, name in made.layers["0"].progress.stages] == ["4:16", "final"]
    assert made.layers["2"].progress.stages == ()


def test_estimators_are_dense_in_dense_phases_and_keep_the_pattern():
    seen = []

    def look(clock, sparsifier, optimizer):
        layer = sparsifier.layers["0"]
        seen.append(layer.progress.estimating)
        assert str(layer.spec.estimator.pattern_of(layer)) == "2:4"

    run("sr-ste", WHOLE, look, grad_estimator="mvue")
    assert seen == [False] + [True] * 5 + [False] * 3
    seen.clear()
    run("dense", {"dense_start": 2}, look, grad_estimator="mvue")
    assert seen == [False] + [True] * 8


@pytest.mark.parametrize("method", ["sr-ste", "asp", "transposable", "rigl", "bi-mask"])
def test_the_plan_of_flops_is_what_training_costs(method):
    _, trained = run(method, WHOLE, lambda *_: None)
    planned = attach(net(), method)
    charge_plan(list(planned.layers.values()), STEPS)
    for name, layer in trained.layers.items():
        costs = mean_densities(layer)
        for kind, densities in mean_densities(planned.layers[name]).items():
            # The share that a backward mask keeps is measured, on other weights.
            tolerance = 0.05 if method == "bi-mask" else 1e-9
            assert vars(costs[kind]) == pytest.approx(vars(densities), abs=tolerance)


def test_a_resumed_run_keeps_its_stages_and_refuses_another_ramp():
    _, sparsifier = run("ste", WHOLE, lambda *_: None)
    state = sparsifier.state_dict()
    weights = {k: v.clone() for k, v in sparsifier.model.state_dict().items()}

    def resume(schedule):
        model = net()
        model.load_state_dict(weights)
        again = attach(model, "ste", schedule)
        again.load_state_dict(state)
        return again

    words = "began with the schedule dense from training step 0, 3:4 from training step 2, .* stays; .*step 3"
    with pytest.warns(UserWarning, match=words):
        again = resume({**WHOLE, "dense_start": 3})
    assert again.layers["0"].progress.stages == sparsifier.layers["0"].progress.stages
    with pytest.raises(ValueError, match="ramp 3:4 in the checkpoint, none here"):
        resume({"dense_start": 2})
    for layer in state["layers"].values():  # as a training without a schedule saves it
        layer["stages"], layer["stage"] = [], FINAL
    with pytest.raises(ValueError, match="ramp none in the checkpoint, 3:4 here"):
        resume(WHOLE)
    assert resume(None).layers["0"].progress.stages == ()


def test_it_is_seen_in_the_table_and_in_the_log():
    made = attach(net(), "asp", {"dense_start": 2, "ramp": ["3:4"], "dense_end": 0.2})
    out = io.StringIO()
    print_layers(made, Console(file=out, width=200))
    text = "schedule: dense from training step 0, 3:4 from training step 2, 2:4 from training step"
    assert text in out.getvalue()
    assert out.getvalue().count("schedule:") == 1
    assert "dense from training step 7; the trained model is dense" in out.getvalue()
    found = hyperparameters(made)
    assert [found[f"nm/schedule/{part}"] for part in PARTS] == [2, "3:4", 0.2]
    config = made.config
    assert SparsityConfig.from_dict(config.to_dict()) == config


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("batch", [3, 8])
def test_a_trainer_resumes_exactly_within_a_ramp(tmp_path, batch):
    def fit(path=None, callbacks=()):
        model = new_model(dropout=0.0)
        schedule = {"dense_start": 2, "ramp": ["3:4"], "dense_end": 0.2}
        masks = NMSparsityCallback("2:4", "asp", schedule=schedule, show_tables=False)
        make_trainer(tmp_path, [masks, *callbacks]).fit(model, Data(), ckpt_path=path)
        return model

    whole = fit(callbacks=[SaveAt(tmp_path / "saved.ckpt", batch)])
    assert_equal_models(whole, fit(tmp_path / "saved.ckpt"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_kernels_of_each_pattern_are_measured(tmp_path):
    """The kernel takes 2:4 alone: nothing is faster sparse before."""
    plugin = NMPrecision(kernels="auto", backends=[KERNEL()], decisions=None)
    schedule = {"ramp": ["3:4"]}
    masks = NMSparsityCallback("2:4", "asp", schedule=schedule, show_tables=False)
    make_trainer(tmp_path, [masks], plugins=[plugin]).fit(new_model(), Data())
    decided = [used for used in plugin.router.used() if used.decision is not None]
    assert {str(used.product.key.pattern) for used in decided} == {"3:4", "2:4"}


@pytest.mark.slow
def test_compiled_layers_follow_the_pattern():
    weights = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = net().double()
        sparsifier = attach(model, "s-ste")
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        sparsifier.register(optimizer)
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        x = torch.randn(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for _ in steps(forward, sparsifier, optimizer, x, range(STEPS)):
            pass
        weights.append([p.detach().clone() for p in model.parameters()])
    torch._dynamo.reset()
    for plain, compiled in zip(*weights, strict=True):
        torch.testing.assert_close(plain, compiled)


@pytest.mark.filterwarnings("ignore:RigL never moves", "ignore:BAME adapts once")
@pytest.mark.parametrize("method", ["asp", "slope", "rigl", "bame", "ste"])
def test_entries_that_a_narrower_pattern_prunes_are_counted_as_flips(method):
    flips = {}

    def look(clock, sparsifier, optimizer):
        flips[clock] = float(sparsifier.layers["0"].masks.flips) / (32 * 16)

    # No mask moves but by the schedule.
    made = {"rigl": RigL(50, stop=60), "bame": BAME(stop=9, every=50, evidence="batch")}
    run(made.get(method, method), {"ramp": ["3:4"], "ramp_ends": [4]}, look)
    assert flips[4] == pytest.approx(0.25, abs=0 if method != "ste" else 0.05)


@pytest.mark.parametrize("name", get_args(MethodName))
def test_what_a_message_tells_to_write_needs_no_length(name):
    """All shares that a method has by default are replaced at once."""
    method = resolve_method(name)
    if not is_scheduled(Rule(None, NMPattern(2, 4), method)):
        return
    with pytest.raises(ValueError, match="not known: write") as error:
        method.schedule(planned_steps=None)
    told = re.search(r"not known: write (\w+\(.*\)), with", str(error.value))
    method = eval(told[1], vars(lightning_nm))
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
