"""Small N:M models, and adapters of peft on them."""

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from lightning_nm import functional as nmf  # noqa: E402
from tests.support.tiny import tiny  # noqa: E402

Conv1D = transformers.pytorch_utils.Conv1D
QUIET = [
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to .* but the target module is"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),  # peft reads it
]
"""Marks of tests with these adapters."""


class Net(nn.Module):
    def __init__(self, pattern="2:4"):
        super().__init__()
        self.first, self.gpt, self.head = (
            nn.Linear(16, 32),
            Conv1D(24, 32),
            nn.Linear(24, 8, bias=False),
        )
        with torch.no_grad():
            self.gpt.weight.normal_()
            for layer, dim in ((self.first, 1), (self.gpt, 0), (self.head, 1)):
                layer.weight.copy_(nmf.nm_prune(layer.weight, pattern, dim=dim))

    def forward(self, x):
        return self.head(torch.tanh(self.gpt(torch.relu(self.first(x)))))


class Convs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Conv1d(8, 16, 3, padding=2, dilation=2, stride=2)
        self.two = nn.Conv2d(16, 8, (3, 2), padding=1, padding_mode="circular")
        self.three = nn.Conv3d(8, 8, (2, 1, 1), padding=(1, 0, 0))
        with torch.no_grad():
            self.one.weight.copy_(nmf.nm_prune(self.one.weight, "2:4", dim=1))
            self.two.weight.copy_(
                nmf.nm_prune(self.two.weight.flatten(1), "2:4", dim=1).view_as(self.two.weight)
            )
            self.three.weight.copy_(nmf.nm_prune(self.three.weight, "2:4", dim=1))

    def forward(self, x):
        return self.three(self.two(self.one(x).unflatten(2, (2, -1))).unsqueeze(2))


def tiny_llama():
    model = tiny("llama")
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                module.weight.copy_(nmf.nm_prune(module.weight, "2:4"))
    return model


TARGETS = {
    Net: ["first", "gpt", "head"],
    Convs: ["one", "two", "three"],
    tiny_llama: ["q_proj", "v_proj", "down_proj"],
}
INPUTS = {
    Net: lambda: torch.randn(6, 16, dtype=torch.float64),
    Convs: lambda: torch.randn(2, 8, 12, dtype=torch.float64),
    tiny_llama: lambda: torch.randint(0, 32, (2, 7)),
}


def adapted(make=Net, *, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    options = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": TARGETS[make],
        "init_lora_weights": False,
    } | options
    return peft.get_peft_model(make().to(dtype), peft.LoraConfig(**options))


def values(model, x):
    found = model(x)
    return found if isinstance(found, torch.Tensor) else found.logits


def layers(model):
    return {
        name: m for name, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)
    }


def base_weights(model):
    return {
        name: layer.get_base_layer().weight.detach().clone()
        for name, layer in layers(model).items()
    }
