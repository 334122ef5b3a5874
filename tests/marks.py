"""Marks of cases: which run in ``make test``, and which in ``make test-all`` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[str], names: Iterable[str]) -> list[Any]:
    """Cases of these names, of which all but the quick ones are marked slow."""
    kept = set(quick)
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
