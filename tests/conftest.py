"""Fixtures that several suites share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from offramp.bundle import Bundle

# No test asserts times, hypothesis does not either; CI tries the same examples every time.
settings.register_profile(
    "offramp",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("offramp")


@pytest.fixture(scope="session")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shipped example, compiled on a part of its data to save time."""
    from tests.bundles import compile_example

    return compile_example(tmp_path_factory.mktemp("fashion"), samples=6000, epochs=6)


@pytest.fixture(scope="session")
def bundle_path(fashion: Bundle) -> Path:
    """A real bundle with active exits."""
    assert fashion.policy.active
    return fashion.path
