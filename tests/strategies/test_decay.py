"""What the decay of pruned weights adds to a real step, lr * decay * (1 - mask) * W, however that step comes about."""

import itertools

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_nm import SRSTE, BiMask, TransposableMask
from lightning_nm import functional as nmf
from tests.support.lightning_models import callback
from tests.support.parallel import fit
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
GRID += [("after-clipping", precision, 4, 1) for precision in PRECISIONS]
GRID += [("world-size", "32", 1, 1)]


class Net(pl.LightningModule):
    """A loss that is linear in the outputs: dL/dW_F = coefficients^T x / tokens, exact in fp16 for small integers."""

    def __init__(self, calls, fused):
        super().__init__()
        self.layer, self.calls, self.fused = nn.Linear(16, 16, bias=False), calls, fused

    def training_step(self, batch, batch_idx):
        rank, world = self.trainer.global_rank, self.trainer.world_size
        parts = (part.squeeze(0).chunk(world)[rank].chunk(self.calls) for part in batch)
        losses = [
            (self.layer(x) * coefficients).sum() for x, coefficients in zip(*parts, strict=True)
        ]
        return sum(losses) / (TOKENS / world)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE, fused=self.fused)


class Record(pl.Callback):
    """The weight and its mask before each real step, and the weight in the end, before it is masked for good."""

    def __init__(self):
        self.weights, self.masks = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.on_train_end(trainer, pl_module)
        self.masks.append(pl_module.layer.nm_layers["weight"].forward_mask)

    def on_train_end(self, trainer, pl_module):
        self.weights.append(pl_module.layer.weight.detach().clone())


def integers(accumulate):
    """Inputs and coefficients of every micro-batch."""
    generator = torch.Generator().manual_seed(accumulate)
    return torch.randint(-1, 2, (2, STEPS * accumulate, TOKENS, 16), generator=generator).float()


def weights_and_masks(method, precision, accumulate, calls, world=1, strategy="auto"):
    """The weight before each step and after the last, and the masks of the steps."""
    torch.manual_seed(0)
    options = {"accumulate_grad_batches": accumulate}
    if precision != "32":
        # Lightning makes bf16-mixed of `precision="16-mixed"` on a CPU, not of the plugin
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
    nm, record = callback(METHODS[method](), skip_first_last=False), Record()
    loader = DataLoader(TensorDataset(*integers(accumulate)))
    fit([nm, record], Net(calls, precision == "fp16-fused"), world, strategy, loader, **options)
    return torch.stack(record.weights), torch.stack(record.masks)


def check(weights, masks, method, accumulate, world=1):
    """Every step against the formula in float64, to the rounding of float32."""
    assert weights.dtype == torch.float32
    assert len(masks) == len(weights) - 1 == STEPS
    x, coefficients = integers(accumulate).double()
    gradients = (coefficients.mT @ x / TOKENS).view(STEPS, accumulate, 16, 16).mean(1)
    before, after = weights[:-1].double(), weights[1:].double()
    decayed = DECAY * torch.where(masks, 0, before) * (world if method == "world-size" else 1)
    error = (after - (before - RATE * (gradients + decayed))).abs()
    size = before.abs() + RATE * (gradients.abs() + decayed.abs())
    allowed = 2 * torch.finfo(torch.float32).eps * size
    worst = float((error / allowed).max())
    assert worst <= 1, f"off by up to {worst:.3g} x what rounding may do"
    assert not torch.equal(masks[0], masks[-1]), "the masks stood still"
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
    for run, *ranks in zip(RUNS, *in_processes(2, tmp_path / "run", everything), strict=True):
        method, _, accumulate, *_ = run
        check(*ranks[0], method, accumulate, 2)
        assert all(map(torch.equal, *ranks)), run
