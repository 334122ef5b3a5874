"""The settings that clients may change while the server runs: its log's and its traces'.

Names and values are Triton's, so that its clients can be used.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from offramp.engine.common.errors import BadInputError


class LogLevels:
    """The level of the server's log, in Triton's terms."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("offramp")

    def settings(self) -> Mapping[str, bool | int | str]:
        """Return all settings, by name."""
        level = self._logger.getEffectiveLevel()
        return {
            "log_file": "",
            "log_info": level <= logging.INFO,
            "log_warning": level <= logging.WARNING,
            "log_error": level <= logging.ERROR,
            "log_verbose_level": int(level <= logging.DEBUG),
            "log_format": "default",
        }

    def change(self, wanted: Mapping[str, bool | int | str | None]) -> None:
        """Change the settings that are given; BadInputError, and none is changed."""
        now = dict(self.settings())
        for name, value in wanted.items():
            if value is None:  # so clients ask for a setting
                continue
            if name not in now:
                raise BadInputError(
                    f"there is no log setting {name!r:.80}; there are: {', '.join(now)}"
                )
            if name in _FIXED and value != now[name]:
                raise BadInputError(
                    f"log setting {name!r} cannot be changed while the server runs; it is "
                    f"{now[name]!r}: see --log-format, and redirect the server's output"
                )
            if type(value) is not type(now[name]):
                expected = type(now[name]).__name__
                raise BadInputError(f"log setting {name!r} is {value!r}, expected {expected}")
            now[name] = value
        if wanted:
            self._logger.setLevel(_level(now))


_FIXED: Final = frozenset({"log_file", "log_format"})


def _level(settings: Mapping[str, object]) -> int:
    """Return the level of :mod:`logging` for settings, the most verbose that is asked for."""
    levels = {
        "log_verbose_level": logging.DEBUG,
        "log_info": logging.INFO,
        "log_warning": logging.WARNING,
        "log_error": logging.ERROR,
    }
    asked = (level for name, level in levels.items() if settings[name])
    return next(asked, logging.CRITICAL)


class TraceSettings:
    """The settings of traces: whether requests are traced, and how many of them."""

    def __init__(self) -> None:
        self.level = "OFF"
        """``OFF``, or ``TIMESTAMPS``: a span for each request that is traced."""
        self.rate = 1000
        """One request of so many is traced, unless its caller asks for it."""

    def settings(self) -> Mapping[str, Sequence[str]]:
        """Return all settings, by name."""
        return {
            "trace_level": [self.level],
            "trace_rate": [str(self.rate)],
            "trace_count": ["-1"],
            "log_frequency": ["0"],
            "trace_file": [""],
            "trace_mode": ["opentelemetry"],
        }

    def change(self, wanted: Mapping[str, Sequence[str]]) -> None:
        """Change the settings that are given; BadInputError, and none is changed.

        A setting without a value is set to its default, as in Triton.
        """
        level, rate = self.level, self.rate
        for name, values in wanted.items():
            value = values[0] if values else ""
            if name == "trace_level" and value in ("", "OFF", "TIMESTAMPS"):
                level = value or "OFF"
            elif name == "trace_rate" and (not value or _is_rate(value)):
                rate = int(value or 1000)
            elif list(values) != list(self.settings().get(name, [])):
                raise BadInputError(
                    f"trace setting {name!r:.80} cannot be set to {value!r:.80}; trace_level is "
                    "OFF or TIMESTAMPS, trace_rate a whole number from 1 on, and the others cannot "
                    "be changed"
                )
        self.level, self.rate = level, rate


def _is_rate(text: str) -> bool:
    return text.isascii() and text.isdigit() and 1 <= int(text) < 2**31
