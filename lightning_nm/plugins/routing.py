"""What the precision plugins add to Lightning's own: a router that is active while a step runs."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_nm.kernels import GemmKernel, Router
from lightning_nm.kernels.cost import DeviceModel
from lightning_nm.kernels.dispatch import routing
from lightning_nm.nn.adapters import Adapter

DECISIONS = "~/.cache/lightning_nm/kernels.json"


def default_device() -> str:
    """The device type for autocast where none is named."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class KernelRouting:
    """Mixed into a precision plugin: masked layers run their products by the router's choice of kernels.

    The router is active in the forward contexts and in backward passes that Lightning calls, where activation
    checkpointing computes forward passes again. What a forward pass found holds for its backward pass wherever that is
    called. In mode ``"auto"`` the first batch's forward is dense; its products are measured before its backward.

    Args:
        kernels: ``"auto"``: for each product of each masked layer the kernel that is fastest as measured on this
            device, packing included, and the dense one unless another is 3 % faster. ``"sparse"``: the first legal
            kernel. ``"reference"``: dense. ``"heuristic"``: by a cost model, without timing. ``"replay:FILE"``: as
            recorded in a file.
        backends: The kernels to choose from, in order of preference; ``None`` takes those of the package.
        decisions: Where ``"auto"`` keeps what it measured, by device, driver and library versions; ``None`` keeps
            nothing.
        budget_s: Seconds that measuring the first batch's products may take.
        gpu: Figures of the GPU for ``"heuristic"``, where the package does not know them.
        kwargs: As Lightning's plugin takes them.

    Raises:
        ValueError: If ``kernels`` is none of these, and as Lightning's plugin.
        RuntimeError: When training starts, if the model has no masked layer.
    """

    router: Router
    _checked = False

    def __init__(
        self,
        *,
        kernels: str = "auto",
        backends: list[GemmKernel] | None = None,
        decisions: str | None = DECISIONS,
        budget_s: float = 60.0,
        gpu: DeviceModel | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.router = Router(kernels, backends, decisions, budget_s=budget_s, gpu=gpu)
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the models behind: processes that are spawned bring their own."""
        return {**self.__dict__, "_models": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin without a model."""
        self.__dict__.update(state, _models=weakref.WeakSet())

    def _require_masked(self) -> None:
        """Refuse to train without a masked layer: this plugin would do nothing.

        Raises:
            RuntimeError: Naming the model and the way out.
        """
        if self._checked or not self._models:
            return
        if not any(isinstance(module, Adapter) for model in self._models for module in model.modules()):
            names = ", ".join(sorted(type(model).__name__ for model in self._models))
            raise RuntimeError(
                f"{type(self).__name__} routes the products of N:M layers, but {names} has none: add "
                "NMSparsityCallback to the Trainer's callbacks (an NMSparsifier with Fabric), or take Lightning's own "
                f"{type(self).__name__.removeprefix('NM')}"
            )
        self._checked = True

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Lightning's context, with the router active."""
        with super().forward_context(), routing(self.router.live()):  # type: ignore[misc]
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Any:
        """Measure the first batch's products before its backward pass."""
        self._require_masked()
        self.router.tune()
        return super().pre_backward(tensor, module)  # type: ignore[misc]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's backward pass, with the router active."""
        with routing(self.router.live()):
            super().backward(*args, **kwargs)  # type: ignore[misc]

    def teardown(self) -> None:
        """Let go of the models and the packs; what ran can still be asked for."""
        self._models.clear()
        self.router.release()
        super().teardown()  # type: ignore[misc]
