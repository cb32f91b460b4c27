"""A plain loop with ``storage="packed"``: the run with ``storage="dense"``, bit for bit, in less memory."""

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_nm import ASP, BAME, NMSparsifier, RigL
from lightning_nm.functional import is_nm
from lightning_nm.kernels import Router, routing
from lightning_nm.training.packing import storage_summary
from tests.support.cpu_products import needs_library
from tests.support.kinds import KINDS
from tests.support.muon import muon
from tests.support.storage_run import StorageRun

STEPS = 8
METHODS = {
    "asp": lambda: "asp",
    "asp-late": lambda: ASP(start=3),
    "bame": lambda: BAME(stop=4, every=1, budget=1.0, evidence_rate=0.5),
    "rigl": lambda: RigL(every=1, stop=4, drop=0.9),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}
# Those whose step sizes it knows.
BAME_OPTIMIZERS = ("sgd", "adamw", "adamw-fused")


def batch(step, x):
    return x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(step))


class Run(StorageRun):
    """A resumed one has loaded the states of another."""

    def __init__(self, kind, method, optimizer, storage, pattern="2:4", scale="supar"):
        make_optimizer = OPTIMIZERS[optimizer]
        super().__init__(
            kind, METHODS[method](), make_optimizer, storage, STEPS, pattern, scale=scale
        )

    def train(self, steps, first=0):
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.module(batch(step, self.x)).square().mean().backward()
            self.step()
        return self

    def saved(self):
        model = {key: value.clone() for key, value in self.module.state_dict().items()}
        return model, self.sparsifier.state_dict(), self.optimizer.state_dict()

    def resume(self, saved):
        model, sparsifier, optimizer = saved
        self.module.load_state_dict(model)
        self.sparsifier.attach(sparsifier)
        self.sparsifier.load_state_dict(sparsifier)
        self.optimizer = self.make_optimizer(self.module.parameters())
        self.sparsifier.register(self.optimizer)
        self.optimizer.load_state_dict(optimizer)
        return self

    def resume_in_another_order(self, saved):
        """The optimizer is loaded before the masks that its packed state belongs to."""
        model, sparsifier, optimizer = saved
        self.start()
        self.optimizer.load_state_dict(optimizer)
        self.module.load_state_dict(model)
        self.sparsifier.load_state_dict(sparsifier)
        return self

    @property
    def packed(self):
        return [layer for layer in self.sparsifier.layers.values() if layer.storage is not None]


def assert_equal(a, b):
    for (key, value), other in zip(
        a.module.state_dict().items(), b.module.state_dict().values(), strict=True
    ):
        assert torch.equal(value, other), key


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_trains_as_with_dense_storage(kind, pattern):
    dense = Run(kind, "asp", "adamw", "dense", pattern).start().train(STEPS)
    packed = Run(kind, "asp", "adamw", "packed", pattern).start().train(STEPS)
    assert bool(packed.packed) != kind.startswith("experts")
    assert_equal(dense, packed)
    assert dense.sparsifier.stats() == packed.sparsifier.stats()
    assert dense.sparsifier.shares() == packed.sparsifier.shares()


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [
        (method, optimizer)
        for method in METHODS
        for optimizer in (BAME_OPTIMIZERS if method in ("bame", "rigl") else OPTIMIZERS)
    ],
)
def test_every_optimizer_trains_as_with_dense_storage(method, optimizer):
    runs = [
        Run("two-weights", method, optimizer, storage).start() for storage in ("dense", "packed")
    ]
    for run in runs:
        run.train(STEPS)
    dense, packed = runs
    assert len(packed.packed) == 2
    assert_equal(dense, packed)
    # Dense states may hold what pruned entries had before pruning.
    kept = sum(layer.param.numel() for layer in packed.packed)
    for state in packed.optimizer.state.values():
        assert all(value.numel() <= kept for value in state.values())
    for run in runs:
        run.sparsifier.bake()
        run.sparsifier.detach()
        assert all(parameter.dim() <= 2 for parameter in run.module.parameters())
        # Without the sparsifier the optimizer goes on with dense weights.
        run.optimizer.zero_grad()
        run.module(run.x).square().mean().backward()
        run.optimizer.step()
        assert all(parameter.isfinite().all() for parameter in run.module.parameters())


@pytest.mark.parametrize("order", ["resume", "resume_in_another_order"])
@pytest.mark.parametrize(
    "storages", [("packed", "packed"), ("packed", "dense"), ("dense", "packed")]
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [2, 6])
def test_a_resume_is_exact_whatever_the_storage(method, storages, at, order):
    before, after = storages
    whole = Run("encoder-layer", method, "adamw", "dense").start().train(STEPS)
    saved = Run("encoder-layer", method, "adamw", before).start().train(at).saved()
    resumed = getattr(Run("encoder-layer", method, "adamw", after), order)(saved)
    resumed.train(STEPS - at, first=at)
    assert bool(resumed.packed) == (after == "packed")
    assert_equal(whole, resumed)


def test_gradients_and_states_exist_for_kept_entries_alone():
    run = Run("linear", "asp", "adamw", "packed", "1:16").start().train(2)
    weight = run.module.weight
    assert weight.shape == (64, 2, 1)
    assert weight.grad.shape == weight.shape
    assert run.optimizer.state[weight]["exp_avg"].shape == weight.shape
    assert run.optimizer.param_groups[0]["params"][0] is weight
    assert run.module.state_dict()["weight"].shape == (64, 32)
    assert is_nm(run.module.state_dict()["weight"], "1:16", dim=1)


def test_optimizer_states_of_the_dense_phase_are_packed():
    run = Run("linear", "asp-late", "adamw", "packed").start().train(3)
    assert not run.packed or run.sparsifier.clock == 3
    run.train(2, first=3)
    weight = run.module.weight
    assert weight.dim() == 3
    assert run.optimizer.state[weight]["exp_avg"].shape == weight.shape


def test_gradients_that_accumulate_while_a_weight_is_packed_are_kept():
    runs = [Run("linear", "asp", "sgd", storage) for storage in ("dense", "packed")]
    for run in runs:
        run.sparsifier.attach()
        run.module(run.x).square().mean().backward()
        run.optimizer = run.make_optimizer(run.module.parameters())
        run.sparsifier.register(run.optimizer)
        run.module(2 * run.x).square().mean().backward()
        run.sparsifier.before_step(run.optimizer)
        run.optimizer.step()
        run.sparsifier.step()
    assert_equal(*runs)


def test_other_weights_get_other_masks():
    """As with dense storage, and the weights of before come back with their masks."""
    found = []
    for storage in ("dense", "packed"):
        run = Run("linear", "asp", "adamw", storage).start().train(2)
        own = {key: value.clone() for key, value in run.module.state_dict().items()}
        torch.manual_seed(5)
        run.module.load_state_dict({key: torch.randn_like(value) for key, value in own.items()})
        other = run.module.state_dict()["weight"].clone()
        run.module.load_state_dict(own)
        assert torch.equal(run.module.state_dict()["weight"], own["weight"])
        run.train(2, first=2)
        found.append((run, other))
    (dense, other_dense), (packed, other_packed) = found
    assert torch.equal(other_dense, other_packed)
    assert_equal(dense, packed)
    assert packed.packed


def test_weights_that_fit_the_mask_are_loaded_packed():
    run = Run("linear", "asp", "adamw", "packed").start().train(2)
    own = {key: 2 * value for key, value in run.module.state_dict().items()}
    run.module.load_state_dict(own)
    assert run.packed
    assert torch.equal(run.module.state_dict()["weight"], own["weight"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_fabric(precision):
    trained = []
    for storage in ("dense", "packed"):
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), 1e-2))
        sparsifier = NMSparsifier(
            module, "1:4", "asp", skip_first_last=False, storage=storage
        ).attach()
        sparsifier.register(optimizer.optimizer)
        assert module[0].weight.dim() == (3 if storage == "packed" else 2)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
        for _ in range(4):
            optimizer.zero_grad()
            fabric.backward((model(x).float() - x).square().mean())
            sparsifier.before_step(optimizer.optimizer)
            optimizer.step()
            sparsifier.step()
        trained.append(module.state_dict())
    dense, packed = trained
    assert all(torch.equal(dense[key], packed[key]) for key in dense)


@needs_library
@pytest.mark.parametrize("kind", ["linear", "hugging-face-conv1d", "conv2d", "two-weights"])
@pytest.mark.parametrize("pattern", ["2:4", "1:16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_kernels_multiply_the_kept_entries(kind, pattern, dtype):
    found = []
    for storage in ("dense", "packed"):
        run = Run(kind, "asp", "adamw", storage, pattern).start()
        router = Router("sparse")
        with routing(router), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            run.train(3)
        assert {used.kernel for used in router.used()} - {"reference"}
        found.append(run)
    assert_equal(*found)


@pytest.mark.parametrize("make_optimizer", [torch.optim.Adafactor, muon])
def test_optimizers_that_look_at_a_whole_weight_are_refused(make_optimizer):
    module = nn.Linear(32, 32, bias=False)
    sparsifier = NMSparsifier(
        module, "2:4", "asp", skip_first_last=False, storage="packed"
    ).attach()
    optimizer = make_optimizer(list(module.parameters()), 1e-2)
    with pytest.raises(
        ValueError, match=f"{type(optimizer).__name__} the kept entries of layer 'weight'.*AdamW"
    ):
        sparsifier.register(optimizer)
    assert module.weight.shape == (32, 32)


def test_settings_without_masks_at_rest_are_refused():
    with pytest.raises(ValueError, match="SRSTE never is: use the method 'asp', 'bame' or 'rigl'"):
        NMSparsifier(nn.Linear(32, 32), "2:4", "sr-ste", storage="packed")
    with pytest.raises(ValueError, match="storage='sparse' is unknown"):
        NMSparsifier(nn.Linear(32, 32), "2:4", "asp", storage="sparse")


class FrozenMask(ASP):
    """Overrides a hook of a step, and does not say that it may be left out at rest."""

    def after_step(self, layer, optimizer):
        super().after_step(layer, optimizer)
        layer.param.data.clamp_(-1, 1)


class RestingMask(FrozenMask):
    def is_at_rest(self, layer):
        return super().is_at_rest(layer)


def test_a_method_of_ones_own_says_that_it_rests():
    with pytest.raises(ValueError, match="FrozenMask never is"):
        NMSparsifier(nn.Linear(32, 32), "2:4", FrozenMask(), storage="packed")
    NMSparsifier(nn.Linear(32, 32), "2:4", RestingMask(), storage="packed")


def test_layers_that_no_optimizer_trains_stay_dense():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    sparsifier = NMSparsifier(model, "2:4", "asp", skip_first_last=False, storage="packed").attach()
    sparsifier.register(torch.optim.SGD(model[1].parameters(), 0.1))
    layers = list(sparsifier.layers.values())
    assert [layer.param.dim() for layer in layers] == [2, 3]
    assert storage_summary(layers) == (
        "storage='packed': 1 of 2 masked weights are stored as their kept entries alone, 512 of 1,024. "
        "'0': dense, since no optimizer trains it."
    )
    sparsifier.detach()
