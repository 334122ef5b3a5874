"""Logging of the command line tools: on stderr, for people or, as JSON lines, for machines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final

FORMATS: Final = ("human", "json")
LEVELS: Final = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (RFC 3339, UTC), ``level``, ``logger``, ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record; a traceback goes into ``exception``."""
        time = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(*, level: str, log_format: str) -> None:
    """Configure the root logger; called once, by the command line.

    ``level`` is that of our loggers; other packages' stay at ``warning`` or above.
    """
    handler = logging.StreamHandler(sys.stderr)
    human = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if log_format == "json" else human)
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("offramp").setLevel(number)
