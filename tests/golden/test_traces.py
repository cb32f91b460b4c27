"""The presets do what the papers' code does, step by step: masks, input and weight gradients, weights."""

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from lightning_nm import CAST, STEP, DecayingMask, NMSparsifier, RigL, preset_method
from lightning_nm.functional import permutation
from lightning_nm.methods import MaskLogits, mask_logits
from tests.golden import oracle
from tests.golden.files import arrays, load
from tests.golden.oracle import CASES, Trace, batch, candidates, start, train

WITHOUT_PRESET = {
    "step": (lambda: STEP(threshold=CASES["step"].threshold), None),
    "decaying": (DecayingMask, None),
    "decaying-structure": (lambda: DecayingMask("structure"), None),
    "rigl": (lambda: RigL(every=4, stop=18, drop=0.5), "last"),
    "cast": (lambda: CAST(decay=0.01, refresh_every=3, scale_groups=2, end=17), True),
}
"""Methods without a preset, and `skip_first_last`."""

PRESETS = dict.fromkeys(CASES, "paper") | {"fst": "fst"} | dict.fromkeys(WITHOUT_PRESET)


class Network(nn.Module):
    """The oracle's network in torch; ``inputs`` holds those of the layers in the last forward pass."""

    def __init__(self, case, linear):
        super().__init__()
        layers = [
            nn.Linear(depth, out, bias=False)
            if linear
            else nn.Conv2d(depth, out, (1, taps), bias=False)
            for out, depth, taps in case.sizes
        ]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(case.sizes[-1][0], 4)
        self.linear = linear
        self.double()
        for parameter, value in zip(self.parameters(), start(case), strict=True):
            parameter.data = torch.tensor(value).view(parameter.shape)

    def forward(self, x):
        self.inputs = []
        x = x.transpose(1, 2) if self.linear else x.unsqueeze(2)
        for layer in self.layers:
            self.inputs.append(x)
            x = torch.tanh(layer(x))
            x.retain_grad()
        pooled = x.mean(1) if self.linear else x.mean((2, 3))
        pooled.retain_grad()
        self.inputs.append(pooled)
        return self.head(pooled)

    def input_gradients(self):
        """In the oracle's order of axes."""
        *hidden, pooled = [x.grad for x in self.inputs[1:]]
        return [(x.transpose(1, 2) if self.linear else x.squeeze(2)).numpy() for x in hidden] + [
            pooled.numpy()
        ]


def run(name, monkeypatch, **options):
    """The trace of the package."""
    case, trace = CASES[name], Trace()
    monkeypatch.setattr(
        permutation,
        "_shuffles",
        lambda count, size, generator, device: torch.tensor(candidates(size, count, 0)),
    )
    give_noise(monkeypatch)
    model = Network(case, linear=all(taps == 1 for _, _, taps in case.sizes))
    settings = {"method": case.method, "preset": PRESETS[name], "planned_steps": case.steps}
    if name in WITHOUT_PRESET:
        make, skip_first_last = WITHOUT_PRESET[name]
        settings["method"] = make()
        if skip_first_last is not None:
            settings["skip_first_last"] = skip_first_last
    sparsifier = NMSparsifier(model, "2:4", **settings | options).attach()
    if case.adamw:
        optimizer = torch.optim.AdamW(model.parameters(), 0.02, betas=(0.9, 0.95), weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=1e-4)
    sparsifier.register(optimizer)
    weights = [*(layer.weight for layer in model.layers), model.head.weight]
    masked = [k for k, use in enumerate(case.masked) if use]
    names = [f"layers.{k}" if k < len(model.layers) else "head" for k in masked]
    assert list(sparsifier.layers) == names
    for step in range(1, case.steps + 1):
        x, target = map(torch.tensor, batch(case, step))
        optimizer.zero_grad()
        masks = [masks_of(sparsifier.layers[each]) for each in names]
        (model(x) - target).square().mean().backward()
        sparsifier.before_step(optimizer)
        if case.adamw:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if step in case.recorded:
            gradients = dict(enumerate(model.input_gradients(), 1))
            trace.forward.append([forward for forward, _ in masks])
            trace.backward.append([backward for _, backward in masks])
            trace.dx.append([gradients[k] for k in masked if k])
            trained = [
                sparsifier.layers[each].parameters.get("logits", weights[k])
                for each, k in zip(names, masked, strict=True)
            ]
            trace.dw.append([each.grad.numpy().copy() for each in trained])
            trace.weights.append([each.detach().numpy().copy() for each in trained])
        sparsifier.step()
    return trace


def give_noise(monkeypatch):
    """The logits of masks get the oracle's noise: the words of a step name the layer and the step."""

    def words(layer, step):
        number = 0 if step == "first" else step + 1
        return torch.tensor([int(layer.name.rpartition(".")[2]), number, 0, 0])

    def first(count, seed):
        return torch.tensor(oracle.first_noise(count, int(seed[0])))

    def gumbel(count, seed):
        return torch.tensor(oracle.gumbel_noise(count, int(seed[0]), int(seed[1])))

    monkeypatch.setattr(MaskLogits, "_words", staticmethod(words))
    monkeypatch.setattr(mask_logits, "normal_noise", first)
    monkeypatch.setattr(mask_logits, "gumbel_noise", gumbel)


def masks_of(layer):
    ones = torch.ones(layer.param.shape, dtype=torch.bool)
    forward = ones if layer.forward_mask is None else layer.forward_mask
    backward = forward if layer.masks.backward is None else layer.masks.backward
    return forward.numpy(), backward.numpy()


def assert_equal_traces(found, expected):
    """Entry by entry, at all recorded steps."""
    for name in ("forward", "backward", "dx", "dw", "weights"):
        steps = zip(getattr(found, name), getattr(expected, name), strict=True)
        for step, layers in enumerate(steps):
            for layer, (a, b) in enumerate(zip(*layers, strict=True)):
                message = f"{name} of layer {layer} at recorded step {step}"
                np.testing.assert_allclose(
                    a.reshape(b.shape), b, rtol=1e-8, atol=1e-12, err_msg=message
                )


@cache
def formulas(name):
    """The trace of the oracle."""
    return train(CASES[name])


def options_of(name):
    # the estimator of FST and S-STE draws random numbers, which no formula restates
    estimates = name in ("fst", "s-ste")
    return {"rules": [{"include": "*", "grad_estimator": None}]} if estimates else {}


@pytest.mark.parametrize("name", CASES)
def test_the_preset_gives_the_trace_of_the_formulas_and_the_committed_one(name, monkeypatch):
    trace, known = formulas(name), load(name)
    assert trace.margin > 1e-6, "a mask is nearly another one: choose other data"
    assert len(known["weights"]) == len(CASES[name].recorded) == 20
    found = run(name, monkeypatch, **options_of(name))
    assert_equal_traces(found, trace)
    for each in (trace, found):
        held = arrays(each)
        assert held.keys() == known.keys()
        assert held.keys() == known.keys()
        for key, value in known.items():
            np.testing.assert_allclose(held[key], value, rtol=1e-7, atol=1e-9, err_msg=key)


OTHERS = {
    "layout": ("sr-ste", {"conv_layout": "flat"}),
    "scale": ("sr-ste", {"method": preset_method("sr-ste", decay_scale=2)}),
    "search": ("bi-mask", {"method": preset_method("bi-mask", first_search=100)}),
    "update": ("transposable", {"method": preset_method("transposable", first_update=40)}),
    "place": ("fst", {"method": preset_method("transposable", "fst", decay_at="before-clipping")}),
    "cut": ("s-ste", {"method": "ste", "preset": None}),
    "switch": ("step", {"method": STEP(latest=0.35)}),
    "fade": ("decaying", {"method": DecayingMask("exponential")}),
    "frame": ("decaying-structure", {"method": DecayingMask("structure", stop=9)}),
    "refresh": ("slope", {"method": preset_method("slope", first_refresh=100)}),
    "drop": ("rigl", {"method": RigL(every=4, stop=18, drop=0.45)}),
    "decay": ("cast", {"method": CAST(decay=0.011, refresh_every=3, end=17)}),
    "stop": ("lbc", {"method": preset_method("lbc", stop=0.6)}),
    "ramp": ("maxq", {"method": preset_method("maxq", ramp="cubic")}),
    "temperature": ("maxq", {"method": preset_method("maxq", temperature=0.02)}),
    "penalty": ("mask-logits", {"method": preset_method("mask-logits", weight_reg=2e-5)}),
    "annealing": ("mask-logits", {"method": preset_method("mask-logits", scale=(100, 400))}),
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_setting_gives_another_trace(change, monkeypatch):
    name, options = OTHERS[change]
    trace = run(name, monkeypatch, **options_of(name), **options)
    with pytest.raises(AssertionError):
        assert_equal_traces(trace, formulas(name))
