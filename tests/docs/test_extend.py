"""The examples of docs/extend run as they stand, and pass tests of the contract as rows of its tables."""

import re

import pytest
import torch
from torch import nn

from lightning_nm import NMPattern, NMSparsifier, prune
from lightning_nm import functional as nmf
from lightning_nm.kernels import GemmKey
from lightning_nm.kernels.tuner import check
from lightning_nm.methods import Method
from lightning_nm.nn.adapters import adapter
from tests import test_contract
from tests.docs.blocks import ROOT, blocks, execute, read, section
from tests.estimators import test_gradient_estimators
from tests.nn import test_routing
from tests.support import contract, kinds
from tools import hooks

OTHER = read("extend/other.md")
PAGES = {
    "method": read("extend/method.md"),
    "estimator": section(OTHER, "A gradient estimator"),
    "kernel": section(OTHER, "A kernel"),
    "adapter": section(OTHER, "An adapter"),
}
TABLES = (contract.METHODS, contract.ESTIMATORS, kinds.KINDS)


@pytest.fixture(autouse=True)
def _tables_as_they_were(monkeypatch):
    """What the examples register is known within a test alone."""
    monkeypatch.setattr(adapter, "_ADAPTERS", list(adapter._ADAPTERS))
    monkeypatch.setattr(adapter, "_CLASSES", {})
    monkeypatch.setattr(contract, "KERNEL", contract.KERNEL)
    before = [dict(table) for table in TABLES]
    yield
    for table, rows in zip(TABLES, before, strict=True):
        table.clear()
        table.update(rows)


@pytest.mark.parametrize("page", PAGES)
def test_examples_run(page):
    execute(PAGES[page])


def test_the_estimator_is_unbiased_and_n_m_along_the_tokens():
    names = execute(PAGES["estimator"])
    pattern, grad = NMPattern(2, 5), torch.randn(20, 8)
    uniform = torch.rand(1000, 1, 4, 8, generator=torch.Generator().manual_seed(0))
    estimates = torch.stack([names["RandomN"]().prune(grad, pattern, each) for each in uniform])
    assert all(nmf.is_nm(estimate, pattern, dim=0) for estimate in estimates[:100])
    error = (estimates.mean(0) - grad).abs() / (estimates.std(0) / len(estimates) ** 0.5)
    assert error.max() < 5  # standard errors, the largest of 160

    x, layer = torch.randn(12, 16), names["layer"]
    layer(x).square().sum().backward()
    exact = 2 * layer(x).T @ x
    assert not torch.allclose(layer.weight.grad, exact)  # an estimate
    assert torch.allclose(layer.bias.grad, 2 * layer(x).sum(0), atol=1e-4)  # and the exact dY


def test_the_kernel_computes_what_dense_gemms_do():
    names = execute(PAGES["kernel"])
    kernel, model = names["CooKernel"](), names["model"]
    for dtype in (torch.float32, torch.float64):
        for gemm in ("forward", "dgrad", "wgrad"):
            assert check(kernel, GemmKey(gemm, 48, 64, 24, dtype, NMPattern(1, 8), "cpu")) == ""
    used = {(each.product.key.gemm, each.kernel) for each in names["router"].used()}
    assert used == {("forward", "coo"), ("dgrad", "coo"), ("wgrad", "coo")}
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for layer in names["sparsifier"].layers.values():
        layer.draw_noise(layer.noise.draws)
    model(names["x"]).square().mean().backward()
    for sparse, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(sparse, parameter.grad)


def test_the_adapter_computes_with_the_masked_weight():
    """It trains as the ordinary layer with the masked weight, and is the ordinary one at the end."""
    gated = execute(PAGES["adapter"].partition("The contract of methods")[0])["Gated"]
    model = nn.Sequential(gated(16, 32), nn.Tanh(), nn.Linear(32, 4))
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    assert list(sparsifier.layers) == ["0"]

    x = torch.randn(8, 16)
    weight = model.state_dict()["0.weight"].clone().requires_grad_()
    gate = model[0].gate.detach().clone().requires_grad_()
    plain = nn.functional.linear(x, weight) * gate
    torch.testing.assert_close(model[0](x), plain)
    plain.square().sum().backward()
    model[0](x).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, weight.grad)  # straight through
    torch.testing.assert_close(model[0].gate.grad, gate.grad)

    sparsifier.bake()
    sparsifier.detach()
    assert type(model[0]) is gated
    assert nmf.is_nm(model[0].weight, "2:4")
    assert prune(model, "1:4", "wanda", [x], include="0").layers == ["0"]


CONTRACTS = {
    "method": lambda: [
        test_contract.test_trains_sparse_and_leaves_no_trace("lazy", "linear", "2:4"),
        test_contract.test_state_round_trip_is_exact("lazy", "linear", "adamw"),
    ],
    "estimator": lambda: [
        test_gradient_estimators.test_blocks_lie_along_tokens_and_are_padded_with_zeros(
            "random-n", 6
        ),
        test_gradient_estimators.test_what_is_not_finite_stays_visible("random-n", float("nan")),
    ],
    "kernel": lambda: test_routing.test_the_same_numbers("bi-mask", "linear", "3:8"),
    "adapter": lambda: [
        test_contract.test_gradients_follow_the_formulas("bi-mask", "gated"),
        test_routing.test_the_same_numbers("bi-mask", "gated", "2:4"),
    ],
}


@pytest.mark.parametrize("page", PAGES)
def test_contracts(page):
    """The module that pytest loads with ``-p``, on some of the tests that the command runs."""
    example, *others = blocks("python", PAGES[page])
    (rows,) = (block for block in others if "# from my_package" in block)
    exec(example + rows, {})
    CONTRACTS[page]()
    (command,) = (
        block for block in blocks("", PAGES[page]) if block.startswith("python -m pytest ")
    )
    plugin, files = re.fullmatch(r"python -m pytest -p (\w+) (.+) -k [\w-]+\n", command).groups()
    assert f"`{plugin}.py`" in PAGES[page]
    assert all((ROOT / file).is_file() for file in files.split())


def test_the_masks_of_the_method_move_when_it_says():
    lazy = execute(PAGES["method"])["LazyMask"]
    model = nn.Linear(32, 64)
    sparsifier = NMSparsifier(model, "2:4", lazy(every=4), skip_first_last=False).attach()
    layer = sparsifier.layers["weight"]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.register(optimizer)
    moved = []
    for step in range(1, 13):
        before = layer.forward_mask.clone()
        optimizer.zero_grad()
        model(torch.randn(64, 32)).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        if not torch.equal(layer.forward_mask, before):
            moved.append(step)
    assert moved == [4, 8, 12]
    assert sparsifier.violations() == 0


def test_hooks_of_a_method_are_listed_as_they_are():
    assert hooks.PAGE.read_text(encoding="utf-8") == hooks.page(), "run `python -m tools.hooks`"
    listed = {signature.partition("(")[0] for _, signature, _ in hooks.hooks()}
    attributes = {name for name, *_ in hooks.attributes()}
    public = {name for name in dir(Method) if not name.startswith("_")}
    assert listed | attributes == public - hooks.DERIVED
    assert all(section and meaning for section, _, meaning in hooks.hooks())
    # A method from outside the package must fit on a page, and so must all that it may define.
    assert len(listed) <= 24
    assert len(attributes) <= 10
    assert len(PAGES["method"].splitlines()) <= 90
    assert len(blocks("python", PAGES["method"])[0].splitlines()) < 60
