"""Load a packed model: one tensor at a time, after the file and the model are known to fit each other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_nm.export.packed_file import PackedFile, no_checksums
from lightning_nm.export.packed_model import Model, check_kernels, for_inference
from lightning_nm.export.verdicts import count_nonfinite
from lightning_nm.nn.layer.names import plain_name
from lightning_nm.nn.packed import (
    BUDGET_S,
    EVERY_ENTRY,
    Budget,
    Kernels,
    PackedTensor,
    Place,
    Role,
    check_scales,
    embeddings_of,
    packed_weight,
    packed_weights,
    places_of,
    put,
)

_SHOWN = 8


def load_packed(
    model: Model,
    path: str | os.PathLike[str],
    *,
    kernels: Kernels = "auto",
    budget_s: float = BUDGET_S,
) -> Model:
    """Load a packed model into a model of the same architecture, whose layers become packed, see :func:`pack`.

    Tensors are read one at a time, and the dense weight of a packed layer is never made beside the others. A model that
    was built under ``torch.device("meta")`` takes no memory before. Tensors have the file's dtype and, unless they are
    on the meta device, the model's device. Every tensor is compared with its checksum before the model is changed;
    there is a warning if the file has no checksums (lightning_nm 0.3 and older), or if a weight has entries that are
    NaN or infinite.

    Args:
        model: A module with the keys and shapes of the one that was exported, in its dtype or in torch's default one.
            A weight that is packed in the file, and that no packed layer takes, is unpacked.
        path: A file of ``lightning-nm export --to packed`` or :func:`save_packed`.
        kernels: As :func:`pack`'s.
        budget_s: As :func:`pack`'s.

    Returns:
        The model.

    Raises:
        ValueError: If the file is damaged or is no packed model, or the model does not fit it: the message names
            both. The model is then unchanged.
        OSError: If the file cannot be opened.
    """
    check_kernels(kernels)
    budget = Budget(budget_s)
    if any(packed_weights(model)):
        raise ValueError(f"{type(model).__name__} is packed already: load into a new model")
    file = PackedFile(path)
    names = {plain_name(key): key for key in file.names()}
    owners = _owners(model)
    _refuse_other_model(model, file, names, owners, path)
    found_places, _ = places_of(model)  # refuses a masked model
    embeddings = embeddings_of(model)
    places = {id(place.weight): (name, place) for name, place in found_places.items()}
    rows = {id(place.weight): (name, place) for name, place in embeddings.items()}
    _check_tensors(file, names, {**embeddings, **found_places})
    _refuse_different_values(file, names, owners)
    if file.checksums is None:
        warnings.warn(no_checksums(path), stacklevel=2)
    waiting = list(dict.fromkeys(owners.values()))
    owners.clear()  # `waiting` alone holds the dense weights, each until it is replaced
    nonfinite: dict[str, int] = {}
    with torch.no_grad():
        while waiting:
            owner = waiting.pop(0)
            key = _key_in_file(names, owner)
            found = file.read(key)
            values = found.values if isinstance(found, PackedTensor) else found
            # A buffer may be a mask of -inf.
            is_parameter = isinstance(owner.tensor, nn.Parameter)
            nonfinite[key] = count_nonfinite(values, infinite=is_parameter)
            # N:M embeddings, and dense matrices of other layers, are unpacked.
            fitting = (
                rows if isinstance(found, PackedTensor) and found.pattern == EVERY_ENTRY else places
            )
            name_and_place = fitting.get(id(owner.tensor))
            if isinstance(found, PackedTensor) and name_and_place is not None:
                name, place = name_and_place
                device = _device(owner.tensor)
                del owner
                put(place, packed_weight(found.to(device), name, place.role, kernels, budget))
            else:
                _set(owner, found.unpack() if isinstance(found, PackedTensor) else found)
    for_inference(model)
    shown = [f"'{key}' ({count})" for key, count in nonfinite.items() if count]
    if shown:
        more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        warnings.warn(
            f"tensors of '{path}' have entries that are NaN or infinite, so outputs of the model may be NaN: "
            f"{', '.join(shown[:_SHOWN])}{more}",
            stacklevel=2,
        )
    return model


def _check_tensors(file: PackedFile, names: Mapping[str, str], places: Mapping[str, Place]) -> None:
    """Refuse tensors that are damaged, and packed weights that do not fit, before anything is changed."""
    for key in file.dense:
        file.check(key)
    roles: dict[str, Role] = {}  # of the modules, by the file's own keys
    for name, place in places.items():
        if name in names:
            key = names[name]
            roles[file.aliases.get(key, key)] = place.role
    for key in file.packed:
        packed = file.read_packed(key)
        if key not in roles:
            continue
        try:
            check_scales(packed, roles[key])
        except ValueError as error:
            message = f"'{key}' of '{file.file.path}' does not fit the model: {error}"
            raise ValueError(message) from None


class _Owner:
    """Where a tensor of the state dict is: in one or, if it is shared, several modules.

    Attributes:
        tensor: The tensor.
        places: The modules that hold it, and its name in each.
        keys: Its keys in the state dict, without wrappers: several if modules share it, or if the model holds its
            module under several names.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.places: list[tuple[nn.Module, str]] = []
        self.keys: list[str] = []


def _owners(model: nn.Module) -> dict[str, _Owner]:
    """The tensors of a model's state dict by key, without wrappers."""
    shared: dict[int, _Owner] = {}
    found: dict[str, _Owner] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            owner = shared.setdefault(id(tensor), _Owner(tensor))
            if (module, name) not in owner.places:
                owner.places.append((module, name))
            key = plain_name(f"{prefix}.{name}" if prefix else name)
            owner.keys.append(key)
            found[key] = owner
    return found


def _key_in_file(names: Mapping[str, str], owner: _Owner) -> str:
    """A key under which the file has a tensor of the model."""
    return next(names[plain] for plain in owner.keys if plain in names)


def _refuse_different_values(
    file: PackedFile,
    names: Mapping[str, str],
    owners: Mapping[str, _Owner],
) -> None:
    """Refuse a file that has different values for keys that are one tensor in the model."""
    for owner in dict.fromkeys(owners.values()):
        given: dict[str, str] = {}  # a key of the model by each tensor of the file
        for plain in owner.keys:
            if plain in names:
                key = names[plain]
                given.setdefault(file.aliases.get(key, key), plain)
        if len(given) < 2:
            continue
        (first, first_name), *others = given.items()
        expected = _dense_values(file, first)
        for other, other_name in others:
            values = _dense_values(file, other)
            if values.dtype != expected.dtype or not _same_bits(values, expected):
                raise ValueError(
                    f"'{first_name}' and '{other_name}' are one tensor in the model, and different ones in "
                    f"'{file.file.path}': load the file into a model that does not share them"
                )


def _dense_values(file: PackedFile, key: str) -> Tensor:
    """A tensor of the file, with zeros if it is packed there."""
    found = file.read(key)
    return found.unpack() if isinstance(found, PackedTensor) else found


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have equal bits; NaN is equal to itself."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _set(owner: _Owner, value: Tensor) -> None:
    """Give a tensor its value, dtype included."""
    tensor = owner.tensor
    if not tensor.is_meta:
        tensor.data = value.to(tensor.device)
        return
    new = nn.Parameter(value, requires_grad=False)
    for module, name in owner.places:
        if isinstance(tensor, nn.Parameter):
            module._parameters[name] = new
        else:
            module._buffers[name] = value


def _device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _refuse_other_dtype(
    model: nn.Module,
    file: PackedFile,
    names: Mapping[str, str],
    owners: Mapping[str, _Owner],
    path: str | os.PathLike[str],
) -> None:
    """Refuse a model that was converted to another dtype than the file's: its inputs would have the wrong one.

    A model in torch's default dtype takes the file's.
    """
    for plain, key in names.items():
        tensor = owners[plain].tensor
        own, given = tensor.dtype, file.dtype(key)
        is_chosen = own.is_floating_point and own != torch.get_default_dtype()
        if tensor.is_meta or not is_chosen or own == given:
            continue
        own_name, given_name = (str(dtype).removeprefix("torch.") for dtype in (own, given))
        raise ValueError(
            f"'{plain}' is {own_name} in the model {type(model).__name__} and {given_name} in '{path}', and a loaded "
            f"model has the dtypes of its file: load into model.to(torch.{given_name}), and convert the packed model "
            f"by .to(torch.{own_name})"
        )


def _refuse_other_model(
    model: nn.Module,
    file: PackedFile,
    names: Mapping[str, str],
    owners: Mapping[str, _Owner],
    path: str | os.PathLike[str],
) -> None:
    given = {id(owners[plain]) for plain in names if plain in owners}
    missing = [key for key, owner in owners.items() if key not in names and id(owner) not in given]
    others = [key for key in names if key not in owners]
    faults = []
    for what, keys in (("the file lacks", missing), ("the model lacks", others)):
        if keys:
            more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
            faults.append(f"{what} {', '.join(map(repr, keys[:_SHOWN]))}{more}")
    for plain, key in names.items():
        if plain in owners and tuple(owners[plain].tensor.shape) != file.shape(key):
            own = tuple(owners[plain].tensor.shape)
            faults.append(f"'{plain}' is {own} in the model and {file.shape(key)} in the file")
    if faults:
        shown = "; ".join(faults[:_SHOWN])
        raise ValueError(f"the model {type(model).__name__} does not fit '{path}': {shown}")
    _refuse_other_dtype(model, file, names, owners, path)
    empty = [
        f"{name}.{buffer}".lstrip(".")
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
        if (tensor := module._buffers.get(buffer)) is not None and tensor.is_meta
    ]
    if empty:
        raise ValueError(
            f"{', '.join(map(repr, empty[:_SHOWN]))} of {type(model).__name__} on the meta device has no values, and "
            "no state dict holds it: build the model on the CPU, or under accelerate.init_empty_weights()"
        )
