"""Time a language model's head whose rows are those of an int8 embedding, against a dense one in bfloat16.

``python -m benchmarks.int8_head --threads 1`` prints milliseconds of both, interleaved in one process, by the number of
tokens. By default the head is that of SmolLM2-135M: 49152 x 576.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.timing import interleaved
from lightning_nm import pack
from lightning_nm.functional import nm_prune


class Tied(nn.Module):
    """An embedding, a head that shares its weight, and one N:M layer, without which nothing is packed."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.body = nn.Linear(width, width, bias=False)
        self.body.weight.data = nm_prune(self.body.weight.data, "2:4")
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 16, 64])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    dense = Tied(args.words, args.width).bfloat16().eval()
    packed = Tied(args.words, args.width).bfloat16()
    packed.load_state_dict(dense.state_dict())
    pack(packed, dtype="int8", int8_embeddings="embedding")
    print("tokens  dense ms  int8 ms  ratio")
    for tokens in args.tokens:
        x = torch.randn(tokens, args.width).bfloat16()
        heads = [partial(dense.head, x), partial(packed.head, x)]
        one, other = map(statistics.median, interleaved(heads, args.repeats))
        print(f"{tokens:6} {1e3 * one:9.2f} {1e3 * other:8.2f} {one / other:6.2f}")


if __name__ == "__main__":
    main()
