"""A disk that has no room left."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(size=20_000):
    """Files cannot grow beyond a size, as on a full disk; the error is another one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
