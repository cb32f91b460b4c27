"""What a weight is called."""

from __future__ import annotations

_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """The name of a module, a parameter or a glob without what ``torch.compile``, checkpointing and FSDP put into it.

    A wrapped layer is then called as it is without the wrapper: it draws the same random numbers, is found by the same
    globs, and its saved state goes on with and without it.

    Example::

        >>> plain_name("net._orig_mod.3"), plain_name("fc._checkpoint_wrapped_module.weight"), plain_name("_orig_mod")
        ('net.3', 'fc.weight', '')
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def layer_name(module: str, parameter: str) -> str:
    """The public name of a weight: its module's, with the parameter's appended when that is not ``weight``.

    Example::

        >>> layer_name("encoder.fc", "weight"), layer_name("attention", "in_proj_weight"), layer_name("", "weight")
        ('encoder.fc', 'attention.in_proj_weight', 'weight')
    """
    return module if parameter == "weight" and module else parameter_key(module, parameter)


def parameter_key(module: str, parameter: str) -> str:
    """The parameter's key in the state dict."""
    return f"{module}.{parameter}" if module else parameter


def key_of_layer(name: str, parameter: str) -> str:
    """The state-dict key of a weight from its public name.

    Example::

        >>> key_of_layer("encoder.fc", "weight"), key_of_layer("attention.in_proj_weight", "in_proj_weight")
        ('encoder.fc.weight', 'attention.in_proj_weight')
    """
    return name if name.rpartition(".")[2] == parameter else f"{name}.{parameter}"
