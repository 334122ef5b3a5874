"""Clock that only ONNX Runtime advances: times become a function of graphs and batches.

    python -m tests.golden.virtual_clock COMMAND ARGUMENT …

runs ``eecompile`` or ``eebench`` under it, so that decisions by measured times are the same
in every run. Running a graph takes a time by its operators, its weights and the rows of its
batch; other work takes no time. Times are multiples of 2⁻²⁰ s, so that differences between them are
exact in any order of runs.
"""

from __future__ import annotations

import math
import re
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import onnxruntime as ort
from onnx import GraphProto, load_from_string

TICK_S = 2.0**-20
ROOT = Path(__file__).parent.parent.parent
_ticks = 0


class TimedSession(ort.InferenceSession):  # type: ignore[misc]
    """A session whose runs move the clock."""

    def __init__(self, model: bytes | str, *arguments: Any, **options: Any) -> None:
        """Load, and find what runs take."""
        super().__init__(model, *arguments, **options)
        content = model if isinstance(model, bytes) else Path(model).read_bytes()
        self._sess = _Native(self._sess, *_costs(load_from_string(content).graph))


def _costs(graph: GraphProto) -> tuple[int, int]:
    """Return the ticks of a run, and those of each row in it, by operators and weights.

    A quantised graph takes half of what its operators would take unquantised.
    """
    rounding = ("QuantizeLinear", "DequantizeLinear")
    operators = sum(node.op_type not in rounding for node in graph.node)
    elements = sum(math.prod(weight.dims) for weight in graph.initializer)
    row = 6 * operators + elements // 512
    return 20 + 12 * operators, row if operators == len(graph.node) else row // 2


class _Native:
    """The session that does the work, which some callers run themselves."""

    def __init__(self, native: Any, run_ticks: int, row_ticks: int) -> None:
        self._native, self._run_ticks, self._row_ticks = native, run_ticks, row_ticks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def run(self, outputs: Any, feed: Mapping[str, Any], options: Any = None) -> Any:
        """Run, and move the clock."""
        global _ticks  # noqa: PLW0603 - there is one clock
        rows = len(next(iter(feed.values())))
        _ticks += self._run_ticks + rows * self._row_ticks
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
