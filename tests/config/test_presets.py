"""`preset`: what it sets, what precedes it, and where it is seen. The settings at work are in tests/golden."""

import io
import itertools

import pytest
from rich.console import Console
from torch import nn

from lightning_nm import (
    ASP,
    SRSTE,
    BiMask,
    NMSparsifier,
    NMSparsityCallback,
    TopN,
    preset_method,
)
from lightning_nm.callbacks.tables import hyperparameters, print_layers
from lightning_nm.config import _PRESETS

ALL = [
    (preset, method) for preset, known in _PRESETS.items() for method in known if method != "dense"
]


SKIPS = {True: (True, True), "first": (True, False), "last": (False, True), False: (False, False)}
"""Whether the first and the last layer are dense, by `skip_first_last`."""


def model():
    return nn.Sequential(
        nn.Conv2d(4, 8, 2), nn.Conv2d(8, 8, 2), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 4)
    )


def sparsifier(method="bi-mask", preset="paper", pattern="2:4", **options):
    options = {"planned_steps": 100} | options
    return NMSparsifier(model(), pattern, method, preset=preset, **options).attach()


@pytest.mark.parametrize(
    ("method", "preset", "masked", "layout", "expected"),
    [
        ("sr-ste", "paper", ["0", "1", "3"], "plain", {"decay": 2e-4, "decay_scale": "world-size"}),
        (
            "bi-mask",
            "paper",
            ["1", "3"],
            "flat",
            {
                "permute_every": 100,
                "candidates": 100,
                "search": "redraw",
                "criterion": "retained",
                "first_search": 99,
            },
        ),
        ("asp", "paper", ["0", "1", "3", "4"], "plain", {"start": 0, "init": "magnitude"}),
        (
            "transposable",
            "paper",
            ["0", "1", "3"],
            "flat",
            {"update_every": 40, "first_update": 39, "decay": 0},
        ),
        ("lbc", "paper", ["1", "3"], "plain", {"stop": 0.5}),
        (
            "maxq",
            "paper",
            ["1", "3"],
            "plain",
            {"start": 0, "stop": 0.25, "ramp": "linear", "decay": 2e-4, "temperature": 0.01},
        ),
        (
            "mask-logits",
            "paper",
            ["1", "3"],
            "plain",
            {
                "temperature": (4, 0.05),
                "scale": (100, 500),
                "prior_strength": 3,
                "weight_reg": 1e-5,
            },
        ),
        (
            "transposable",
            "fst",
            ["1", "3"],
            "plain",
            {
                "update_every": 40,
                "first_update": None,
                "decay": 6e-5,
                "decay_at": "after-clipping",
                "dense_end": 1 / 6,
            },
        ),
    ],
)
def test_what_a_preset_sets(method, preset, masked, layout, expected):
    made = sparsifier(method, preset)
    assert list(made.layers) == masked
    assert made.layers["1"].spec.layout == layout
    assert {name: getattr(made.layers["1"].spec.method, name) for name in expected} == expected
    assert (made.layers["1"].spec.estimator is not None) == (preset == "fst")


@pytest.mark.parametrize(("preset", "method"), [*ALL, (None, "sr-ste")])
def test_what_is_given_precedes_the_preset(preset, method):
    for layout, skips in itertools.product(("channels", "flat"), SKIPS):
        made = sparsifier(method, preset, conv_layout=layout, skip_first_last=skips)
        first, last = SKIPS[skips]
        layouts = {layer.spec.layout for name, layer in made.layers.items() if name in "01"}
        assert layouts == {"flat" if layout == "flat" else "plain"}
        assert list(made.layers) == ["0"] * (not first) + ["1", "3"] + ["4"] * (not last)
    given = sparsifier(method, preset, grad_estimator="top-n")
    assert isinstance(given.layers["1"].spec.estimator, TopN)


def test_a_method_that_is_an_object_is_taken_as_it_is():
    own = BiMask(permute_every=7)
    made = sparsifier(own)
    assert made.layers["1"].spec.method is own
    assert list(made.layers) == ["1", "3"]
    assert made.layers["1"].spec.layout == "flat"


def test_a_method_of_the_paper_with_changes():
    method = preset_method("bi-mask", permute_every=7, decay=0.5)
    assert (method.permute_every, method.decay, method.search) == (7, 0.5, "redraw")
    assert preset_method("transposable", "fst", decay=2e-4).decay_at == "after-clipping"
    with pytest.raises(TypeError, match="permute_evry"):
        preset_method("bi-mask", permute_evry=7)


def test_rules_take_their_own_methods_preset():
    rules = [
        {"include": "0", "method": "sr-ste"},
        {"include": "1", "method": "dense"},
        {"include": "3", "pattern": "1:4"},
    ]
    made = sparsifier(rules=rules)
    first, second = made.layers["0"], made.layers["3"]
    assert (type(first.spec.method), first.spec.layout) == (SRSTE, "plain")
    assert first.spec.method.decay_scale == "world-size"
    assert (type(second.spec.method), str(second.pattern)) == (BiMask, "1:4")
    assert second.spec.method.search == "redraw"
    assert len(made.settings.presets) == 2
    rules[0]["conv_layout"] = "flat"
    assert sparsifier(rules=rules).layers["0"].spec.layout == "flat"
    given = sparsifier(rules=rules[1:], include="0", conv_layout="channels")
    assert given.layers["0"].spec.layout == "plain"


def test_a_preset_is_trained_without_its_estimator():
    rules = [{"include": "1", "grad_estimator": "dense"}, {"include": "3", "grad_estimator": None}]
    for options, estimates in (
        ({}, {"1": True, "3": True}),
        ({"grad_estimator": "dense"}, {"1": False, "3": False}),
        ({"rules": rules, "skip_first_last": "first"}, {"1": False, "3": False, "4": True}),
    ):
        layers = sparsifier("transposable", "fst", **options).layers
        assert {name: layers[name].spec.estimator is not None for name in layers} == estimates


@pytest.mark.parametrize(
    ("preset", "rules", "masked"),
    [
        ("paper", [("*", "sr-ste")], "013"),
        ("paper", [("*", "asp")], "0134"),
        ("paper", [("*", "bi-mask")], "13"),
        ("paper", [("0", "sr-ste"), ("*", "asp")], "013"),
        ("paper", [("[01]", "asp"), ("*", "bi-mask")], "13"),
        ("fst", [("*", "transposable")], "13"),
    ],
)
def test_presets_of_rules_decide_if_the_general_method_is_dense(preset, rules, masked):
    listed = [{"include": include, "method": method} for include, method in rules]
    made = sparsifier("dense", preset, rules=listed)
    assert "".join(made.layers) == masked
    for layer in made.layers.values():
        assert (layer.spec.estimator is None) == (preset == "paper")
    options = {"skip_first_last": "last", "grad_estimator": "dense"}
    given = sparsifier("dense", preset, rules=listed, **options)
    assert "".join(given.layers) == "013"
    assert all(layer.spec.estimator is None for layer in given.layers.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "papers"}, "preset='papers' is unknown: use 'paper' or 'fst'"),
        (
            {"preset": "fst"},
            "preset='fst' has no settings for method 'bame': it has them for 'transposable'",
        ),
        (
            {"preset": "paper", "method": "bame"},
            "preset='paper' has no settings for method 'bame': it has them for 's",
        ),
        ({"preset": "fst", "method": ASP()}, "preset='fst' has no settings for method ASP objects"),
        (
            {"preset": "paper", "method": "asp", "rules": [{"include": "a", "method": "ste"}]},
            "no settings for method 'ste'",
        ),
        ({"preset": "paper", "method": "bi-msak"}, "method 'bi-msak' does not exist"),
        (
            {"rules": [{"include": "a", "conv_layout": "hwc"}]},
            "conv_layout='hwc' is unknown: use 'channels' or 'flat'",
        ),
    ],
)
def test_what_no_preset_has_is_refused_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        NMSparsityCallback(**options)


def test_it_is_seen_in_the_table_the_log_and_the_state():
    made, out = sparsifier(rules=[{"include": "0", "method": "sr-ste"}]), io.StringIO()
    print_layers(made, Console(file=out, width=300))
    text = out.getvalue()
    assert (
        "preset paper, arXiv 2302.06058: permute_every=100, first_search=99, candidates=100, search=redraw"
        in text
    )
    assert "conv_layout=flat, skip_first=True, skip_last=True" in text
    assert (
        "preset paper, arXiv 2102.04010: decay=0.0002, decay_scale=world-size, conv_layout=channels"
        in text
    )
    found = hyperparameters(made)
    assert found["nm/preset"] == "paper"
    assert (found["nm/conv_layout"], found["nm/rules/0/conv_layout"]) == ("flat", "channels")
    assert made.state_dict()["preset"] == "paper"
    assert NMSparsifier(model(), method="bi-mask").attach().state_dict()["preset"] == ""
    assert "preset='paper'" in repr(NMSparsityCallback(method="bi-mask", preset="paper"))
