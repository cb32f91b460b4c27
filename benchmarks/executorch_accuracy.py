"""The accuracy of a trained classifier as an int8 program in ExecuTorch's runtime, for studies.

A callback, which the studies of ``studies/cycles`` name. It runs in an environment of the extra ethos-u
(``make .venv-ethos/.dev``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_nm.export.executorch.program import lower, make_quantizer, outputs_of
from lightning_nm.export.executorch.quantized import quantize, trace

Batch = tuple[Tensor, Tensor]

CALIBRATION_BATCHES = 4
"""The first training batches, as ``lightning-nm export`` takes."""


class ExecutorchAccuracy(Callback):
    """Logs `test_acc_int8`, in [0, 1]: the accuracy on the test set of the model in int8, by ExecuTorch on the CPU.

    Weights have one int8 scale per output channel, activations one per tensor, from the first training batches.
    XNNPACK computes the GEMMs.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the plain model from the state, quantise it, and run it on the test set."""
        # The state of a module in training is the N:M model under its own keys, whatever its layers compute with.
        arguments = {key: value for key, value in pl_module.hparams.items() if key[0] != "_"}
        model = type(pl_module)(**arguments)
        model.load_state_dict(pl_module.state_dict())
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        calibration = _first(datamodule.train_dataloader(), CALIBRATION_BATCHES)
        test = list(datamodule.test_dataloader())
        pl_module.log("test_acc_int8", int8_accuracy(model, calibration, test))


def int8_accuracy(model: nn.Module, calibration: Iterable[Batch], test: Iterable[Batch]) -> float:
    """The fraction of right answers of a classifier in int8.

    Args:
        model: Takes images `[B, C, H, W]` and gives logits `[B, classes]`.
        calibration: Batches of images and labels, of one size.
        test: The same for the test; a smaller last batch is filled up, and the answers to the filling are not counted.
    """
    inputs = [(images,) for images, _ in calibration]
    example = inputs[0]
    size = len(example[0])
    graph = quantize(trace(model, example), make_quantizer("cpu"), inputs)
    with TemporaryDirectory() as folder:
        content = lower(graph, example, "cpu", Path(folder, "files"), {})[0]
    right = total = 0
    for images, labels in test:
        for start in range(0, len(images), size):
            part = images[start : start + size]
            missing = size - len(part)
            filled = torch.cat([part, example[0][:missing]])
            (logits,) = outputs_of(content, (filled,))
            answers = logits[: len(part)].argmax(dim=1)
            right += int((answers == labels[start : start + size]).sum())
            total += len(part)
    return right / total


def _first(batches: Iterable[Batch], count: int) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        if number == count:
            return
        yield batch
