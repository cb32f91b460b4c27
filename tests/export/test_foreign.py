"""Checkpoints of other libraries: bitmasks of compressed-tensors are read, packed integers are named and refused."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_nm.cli import main
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
    return {
        "compressed": values,
        "bitmask": torch.from_numpy(bits),
        "shape": torch.tensor(weight.shape).reshape(-1, 1),
    }


def pruned(rows, columns, dtype=torch.float32):
    """2:4 without values that are zero by chance."""
    dense = nm_prune(torch.randn(rows, columns), "2:4")
    return torch.where(dense == 0, 0.0, dense.sign() + dense).to(dtype)


def folder_of_bitmasks(path, dense, suffix="", **config):
    path.mkdir()
    files = {}
    for key, weight in dense.items():
        if key == "head.weight":
            files[key] = weight
            continue
        name = key if suffix else key.removesuffix(".weight")
        files.update({f"{name}.{part}": value for part, value in bitmask_of(weight).items()})
    save_file(files, path / "model.safetensors")
    sparsity = {"format": "sparse-24-bitmask", "sparsity_structure": "2:4"}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "sparsity_config": sparsity,
        **config,
    }
    content = {"model_type": "llama", "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("shape", [(8, 16), (3, 12), (5, 4), (1, 100)])
def test_bitmasks_are_read(tmp_path, dtype, suffix, shape):
    torch.manual_seed(math.prod(shape))
    dense = {"a.weight": pruned(*shape, dtype), "b.0.weight": pruned(*shape, dtype)}
    dense["head.weight"] = torch.randn(4, 8)
    path = folder_of_bitmasks(tmp_path / "in", dense, suffix)
    for place in (path, path / "model.safetensors"):
        source = read_checkpoint(place)
        weights, states = source.weights, source.states
        assert states == []
        assert set(weights) == set(dense)
        for key, weight in dense.items():
            assert weights[key].dtype == weight.dtype
            assert torch.equal(weights[key].float(), weight.float())
    result = verify(path, "2:4", include=["a", "b.0"], allow_dense=True)
    assert result.ok
    assert result.count("dense") == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bitmask_of_a_single_value_is_read(tmp_path, dtype):
    """torch takes another way for one value, which it lacks for float8."""
    path = folder_of_bitmasks(tmp_path / "in", {"a.weight": torch.eye(1, 4).to(dtype)})
    weights = read_checkpoint(path).weights
    assert weights["a.weight"].float().tolist() == [[1, 0, 0, 0]]


def test_an_ordinary_folder_is_made(tmp_path, capsys):
    dense = {"a.weight": pruned(8, 16), "head.weight": torch.randn(4, 8)}
    path = folder_of_bitmasks(tmp_path / "in", dense)
    (path / "tokenizer.json").write_text("{}")
    assert main(["export", str(path), "--to", "torch", "-o", str(tmp_path / "out")]) == 0
    said = "bitmasks became tensors with zeros: 1 of 2 matrices are 2:4"
    assert said in capsys.readouterr().out
    words = ["verify", str(tmp_path / "out"), "--pattern", "2:4", "--allow-dense"]
    assert main(words) == 0
    assert "1 of 2 matrices are N:M" in capsys.readouterr().out
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {key: value.tolist() for key, value in written.items()} == {
        key: value.tolist() for key, value in dense.items()
    }
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "llama"}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    # transformers would not read the bitmasks, and leave the weights as they were drawn.
    model = "transformers.LlamaForCausalLM"
    words = ["export", str(path), "--to", "pt2", "-o", str(tmp_path / "a.pt2"), "--model", model]
    assert main(words) == 2
    assert "make an ordinary folder of it by `lightning-nm export" in capsys.readouterr().err


def test_quantised_weights_under_bitmasks_keep_their_scales(tmp_path):
    dense = {"a.weight": pruned(8, 16, torch.float8_e4m3fn)}
    path = folder_of_bitmasks(tmp_path / "in", dense, format="float-quantized")
    assert main(["export", str(path), "--to", "torch", "-o", str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (config["format"], "sparsity_config" in config) == ("float-quantized", False)
    assert verify(tmp_path / "out", "2:4").ok


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.bitmask": None}, "1:1"),
        ({"a.shape": None}, "there is no 'a.shape'"),
        ({"a.compressed": None}, "there is no 'a.compressed'"),
        ({"a.shape": torch.tensor([8, 1 << 40])}, "do not fit the shape"),
        ({"a.shape": torch.tensor([8, -16])}, "its shape is"),
        ({"a.compressed": torch.ones(8, 7)}, "it keeps 64 entries, and there are 56 values"),
        ({"a.bitmask": torch.full((8, 2), 255, dtype=torch.uint8)}, "it keeps 128 entries"),
        ({"a.weight": torch.ones(8, 16)}, "holds both 'a.weight' and 'a.bitmask'"),
    ],
)
def test_damaged_bitmasks(tmp_path, change, message):
    files = {f"a.{part}": value for part, value in bitmask_of(pruned(8, 16)).items()}
    files.update(change)
    files = {key: value for key, value in files.items() if value is not None}
    save_file(files, tmp_path / "a.safetensors")
    if message == "1:1":  # the values of a weight whose mask is gone are a dense matrix
        assert not verify(tmp_path / "a.safetensors", "2:4").ok
        return
    with pytest.raises(ValueError, match=message):
        verify(tmp_path / "a.safetensors", "2:4")


CONFIGS = [
    ({"quant_method": "gptq", "bits": 4}, r"quantised \(gptq, 4 bits\)"),
    ({"quant_method": "awq", "bits": 4}, "awq"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "marlin-24"),
    ({"sparsity_config": {"format": "something"}}, "compressed-tensors, something"),
    ({"quant_method": "new"}, r"quantised \(new\)"),
]


@pytest.mark.parametrize("name", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_quantised_folders_are_named(tmp_path, capsys, name, config, message):
    save_file({"a.weight": pruned(8, 16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({name: config}))
    with pytest.raises(ValueError, match=message):
        verify(tmp_path, "2:4")
    assert main(["verify", str(tmp_path), "--pattern", "2:4"]) == 2
    assert main(["export", str(tmp_path), "--to", "torch", "-o", str(tmp_path / "a.pt")]) == 2
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize(
    ("key", "writer"),
    [
        ("a.qweight", "GPTQ or AWQ"),
        ("a.weight_packed", "pack-quantized"),
        ("a.weight.quant_map", "bitsandbytes"),
        ("a.weight.positions", r"pack\(\) of lightning_nm"),
    ],
)
def test_packed_weights_are_named_without_a_config(tmp_path, key, writer):
    integers = torch.ones(2, 16, dtype=torch.int32)
    save_file({"b.weight": pruned(8, 16), key: integers}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=f"holds '{key}', a weight as .*{writer}.* packs it"):
        verify(tmp_path / "a.safetensors", "2:4")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "fp8"}},
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "sparsity_config": None,
            }
        },
    ],
)
def test_weights_in_place_are_read(tmp_path, config):
    save_file({"a.weight": pruned(8, 16, torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert verify(tmp_path, "2:4").ok
