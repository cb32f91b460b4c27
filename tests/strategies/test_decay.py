"""What the decay of pruned weights adds to a real step, lr * decay * (1 - mask) * W, however that step comes about."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import SRSTE, BiMask, NMSparsityCallback, TransposableMask
from lightning_nm import functional as nmf
from tests.support.processes import in_processes

RATE, DECAY, STEPS, TOKENS = 0.25, 0.5, 4, 16
METHODS = {
    "sr-ste": lambda: SRSTE(DECAY),
    "bi-mask": lambda: BiMask(permute_every=2, decay=DECAY),
    "transposable": lambda: TransposableMask(update_every=2, decay=DECAY),
    "after-clipping": lambda: SRSTE(DECAY, decay_at="after-clipping"),
    "world-size": lambda: SRSTE(DECAY, decay_scale="world-size"),
}
PRECISIONS = ["32", "fp16", "fp16-fused"]
GRID = list(itertools.product(("sr-ste", "bi-mask", "transposable"), PRECISIONS, (1, 4), (1, 2)))
GRID += [("after-clipping", precision, 4, 1) for precision in PRECISIONS] + [
    ("world-size", "32", 1, 1)
]


class Net(pl.LightningModule):
    """A loss that is linear in the outputs: dL/dW_F = coefficients^T x / tokens, exact in fp16 for small integers."""

    def __init__(self, calls, fused):
        super().__init__()
        self.layer, self.calls, self.fused = nn.Linear(16, 16, bias=False), calls, fused

    def training_step(self, batch, batch_idx):
        parts = (
            part.squeeze(0).chunk(self.trainer.world_size)[self.trainer.global_rank]
            for part in batch
        )
        pairs = zip(*(part.chunk(self.calls) for part in parts), strict=True)
        return sum((self.layer(x) * coefficients).sum() for x, coefficients in pairs) / (
            TOKENS / self.trainer.world_size
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, fused=self.fused)


class Record(pl.Callback):
    """The weight and its mask before each real step, and the weight in the end, before it is masked for good."""

    def __init__(self):
        self.weights, self.masks = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.weights.append(pl_module.layer.weight.detach().clone())
        self.masks.append(pl_module.layer.nm_layers["weight"].forward_mask)

    def on_train_end(self, trainer, pl_module):
        self.weights.append(pl_module.layer.weight.detach().clone())


def integers(accumulate):
    """Inputs and coefficients of every micro-batch."""
    generator = torch.Generator().manual_seed(accumulate)
    return torch.randint(-1, 2, (2, STEPS * accumulate, TOKENS, 16), generator=generator).float()


def weights_and_masks(method, precision, accumulate, calls, devices=1, strategy="auto"):
    """The weight before each step and after the last, and the masks of the steps."""
    torch.manual_seed(0)
    plugins = []
    if (
        precision != "32"
    ):  # Lightning makes bf16-mixed of `precision="16-mixed"` on a CPU, not of the plugin
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    record = Record()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        plugins=plugins,
        callbacks=[
            NMSparsityCallback("2:4", METHODS[method](), skip_first_last=False, show_tables=False),
            record,
        ],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Net(calls, precision == "fp16-fused"), DataLoader(TensorDataset(*integers(accumulate)))
    )
    return torch.stack(record.weights), torch.stack(record.masks)


def check(weights, masks, method, accumulate, devices=1):
    """Every step against the formula in float64, to the rounding of float32."""
    assert weights.dtype == torch.float32
    assert len(masks) == len(weights) - 1 == STEPS
    x, coefficients = integers(accumulate).double()
    gradients = (coefficients.mT @ x / TOKENS).view(STEPS, accumulate, 16, 16).mean(1)
    before, after = weights[:-1].double(), weights[1:].double()
    decayed = DECAY * torch.where(masks, 0, before) * (devices if method == "world-size" else 1)
    error = (after - (before - RATE * (gradients + decayed))).abs()
    allowed = (
        2
        * torch.finfo(torch.float32).eps
        * (before.abs() + RATE * (gradients.abs() + decayed.abs()))
    )
    assert bool((error <= allowed).all()), (
        f"off by up to {float((error / allowed).max()):.3g} x what rounding may do"
    )
    assert bool((masks[0] != masks[-1]).any()), "the masks stood still"
    if method != "transposable":
        assert torch.equal(masks, nmf.nm_mask(weights[:-1].abs(), "2:4"))


@pytest.mark.parametrize(("method", "precision", "accumulate", "calls"), GRID)
def test_one_process(method, precision, accumulate, calls):
    check(*weights_and_masks(method, precision, accumulate, calls), method, accumulate)


RUNS = [(*case, 2, strategy) for case in GRID for strategy in ("ddp", "nm_ddp")]


def everything():
    return [weights_and_masks(*run) for run in RUNS]


@pytest.mark.slow
def test_two_processes(tmp_path):
    first, second = in_processes(2, tmp_path / "run", everything)
    for run, one, other in zip(RUNS, first, second, strict=True):
        try:
            check(*one, run[0], run[2], devices=2)
        except AssertionError as error:
            raise AssertionError(f"{run}: {error}") from error
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), run
