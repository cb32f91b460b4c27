"""Other training libraries: each file needs its own, and is imported when it is used."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_nm.integrations.trainer import NMTrainerCallback

__all__ = ["NMTrainerCallback"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # transformers imports without it, but its Trainer does not work: the error names the extra at once.
        import accelerate as _accelerate  # noqa: F401
        import transformers as _transformers  # noqa: F401
    except ImportError as error:
        advice = "pip install -e '.[hf]' in a checkout of lightning_nm"
        raise ImportError(
            f"lightning_nm.integrations.{name} needs the extra `hf`: {advice} ({error})"
        ) from error
    from lightning_nm.integrations import trainer

    return getattr(trainer, name)
