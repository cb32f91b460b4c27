"""Language modelling over the text files of a folder, with a model's own tokenizer."""

import hashlib
from pathlib import Path

import torch

from lightning_nm.demo.data import ResumableDataModule, check_fraction, check_positive
from lightning_nm.demo.help_topics import Windows


class TextFiles(ResumableDataModule):
    """The files of a folder that match a pattern, as tokens.

    Batches are inputs and targets, both int64 ``[B, context]``; a target is the input one token later. Each file is
    tokenized by itself and ends with the tokenizer's end token. The windows do not overlap. Whole files are held out:
    in the order of the hashes of their paths, the last ones that make up `val_fraction` of the characters. Of their
    windows, `val_size` that are equally far apart are for validation and test.

    Args:
        folder: The folder of the text.
        tokenizer: Folder of the tokenizer, as `save_pretrained` writes it.
        pattern: Which files, relative to the folder.
        context: Tokens in a window.
        batch_size: Windows in a batch, on each process.
        val_fraction: Fraction of the characters that is held out.
        val_size: Windows for validation and test; at most all that are held out.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.
        tuning: Leave the held-out files alone and hold out the last files of the training text in their place, to
            choose settings by a text that a later test does not use.
        digest: SHA-256 of the text, if only one text will do, as in a comparison. The error that a wrong one causes
            names the right one.

    Raises:
        ValueError: If an argument is out of range; in `setup` if no file matches, if the digest is another one, or if a
            part of the text is shorter than a window.
    """

    def __init__(
        self,
        folder: str,
        tokenizer: str,
        pattern: str = "**/*.txt",
        context: int = 256,
        batch_size: int = 4,
        val_fraction: float = 0.1,
        val_size: int = 128,
        seed: int = 0,
        num_workers: int = 0,
        tuning: bool = False,
        digest: str | None = None,
    ) -> None:
        super().__init__(batch_size, seed, num_workers)
        check_fraction("val_fraction", val_fraction)
        check_positive(context=context, val_size=val_size)
        self.folder = folder
        self.tokenizer = tokenizer
        self.pattern = pattern
        self.context = context
        self.val_fraction = val_fraction
        self.val_size = val_size
        self.tuning = tuning
        self.digest = digest

    def setup(self, stage: str) -> None:
        """Read the files, tokenize them and cut them into windows."""
        if self.train_set is not None:
            return
        training, held_out = _split(self._texts(), self.val_fraction)
        if self.tuning:
            training, held_out = _split(training, self.val_fraction)
        self.train_set = self._windows(training)
        held = self._windows(held_out)
        size = min(self.val_size, len(held))
        chosen = torch.arange(size, dtype=torch.int64) * len(held) // size
        held.windows = held.windows[chosen]
        self.val_set = self.test_set = held

    def _texts(self) -> list[str]:
        """The files' texts, in the order of the hashes of their paths."""
        root = Path(self.folder)
        paths = {path.relative_to(root).as_posix(): path for path in root.glob(self.pattern)}
        if not paths:
            raise ValueError(f"folder={self.folder!r} has no files that match {self.pattern!r}")
        order = sorted(paths, key=lambda name: hashlib.sha256(name.encode()).digest())
        texts = [paths[name].read_text(encoding="utf-8") for name in order]
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        if self.digest not in (None, digest):
            raise ValueError(
                f"the text in {self.folder} has the SHA-256 {digest}, not digest={self.digest!r}: take the version of "
                "that text, or leave digest out and compare with no results of another text"
            )
        return texts

    def _windows(self, texts: list[str]) -> Windows:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        # A long file is not a sequence that is too long for the model: it is cut into windows.
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        tokens = [token for file in encoded for token in [*file, tokenizer.eos_token_id]]
        return Windows(torch.tensor(tokens, dtype=torch.int32), self.context)


def _split(texts: list[str], val_fraction: float) -> tuple[list[str], list[str]]:
    """The files for training, and the last ones that make up at least a fraction of the characters."""
    wanted = val_fraction * sum(map(len, texts))
    first = len(texts)
    while wanted > 0:
        first -= 1
        wanted -= len(texts[first])
    return texts[:first], texts[first:]
