"""Check the files that a training saves, and make others of them: packed, dense, for other runtimes."""

from lightning_nm.export.coreml import CoreMLReport, CoreMLWritten, export_coreml
from lightning_nm.export.coreml_package import CoreMLPackage
from lightning_nm.export.executorch import ExecutorchExport, export_executorch
from lightning_nm.export.files import check_archive
from lightning_nm.export.packed_file import PackedFile
from lightning_nm.export.packed_loading import load_packed
from lightning_nm.export.packed_model import pack, save_packed, unpacked_state_dict, warm_up
from lightning_nm.export.packed_summary import packed_summary
from lightning_nm.export.sources import read_checkpoint
from lightning_nm.export.verdicts import Verdict
from lightning_nm.export.verification import Verification, verify

__all__ = [
    "CoreMLPackage",
    "CoreMLReport",
    "CoreMLWritten",
    "ExecutorchExport",
    "PackedFile",
    "Verdict",
    "Verification",
    "check_archive",
    "export_coreml",
    "export_executorch",
    "load_packed",
    "pack",
    "packed_summary",
    "read_checkpoint",
    "save_packed",
    "unpacked_state_dict",
    "verify",
    "warm_up",
]
