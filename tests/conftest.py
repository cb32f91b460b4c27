import gc
import os
import sys

os.environ.setdefault(
    "JSONARGPARSE_DEPRECATION_WARNINGS", "off"
)  # Lightning's CLI calls deprecated names

import pytest
import torch
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # a busy machine is no error
settings.load_profile("patient")


def pytest_collection_finish():
    """Collecting garbage takes longest in what was imported and collected, which stays."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _no_words_of_pytest():
    """LightningCLI warns of words on the command line that it is not given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-nm"])
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    """Small tensors: threads cost more than they give, and sums do not depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _nothing_compiled_yet():
    """Each test begins as a process does that has compiled nothing: direct reads are an error only there."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None:
        dynamo.counters["stats"].pop("unique_graphs", None)


@pytest.fixture
def deterministic():
    """Deterministic algorithms are asked for."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
