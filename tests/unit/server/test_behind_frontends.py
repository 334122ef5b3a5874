"""The tests of a server once more, where front ends hold its connections."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from tests.unit.server import (
    test_admission,
    test_health_and_reflection,
    test_service,
    test_streaming,
    test_tritonclient,
)

from offramp.server.arguments.options import ServerOptions
from offramp.testing.engine import FakeEngine
from offramp.testing.server import FakeServer

pytestmark = pytest.mark.slow  # each starts a process

MODULES = (
    test_health_and_reflection,
    test_admission,
    test_service,
    test_streaming,
    test_tritonclient,
)
INSIDE = {
    "test_a_message_has_to_arrive_in_time",
    "test_the_message_of_another_method_counts_for_the_peak",
}
"""Change or look into the process that holds the connections."""

client = test_tritonclient.client


@pytest.fixture
def served() -> Iterator[FakeServer[FakeEngine]]:
    """A running server with a front end."""
    with FakeServer(FakeEngine(), ServerOptions(frontends=1, max_message_mib=1)) as server:
        yield server


def of_servers() -> dict[str, Any]:
    return {
        name: test
        for module in MODULES
        for name, test in vars(module).items()
        if name.startswith("test_")
        and name not in INSIDE
        and "served" in inspect.signature(test).parameters
    }


globals().update(of_servers())
