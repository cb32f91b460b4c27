"""What one-shot pruning costs at several depths: ``python -m benchmarks.prune_depth``.

Decoders of Llama's shape with random weights are pruned to 2:4 with SparseGPT: block by block, and with ``blocks=[]``,
where the model runs up to each layer. Counted are the multiply-adds with weights and of attention that the model runs,
over those of one forward pass of the calibration data; the calls of a block that run, over the number of batches, the
stopped ones too; and the largest memory that tensors of outputs take, over the hidden states of all batches. They do
not depend on the machine. The CPU seconds do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_nm import prune
from lightning_nm.kernels.cpu.library import cpu_name
from lightning_nm.methods.blocks import Memory


class ModelProducts(TorchDispatchMode):
    """Counts multiply-adds of the operators that read a weight of a model, or attend."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = {parameter.data_ptr() for parameter in model.parameters()}
        self.macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            return output
        read = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        is_attention = "scaled_dot_product" in str(func)
        if is_attention or any(tensor.data_ptr() in self.weights for tensor in read):
            self.macs += formula(*args, **(kwargs or {}), out_val=output) // 2
        return output


@contextmanager
def counted_calls(kind: type[nn.Module]) -> Iterator[list[int]]:
    """Count the calls of all modules of a class that run; an answer from memory is none."""
    calls = [0]
    forward = kind.forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return forward(self, *args, **kwargs)

    kind.forward = counted
    try:
        yield calls
    finally:
        kind.forward = forward


@contextmanager
def watched_memory() -> Iterator[list[int]]:
    """The largest number of bytes of remembered outputs."""
    most = [0]
    answer = Memory._answer

    def watched(self: Memory, *args: Any, **kwargs: Any) -> Any:
        output = answer(self, *args, **kwargs)
        stores = {id(entry.answers): entry.answers for entry in self._entries.values()}
        leaves = tree_leaves([list(store.values()) for store in stores.values()])
        most[0] = max(most[0], sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)))
        return output

    Memory._answer = watched  # type: ignore[method-assign]
    try:
        yield most
    finally:
        Memory._answer = answer  # type: ignore[method-assign]


def decoder(depth: int, options: argparse.Namespace) -> nn.Module:
    """A decoder of Llama's shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.width,
        intermediate_size=options.intermediate,
        num_hidden_layers=depth,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads // 3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def measure(depth: int, options: argparse.Namespace, blocks: list[str] | None) -> dict[str, float]:
    """Prune one decoder twice: timed, and counted."""
    shape = (options.sequences // options.batches, options.tokens)
    batches = [
        {"input_ids": torch.randint(options.vocabulary, shape)} for _ in range(options.batches)
    ]
    model = decoder(depth, options)
    start = time.process_time()
    prune(model, "2:4", options.score, batches, blocks=blocks)
    found = {"seconds": time.process_time() - start}

    model = decoder(depth, options)
    kind: Any = type(model.get_submodule("model.layers.0"))
    with torch.no_grad(), ModelProducts(model) as once:
        for batch in batches:
            model(**batch)
    with (
        ModelProducts(model) as products,
        counted_calls(kind) as calls,
        watched_memory() as memory,
    ):
        prune(model, "2:4", options.score, batches, blocks=blocks)
    found["passes"] = products.macs / once.macs
    found["calls of a block"] = calls[0] / depth / options.batches
    found["remembered"] = memory[0] / (4 * options.sequences * options.tokens * options.width)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each depth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--depths", nargs="+", type=int, default=[6, 12, 30])
    parser.add_argument(
        "--whole",
        nargs="*",
        type=int,
        default=[6, 12, 30],
        help="depths at which the whole model runs",
    )
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--intermediate", type=int, default=512)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--score", choices=("magnitude", "wanda", "sparsegpt"), default="sparsegpt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    runs = []
    print("| blocks | way | CPU seconds | forward passes | calls of a block | remembered |")
    print("|---|---|---|---|---|---|")
    for depth in options.depths:
        for way, blocks in (("block by block", None), ("whole model", [])):
            if blocks is not None and depth not in options.whole:
                continue
            found = measure(depth, options, blocks)
            runs.append({"depth": depth, "way": way, **found})
            values = " | ".join(f"{value:.2f}" for value in found.values())
            print(f"| {depth} | {way} | {values} |", flush=True)
    if options.json:
        setting = {key: value for key, value in vars(options).items() if key != "json"}
        result = {"cpu": cpu_name(), "torch": torch.__version__, "setting": setting, "runs": runs}
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
