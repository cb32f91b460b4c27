"""Load a packed model: one tensor at a time, after the file and the model are known to fit each other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_nm.export.packed_file import PackedFile, no_checksums
from lightning_nm.export.packed_model import Model, check_kernels, for_inference, listed
from lightning_nm.export.safetensors_file import bytes_of
from lightning_nm.export.verdicts import count_nonfinite
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
from lightning_nm.nn.weight import plain_name


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
            key = next(names[plain] for plain in owner.keys if plain in names)
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
                tensor = owner.tensor
                device = torch.device("cpu") if tensor.is_meta else tensor.device
                del owner, tensor
                put(place, packed_weight(found.to(device), name, place.role, kernels, budget))
            else:
                _set(owner, found.unpack() if isinstance(found, PackedTensor) else found)
    for_inference(model)
    shown = [f"'{key}' ({count})" for key, count in nonfinite.items() if count]
    if shown:
        warnings.warn(
            f"tensors of '{path}' have entries that are NaN or infinite, so outputs of the model may be NaN: "
            f"{listed(shown)}",
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


def _refuse_different_values(
    file: PackedFile, names: Mapping[str, str], owners: Mapping[str, _Owner]
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
        first, *others = given
        expected = file.read_dense(first)
        for other in others:
            values = file.read_dense(other)
            # By bits: NaN is equal to itself.
            if values.dtype != expected.dtype or not torch.equal(
                bytes_of(values), bytes_of(expected)
            ):
                raise ValueError(
                    f"'{given[first]}' and '{given[other]}' are one tensor in the model, and different ones in "
                    f"'{file.file.path}': load the file into a model that does not share them"
                )


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
            faults.append(f"{what} {listed([*map(repr, keys)])}")
    for plain, key in names.items():
        if plain in owners and tuple(owners[plain].tensor.shape) != file.shape(key):
            own = tuple(owners[plain].tensor.shape)
            faults.append(f"'{plain}' is {own} in the model and {file.shape(key)} in the file")
    if faults:
        raise ValueError(
            f"the model {type(model).__name__} does not fit '{path}': {listed(faults, '; ')}"
        )
    for plain, key in names.items():
        tensor = owners[plain].tensor
        own_dtype, dtype = tensor.dtype, file.dtype(key)
        # A model in torch's default dtype takes the file's; inputs of one that was converted would have the wrong one.
        is_chosen = own_dtype.is_floating_point and own_dtype != torch.get_default_dtype()
        if is_chosen and own_dtype != dtype and not tensor.is_meta:
            raise ValueError(
                f"'{plain}' is {own_dtype} in the model {type(model).__name__} and {dtype} in '{path}', and a loaded "
                f"model has the dtypes of its file: load into model.to({dtype}), and convert the packed model by "
                f".to({own_dtype})"
            )
    empty = [
        f"{name}.{buffer}".lstrip(".")
        for name, module in model.named_modules()
        for buffer in module._non_persistent_buffers_set
        if (tensor := module._buffers.get(buffer)) is not None and tensor.is_meta
    ]
    if empty:
        raise ValueError(
            f"{listed([*map(repr, empty)])} of {type(model).__name__} on the meta device has no values, and "
            "no state dict holds it: build the model on the CPU, or under accelerate.init_empty_weights()"
        )
