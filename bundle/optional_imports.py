"""Imports of optional packages: any failure becomes one error that names the remedy.

An optional package can fail to import in other ways than ImportError: a shared library that does
not load raises OSError, and code of the package may raise anything (OpenVINO's telemetry raises
RuntimeError where there is no home folder). None of them may end a command that can work without
the package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def optional_import(
    *packages: str, install: str, raises: Callable[[str], Exception]
) -> Iterator[None]:
    """Guard a block that imports optional packages.

    Args:
        packages: Their top-level modules.
        install: Command that installs them, for the message.
        raises: Function that makes the error from its message.
    """
    try:
        yield
    except Exception as error:
        named = " and ".join(packages)
        lacks = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
        if lacks.partition(".")[0] in packages:
            raise raises(f"the Python package {lacks} is not installed: {install}") from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise raises(
            f"{named} cannot be imported ({reason:.300}); install it again: {install}"
        ) from error
