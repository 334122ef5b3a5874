"""Logging of the command line tools to stderr: readable lines or JSON lines."""

from __future__ import annotations

import importlib
import json
import logging
import sys
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Final

from offramp.engine.common.line_limit import OneLineFilter, QueuedHandler

FORMATS: Final = ("human", "json")
LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggingOptions:
    """Level and format of the log."""

    log_level: str = "info"
    """Lowest level of lines that are logged, one of :data:`LEVELS`."""
    log_format: str = "human"
    """Format of the log's lines, one of :data:`FORMATS`."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``.

    The facts of an access log line are fields of the object.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; a traceback goes into ``exception``."""
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(*, level: str, log_format: str) -> None:
    """Configure the root logger; called once, by the command line tool.

    ``level`` applies to our loggers; other packages log at ``warning`` or above.
    """
    handler = QueuedHandler(sys.stderr)
    human = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else human)
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("offramp").setLevel(number)
    quiet_libraries()


def quiet_libraries() -> None:
    """Log each failure that a client causes, such as a broken call, in one line.

    gRPC and aiohttp would log a traceback each time, and gRPC would print it as well.
    """
    for name in ("grpc._cython.cygrpc", "aiohttp.server"):
        logging.getLogger(name).filters = [OneLineFilter()]
    quiet = {**vars(traceback), "print_exc": lambda: None}
    cygrpc = importlib.import_module("grpc._cython.cygrpc")
    cygrpc.traceback = SimpleNamespace(**quiet)  # type: ignore[attr-defined]


def flush_log() -> None:
    """Wait until the log is written, for at most one second."""
    for handler in logging.getLogger().handlers:
        handler.flush()
