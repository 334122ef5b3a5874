"""Fixtures that several suites share."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from offramp.bundle import Bundle
from tests.local_ray import LOOPBACK

# No test asserts times, hypothesis does not either; CI tries the same examples every time.
settings.register_profile(
    "offramp",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("offramp")

# Read where Ray is imported, whichever test does so first.
for name, value in LOOPBACK.items():
    os.environ.setdefault(name, value)


HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""Signal handlers of Python at startup, except in the background or under nohup, where some are
ignored."""


def reset_handlers() -> None:
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


reset_handlers()  # processes that tests start inherit what is ignored


@pytest.fixture(autouse=True)
def handlers() -> None:
    """Take back handlers that libraries installed in an earlier test, as Ray's driver does."""
    reset_handlers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what needs the shipped example compiled, which takes a minute and a half."""
    for item in items:
        if "fashion" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    spare_collections()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, whose fixtures are gone: what is left are modules that it imported."""
    if nextitem is not None and nextitem.path != item.path:
        spare_collections()


def spare_collections() -> None:
    """Spare garbage collections what lives as long as the process: modules, and thousands of tests.

    The compiler collects before each of its steps, which took half of the time of small models.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fashion(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The shipped example, compiled on a part of its data to save time."""
    from tests.bundles import compile_example

    folder = made_once(
        tmp_path_factory, "fashion", lambda folder: compile_example(folder, samples=6000, epochs=6)
    )
    return Bundle.open(folder / "fashion.ee")


@pytest.fixture(scope="session")
def with_variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ``compile_with_variants`` filled; tests change nothing in it."""
    from tests.served_variants import compile_with_variants

    return made_once(tmp_path_factory, "variants", compile_with_variants)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first of the tests' processes that asks has filled, for all."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(partial := shared / f"{name}.partial", ignore_errors=True)
            partial.mkdir()
            make(partial)
            partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def bundle_path(fashion: Bundle) -> Path:
    """A real bundle with active exits."""
    assert fashion.policy.active
    return fashion.path


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo the logging setup of a command run inside a test, which would affect later tests."""
    loggers = [logging.getLogger(), logging.getLogger("offramp")]
    before = [(each, each.level, each.propagate, list(each.handlers)) for each in loggers]
    disabled = logging.root.manager.disable
    yield
    for each, level, propagate, handlers in before:
        each.setLevel(level)
        each.propagate, each.handlers = propagate, handlers
    logging.disable(disabled)
