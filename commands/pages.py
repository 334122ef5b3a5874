"""HTML pages from templates; pages are self-contained, and values are escaped."""

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
    """Load a template by its file's name, with the filters that format its values.

    The template and its includes are searched for in ``places``, in order. A place is a folder, or
    the full name of a package with a folder ``templates``. An undefined variable in a template is
    an error.
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
