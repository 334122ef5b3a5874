"""What all tables share: the types of results, rows and tables, and formats of figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Result: TypeAlias = "dict[str, Any]"
"""Content of a file of ``benchmarks/results``; a list is under ``rows``."""
Rows: TypeAlias = "Iterator[Sequence[str]]"
"""Cells of each row, the heading first."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page, made from files of ``benchmarks/results``."""

    rows: Callable[..., Rows]
    """Yields the rows; its arguments are the results, in order."""
    results: tuple[str, ...]
    """Names of the files, without ``.json``."""


def by(rows: Sequence[Result], *keys: str) -> dict[Any, Result]:
    """Return records by the value of a key, or by the tuple of several."""
    if len(keys) == 1:
        return {row[keys[0]]: row for row in rows}
    return {tuple(row[key] for key in keys): row for row in rows}


def percent(share: float, digits: int = 1) -> str:
    """Return a share in per cent."""
    return f"{100 * share:.{digits}f} %"


def times(ratio: float, digits: int = 2) -> str:
    """Return a ratio, such as ×0.31."""
    return f"×{ratio:.{digits}f}"
