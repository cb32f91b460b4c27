"""Tiny models of transformers' families, made from configurations alone: nothing is downloaded."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

VOCABULARY, POSITIONS, CLASSES = 32, 16, 3
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CLASS_NAMES = {
    "bert": ("BertForSequenceClassification", "BertConfig"),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig"),
    "mamba": ("MambaForCausalLM", "MambaConfig"),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig"),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "t5": ("T5ForConditionalGeneration", "T5Config"),
    "vit": ("ViTForImageClassification", "ViTConfig"),
}


def _settings(family, width, layers, heads):
    words, positions = {"vocab_size": VOCABULARY}, {"max_position_embeddings": POSITIONS}
    encoder = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    encoder |= {"intermediate_size": 2 * width}
    decoder = encoder | words | {"num_key_value_heads": heads}
    experts = {"num_experts_per_tok": 2}
    if family == "gpt2":
        sizes = {"n_positions": POSITIONS, "n_embd": width, "n_layer": layers, "n_head": heads}
        return words | sizes | {"bos_token_id": 1, "eos_token_id": 2}
    if family == "t5":
        sizes = {
            "d_model": width,
            "d_kv": width // heads,
            "d_ff": 2 * width,
            "num_layers": layers,
            "num_heads": heads,
        }
        return words | sizes | {"decoder_start_token_id": 0}
    if family == "mamba":
        sizes = {
            "hidden_size": width,
            "state_size": 16,
            "num_hidden_layers": layers,
            "time_step_rank": 16,
        }
        return words | sizes
    return {
        "bert": {**encoder, **words, **positions, "num_labels": CLASSES},
        "vit": {**encoder, "num_labels": CLASSES},
        "llama": {**decoder, **positions},
        "mixtral": {**decoder, **positions, **experts, "num_local_experts": 4},
        "qwen3-moe": {
            **decoder,
            **positions,
            **experts,
            "head_dim": width // heads,
            "moe_intermediate_size": width,
            "num_experts": 4,
        },
        "gpt-oss": {**decoder, **experts, "head_dim": width // heads, "num_local_experts": 4},
        "llama4": {
            **decoder,
            **ENDS,
            "intermediate_size_mlp": 2 * width,
            "head_dim": width // heads,
            "num_local_experts": 4,
        },
    }[family]


def tiny(family, *, width=16, layers=2, heads=2, **settings):
    """A new model; `settings` are its configuration's own, by their names there."""
    transformers = pytest.importorskip("transformers")
    model, config = (getattr(transformers, name) for name in CLASS_NAMES[family])
    return model(config(**_settings(family, width, layers, heads) | settings))
