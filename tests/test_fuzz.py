"""Random models, patterns, methods, schedules and optimizers: what must hold for all of them."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_nm import MVUE, SSTE, STEP, BiMask, DecayingMask, MaxQ, NMSparsifier, SLoPe
from lightning_nm.kernels import Router, routing
from lightning_nm.nn.adapters import Adapter
from tests.support import contract
from tests.support.kinds import held_tensors
from tests.support.loop import Loop, same

STEPS = 4
PLAN = 2 * STEPS


class Twice(nn.Module):
    """One layer that runs twice in a forward pass."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Tokens(nn.Module):
    """Channels last, through layers for vectors, and back."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])


def attention(width):
    return nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)


def groups(a, b):
    return 2 if a % 2 == b % 2 == 0 else 1


PARTS = {
    "conv": lambda a, b: nn.Conv2d(a, b, 3, padding=1),
    "conv-1x1": lambda a, b: nn.Conv2d(a, b, 1),
    "conv-strided": lambda a, b: nn.Conv2d(a, b, (3, 2), (2, 1), padding=(1, 1)),
    "conv-groups": lambda a, b: nn.Conv2d(a, b, 3, padding=1, groups=groups(a, b)),
    "linear": lambda a, b: Tokens(nn.Linear(a, b)),
    "linear-no-bias": lambda a, b: Tokens(nn.Linear(a, b, bias=False)),
    "twice": lambda a, b: nn.Sequential(Tokens(Twice(nn.Linear(a, a))), nn.Conv2d(a, b, 1)),
    "attention": lambda a, b: nn.Sequential(
        Tokens(attention(a)) if a % 2 == 0 else nn.Identity(), nn.Conv2d(a, b, 1)
    ),
    "residual": lambda a, b: nn.Sequential(
        Residual(nn.Conv2d(a, a, 3, padding=1)), nn.BatchNorm2d(a), nn.Conv2d(a, b, 1)
    ),
}
WIDTHS = [4, 8, 16, 32, 48, 12, 6, 13]
PATTERNS = ["1:2", "2:4", "1:4", "2:8", "4:8", "1:16", "3:4", "2:6"]
METHODS = {
    **contract.METHODS,
    # With the schedules of their own.
    "s-ste-phases": lambda: SSTE(dense_start=2, dense_end=0.25),
    "step-phases": lambda: STEP(dense_start=1, latest=3, dense_end=2, mean="geometric"),
    "decaying-exponential": lambda: DecayingMask("exponential", stop=5, dense_end=2),
    "bi-mask-phases": lambda: BiMask(permute_every=1, candidates=5, dense_start=1),
    "slope-late": lambda: SLoPe(refresh_every=1, start=3),
    "maxq": lambda: MaxQ(stop=0.6, ramp="cubic", decay=1e-2),
}
SCHEDULES = [None, None, {"dense_start": 2}, {"dense_end": 0.25}]
ESTIMATORS = {**contract.ESTIMATORS, "none": lambda: None, "phases": lambda: MVUE("1:2", 1, 0.3)}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    # For STEP: entries without a gradient in its few dense steps have a frozen second moment of 0.
    "adam-wide": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-2, weight_decay=0.1),
}


def takes(method, optimizer):
    if optimizer == "adam-wide":
        return method.startswith("step")
    return contract.refusal(method, optimizer) is None and not method.startswith("step")


@st.composite
def cases(draw):
    def one_of(values):
        return draw(st.sampled_from(list(values)))

    widths = draw(st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=4))
    method = one_of(METHODS)
    return {
        "widths": widths,
        "parts": [one_of(PARTS) for _ in widths[1:]],
        "shared": draw(st.booleans()),
        "method": method,
        "optimizer": one_of(name for name in OPTIMIZERS if takes(method, name)),
        "accumulated": draw(st.integers(1, 2)),
        "routed": draw(st.booleans()),
        "options": {
            **contract.OPTIONS.get(method, {}),
            "pattern": one_of(PATTERNS),
            "grad_estimator": ESTIMATORS[one_of(ESTIMATORS)](),
            "dgrad": one_of([None, None, "mvue"]),
            "schedule": one_of(SCHEDULES),
            "conv_layout": one_of(["channels", "flat"]),
            "skip_first_last": draw(st.booleans()),
            "seed": draw(st.integers(0, 99)),
        },
    }


def build(case):
    torch.manual_seed(case["options"]["seed"])
    parts = [
        PARTS[part](a, b)
        for part, (a, b) in zip(case["parts"], pairwise(case["widths"]), strict=True)
    ]
    tied = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    if case["shared"]:
        for one, other in pairwise(tied):
            if one.weight.shape == other.weight.shape:
                other.weight = one.weight
    return nn.Sequential(*(layer for part in parts for layer in (part, nn.GELU())))


class Training(Loop):
    """Goes on from a checkpoint if there is one."""

    def __init__(self, case, checkpoint=None):
        self.router = None
        if case["routed"]:
            self.router = Router("sparse", [contract.KERNEL()], reuse=case["accumulated"])
        self.accumulated, model = case["accumulated"], build(case)
        if checkpoint:
            model.load_state_dict(checkpoint[0])
        super().__init__(
            model,
            METHODS[case["method"]](),
            optimizer=OPTIMIZERS[case["optimizer"]],
            shape=(2, case["widths"][0], 4, 3),
            state=checkpoint and checkpoint[1],
            planned_steps=PLAN,
            grad_snr_every=3,
            **case["options"],
        )
        if checkpoint:
            self.sparsifier.load_state_dict(checkpoint[1])
            self.optimizer.load_state_dict(checkpoint[2])

    def run(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            for micro in range(self.accumulated):
                with routing(self.router):
                    loss = self.model(self.batch(10 * step + micro)).square().mean()
                assert torch.isfinite(loss)
                loss.backward()
                if micro < self.accumulated - 1:
                    self.sparsifier.step()
            self.step()
            self.check()
        return self

    def check(self):
        layers = self.layers.values()
        masked = [layer for layer in layers if layer.forward_mask is not None]
        if len(masked) == len(layers) and all(
            layer.spec.method.current_pattern(layer) for layer in layers
        ):
            assert self.sparsifier.violations() == 0
        for layer in masked:
            if not layer.spec.method.latent:
                assert not layer.weight[~layer.forward_mask].any()


REFUSED = ("no layer", "dgrad='mvue' draws", "schedule")
"""What errors of cases that cannot be trained say."""


def check(case):
    model = build(case)
    kinds, keys = [type(module) for module in model.modules()], list(model.state_dict())
    options = {"planned_steps": PLAN, **case["options"]}
    try:
        sparsifier = NMSparsifier(model, method=METHODS[case["method"]](), **options).attach()
    except (TypeError, ValueError) as error:
        if not any(words in str(error) for words in REFUSED):
            raise
        assert [type(module) for module in model.modules()] == kinds
        return
    sparsifier.detach()

    whole = Training(case).run(range(STEPS))
    checkpoint = whole.save()
    whole.run(range(STEPS, PLAN))
    resumed = Training(case, checkpoint).run(range(STEPS, PLAN))
    assert same(whole.model.state_dict(), resumed.model.state_dict())
    held = [
        [[layer.weight, *held_tensors(layer)] for layer in each.layers.values()]
        for each in (whole, resumed)
    ]
    assert same(*held)

    sparse = whole.save()[0]
    assert list(sparse) == keys
    whole.end()
    assert [type(module) for module in whole.model.modules()] == kinds
    assert not any(isinstance(module, Adapter) for module in whole.model.modules())
    assert same(whole.model.state_dict(), sparse)


OPTIONS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.filterwarnings("ignore")  # of short batches and schedules that end with the training
@settings(max_examples=40, **OPTIONS)
@given(case=cases())
def test_what_holds_for_every_model(case):
    check(case)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=80, **OPTIONS)
@given(case=cases())
def test_what_holds_for_more_models(case):
    check(case)
