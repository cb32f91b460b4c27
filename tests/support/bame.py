"""Small layers under BAME, under any optimizer, and their training."""

import torch
from torch import nn

from lightning_nm import BAME, NMSparsifier
from tests.support.method_loop import Loop, one_layer

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, 0.02),
    "radam": lambda p: torch.optim.RAdam(p, 0.02),
}


def loop(method, pattern="2:4", make=OPTIMIZERS["sgd"], dtype=torch.float64, **options):
    """The training of a linear layer [8, 16] under BAME."""
    options = {"planned_steps": None, **options}
    return Loop(method, pattern, make, one_layer(dtype), **options)


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
