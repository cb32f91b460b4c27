"""What rounding to int8 changes: bits per byte of a small GPT, packed in its own dtype and in int8.

``python -m benchmarks.int8`` trains a byte-level GPT (:class:`lightning_nm.demo.GPT`) on the Python files of installed
packages under the masks of ASP, packs it in float32, in bfloat16 and with int8 weights for inputs of both, and prints
the bits per byte of each on held-out files. Products of int8 weights round each token to int8, too. Differences are of
one model on the same text, over several seeds of the training.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_nm import NMSparsifier, pack, packed_summary
from lightning_nm.demo import GPT, PythonSource

LAYERS = ("float32", "bfloat16", "int8 for float32", "int8 for bfloat16")


def trained(args: argparse.Namespace, pattern: str, seed: int, data: PythonSource) -> nn.Module:
    """A GPT whose blocks are N:M."""
    torch.manual_seed(seed)
    model = GPT(context=data.context, dim=args.dim, heads=args.dim // 64, depth=args.depth)
    sparsifier = NMSparsifier(model, pattern, method="asp", include="blocks.*", seed=seed)
    sparsifier.attach()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95))
    sparsifier.register(optimizer)
    loader = iter(data.train_dataloader())
    for step in range(args.steps):
        x, target = next(loader)
        # The rate falls to a tenth, so that the model is near a minimum.
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - 0.9 * step / args.steps)
        cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        optimizer.zero_grad()
    sparsifier.bake()
    sparsifier.detach()
    return model.eval()


@torch.inference_mode()
def bits_per_byte(model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The mean of -log2 p of a byte, computed in float32 from the logits."""
    losses = [
        cross_entropy(model(x).float().flatten(0, 1), target.flatten()) for x, target in batches
    ]
    return float(torch.stack(losses).mean()) / math.log(2)


def packed_variants(model: nn.Module) -> dict[str, nn.Module]:
    """The packed models; no product of theirs is dense."""
    found = {}
    for name in LAYERS:
        dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
        values: Literal["int8"] | None = "int8" if name.startswith("int8") else None
        own = copy.deepcopy(model).to(dtype)
        found[name] = pack(own, dtype=values, kernels="sparse")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:4", "1:16"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--package", default="torch", help="whose Python files are the text")
    args = parser.parse_args(argv)
    print("| pattern | packed in | bits per byte | more than float32 | most of a seed | MB |")
    print("|---|---|---|---|---|---|")
    for pattern in args.patterns:
        bits: dict[str, list[float]] = {name: [] for name in LAYERS}
        sizes = {}
        for seed in range(args.seeds):
            data = PythonSource((args.package,), batch_size=16, val_size=400, seed=seed)
            data.setup("fit")
            batches = list(data.val_dataloader())
            variants = packed_variants(trained(args, pattern, seed, data))
            for name, model in variants.items():
                bits[name].append(bits_per_byte(model, batches))
                sizes[name] = packed_summary(model).bytes / 1e6
        for name, own in bits.items():
            more = [a - b for a, b in zip(own, bits["float32"], strict=True)]
            mean = statistics.fmean(own)
            print(
                f"| {pattern} | {name} | {mean:.4f} | {statistics.fmean(more):+.5f} | {max(more):+.5f} | "
                f"{sizes[name]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
