"""Pages for people: templates that need nothing beside them, and escape what they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import (
    BaseLoader,
    ChoiceLoader,
    Environment,
    FileSystemLoader,
    PackageLoader,
    StrictUndefined,
    Template,
)


def page_template(name: str, *places: str | Path, **filters: Callable[..., Any]) -> Template:
    """Load a template by its file's name, with the filters that it formats values by.

    It, and what it includes, is looked for in ``places`` in turn: packages with a folder
    ``templates``, by their full name, and folders. What a template is not given is an error.
    """
    environment = Environment(
        loader=ChoiceLoader([*map(_loader, places)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment.get_template(name)


def _loader(place: str | Path) -> BaseLoader:
    return PackageLoader(place) if isinstance(place, str) else FileSystemLoader(place)
