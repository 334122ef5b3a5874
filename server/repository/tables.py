"""Tables of a configuration file that no model of the repository has the name of."""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

from offramp.server.arguments.configuration import ConfigurationError, hint_at
from offramp.server.arguments.options import ModelRepositoryOptions, RepositoryControl
from offramp.server.repository.layout import find_models

logger = logging.getLogger(__name__)


def check_tables(
    file: Path, tables: Collection[str], settings: ModelRepositoryOptions, named: Collection[str]
) -> None:
    """Refuse tables ``[models.NAME]`` without effect, or warn if such a model may come later.

    ``tables`` are the names of the tables without a path; ``named`` are the models that are served
    by their paths.

    Raises:
        ConfigurationError: A table has no model, and models do not change while the server runs.
    """
    folder = settings.model_repository
    if folder is None or not tables:
        return
    try:
        known = {*find_models(folder), *named}
    except OSError:  # reported when the repository is opened
        return
    for name in sorted(set(tables) - known):
        told = f"{file}: [models.{name}]: there is no model {name!r:.80} in {folder}"
        hint = hint_at(name, sorted(known))
        if settings.model_control is RepositoryControl.NONE:
            raise ConfigurationError(
                f"{told}{hint} (expected: {', '.join(sorted(known)) or 'none'}); correct the "
                "name, add a path, or leave the table out"
            )
        logger.warning("%s yet, so the table has no effect%s", told, hint)
