"""BAME with ``storage="packed"`` while masks move: the run with dense storage, and what exists of it in memory."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_nm import BAME
from lightning_nm.callbacks.checks import refuse_gradient_scaler
from lightning_nm.functional import is_nm
from lightning_nm.kernels import Router, routing
from lightning_nm.kernels.cpu import library
from lightning_nm.methods.bame import packed as packed_steps
from tests.support.cpu_products import needs_library
from tests.support.storage_run import StorageRun

STEPS = 7
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "sgd-plain": lambda p: torch.optim.SGD(p, 0.05),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, 0.02, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.02),
    "radam": lambda p: torch.optim.RAdam(p, 0.02),
}


def method(gradient_every=2, every=1, start=0, stop=5, **options):
    return BAME(
        start=start,
        stop=stop,
        every=every,
        gradient_every=gradient_every,
        evidence_rate=0.5,
        budget=1.0,
        **options,
    )


class Run(StorageRun):
    """A module under BAME."""

    def __init__(self, storage, kind="linear", optimizer="adamw", pattern="2:4", **options):
        dtype = options.pop("dtype", torch.float32)
        make_optimizer = OPTIMIZERS[optimizer]
        super().__init__(
            kind, method(**options), make_optimizer, storage, STEPS, pattern, dtype=dtype
        )

    def backward(self, step, windows=1):
        noise = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(step))
        x = self.x + 0.3 * noise.to(self.x.dtype)
        for part in x.chunk(windows):
            self.module(part).square().mean().backward()

    def train(self, steps=STEPS, first=0, windows=1):
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.backward(step, windows)
            self.step()
        return self

    @property
    def layers(self):
        return [layer for layer in self.sparsifier.layers.values() if not layer.spec.forward_reason]

    def masks(self):
        return [layer.forward_mask.clone() for layer in self.layers]


def assert_same(a, b):
    state = b.module.state_dict()
    for key, value in a.module.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert a.sparsifier.stats() == b.sparsifier.stats()


def both(windows=1, **options):
    """The same training with dense and with packed storage; every product is small enough for one part."""
    dense, packed = (Run(storage, **options).start() for storage in ("dense", "packed"))
    before = packed.masks()
    for run in (dense, packed):
        run.train(windows=windows)
    assert all(layer.storage is not None for layer in packed.layers)
    assert any(
        not torch.equal(a, b) for a, b in zip(before, packed.masks(), strict=True)
    )  # else nothing is tested
    return dense, packed


@pytest.mark.parametrize("gradient_every", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_as_with_dense_storage(optimizer, gradient_every):
    assert_same(*both(optimizer=optimizer, gradient_every=gradient_every))


@pytest.mark.parametrize("pattern", ["1:16", "2:4", "3:8"])
@pytest.mark.parametrize("kind", ["attention", "hugging-face-conv1d", "two-weights"])
def test_every_kind_trains_as_with_dense_storage(kind, pattern):
    assert_same(*both(kind=kind, pattern=pattern))


@pytest.mark.parametrize(
    "options", [{"every": 3}, {"start": 2}, {"windows": 2}, {"stop": 3, "gradient_every": 1}]
)
def test_every_schedule_trains_as_with_dense_storage(options):
    assert_same(*both(**options))


@pytest.mark.parametrize("by_library", [True, False])
@pytest.mark.parametrize("kind", ["linear", "hugging-face-conv1d", "attention"])
def test_a_few_rows_at_a_time_make_the_same_masks(monkeypatch, kind, by_library):
    """In float64, since products of some rows round otherwise."""
    monkeypatch.setattr(packed_steps, "_CHUNK", 3 * 32)
    if not by_library:
        monkeypatch.setattr(library, "unavailable", lambda: "for the test")
    dense, packed = both(kind=kind, dtype=torch.float64, optimizer="sgd")
    for a, b in zip(dense.masks(), packed.masks(), strict=True):
        assert torch.equal(a, b)
    for key, value in dense.module.state_dict().items():
        torch.testing.assert_close(packed.module.state_dict()[key], value, rtol=1e-9, atol=1e-12)


def test_the_library_and_torch_make_the_same_exchanges(monkeypatch):
    by_library = Run("packed", pattern="1:16").start().train()
    monkeypatch.setattr(library, "unavailable", lambda: "for the test")
    by_torch = Run("packed", pattern="1:16").start().train()
    for a, b in zip(by_library.masks(), by_torch.masks(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "storages", [("packed", "packed"), ("packed", "dense"), ("dense", "packed")]
)
@pytest.mark.parametrize("optimizer", ["sgd", "sgd-plain", "adamw"])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_resume_is_exact_within_a_cycle_of_gradients(storages, optimizer, at):
    before, after = storages
    options = {"optimizer": optimizer, "gradient_every": 3}
    whole = Run("dense", **options).start().train()
    part = Run(before, **options).start().train(at)
    model = {key: value.clone() for key, value in part.module.state_dict().items()}
    sparsifier, optimizer_state = part.sparsifier.state_dict(), part.optimizer.state_dict()
    resumed = Run(after, **options)
    resumed.module.load_state_dict(model)
    resumed.sparsifier.attach(sparsifier)
    resumed.sparsifier.load_state_dict(sparsifier)
    resumed.optimizer = resumed.make_optimizer(resumed.module.parameters())
    resumed.sparsifier.register(resumed.optimizer)
    resumed.optimizer.load_state_dict(optimizer_state)
    resumed.train(STEPS - at, first=at)
    assert_same(whole, resumed)


def test_dense_are_two_buffers_alone():
    run = Run("packed", pattern="1:16", gradient_every=2).start()
    (layer,) = run.layers
    entries = layer.view.shape.numel()
    for step in range(3):
        run.optimizer.zero_grad()
        run.backward(step)
        assert bool(layer.storage.factors) == (step % 2 == 0)
        run.step()
        assert not layer.storage.factors
        weight = run.module.weight
        assert weight.numel() == weight.grad.numel() == entries // 16
        state = run.optimizer.state[weight]
        assert {value.numel() for value in state.values()} <= {1, entries // 16}
        sizes = {name: buffer.numel() for name, buffer in layer.buffers.items()}
        assert sizes.pop("evidence") == sizes.pop("evidence_square") == entries
        assert max(sizes.values()) <= entries // 8
        saved = run.module.state_dict()["weight"]
        assert saved.shape == layer.view.shape
        assert is_nm(saved, "1:16")
    run.train(STEPS - 3, first=3)
    assert "evidence" not in layer.buffers


def test_a_gradient_that_is_dropped_does_not_count():
    """A loop that leaves a batch out by ``zero_grad()``, and one that does not step."""
    plain, dropping = (Run("packed").start() for _ in range(2))
    plain.train()
    for step in range(STEPS):
        dropping.optimizer.zero_grad()
        dropping.backward(100 + step)
        dropping.optimizer.zero_grad()
        dropping.backward(step)
        dropping.step()
    assert_same(plain, dropping)


def test_a_checkpointed_forward_pass_keeps_the_gradients_of_a_shared_layer():
    runs = []
    for storage in ("dense", "packed"):
        run = Run(storage, dtype=torch.float64).start()
        for step in range(STEPS):
            run.optimizer.zero_grad()
            x = run.x + step
            y = (
                checkpoint(run.module, x, use_reentrant=False).mean()
                + checkpoint(run.module, 2 * x, use_reentrant=False).square().mean()
            )
            y.backward()
            run.step()
        runs.append(run)
    dense, packed = runs
    torch.testing.assert_close(packed.module.state_dict(), dense.module.state_dict())


def test_training_goes_on_after_the_weight_was_unpacked_while_it_adapted():
    runs = []
    for storage in ("dense", "packed"):
        run = Run(storage).start().train(3)
        state = run.sparsifier.state_dict()
        run.sparsifier.bake()
        run.sparsifier.detach()
        assert run.module.weight.shape == (64, 32)
        run.sparsifier.attach(state)
        run.sparsifier.load_state_dict(state)
        run.sparsifier.register(run.optimizer)
        runs.append(run.train(STEPS - 3, first=3))
    assert_same(*runs)


def test_other_weights_get_other_masks_while_it_adapts():
    runs = []
    for storage in ("dense", "packed"):
        run = Run(storage).start().train(3)
        torch.manual_seed(5)
        run.module.load_state_dict(
            {key: torch.randn_like(value) for key, value in run.module.state_dict().items()}
        )
        # What the optimizer has of the pruned entries of before is no part of the comparison.
        run.optimizer.state.clear()
        runs.append(run.train(STEPS - 3, first=3))
    assert_same(*runs)
    assert all(layer.storage is not None for layer in runs[1].layers)


def test_a_step_without_before_step_is_an_error():
    run = Run("packed").start()
    run.backward(0)
    with pytest.raises(RuntimeError, match=r"stepped without before_step\(\)"):
        run.optimizer.step()


def test_a_loss_scale_is_refused():
    run = Run("packed").start()
    run.backward(0)
    with pytest.raises(RuntimeError, match=r"loss_scale=1024.* while the masks of layer"):
        run.sparsifier.before_step(run.optimizer, 1024.0)
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(scaler=object()))
    with pytest.raises(ValueError, match=r"scales gradients.* use precision='bf16-mixed'"):
        refuse_gradient_scaler(trainer, run.layers)
    trainer.precision_plugin.scaler = None
    refuse_gradient_scaler(trainer, run.layers)


def test_a_compiled_module_leaves_its_graph_for_a_dense_gradient():
    """Unless it may not: the products of the precision plugin are operators, which stay within a graph."""
    plain = Run("packed", dtype=torch.float64).start().train()
    run = Run("packed", dtype=torch.float64).start()
    original, run.module = run.module, torch.compile(run.module, backend="eager")
    run.train()
    torch.testing.assert_close(original.state_dict(), plain.module.state_dict())
    torch.compiler.reset()
    whole = Run("packed").start()
    # torch 2.6 refuses a graph break within a context manager without its reason.
    refused = "a compiled graph cannot keep what the masks|missing: WITH_EXCEPT_START"
    with pytest.raises(Exception, match=refused):
        torch.compile(whole.module, backend="eager", fullgraph=True)(whole.x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_products_on_a_router_stay_within_a_compiled_graph(backend):
    plain = Run("packed", dtype=torch.float64).start().train()
    run = Run("packed", dtype=torch.float64).start()
    original = run.module
    run.module = torch.compile(original, backend=backend, fullgraph=True)
    with routing(Router("reference")):
        run.train()
    torch.testing.assert_close(original.state_dict(), plain.module.state_dict())
    torch.compiler.reset()


def test_a_gradient_that_others_make_is_refused():
    run = Run("packed").start()
    run.module.weight.square().sum().backward()
    run.sparsifier.before_step(run.optimizer)
    with pytest.raises(RuntimeError, match="a gradient that its module's own products did not"):
        run.optimizer.step()


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sparse_kernels_leave_the_same_evidence(dtype):
    """Their gradient of kept entries is another computation; the evidence comes of the same factors."""
    found = []
    for storage in ("dense", "packed"):
        run = Run(storage, pattern="1:16", every=3).start()
        router = Router("sparse")
        with routing(router), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            run.train(1)
        used = {(used.product.key.gemm, used.kernel) for used in router.used()}
        found.append((run, used))
    (dense, _), (packed, used) = found
    assert {gemm for gemm, kernel in used if kernel != "reference"} == {"forward", "wgrad"}
    (mask,) = packed.masks()
    state = dense.optimizer.state[dense.module.weight]
    buffers = packed.layers[0].buffers
    pruned = ~mask
    for key, name in (("exp_avg", "evidence"), ("exp_avg_sq", "evidence_square")):
        assert state[key][pruned].any()
        torch.testing.assert_close(buffers[name][pruned], state[key][pruned], rtol=1e-2, atol=0)
