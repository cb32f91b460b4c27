"""What the selection decided on one weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from lightning_nm.functional.pattern import NMPattern
from lightning_nm.functional.schedule import Schedule
from lightning_nm.nn.layer.layout import Layout

if TYPE_CHECKING:  # for the types only: imports point one way
    from lightning_nm.estimators.base import GradientEstimator
    from lightning_nm.methods.base import Method


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """The selection's decisions on a weight."""

    name: str  # in the model: the module's name, with the parameter's appended when that is not "weight"
    module: nn.Module  # owns the parameter
    parameter: str  # the parameter's name in the module
    pattern: NMPattern
    method: Method
    estimator: GradientEstimator | None = None  # None uses dY itself in the wgrad GEMM
    layout: Layout = "plain"
    groups: int = 1  # equal groups of output rows that no dgrad block crosses
    forward_reason: str = ""  # why the forward GEMM cannot be N:M; empty when it can
    dgrad_reason: str = ""  # likewise for the dgrad GEMM
    # Whether tensor parallelism shards the weight while its module runs.
    tensor_parallel: bool = False
    # What draws W_B of W_F in the dgrad GEMM; None uses the method's W_B.
    dgrad: GradientEstimator | None = None
    # A dense start, a ramp of patterns to `pattern`, and a dense end.
    schedule: Schedule | None = None
    tied: tuple[tuple[nn.Module, str], ...] = ()
    """Other modules that hold the same parameter, with its name in them: they use the same masks."""

    @property
    def maskable(self) -> bool:
        """Whether the method makes the forward or the backward weight of this layer N:M at some time."""
        can_mask_forward = self.method.sparse_forward and not self.forward_reason
        can_mask_dgrad = self.method.sparse_dgrad and not self.dgrad_reason
        return can_mask_forward or can_mask_dgrad

    @property
    def may_draw_backward(self) -> bool:
        """Whether the dgrad GEMM uses a random draw of the weight, at least outside of dense phases."""
        return self.dgrad is not None and not self.dgrad_reason

    @property
    def holders(self) -> tuple[tuple[nn.Module, str], ...]:
        """Every module that holds the parameter, with its name in it."""
        return (self.module, self.parameter), *self.tied
