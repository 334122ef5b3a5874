"""A clock that only ONNX Runtime moves: times become a function of graphs and batches.

    python -m tests.golden.virtual_clock COMMAND ARGUMENT …

runs ``eecompile`` or ``eebench`` under it, so that whatever is decided by measured times is decided
alike at every run. Running a graph takes as long as it has operators and its batch has rows; all
else takes no time. Times are multiples of 2⁻²⁰ s, so that differences between them are exact
whatever ran before.
"""

from __future__ import annotations

import re
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnx import load_from_string

TICK_S = 2.0**-20
ROOT = Path(__file__).parent.parent.parent
_ticks = 0


class TimedSession(ort.InferenceSession):  # type: ignore[misc]
    """A session whose runs move the clock."""

    def __init__(self, model: bytes | str, *arguments: Any, **options: Any) -> None:
        """Load, and count operators."""
        super().__init__(model, *arguments, **options)
        content = model if isinstance(model, bytes) else Path(model).read_bytes()
        self._sess = _Native(self._sess, len(load_from_string(content).graph.node))


class _Native:
    """The session that does the work, which some callers run themselves."""

    def __init__(self, native: Any, operators: int) -> None:
        self._native, self._operators = native, operators

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def run(self, outputs: Any, feed: Mapping[str, Any], options: Any = None) -> Any:
        """Run, and move the clock."""
        global _ticks  # noqa: PLW0603 - there is one clock
        rows = len(next(iter(feed.values())))
        _ticks += 20 + self._operators * (12 + 6 * rows)
        return self._native.run(outputs, feed, options)


def install() -> None:
    """Replace the clocks; to be called before Offramp is imported, which keeps them as defaults."""
    if any(name.partition(".")[0] == "offramp" for name in sys.modules):
        raise RuntimeError("offramp is imported already; install the virtual clock before it")
    time.perf_counter = time.process_time = time.thread_time = lambda: _ticks * TICK_S  # type: ignore[assignment]
    ort.InferenceSession = TimedSession


def command(name: str) -> Callable[[], int]:
    """Find a public command by its name in ``pyproject.toml``."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = re.split(":", scripts[name])
    found: Callable[[], int] = getattr(import_module(module), function)
    return found


if __name__ == "__main__":
    install()
    run = command(sys.argv[1])
    del sys.argv[0]  # which is the command's own now
    sys.exit(run())
