"""Check the files that a training saves: :func:`verify` does what ``lightning-nm verify`` does."""

from lightning_nm.export.checkpoint import read_checkpoint
from lightning_nm.export.files import check_archive
from lightning_nm.export.verification import Verdict, Verification, verify

__all__ = ["Verdict", "Verification", "check_archive", "read_checkpoint", "verify"]
