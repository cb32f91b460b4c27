"""Language modelling over the text files of a folder, with a model's own tokenizer."""

from pathlib import Path

import torch
from torch import Tensor

from studies.data.held_out_files import HeldOutFiles


class TextFiles(HeldOutFiles):
    """The files of a folder that match a pattern. Each is tokenized by itself, and ends with the tokenizer's end token.

    Attributes:
        vocabulary: Number of the tokenizer's tokens, after `setup`.

    Args:
        folder: The folder of the text.
        tokenizer: Folder of the tokenizer, as `save_pretrained` writes it.
        pattern: Which files, relative to the folder.
        context: This and the rest as in :class:`~studies.data.held_out_files.HeldOutFiles`.
        batch_size: Windows in a batch.
        val_fraction: Fraction of the bytes that is held out.
        val_size: Windows for validation and test.
        seed: Seed of the training order.
        num_workers: Worker processes of each loader.
        tuning: Hold out training files in place of the held-out ones.
        digest: SHA-256 of the text.

    Raises:
        ValueError: As there, and in `setup` if no file matches, one is no text, or the tokenizer is missing or has no
            end token.
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
        super().__init__(
            context, batch_size, val_fraction, val_size, seed, num_workers, tuning, digest
        )
        self.folder = folder
        self.tokenizer = tokenizer
        self.pattern = pattern
        self.vocabulary = 0

    def files(self) -> tuple[str, dict[str, bytes]]:
        """The folder, and the files in it."""
        root = Path(self.folder)
        found = {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in root.glob(self.pattern)
            if path.is_file()
        }
        if not found:
            raise ValueError(f"folder={self.folder!r} has no files that match {self.pattern!r}")
        for path, content in found.items():
            try:
                content.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"'{root / path}' is no text in UTF-8 ({error}): leave it out by `pattern`"
                ) from error
        return self.folder, found

    def tokens(self, contents: list[bytes]) -> Tensor:
        """Tokens, int32 ``[L]``."""
        from transformers import AutoTokenizer

        # transformers would look for another name on the network.
        if not Path(self.tokenizer).is_dir():
            raise ValueError(f"there is no folder tokenizer={self.tokenizer!r}")
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        if tokenizer.eos_token_id is None:
            raise ValueError(
                f"tokenizer={self.tokenizer!r} has no end token, which ends each file: set its eos_token and save it"
            )
        self.vocabulary = len(tokenizer)
        texts = [content.decode() for content in contents]
        # Not verbose: a file may be longer than the model's context, as it is cut into windows.
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
        found = [token for file in encoded for token in [*file, tokenizer.eos_token_id]]
        return torch.tensor(found, dtype=torch.int32)
