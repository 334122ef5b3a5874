"""TensorRT's messages: to :mod:`logging`, and its errors into our exceptions.

TensorRT keeps the first logger that it is given for the rest of the process, whatever later ones
it gets. So there is one, never freed, and who wants to know the errors of some work collects them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorrt as trt


_LOG = logging.getLogger(__name__)
_LEVELS = {
    "INTERNAL_ERROR": logging.ERROR,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.DEBUG,
    "VERBOSE": logging.DEBUG,
}
"""TensorRT's severities as ours; its "info" is what others call debugging."""
_MOST_ERRORS = 8
"""Errors kept for a message. The first are the cause, the rest repeat it."""

_collectors: list[list[str]] = []
_lock = Lock()


@contextmanager
def errors_of_tensorrt() -> Iterator[list[str]]:
    """Collect the errors that TensorRT reports during the block.

    They come from all threads: TensorRT does not say whose work an error belongs to.
    """
    collected: list[str] = []
    with _lock:
        _collectors.append(collected)
    try:
        yield collected
    finally:
        with _lock:  # by identity: two lists of the same errors are equal
            _collectors[:] = [one for one in _collectors if one is not collected]


def receive(severity: str, message: str) -> None:
    """Take a message of TensorRT; the severity is the name of a ``tensorrt.ILogger.Severity``."""
    level = _LEVELS.get(severity, logging.WARNING)
    if level == logging.ERROR:
        with _lock:
            for collected in _collectors:
                if len(collected) < _MOST_ERRORS:
                    collected.append(message.strip())
            handled = bool(_collectors)
        # Whoever collects errors raises them; a second line on the terminal would not help.
        level = logging.DEBUG if handled else level
    _LOG.log(level, "TensorRT: %s", message)


@cache
def logger() -> trt.ILogger:
    """The process's one TensorRT logger."""
    import tensorrt as trt  # noqa: PLC0415

    class Logger(trt.ILogger):  # type: ignore[misc]  # tensorrt has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            receive(severity.name, msg)

    return Logger()
