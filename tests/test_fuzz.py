"""Random models, patterns, methods, schedules and optimizers: what must hold for all of them."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.gpu.simulated import SimulatedSparseKernel
from lightning_nm import (
    ASP,
    BAME,
    CAST,
    LBC,
    MVUE,
    SRSTE,
    SSTE,
    STE,
    STEP,
    BiMask,
    DecayingMask,
    MaskLogits,
    MaxQ,
    NMSparsifier,
    RigL,
    SLoPe,
    TopN,
    TransposableMask,
)
from lightning_nm.kernels import Router, routing
from lightning_nm.nn.adapters import Adapter
from tests.support.kinds import held_tensors

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


PARTS = {
    "conv": lambda a, b: nn.Conv2d(a, b, 3, padding=1),
    "conv-1x1": lambda a, b: nn.Conv2d(a, b, 1),
    "conv-strided": lambda a, b: nn.Conv2d(a, b, (3, 2), (2, 1), padding=(1, 1)),
    "conv-groups": lambda a, b: nn.Conv2d(
        a, b, 3, padding=1, groups=2 if a % 2 == b % 2 == 0 else 1
    ),
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
METHODS = {
    "dense": lambda: "dense",
    "ste": STE,
    "ste-phases": lambda: STE(dense_start=2, dense_end=0.25),
    "sr-ste": lambda: SRSTE(1e-2),
    "s-ste": SSTE,
    "s-ste-phases": lambda: SSTE(dense_start=2, dense_end=0.25),
    "step": lambda: STEP(dense_start=1, latest=0.6, threshold=1e-4),
    "step-phases": lambda: STEP(dense_start=1, latest=3, dense_end=2, mean="geometric"),
    "decaying": lambda: DecayingMask(dense_start=1, stop=0.8),
    "decaying-exponential": lambda: DecayingMask("exponential", stop=5, dense_end=2),
    "decaying-structure": lambda: DecayingMask("structure", dense_start=1, stop=7),
    "asp": ASP,
    "asp-late": lambda: ASP(start=2),
    "bi-mask": lambda: BiMask(permute_every=2, candidates=5),
    "bi-mask-phases": lambda: BiMask(permute_every=1, candidates=5, dense_start=1),
    "transposable": lambda: TransposableMask(update_every=2),
    "slope": lambda: SLoPe(refresh_every=2),
    "slope-late": lambda: SLoPe(refresh_every=1, start=3),
    "rigl": lambda: RigL(every=2, stop=0.9, drop=0.8),
    "cast": lambda: CAST(decay=1e-2, refresh_every=3, end=1.0),
    "cast-early": lambda: CAST(decay=1e-2, refresh_every=1, scale_groups=0, end=5),
    "lbc": lambda: LBC(stop=0.5),
    "maxq": lambda: MaxQ(stop=0.6, ramp="cubic", decay=1e-2),
    "mask-logits": MaskLogits,
    "bame": lambda: BAME(stop=0.8, every=2, budget=1.0),
    "bame-bi-mask": lambda: BAME(
        start=1, stop=6, every=2, budget=0.5, evidence_rate=0.5, dgrad="bi-mask"
    ),
}
ESTIMATORS = {
    "none": lambda: None,
    "mvue": lambda: "mvue",
    "mvue-1:2": lambda: MVUE("1:2", dense_start=1, dense_end=0.3),
    "approx-mvue": lambda: "approx-mvue",
    "top-n": lambda: TopN(),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    # For STEP: entries without a gradient in its few dense steps have a frozen second moment of 0.
    "adam-wide": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-2, weight_decay=0.1),
    "adamw-wide": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-2),
}

OWN_BACKWARD = {
    "bi-mask",
    "bi-mask-phases",
    "transposable",
    "bame-bi-mask",
    "slope",
    "slope-late",
}
"""Methods that make a backward weight of their own."""

ENTRYWISE = OPTIMIZERS.keys() - {"rmsprop", "adafactor"}
"""Those that BAME and RigL take."""
TAKEN = {
    "bame": ENTRYWISE,
    "rigl": ENTRYWISE,
    "cast": {"adamw", "adam-amsgrad"},
    "step": {"adam-wide", "adamw-wide"},
}
"""By the beginning of a method's name, the optimizers that it takes, if not all."""


@st.composite
def cases(draw):
    widths = draw(st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=4))
    parts = [draw(st.sampled_from(sorted(PARTS))) for _ in widths[1:]]
    method = draw(st.sampled_from(sorted(METHODS)))
    optimizers = sorted(TAKEN.get(method.split("-")[0], OPTIMIZERS))
    return {
        "widths": widths,
        "parts": parts,
        "shared": draw(st.booleans()),
        "pattern": draw(st.sampled_from(["1:2", "2:4", "1:4", "2:8", "4:8", "1:16", "3:4", "2:6"])),
        "method": method,
        "dgrad": None if method in OWN_BACKWARD else draw(st.sampled_from([None, "mvue"])),
        "estimator": draw(st.sampled_from(sorted(ESTIMATORS))),
        "optimizer": draw(st.sampled_from(optimizers)),
        "conv_layout": draw(st.sampled_from(["channels", "flat"])),
        "skip_first_last": draw(st.booleans()),
        "accumulated": draw(st.integers(1, 2)),
        "routed": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def build(case):
    torch.manual_seed(case["seed"])
    widths = case["widths"]
    parts = [
        PARTS[part](a, b) for part, a, b in zip(case["parts"], widths, widths[1:], strict=False)
    ]
    tied = [module for part in parts for module in part.modules() if isinstance(module, nn.Linear)]
    if case["shared"]:
        for one, other in pairwise(tied):
            if one.weight.shape == other.weight.shape:
                other.weight = one.weight
    return nn.Sequential(*(layer for part in parts for layer in (part, nn.GELU())))


def attach(model, case, state=None):
    return NMSparsifier(
        model,
        case["pattern"],
        METHODS[case["method"]](),
        ESTIMATORS[case["estimator"]](),
        seed=case["seed"],
        skip_first_last=case["skip_first_last"],
        conv_layout=case["conv_layout"],
        planned_steps=PLAN,
        grad_snr_every=3,
        dgrad=case["dgrad"],
    ).attach(state)


class Training:
    """A model, its sparsifier and its optimizer, made anew from a checkpoint if there is one."""

    def __init__(self, case, checkpoint=None):
        self.case, self.model = case, build(case)
        self.router = (
            Router("sparse", [SimulatedSparseKernel()], reuse=case["accumulated"])
            if case["routed"]
            else None
        )
        if checkpoint is not None:
            self.model.load_state_dict(checkpoint["model"])
        self.sparsifier = attach(self.model, case, checkpoint and checkpoint["sparsifier"])
        self.optimizer = OPTIMIZERS[case["optimizer"]](list(self.model.parameters()))
        self.sparsifier.register(self.optimizer)
        if checkpoint is not None:
            self.sparsifier.load_state_dict(checkpoint["sparsifier"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])

    def checkpoint(self):
        parts = {"model": self.model, "sparsifier": self.sparsifier, "optimizer": self.optimizer}
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def run(self, steps):
        for step in steps:
            self.optimizer.zero_grad()
            for micro in range(self.case["accumulated"]):
                x = torch.randn(
                    2,
                    self.case["widths"][0],
                    4,
                    3,
                    generator=torch.Generator().manual_seed(10 * step + micro),
                )
                with routing(self.router):
                    loss = self.model(x).square().mean()
                assert torch.isfinite(loss)
                loss.backward()
                if micro < self.case["accumulated"] - 1:
                    self.sparsifier.step()
            self.sparsifier.before_step(self.optimizer)
            self.optimizer.step()
            self.sparsifier.step()
            layers = self.sparsifier.layers.values()
            if all(
                layer.forward_mask is not None and layer.spec.method.current_pattern(layer)
                for layer in layers
            ):
                assert self.sparsifier.violations() == 0
            for layer in layers:
                if not layer.spec.method.latent and layer.forward_mask is not None:
                    assert not layer.weight[~layer.forward_mask].any(), (
                        "a method without latent values keeps none"
                    )
        return self


def check(case):
    model = build(case)
    kinds, keys = [type(module) for module in model.modules()], list(model.state_dict())
    try:
        attach(model, case).detach()
    except ValueError as error:
        if "no layer" not in str(error):
            raise
        assert [type(module) for module in model.modules()] == kinds
        return

    whole = Training(case).run(range(STEPS))
    checkpoint = whole.checkpoint()
    whole.run(range(STEPS, PLAN))
    resumed = Training(case, checkpoint).run(range(STEPS, PLAN))
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    for name, layer in whole.sparsifier.layers.items():
        other = resumed.sparsifier.layers[name]
        assert torch.equal(layer.weight, other.weight), name
        for one, two in zip(held_tensors(layer), held_tensors(other), strict=True):
            assert torch.equal(one, two), name

    sparse = whole.model.state_dict()
    assert list(sparse) == keys
    whole.sparsifier.bake()
    whole.sparsifier.detach()
    assert [type(module) for module in whole.model.modules()] == kinds
    assert not any(isinstance(module, Adapter) for module in whole.model.modules())
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, sparse[name]), name


OPTIONS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}


@pytest.mark.filterwarnings(
    "ignore"
)  # of short batches and of schedules that end with the training
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
