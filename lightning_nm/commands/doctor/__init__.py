"""What a training gains from sparse kernels, product by product; ``lightning-nm doctor`` prints it."""

from lightning_nm.commands.doctor.machine import KernelState, Machine, examine
from lightning_nm.commands.doctor.report import Report, Row, report

__all__ = ["KernelState", "Machine", "Report", "Row", "examine", "report"]
