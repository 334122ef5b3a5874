"""The layout of a slot's scratch memory while the engines of one stage run.

::

    | TensorRT's, of one engine at a time | cut tensor | the next | unread answers |

The two places for cut tensors are used in turns along a chain of engines. Unread answers are
answers of exits inside a stage, which nothing reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from offramp.engine.common.errors import BackendError
from offramp.engine.cuda.driver import aligned
from offramp.engine.tensorrt.loading import LoadedEngine


class ScratchLayout:
    """Offsets of a chain's tensors in a slot's scratch memory.

    ``wanted`` are the outputs of the last engine for which the slot has memory.
    """

    def __init__(self, engines: Sequence[LoadedEngine], wanted: set[str]) -> None:
        self._chained = _chained(engines)
        self._inner: list[dict[str, int]] = []
        """Offsets, by name, of every engine's tensors in scratch memory."""
        self.engine_bytes = aligned(max(1, *(e.scratch_bytes for e in engines)))
        """Bytes for TensorRT itself, at the beginning; never 0, so that TensorRT gets an address.
        """
        cut_bytes = max(
            (aligned(max(1, e.size_bytes[n])) for e, n in self._chained.items()), default=0
        )
        halves = (self.engine_bytes, self.engine_bytes + cut_bytes)
        self.size_bytes = after_cuts = self.engine_bytes + 2 * cut_bytes
        offsets: dict[str, int] = {}
        for number, engine in enumerate(engines):
            cut = self._chained.get(engine)
            given = {n: o for n, o in offsets.items() if n in engine.inputs}
            if cut is not None:
                offsets = {cut: halves[number % 2]}
                given |= offsets
            end = after_cuts
            for name in engine.outputs:
                if name != cut and not (engine is engines[-1] and name in wanted):
                    given[name] = end
                    end += aligned(max(1, engine.size_bytes[name]))
            self._inner.append(given)
            self.size_bytes = max(self.size_bytes, end)

    def addresses(self, base: int) -> list[dict[str, int]]:
        """Return the addresses of every engine's tensors in scratch memory at ``base``."""
        return [{name: base + at for name, at in inner.items()} for inner in self._inner]


def _chained(engines: Sequence[LoadedEngine]) -> dict[LoadedEngine, str]:
    """Return, for each engine, the output that the next engine reads."""
    found = {}
    earlier: set[str] = set()
    for engine, follower in itertools.pairwise(engines):
        shared = [name for name in engine.outputs if name in follower.inputs]
        goes_on = len(shared) == 1 and earlier.isdisjoint(follower.inputs)
        if not goes_on or engine.dtypes[shared[0]] != follower.dtypes[shared[0]]:
            raise BackendError(
                f"engine {follower.entry.unit} cannot continue from one tensor of engine "
                f"{engine.entry.unit}: build one engine for the whole stage (--parts stages)"
            )
        found[engine] = shared[0]
        earlier.update(engine.outputs)
    return found
