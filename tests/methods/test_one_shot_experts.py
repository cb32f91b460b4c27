"""prune() of mixtures of experts: each expert is calibrated by the tokens that reach it."""

import copy

import pytest
import torch
from torch import nn

from lightning_nm import prune
from lightning_nm.functional import is_nm, magnitude_mask
from lightning_nm.functional.calibrated import sparsegpt, wanda_mask
from lightning_nm.nn import register_experts
from tests.support.experts import EXPERTS, WIDTH, Experts, TransposedExperts


class Mixture(nn.Module):
    """Tokens go to the expert of their largest of the first features, of which `most` have experts."""

    def __init__(self, kind=Experts, most=EXPERTS):
        super().__init__()
        self.experts, self.most, self.calls = kind(), most, 0

    def chosen(self, x):
        return x[:, : self.most].argmax(1)

    def forward(self, x):
        self.calls += 1
        return self.experts(x, self.chosen(x))


def batches(number=3):
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(WIDTH, WIDTH, generator=generator)
    return [torch.randn(48, WIDTH, generator=generator) @ mixing for _ in range(number)]


def matrices(experts, name):
    """``[experts, out, in]``."""
    weight = getattr(experts, name).detach()
    return weight.mT if experts.transposed else weight


@pytest.mark.parametrize("score", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("kind", [Experts, TransposedExperts])
def test_each_expert_is_calibrated_by_its_tokens(kind, score):
    torch.manual_seed(0)
    model = Mixture(kind)
    twin, data = copy.deepcopy(model), batches()
    result = prune(model, "2:4", score, data)
    assert result.layers == ["experts.up", "experts.down"]
    assert not result.uncalibrated
    assert type(model.experts) is kind
    x = torch.cat(data)
    errors = {"up": [0.0, 0.0], "down": [0.0, 0.0]}
    for expert in range(EXPERTS):
        given = x[model.chosen(x) == expert].double()
        for name in ("up", "down"):
            weight = matrices(twin.experts, name)[expert].double()
            expected = {
                "magnitude": lambda w, x: torch.where(magnitude_mask(w, "2:4", dim=1), w, 0),
                "wanda": lambda w, x: torch.where(wanda_mask(w, x.norm(dim=0), "2:4"), w, 0),
                "sparsegpt": lambda w, x: sparsegpt(w, x.t() @ x, "2:4"),
            }[score](weight, given)
            found = matrices(model.experts, name)[expert].double()
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-4)
            assert is_nm(found, "2:4")
            errors[name][0] += float((given @ (weight - found).t()).square().sum())
            errors[name][1] += float((given @ weight.t()).square().sum())
            given = (given @ found.t()).relu()
    for name, (lost, whole) in errors.items():
        assert result.errors[f"experts.{name}"] == pytest.approx((lost / whole) ** 0.5, rel=1e-3)


@pytest.mark.filterwarnings("ignore:score='sparsegpt' has fewer")
def test_statistics_take_no_more_memory_than_the_weight(monkeypatch):
    """One expert's matrix at least; the passes over the data tell how many were summed at a time."""
    torch.manual_seed(0)
    model, data = Mixture(), batches(2)
    twin = copy.deepcopy(model)
    sizes, zeros = [], torch.zeros

    def counted(*shape, **options):
        made = zeros(*shape, **options)
        if options.get("dtype") == torch.float64:
            sizes.append(made.nbytes)
        return made

    monkeypatch.setattr("lightning_nm.methods.calibration.torch.zeros", counted)
    prune(model, "2:4", "sparsegpt", data)
    up, down = model.experts.up, model.experts.down
    assert (up.shape, down.shape) == ((4, 32, 16), (4, 16, 32))
    assert sizes == [
        4 * 16 * 16 * 8,
        *[32 * 32 * 8] * 4,
    ]  # down: one expert's matrix takes as much as the weight
    assert sizes[0] <= up.nbytes
    assert model.calls == 2 + 2 * (1 + 4)
    monkeypatch.undo()
    whole = copy.deepcopy(twin)
    monkeypatch.setattr("lightning_nm.methods.calibration.max", lambda *_: EXPERTS, raising=False)
    prune(whole, "2:4", "sparsegpt", data)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    )


def test_experts_without_tokens_are_pruned_by_magnitude_and_named():
    torch.manual_seed(0)
    model = Mixture(most=2)
    before = model.experts.up.detach().clone()
    message = r"not all experts or groups of 2 layers, such as \[2, 3\] of 'experts.up'.* magnitude"
    with pytest.warns(UserWarning, match=message):
        result = prune(model, "2:4", "sparsegpt", batches())
    assert result.uncalibrated == {"experts.up": [2, 3], "experts.down": [2, 3]}
    expected = torch.where(magnitude_mask(before, "2:4", dim=2), before, 0)
    assert torch.equal(model.experts.up[2:], expected[2:])
    assert not torch.equal(model.experts.up[:2], expected[:2])


def test_a_product_that_is_not_known_is_refused():
    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 16, 16))

        def forward(self, x):
            return (self.weight * x).sum(-1)

    register_experts(Squares)
    model = Squares()
    before = model.weight.detach().clone()
    message = "forward of Squares did not multiply by 'weight' with .*nm_grouped_linear"
    with pytest.raises(RuntimeError, match=message):
        prune(model, "2:4", "wanda", [torch.randn(16)])
    assert type(model) is Squares
    assert torch.equal(model.weight, before)
    assert not model._forward_hooks
    prune(model, "2:4")
    assert is_nm(model.weight, "2:4", dim=2)


@pytest.mark.slow
def test_mixtral():
    pytest.importorskip("transformers")
    from tests.support.hf_models import data, mixtral, new

    results = {}
    for score in ("magnitude", "sparsegpt"):
        model = new(mixtral)
        calibration = [{"input_ids": torch.stack([each["input_ids"] for each in data(model, 128)])}]
        results[score] = prune(model, "2:4", score, calibration)
        assert not results[score].uncalibrated
        assert is_nm(model.model.layers[0].mlp.experts.gate_up_proj, "2:4", dim=2)
    names = [name for name in results["sparsegpt"].layers if ".experts." in name]
    assert len(names) == 4
    assert all(
        results["sparsegpt"].errors[name] < results["magnitude"].errors[name] for name in names
    )


class ByBatch(nn.Module):
    """Modules of which a batch calls one or two, one of them twice."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 8)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        for k in x[0, :3].nonzero().flatten().tolist():
            x = x + self.experts[k](x)
            if k == 1 and x[0, 1] > 2:
                x = x + self.experts[k](x)
        return self.out(x)


@pytest.mark.parametrize("score", ["wanda", "sparsegpt"])
def test_each_of_a_list_of_experts_is_calibrated_by_all_batches_that_call_it(score):
    torch.manual_seed(0)
    model, data = ByBatch(), [torch.randn(24, 16) for _ in range(4)]
    for x, first in zip(data, ([1, 0, 0], [0, 1, 0], [0, 3, 1], [1, 0, 1]), strict=True):
        x[0, :3] = torch.tensor(first)
    twin = copy.deepcopy(model)
    result = prune(model, "2:4", score, data, skip_first_last=False)
    assert result.layers == ["experts.0", "experts.1", "experts.2", "out"]
    for name in result.layers:
        inputs = []
        linear = twin.get_submodule(name)
        handle = linear.register_forward_pre_hook(
            lambda module, args, inputs=inputs: inputs.append(args[0])
        )
        with torch.no_grad():
            for x in data:
                twin(x)
        handle.remove()
        alone = nn.Sequential(copy.deepcopy(linear))
        (error,) = prune(
            alone, "2:4", score, [torch.cat(inputs)], skip_first_last=False
        ).errors.values()
        assert result.errors[name] == pytest.approx(error, rel=1e-4)
        assert torch.allclose(model.get_submodule(name).weight, alone[0].weight, atol=1e-5)
        linear.load_state_dict(
            alone[0].state_dict()
        )  # the layers after it see what it gives them now


def test_an_expert_that_no_batch_calls_is_named():
    with pytest.raises(
        ValueError, match=r"do not call the layers \['experts.2'\]: name them in `exclude`"
    ):
        prune(
            ByBatch(),
            "2:4",
            "wanda",
            [torch.tensor([[1.0, 1.0] + [0.0] * 14])],
            skip_first_last=False,
        )
