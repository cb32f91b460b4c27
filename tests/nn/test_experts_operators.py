"""Code that uses the weights of experts: which products are recognised, and which are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_nm import NMSparsifier
from lightning_nm.nn import register_experts
from lightning_nm.nn.adapters import base
from tests.support.experts import EXPERTS, WIDTH


class Any(nn.Module):
    """A module of experts that does what a test says."""

    def __init__(self, code):
        super().__init__()
        self.expert_weights = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH, dtype=torch.float64))
        self.code = code

    def forward(self, x):
        return self.code(self.expert_weights, x)


def result(code, method="sr-ste", x=None, **options):
    """What the code makes of the masked weight, its gradients, and what it makes of W_F."""
    torch.manual_seed(0)
    model = Any(code)
    sparsifier = NMSparsifier(model, "2:4", method, **options).attach()
    (layer,) = sparsifier.layers.values()
    values = layer.forward_weight().requires_grad_()
    x = torch.randn(6, WIDTH, dtype=torch.float64) if x is None else x
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = model(mine), code(values, other)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(model.expert_weights.grad, values.grad, rtol=1e-5, atol=2e-5)
    return sparsifier


OPERATORS = {
    "linear-bias": lambda w, x: F.linear(x, w[1], x.new_ones(8)),
    "linear-cast": lambda w, x: F.linear(x.float(), w[1].to(torch.float32)),
    "float": lambda w, x: x.float() @ w.float()[2].t(),
    "type-as": lambda w, x: torch.bmm(x.float().expand(4, 6, 16), w.mT.type_as(x.float())),
    "negative": lambda w, x: x @ w[-1].T,
    "ellipsis": lambda w, x: x @ w[2, ...].mT + x @ w[3, :, :].mT,
    "slice": lambda w, x: torch.bmm(x.expand(2, 6, 16), w[1:3].transpose(1, 2)),
    "bool": lambda w, x: torch.bmm(
        x.expand(2, 6, 16), w[torch.tensor([True, False, True, False])].mT
    ),
    "list": lambda w, x: x @ w[[0, 2]].swapaxes(-1, -2),
    "grid": lambda w, x: x[:, None, None] @ w[torch.tensor([[0, 1], [3, 3], [2, 0]] * 2)].mT,
    "broadcast": lambda w, x: x.view(2, 1, 3, 16) @ w.permute(0, 2, 1),
    "vector": lambda w, x: torch.mv(w[0], x[0]) + w[1] @ x[1] + x[2] @ w[2].T,
    "vectors": lambda w, x: w @ x[0] + x[1] @ w.mT,
    "addmm": lambda w, x: torch.addmm(x.new_ones(8), x, w.select(0, 1).t()),
    "baddbmm": lambda w, x: torch.baddbmm(
        x.new_ones(4, 6, 8), x.expand(4, 6, 16), w.contiguous().mT
    ),
    "index-select": lambda w, x: torch.bmm(
        x[:, None], w.index_select(0, torch.tensor([0, 0, 3, 1, 2, 0])).mT
    ),
    "index-of-index": lambda w, x: torch.bmm(x[:2, None], w[torch.tensor([0, 0, 3])][1:].mT),
    "einsum-all": lambda w, x: torch.einsum("td,ehd->teh", x, w),
    "einsum-one": lambda w, x: torch.einsum("hd,td->ht", w[1], x),
    "einsum-vector": lambda w, x: (
        torch.einsum("d,hd->h", x[0], w[1]) + torch.einsum("ed,ehd->eh", x[:4], w).sum(0)
    ),
    "einsum-batch": lambda w, x: torch.einsum(
        "bted,ehd->bteh", x.view(3, 1, 2, 16).expand(3, 5, 2, 16), w[:2]
    ),
    "shape": lambda w, x: (
        x.reshape(-1, w.shape[-1]) @ w[0].T * (w.dim() + len(w) + w.size(1) + w.element_size())
    ),
    "zeros-like": lambda w, x: x @ (w[0].new_zeros(16, 8)) + x @ w[0].T,
}


@pytest.mark.parametrize("code", OPERATORS.values(), ids=OPERATORS)
def test_products_are_recognised(code):
    result(code)
    if code is not OPERATORS["zeros-like"]:
        with pytest.MonkeyPatch.context() as patch:  # none of them falls back on W_F
            patch.setattr(
                "lightning_nm.nn.adapters.experts.weight._values",
                lambda tree: pytest.fail("fell back"),
            )
            result(code)


OTHERS = {
    "norm": lambda w, x: x @ w[0].T * w.norm(),
    "chunk": lambda w, x: torch.cat([x @ part.T for part in w[1].chunk(2)], 1),
    "rows": lambda w, x: x @ w[1, :4].T,
    "scaled": lambda w, x: x @ (2 * w[2]).T,
    "cat": lambda w, x: x @ torch.cat([w[0], w[1]]).T,
    "einsum-summed": lambda w, x: torch.einsum("td,ehd->th", x, w),
    "reshaped": lambda w, x: x @ w.view(-1, 16).T,
    "conv": lambda w, x: F.conv1d(x.T[None], w[0][..., None]),
    "cast-twice": lambda w, x: x.float() @ w[0].bfloat16().float().T,
}


@pytest.mark.parametrize("code", OTHERS.values(), ids=OTHERS)
def test_other_operators_use_the_forward_weight_or_are_refused(code):
    result(code)
    for options in ({"method": "bi-mask"}, {"method": "sr-ste", "grad_estimator": "mvue"}):
        model = Any(code)
        method = options.pop("method")
        NMSparsifier(model, "2:4", method, **options).attach()
        x = torch.randn(6, WIDTH, dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"'expert_weights'.* the operator '\w+'.*exclude"):
            model(x)
        with torch.no_grad():
            assert model(x).isfinite().all()


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight[0].t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        full = torch.zeros(weight.shape, dtype=grad.dtype)
        full[0] = grad.t() @ x
        return grad @ weight[0], full


def test_a_custom_function_is_refused_before_a_wrong_gradient():
    model = Any(lambda w, x: OwnProduct.apply(x, w))
    NMSparsifier(model, "2:4", "sr-ste").attach()
    y = model(torch.randn(6, WIDTH, dtype=torch.float64))
    with pytest.raises(
        RuntimeError, match="'expert_weights' was read by code that its masks do not reach"
    ):
        y.sum().backward()
    assert model.expert_weights.grad is None


def test_a_product_over_the_other_axis_tells_the_way_out(monkeypatch):
    monkeypatch.setattr(base, "_ADAPTERS", list(base._ADAPTERS))
    monkeypatch.setattr(base, "_CLASSES", {})

    def code(w, x):
        return x[:, :8] @ w[0]

    model = Any(code)
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    with pytest.raises(
        ValueError, match=r"\[experts, out, in\].*register_experts\(Any, transposed=True\)"
    ):
        model(torch.randn(6, WIDTH, dtype=torch.float64))
    sparsifier.detach()
    register_experts(Any, transposed=True)
    assert result(code).layers["expert_weights"].spec.layout == "experts-transposed"


def test_names_decide_which_weights_are_experts():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = nn.Parameter(torch.randn(1, 16, WIDTH))
            self.table = nn.Parameter(torch.randn(4, 16, WIDTH))
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.linear(x) @ self.table[0].t() + x @ self.position[0].t()

    class FeedForward(Block):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.experts = Block(), FeedForward()

        def forward(self, x):
            return self.block(x) + self.experts(x)

    sparsifier = NMSparsifier(Model(), "2:4", "sr-ste", skip_first_last=False).attach()
    assert list(sparsifier.layers) == ["block.linear", "experts.table", "experts.linear"]
    assert "register_experts" in sparsifier.skipped["block"]
    named = NMSparsifier(Model(), "2:4", "sr-ste", include=["block.table"]).attach()
    assert list(named.layers) == ["block.table"]
    assert "block.position" in named.skipped
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(
        named.model(x),
        (lambda block, table: block.linear(x) @ table[0].t() + x @ block.position[0].t())(
            named.model.block, named.layers["block.table"].forward_weight()
        )
        + named.model.experts(x),
    )
