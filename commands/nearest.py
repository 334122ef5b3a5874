"""The names that a mistyped name may mean: one rule for options, keys, tables and models."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Final

_LEAST_SIMILARITY: Final = 0.75
"""Smallest ``difflib`` ratio of two similar names. Typing errors are above it (``shard`` and
``share``: 0.8); names that only share a word are below it (``metrics-port`` and ``grpc-port``:
0.67)."""
_LEAST_WORD: Final = 4
"""A name with at least this number of characters is also searched for inside longer names, at the
end of one of their words."""
_MOST_LONGER: Final = 2
"""Largest number of longer names that are worth reading."""
_LONGEST: Final = 80
"""Number of characters that are compared."""


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known names that ``word`` may mean; empty if none is similar, or too many are.

    Longer names are those that begin with ``word``, or have it at the end of a word: ``slo`` means
    ``slo_ms``, and ``port`` means ``grpc_port`` or ``http_port``.
    """
    word, names = word[:_LONGEST], [str(name) for name in known]
    similar = difflib.get_close_matches(word, names, n=1, cutoff=_LEAST_SIMILARITY)
    end = re.compile(rf"{re.escape(word)}(?=[-_]|$)")
    longer = [
        name
        for name in names
        if name.startswith((f"{word}-", f"{word}_"))
        or (len(word) >= _LEAST_WORD and end.search(name))
    ]
    endings = [name for name in longer if name.endswith((f"-{word}", f"_{word}"))]
    if len(endings) > 1:
        return endings
    return similar or (longer if len(longer) <= _MOST_LONGER else [])
