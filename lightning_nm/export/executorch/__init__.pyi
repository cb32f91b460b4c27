from .program import ExecutorchExport as ExecutorchExport
from .program import Operator as Operator
from .program import export_executorch as export_executorch
from .quantized import QuantizedLayer as QuantizedLayer
from .targets import TARGETS as TARGETS
