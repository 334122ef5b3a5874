"""Templates of pages that need nothing beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from offramp.compiler.report import numbers


def page_template(name: str, **filters: Callable[..., Any]) -> Template:
    """Load a page's template, with filters besides those that all pages have."""
    environment = Environment(
        loader=PackageLoader("offramp.compiler"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=numbers.percent, ms=numbers.milliseconds, **filters)
    return environment.get_template(name)
