"""What a weight is called."""

from __future__ import annotations

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """The name of a module, a parameter or a glob without the wrappers of ``torch.compile``, checkpointing and FSDP.

    A wrapped layer then draws the same random numbers, and globs and saved states match it.
    """
    parts = name.split(".")
    return ".".join(part for part in parts if part not in _WRAPPERS)


def layer_name(module: str, parameter: str) -> str:
    """The public name of a weight: its module's, with the parameter's appended when that is not ``weight``."""
    # A weight of the model itself has no module to be called after.
    if module and parameter == "weight":
        return module
    return parameter_key(module, parameter)


def parameter_key(module: str, parameter: str) -> str:
    """The parameter's key in the state dict."""
    if not module:
        return parameter
    return f"{module}.{parameter}"


def key_of_layer(name: str, parameter: str) -> str:
    """The state-dict key of a weight from its public name."""
    last = name.rpartition(".")[2]
    if last == parameter:
        return name
    return f"{name}.{parameter}"
