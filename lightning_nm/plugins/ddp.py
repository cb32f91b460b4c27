"""NMDDPStrategy: DDP that sends only the gradients at kept entries where possible."""

from __future__ import annotations

from typing import Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_nm.training.comm_hook import CommHookState, kept_entries_hook


class NMDDPStrategy(DDPStrategy):
    """Lightning's DDP for :class:`~lightning_nm.NMSparsityCallback`, by ``Trainer(strategy="nm_ddp")``.

    If a method needs no gradient at pruned entries (ASP after pruning, BAME between adaptations), only those at kept
    entries are sent: N / M of the bytes. The callback compares the masks of all processes before every step, and logs
    ``nm/grad_bytes_ratio``. The short name needs ``lightning_nm`` to be imported; in YAML,
    ``class_path: lightning_nm.NMDDPStrategy`` always works.

    Args:
        wire_dtype: ``"bf16"`` sends gradients in bfloat16; ``None`` sends them in their own dtype.
        **kwargs: Arguments of Lightning's ``DDPStrategy`` and torch's ``DistributedDataParallel``, except a
            communication hook.

    Raises:
        ValueError: For another ``wire_dtype``, and for a communication hook next to this one.

    Example::

        >>> import lightning.pytorch as pl
        >>> trainer = pl.Trainer(strategy=NMDDPStrategy(wire_dtype="bf16"), accelerator="cpu", devices=2, logger=False)
    """

    def __init__(self, *, wire_dtype: Literal["bf16"] | None = None, **kwargs: Any) -> None:
        if wire_dtype not in (None, "bf16"):
            raise ValueError(
                f"wire_dtype={wire_dtype!r} is unknown: use 'bf16', or None to send gradients as they are"
            )
        # DDP takes one hook. The state and the wrapper of another would be without effect.
        for name in ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name}={kwargs[name]!r}: NMDDPStrategy has a communication hook of its own, and DDP takes one; "
                    "for bfloat16 use wire_dtype='bf16', for others strategy='ddp', which is correct with every method"
                )
        super().__init__(**kwargs)
        self.comm_hook = CommHookState(None if wire_dtype is None else torch.bfloat16)
        """The state of the communication hook."""

    def configure_ddp(self) -> None:
        """Wrap the model, and register the hook."""
        super().configure_ddp()
        # Lightning's own arguments for hooks work on CUDA devices only. Until masks are installed the hook sends whole
        # gradients.
        assert isinstance(self.model, DistributedDataParallel)
        self.model.register_comm_hook(self.comm_hook, kept_entries_hook)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``nm_ddp`` in Lightning's registry; may be called several times."""
        strategy_registry.register(
            "nm_ddp", cls, description="DDP that sends kept entries alone", override=True
        )


NMDDPStrategy.register_strategies(StrategyRegistry)
