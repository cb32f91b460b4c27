"""Which layers are masked, why others are not, and errors that tell the way out."""

import re
import warnings

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.nn import register_adapter
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
        self.old_normed = torch.nn.utils.prune.identity(nn.Linear(32, 32), "weight")
        self.patched = nn.Linear(32, 32)
        self.patched.forward = lambda x: x
        self.lazy = nn.LazyLinear(32)
        self.embedding = nn.Embedding(64, 32)
        self.tied = nn.Linear(32, 64, bias=False)
        self.tied.weight = self.embedding.weight
        self.transposed = nn.ConvTranspose2d(16, 16, 3)
        self.attention = nn.MultiheadAttention(32, 4)
        self.gpt = hugging_face_conv1d()(64, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 16)


pytestmark = pytest.mark.filterwarnings("ignore:the trained weights of these layers will be dense")


def attach(model=None, **options):
    options = {"method": "bi-mask", **options}
    return NMSparsifier(Model() if model is None else model, **options).attach()


def is_adapted(model):
    return any(isinstance(module, Adapter) for module in model.modules())


ODD_IN = "in 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"
ODD_OUT = "out 30 % 4 != 0 (M = 2, 3, 5, 6, 10, 15 would fit)"


def test_what_is_masked_and_why_the_rest_is_not():
    sparsifier = attach()
    masked = ["conv", "odd_in", "odd_out", "derived"]
    assert list(sparsifier.layers) == [
        *masked,
        "attention.in_proj_weight",
        "attention.out_proj",
        "gpt",
    ]
    reasons = {
        "stem": "first convolution",
        "odd": f"{ODD_IN}; {ODD_OUT}",
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
        "transposed": "no adapter for ConvTranspose2d",
        "head": "last linear layer",
    }
    for name, reason in reasons.items():
        assert reason in sparsifier.skipped[name], (name, sparsifier.skipped[name])
    assert "norm" not in sparsifier.skipped


class Int8Params(nn.Parameter):
    """As that of bitsandbytes: floating point until it is moved to a GPU."""


class Linear8bitLt(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.weight = Int8Params(self.weight.data)

    def forward(self, x):
        return x


class Packed(nn.Module):
    """As those of GPTQ: the weight is a buffer of packed integers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 16, dtype=torch.int32))
        self.register_buffer("position_ids", torch.arange(8)[None])


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("position_ids", torch.arange(8)[None])


def with_weight(dtype):
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(layer.weight.data.to(dtype), requires_grad=False)
    return layer


KINDS = {
    "rnn": (lambda: nn.RNN(16, 16), "a recurrent layer: a fused operator"),
    "lstm": (lambda: nn.LSTM(16, 16), "a recurrent layer: a fused operator"),
    "gru": (lambda: nn.GRU(16, 16), "a recurrent layer: a fused operator"),
    "rnn-cell": (lambda: nn.RNNCell(16, 16), "a recurrent cell: a fused"),
    "lstm-cell": (lambda: nn.LSTMCell(16, 16), "a recurrent cell: a fused"),
    "gru-cell": (lambda: nn.GRUCell(16, 16), "a recurrent cell: a fused"),
    "bilinear": (lambda: nn.Bilinear(16, 16, 16), "a bilinear layer"),
    "int8": (lambda: with_weight(torch.int8), "quantised: its weight is torch.int8"),
    "fp8": (
        lambda: with_weight(torch.float8_e4m3fn),
        "quantised: its weight is torch.float8_e4m3fn",
    ),
    "bitsandbytes": (Linear8bitLt, "quantised: its weight is Int8Params"),
    "packed": (Packed, "quantised: its weight is torch.int32"),
    "torch-ao": (
        lambda: torch.ao.nn.quantized.dynamic.Linear(16, 16),
        "quantised: torch.ao.nn.quantized.dynamic.modules.linear.Linear packs its weight",
    ),
}


@pytest.mark.filterwarnings("ignore:.*quantized.*deprecated")
@pytest.mark.parametrize(("make", "reason"), KINDS.values(), ids=KINDS)
def test_kinds_that_no_adapter_takes(make, reason):
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(make()), nn.Linear(16, 16))
    named = f"layer '1.0' is named by `include` but cannot be masked: {reason}"
    with pytest.raises(ValueError, match=named):
        attach(model, include=["*", "1.0"])
    assert not is_adapted(model)
    sparsifier = attach(model)
    assert sparsifier.skipped["1.0"].startswith(reason)
    assert list(sparsifier.layers) == ["0"]


def test_other_integers_are_no_quantised_weights():
    model = nn.Sequential(nn.Linear(16, 16), Positions(), nn.Linear(16, 16))
    assert set(attach(model).skipped) == {"2"}


def test_each_gemm_is_eligible_by_itself():
    layers = attach(include=["odd_in", "odd_out", "conv"]).layers
    labels = {name: [gemm.label for gemm in layer.gemms()] for name, layer in layers.items()}
    assert labels == {
        "conv": ["2:4", "2:4", "dense"],
        "odd_in": ["dense", "2:4", "dense"],
        "odd_out": ["2:4", "masked", "dense"],
    }
    assert layers["odd_in"].gemms().forward.reason == ODD_IN
    assert layers["odd_out"].gemms().dgrad.reason == ODD_OUT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "5:4"}, "5:4"),
        ({"method": "bi-msak"}, "'bi-msak' does not exist.*'bi-mask'"),
        ({"include": "decoder.*"}, r"`include` 'decoder.\*' matches no layer"),
        ({"include": "haed"}, "'haed' matches no layer; layers are named like 'head'"),
        ({"exclude": ["cnov"]}, "`exclude` 'cnov' matches no layer.*'conv'"),
        ({"include": "lora"}, r"'lora', a LoRA, which cannot be masked"),
        (
            {"include": "own"},
            "'own' is named .* but cannot be masked: .*test_select.OwnForward has",
        ),
        # A method without a backward mask gains nothing there.
        (
            {"include": "odd_in", "method": "sr-ste"},
            "'odd_in' is named .* cannot be masked: in 30 %",
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
        ({"include": 3}, "`include` takes globs over module names.*not 3"),
        ({"exclude": 3}, "`exclude` takes globs over module names.*not 3"),
    ],
)
def test_bad_input_is_named_and_nothing_is_installed(options, message):
    model = Model()
    with pytest.raises((ValueError, TypeError), match=message):
        attach(model, **options)
    assert not is_adapted(model)


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
    assert not is_adapted(model)
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
    rules = [
        {"include": "conv", "pattern": "1:16", "method": "sr-ste"},
        {"include": ["conv", "gpt"], "pattern": {"n": 1, "m": 4}},
    ]
    layers = attach(pattern="2:4", rules=rules, exclude="odd*").layers
    found = [
        (str(layers[name].pattern), type(layers[name].spec.method).__name__)
        for name in ("conv", "gpt", "derived")
    ]
    assert found == [("1:16", "SRSTE"), ("1:4", "BiMask"), ("2:4", "BiMask")]


def test_two_sparsifiers_share_a_model_but_no_layer():
    model = Model()
    first = attach(model, include="conv", method="sr-ste")
    with pytest.raises(ValueError, match="layer 'conv' is masked already"):
        attach(model)
    second = attach(model, include=["gpt", "attention*"])
    x = torch.randn(2, 16, 5, 5)
    masked = model.conv(x)
    second.detach()
    assert torch.equal(model.conv(x), masked)
    first.detach()
    assert not is_adapted(model)


def test_attach_and_detach_are_idempotent():
    sparsifier = attach()
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
    model = nn.ModuleDict({"a": OwnAttention(16, 4), "b": DerivedAttention(16, 4)})
    sparsifier = attach(model, skip_first_last=False)
    assert list(sparsifier.layers) == ["b.in_proj_weight", "b.out_proj"]
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


def test_input_of_the_wrong_rank_gets_an_error_that_says_so():
    attach(model := nn.Sequential(nn.Conv2d(16, 16, 3)), skip_first_last=False)
    message = r"expected 3-d \(unbatched\) or 4-d input, got \[4, 16\]"
    with pytest.raises(RuntimeError, match=message):
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
    odd = {"odd0": nn.Linear(30, 32), "odd1": nn.Linear(30, 32), "conv": nn.Conv2d(6, 8, 3)}
    model = nn.ModuleDict({**odd, "even": nn.Linear(32, 32)})
    expected = {"odd0": ODD_IN, "odd1": ODD_IN, "conv": "in 6 % 4 != 0 (M = 2, 3, 6 would fit)"}
    options = {"method": method, "skip_first_last": False}
    names = "; ".join(f"'{name}': {reason}" for name, reason in expected.items())
    message = rf"will be dense, only GEMMs of their .* N:M: {re.escape(names)}\. "
    with pytest.warns(UserWarning, match=message):
        layers = attach(
            model, grad_estimator="mvue" if method == "sr-ste" else None, **options
        ).layers
    for name, layer in layers.items():
        assert layer.spec.forward_reason == expected.get(name, "")
        assert (layer.forward_mask is None) == (name in expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attach(nn.Linear(32, 32), **options)
        options["method"] = "dense"
        attach(nn.Sequential(nn.Linear(30, 32)), grad_estimator="mvue", **options)


class Nothing(Adapter):
    pass


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (nn.Linear, r"takes a subclass of lightning_nm\.nn\.Adapter, not"),
        (nn.Linear(2, 2), r"takes a subclass of lightning_nm\.nn\.Adapter, not"),
        (None, r"takes a subclass of lightning_nm\.nn\.Adapter, not"),
        (Nothing, "Nothing handles no class: set `handles`"),
    ],
)
def test_what_is_no_adapter_is_refused(adapter, message):
    with pytest.raises(TypeError, match=message):
        register_adapter(adapter)
