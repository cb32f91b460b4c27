"""Small transformers models without downloads, their data, and Trainers that stay silent."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainingArguments,
)

VOCABULARY, TOKENS = 32, 8


def gpt2(dropout=0.1):
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": TOKENS, "vocab_size": VOCABULARY}
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def llama():
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=TOKENS))


def mixtral():
    """Its experts are saved one by one, under other names than they have in the model."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": TOKENS}
    return MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=VOCABULARY))


def bert():
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = BertConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, num_labels=3)
    return BertForSequenceClassification(config)


def new(make):
    """A model with the same weights each time."""
    torch.manual_seed(0)
    return make()


def data(model, size=24):
    """Sequences; their labels are the tokens themselves, or one of three classes."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (size, TOKENS), generator=generator)
    labels = tokens if "LM" in type(model).__name__ else tokens[:, 0] % 3
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def arguments(folder, **options):
    """Silent ones, for four steps unless the number of epochs is given."""
    defaults = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no"}
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    steps = {} if "num_train_epochs" in options else {"max_steps": 4}
    return TrainingArguments(output_dir=str(folder), **quiet, **defaults | steps | options)


def trainer(model, folder, callbacks, **options):
    found = data(model)
    return Trainer(
        model, arguments(folder, **options), train_dataset=found, eval_dataset=found[:8], callbacks=callbacks
    )
