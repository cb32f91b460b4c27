"""The files of each runtime, made of a model that transformers saved; one that is there already is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def read_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a folder, in evaluation mode."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def empty_model(folder: Path, dtype: torch.dtype) -> Any:
    """A model of the same architecture, without its weights."""
    import transformers
    from accelerate import init_empty_weights

    config = transformers.AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()  # accelerate gives a tied head a tensor of its own
    return model


def dense_folder(source: Path, folder: Path) -> Path:
    """The folder of the dense model; of a GGUF file one with its dequantised weights is made."""
    if source.suffix != ".gguf":
        return source
    import transformers

    made = folder / "dense"
    with _once(made) as missing:
        if missing is not None:
            place, file = str(source.parent), source.name
            model = transformers.AutoModelForCausalLM.from_pretrained(
                place,
                gguf_file=file,
                dtype=torch.float32,
                quantization_config=transformers.GgufConfig(dequantize=True),
            )
            model.save_pretrained(missing)
            transformers.AutoTokenizer.from_pretrained(place, gguf_file=file).save_pretrained(
                missing
            )
    return made


def pruned_folder(dense: Path, pattern: str, folder: Path) -> Path:
    """The dense model pruned by magnitude: it has the time of a trained one, and not its perplexity."""
    from lightning_nm import prune

    made = folder / f"magnitude-{pattern.replace(':', '-')}"
    with _once(made) as missing:
        if missing is not None:
            model = read_model(dense, torch.float32)
            prune(model.model, pattern, skip_first_last=False)
            model.save_pretrained(missing)
    return made


def packed_file(sparse: Path, pattern: str, dtype: str, folder: Path) -> Path:
    """A packed file by ``lightning-nm export`` of the model in bfloat16; in int8 also of the embeddings."""
    name = f"packed-{pattern.replace(':', '-')}"
    made = folder / f"{name}-{dtype}.safetensors"
    half = folder / f"{name}-bfloat16"
    with _once(half) as missing:
        if missing is not None:
            read_model(sparse, torch.bfloat16).save_pretrained(missing)
    if not made.exists():
        options = ["--dtype", "int8", "--int8-embeddings", "*embed*"] if dtype == "int8" else []
        command = [sys.executable, "-m", "lightning_nm", "export", str(half), "-o", str(made)]
        subprocess.run([*command, "--pattern", pattern, *options], check=True, stdout=sys.stderr)
    return made


def onnx_folder(dense: Path, precision: str, folder: Path, *, prune_lm_head: bool) -> Path:
    """A folder of onnxruntime-genai's builder."""
    made = folder / f"onnx-{precision}{'' if prune_lm_head else '-all'}"
    options = [f"prune_lm_head={str(prune_lm_head).lower()}"]
    if precision == "int8":
        # Embeddings of 8 bits are not known to the builder, so that the head is not theirs.
        options.append("shared_embeddings=false")
    else:
        options.append("shared_embeddings=true")
    if precision != "float32":
        options.append("int4_accuracy_level=4")
    with _once(made) as missing:
        if missing is not None:
            command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(dense)]
            command += ["-o", str(missing), "-p", {"float32": "fp32"}.get(precision, precision)]
            command += ["-e", "cpu", "-c", str(folder / "onnx-cache")]
            subprocess.run(
                [*command, "--extra_options", *options], check=True, stdout=subprocess.DEVNULL
            )
    return made


# ------------------------------------------------------------------------------------------------------ OpenVINO


class WithCache(nn.Module):
    """A Llama of transformers whose cache of keys and values are inputs and outputs, for export."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, lines: Tensor, kept: Tensor, *past: Tensor) -> Any:
        """Scores of the `kept` places of new tokens, and the longer cache.

        Args:
            ids: ``[batch, tokens]``.
            lines: ``[batch]``: which line of the cache each line of tokens goes on.
            kept: Places of tokens whose scores are wanted.
            past: Keys and values of each layer, ``[batch, heads, tokens, features]``.
        """
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

        decoder, config = self.model.model, self.model.config
        hidden = decoder.embed_tokens(ids)
        before = past[0].shape[2]
        places = before + torch.arange(ids.shape[1])
        seen = torch.arange(before + ids.shape[1])[None] <= places[:, None]
        mask = torch.where(seen, 0.0, float("-inf")).to(hidden.dtype)[None, None]
        cos, sin = decoder.rotary_emb(hidden, places[None])
        groups = config.num_attention_heads // config.num_key_value_heads
        cache = []
        for number, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query, key, value = (
                projection(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            key = torch.cat([past[2 * number].index_select(0, lines), key], 2)
            value = torch.cat([past[2 * number + 1].index_select(0, lines), value], 2)
            cache += [key, value]
            mixed = nn.functional.scaled_dot_product_attention(
                query,
                repeat_kv(key, groups),
                repeat_kv(value, groups),
                mask,
                scale=attention.scaling,
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        kept_hidden = decoder.norm(hidden).index_select(1, kept)
        return (self.model.lm_head(kept_hidden), *cache)


def openvino_file(dense: Path, folder: Path, *, int8: bool) -> Path:
    """A stateful graph, with weights in float32 or, by NNCF's default for int8, in 8 bits for each output."""
    import nncf
    import openvino

    graph = folder / "openvino-float32.xml"
    if not graph.exists():
        openvino.save_model(_stateful(read_model(dense, torch.float32)), graph, False)
    if not int8:
        return graph
    small = folder / "openvino-int8.xml"
    if not small.exists():
        weights = nncf.compress_weights(openvino.Core().read_model(graph))
        openvino.save_model(weights, small, False)
    return small


def _stateful(model: Any) -> Any:
    import numpy
    import openvino
    from openvino import opset13
    from openvino._offline_transformations import apply_make_stateful_transformation

    config = model.config
    shape = 2, config.num_key_value_heads, 3, config.head_dim
    cache = [torch.randn(shape) for _ in range(2 * config.num_hidden_layers)]
    ids = torch.ones(2, 4, dtype=torch.long)
    example = (ids, torch.arange(2, dtype=torch.int32), torch.tensor([3]), *cache)
    with torch.no_grad():
        graph = openvino.convert_model(WithCache(model), example_input=example)
    names = ["ids", "lines", "kept", *(f"past {number}" for number in range(len(cache)))]
    for port, name in zip(graph.inputs, names, strict=True):
        port.get_tensor().set_names({name})
        size = {"ids": [-1, -1], "lines": [-1], "kept": [-1]}.get(
            name, [-1, shape[1], -1, shape[3]]
        )
        port.get_node().set_partial_shape(openvino.PartialShape(size))
    pairs = {}
    for number, port in enumerate(graph.outputs[1:]):
        port.get_tensor().set_names({f"present {number}"})
        pairs[f"past {number}"] = f"present {number}"
    graph.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(graph, pairs)
    # A cache that was reset is empty, and has as many lines as the tokens.
    sizes = opset13.shape_of(graph.input("ids"), output_type="i64")
    zero = opset13.constant(numpy.array([0]))
    batch = opset13.gather(sizes, zero, opset13.constant(0))
    empty = [batch, *(opset13.constant(numpy.array([size])) for size in (shape[1], 0, shape[3]))]
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            none = opset13.constant(0.0, dtype=node.get_output_element_type(0))
            node.set_arguments([opset13.broadcast(none, opset13.concat(empty, axis=0))])
    graph.validate_nodes_and_infer_types()
    return graph


# ----------------------------------------------------------------------------------------------------- llama.cpp


def gguf_file(dense: Path, kind: str, folder: Path) -> Path:
    """A GGUF file without a tokenizer, of the dense weights, quantised by llama.cpp."""
    import llama_cpp

    whole = folder / "dense-F32.gguf"
    if not whole.exists():
        _write_gguf(read_model(dense, torch.float32), whole)
    made = folder / f"dense-{kind}.gguf"
    if not made.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        options.nthread = torch.get_num_threads()
        status = llama_cpp.llama_model_quantize(str(whole).encode(), str(made).encode(), options)
        if status:
            raise RuntimeError(f"llama_model_quantize returned {status}")
    return made


def _write_gguf(model: Any, file: Path) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "lm_head": "output",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for key, weight in model.state_dict().items():
        module = key.removesuffix(".weight")
        if module == "lm_head" and config.tie_word_embeddings:
            continue
        prefix = ""
        if module.startswith("model.layers."):
            _, _, number, module = module.split(".", 3)
            prefix = f"blk.{number}."
        name = names[module]
        if name in heads:
            # llama.cpp rotates neighbours, transformers the halves of a head.
            weight = weight.unflatten(0, (heads[name], 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{prefix}{name}.weight", weight.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# -------------------------------------------------------------------------------------------------------- shared


@contextmanager
def _once(made: Path) -> Iterator[Path | None]:
    """Where to make a folder, which is renamed when it is complete; ``None`` if it is there."""
    if made.exists():
        yield None
        return
    partial = made.with_name(f"{made.name}.partial")
    yield partial
    os.rename(partial, made)


class _Counter:
    """A file that counts its bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Nothing is held back."""


def saved_size(state: dict[str, Any]) -> int:
    """Bytes of the file that ``torch.save`` makes; tied weights are in it once.

    Example:
        >>> 4000 < saved_size({"weight": torch.zeros(1000)}) < 6000
        True
    """
    counter: Any = _Counter()
    torch.save(state, counter)
    return int(counter.bytes)
