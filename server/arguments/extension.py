"""Interface of an extension to ``eeserve``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import Metric

from offramp.commands.combinations import Illegal
from offramp.engine.requests.statistics import ModelStatistics


class SettingError(ValueError):
    """A setting of an extension refers to something missing or invalid; the message is one line."""

    def __init__(self, message: str, key: str) -> None:
        """``key`` is the field of the setting."""
        super().__init__(message)
        self.key = key


class ServerExtension(Protocol):
    """The object ``EXTENSION`` of an extension's module ``for_server``.

    An extension that is also a :class:`~offramp.server.common.joined.ModelOpener` serves another
    kind of model.
    """

    settings: type[Any]
    """Dataclass whose fields are keys of ``[engine]`` and options of the command line."""
    combinations: Sequence[Illegal]
    """Refused combinations that involve the extension's options."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add options; options that the user leaves out are absent from the namespace."""
        ...

    def engine_options(
        self, file: Mapping[str, Any], line: Mapping[str, Any], folder: Path | None
    ) -> Mapping[str, Any]:
        """Return fields of :class:`.EngineOptions` made from the file and the command line.

        Args:
            file: Fields of :attr:`settings` that the configuration file sets.
            line: Fields that the command line sets; they override the file.
            folder: Folder that paths in the file are relative to; ``None`` without a file.

        Raises:
            SettingError: A setting refers to something invalid.
            ValueError: Settings contradict each other.
        """
        ...

    def families(self, models: Sequence[tuple[str, ModelStatistics]]) -> Iterator[Metric]:
        """Yield metrics of all models."""
        ...

    def sections(self, statistics: ModelStatistics) -> Iterable[str]:
        """Return HTML parts, safely escaped, for a model's section of the status page."""
        ...
