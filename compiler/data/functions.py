"""Functions of a user's own that yield batches, named as ``module:function``."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offramp.bundle import TensorSpec
from offramp.calibration.data.data_sources import ArraysAndHash, DataSource
from offramp.calibration.data.errors import DataError
from offramp.calibration.data.scratch import ScratchSpace
from offramp.compiler.data.batches import ArraySource, IterableSource

_NAME: Final = re.compile(
    r"(?P<file>.+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)"
)


def names_function(text: str) -> bool:
    """Whether a text is of the form ``module:function`` or ``file.py:function``."""
    return _NAME.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class FunctionSource:
    """A function without arguments that yields batches, as :class:`.IterableSource` takes them."""

    name: str
    """``module:function`` or ``file.py:function``."""
    limit: int | None = None
    """Most samples that are taken."""

    def load(
        self, specs: Sequence[TensorSpec], scratch: ScratchSpace, *, keys: Collection[str] = ()
    ) -> ArraysAndHash:
        """Import the function and collect what it yields; its own errors are DataErrors."""
        function = self._import()
        with self._reporting():
            value = function()
        if isinstance(value, Iterator):
            value = self._guarded(value)
        return source_of_value(value, self.name, self.limit).load(specs, scratch, keys=keys)

    def _guarded(self, batches: Iterator[Any]) -> Iterator[Any]:
        with self._reporting():
            yield from batches

    def _import(self) -> Callable[[], Any]:
        match = _NAME.fullmatch(self.name)
        assert match is not None, "find_source has looked at it"
        with self._reporting(), _current_folder():
            if match["file"].endswith(".py"):
                function: Any = getattr(_run_file(Path(match["file"])), match["function"], None)
            else:
                function = pkgutil.resolve_name(self.name)
        if not callable(function):
            raise DataError(
                f"{self.name}: there is no function {match['function']!r} in {match['file']}; "
                "expected one without arguments that yields batches"
            )
        found: Callable[[], Any] = function
        return found

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn what a user's code raises into a DataError that says where it was raised."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # users' code
            last = traceback.extract_tb(error.__traceback__)[-1]
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(
                f"{self.name} failed in {last.filename}:{last.lineno}: {reason:.200}; expected a "
                "function without arguments that yields batches"
            ) from error


def source_of_value(value: Any, name: str, limit: int | None) -> DataSource:
    """Return the source of arrays or batches that a program has; DataError for anything else."""
    if isinstance(value, Mapping | tuple) or hasattr(value, "__array__"):
        return ArraySource(value, name=name)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return IterableSource(value, limit, name=name)
    raise DataError(
        f"{name}: a value of type {type(value).__name__} is no data; give a mapping from the names "
        "of inputs to arrays, an iterable of batches, or a function that returns one"
    )


def _run_file(path: Path) -> Any:
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected FILE.py:FUNCTION")
    spec = importlib.util.spec_from_file_location(f"offramp_data_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses and pickle expect
    spec.loader.exec_module(module)
    return module


@contextmanager
def _current_folder() -> Iterator[None]:
    """Find modules in the current folder too, as ``python -m`` does."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
