"""LoRA on an N:M language model against training all that it keeps, for equal seconds.

``python -m benchmarks.lora`` trains the pruned SmolLM2 of docs/fine-tune.md by masked adapters, or with ``--way asp``
by `asp`, and prints the perplexity of the held-out text before and after, with the adapters merged. ``--seconds`` are
CPU time, which other processes change little. The learning rate rises for a tenth of them, and falls to zero by a
cosine.
"""

import argparse
import itertools
import math
import time
from collections.abc import Sequence
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
SPARSE: dict[str, Any] = {"method": ASP(init="zeros"), "include": LAYERS, "skip_first_last": False}


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of a batch, in nats a token; computed in bfloat16, of weights in float32."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[0], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())


@torch.no_grad()
def perplexity(model: nn.Module, data: TextFiles) -> float:
    """Of the held-out windows, in batches of one size."""
    losses = [loss_of(model.eval(), batch).item() for batch in data.test_dataloader()]
    return math.exp(sum(losses) / len(losses))


def train(model: nn.Module, data: TextFiles, args: argparse.Namespace) -> tuple[Any, int]:
    """The trained N:M model, and the number of steps."""
    sparsifier = None
    if args.way == "lora":
        config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=args.targets)
        model = get_peft_model(model, config)
        mask_adapters(model, args.pattern)
    else:
        sparsifier = NMSparsifier(model, args.pattern, **SPARSE).attach()
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.lr, weight_decay=0.0)
    if sparsifier is not None:
        sparsifier.register(optimizer)
    model.train()
    start, steps = time.process_time(), 0
    epochs = (data.train_dataloader() for _ in itertools.count())
    batches = itertools.chain.from_iterable(epochs)
    while (spent := (time.process_time() - start) / args.seconds) < 1:
        factor = min(0.1 + 10 * spent, (1 + math.cos(math.pi * spent)) / 2)
        optimizer.param_groups[0]["lr"] = args.lr * factor
        loss_of(model, next(batches)).backward()
        if sparsifier is not None:
            sparsifier.before_step(optimizer)
        optimizer.step()
        if sparsifier is not None:
            sparsifier.step()
        optimizer.zero_grad()
        steps += 1
    if sparsifier is None:
        return model.merge_and_unload(), steps  # type: ignore[operator]
    sparsifier.bake()
    sparsifier.detach()
    return model, steps


def main(argv: Sequence[str] | None = None) -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", default="runs/smollm2/2-4")
    parser.add_argument("--pattern", default="2:4")
    parser.add_argument("--text", default="runs/smollm2/django-5.2.8/docs")
    parser.add_argument("--tokenizer", default="runs/smollm2/dense")
    parser.add_argument("--way", choices=("lora", "asp"), default="lora")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj"])
    parser.add_argument("--context", type=int, default=256)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = TextFiles(args.text, args.tokenizer, context=args.context, val_size=64)
    data.setup("fit")
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    before = perplexity(model, data)
    model, steps = train(model, data, args)
    weights = (p for name, p in model.named_parameters() if name.startswith(LAYERS[:-1]))
    sparse = all(is_nm(weight, args.pattern) for weight in weights if weight.ndim == 2)
    print(f"{args.way}, {steps} steps: perplexity {before:.2f}, then {perplexity(model, data):.2f}")
    print(f"all matrices of the layers are {args.pattern}: {sparse}")


if __name__ == "__main__":
    main()
