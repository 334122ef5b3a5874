"""Log settings that clients may change while the server runs, with Triton's names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

from offramp.engine.common.errors import BadInputError


class LogLevels:
    """The level of the server's log, in Triton's terms."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("offramp")

    def settings(self) -> Mapping[str, bool | int | str]:
        """Return the settings of the log that clients may read, by name."""
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
        """Change settings; if one is invalid, raise BadInputError and change none."""
        now = dict(self.settings())
        for name, value in wanted.items():
            if value is None:  # clients send no value to read a setting
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
    """Return the most verbose :mod:`logging` level that the settings enable."""
    levels = {
        "log_verbose_level": logging.DEBUG,
        "log_info": logging.INFO,
        "log_warning": logging.WARNING,
        "log_error": logging.ERROR,
    }
    asked = (level for name, level in levels.items() if settings[name])
    return next(asked, logging.CRITICAL)
