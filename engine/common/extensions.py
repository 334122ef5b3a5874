"""Extensions: packages outside the core that add to its commands, found by a table of names.

The core imports none of them and runs without them. An extension's addition to a host (``engine``,
``control``, ``server``, ``compiler``) is the object ``EXTENSION`` of its module ``for_HOST``, which
is imported when the host is used; each host defines the protocol of that object.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

EXTENSIONS: Final = (
    "offramp.baselines",
    "offramp.cluster",
    "offramp.generation",
    "offramp.supernet",
)
"""Packages that are searched for."""


@cache
def extensions_for(host: str) -> tuple[Any, ...]:
    """Import and return the additions of all installed extensions to a host."""
    here = [name for name in EXTENSIONS if find_spec(name) is not None]
    modules = [f"{name}.for_{host}" for name in here]
    return tuple(import_module(m).EXTENSION for m in modules if find_spec(m) is not None)
