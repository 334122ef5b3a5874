"""Choosing an exit policy from recorded answers and profiled times, and certifying it.

The tuning split alone fixes the exits in use, and a list of thresholds from conservative to
aggressive, the path. Then the certify split determines how far along the path the promise holds.
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
    """Compute the answers of every exit for a data set, with the graphs that will be served.

    With several batch sizes, the worst result of each sample counts
    (:meth:`.ExitRecords.worst_of`).
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
    """Exit policies to be tested on the certify split, which does not influence them."""

    active: tuple[int, ...]
    """Indices of the exits in use."""
    thresholds: NDArray[np.float64]
    """Thresholds [levels, active exits]; levels are from conservative to aggressive."""

    @classmethod
    def of(cls, tune: ExitRecords, active: Sequence[int]) -> FixedPath:
        """Compute the thresholds of a path for some exits from the tuning split."""
        rows, path = list(active), np.empty((0, 0))
        if rows:
            path = tuning_path(tune.confidence[rows], tune.agrees[rows])
        return FixedPath(active=tuple(rows), thresholds=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedPath(FixedPath):
    """Policies with the exits that a rehearsal chose."""

    rehearsal: Rehearsal
    moves: tuple[ExitMove, ...] = ()
    """Exits that made too many batches late, with the later candidates that replaced them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """Choice of an exit policy: the available exits, their times, and the promise to be made."""

    structure: ModelStructure
    profile: Profile
    max_disagreement: float
    confidence_level: float
    """Confidence level of the promise."""
    batch_size: int
    """Batch size for which savings are predicted."""
    max_class_disagreement: float | None = None
    """Bound on the disagreement in each class of the model, for classes with enough samples."""
    seed: int = 0
    """Seed of the random batches in rehearsals."""

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
        """Create the choice for the exits of a bundle, with the profile in the bundle."""
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
        """Return the costs of all exits at a batch size that was profiled."""
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
        """Times of stages, which rehearsals use."""
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
        """Choose the exits that together are expected to save the most time.

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
        """Return the sets of exits to choose from, with the answers on the tuning split."""
        return Candidates(
            tune.confidence,
            tune.agrees,
            max_disagreement=self.max_disagreement,
            confidence_level=self.confidence_level,
            strata=self.strata(tune),
        )

    def strata(self, records: ExitRecords) -> tuple[Stratum, ...]:
        """Return the classes that have a separate bound, with their samples in a split."""
        return class_strata(
            self.structure.answer,
            records.final_prediction,
            max_disagreement=self.max_class_disagreement,
            confidence_level=level_of_each(
                self.confidence_level, copies=records.copies is not None
            ),
        )

    def by_rehearsal(self, tune: ExitRecords, settings: RehearsalSettings) -> RehearsedPath:
        """Choose the exits by rehearsing batches, so that few batches become late (PAME)."""
        rehearsal = rehearse_records(
            tune, self.times, settings, confidence_level=self.confidence_level, seed=self.seed
        )
        path = FixedPath.of(tune, [a.exit for a in rehearsal.active])
        return RehearsedPath(active=path.active, thresholds=path.thresholds, rehearsal=rehearsal)

    def certify(self, path: FixedPath, certify: ExitRecords) -> ExitPolicy:
        """Find the most aggressive thresholds of the path with which the promise holds."""
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
        """Return the requested properties of the policy, for messages."""
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

        The bundle must have at least one exit. A path without exits comes from :meth:`by_savings`.
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
        """Predict the times of batches with a policy, under the recorded load."""
        return forecast_policy(policy, certify, self.times, settings, seed=self.seed)
