"""What a weight is called."""

from __future__ import annotations

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """The name of a module, a parameter or a glob without the wrappers of ``torch.compile``, checkpointing and FSDP.

    A wrapped layer then draws the same random numbers, and globs and saved states match it.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def layer_name(module: str, parameter: str) -> str:
    """The public name of a weight: its module's, with the parameter's appended when that is not ``weight``."""
    return module if parameter == "weight" and module else parameter_key(module, parameter)


def parameter_key(module: str, parameter: str) -> str:
    """The parameter's key in the state dict."""
    return f"{module}.{parameter}" if module else parameter


def key_of_layer(name: str, parameter: str) -> str:
    """The state-dict key of a weight from its public name."""
    return name if name.rpartition(".")[2] == parameter else f"{name}.{parameter}"
