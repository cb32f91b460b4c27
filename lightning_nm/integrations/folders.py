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

_OTHER_FOLDER = (
    "if the training resumes from another folder, name it: NMTrainerCallback(resume_from=...)"
)


def saved_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The checkpoint folder of the present step; it may not exist."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    trials = folder.parent.glob(f"*/{folder.name}") if state.is_hyper_param_search else ()
    found = [each for each in (folder, *trials) if each.is_dir()]
    return max(found, key=lambda each: each.stat().st_mtime, default=folder)


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
        raise ValueError(
            f"there is no '{path}', which holds the masks and the weights of pruned entries: {_OTHER_FOLDER}; if it "
            "was saved without NMTrainerCallback, to train sparse from its weights, load them into the model and train "
            "without resume_from_checkpoint"
        )
    state: dict[str, Any] = read_file(path)
    check_schema(state)
    if state["global_step"] != global_step:
        raise ValueError(
            f"'{path}' was saved at step {state['global_step']}, but the training resumes at step {global_step}: "
            f"{_OTHER_FOLDER}"
        )
    return state
