"""Recurrent, bilinear and quantised layers are refused by name, with the reason."""

import pytest
import torch
from torch import nn

from lightning_nm import NMSparsifier


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


def packed_by_torch():
    return torch.ao.nn.quantized.dynamic.Linear(16, 16)


RECURRENT, CELL, QUANTISED = (
    "a recurrent layer: a fused operator",
    "a recurrent cell: a fused",
    "quantised: ",
)
CASES = {
    "rnn": (lambda: nn.RNN(16, 16), RECURRENT),
    "lstm": (lambda: nn.LSTM(16, 16), RECURRENT),
    "gru": (lambda: nn.GRU(16, 16), RECURRENT),
    "rnn-cell": (lambda: nn.RNNCell(16, 16), CELL),
    "lstm-cell": (lambda: nn.LSTMCell(16, 16), CELL),
    "gru-cell": (lambda: nn.GRUCell(16, 16), CELL),
    "bilinear": (lambda: nn.Bilinear(16, 16, 16), "a bilinear layer"),
    "int8": (lambda: with_weight(torch.int8), QUANTISED + "its weight is torch.int8"),
    "fp8": (
        lambda: with_weight(torch.float8_e4m3fn),
        QUANTISED + "its weight is torch.float8_e4m3fn",
    ),
    "bitsandbytes": (Linear8bitLt, QUANTISED + "its weight is Int8Params"),
    "packed": (Packed, QUANTISED + "its weight is torch.int32"),
    "torch-ao": (
        packed_by_torch,
        QUANTISED + "torch.ao.nn.quantized.dynamic.modules.linear.Linear packs its weight",
    ),
}


@pytest.mark.filterwarnings("ignore:.*quantized.*deprecated")
@pytest.mark.parametrize(("make", "reason"), CASES.values(), ids=CASES)
def test_the_reason_is_listed_and_given_when_it_is_named(make, reason):
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(make()), nn.Linear(16, 16))
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(
        ValueError, match=f"layer '1.0' is named by `include` but cannot be masked: {reason}"
    ):
        NMSparsifier(model, include=["*", "1.0"]).attach()
    assert {name: type(module) for name, module in model.named_modules()} == before
    sparsifier = NMSparsifier(model).attach()
    assert sparsifier.skipped["1.0"].startswith(reason)
    assert list(sparsifier.layers) == ["0"]


def test_other_integers_are_no_quantised_weights():
    model = nn.Sequential(nn.Linear(16, 16), Positions(), nn.Linear(16, 16))
    assert set(NMSparsifier(model).attach().skipped) == {"2"}
