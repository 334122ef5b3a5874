"""Settings of all integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.bundles import brief_measurements


@pytest.fixture(scope="module", autouse=True)
def brief() -> Iterator[None]:
    """The commands measure briefly too."""
    with brief_measurements():
        yield
