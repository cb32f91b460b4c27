"""Which layers are masked, why others are not, and errors that tell the way out."""

import re
import warnings

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.nn.adapters import Adapter
from tests.support.kinds import hugging_face_conv1d


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Derived(nn.Linear):
    """A subclass that computes what its base computes."""


class LoRA(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(16, 16)
        self.lora_A = nn.Linear(16, 4)
        self.lora_B = nn.Linear(4, 16)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.conv = nn.Conv2d(16, 32, 3)
        self.odd_in = nn.Linear(30, 32)
        self.odd_out = nn.Linear(32, 30)
        self.odd = nn.Linear(30, 30)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32)
        self.own = OwnForward(32, 32)
        self.derived = Derived(32, 32)
        self.lora = LoRA()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.old_normed = nn.Linear(32, 32)
        torch.nn.utils.prune.identity(self.old_normed, "weight")
        self.patched = nn.Linear(32, 32)
        self.patched.forward = lambda x: x
        self.lazy = nn.LazyLinear(32)
        self.embedding = nn.Embedding(64, 32)
        self.tied = nn.Linear(32, 64, bias=False)
        self.tied.weight = self.embedding.weight
        self.lstm = nn.LSTM(32, 32)
        self.transposed = nn.ConvTranspose2d(16, 16, 3)
        self.attention = nn.MultiheadAttention(32, 4)
        self.gpt = hugging_face_conv1d()(64, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 16)


pytestmark = pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")


def attach(model=None, **options):
    return NMSparsifier(Model() if model is None else model, **options).attach()


def test_what_is_masked_and_why_the_rest_is_not():
    sparsifier = attach()
    assert list(sparsifier.layers) == [
        "conv", "odd_in", "odd_out", "derived", "attention.in_proj_weight", "attention.out_proj", "gpt",
    ]  # fmt: skip
    reasons = {
        "stem": "first convolution",
        "odd": "in 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit); out 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)",
        "depthwise": "depthwise convolution",
        "own": f"{OwnForward.__module__}.OwnForward has a forward of its own",
        "lora.base_layer": "low-rank adapter",
        "lora.lora_A": "low-rank adapter",
        "normed": "parametrized",
        "old_normed": "pruned by torch.nn.utils.prune: call prune.remove",
        "patched": "this torch.nn.modules.linear.Linear has a forward of its own, assigned to the instance",
        "lazy": "lazy: it has its shape and class only after its first batch",
        "embedding": "a lookup, not a product, and shares its weight with 'tied.weight': it is masked only if",
        "tied": "shared with 'embedding.weight', which would change with it: if `include` has the exact name of one",
        "lstm": "a recurrent layer",
        "transposed": "no adapter for ConvTranspose2d",
        "head": "last linear layer",
    }
    for name, reason in reasons.items():
        assert reason in sparsifier.skipped[name], (name, sparsifier.skipped[name])
    assert "norm" not in sparsifier.skipped


def test_each_gemm_is_eligible_by_itself():
    layers = attach(include=["odd_in", "odd_out", "conv"]).layers
    assert [g.label for g in layers["odd_in"].gemms()] == ["dense", "2:4", "dense"]
    assert [g.label for g in layers["odd_out"].gemms()] == ["2:4", "masked", "dense"]
    assert (
        layers["odd_in"].gemms().forward.reason
        == "in 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"
    )
    assert (
        layers["odd_out"].gemms().dgrad.reason
        == "out 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"
    )
    assert [g.label for g in layers["conv"].gemms()] == ["2:4", "2:4", "dense"]
    with pytest.raises(
        ValueError, match=r"'odd_in' is named by `include` but cannot be masked: in 30 % 4 != 0"
    ):
        attach(
            method="sr-ste", include="odd_in"
        )  # a method without a backward mask gains nothing there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "5:4"}, "5:4"),
        ({"pattern": "2:0"}, "2:0"),
        ({"pattern": "2-4"}, "2-4.*'N:M'"),
        ({"method": "bi-msak"}, "'bi-msak' does not exist.*'bi-mask'"),
        ({"include": "decoder.*"}, r"`include` 'decoder.\*' matches no layer"),
        ({"include": "haed"}, "'haed' matches no layer; layers are named like 'head'"),
        ({"exclude": ["cnov"]}, "`exclude` 'cnov' matches no layer.*'conv'"),
        ({"include": "lora"}, r"'lora', a LoRA, which cannot be masked"),
        (
            {"include": "own"},
            "'own' is named by `include` but cannot be masked: .*test_select.OwnForward has",
        ),
        (
            {"include": "lstm"},
            "'lstm' is named by `include` but cannot be masked: a recurrent layer",
        ),
        (
            {"include": "odd", "pattern": "1:16"},
            r"'odd' is named .* in 30 % 16 != 0 \(M = 2, .* would fit\); out 30 % 16 != 0 \(M",
        ),
        ({"include": ["conv", "depthwise"]}, "'depthwise' is named .*depthwise convolution"),
        (
            {"rules": [{"include": "conv", "patern": "1:4"}]},
            r"rules\[0\] takes no key 'patern' .*; did you mean 'pattern'",
        ),
        ({"rules": [{"pattern": "1:4"}]}, "no 'include'"),
        (
            {"rules": [{"include": "head"}, {"include": "nothing.*"}]},
            r"`include` of rules\[1\] 'nothing.\*' matches",
        ),
        (
            {"include": "emb*"},
            r"`include` 'emb\*' matches only layers that cannot be masked: 'embedding': a lookup",
        ),
        ({"conv_layout": "hwc"}, "conv_layout='hwc'"),
        ({"pattern": "1:1000000"}, "no layer can be masked.*in 16 % 1000000"),
    ],
)
def test_bad_input_is_named_and_nothing_is_installed(options, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        attach(model, **options)
    assert not any(isinstance(module, Adapter) for module in model.modules())


def test_a_container_is_no_layer():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"names '0', a Sequential: write '0.\*' for its layers"):
        attach(model, include="0")


def test_nan_is_refused_by_name():
    model = Model()
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 'conv' holds NaN"):
        attach(model)
    assert not any(isinstance(module, Adapter) for module in model.modules())


def test_nan_in_training_is_reported_by_name():
    sparsifier = attach(method="ste")
    with torch.no_grad():
        sparsifier.layers["gpt"].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="layer 'gpt' holds NaN after 0 steps"):
        sparsifier.stats()


def test_a_name_overrules_skip_first_last_and_a_glob_does_not():
    assert list(attach(include=["head", "stem*", "conv"]).layers) == ["conv", "head"]
    assert "head" in attach(skip_first_last=False).layers


def test_exclude_wins_and_containers_can_be_excluded():
    assert "attention.in_proj_weight" in attach(exclude=["gpt"]).layers
    sparsifier = attach(exclude=["attention*", "gpt"])
    assert not any(name.startswith("attention") for name in sparsifier.layers)
    assert sparsifier.skipped["gpt"] == "in `exclude`"


def test_rules_mix_patterns_and_methods():
    sparsifier = attach(
        pattern="2:4",
        rules=[
            {"include": "conv", "pattern": "1:16", "method": "sr-ste"},
            {"include": ["conv", "gpt"], "pattern": {"n": 1, "m": 4}},
        ],
        exclude="odd*",
    )
    found = {
        name: (str(layer.pattern), type(layer.spec.method).__name__)
        for name, layer in sparsifier.layers.items()
    }
    assert found["conv"] == ("1:16", "SRSTE")
    assert found["gpt"] == ("1:4", "BiMask")
    assert found["derived"] == ("2:4", "BiMask")


def test_two_sparsifiers_share_a_model_but_no_layer():
    model = Model()
    first = attach(model, include="conv", method="sr-ste")
    with pytest.raises(ValueError, match="layer 'conv' is masked already"):
        attach(model)
    second = attach(model, include=["gpt", "attention*"])
    x = torch.randn(2, 16, 5, 5)
    masked = model.conv(x)
    second.detach()
    assert isinstance(model.conv, Adapter)
    assert torch.equal(model.conv(x), masked)
    first.detach()
    assert not any(isinstance(module, Adapter) for module in model.modules())


def test_attach_and_detach_are_idempotent():
    model = Model()
    sparsifier = attach(model)
    layers = sparsifier.layers
    assert sparsifier.attach().layers == layers
    sparsifier.detach()
    sparsifier.detach()
    with pytest.raises(RuntimeError, match=r"call attach\(\) before step"):
        sparsifier.step()


def test_dense_masks_nothing_but_counts_everything():
    sparsifier = attach(method="dense")
    assert "odd" in sparsifier.layers
    assert sparsifier.stats()["train_flops_ratio"] == 1


class OwnAttention(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class DerivedAttention(nn.MultiheadAttention):
    """A subclass that computes what its base computes."""


def test_an_attention_with_its_own_forward_reads_its_projection():
    model = nn.ModuleDict(
        {"a": OwnAttention(16, 4), "b": DerivedAttention(16, 4), "c": nn.Linear(16, 16)}
    )
    sparsifier = attach(model, skip_first_last=False)
    assert list(sparsifier.layers) == ["b.in_proj_weight", "b.out_proj", "c"]
    assert sparsifier.skipped["a.out_proj"] == "read, not called, by OwnAttention"
    sparsifier.detach()
    attach(model, include="b.out_proj")
    assert isinstance(model["b"], Adapter), "a masked out_proj needs an attention that calls it"


def test_one_module_under_two_names_is_masked_once():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    sparsifier = attach(model, method="ste", skip_first_last=False)
    assert list(sparsifier.layers) == ["0"]
    state = model.state_dict()
    assert torch.equal(state["0.weight"], sparsifier.layers["0"].forward_weight())
    assert torch.equal(state["2.weight"], state["0.weight"])


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_globs_are_strings(option):
    with pytest.raises(TypeError, match=f"`{option}` takes globs over module names.*not 3"):
        attach(**{option: 3})


def test_input_of_the_wrong_rank_gets_an_error_that_says_so():
    attach(model := nn.Sequential(nn.Conv2d(16, 16, 3)), skip_first_last=False)
    with pytest.raises(
        RuntimeError, match=r"expected 3-d \(unbatched\) or 4-d input, got \[4, 16\]"
    ):
        model(torch.randn(4, 16))


@pytest.mark.parametrize("pattern", ["2:4", "3:7", "1:16"])
@pytest.mark.parametrize("width", [3, 18, 30, 31, 94, 289])
def test_an_m_that_a_message_names_fits(width, pattern):
    model = nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8))
    options = {"method": "ste", "include": "0", "skip_first_last": False}
    with pytest.raises(ValueError, match="would fit") as error:
        attach(model, pattern=pattern, **options)
    (listed,) = re.findall(r"\(M = (.*?) would fit\)", str(error.value))
    for m in listed.split(", "):
        sparsifier = attach(model, pattern=f"1:{m}", **options)
        assert list(sparsifier.layers) == ["0"]
        sparsifier.detach()


@pytest.mark.parametrize("method", ["bi-mask", "slope", "sr-ste"])
def test_layers_whose_trained_weight_is_dense_are_named(method):
    """With a mask for the input gradient alone, or with an estimator alone; not those of a method without masks."""
    model = nn.ModuleDict({f"odd{k}": nn.Linear(30, 32) for k in range(2)})
    model["conv"] = nn.Conv2d(6, 8, 3)
    model["even"] = nn.Linear(32, 32)
    odd = "in 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"
    expected = {"odd0": odd, "odd1": odd, "conv": "in 6 % 4 != 0 (M = 2, 3, 6 would fit)"}
    estimator = "mvue" if method == "sr-ste" else None
    sparsifier = NMSparsifier(model, "2:4", method, estimator, skip_first_last=False)
    names = "; ".join(f"'{name}': {reason}" for name, reason in expected.items())
    with pytest.warns(
        UserWarning, match=rf"will be dense, only GEMMs of their .* N:M: {re.escape(names)}\. "
    ):
        sparsifier.attach()
    reasons = {name: layer.spec.forward_reason for name, layer in sparsifier.layers.items()}
    assert {name: reason for name, reason in reasons.items() if reason} == expected
    for name, layer in sparsifier.layers.items():
        assert (layer.forward_mask is None) == (name in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(nn.Linear(32, 32), method=method, skip_first_last=False)
        attach(
            nn.Sequential(nn.Linear(30, 32)),
            method="dense",
            grad_estimator="mvue",
            skip_first_last=False,
        )
