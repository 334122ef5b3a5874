"""Choosing an exit policy from recorded answers and profiled times, and certifying it.

The exits in use and the path of their thresholds are fixed by the tuning split alone; then the
certify split determines how far along the path the promise holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Bundle, ExitPolicy, Profile
from offramp.bundle.records import class_strata
from offramp.bundle.schema.parts import last_beginning
from offramp.calibration.choose import limits
from offramp.calibration.choose.exit_records import ExitRecords, record_answers, worst_of
from offramp.calibration.choose.selection import Candidates, certified_policy
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import BATCH_SIZE
from offramp.calibration.rehearsal import (
    ExitMove,
    Forecast,
    Rehearsal,
    RehearsalSettings,
    forecast_policy,
    rehearse_records,
)
from offramp.calibration.rehearsal.two_stage import StageTimes
from offramp.certify import Stratum
from offramp.certify.agreement import tuning_path
from offramp.certify.learn_then_test import level_of_each
from offramp.compiler.common.progress import Progress
from offramp.engine.common.environment import available_cores
from offramp.engine.control.costs import CostModel
from offramp.engine.stages.answering_graphs import answering_graphs
from offramp.engine.stages.plan import ModelStructure


def record_exits(
    structure: ModelStructure,
    read: Callable[[str], bytes],
    dataset: Dataset,
    title: str,
    progress: Progress,
    *,
    batch_sizes: Sequence[int] = (BATCH_SIZE,),
) -> ExitRecords:
    """Answer a data set at every exit, with the graphs that will be served.

    With several batch sizes, each sample's worst result counts (:meth:`.ExitRecords.worst_of`).
    """
    outputs = [(e.output, e.confidence) for e in structure.exits]
    graphs = answering_graphs(structure, read)
    with progress.step(title, len(batch_sizes) * len(dataset)) as advance:
        return worst_of(
            [
                record_answers(
                    graphs,
                    outputs,
                    structure.answer,
                    dataset,
                    threads=available_cores(),
                    batch_size=size,
                    progress=advance,
                )
                for size in batch_sizes
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPath:
    """Exit policies to be tested on the certify split, fixed without it."""

    active: tuple[int, ...]
    """Exits in use."""
    thresholds: NDArray[np.float64]
    """Thresholds [levels, active], from conservative to aggressive."""

    @classmethod
    def of(cls, tune: ExitRecords, active: Sequence[int]) -> FixedPath:
        """Create the common path of some exits from the tuning split."""
        rows, path = list(active), np.empty((0, 0))
        if rows:
            path = tuning_path(tune.confidence[rows], tune.agrees[rows])
        return FixedPath(active=tuple(rows), thresholds=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPath(FixedPath):
    """Policies of exits that a rehearsal chose."""

    rehearsal: Rehearsal
    moves: tuple[ExitMove, ...] = ()
    """Moves of exits that made too many batches late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """Choice of an exit policy: the exits, their times, and the promise to be made."""

    structure: ModelStructure
    profile: Profile
    max_disagreement: float
    confidence_level: float
    """Confidence level of the promise."""
    batch_size: int
    """Batch size that savings are predicted at."""
    max_class_disagreement: float | None = None
    """Bound on each class of the model separately, if its samples suffice."""
    seed: int = 0
    """Seed of rehearsals."""

    @classmethod
    def again(
        cls,
        bundle: Bundle,
        *,
        max_disagreement: float,
        confidence_level: float,
        max_class_disagreement: float | None = None,
        seed: int = 0,
    ) -> PolicyChoice:
        """Create the choice among the exits of a bundle, with its own profile."""
        return cls(
            structure=bundle.manifest,
            profile=bundle.profile(),
            max_disagreement=max_disagreement,
            confidence_level=confidence_level,
            batch_size=bundle.manifest.calibration.reference_batch_size,
            max_class_disagreement=max_class_disagreement,
            seed=seed,
        )

    def cost(self, batch_size: int) -> CostModel:
        """Return costs of all exits at a batch size that was profiled."""
        column = self.profile.column(batch_size)
        exits_ms = [row[column] for row in self.profile.exits_ms]
        times = self.times
        return CostModel.at(
            self.profile,
            batch_size,
            times.after_segment,
            exits_ms,
            source_begins=times.source_begins,
        )

    @property
    def times(self) -> StageTimes:
        """Times of stages, for rehearsals."""
        after = tuple(e.after_segment for e in self.structure.exits)
        begins = last_beginning(self.structure.segments)
        return StageTimes(profile=self.profile, after_segment=after, source_begins=begins)

    def by_savings(
        self,
        tune: ExitRecords,
        max_overhead: float | None = None,
        *,
        candidates: Candidates | None = None,
    ) -> FixedPath:
        """Choose the exits that are expected to save most time together.

        ``candidates`` are the sets of exits on ``tune``, if they were computed already.
        """
        found = candidates or self.candidates(tune)
        if self.structure.answer.criterion.depends_on_earlier:  # then all built exits are needed
            active = tuple(range(found.exits))
            worth = found.savings(active, self.cost(self.batch_size)) > 0
            return FixedPath.of(tune, active if worth else ())
        active = found.choose(self.cost(self.batch_size), max_overhead=max_overhead)
        return FixedPath.of(tune, active)

    def candidates(self, tune: ExitRecords) -> Candidates:
        """Return the sets of exits that may be in use, on the tuning split."""
        return Candidates(
            tune.confidence,
            tune.agrees,
            max_disagreement=self.max_disagreement,
            confidence_level=self.confidence_level,
            strata=self.strata(tune),
        )

    def strata(self, records: ExitRecords) -> tuple[Stratum, ...]:
        """Return the classes of a split that have a separate bound."""
        return class_strata(
            self.structure.answer,
            records.final_prediction,
            max_disagreement=self.max_class_disagreement,
            confidence_level=level_of_each(
                self.confidence_level, copies=records.copies is not None
            ),
        )

    def by_rehearsal(self, tune: ExitRecords, settings: RehearsalSettings) -> RehearsedPath:
        """Choose the exits by rehearsing batches, so that batches do not become late (PAME)."""
        rehearsal = rehearse_records(
            tune, self.times, settings, confidence_level=self.confidence_level, seed=self.seed
        )
        path = FixedPath.of(tune, [a.exit for a in rehearsal.active])
        return RehearsedPath(active=path.active, thresholds=path.thresholds, rehearsal=rehearsal)

    def certify(self, path: FixedPath, certify: ExitRecords) -> ExitPolicy:
        """Find how far along the path the promise holds."""
        return certified_policy(
            path.active,
            path.thresholds,
            certify.confidence,
            certify.agrees,
            self.cost(self.batch_size),
            max_disagreement=self.max_disagreement,
            confidence_level=self.confidence_level,
            whole=self.structure.answer.criterion.depends_on_earlier,
            copies=certify.copies,
            strata=self.strata(certify),
            max_class_disagreement=self.max_class_disagreement,
        )

    def terms(self, max_overhead: float | None) -> limits.PolicyTerms:
        """Return the requested terms of the policy, for messages."""
        return limits.PolicyTerms(
            max_disagreement=self.max_disagreement,
            confidence_level=self.confidence_level,
            max_overhead=max_overhead,
            batch_size=self.batch_size,
        )

    def limit(
        self,
        path: FixedPath,
        tune: ExitRecords,
        certify: ExitRecords,
        max_overhead: float | None = None,
    ) -> str:
        """Return the reason why :meth:`certify` put no exit into use.

        The bundle has at least one exit. If the path has none, :meth:`by_savings` chose none.
        """
        asked = self.terms(max_overhead)
        tested = asked.tested(copies=certify.copies is not None)
        if few := limits.limit_of_samples(len(certify.final_prediction), tested):
            return few
        if not path.active:
            costs = {size: self.cost(size) for size in self.profile.batch_sizes}
            return limits.limit_of_choice(tune, costs, asked, self.strata(tune))
        return limits.limit_of_certificate(
            path.active, path.thresholds, certify, asked, self.strata(certify)
        )

    def forecast(
        self, policy: ExitPolicy, certify: ExitRecords, settings: RehearsalSettings
    ) -> Forecast:
        """Predict a policy's effect on batches of the recorded load."""
        return forecast_policy(policy, certify, self.times, settings, seed=self.seed)
