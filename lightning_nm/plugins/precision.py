"""Precision plugins for ``lightning.pytorch.Trainer``, and the mixins that those for Fabric share with them."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn

from lightning_nm.kernels import GemmKernel, Router
from lightning_nm.kernels.router import routing
from lightning_nm.nn.adapters import Adapter
from lightning_nm.sparsifier import NMSparsifier

DECISIONS = "~/.cache/lightning_nm/kernels.json"
"""The file of measurements that all trainings of a user share."""


class KernelRouting:
    """Makes masked layers run their GEMMs on the kernels that a router chooses; mixed into a precision plugin.

    The router is active in the forward contexts and in backward passes that Lightning calls, where activation
    checkpointing recomputes forward passes. A backward pass uses the router of its forward pass, wherever it is
    called. In mode ``"auto"`` the first batch's forward is dense; its GEMMs are measured before its backward. If
    none of them is faster sparse, the router is inactive from the first optimizer step to the end of the fit.

    Args:
        kernels: ``"auto"``: for each GEMM of each masked layer the kernel that is fastest as measured on this
            device, packing included, and the dense one unless another is 3 % faster. ``"sparse"``: the first kernel
            that computes the GEMM right. ``"reference"``: dense.
        backends: The kernels to choose from, in order of preference; ``None`` takes those of the package.
        decisions: File where ``"auto"`` keeps its measurements, by device, driver and library versions; for a CPU by
            its model, instruction set with or without AMX, and number of threads. ``None`` keeps none.
        budget_s: Seconds that measuring the first batch's GEMMs may take.
        kwargs: As Lightning's plugin takes them.

    Raises:
        ValueError: If ``kernels`` is none of these, and as Lightning's plugin.
        RuntimeError: When training starts, if the model has no masked layer.
    """

    router: Router
    _checked = False  # whether the models of this fit are known to have masked layers

    def __init__(
        self,
        *,
        kernels: str = "auto",
        backends: list[GemmKernel] | None = None,
        decisions: str | None = DECISIONS,
        budget_s: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.router = Router(kernels, backends, decisions, budget_s=budget_s)
        # Weak, because a plugin may outlive its fit, and would keep the model's memory.
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the models: spawned processes have their own."""
        # Weak references cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "_models"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without a model."""
        vars(self).update(state, _models=weakref.WeakSet())

    def _require_masked(self) -> None:
        """Refuse to train without a masked layer: this plugin would do nothing."""
        if self._checked or not self._models:
            return
        modules = (module for model in self._models for module in model.modules())
        if not any(isinstance(module, Adapter) for module in modules):
            names = ", ".join(sorted(type(model).__name__ for model in self._models))
            own = type(self).__name__
            raise RuntimeError(
                f"{own} routes the GEMMs of N:M layers, but {names} has none: add NMSparsityCallback to the Trainer "
                f"(an NMSparsifier with Fabric), or take Lightning's own {own.removeprefix('NM')}"
            )
        self._checked = True

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Lightning's context, with the router active."""
        with super().forward_context(), routing(self.router.active_or_none()):  # type: ignore[misc]
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Measure the first batch's GEMMs before its backward pass."""
        # In Lightning's order this is the first moment after a whole forward pass, which has recorded the GEMMs. In
        # later batches it does nothing.
        self._require_masked()
        self.router.tune()
        return super().pre_backward(tensor, module)  # type: ignore[misc]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's backward pass, with the router active."""
        # Activation checkpointing runs forward passes again in here.
        with routing(self.router.active_or_none()):
            super().backward(*args, **kwargs)  # type: ignore[misc]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Lightning's step, after which the router may go inactive."""
        result = super().optimizer_step(*args, **kwargs)  # type: ignore[misc]
        # Only now no backward pass is pending, so kernels may change.
        self.router.deactivate_if_all_dense()
        return result

    def teardown(self) -> None:
        """Free the models and the packs; the report of what ran stays."""
        # Lightning's strategy calls this before on_fit_end, in which the report is printed.
        self._models.clear()
        self.router.release()
        super().teardown()  # type: ignore[misc]


# The classes below give the arguments of Lightning's plugins defaults and checks, for the Trainer's and for Fabric's.


class MixedArguments(KernelRouting):
    """Takes the arguments of plugins for mixed precision."""

    def __init__(
        self,
        precision: Literal["16-mixed", "bf16-mixed"] = "bf16-mixed",
        device: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> None:
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        super().__init__(precision=precision, device=device, scaler=scaler, **kwargs)


class HalfArguments(KernelRouting):
    """Takes the arguments of plugins for half precision."""

    def __init__(
        self, precision: Literal["bf16-true", "16-true"] = "bf16-true", **kwargs: Any
    ) -> None:
        # Lightning takes an unknown precision as float16.
        if precision not in ("bf16-true", "16-true"):
            raise ValueError(f"precision={precision!r} is unknown: use 'bf16-true' or '16-true'")
        super().__init__(precision=precision, **kwargs)


class ShardedArguments(KernelRouting):
    """Takes the arguments of plugins for FSDP."""

    def __init__(
        self,
        precision: Literal[
            "32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"
        ] = "bf16-mixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(precision=precision, **kwargs)


class _TrainerRouting(KernelRouting):
    """What the plugins for the Trainer have in common."""

    keeps_packs = True  # whether a packed weight is kept for the micro-batches of a step
    _had_callbacks = False  # whether the Trainer had any when the fit was set up

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Prepare for a fit, and convert the module as Lightning does; the micro-batches of a step share packs."""
        # The strategy calls this once in each call of the Trainer, before on_fit_start. Within Fabric a LightningModule
        # has the attribute `fabric`, and no Trainer.
        if not isinstance(module, LightningModule) or module.fabric is not None:
            own = type(self).__name__
            raise TypeError(
                f"lightning_nm.{own} is for lightning.pytorch.Trainer: Fabric takes lightning_nm.plugins.fabric.{own}"
            )
        trainer = module.trainer
        self._models.clear()  # that of an earlier fit
        self._models.add(module)
        self._checked = False
        self._had_callbacks = bool(trainer.callbacks)  # type: ignore[attr-defined]

        # A weight stays the same during the micro-batches of a step, so each uses the same pack.
        self.router.keeps_layouts = self.keeps_packs
        self.router.reset(trainer.accumulate_grad_batches if self.keeps_packs else 1)
        self.router.initialize(trainer.strategy.root_device)
        return super().convert_module(module)  # type: ignore[misc]

    def _require_masked(self) -> None:
        """Refuse to train without a masked layer, except in Lightning's searches."""
        for model in () if self._checked else self._models:
            assert isinstance(model, LightningModule)
            callbacks: list[Callback] = getattr(model.trainer, "callbacks", [])
            # In a search for a learning rate or a batch size Lightning removes the Trainer's callbacks, and with them
            # the one that masks; for a learning rate it adds one of its own, a private class. A Trainer that never had
            # any callbacks is not searching.
            is_search = any(type(callback).__name__ == "_LRCallback" for callback in callbacks)
            if is_search or (self._had_callbacks and not callbacks):
                return
            for sparsifier in [getattr(callback, "sparsifier", None) for callback in callbacks]:
                if isinstance(sparsifier, NMSparsifier) and sparsifier.selection.frozen:
                    return  # it waits for an optimizer to train the layers that it will mask
        super()._require_masked()

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """Lightning's context, if the model has a masked layer."""
        # Callbacks have masked the model in on_fit_start, so an error comes before the first forward pass.
        self._require_masked()
        with super().train_step_context():  # type: ignore[misc]
            yield

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save a scaler's state also under the name of Lightning's plugin, which may resume the run."""
        # Lightning itself saves it under the name of this class.
        state = self.state_dict()  # type: ignore[attr-defined]
        if state:
            checkpoint[self._lightning_name] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Resume the scaler of a run with Lightning's plugin."""
        # A state under the name of this class is loaded by Lightning.
        name = self._lightning_name
        if type(self).__qualname__ not in checkpoint and name in checkpoint:
            self.load_state_dict(checkpoint[name])  # type: ignore[attr-defined]

    @property
    def _lightning_name(self) -> str:
        """Name of the Lightning plugin that this one extends: the nearest of its base classes."""
        bases = type(self).__mro__
        return next(base.__qualname__ for base in bases if base.__module__.startswith("lightning."))


# In each class below the arguments' mixin comes first: it passes them by name to the router's mixin, which keeps its
# own and passes the rest to Lightning's plugin.


class NMPrecision(_TrainerRouting, Precision):
    """Float32, with the GEMMs of masked layers on the kernels chosen for each.

    CPUs have sparse kernels for float32; GPUs have none, so all GEMMs are dense there, except on ``backends=``.

    The arguments are those of :class:`~lightning_nm.plugins.precision.KernelRouting`.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[NMPrecision()], logger=False, accelerator="cpu")
    """


class NMMixedPrecision(MixedArguments, _TrainerRouting, MixedPrecision):
    """Autocast, with the GEMMs of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: The device type for autocast; CUDA if there is one.
        scaler: A gradient scaler for ``"16-mixed"``.
        kwargs: Those of :class:`~lightning_nm.plugins.precision.KernelRouting`.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> plugin = NMMixedPrecision("bf16-mixed", device="cpu", kernels="auto")
        >>> trainer = Trainer(plugins=[plugin], logger=False, accelerator="cpu")
    """


class NMHalfPrecision(HalfArguments, _TrainerRouting, HalfPrecision):
    """Half-precision weights, with the GEMMs of masked layers on the kernels chosen for each.

    Args:
        precision: ``"bf16-true"`` or ``"16-true"``.
        kwargs: Those of :class:`~lightning_nm.plugins.precision.KernelRouting`.

    Example::

        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[NMHalfPrecision("bf16-true")], logger=False, accelerator="cpu")
    """


class NMFSDPPrecision(ShardedArguments, _TrainerRouting, FSDPPrecision):
    """The precision plugin for ``FSDPStrategy``, with the GEMMs of masked layers on the kernels chosen for each.

    No packs are kept: they would hold full weights on every process.

    Args:
        precision: ``"32-true"``, ``"bf16-true"``, ``"16-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        kwargs: Those of :class:`~lightning_nm.plugins.precision.KernelRouting`.

    Example:
        >>> plugin = NMFSDPPrecision("bf16-mixed")
        >>> plugin.precision
        'bf16-mixed'
    """

    keeps_packs = False
