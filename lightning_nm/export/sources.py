"""Read weights and sparsifier states from checkpoints, state dicts, packed models and folders of ``transformers``."""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lightning_nm.export.atomic_write import Weights
from lightning_nm.export.packed_file import PackedFile, is_packed
from lightning_nm.functional import unpack_mask
from lightning_nm.nn.weight import key_of_layer, plain_name
from lightning_nm.training.checkpoint import check_schema

_ARCHIVE = b"PK\x03\x04"  # the first bytes of a file of torch.save
_ONNX = b"\x08"  # the first byte of an ONNX file: its first field is the version of the format
# Records of torch.export's files, new and old.
_OF_PROGRAMS = ("archive_format", "serialized_exported_program.json")
ONNX = "an ONNX graph"
PROGRAM = "a program of torch.export"
_SHOWN = 40  # characters of a text file


def check_archive(path: str | Path) -> None:
    """Compare the checksums of a file of ``torch.save``.

    ``torch.load`` finds a truncated file, but only the checksums reveal damage in the middle, for example after a power
    failure. Files without checksums or of other formats are not checked.

    Raises:
        ValueError: Naming the file and the damaged record.
    """
    # Files that were saved with this option off have wrong checksums, and nothing in them says so.
    if not torch.serialization.get_crc32_options() or not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(
            f"'{path}' is damaged: the contents of its record '{damaged}' do not match their checksum. Use another "
            "checkpoint; if this one was saved under torch.serialization.set_crc32_options(False), set that here, too"
        )


def read_file(path: Path) -> Any:
    """The content of a file of ``torch.save``, of tensors and primitives alone, or the tensors of a safetensors file.

    Raises:
        ValueError: Naming the file, and why it cannot be read.
    """
    # The first bytes tell more of a wrong file than the errors of its reader.
    fault = file_fault(path)
    if fault:
        raise ValueError(f"cannot read '{path}': {fault}")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, KeyError) as error:
            raise ValueError(
                f"cannot read '{path}' as safetensors, it is damaged or truncated: {error}"
            ) from error
    check_archive(path)
    try:
        return load_tensors(path)
    except Exception as error:
        fault = str(error)
        # torch names the class that it refuses to unpickle.
        if other := re.search(r"GLOBAL ([\w.]+)", fault):
            fault = f"it holds a {other[1]}, which only its own program can load safely: save model.state_dict()"
        raise ValueError(f"cannot read '{path}' as tensors alone: {fault}") from error


def _tensors_in(content: Mapping[Any, Any], path: Path, *, nested: bool) -> Weights:
    """The tensors of a dictionary by key.

    Args:
        content: The dictionary.
        path: Of the file, for messages.
        nested: Also those in dictionaries and lists within it, with names joined by dots, but for the states of
            optimizers (names that begin with "optim") and of sparsifiers.

    Raises:
        ValueError: If two tensors have one name.
    """
    found: Weights = {}
    seen = set()  # a list may hold itself, or one list many times
    # A stack in place of recursion, which a deeply nested file would exhaust. Reversed, so that keys keep their order.
    waiting: list[tuple[str, Any]] = [(str(key), value) for key, value in content.items()]
    waiting.reverse()
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Tensor):
            if key in found:
                raise ValueError(f"'{path}' holds two tensors of the name '{key}'")
            found[key] = value
        # Ids stay unique, because `content` holds all objects until the end.
        elif nested and id(value) not in seen and not key.rpartition(".")[2].startswith("optim"):
            seen.add(id(value))
            inner: Iterable[tuple[Any, Any]] = ()
            if isinstance(value, Mapping):
                # Not the state of a sparsifier.
                inner = () if "schema" in value and "layers" in value else value.items()
            elif isinstance(value, list | tuple | set):
                inner = enumerate(value)
            waiting += reversed([(f"{key}.{name}", each) for name, each in inner])
    return found


def load_tensors(file: Path | BinaryIO) -> Any:
    """The content of a file of ``torch.save``, of tensors and primitives alone.

    Indices of sparse tensors are compared with their shapes, which torch does only if asked: others would be written
    outside the memory of the dense tensor.
    """
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        return torch.load(file, map_location="cpu", weights_only=True)


def file_fault(path: Path) -> str:
    """What a look at its first bytes and its size shows to be wrong with a file; empty if it seems sound."""
    size = path.stat().st_size
    if not size:
        return "it is empty (0 bytes), as after an interrupted copy or on a full disk"
    with path.open("rb") as file:
        start = file.read(256)
    # First: a program of torch.export is an archive, too.
    graph = kind_of_graph(path)
    if graph:
        return f"it is {graph}, not a checkpoint: give the checkpoint that it was exported from"
    # Cut, because a file of one to three bytes may be the beginning of an archive.
    if start[:4] == _ARCHIVE[: len(start)]:
        # It looks for the directory at the end of an archive, which a truncated one lacks.
        if zipfile.is_zipfile(path):
            return ""
        return f"it is truncated: the {size} bytes that are there are the beginning of an archive of torch.save"
    # A safetensors file begins with a length in 8 bytes, of which the high ones are 0 and no text.
    text = _text(start)
    if text.startswith("version https://git-lfs"):
        return "it is a Git LFS pointer instead of the file itself: fetch that by `git lfs pull`"
    if text:
        shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        return f"it is text, not a checkpoint, and begins with {shown!r}"
    return ""


def kind_of_graph(path: Path) -> str:
    """The kind of a file that holds a graph of a model; empty for other files."""
    with path.open("rb") as file:
        start = file.read(8)
    # One byte proves little, so that the suffix must agree.
    if path.suffix == ".onnx" and start[:1] == _ONNX:
        return ONNX
    # FlatBuffers have an offset in 4 bytes, then the identifier of their schema, here ET and a version.
    if start[4:6] == b"ET" and path.suffix == ".pte":
        return "a program of ExecuTorch, whose weights are compiled for its target"
    if start[:4] == _ARCHIVE and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.rpartition("/")[2] in _OF_PROGRAMS for name in names):
            return PROGRAM
    return ""


def _text(start: bytes) -> str:
    """The first line, if a file begins with printable text."""
    # The last character may be cut off.
    text = start.decode("utf-8", "replace").rstrip("\ufffd")
    is_text = all(each.isprintable() or each.isspace() for each in text) and "\ufffd" not in text
    return text.strip().split("\n")[0] if is_text else ""


STATE_FILE = "nm_sparsifier.pt"
"""Where :class:`~lightning_nm.integrations.NMTrainerCallback` saves its state in a checkpoint folder."""

# As in `layers.0.experts.3.up_proj.weight`: the matrix of one expert.
_ONE_EXPERT = re.compile(r"\bexperts\.\d+\.")
# In order of preference: safetensors is read without unpickling.
_MODELS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")


def model_file(folder: Path) -> Path | None:
    """The file of a folder that holds a whole model, or the index of several; ``None`` without one."""
    paths = (folder / name for name in _MODELS)
    return next((path for path in paths if path.is_file()), None)


def _read_folder(folder: Path, *, nested: bool) -> Source:
    """Read the weights of a model folder, in one file or in several with an index, and the sparsifier state in it.

    Raises:
        ValueError: If the folder holds no model, a file of it is missing or cannot be read, or its weights are in a
            form that is not read.
    """
    path = model_file(folder)
    if path is None:
        # A Trainer of transformers leaves its checkpoints in such folders of its output folder.
        found = sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())
        if found:
            raise ValueError(
                f"'{folder}' holds no model itself, but folders that may: {', '.join(found)}"
            )
        if any((folder / name).is_file() for name in _ADAPTERS):
            advice = "merge it into its base model and save that"
            raise ValueError(
                f"'{folder}' holds an adapter, whose matrices are not the model's: {advice}"
            )
        raise ValueError(
            f"the folder '{folder}' holds no model: expected one of {', '.join(_MODELS)}"
        )
    content = _read_parts(folder, path) if path.suffix == ".json" else read_file(path)
    if not isinstance(content, Mapping):
        content = {}
    # Before tensors become weights: packed integers could pass for a smaller matrix.
    _check_compression(folder)
    weights = decoded(_tensors_in(content, folder, nested=nested), folder)
    if not weights:
        raise ValueError(f"the model in '{folder}' holds no tensors")
    path = folder / STATE_FILE
    return Source(folder, weights, [read_file(path)] if path.is_file() else [])


def named_as_in_model(source: Source) -> Weights:
    """The weights of a checkpoint under the names that they have in the model.

    transformers saves the experts of many models one by one, under other names than their one weight in the model. If
    the sparsifier states name weights that the folder of such a model lacks, or its names tell of single experts, the
    model is built by transformers, and its state dict is returned.

    Raises:
        ValueError: If it cannot be built, and the states name weights that are missing.
    """
    folder, weights, states, _ = source
    if not source.is_folder:
        return weights
    named = {
        key_of_layer(plain_name(name), layer["parameter"])
        for state in states
        for name, layer in state["layers"].items()
    }
    lacking = sorted(named - {plain_name(key) for key in weights})
    if not lacking and not any(_ONE_EXPERT.search(key) for key in weights):
        return weights
    try:
        check_loadable(folder)
        try:
            import transformers
        except ImportError:
            raise ValueError("pip install -e '.[hf]' in a checkout of lightning_nm") from None
        # The class that saved the folder.
        name = (_read_config(folder).get("architectures") or ["none"])[0]
        cls = getattr(transformers, name, None)
        if cls is None:
            raise ValueError(f"it has no class {name}")
        # In the dtype of the files, and without a look at the hub.
        found: Weights = cls.from_pretrained(
            folder, dtype="auto", local_files_only=True
        ).state_dict()
        return found
    except Exception as error:
        # No state asks for the model's names, so those of the files will do.
        if not lacking:
            return weights
        fault = f"'{folder}' has masks for '{lacking[0]}' under another name than its weight has"
        raise ValueError(f"{fault}, and transformers cannot build the model: {error}") from error


def check_loadable(folder: Path) -> None:
    """Refuse a folder of bitmasks where transformers is to build the model: it would not read them.

    Raises:
        ValueError: With the way out.
    """
    if holds_bitmasks(folder):
        raise ValueError(
            f"'{folder}' holds bitmasks of compressed-tensors, which transformers does not read: make an ordinary "
            f"folder of it by `lightning-nm export {folder} --to torch -o NEW_FOLDER`, and take that"
        )


def _read_parts(folder: Path, index: Path) -> dict[str, Any]:
    """Read a model whose index names the file of every weight."""
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        places = {key: str(name) for key, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"cannot read '{index}': it is no index with a `weight_map` of file names"
        ) from error
    files = sorted(set(places.values()))
    # A path could lead out of the folder.
    strange = [name for name in files if Path(name).name != name]
    if strange:
        raise ValueError(f"'{index}' names '{strange[0]}', which is not a file in its folder")
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"'{folder}' is incomplete: {len(missing)} of {len(files)} files are missing: {missing}"
        )
    parts = {name: read_file(folder / name) for name in files}
    lost = [key for key, name in places.items() if key not in parts[name]]
    if lost:
        raise ValueError(
            f"'{folder / places[lost[0]]}' lacks the weight '{lost[0]}' that the index names"
        )
    return {key: parts[name][key] for key, name in places.items()}


_CONFIGS = ("quantization_config", "compression_config")  # of config.json, newer and older
_BITMASKS = ("sparse-24-bitmask", "sparse-bitmask")
# What compressed-tensors calls weights that stand under their usual keys, one value an element.
_IN_PLACE = ("dense", "int-quantized", "float-quantized", "naive-quantized")
_LIBRARY = "the library that wrote it can make a dense model of it"
# Last parts of keys that tell of a weight in another form, who writes them, and the way out.
_PACKED = {
    "qweight": ("GPTQ or AWQ", _LIBRARY),
    "weight_packed": ("compressed-tensors (pack-quantized or marlin-24)", _LIBRARY),
    "quant_map": ("bitsandbytes (4 bits)", _LIBRARY),
    "positions": ("pack() of lightning_nm", "save it by save_packed(), or unpacked_state_dict()"),
    "kernel_index": (
        "pack() of lightning_nm",
        "verify the packed file or the checkpoint that the program was made from",
    ),
}


def _compression_of(folder: Path) -> dict[str, Any]:
    """What config.json of a model folder says of its quantisation or compression; empty if nothing.

    Raises:
        ValueError: If the file cannot be read.
    """
    config = _read_config(folder)
    found: Any = next((config[name] for name in _CONFIGS if config.get(name)), {})
    return found if isinstance(found, dict) else {"quant_method": str(found)}


def holds_bitmasks(folder: Path) -> bool:
    """Whether the weights of a model folder are compressed by bitmasks, which transformers does not read."""
    return _sparsity(_compression_of(folder)) in _BITMASKS


def _check_compression(folder: Path) -> None:
    """Refuse a model folder whose weights are in a form that is not read.

    Raises:
        ValueError: With the name of the form.
    """
    config = _compression_of(folder)
    # compressed-tensors alone writes this entry, also where it names no method.
    default = "compressed-tensors" if "sparsity_config" in config else "unknown"
    method = str(config.get("quant_method", default))
    form = str(config.get("format", "dense"))
    sparsity = _sparsity(config)
    is_read = form in _IN_PLACE and sparsity in ("dense", *_BITMASKS)
    # fp8 keeps weights under their usual keys, with scales next to them: a zero is a zero.
    if not config or method == "fp8" or (method == "compressed-tensors" and is_read):
        return
    bits = f"{config['bits']} bits" if "bits" in config else "dense"
    names = [method, *(name for name in (form, sparsity, bits) if name != "dense")]
    raise ValueError(
        f"'{folder}' is quantised ({', '.join(names)}), and weights in this form are not read: {_LIBRARY}"
    )


def decoded(weights: Mapping[str, Tensor], path: Path) -> Weights:
    """The dense weights of a checkpoint: those that compressed-tensors (up to 0.9) wrote as bitmasks are decoded.

    A weight of R x C has its nonzeros, row by row, under ``.compressed``, and its mask under ``.bitmask``: R rows of
    ceil(C / 8) bytes, the lowest bit first. ``.shape`` holds R and C.

    Args:
        weights: Tensors by key.
        path: Of the file or folder, for messages.

    Raises:
        ValueError: If a bitmask does not fit its values, or a weight is in a form that is not read.
    """
    found: Weights = {}
    # Other parts of these weights are read with their mask, and are no tensors of the state dict.
    encoded = {key.removesuffix(".bitmask") for key in weights if key.endswith(".bitmask")}
    for key, weight in weights.items():
        name, _, part = key.rpartition(".")
        # A parameter may be called `positions` by chance: packed forms are integers.
        if part in _PACKED and not weight.is_floating_point():
            writer, way_out = _PACKED[part]
            raise ValueError(
                f"'{path}' holds '{key}', a weight as {writer} packs it, which is not read: {way_out}"
            )
        if part == "bitmask":
            # Some files have `.weight` before the name of the part, others not.
            dense_key = f"{name.removesuffix('.weight')}.weight"
            if dense_key in weights:
                raise ValueError(f"'{path}' holds both '{dense_key}' and '{key}'")
            try:
                found[dense_key] = _dense(weight, weights, name)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                # The text of a KeyError is the key alone.
                reason = f"there is no {error}" if isinstance(error, KeyError) else error
                raise ValueError(f"'{path}' is damaged: '{key}': {reason}") from error
        elif name not in encoded or part not in ("compressed", "shape", "row_offsets"):
            found[key] = weight
    return found


def config_without_bitmasks(folder: Path) -> str:
    """The text of config.json for the same weights as dense tensors."""
    config = _read_config(folder)
    for name in _CONFIGS:
        if isinstance(config.get(name), dict):
            config[name].pop("sparsity_config", None)
            # What is left describes quantised weights, or nothing.
            if config[name].get("format", "dense") == "dense":
                del config[name]
    return json.dumps(config, indent=2) + "\n"


def _dense(bitmask: Tensor, weights: Mapping[str, Tensor], name: str) -> Tensor:
    values = weights[f"{name}.compressed"].reshape(-1)
    shape = [int(size) for size in weights[f"{name}.shape"].reshape(-1).tolist()]
    if not shape or min(shape) < 1:
        raise ValueError(f"its shape is {shape}")
    *rows, columns = shape
    row_bytes = math.ceil(columns / 8)
    # Nothing of the shape is allocated before the file is known to have a bit for each entry.
    if bitmask.dtype != torch.uint8 or bitmask.numel() != math.prod(rows) * row_bytes:
        raise ValueError(f"it has {bitmask.numel()} bytes, which do not fit the shape {shape}")
    # Rows are filled up to whole bytes; the bits after the last column are cut off.
    bits = unpack_mask(bitmask.reshape(-1), (math.prod(rows), row_bytes * 8))
    mask = bits[:, :columns].reshape(shape)
    kept = int(mask.sum())
    if kept != values.numel():
        raise ValueError(f"it keeps {kept} entries, and there are {values.numel()} values")
    dense = torch.zeros(shape, dtype=values.dtype)
    if values.itemsize == 1:  # torch assigns no single float8 value by a mask
        dense.view(torch.int8)[mask] = values.view(torch.int8)
    else:
        dense[mask] = values
    return dense


def _sparsity(config: Mapping[str, Any]) -> str:
    found = config.get("sparsity_config")
    return str(found.get("format", "dense")) if isinstance(found, dict) else "dense"


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot read '{path}': {error}") from error
    return config if isinstance(config, dict) else {}


class Source(NamedTuple):
    """A checkpoint.

    Args:
        path: Where it is.
        weights: The dense state dict.
        states: The sparsifier states in it.
        hyperparameters: The model's arguments that Lightning saved in it.
    """

    path: Path
    weights: Weights
    states: list[dict[str, Any]]
    hyperparameters: Mapping[Any, Any] = {}

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of ``transformers``."""
        return (self.path / "config.json").is_file()


def read_checkpoint(path: str | Path, prefix: str = "", *, nested: bool = False) -> Source:
    """Read the weights and the sparsifier states of a checkpoint; nothing is unpickled but tensors and primitives.

    Args:
        path: A Lightning checkpoint, a state dict (``.pt``, ``.safetensors``), a packed model, or a folder that
            ``save_pretrained`` of ``transformers`` wrote.
        prefix: Take only the keys that begin with it, and remove it.
        nested: Also read the tensors in dictionaries and lists within the state dict, under names with dots.

    Returns:
        The checkpoint: its ``weights`` are the dense state dict, its ``states`` those of sparsifiers, which a plain
        state dict has none of.

    Raises:
        ValueError: If the file cannot be read, is damaged or holds no weights, or holds them in a form that is not
            read, such as packed integers of other libraries; or no key begins with `prefix`.
    """
    path = Path(path)
    if (path / ".metadata").is_file():
        # Lightning keeps the callbacks' states, the sparsifier's among them, in a file of their own.
        command = (
            f"lightning.fabric.utilities.consolidate_checkpoint {path} --output_file NEW.ckpt"
            if (path / "meta.pt").is_file()
            else f"torch.distributed.checkpoint.format_utils dcp_to_torch {path} NEW.pt"
        )
        raise ValueError(
            f"'{path}' is a sharded checkpoint, whose index is a pickle, and no pickle is read: if you trust it, make "
            f"one file of it by `python -m {command}`"
        )
    if is_packed(path):
        file = PackedFile(path)
        own = {key: file.read_dense(key) for key in (*file.dense, *file.packed)}
        # Aliases share their tensor.
        aliases = {alias: own[key] for alias, key in file.aliases.items()}
        source = Source(path, own | aliases, [])
    elif path.is_dir():
        source = _read_folder(path, nested=nested)
    elif path.is_file():
        source = _read_saved(path, nested=nested)
    else:
        raise ValueError(f"'{path}' is neither a file nor a folder")
    for state in source.states:
        check_schema(state)
    if not prefix:
        return source
    weights = {
        key.removeprefix(prefix): weight
        for key, weight in source.weights.items()
        if key.startswith(prefix)
    }
    if not weights:
        shown = ", ".join(map(repr, list(source.weights)[:4]))
        raise ValueError(f"no key of '{path}' begins with '{prefix}': they are {shown}, ...")
    states = [
        {**state, "layers": _layers_without(state["layers"], prefix)} for state in source.states
    ]
    return source._replace(weights=weights, states=states)


def _read_saved(path: Path, *, nested: bool) -> Source:
    """Read a file of ``torch.save`` or of safetensors."""
    content = read_file(path)
    # A saved list has numbers in the place of keys.
    if nested and isinstance(content, list | tuple):
        content = dict(enumerate(content))
    if not isinstance(content, Mapping):
        content = {}
    parts = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    # Lightning's key, and those that many training loops use.
    inner = [parts[key] for key in ("state_dict", "model_state_dict", "model") if key in parts]
    state_dict = inner[0] if inner else content
    # A file may also hold the state of a sparsifier itself.
    is_state = "schema" in content and "layers" in parts
    # Nested tensors of a sparsifier's state are masks and buffers, not weights.
    weights = decoded(_tensors_in(state_dict, path, nested=nested and not is_state), path)
    if not weights:
        raise ValueError(
            f"'{path}' holds no state dict: expected tensors by name, or a checkpoint with 'state_dict'"
        )
    states = [
        dict(state)
        for name, state in parts.get("callbacks", {}).items()
        # Lightning may add arguments to the class name by which it keeps a callback's state.
        if str(name).startswith("NMSparsityCallback") and isinstance(state, Mapping) and state
    ]
    if is_state:
        states.append(dict(content))
    return Source(path, weights, states, parts.get("hyper_parameters", {}))


def _layers_without(layers: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The layers whose weights' keys begin with a prefix, without it."""
    found = {}
    for name, layer in layers.items():
        # The layer that the prefix ends with is all of the model, and goes by its parameter.
        if f"{name}." == prefix:
            found[layer["parameter"]] = layer
        elif name.startswith(prefix):
            found[name.removeprefix(prefix)] = layer
    return found
