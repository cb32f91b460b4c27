"""LoRA on an N:M language model against training all kept weights under fixed masks, for equal seconds.

``python -m benchmarks.lora`` trains the pruned SmolLM2 of docs/fine-tune.md by masked LoRA adapters, or with ``--way
asp`` whole, and prints the perplexity of the held-out text: before, and of the N:M model after, adapters merged. A
training gets ``--seconds`` of CPU time, which other processes on the machine do not change much; the learning rate
warms up in the first tenth and falls to zero on a half cosine of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lightning_nm import ASP, NMSparsifier
from lightning_nm.functional import is_nm
from lightning_nm.integrations.peft import mask_adapters
from studies.data import TextFiles

LAYERS = "model.layers.*"


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of a batch, in nats a token."""
    tokens, targets = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=tokens, use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.inference_mode()
def perplexity(model: nn.Module, data: TextFiles) -> float:
    """Of the held-out windows, whose batches are equally large."""
    model.eval()
    losses = [loss_of(model, batch).item() for batch in data.test_dataloader()]
    return math.exp(sum(losses) / len(losses))


def train(
    model: nn.Module, data: TextFiles, args: argparse.Namespace, step: Callable[[Any], None]
) -> int:
    """Train what needs gradients, by AdamW, for the time; the number of steps."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], args.lr, weight_decay=0.0
    )
    model.train()
    start, steps = time.process_time(), 0
    while True:
        for batch in data.train_dataloader():
            spent = (time.process_time() - start) / args.seconds
            if spent >= 1:
                return steps
            factor = min(1.0, 0.1 + spent / 0.1, (1 + math.cos(math.pi * spent)) / 2)
            optimizer.param_groups[0]["lr"] = args.lr * factor
            loss_of(model, batch).backward()
            step(optimizer)
            optimizer.zero_grad()
            steps += 1


def by_adapters(model: nn.Module, data: TextFiles, args: argparse.Namespace) -> tuple[Any, int]:
    """The model with the trained adapters merged, and the steps."""
    config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=args.targets)
    adapted: Any = get_peft_model(model, config)
    mask_adapters(adapted, args.pattern)
    steps = train(adapted, data, args, lambda optimizer: optimizer.step())
    return adapted.merge_and_unload(), steps


def whole(model: nn.Module, data: TextFiles, args: argparse.Namespace) -> tuple[Any, int]:
    """The model with all kept weights, vectors and the embedding trained, and the steps."""
    sparsifier = NMSparsifier(
        model, args.pattern, ASP(init="zeros"), include=LAYERS, skip_first_last=False
    ).attach()

    def step(optimizer: torch.optim.Optimizer) -> None:
        sparsifier.register(optimizer)
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()

    steps = train(model, data, args, step)
    sparsifier.bake()
    sparsifier.detach()
    return model, steps


def main(argv: Sequence[str] | None = None) -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default="runs/smollm2/2-4")
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--text", default="runs/smollm2/django-5.2.8/docs")
    parser.add_argument("--tokenizer", default="runs/smollm2/dense")
    parser.add_argument("--way", choices=("lora", "asp"), default="lora")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--val-size", type=int, default=64)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TextFiles(args.text, args.tokenizer, context=args.context, val_size=args.val_size)
    data.setup("fit")
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    found = {"way": args.way, "lr": args.lr, "before": perplexity(model, data)}
    trained, found["steps"] = (by_adapters if args.way == "lora" else whole)(model, data, args)
    linears = {n: m for n, m in trained.named_modules() if isinstance(m, nn.Linear)}
    inner = [m for name, m in linears.items() if name.startswith(LAYERS[:-1])]
    found["is N:M"] = all(is_nm(module.weight, args.pattern) for module in inner)
    found["after"] = perplexity(trained, data)
    print(json.dumps({**vars(args), **found}))


if __name__ == "__main__":
    main()
