"""Routing of TensorRT's messages to :mod:`logging`, and of its errors to our exceptions.

TensorRT uses its first logger for the rest of the process, and ignores later loggers. So there is
one logger, which is never freed. Code that needs the errors of an operation collects them with
:func:`errors_of_tensorrt`.
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
"""Logging levels by TensorRT's severities; TensorRT's "info" is debugging elsewhere."""
_MOST_ERRORS = 8
"""Largest number of errors in a message. The first errors are the cause, the others repeat it."""

_collectors: list[list[str]] = []
_lock = Lock()


@contextmanager
def errors_of_tensorrt() -> Iterator[list[str]]:
    """Collect the errors that TensorRT reports during the block.

    The errors of all threads are collected: TensorRT does not report the thread of an error.
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
    """Handle a message of TensorRT; the severity is the name of a ``tensorrt.ILogger.Severity``."""
    level = _LEVELS.get(severity, logging.WARNING)
    if level == logging.ERROR:
        with _lock:
            for collected in _collectors:
                if len(collected) < _MOST_ERRORS:
                    collected.append(message.strip())
            handled = bool(_collectors)
        # The code that collects errors raises them; a second line on the terminal would not help.
        level = logging.DEBUG if handled else level
    _LOG.log(level, "TensorRT: %s", message)


@cache
def logger() -> trt.ILogger:
    """Return the process's only TensorRT logger."""
    import tensorrt as trt  # noqa: PLC0415

    class Logger(trt.ILogger):  # type: ignore[misc]  # tensorrt has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            receive(severity.name, msg)

    return Logger()
