"""Mixins that add to Lightning's precision plugins a router, active during forward and backward passes."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_nm.kernels import GemmKernel, Router
from lightning_nm.kernels.router import routing
from lightning_nm.nn.adapters import Adapter

DECISIONS = "~/.cache/lightning_nm/kernels.json"
"""The file of measurements that all trainings of a user share."""


class KernelRouting:
    """Makes masked layers run their products on the kernels that a router chooses; mixed into a precision plugin.

    The router is active in the forward contexts and in backward passes that Lightning calls, where activation
    checkpointing recomputes forward passes. A backward pass uses the router of its forward pass, wherever it is
    called. In mode ``"auto"`` the first batch's forward is dense; its products are measured before its backward. If
    none of them is faster sparse, the router is inactive from the first optimizer step to the end of the fit.

    Args:
        kernels: ``"auto"``: for each product of each masked layer the kernel that is fastest as measured on this
            device, packing included, and the dense one unless another is 3 % faster. ``"sparse"``: the first kernel
            that computes the product right. ``"reference"``: dense.
        backends: The kernels to choose from, in order of preference; ``None`` takes those of the package.
        decisions: File where ``"auto"`` keeps its measurements, by device, driver and library versions; for a CPU by
            its model, instruction set with or without AMX, and number of threads. ``None`` keeps none.
        budget_s: Seconds that measuring the first batch's products may take.
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
        state = dict(self.__dict__)
        state["_models"] = None  # weak references cannot be pickled
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without a model."""
        self.__dict__.update(state)
        self._models = weakref.WeakSet()

    def _require_masked(self) -> None:
        """Refuse to train without a masked layer: this plugin would do nothing."""
        if self._checked or not self._models:
            return
        if not any(_has_masked_layer(model) for model in self._models):
            names = ", ".join(sorted(type(model).__name__ for model in self._models))
            own = type(self).__name__
            fault = f"{own} routes the products of N:M layers, but {names} has none"
            advice = "add NMSparsityCallback to the Trainer (an NMSparsifier with Fabric), or take Lightning's own"
            raise RuntimeError(f"{fault}: {advice} {own.removeprefix('NM')}")
        self._checked = True

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Lightning's context, with the router active."""
        router = self.router.active_or_none()
        with super().forward_context(), routing(router):  # type: ignore[misc]
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Measure the first batch's products before its backward pass."""
        # In Lightning's order this is the first moment after a whole forward pass, which has recorded the products. In
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


def _has_masked_layer(model: nn.Module) -> bool:
    return any(isinstance(module, Adapter) for module in model.modules())


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
        if not device:
            device = "cuda" if torch.cuda.is_available() else "cpu"
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
