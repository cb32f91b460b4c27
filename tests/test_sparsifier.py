"""Without Lightning: what a plain loop may do, statistics and FLOPs."""

import math

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from lightning_nm import ASP, SRSTE, BiMask, NMSparsifier
from lightning_nm import functional as nmf
from lightning_nm.methods import bi_mask
from lightning_nm.training.watch import STEPS_WITHOUT_END
from tests.support.loop import Loop, adamw, mlp, sgd
from tests.support.outside import ScaledMask


def network():
    return mlp(16, 32, 32, 1)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda s, _: s.step(), RuntimeError, r"call sparsifier.register\(optimizer\)"),
        (lambda s, optimizer: s.before_step(optimizer), RuntimeError, "not registered"),
        (lambda s, _: s.register("sgd"), TypeError, r"str is not a torch.optim.Optimizer"),
        (
            lambda s, _: NMSparsifier(network(), "2:4", "bame").attach(),
            ValueError,
            r"BAME's stop=0\.66 is a fraction.*pass planned_steps to NMSparsifier",
        ),
    ],
)
def test_what_is_forgotten_is_named(call, error, words):
    sparsifier = NMSparsifier(network(), method="bi-mask").attach()
    with pytest.raises(error, match=words):
        call(sparsifier, sgd(sparsifier.model.parameters()))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_moves_nothing(fused):
    """A fused optimizer is called even then, and skips its step by itself. No call of the loop is missed."""
    loop = Loop(network(), optimizer=lambda p: torch.optim.AdamW(p, 0.1, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(2 * STEPS_WITHOUT_END):
        loop.optimizer.zero_grad()
        loss = loop.model(loop.batch()).square().mean()
        scaler.scale(loss * (math.inf if number % 2 else 1)).backward()
        loop.sparsifier.before_step(loop.optimizer, scaler.get_scale())
        scaler.step(loop.optimizer)
        scaler.update()
        assert loop.sparsifier.step() == (number % 2 == 0)
        assert loop.layers["0"].step == number // 2 + 1
    loop.end()


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's, it is an optimizer by type alone: its base class is not initialised."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, closure=None):
        return self.optimizer.step(closure)

    def zero_grad(self):
        self.optimizer.zero_grad()

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def test_the_optimizer_within_wrappers_is_followed():
    weights = []
    for wrap in (sgd, lambda p: Wrapper(sgd(p)), lambda p: Wrapper(Wrapper(sgd(p)))):
        loop = Loop(network(), optimizer=wrap)
        loop.sparsifier.register(loop.optimizer)
        loop.train(range(3))
        assert not loop.sparsifier.training.unowned()
        assert loop.sparsifier.clock == loop.layers["0"].step == 3
        weights.append(loop.model[0].weight)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("when", ["between steps", "within a step"])
@pytest.mark.parametrize("method", ["sr-ste", "asp"])
def test_parameters_that_join_an_optimizer_are_part_of_its_next_step(method, when):
    loop = Loop(mlp(16, 16, 16), method, optimizer=lambda p: sgd([*p][:2]))
    joining = {"params": list(loop.model[2].parameters())}
    loop.train([0])
    assert loop.sparsifier.training.unowned() == ["2"]
    if when == "between steps":
        loop.optimizer.add_param_group(joining)
    loop.backward()
    loop.sparsifier.before_step(loop.optimizer)
    if when == "within a step":
        loop.optimizer.add_param_group(joining)
    loop.optimizer.step()
    loop.sparsifier.step()
    assert loop.sparsifier.training.unowned() == []
    assert [layer.step for layer in loop.layers.values()] == [2, 1]
    assert loop.sparsifier.violations() == 0
    if method == "sr-ste":
        for layer in loop.layers.values():
            assert torch.equal(layer.forward_mask, nmf.nm_mask(layer.weight.abs(), "2:4"))


def test_own_parameters_leave_the_optimizer_again():
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1)
    for _ in range(2):
        loop = Loop(model, ScaledMask(), optimizer=lambda _: optimizer)
        (group,) = optimizer.param_groups
        assert len(group["params"]) == len(group["param_names"]) == 9
        loop.sparsifier.detach()
        assert len(group["params"]) == len(group["param_names"]) == 6


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_decays_and_penalties_mean_the_same_on_scaled_gradients(loss_scale):
    loop = Loop(network(), SRSTE(0.5))
    layer = loop.layers["2"]
    layer.weight.grad = loss_scale * torch.ones_like(layer.weight)
    loop.sparsifier.before_step(loop.optimizer, loss_scale)
    expected = 1 + 0.5 * torch.where(layer.forward_mask, 0, layer.weight.detach())
    torch.testing.assert_close(layer.weight.grad / loss_scale, expected)

    loop = Loop(network(), ScaledMask(strength=0.1))
    scale = loop.layers["2"].parameters["scale"]
    scale.grad = torch.tensor(3.0 * loss_scale)
    loop.sparsifier.before_step(loop.optimizer, loss_scale)
    assert scale.grad.item() / loss_scale == pytest.approx(3 + 0.1 * 2 * (1.5 - 1))


def test_asp_takes_the_mask_of_a_sparse_model():
    model = network()
    with pytest.raises(
        ValueError, match=r"layer '0' is not 2:4 sparse, so init='zeros'.*4 nonzeros of 4\. Give"
    ):
        NMSparsifier(model, "2:4", ASP(init="zeros")).attach()
    with torch.no_grad():
        for layer in model[0], model[2]:
            layer.weight.copy_(nmf.nm_prune(layer.weight, "2:4"))
        model[0].weight[0] = 0  # fewer than N in these blocks
    before = model[0].weight.detach().clone()
    Loop(model, ASP(init="zeros"), optimizer=adamw, skip_first_last=True).train(range(3))
    assert torch.equal(model[0].weight == 0, before == 0)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (ASP, {"start": 3, "init": "zeros"}, "start must be 0, not 3"),
        (ASP, {"init": "ones"}, "init='ones'"),
        (BiMask, {"permute_every": 0}, "permute_every=0"),
        (BiMask, {"candidates": 0}, "candidates=0"),
        (BiMask, {"search": "greedy"}, "search='greedy'"),
        (BiMask, {"criterion": "l2"}, "criterion='l2'"),
        (BiMask, {"decay": -1.0}, "decay=-1.0"),
    ],
)
def test_bad_method_options(method, options, message):
    with pytest.raises(ValueError, match=message):
        method(**options)


@pytest.fixture
def searches(monkeypatch):
    """Of each search of a permutation, whether it started from another one."""
    calls = []
    search = bi_mask.search_permutation

    def spy(*args, **options):
        calls.append(options["initial"] is not None)
        return search(*args, **options)

    monkeypatch.setattr(bi_mask, "search_permutation", spy)
    return calls


def test_bi_mask_searches_its_permutation_every_so_often(searches):
    """Each search starts from the permutation before it."""
    loop = Loop(network(), BiMask(permute_every=3), include="2")
    counts = []
    for number in range(7):
        loop.train([number])
        counts.append(len(searches))
    assert counts == [1, 1, 2, 2, 2, 3, 3]
    assert searches == [False, True, True]
    loop.optimizer.zero_grad()
    for _ in range(4):  # the multiple of 3 is not missed by the masks, which move later
        loop.optimizer.step()
    loop.sparsifier.step()
    assert len(searches) == 4


def test_a_state_given_to_attach_spares_the_searches(searches):
    first = Loop(network(), "bi-mask", skip_first_last=True)
    assert len(searches) == 2
    states = first.save()
    second = Loop(network(), "bi-mask", skip_first_last=True, state=states[1])
    second.load(states)
    assert len(searches) == 2
    for name, layer in second.layers.items():
        assert torch.equal(layer.masks.bits, first.layers[name].masks.bits)
        assert torch.equal(layer.masks.permutation, first.layers[name].masks.permutation)


# -------------------------------------------------------------------------------------------------------- statistics


def test_statistics_against_their_definitions():
    loop = Loop(network(), BiMask(decay=0), optimizer=lambda p: torch.optim.SGD(p, 1.0))
    layer = loop.layers["2"]
    old = layer.forward_mask.clone()
    for parameter in loop.model.parameters():
        parameter.grad = 0.1 * torch.randn_like(parameter)
    loop.step()
    each, total = loop.sparsifier.layer_stats(), loop.sparsifier.stats()
    stats, new, weight = each["2"], layer.forward_mask, layer.weight.detach()
    assert stats["flip_rate"] == (old ^ new).float().mean().item() > 0
    assert stats["density"] == 0.5
    overlap = (layer.masks.backward.sum() / new.sum()).item()
    assert stats["overlap"] == pytest.approx(overlap)
    assert 0.7 < overlap < 1
    kept = (weight[new].abs().sum() / weight.abs().sum()).item()
    assert stats["kept_magnitude"] == pytest.approx(kept)
    sizes = {name: one.weight.numel() for name, one in loop.layers.items()}
    for key in ("flip_rate", "density"):
        expected = sum(each[name][key] * size for name, size in sizes.items()) / sum(sizes.values())
        assert total[key] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "expected", "wgrad"),
    [
        ("dense", 1, 1),
        ("ste", 5 / 6, 1),
        ("sr-ste", 5 / 6, 1),
        ("asp", 5 / 6, 0.5),
        ("bi-mask", 2 / 3, 1),
    ],
)
def test_flops_of_a_fully_masked_model(method, expected, wgrad):
    """By the papers' accounting, by what is N:M along the summed axis, and by the nonzeros of both weights."""
    loop = Loop(mlp(16, 32, 32), method)
    loop.model(loop.batch())
    ratios = loop.sparsifier.flops_ratios()
    assert ratios["paper"] == pytest.approx(expected)
    assert ratios["eligible"] == pytest.approx(expected)
    used = total = 0
    for layer in loop.layers.values():
        total += 3 * layer.weight.numel()
        used += wgrad * layer.weight.numel()
        used += sum(w.count_nonzero() for w in (layer.forward_weight(), layer.backward_weight()))
    assert ratios["arithmetic"] == pytest.approx(float(used / total))


def test_flops_count_dense_layers_and_dense_phases():
    loop = Loop(network(), ASP(start=2), shape=(4, 16), include="2")
    loop.model(loop.batch())
    assert loop.sparsifier.macs == {"0": 4 * 16 * 32, "2": 4 * 32 * 32, "4": 4 * 32}
    share = 32 * 32 / (16 * 32 + 32 * 32 + 32)
    assert loop.sparsifier.shares()["flops"] == pytest.approx(share)
    loop.train(range(4))
    sparse = 1 - share / 6
    assert loop.sparsifier.flops_ratios()["eligible"] == pytest.approx(sparse)
    # the masks exist from the end of step 2 on
    mean = loop.sparsifier.flops_ratios(mean=True)["eligible"]
    assert mean == pytest.approx((2 + 2 * sparse) / 4)


class Part(nn.Sequential):
    """Torch 2.6 compiles none of its own containers in place."""

    def forward(self, x):
        for part in self:
            x = part(x)
        return x


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_of_which_parts_are_compiled_is_counted_by_its_weights(wrapped):
    """A compiled part is not seen: the rest alone would give wrong ratios. Its graph is not made again."""
    torch.compiler.reset()
    block, counter = Part(*mlp(16, 32, 16)), CompileCounter()
    model = nn.Sequential(nn.Linear(16, 16), block, nn.Linear(16, 16))
    if wrapped:
        model[1] = torch.compile(block, backend=counter)
    else:
        block.compile(backend=counter)
    loop = Loop(model, include="0")
    graphs = []
    for number in range(3):
        loop.train([number])
        assert loop.sparsifier.training.unseen() == []
        assert "flops" not in loop.sparsifier.shares()
        # Of all weights a sixth is masked, of those that are seen a half.
        assert loop.sparsifier.flops_ratios()["eligible"] == pytest.approx(1 - 1 / 36)
        graphs.append(counter.frame_count)
    assert 0 < graphs[0] == graphs[-1]
    loop.end()
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_no_batch_reached_are_unseen_in_a_compiled_model_too():
    parts = {"used": nn.Linear(16, 16), "idle": nn.Linear(16, 16), "block": network()}
    model = nn.ModuleDict(parts)
    model["block"].compile(backend="eager")
    sparsifier = NMSparsifier(model, "2:4", "bi-mask", skip_first_last=False).attach()
    model["used"](torch.randn(4, 16))
    assert sparsifier.training.unseen() == ["idle"]
