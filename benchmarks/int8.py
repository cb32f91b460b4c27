"""What rounding to int8 changes: bits per byte of a small GPT, or accuracy of a small CNN, packed in int8.

``python -m benchmarks.int8`` trains a byte-level GPT (:class:`lightning_nm.demo.GPT`) on the Python files of installed
packages under the masks of ASP, packs it in float32, in bfloat16 and with int8 weights for inputs of both, and prints
the bits per byte of each on held-out files. GEMMs of int8 weights round each token to int8, too. ``--model cnn``
takes a residual CNN, Fashion-MNIST and the accuracy on its test images. ``--quantised-last 0.1`` rounds the weights in
the last tenth of the training (:class:`lightning_nm.training.int8_rounding.Int8Rounding`). ``--file CKPT`` trains
nothing, and takes the state dict of such a model, with the patterns that it has. Differences are of one model on the
same data, over several seeds of the training.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_nm import NMSparsifier, pack, packed_summary
from lightning_nm.demo import GPT, ResidualCNN, ResumableDataModule
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.training.int8_rounding import Int8Rounding
from studies.data import AugmentedFashionMNIST, PythonSource

LAYERS = ("float32", "bfloat16", "int8 for float32", "int8 for bfloat16")

Batch = tuple[Tensor, Tensor]


class Task(NamedTuple):
    """A model and its data.

    Attributes:
        model: Makes it dense, by the arguments of the command and the data.
        data: By the arguments and a seed; set up.
        masked: The layers to mask; ``None`` for all but the first and the last.
        loss: Of outputs and targets.
        metric: What is shown, and its unit.
        score: The metric of a model on batches.
    """

    model: Callable[[argparse.Namespace, ResumableDataModule], nn.Module]
    data: Callable[[argparse.Namespace, int], ResumableDataModule]
    masked: str | None
    loss: Callable[[Tensor, Tensor], Tensor]
    metric: str
    score: Callable[[nn.Module, Sequence[Batch]], float]


def gpt(args: argparse.Namespace, data: ResumableDataModule) -> nn.Module:
    """A GPT for the contexts of its data."""
    assert isinstance(data, PythonSource)
    return GPT(context=data.context, dim=args.dim, heads=args.dim // 64, depth=args.depth)


def text(args: argparse.Namespace, seed: int) -> ResumableDataModule:
    """Python files."""
    return PythonSource((args.package,), batch_size=16, val_size=400, seed=seed)


def bytes_loss(logits: Tensor, target: Tensor) -> Tensor:
    """The cross entropy of each byte."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


@torch.inference_mode()
def bits_per_byte(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean of -log2 p of a byte, computed in float32 from the logits."""
    losses = [bytes_loss(model(x).float(), target) for x, target in batches]
    return float(torch.stack(losses).mean()) / math.log(2)


def cnn(args: argparse.Namespace, data: ResumableDataModule) -> nn.Module:
    """A residual CNN."""
    return ResidualCNN(width=args.width, depth=1)


def pictures(args: argparse.Namespace, seed: int) -> ResumableDataModule:
    """Fashion-MNIST."""
    return AugmentedFashionMNIST(seed=seed)


@torch.inference_mode()
def accuracy(model: nn.Module, batches: Sequence[Batch]) -> float:
    """The fraction of images that are classified right, in percent."""
    dtype = next(model.buffers()).dtype  # of the batch norm that comes first
    right = [
        float((model(x.to(dtype)).argmax(1) == target).float().mean()) for x, target in batches
    ]
    sizes = [len(target) for _, target in batches]
    return 100 * sum(a * b for a, b in zip(right, sizes, strict=True)) / sum(sizes)


TASKS = {
    "gpt": Task(gpt, text, "blocks.*", bytes_loss, "bits per byte", bits_per_byte),
    "cnn": Task(cnn, pictures, None, cross_entropy, "accuracy, %", accuracy),
}


def batches_of(data: ResumableDataModule) -> Iterator[Batch]:
    """The training batches, epoch after epoch."""
    while True:
        yield from data.train_dataloader()


def trained(
    args: argparse.Namespace, task: Task, pattern: str, seed: int, data: ResumableDataModule
) -> nn.Module:
    """A model whose masked layers are N:M."""
    torch.manual_seed(seed)
    model = task.model(args, data)
    sparsifier = NMSparsifier(model, pattern, method="asp", include=task.masked, seed=seed)
    sparsifier.attach()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95))
    sparsifier.register(optimizer)
    first_rounded = round(args.steps * (1 - args.quantised_last))
    rounding = Int8Rounding()
    for step, (x, target) in zip(range(args.steps), batches_of(data), strict=False):
        # The rate falls to a tenth, so that the model is near a minimum.
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - 0.9 * step / args.steps)
        layers = sparsifier.layers.values() if step >= first_rounded else ()
        with rounding.within(layers):
            task.loss(model(x), target).backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        sparsifier.step()
        optimizer.zero_grad()
    sparsifier.bake()
    sparsifier.detach()
    return model.eval()


def loaded(args: argparse.Namespace, task: Task, data: ResumableDataModule) -> nn.Module:
    """The model of a file."""
    model = task.model(args, data)
    model.load_state_dict(read_checkpoint(args.file).weights)
    return model.eval()


def packed_variants(model: nn.Module) -> dict[str, nn.Module]:
    """The packed models; no GEMM of theirs is dense where a kernel takes it."""
    found = {}
    for name in LAYERS:
        dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
        values: Literal["int8"] | None = "int8" if name.startswith("int8") else None
        own = copy.deepcopy(model).to(dtype)
        found[name] = pack(own, dtype=values, kernels="sparse")
    return found


def held_out(args: argparse.Namespace, data: ResumableDataModule) -> list[Batch]:
    """What the metric is measured on."""
    if args.model == "gpt":
        return list(data.val_dataloader())
    data.setup("test")
    return list(data.test_dataloader())


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(TASKS), default="gpt")
    parser.add_argument("--file", help="a checkpoint of such a model, instead of trainings")
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:4", "1:16"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dim", type=int, default=256, help="of the GPT")
    parser.add_argument("--depth", type=int, default=2, help="of the GPT")
    parser.add_argument("--width", type=int, default=32, help="of the CNN")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--quantised-last", type=float, default=0.0, help="share of the steps")
    parser.add_argument("--package", default="torch", help="whose Python files are the text")
    args = parser.parse_args(argv)
    task = TASKS[args.model]
    print(f"| pattern | packed in | {task.metric} | more than float32 | most of a seed | MB |")
    print("|---|---|---|---|---|---|")
    for pattern in ["that of the file"] if args.file else args.patterns:
        scores: dict[str, list[float]] = {name: [] for name in LAYERS}
        sizes = {}
        for seed in range(1 if args.file else args.seeds):
            data = task.data(args, seed)
            data.setup("fit")
            own = (
                loaded(args, task, data) if args.file else trained(args, task, pattern, seed, data)
            )
            batches = held_out(args, data)
            for name, model in packed_variants(own).items():
                scores[name].append(task.score(model, batches))
                sizes[name] = packed_summary(model).bytes / 1e6
        for name, values in scores.items():
            more = [a - b for a, b in zip(values, scores["float32"], strict=True)]
            mean = statistics.fmean(values)
            most = max(more, key=abs)
            print(
                f"| {pattern} | {name} | {mean:.4f} | {statistics.fmean(more):+.5f} | {most:+.5f} | "
                f"{sizes[name]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
