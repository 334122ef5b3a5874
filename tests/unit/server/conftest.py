"""A fake engine behind real sockets, on an event loop of its own thread."""

from __future__ import annotations

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
