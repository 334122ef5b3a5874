"""What an extension adds to ``eeserve``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prometheus_client.core import Metric

from offramp.commands.combinations import Illegal
from offramp.engine.requests.statistics import ModelStatistics


class SettingError(ValueError):
    """A setting of an extension names what is wrong, or not there: one line that says so."""

    def __init__(self, message: str, key: str) -> None:
        """``key`` is the field of the setting."""
        super().__init__(message)
        self.key = key


class ServerExtension(Protocol):
    """The object ``EXTENSION`` of an extension's module ``for_server``.

    One that also is a :class:`~offramp.server.common.joined.ModelOpener` serves a kind of models.
    """

    settings: type[Any]
    """A dataclass whose fields are keys of ``[engine]``, and options of the command line."""
    combinations: Sequence[Illegal]
    """Combinations with its options that are refused."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add options; those that are not given are absent from the namespace."""
        ...

    def engine_options(
        self, file: Mapping[str, Any], line: Mapping[str, Any], folder: Path | None
    ) -> Mapping[str, Any]:
        """Return fields of :class:`.EngineOptions`, of what file and command line set.

        Args:
            file: Fields of :attr:`settings` that the configuration file sets.
            line: Those that the command line sets, which overrule them.
            folder: What paths in the file are relative to; ``None`` without one.

        Raises:
            SettingError: What a setting names is wrong.
            ValueError: Settings do not go together.
        """
        ...

    def families(self, models: Sequence[tuple[str, ModelStatistics]]) -> Iterator[Metric]:
        """Yield metrics of all models."""
        ...

    def sections(self, statistics: ModelStatistics) -> Iterable[str]:
        """Return parts of a model's place on the status page, as safe HTML."""
        ...
