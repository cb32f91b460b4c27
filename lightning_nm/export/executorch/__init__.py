"""Export by ExecuTorch: int8 programs for Arm's Ethos-U85, which runs 2:4 weights faster, and for CPUs."""

from lightning_nm.export.executorch.program import ExecutorchExport, Operator, export_executorch
from lightning_nm.export.executorch.quantized import QuantizedLayer
from lightning_nm.export.executorch.targets import TARGETS

__all__ = ["TARGETS", "ExecutorchExport", "Operator", "QuantizedLayer", "export_executorch"]
