"""Many trainings in one process."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _old_objects():
    """Each training collects garbage, which takes longest in what was imported."""
    gc.freeze()
    yield
    gc.unfreeze()
