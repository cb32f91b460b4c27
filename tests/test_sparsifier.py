"""Without Lightning: a plain loop, Fabric, statistics and FLOPs."""

import copy

import lightning as L
import pytest
import torch
from torch import nn

from lightning_nm import ASP, SRSTE, BiMask, GradientEstimator, NMPattern, NMSparsifier
from lightning_nm import functional as nmf
from tests.support.outside import ScaledMask


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=generator)
    return x, (x[:, :4].sum(1, keepdim=True) > 0).float()


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    )


def test_a_plain_training_loop():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", "bi-mask").attach()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    sparsifier.register(optimizer)
    x, y = data()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        loss.backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        losses.append(loss.item())
    sparsifier.bake()
    sparsifier.detach()

    assert losses[-1] < 0.3 * losses[0]
    assert nmf.is_nm(model[0].weight, "2:4")
    assert nmf.is_nm(model[2].weight, "2:4")
    assert not nmf.is_nm(model[4].weight, "2:4"), "the last linear layer stays dense"


def test_a_fabric_loop():
    fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    raw = network()
    sparsifier = NMSparsifier(raw, "1:4", "sr-ste").attach()
    raw_optimizer = torch.optim.SGD(raw.parameters(), 0.1, momentum=0.9)
    sparsifier.register(raw_optimizer)
    model, optimizer = fabric.setup(raw, raw_optimizer)
    x, y = data()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
        fabric.backward(loss)
        sparsifier.before_step(raw_optimizer)
        optimizer.step()
        sparsifier.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert sparsifier.layers["0"].step == 30
    assert nmf.is_nm(raw.state_dict()["0.weight"], "1:4")


def test_what_is_forgotten_is_named():
    model = network()
    sparsifier = NMSparsifier(model).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"call sparsifier.register\(optimizer\)"):
        sparsifier.step()
    with pytest.raises(RuntimeError, match="not registered"):
        sparsifier.before_step(optimizer)
    with pytest.raises(TypeError, match=r"str is not a torch.optim.Optimizer"):
        sparsifier.register("sgd")


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_grad_scaler_skips_moves_nothing(fused):
    """A fused optimizer is called even then, and skips its step by itself."""
    model = network()
    sparsifier = NMSparsifier(model, method="sr-ste").attach()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=fused)
    sparsifier.register(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = data()
    for factor, steps in ((1.0, 1), (float("inf"), 1), (1.0, 2)):
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean() * factor).backward()
        sparsifier.before_step(optimizer, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        assert sparsifier.step() == (factor == 1.0)
        assert sparsifier.layers["0"].step == steps


def test_statistics_against_their_definitions():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", BiMask(decay=0)).attach()
    layer = sparsifier.layers["2"]
    old = layer.forward_mask.clone()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    sparsifier.register(optimizer)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = 0.1 * torch.randn_like(parameter)
    optimizer.step()
    sparsifier.step()
    stats = sparsifier.layer_stats()["2"]
    new, backward = layer.forward_mask, layer.masks.backward
    assert stats["flip_rate"] == (old ^ new).float().mean().item() > 0
    assert stats["density"] == 0.5
    assert stats["overlap"] == pytest.approx((backward.sum() / new.sum()).item())
    assert 0.7 < stats["overlap"] < 1
    weight = layer.weight.detach()
    assert stats["kept_magnitude"] == pytest.approx(
        (weight[new].abs().sum() / weight.abs().sum()).item()
    )
    both, total = sparsifier.layer_stats(), sparsifier.stats()
    sizes = {name: one.weight.numel() for name, one in sparsifier.layers.items()}
    for key in ("flip_rate", "density"):
        expected = sum(both[name][key] * size for name, size in sizes.items()) / sum(sizes.values())
        assert total[key] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("method", "paper", "eligible"),
    [
        ("dense", 1, 1),
        ("ste", 5 / 6, 5 / 6),
        ("sr-ste", 5 / 6, 5 / 6),
        ("asp", 5 / 6, 5 / 6),
        ("bi-mask", 2 / 3, 2 / 3),
    ],
)
def test_flops_of_a_fully_masked_model(method, paper, eligible):
    model = network()[:4]
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    model(torch.randn(4, 16))
    sparsifier.stats()
    ratios = sparsifier.flops_ratios()
    assert ratios["paper"] == pytest.approx(paper)
    assert ratios["eligible"] == pytest.approx(eligible)
    counts = [
        torch.count_nonzero(w) / w.numel()
        for layer in sparsifier.layers.values()
        for w in (layer.forward_weight(), layer.backward_weight())
    ]
    arithmetic = {"dense": 1, "ste": 2 / 3, "sr-ste": 2 / 3, "asp": 0.5}
    if method == "bi-mask":
        macs = [16 * 32, 16 * 32, 32 * 32, 32 * 32]
        expected = (sum(m * c for m, c in zip(macs, counts, strict=True)) + sum(macs) / 2) / (
            1.5 * sum(macs)
        )
        assert ratios["arithmetic"] == pytest.approx(expected.item())
    else:
        assert ratios["arithmetic"] == pytest.approx(arithmetic[method])


def test_flops_count_dense_layers_and_dense_phases():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", ASP(start=2), include="2").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    model(torch.randn(4, 16))
    assert sparsifier.macs == {"0": 4 * 16 * 32, "2": 4 * 32 * 32, "4": 4 * 32}
    share = 32 * 32 / (16 * 32 + 32 * 32 + 32)
    assert sparsifier.shares()["flops"] == pytest.approx(share)
    for _ in range(4):
        optimizer.step()
        sparsifier.step()
    sparse = 1 - share / 6
    assert sparsifier.flops_ratios()["eligible"] == pytest.approx(sparse)
    # the masks exist from the end of step 2 on
    assert sparsifier.flops_ratios(mean=True)["eligible"] == pytest.approx((2 + 2 * sparse) / 4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_of_which_parts_are_compiled_is_counted_by_its_weights(wrapped):
    """A compiled part is not seen: the rest alone would give wrong ratios. Its graph is not made anew."""
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    block, counter = network(), CompileCounter()
    model = nn.Sequential(nn.Linear(16, 16), block, nn.Linear(1, 16))
    if wrapped:
        model[1] = torch.compile(block, backend=counter)
    else:
        block.compile(backend=counter)
    sparsifier = NMSparsifier(model, "2:4").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    expected, graphs = sparsifier.flops_ratios(), []
    for _ in range(3):
        model(torch.randn(4, 16)).sum().backward()
        assert sparsifier.training.unseen() == []
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        assert "flops" not in sparsifier.shares()
        assert sparsifier.flops_ratios() == expected
        graphs.append(counter.frame_count)
    assert expected["eligible"] < 1
    assert 0 < graphs[0] == graphs[-1]
    sparsifier.bake()
    sparsifier.detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_layers_that_no_batch_reached_are_unseen_in_a_compiled_model_too():
    model = nn.ModuleDict(
        {"used": nn.Linear(16, 16), "idle": nn.Linear(16, 16), "block": network()}
    )
    model["block"].compile(backend="eager")
    sparsifier = NMSparsifier(model, "2:4", skip_first_last=False).attach()
    model["used"](torch.randn(4, 16))
    assert sparsifier.training.unseen() == ["idle"]


class Halve(GradientEstimator):
    """Uses every second token, twice: an estimator from outside."""

    def estimate(self, layer, grad, seed):
        scale = torch.zeros(grad.shape[0], 1, dtype=grad.dtype)
        scale[::2] = 2
        return grad * scale

    def pattern_of(self, layer):
        return NMPattern(1, 2)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_an_estimator_enters_the_weight_gradient_alone(kind):
    torch.manual_seed(0)
    module = nn.Linear(8, 8) if kind == "linear" else nn.Conv2d(8, 8, 3, padding=1)
    x = torch.randn((6, 8) if kind == "linear" else (2, 8, 3, 4), requires_grad=True)

    def gradients(estimator):
        model = nn.Sequential(module)
        sparsifier = NMSparsifier(model, "2:4", "dense", estimator, skip_first_last=False).attach()
        model.zero_grad()
        y = model(x)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        dx, dw, db = torch.autograd.grad(y, [x, module.weight, module.bias], dy)
        gemms = sparsifier.layers["0"].gemms()
        sparsifier.detach()
        return dy, dx, dw, db, gemms

    dy, dx, _, db, _ = gradients(None)
    _, dx2, dw2, db2, gemms = gradients(Halve())
    assert torch.equal(dx, dx2)
    assert torch.equal(db, db2)
    assert gemms.wgrad.label == "1:2"
    halved = dy.movedim(1, -1).flatten(0, -2).clone()
    halved[1::2] = 0
    halved = (2 * halved).view(dy.movedim(1, -1).shape).movedim(-1, 1)
    (expected,) = torch.autograd.grad(module(x), module.weight, halved)
    torch.testing.assert_close(dw2, expected)


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
    sparsifier = NMSparsifier(model, "2:4", ASP(init="zeros")).attach()
    before = model[0].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    sparsifier.register(optimizer)
    x, y = data()
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    assert torch.equal(model[0].weight == 0, before == 0)
    assert not torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ASP(start=-1), "start=-1"),
        (lambda: ASP(start=3, init="zeros"), "start must be 0, not 3"),
        (lambda: ASP(init="ones"), "init='ones'"),
        (lambda: BiMask(permute_every=0), "permute_every=0"),
        (lambda: BiMask(candidates=0), "candidates=0"),
        (lambda: BiMask(search="greedy"), "search='greedy'"),
        (lambda: BiMask(criterion="l2"), "criterion='l2'"),
        (lambda: BiMask(decay=-1.0), "decay=-1.0"),
    ],
)
def test_bad_method_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bi_mask_searches_its_permutation_every_so_often(monkeypatch):
    from lightning_nm.methods import bi_mask

    calls = []
    search = bi_mask.search_permutation

    def spy(*args, **kwargs):
        calls.append(kwargs["initial"] is not None)
        return search(*args, **kwargs)

    monkeypatch.setattr(bi_mask, "search_permutation", spy)
    model = network()
    sparsifier = NMSparsifier(model, "2:4", BiMask(permute_every=3), include="2").attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    counts = []
    for _ in range(7):
        optimizer.step()
        sparsifier.step()
        counts.append(len(calls))
    assert counts == [1, 1, 2, 2, 2, 3, 3]
    assert calls == [False, True, True], "a later search starts from the current permutation"
    for _ in range(
        4
    ):  # several optimizer steps before the masks move: the multiple of 3 is not missed
        optimizer.step()
    sparsifier.step()
    assert len(calls) == 4


def one_step(model, sparsifier, optimizer, seed=0):
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    sparsifier.before_step(optimizer)
    optimizer.step()
    sparsifier.step()


def test_parameters_that_join_an_optimizer_are_followed():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", "sr-ste").attach()
    optimizer = torch.optim.SGD(model[0].parameters(), 1.0)
    sparsifier.register(optimizer)
    one_step(model, sparsifier, optimizer)
    assert sparsifier.training.unowned() == ["2"]
    optimizer.add_param_group({"params": list(model[2].parameters())})
    one_step(model, sparsifier, optimizer, seed=1)
    assert sparsifier.training.unowned() == []
    assert [layer.step for layer in sparsifier.layers.values()] == [2, 1]
    for layer in sparsifier.layers.values():
        assert torch.equal(layer.forward_mask, nmf.nm_mask(layer.weight.detach().abs(), "2:4"))


@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_decay_means_the_same_on_scaled_gradients(loss_scale):
    model = network()
    sparsifier = NMSparsifier(model, "2:4", SRSTE(0.5)).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    layer = sparsifier.layers["2"]
    layer.weight.grad = loss_scale * torch.ones_like(layer.weight)
    sparsifier.before_step(optimizer, loss_scale)
    expected = 1 + 0.5 * torch.where(layer.forward_mask, 0, layer.weight.detach())
    torch.testing.assert_close(layer.weight.grad / loss_scale, expected)


def test_a_penalty_adds_its_gradient():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", ScaledMask(strength=0.1)).attach()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.register(optimizer)
    scale = sparsifier.layers["2"].parameters["scale"]
    scale.grad = torch.tensor(3.0)
    sparsifier.before_step(optimizer)
    assert scale.grad.item() == pytest.approx(3 + 0.1 * 2 * (1.5 - 1))


def test_own_parameters_leave_the_optimizer_again():
    model = network()
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1)
    for _ in range(2):
        sparsifier = NMSparsifier(model, "2:4", ScaledMask()).attach()
        sparsifier.register(optimizer)
        (group,) = optimizer.param_groups
        assert len(group["params"]) == len(group["param_names"]) == 8
        sparsifier.detach()
        assert len(group["params"]) == len(group["param_names"]) == 6


def test_flops_of_a_model_whose_batches_are_not_seen():
    model = network()
    sparsifier = NMSparsifier(model, "2:4", "ste", include="2").attach()
    share = 32 * 32 / (16 * 32 + 32 * 32 + 32)
    assert sparsifier.flops_ratios()["eligible"] == pytest.approx(1 - share / 6)


@pytest.mark.parametrize("method", ["asp", "ste"])
def test_parameters_that_join_an_optimizer_after_before_step_are_part_of_the_step(method):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False).attach()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.1)
    sparsifier.register(optimizer)
    model(torch.randn(8, 16)).square().mean().backward()
    sparsifier.before_step(optimizer)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    optimizer.step()
    sparsifier.step()
    assert [layer.step for layer in sparsifier.layers.values()] == [1, 1]
    assert sparsifier.violations() == 0


@pytest.mark.parametrize("method", ["cast", "lbc"])
def test_a_run_that_unfroze_a_layer_resumes_with_the_state_of_its_own_parameters(method):
    """Methods own parameters of each layer, whose optimizer state is saved by position."""

    def train(model, sparsifier, optimizer, steps):
        for k in steps:
            optimizer.zero_grad()
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(k))
            model(x).square().mean().backward()
            sparsifier.before_step(optimizer)
            optimizer.step()
            sparsifier.step()

    def start(state=None, frozen=True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        model[1].requires_grad_(not frozen)
        sparsifier = NMSparsifier(model, "2:4", method, skip_first_last=False, planned_steps=20)
        sparsifier.attach(state)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        sparsifier.register(optimizer)
        return model, sparsifier, optimizer

    model, sparsifier, optimizer = start()
    train(model, sparsifier, optimizer, range(3))
    model[1].requires_grad_(True)
    sparsifier.mask_unfrozen()
    train(model, sparsifier, optimizer, range(3, 6))
    saved = copy.deepcopy([part.state_dict() for part in (model, sparsifier, optimizer)])
    resumed, again, its_optimizer = start(saved[1], frozen=False)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    its_optimizer.load_state_dict(saved[2])
    train(model, sparsifier, optimizer, range(6, 9))
    train(resumed, again, its_optimizer, range(6, 9))
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
