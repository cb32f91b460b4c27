"""Small transformers models without downloads, their data, and Trainers that stay silent."""

import torch
from transformers import Trainer, TrainingArguments

from tests.support.tiny import CLASSES, VOCABULARY, tiny

TOKENS = 8


def gpt2(dropout=0.1):
    return tiny("gpt2", resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)


def llama():
    return tiny("llama")


def mixtral():
    """Its experts are saved one by one, under other names than they have in the model."""
    return tiny("mixtral")


def bert():
    return tiny("bert")


def new(make):
    """A model with the same weights each time."""
    torch.manual_seed(0)
    return make()


def data(model, size=24):
    """Sequences; their labels are the tokens themselves, or one of three classes."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (size, TOKENS), generator=generator)
    labels = tokens if "LM" in type(model).__name__ else tokens[:, 0] % CLASSES
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def arguments(folder, **options):
    """Silent ones, for four steps unless the number of epochs is given."""
    defaults = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    steps = {} if "num_train_epochs" in options else {"max_steps": 4}
    return TrainingArguments(output_dir=str(folder), **quiet, **defaults | steps | options)


def trainer(model, folder, callbacks, **options):
    found = data(model)
    return Trainer(
        model,
        arguments(folder, **options),
        train_dataset=found,
        eval_dataset=found[:8],
        callbacks=callbacks,
    )
