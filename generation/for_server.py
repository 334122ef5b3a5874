"""Registration of generating models with ``eeserve``: bundles, options, metrics and page."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client.core import Metric

from offramp.commands.combinations import Illegal
from offramp.engine.models.options import EngineOptions
from offramp.engine.requests.statistics import ModelStatistics
from offramp.generation.bundle.generating_bundle import GENERATION, GENERATION_HASH
from offramp.generation.serving.serving_options import NAME, TextServingOptions
from offramp.generation.serving.text_engine import TextEngine


class _Extension:
    """Serves models that generate text (:class:`.ServerExtension`, :class:`.ModelOpener`)."""

    settings = TextServingOptions
    combinations: tuple[Illegal, ...] = ()

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options; all are fields of :class:`TextServingOptions`."""
        from offramp.server.arguments.option_groups import (  # noqa: PLC0415 - a circle
            OptionGroup,
            integer,
        )

        options = OptionGroup(
            parser, "text", "Models that generate text, token by token.", TextServingOptions()
        )
        options.add(
            "--text-slots",
            "sequences that a model generates at a time; others wait. Each has cache memory for "
            "--text-length tokens: 4 bytes times keys and values of all layers a token; the log "
            "says how much that is",
            metavar="N",
            type=integer(1),
        )
        options.add(
            "--text-length",
            "tokens that the cache of a sequence has memory for: prompt and answer, of an "
            "encoder-decoder the answer's (default: the longest that the model was compiled for)",
            metavar="TOKENS",
            type=integer(2),
        )

    def engine_options(
        self, file: Mapping[str, Any], line: Mapping[str, Any], folder: Path | None
    ) -> Mapping[str, Any]:
        """Return the options under ``extensions``; empty if all of them are defaults."""
        del folder
        asked = TextServingOptions(**{**file, **line})
        return {"extensions": {} if asked == TextServingOptions() else {NAME: asked}}

    def families(self, models: Sequence[tuple[str, ModelStatistics]]) -> Iterator[Metric]:
        """Yield the metrics of generating models."""
        from offramp.generation.serving.text_pages import text_families  # noqa: PLC0415 - a circle

        return text_families(models)

    def sections(self, statistics: ModelStatistics) -> Iterable[str]:
        """Yield the additional sections of the page of a generating model."""
        from offramp.generation.serving.text_pages import text_section  # noqa: PLC0415 - a circle

        section = text_section(statistics)
        return [] if section is None else [section]

    def opens(self, path: Path) -> bool:
        """Return whether a path is a generating bundle, possibly without its manifest."""
        return any((path / name).is_file() for name in (GENERATION, GENERATION_HASH))

    async def open_models(self, models: Mapping[str, Path], options: EngineOptions) -> TextEngine:
        """Load generating bundles."""
        return await TextEngine.open(models, options)


EXTENSION: Final = _Extension()
