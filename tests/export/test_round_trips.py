"""Packed models compute what the dense ones do; so do their copies, pickles, states and files, which hold the same."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_nm import (
    NMPattern,
    NMSparsifier,
    load_packed,
    pack,
    packed_summary,
    save_packed,
    unpacked_state_dict,
    warm_up,
)
from lightning_nm.export import PackedFile, read_checkpoint, verify
from lightning_nm.export.packed_file import write_packed
from lightning_nm.functional import nm_prune
from lightning_nm.kernels.cpu import library
from lightning_nm.nn import NMLinear, register_adapter
from lightning_nm.nn.adapters import adapter
from lightning_nm.packed import kernel_choice
from lightning_nm.packed.module import PackedWeight, packed_weights
from lightning_nm.packed.tensor import PackedTensor
from tests.support.cpu_products import REASON
from tests.support.experts import WIDTH, Experts, LinearExperts, TransposedExperts
from tests.support.kinds import TwoWeights
from tests.support.packed_models import (
    Embeddings,
    Tied,
    assert_equal_states,
    clones,
    copied,
    header_of,
    on_meta,
    prune,
    small,
)


@pytest.fixture(autouse=True)
def _decisions(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_choice, "DECISIONS", str(tmp_path / "packed.json"))
    kernel_choice._tuner.cache_clear()


class TwoNames(nn.Module):
    """One module under two names."""

    def __init__(self, make=lambda: nn.Linear(64, 64)):
        super().__init__()
        self.a = make()
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x))


class Attention(nn.Module):
    """One attention under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(64, 4, batch_first=True)
        self.b = self.a

    def forward(self, x):
        y, _ = self.a(x[None], x[None], x[None])
        return self.b(y, x[None], x[None])[0]


class OneWeight(nn.Module):
    """Two layers that share their weight, which stays dense, next to one that can be packed."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def repeated():
    block = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))
    return nn.Sequential(block, block)


def repeated_convolution():
    convolution = nn.Conv1d(64, 64, 1)
    return nn.Sequential(nn.Unflatten(1, (64, 1)), convolution, convolution)


def tokens(number=11, experts=4):
    return torch.randn(number, WIDTH), torch.randint(experts, (number,))


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    names: str
    """Keys of the packed weights, in the order of the alphabet."""
    options: dict[str, Any] = {}
    """Of pack()."""
    dtype: torch.dtype = torch.float32


FILE = "a.safetensors"
INT8 = {"dtype": "int8"}
ROWS = INT8 | {"int8_embeddings": ["words", "embed"]}
layers = Case(small, lambda: (torch.randn(2, 16, 4, 4),), "0.weight 4.weight 5.weight 6.weight")
experts = Case(Experts, tokens, "down up")
two_weights = Case(TwoWeights, lambda: (torch.randn(3, 5, 32),), "down up")


def of_rows(make, names):
    return Case(make, lambda: (torch.randn(5, 64),), names)


def of_words(make, names, options):
    return Case(make, lambda: (torch.arange(24).view(2, 12),), names, options)


CASES = {
    "layers": layers,
    "layers-int8": layers._replace(options=INT8),
    "layers-int8-bfloat16": layers._replace(options=INT8, dtype=torch.bfloat16),
    "layers-bfloat16": layers._replace(dtype=torch.bfloat16),
    "layers-float16": layers._replace(dtype=torch.float16),
    "layers-float64": layers._replace(dtype=torch.float64),
    "one-module": of_rows(TwoNames, "a.weight"),
    "one-block": of_rows(repeated, "0.0.weight 0.2.weight"),
    "one-convolution": of_rows(repeated_convolution, "1.weight"),
    "one-attention": of_rows(Attention, "a.in_proj_weight a.out_proj.weight"),
    "one-weight": of_rows(OneWeight, "c.weight"),
    "tied": of_words(Tied, "middle.weight", {}),
    "embeddings": of_words(Embeddings, "embed.weight middle.weight words.weight", ROWS),
    "experts": experts,
    "experts-int8": experts._replace(options=INT8),
    "experts-transposed": experts._replace(make=TransposedExperts),
    "experts-one": experts._replace(inputs=lambda: tokens(experts=1)),
    "experts-none": experts._replace(inputs=lambda: tokens(0)),
    "experts-of-one-product": Case(
        lambda: nn.Sequential(LinearExperts(), nn.Linear(32, 8)),
        lambda: (torch.randn(5, WIDTH),),
        "0.weight 1.weight",
    ),
    "two-weights": two_weights,
    "two-weights-up": two_weights._replace(names="up", options={"exclude": "down"}),
    "two-weights-down": two_weights._replace(names="down", options={"exclude": "up"}),
}


@pytest.mark.parametrize("kernels", ["auto", "sparse", "reference"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_round_trips(case, kernels):
    torch.manual_seed(0)

    def new():
        return prune(case.make().to(case.dtype), "1:16")

    def packed(model, kernels=kernels):
        return pack(copied(model), kernels=kernels, **case.options)

    dense = new()
    inputs = [x.to(case.dtype) if x.is_floating_point() else x for x in case.inputs()]
    model = packed(dense)
    save_packed(packed(dense, "reference"), FILE)
    state = unpacked_state_dict(model)
    if is_int8 := "dtype" in case.options:
        dense.load_state_dict(state)
    assert_equal_states(state, dense.state_dict())
    assert_equal_states(read_checkpoint(FILE).weights, state)
    assert verify(FILE).ok
    held = packed_summary(model).weights
    assert sorted(each.name for each in held) == case.names.split()
    save_packed(model, "again")
    assert Path("again").read_bytes() == Path(FILE).read_bytes(), "whatever is held"
    expected = dense(*inputs)
    # Kernels round the tokens of int8 GEMMs, too.
    is_rounded = is_int8 and kernels != "reference"
    limit = 0.03 if is_rounded else 10 * torch.finfo(case.dtype).eps
    by_state = packed(new())
    by_state.load_state_dict(model.state_dict())
    by_file = load_packed(case.make(), FILE, kernels=kernels)
    from_meta = load_packed(on_meta(case.make), FILE, kernels=kernels)
    pickled = pickle.loads(pickle.dumps(model))
    for each in (model, copied(model), pickled, by_state, by_file, from_meta):
        assert packed_summary(each).weights == held
        assert_equal_states(unpacked_state_dict(each), state)
        assert_equal_states(clones(each), clones(model))
        assert sum(isinstance(part, PackedWeight) for part in each.modules()) == len(held)
        assert not any(tensor.is_meta for tensor in (*each.parameters(), *each.buffers()))
        assert not each.training
        found = each(*inputs)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert (found - expected).norm() <= limit * expected.norm()


@pytest.mark.parametrize("case", [experts, two_weights])
def test_conversions(case):
    dense = prune(case.make(), "1:16")
    model = pack(copied(dense), kernels="reference").double()
    x, *more = case.inputs()
    torch.testing.assert_close(model(x.double(), *more), dense.double()(x.double(), *more))


# ------------------------------------------------------------------------------------------------------------- experts


@pytest.mark.skipif(
    bool(REASON) or not library.level(), reason="this CPU has no cpu-permute kernel"
)
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_each_expert_is_held_in_the_layout_of_a_kernel(kind):
    model = pack(prune(kind(), "1:16"), kernels="sparse")
    for _, weight in packed_weights(model):
        assert [part.form for part in weight.parts] == ["cpu-permute"] * 4
        assert weight.nbytes < 0.5 * weight.dense_nbytes
    warm_up(pack(prune(kind(), "1:16")), tokens=[4])


def test_experts_give_gradients_of_inputs_and_are_not_trained():
    dense = prune(Experts(), "1:16")
    model = pack(copied(dense))
    x, ids = tokens()
    x.requires_grad_()
    expected, found = (
        torch.autograd.grad(each(x, ids).square().sum(), x) for each in (dense, model)
    )
    torch.testing.assert_close(found, expected)
    model.train()
    with pytest.raises(RuntimeError, match=r"'up\[0\]' is packed and cannot be trained"):
        model(x, ids)


# ------------------------------------------------------------------------------------------------------------ adapters


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class NMScaled(NMLinear):
    handles = Scaled

    def forward(self, input):
        return 2 * super().forward(input)


def test_an_adapter_that_extends_one_of_the_package(monkeypatch):
    monkeypatch.setattr(adapter, "_ADAPTERS", list(adapter._ADAPTERS))
    monkeypatch.setattr(adapter, "_CLASSES", {})
    dense = nn.Sequential(Scaled(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    for layer in dense[::2]:
        layer.weight.data = nm_prune(layer.weight.data, "2:4")
    x = torch.randn(5, 64)
    own = {"0": f"{__name__}.Scaled has a forward of its own"}
    for not_packed in (own, {}):
        model = pack(copied(dense), kernels="reference")
        assert dict(packed_summary(model).not_packed) == not_packed
        torch.testing.assert_close(model(x), dense(x))
        if not_packed:
            register_adapter(NMScaled)


# --------------------------------------------------------------------------------- files of models that share otherwise


def test_keys_of_one_module_have_one_tensor():
    model = pack(prune(repeated(), "1:16"), kernels="sparse")
    dense = unpacked_state_dict(model)
    assert dense["0.0.weight"] is dense["1.0.weight"]
    save_packed(model, "a")
    header, _ = header_of(Path("a"))
    values = sorted(key for key in header if key.endswith(".values"))
    assert values == ["0.0.weight.values", "0.2.weight.values"]
    assert PackedFile("a").aliases["1.0.weight"] == "0.0.weight"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_file_without_the_first_name(device):
    """Writers of other tools keep one key of a shared tensor, and not always the first."""
    dense = prune(repeated(), "1:16")
    save_packed(pack(copied(dense), kernels="reference"), "both")
    file = PackedFile("both")
    write_packed("one", {key: file.read(key) for key in file.names() if key.startswith("1.")})
    with torch.device(device):
        model = repeated()
    load_packed(model, "one", kernels="reference")
    assert_equal_states(unpacked_state_dict(model), dense.state_dict())
    assert {each.form for each in packed_summary(model).weights} == {"packed"}


def test_a_file_of_a_model_that_shares_less():
    """Equal tensors become one; different ones are refused before anything is changed."""
    dense = prune(TwoNames(), "1:16")
    apart = nn.ModuleDict({name: copied(dense.a) for name in "ab"})
    save_packed(pack(copied(apart)), "equal")
    loaded = load_packed(TwoNames(), "equal")
    assert_equal_states(unpacked_state_dict(loaded), dense.state_dict())
    apart["b"].weight.data.neg_()
    save_packed(pack(apart), "different")
    model = TwoNames()
    before = clones(model)
    message = "'a.weight' and 'b.weight' are one tensor in the model, and different ones"
    with pytest.raises(ValueError, match=message):
        load_packed(model, "different")
    assert_equal_states(clones(model), before)


def test_a_file_of_a_model_that_shares_more():
    dense = prune(TwoNames(), "1:16")
    save_packed(pack(copied(dense)), "a")
    apart = nn.ModuleDict({name: nn.Linear(64, 64) for name in "ab"})
    assert_equal_states(unpacked_state_dict(load_packed(apart, "a")), dense.state_dict())


def test_a_tied_weight_that_a_file_has_once_and_packed():
    """Under one of its names, as transformers writes it."""
    state = clones(Tied())
    weight = nm_prune(state.pop("embed.weight"), "1:8")
    write_packed("a", {**state, "head.weight": PackedTensor.of(weight, NMPattern(1, 8))})
    model = load_packed(Tied(), "a")
    assert torch.equal(model.embed.weight, weight)
    assert model.head.weight is model.embed.weight


# ---------------------------------------------------------------------------------- weights that no packed layer holds


def rows(model):
    return dict(packed_summary(model).not_packed)


def linear():
    return prune(nn.Linear(64, 96), "1:16")


def test_every_reason():
    names = ("packed", "dense", "excluded", "a", "b", "masked")
    model = nn.ModuleDict({name: linear() for name in names})
    model["own"] = prune(Scaled(64, 32), "1:16")
    model["norm"] = nn.LayerNorm(96)
    model["dense"].reset_parameters()
    model["b"].weight = model["a"].weight
    pack(model, exclude=["excluded", "masked"], kernels="reference")
    NMSparsifier(model, "2:4", "bi-mask", include="masked", skip_first_last=False).attach()
    found = rows(model)
    own = f"{__name__}.Scaled has a forward of its own"
    assert f"own  not packed: {own}" in str(packed_summary(model)).splitlines()
    assert "blocks hold more than 2 of 4" in found.pop("dense.weight")
    excluded = found.pop("excluded.weight")
    assert excluded.startswith("it is 1:16, but was left dense by `exclude`")
    shared = "its weight is shared with another module"
    assert found == {
        "own": own,
        "a.weight": shared,
        "b.weight": shared,
        "masked.weight": "masked by a sparsifier",
    }


def test_a_layer_of_which_one_weight_is_packed():
    attention = nn.MultiheadAttention(32, 4, batch_first=True, kdim=16, add_bias_kv=True)
    attention.q_proj_weight.data = nm_prune(attention.q_proj_weight.data, "1:8")
    pack(attention, exclude="out_proj.weight", kernels="reference")
    assert [each.name for each in packed_summary(attention).weights] == ["q_proj_weight"]
    found = rows(attention)
    assert set(found) == {"k_proj_weight", "v_proj_weight", "out_proj.weight"}
    assert all("blocks hold more than" in reason for reason in found.values())


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_on_the_meta_device(kernels):
    model = pack(nn.Sequential(linear(), nn.Linear(96, 4)), kernels=kernels).to("meta")
    assert rows(model) == {"1.weight": "it has no values, it is on the meta device"}
