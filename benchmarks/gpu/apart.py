"""A process for what may crash: an illegal access to a GPU's memory spoils all that a process does on it afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

PRELOADED = ["benchmarks.gpu.checks"]
"""Imported by the server; no import of theirs may touch CUDA, which does not survive a fork."""


class _Failed(str):
    """What a function raised, as text: the exception itself might not travel."""


def messages(function: Callable[..., object], *arguments: object, seconds: float) -> Iterator[Any]:
    """Call ``function(send, *arguments)`` in a process of its own, and yield what it sends as it arrives.

    The process is killed when its time is up, and when the caller closes this iterator. It is forked from a server
    process that has imported everything and never used a GPU, so that only the first call waits for the imports.

    Args:
        function: A function of a module's top level; `send` takes anything that can be pickled.
        arguments: What can be pickled.
        seconds: The time that it may take, its start included.

    Raises:
        RuntimeError: What the function raised, or that the process died.
        TimeoutError: If it is not done in time. What came before was yielded.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(sender, function, arguments))
    end = time.monotonic() + seconds
    process.start()
    sender.close()  # so that the end of the process is the end of the messages
    try:
        while receiver.poll(max(end - time.monotonic(), 0)):
            try:
                message = receiver.recv()
            except EOFError:
                process.join()
                if process.exitcode:
                    raise RuntimeError(f"the process died, exit code {process.exitcode}") from None
                return
            if isinstance(message, _Failed):
                raise RuntimeError(message)
            yield message
        raise TimeoutError(f"not done after {seconds:.0f} s")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _call(
    sender: Connection, function: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    try:
        function(sender.send, *arguments)
    except Exception as error:
        sender.send(_Failed(f"{type(error).__name__}: {error}"))
