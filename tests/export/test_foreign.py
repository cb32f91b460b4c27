"""Checkpoints of other libraries: bitmasks of compressed-tensors are read, packed integers are named and refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_nm.export import read_checkpoint, verify
from lightning_nm.functional import nm_prune

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def bitmask_of(weight):
    """The values, the mask and the shape of a weight, by numpy: bits of a row, the lowest first, in whole bytes."""
    mask = weight.float().numpy() != 0
    bits = np.packbits(mask, axis=-1, bitorder="little")
    bytes_of = weight.view(torch.int8) if weight.itemsize == 1 else weight
    values = bytes_of[torch.from_numpy(mask)].view(weight.dtype)
    if weight.shape[-1] % 4 == 0:
        values = values.reshape(weight.shape[0], -1)
    shape = torch.tensor(weight.shape).reshape(-1, 1)
    return {"compressed": values, "bitmask": torch.from_numpy(bits), "shape": shape}


def pruned(rows, columns, dtype=torch.float32):
    """2:4 without values that are zero by chance."""
    dense = nm_prune(torch.randn(rows, columns), "2:4")
    return torch.where(dense == 0, 0.0, dense.sign() + dense).to(dtype)


def save_folder(dense, suffix="", **config):
    """A folder "in" with bitmasks of all weights but the head's."""
    Path("in").mkdir()
    files = {}
    for key, weight in dense.items():
        if key == "head.weight":
            files[key] = weight
            continue
        name = key if suffix else key.removesuffix(".weight")
        files.update({f"{name}.{part}": value for part, value in bitmask_of(weight).items()})
    save_file(files, "in/model.safetensors")
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
    quantization = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    quantization |= {"sparsity_config": sparsity} | config
    content = {"model_type": "llama", "quantization_config": quantization}
    Path("in/config.json").write_text(json.dumps(content))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("shape", [(8, 16), (3, 12), (5, 4), (1, 100)])
def test_bitmasks_are_read(dtype, suffix, shape):
    torch.manual_seed(math.prod(shape))
    dense = {"a.weight": pruned(*shape, dtype), "head.weight": torch.randn(4, 8)}
    # torch takes another way for one value, which it lacks for float8.
    dense["one.weight"] = torch.eye(1, 4).to(dtype)
    save_folder(dense, suffix)
    for place in ("in", "in/model.safetensors"):
        source = read_checkpoint(place)
        assert source.states == []
        assert set(source.weights) == set(dense)
        for key, weight in dense.items():
            assert source.weights[key].dtype == weight.dtype
            assert torch.equal(source.weights[key].float(), weight.float())
    result = verify("in", "2:4", include=["a", "one"], allow_dense=True)
    assert result.ok
    assert result.count("dense") == 1


def test_an_ordinary_folder_is_made(command):
    dense = {"a.weight": pruned(8, 16), "head.weight": torch.randn(4, 8)}
    save_folder(dense)
    Path("in/tokenizer.json").write_text("{}")
    assert "bitmasks became tensors with zeros: 1 of 2 matrices are 2:4" in command(
        "export in --to torch -o out"
    )
    written = load_file("out/model.safetensors")
    assert written.keys() == dense.keys()
    assert all(torch.equal(written[key], weight) for key, weight in dense.items())
    assert json.loads(Path("out/config.json").read_text()) == {"model_type": "llama"}
    assert Path("out/tokenizer.json").is_file()
    # transformers would not read the bitmasks, and leave the weights as they were drawn.
    model = "--model transformers.LlamaForCausalLM"
    assert "make an ordinary folder of it by `lightning-nm export" in command(
        f"export in --to pt2 -o a.pt2 {model}", 2
    )


def test_quantised_weights_under_bitmasks_keep_their_scales(command):
    save_folder({"a.weight": pruned(8, 16, torch.float8_e4m3fn)}, format="float-quantized")
    command("export in --to torch -o out")
    config = json.loads(Path("out/config.json").read_text())["quantization_config"]
    assert (config["format"], "sparsity_config" in config) == ("float-quantized", False)
    assert verify("out", "2:4").ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.shape": None}, "there is no 'a.shape'"),
        ({"a.compressed": None}, "there is no 'a.compressed'"),
        ({"a.shape": torch.tensor([8, 1 << 40])}, "do not fit the shape"),
        ({"a.shape": torch.tensor([8, -16])}, "its shape is"),
        ({"a.compressed": torch.ones(8, 7)}, "it keeps 64 entries, and there are 56 values"),
        ({"a.bitmask": torch.full((8, 2), 255, dtype=torch.uint8)}, "it keeps 128 entries"),
        ({"a.weight": torch.ones(8, 16)}, "holds both 'a.weight' and 'a.bitmask'"),
        # In other forms, which no config tells of.
        ({"a.qweight": torch.ones(2, 16).int()}, "'a.qweight', a weight as .*GPTQ or AWQ.* packs"),
        ({"a.weight_packed": torch.ones(2, 16).int()}, "a weight as .*pack-quantized.* packs it"),
        ({"a.weight.quant_map": torch.ones(2, 16).int()}, "a weight as .*bitsandbytes.* packs it"),
        ({"a.weight.positions": torch.ones(2, 16).int()}, r"pack\(\) of lightning_nm packs it"),
    ],
)
def test_damaged_bitmasks_and_packed_integers(change, message):
    files = {f"a.{part}": value for part, value in bitmask_of(pruned(8, 16)).items()} | change
    found = {key: value for key, value in files.items() if value is not None}
    save_file(found, "a.safetensors")
    with pytest.raises(ValueError, match=message):
        verify("a.safetensors", "2:4")


def test_values_whose_bitmask_is_gone_are_a_dense_matrix():
    files = bitmask_of(pruned(8, 16))
    save_file({f"a.{part}": files[part] for part in ("compressed", "shape")}, "a.safetensors")
    assert not verify("a.safetensors", "2:4").ok


def save_config(config):
    save_file({"a.weight": pruned(8, 16, torch.float8_e4m3fn)}, "model.safetensors")
    Path("config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised (gptq, 4 bits)"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
        ({"sparsity_config": {"format": "something"}}, "compressed-tensors, something"),
        ({"quant_method": "new"}, "quantised (new)"),
    ],
)
def test_quantised_folders_are_named(command, name, config, message):
    save_config({name: config})
    for words in ("verify . --pattern 2:4", "export . --to torch -o a.pt"):
        assert message in command(words, 2)
    assert not Path("a.pt").exists()


FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized", "sparsity_config": None}


@pytest.mark.parametrize("config", [None, {"quant_method": "fp8"}, FLOAT])
def test_weights_in_place_are_read(config):
    save_config({"quantization_config": config})
    assert verify(".", "2:4").ok
