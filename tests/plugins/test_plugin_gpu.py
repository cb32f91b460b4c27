"""The plugins in a Trainer on a GPU: run with ``pytest -m gpu`` on one with sparse tensor cores.

As ``tests/nn/test_routing_gpu.py``, every test also runs on the CPU with cuSPARSELt's operators in software.
"""

import gc
import json
import weakref

import pytest
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision

from lightning_nm import NMHalfPrecision, NMMixedPrecision
from tests.support.lightning_models import Inspect, make_trainer
from tests.support.mlp import Blobs, mlp, sparse_callback
from tests.support.places import PLACES, layers_of, make_place

SPARSE = {
    ("net.0", "forward"),
    ("net.0", "wgrad"),
    *(("net.2", gemm) for gemm in ("forward", "dgrad", "wgrad")),
}


@pytest.fixture(params=PLACES)
def place(request):
    return make_place(request.param)


def model():
    return mlp(sizes=(128, 256, 128, 8))


def prepare(place, tmp_path, plugin, *more, method="transposable", estimator="mvue", **options):
    masks = sparse_callback(method, grad_estimator=estimator, grad_snr_every=0)
    options = {"accelerator": place.accelerator, "max_epochs": 3, **options}
    return make_trainer(tmp_path, [masks, *more], plugins=[plugin], **options)


def fit(place, tmp_path, plugin, *more, **options):
    """Batches of 64, and the last of an epoch of 8."""
    trainer = prepare(place, tmp_path, plugin, *more, **options)
    trainer.fit(model(), Blobs(200, 128, 8, 64))
    return trainer


def routed(place, cls, precision, kernels, decisions=None):
    options = {"device": place.device.type} if issubclass(cls, MixedPrecision) else {}
    return cls(
        precision,
        kernels=kernels,
        backends=[place.kernel],
        decisions=decisions,
        budget_s=300,
        **options,
    )


PRECISIONS = [
    (NMMixedPrecision, MixedPrecision, "bf16-mixed"),
    (NMMixedPrecision, MixedPrecision, "16-mixed"),
    (NMHalfPrecision, HalfPrecision, "bf16-true"),
]


@pytest.mark.parametrize(
    ("method", "cls", "stock", "precision", "kernels"),
    [
        (method, *PRECISIONS[at], kernels)  # every pair of two of the three
        for at, kernels in (
            (0, ("sparse", "auto")),
            (1, ("auto", "sparse")),
            (2, ("sparse", "auto")),
        )
        for method, kernels in zip(("transposable", "bi-mask"), kernels, strict=True)
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fit_learns_as_without_the_plugin(
    place, tmp_path, method, cls, stock, precision, kernels
):
    options = {"device": place.device.type} if stock is MixedPrecision else {}
    # Without an estimator: its draws are other ones where a gradient's last digit is.
    expected = fit(place, tmp_path, stock(precision, **options), method=method, estimator=None)
    plugin = routed(place, cls, precision, kernels)
    found = fit(place, tmp_path, plugin, method=method, estimator=None)
    loss, stock_loss = (
        float(trainer.callback_metrics["val_loss"]) for trainer in (found, expected)
    )
    assert stock_loss < 1.5, "it learns, from a loss of 2.1"
    assert loss == pytest.approx(stock_loss, rel=0.05, abs=2e-3)
    decided = {
        (used.product.layer, used.product.key.gemm): used
        for used in plugin.router.used()
        if used.decision is not None
    }
    assert set(decided) == {product for product in SPARSE if product[1] != "wgrad"}
    if kernels == "sparse":
        assert all(place.runs(used) for used in decided.values())
    else:
        assert {used.decision.source for used in decided.values()} == {"measured"}


def test_all_three_products_are_sparse_and_it_learns(place, tmp_path):
    plugin = routed(place, NMMixedPrecision, "bf16-mixed", "sparse")
    trainer = fit(place, tmp_path, plugin)
    assert trainer.callback_metrics["val_loss"] < 1.5
    assert {
        (used.product.layer, used.product.key.gemm)
        for used in plugin.router.used()
        if place.runs(used)
    } == SPARSE


def test_decisions_are_kept_for_the_next_fit(place, tmp_path):
    file = tmp_path / "kernels.json"
    first = routed(place, NMMixedPrecision, "bf16-mixed", "auto", str(file))
    fit(place, tmp_path, first)
    assert json.loads(file.read_text())
    second = routed(place, NMMixedPrecision, "bf16-mixed", "auto", str(file))

    class Refused:
        def time(self, function, device):
            raise AssertionError("it is known")

    second.router.timer = Refused()
    fit(place, tmp_path, second)
    kernels = [
        {(u.product, u.kernel, u.decision.reason) for u in plugin.router.used() if u.decision}
        for plugin in (first, second)
    ]
    assert kernels[0] == kernels[1] != set()


def test_packs_go_with_the_fit(place, tmp_path, monkeypatch):
    packs, alive, layers = [], [], []
    pack = type(place.kernel).pack

    def recorded(kernel, matrix):
        packed = pack(kernel, matrix)
        packs.append(weakref.ref(packed))
        return packed

    def count(trainer=None, module=None):
        if module is not None:
            layers.extend(layers_of(module))  # whose end would be that of their packs
        gc.collect()
        alive.append(sum(reference() is not None for reference in packs))

    monkeypatch.setattr(type(place.kernel), "pack", recorded)
    plugin = routed(place, NMMixedPrecision, "bf16-mixed", "sparse")
    fit(place, tmp_path, plugin, Inspect(count), accumulate_grad_batches=2)
    assert set(alive) == {3}, "forward of two layers and dgrad of one"
    count()
    assert alive[-1] == 0
