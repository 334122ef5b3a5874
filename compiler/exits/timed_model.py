"""A model in pieces, the options and data of its compilation, and the times of its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, Profile, Spread, ValueBound
from offramp.bundle.schema.compilation import BatchEffect
from offramp.calibration.data.dataset import DataSplit
from offramp.calibration.data.scratch import ScratchSpace
from offramp.calibration.measure.estimates import BackboneTimes
from offramp.calibration.measure.profiling import (
    BATCH_SIZES,
    profile_backbone,
    profile_heads,
    profile_stages,
)
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.progress import Progress
from offramp.compiler.cuts.slicing import Cascade, Sliced
from offramp.compiler.exits.heads import build_empty
from offramp.engine.common.timing import Effort
from offramp.engine.control.costs import CostModel
from offramp.engine.stages.plan import ModelStructure, plan_stages

HeadTimes = list[list[list[float]]]
"""Times in milliseconds, as [candidates][heads of a candidate][batch sizes]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRun:
    """Options of a compilation, its data, and its progress display."""

    options: CompileOptions
    parts: DataSplit
    progress: Progress
    scratch: ScratchSpace = field(default_factory=ScratchSpace)
    batch_effect: BatchEffect | None = None
    """Share of disagreement that batches cause; it was subtracted from the promise in ``options``.
    ``None`` if batches cause none."""
    value_bounds: tuple[ValueBound, ...] = ()
    """Input values beyond which the model fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileTimer:
    """Times the parts of a model on this machine's CPU, and makes its profile."""

    source: bytes
    """Serialised graph of the unmodified model."""
    segments: Sequence[bytes]
    samples: Callable[[int], Mapping[str, NDArray[Any]]]
    """Function that returns the model's inputs for a batch size."""
    threads: int
    """Number of threads that ONNX Runtime uses for each graph."""
    batch_sizes: Sequence[int]
    progress: Progress
    quantised: bytes | None = None
    """Copy that precedes the source model in a cascade; the copy contains all segments but the
    last."""

    def backbone(self) -> BackboneTimes:
        """Time the source model and its segments."""
        with self.progress.step("Profile the segments", Effort().least) as advance:
            return profile_backbone(
                self.source,
                self.segments,
                self.samples,
                threads=self.threads,
                batch_sizes=self.batch_sizes,
                quantised=self.quantised,
                progress=advance,
            )

    def heads(
        self, graphs: Sequence[Sequence[bytes]], empty: Sequence[bytes], batch_sizes: Sequence[int]
    ) -> HeadTimes:
        """Time exits by candidate; the time of a graph that only reads is subtracted."""
        with self.progress.step("Profile the heads", len(graphs)) as advance:
            return profile_heads(
                graphs,
                empty,
                self.segments,
                self.samples,
                threads=self.threads,
                batch_sizes=batch_sizes,
                progress=advance,
            )

    def finish(
        self,
        times: BackboneTimes,
        exits_ms: Sequence[tuple[float, ...]],
        structure: ModelStructure,
        read: Callable[[str], bytes],
    ) -> Profile:
        """Time the model with all exits in use, and make the profile.

        ``exits_ms`` is [exits][batch sizes], each exit alone; ``read`` returns a file's content.
        """
        until = np.cumsum(times.segments_ms, axis=0)
        is_cascade = self.quantised is not None
        until_ms = [until[e.after_segment].tolist() for e in structure.exits if is_cascade]
        with self.progress.step("Profile the stages", Effort().least) as advance:
            stages = profile_stages(
                self.source,
                lambda used: plan_stages(
                    structure, read, [ActiveExit(exit=e, threshold=NEVER) for e in used]
                ),
                self.samples,
                exits_ms=exits_ms,
                until_ms=until_ms,
                threads=self.threads,
                batch_sizes=self.batch_sizes,
                progress=advance,
            )
        return Profile(
            device="cpu",
            threads=self.threads,
            batch_sizes=times.batch_sizes,
            source_ms=times.source_ms,
            segments_ms=times.segments_ms,
            exits_ms=tuple(exits_ms),
            stages_ms=stages.stages_ms,
            spread=Spread(
                rounds=tuple(map(min, times.rounds, stages.rounds)) if exits_ms else times.rounds,
                source=times.source_widths,
                segments=times.segment_widths,
                added=stages.added_widths,
            ),
            disturbed=times.disturbed + stages.disturbed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedModel:
    """A model in pieces with known times, so that exits can be judged by their times."""

    sliced: Sliced
    run: CompileRun
    timer: ProfileTimer
    times: BackboneTimes

    @classmethod
    def of(cls, sliced: Sliced, run: CompileRun) -> TimedModel:
        """Time a model on training samples, which are repeated to fill a batch."""
        options, train = run.options, run.parts.train
        sizes = {*BATCH_SIZES, options.choice.reference_batch_size}
        if options.choice.selection == "pame":
            sizes.add(options.choice.rehearsal_batch)
        timer = ProfileTimer(
            source=sliced.model.proto.SerializeToString(),
            segments=sliced.graphs,
            samples=lambda size: train.take(np.arange(size) % len(train)),
            threads=options.threads,
            batch_sizes=sorted(sizes),
            progress=run.progress,
            quantised=sliced.copy.proto.SerializeToString()
            if isinstance(sliced, Cascade)
            else None,
        )
        return cls(sliced=sliced, run=run, timer=timer, times=timer.backbone())

    def time_heads(
        self, graphs: Mapping[int, Sequence[bytes]], batch_sizes: Sequence[int] = ()
    ) -> HeadTimes:
        """Time exits by candidate; by default at the reference batch size only."""
        cuts, versions = self.sliced.cuts, self.sliced.versions
        empty = [build_empty(cuts[c].read, "offramp_empty/", **versions) for c in graphs]
        sizes = batch_sizes or [self.run.options.choice.reference_batch_size]
        return self.timer.heads(list(graphs.values()), empty, sizes)

    def alone(self, candidate: int, cost_ms: float) -> CostModel:
        """Return the costs with an exit as the only one, at the reference batch size."""
        column = self.times.batch_sizes.index(self.run.options.choice.reference_batch_size)
        return CostModel(
            source_ms=self.times.source_ms[column],
            segments_ms=tuple(row[column] for row in self.times.segments_ms),
            stages_ms=(0.0,),  # the same for every head, and measured once the heads are chosen
            after_segment=(candidate,),
            exits_ms=(cost_ms,),
        )
