"""A small layer under BAME, under any optimizer, and its training."""

import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.02),
    "radam": lambda p: torch.optim.RAdam(p, 0.02),
}


def linear(method, pattern="2:4", make=OPTIMIZERS["sgd"], dtype=torch.float64, seed=0, **options):
    """A linear layer [8, 16] under BAME, its optimizer and its layer."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(16, 8, bias=False, dtype=dtype))
    sparsifier = NMSparsifier(module, pattern, method, skip_first_last=False, **options).attach()
    optimizer = make(module.parameters())
    sparsifier.register(optimizer)
    return module, sparsifier, optimizer, sparsifier.layers["0"]


def trained(name, dtype, make, steps=8):
    """The tensors of a layer after a few adaptations by random gradients, and how many mask bits moved."""
    torch.manual_seed(0)
    module = nn.Sequential(make()).to(dtype)
    method = BAME(stop=50, evidence_rate=0.2, gradient_every=2, every=3)
    sparsifier = NMSparsifier(module, "1:8", method, skip_first_last=False).attach()
    optimizer = OPTIMIZERS[name](module.parameters())
    sparsifier.register(optimizer)
    (layer,) = sparsifier.layers.values()
    for _ in range(steps):
        layer.weight.grad = torch.randn(layer.weight.shape).to(dtype)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
    state = {f"state {key}": value for key, value in optimizer.state[layer.weight].items()}
    state = {key: value for key, value in state.items() if value is not None}
    return {
        "weight": layer.weight,
        "gradient": layer.weight.grad,
        "bits": layer.masks.bits,
        "flips": int(layer.masks.total_flips),
        **layer.buffers,
        **state,
    }


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(12, 16, generator=generator, dtype=dtype), torch.randn(
        12, 8, generator=generator, dtype=dtype
    )


def backward(module, step, windows=1):
    """A training step up to its gradients."""
    dtype = next(module.parameters()).dtype
    module.zero_grad()
    x, y = batch(step, dtype)
    for part_x, part_y in zip(x.chunk(windows), y.chunk(windows), strict=True):
        ((module(part_x) - part_y).square().mean() / windows).backward()


def run(module, sparsifier, optimizer, steps, start=0, look=lambda step: None, windows=1):
    for step in range(start, start + steps):
        backward(module, step, windows)
        sparsifier.before_step(optimizer)
        optimizer.step()
        look(step)
        sparsifier.step()
