"""The stages that are open in a slot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from offramp.engine.cuda.executable import SlotResources
from offramp.engine.cuda.runs import OpenStage, StageRuns
from offramp.engine.cuda.stages import StageFacts, StageRegistry


@dataclass(slots=True, kw_only=True)
class OpenStages:
    """What runs stages in one slot, and how; used by the slot's thread."""

    registry: StageRegistry
    runs: StageRuns
    graphs: bool
    """Whether stages are captured into CUDA graphs."""
    resources: Callable[[], SlotResources]
    """What executables get."""
    _open: dict[int, OpenStage] = field(default_factory=dict)
    _drops: int = 0
    """Handles that were gone when this slot looked last."""

    def of(self, facts: StageFacts) -> OpenStage:
        """What runs a stage here; the first time it is made.

        Raises:
            BackendError: It cannot be made.
        """
        stage = self._open.get(facts.number)
        if stage is None:
            self._reserve_scratch(facts)
            executable = self.registry.open(facts, self.resources())
            graphs = self.graphs and facts.prepared.capturable
            stage = OpenStage(facts=facts, executable=executable, graphs=graphs)
            self._open[facts.number] = stage
        return stage

    def has_dropped(self) -> bool:
        """Whether stages are gone since :meth:`close_dropped` was called last."""
        return self.registry.drops != self._drops

    def close_dropped(self) -> None:
        """Let go of what nobody can run any more; the host has waited for all work."""
        self._drops = self.registry.drops
        for stage in [s for s in self._open.values() if self.registry.is_dropped(s.facts)]:
            self.runs.forget(stage)
            del self._open[stage.facts.number]
            self.registry.close(stage.facts, stage.executable)
        self.registry.sweep()

    def close(self) -> None:
        """Close all, whatever goes wrong on the way; the host has waited for all work."""
        stages, self._open = list(self._open.values()), {}
        with ExitStack() as releases:
            for stage in stages:
                releases.callback(self.registry.close, stage.facts, stage.executable)
            releases.callback(self.runs.clear)

    def _reserve_scratch(self, facts: StageFacts) -> None:
        """Executables keep its address for life: if it moves, all of them go, and come back."""
        scratch = self.runs.arena.scratch
        if facts.prepared.scratch_bytes > scratch.size_bytes:
            self.runs.arena.settle()
            self.close()
            self.runs.arena.grow(scratch, self.registry.needs().scratch_bytes)
