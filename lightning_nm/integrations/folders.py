"""The sparsifier's state in the checkpoint folders of a transformers Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from lightning_nm.export.atomic_write import replacing
from lightning_nm.export.sources import STATE_FILE, read_file
from lightning_nm.training.checkpoint import check_schema

_START_ANEW = "to train sparse from its weights, load them into the model and train without resume_from_checkpoint"
_OTHER_FOLDER = (
    "if the training resumes from another folder, name it: NMTrainerCallback(resume_from=...)"
)


def saved_folder(args: TrainingArguments, state: TrainerState) -> Path | None:
    """The checkpoint folder of the present step; ``None`` if there is none."""
    name, output = f"checkpoint-{state.global_step}", Path(args.output_dir)
    trials = output.glob(f"*/{name}") if state.is_hyper_param_search else ()
    found = [folder for folder in (output / name, *trials) if folder.is_dir()]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def write_state(folder: Path, state: Mapping[str, Any], global_step: int) -> None:
    """Write a sparsifier's state into a checkpoint folder; the file appears only when it is complete."""
    with replacing(folder / STATE_FILE) as new:
        torch.save({**state, "global_step": global_step}, new)


def read_state(folder: Path, global_step: int) -> dict[str, Any]:
    """Read the state of a checkpoint folder.

    Raises:
        ValueError: If the folder holds none, or one that is damaged, of another schema or of another step.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        fault = f"there is no '{path}', which holds the masks and the weights of pruned entries"
        raise ValueError(
            f"{fault}: {_OTHER_FOLDER}; if it was saved without NMTrainerCallback, {_START_ANEW}"
        )
    state: dict[str, Any] = read_file(path)
    check_schema(state)
    if state["global_step"] != global_step:
        fault = f"'{path}' was saved at step {state['global_step']}, but the training resumes at step {global_step}"
        raise ValueError(f"{fault}: {_OTHER_FOLDER}")
    return state
