"""A fake engine with real sockets, on an event loop in its own thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

Served: TypeAlias = FakeServer[FakeEngine]


@pytest.fixture
def served() -> Iterator[Served]:
    """A running server over a :class:`FakeEngine`."""
    with FakeServer(FakeEngine()) as server:
        yield server


@pytest.fixture
def restored_logging() -> Iterator[None]:
    """``main`` configures the root logger; give pytest its own back."""
    root, ours = logging.getLogger(), logging.getLogger("offramp")
    before = (root.level, root.handlers[:], ours.level)
    yield
    root.setLevel(before[0])
    root.handlers[:] = before[1]
    ours.setLevel(before[2])
