"""Engines built while serving, for stages that control started to use.

Until a stage has an engine, it runs as a chain of the engines of its segments. A deployment knows
the missing engines (:attr:`.Pipeline.missing`), and :class:`.BuildDecisions` decides when to build
them. The index of the bundle's engines lists all existing engines, whoever built them. ``eecompile
build`` runs as a separate process, because a server does not contain the compiler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from offramp.engine.common.compiler_process import BuildProcess
from offramp.engine.control.engine_builds import BuildBudget, BuildDecisions, BuildRequest
from offramp.engine.stages.backend_protocol import MissingEngine

_log = logging.getLogger(__name__)

LOOK_S: Final = 30.0
"""Seconds between two reads of the index of a bundle's engines: other processes may build engines.
"""


class EngineBuild(Protocol):
    """A running process that builds TensorRT engines."""

    def poll(self) -> int | None:
        """Return the exit status; ``None`` before the end."""
        ...

    def last_words(self) -> str:
        """Return the last line of its output."""
        ...

    def end(self) -> None:
        """End the build in any state, and release its resources; may be called again."""
        ...


class EngineUpgrades:
    """Builds missing engines, and detects built ones; used by one thread.

    Without a ``budget`` nothing is built, but engines built by others are detected.
    """

    def __init__(
        self,
        budget: BuildBudget | None = None,
        *,
        start: Callable[[Sequence[str]], EngineBuild] = BuildProcess,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._clock = clock
        self._decisions = None if budget is None else BuildDecisions(budget, clock())
        self._build: tuple[BuildRequest, EngineBuild, float] | None = None
        self._missing: dict[str, tuple[MissingEngine, ...]] = {}
        """Missing engines by model, at the last call of :meth:`check_missing`."""
        self._next_look_s: dict[str, float] = {}
        self._logged: set[str] = set()
        """Models for which the log already states that nothing can be built."""

    def step(self) -> None:
        """Check the running build, or start the next one if it is due; returns immediately."""
        if self._decisions is None:
            return
        now_s = self._clock()
        if self._build is not None:
            self._look_after(self._decisions, now_s)
        elif (request := self._decisions.start(now_s)) is not None:
            self._begin(self._decisions, request, now_s)

    def check_missing(self, model: str, missing: Sequence[MissingEngine]) -> bool:
        """Record the active deployment's missing engines; return whether any of them exists now."""
        now_s, unchanged = self._clock(), self._missing.get(model, ()) == tuple(missing)
        if unchanged and now_s < self._next_look_s.get(model, now_s):
            return False
        self._missing[model] = tuple(missing)
        self._next_look_s[model] = now_s + LOOK_S
        lacking = [engine for engine in missing if not engine.is_built()]
        if self._decisions is not None:
            wanted = [engine.unit for engine in lacking if self._can_be_built(model, engine)]
            self._decisions.want(model, wanted, now_s)
        return len(lacking) < len(missing)

    def close(self) -> None:
        """End the running build, if any."""
        if self._build is not None:
            self._build[1].end()
            self._build = None

    def _begin(self, decisions: BuildDecisions, request: BuildRequest, now_s: float) -> None:
        units = ", ".join(request.units)
        engine = self._missing[request.model][0]
        try:
            build = self._start(command_for(engine, request.units))
        except OSError as error:
            _log.warning("%s: no process can build engines: %s", request.model, error)
            decisions.ended(now_s, succeeded=False)
            return
        _log.info("%s: building engines while serving: %s", request.model, units)
        self._build = request, build, now_s

    def _look_after(self, decisions: BuildDecisions, now_s: float) -> None:
        assert self._build is not None
        request, build, began_s = self._build
        status, overdue = build.poll(), decisions.overdue(now_s)
        if status is None and not overdue:
            return
        why = f"ended after {now_s - began_s:.0f} s" if overdue else build.last_words()
        build.end()
        self._build = None
        decisions.ended(now_s, succeeded=status == 0)
        self._next_look_s.pop(request.model, None)
        units = ", ".join(request.units)
        if status == 0:
            _log.info("%s: built %s in %.0f s", request.model, units, now_s - began_s)
        else:
            _log.warning(
                "%s: engines could not be built while serving (%s): %s; their stages continue as "
                "chains", request.model, units, why,
            )  # fmt: skip

    def _can_be_built(self, model: str, engine: MissingEngine) -> bool:
        """Return whether a server can build an engine: int8 needs data for activation ranges."""
        if engine.precision != "int8":
            return True
        if model not in self._logged:
            self._logged.add(model)
            _log.warning(
                "%s: int8 engines need data to build: eecompile build %s --precision int8 --data "
                "NPZ --units %s", model, engine.bundle, engine.unit,
            )  # fmt: skip
        return False


def command_for(engine: MissingEngine, units: Sequence[str]) -> list[str]:
    """Return the arguments of ``eecompile`` that build ``units`` for the device of ``engine``."""
    return [
        "build", str(engine.bundle.absolute()), "--device", engine.device,
        "--precision", engine.precision, "--units", ",".join(units), "--while-serving",
    ]  # fmt: skip
