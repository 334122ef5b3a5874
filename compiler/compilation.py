"""The steps of a compilation that need data, between slicing and packing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ActiveExit, ExitPolicy, Measured, Profile, Spread
from offramp.calibration.dataset import Dataset, Parts
from offramp.calibration.estimates import BackboneTimes, StageCosts
from offramp.calibration.limits import (
    Asked,
    Limit,
    limit_of_certificate,
    limit_of_choice,
    limit_of_heads,
    limit_of_rehearsal,
)
from offramp.calibration.measuring import (
    MEASURED_BATCH_SIZES,
    measure_policy,
    stages_of_samples,
)
from offramp.calibration.profiling import (
    BATCH_SIZES,
    profile_backbone,
    profile_stages,
)
from offramp.calibration.records import ExitRecords, record_answers
from offramp.calibration.rehearsal import (
    Rehearsal,
    RehearsalSettings,
    Rehearsed,
    forecast_policy,
    rehearse_records,
)
from offramp.calibration.selection import (
    certified_policy,
    choose_active,
)
from offramp.certify import tuning_path
from offramp.compiler.exits import ExitTrials, Samples, Workbench, exit_prefix
from offramp.compiler.head_search import FoundExits, find_exits
from offramp.compiler.heads import CONFIDENCE
from offramp.compiler.options import CompileOptions
from offramp.compiler.progress import Progress
from offramp.compiler.slicing import Sliced
from offramp.engine.assembly import assemble
from offramp.engine.control.costs import CostModel
from offramp.engine.control.published.two_stage import StageTimes
from offramp.engine.options import available_cores
from offramp.engine.plan import Mode, ModelStructure, Plan, plan_stages
from offramp.engine.timing import Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPath:
    """The policies that the certify split will be asked about; fixed without it."""

    active: tuple[int, ...]
    """Exits in use."""
    thresholds: NDArray[np.float64]
    """[levels, active], from cautious to bold."""
    cost: CostModel
    """Of all exits, at the reference batch size."""
    rehearsal: Rehearsal | None = None
    """By which the exits were chosen, if they were chosen so."""


@dataclass(frozen=True, slots=True)
class Compilation:
    """A sliced model, its data, and what the user asked for."""

    sliced: Sliced
    parts: Parts
    options: CompileOptions
    progress: Progress

    @property
    def batch_sizes(self) -> list[int]:
        """That are profiled."""
        sizes = {*BATCH_SIZES, self.options.reference_batch_size}
        if self.options.selection == "pame":
            sizes.add(self.options.rehearsal_batch)
        return sorted(sizes)

    def measure_times(self) -> BackboneTimes:
        """Profile the source model and its segments."""
        with self.progress.step("Profile the segments", Effort().least) as advance:
            return profile_backbone(
                self.sliced.model.proto.SerializeToString(),
                self.sliced.graphs,
                self._sampler(),
                threads=self.options.threads,
                batch_sizes=self.batch_sizes,
                progress=advance,
            )

    def find_exits(self, times: BackboneTimes) -> FoundExits:
        """Train heads; gives the exits worth building."""
        return find_exits(
            self.sliced,
            self.parts,
            self.options,
            times,
            workbench=self._workbench(),
            progress=self.progress,
        )

    def profile(
        self,
        exits: Sequence[ExitTrials],
        times: BackboneTimes,
        structure: ModelStructure,
        files: Mapping[str, bytes],
    ) -> Profile:
        """Time the chosen exits too, and all of them at work together."""
        exits_ms = self._workbench().time_exits(exits, times.batch_sizes)
        with self.progress.step("Profile the stages", Effort().least) as advance:
            stages = profile_stages(
                self.sliced.model.proto.SerializeToString(),
                lambda used: plan_stages(structure, files.__getitem__, _at_never(used)),
                self._sampler(),
                exits_ms=exits_ms,
                threads=self.options.threads,
                batch_sizes=times.batch_sizes,
                progress=advance,
            )
        return profile_of(times, exits_ms, stages, threads=self.options.threads)

    def record_answers(
        self, title: str, exits: Sequence[ExitTrials], dataset: Dataset
    ) -> ExitRecords:
        """Answer a data set at every exit, with the graphs that will be served."""
        answer = self.sliced.model.answer
        prefixes = [exit_prefix(e.candidate) for e in exits]
        outputs = [(p + answer.output, p + CONFIDENCE) for p in prefixes]
        parts = [*self.sliced.graphs, *(e.graph for e in exits)]
        graph = assemble(parts, [*itertools.chain(*outputs), answer.output])
        with self.progress.step(title, len(dataset)) as advance:
            return record_answers(
                graph, outputs, answer, dataset, threads=available_cores(), progress=advance
            )

    def fix_path(
        self, exits: Sequence[ExitTrials], tune: ExitRecords, profile: Profile
    ) -> FixedPath:
        """Choose active exits and the path of their thresholds, by the tuning split alone."""
        cost = _cost_models(exits, profile)[self.options.reference_batch_size]
        rehearsal = None
        if self.options.selection == "pame" and exits:
            rehearsal = self._rehearse(exits, tune, profile)
            active = tuple(a.exit for a in rehearsal.active)
        else:
            active = choose_active(
                tune.confidence,
                tune.agrees,
                cost,
                max_disagreement=self.options.max_disagreement,
                confidence_level=self.options.confidence,
                max_overhead=self.options.max_overhead,
            )
        rows = list(active)
        thresholds = np.empty((0, 0))
        if rows:
            thresholds = tuning_path(tune.confidence[rows], tune.agrees[rows])
        return FixedPath(active=active, thresholds=thresholds, cost=cost, rehearsal=rehearsal)

    def certify(self, path: FixedPath, certify: ExitRecords) -> ExitPolicy:
        """Find how far along the path the promise holds."""
        return certified_policy(
            path.active,
            path.thresholds,
            certify.confidence,
            certify.agrees,
            path.cost,
            max_disagreement=self.options.max_disagreement,
            confidence_level=self.options.confidence,
        )

    def measure(
        self,
        policy: ExitPolicy,
        certify: ExitRecords,
        structure: ModelStructure,
        files: Mapping[str, bytes],
    ) -> Measured | None:
        """Measure what the policy brings on the certify split; ``None`` if no exit is in use."""
        if not policy.active:
            return None
        stages = plan_stages(structure, files.__getitem__, policy.active)
        with self.progress.step("Measure the policy", len(MEASURED_BATCH_SIZES)) as advance:
            return measure_policy(
                self.sliced.model.proto.SerializeToString(),
                Plan(stages=stages, policy_version=policy.version, mode=Mode.LEAVE),
                self.parts.certify,
                stages_of_samples(policy, certify),
                answer=self.sliced.model.answer,
                threads=self.options.threads,
                progress=advance,
            )

    def limit(
        self,
        found: FoundExits,
        path: FixedPath,
        *,
        profile: Profile,
        tune: ExitRecords,
        certify: ExitRecords,
    ) -> Limit:
        """Find what kept all exits out of use, where no policy was certified."""
        options = self.options
        asked = Asked(
            max_disagreement=options.max_disagreement,
            confidence=options.confidence,
            max_overhead=options.max_overhead,
            batch_size=options.reference_batch_size,
        )
        if not found.exits:
            column = profile.column(asked.batch_size)
            return limit_of_heads(found.best, profile.source_ms[column], asked)
        if not path.active and options.selection == "pame":
            return limit_of_rehearsal(options.max_violations)
        if not path.active:
            return limit_of_choice(tune, _cost_models(found.exits, profile), asked)
        return limit_of_certificate(path.active, path.thresholds, certify, asked)

    def forecast(
        self, path: FixedPath, policy: ExitPolicy, certify: ExitRecords, profile: Profile
    ) -> Rehearsed | None:
        """Predict what the certified policy brings, if its exits were chosen by a rehearsal."""
        if path.rehearsal is None:
            return None
        times = StageTimes(profile=profile, after_segment=path.cost.after_segment)
        return Rehearsed(
            rehearsal=path.rehearsal,
            shipped=forecast_policy(
                policy, certify, times, path.rehearsal.settings, seed=self.options.seed
            ),
            data_sha256=self.parts.train.sha256,
        )

    def _rehearse(
        self, exits: Sequence[ExitTrials], tune: ExitRecords, profile: Profile
    ) -> Rehearsal:
        options = self.options
        settings = RehearsalSettings(
            batch_size=options.rehearsal_batch,
            max_disagreement=options.max_disagreement,
            max_violations=options.max_violations,
        )
        times = StageTimes(profile=profile, after_segment=tuple(e.candidate for e in exits))
        return rehearse_records(
            tune, times, settings, confidence_level=options.confidence, seed=options.seed
        )

    def _workbench(self) -> Workbench:
        return Workbench(sliced=self.sliced, samples=self._sampler(), threads=self.options.threads)

    def _sampler(self) -> Samples:
        """Give batches of any size from the training part, repeating it if it is too short."""
        train = self.parts.train
        return lambda size: train.take(np.arange(size) % len(train))


def profile_of(
    times: BackboneTimes,
    exits_ms: Sequence[tuple[float, ...]],
    stages: StageCosts,
    *,
    threads: int,
) -> Profile:
    """Put a CPU's profile together."""
    return Profile(
        device="cpu",
        threads=threads,
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


def _at_never(exits: Sequence[int]) -> list[ActiveExit]:
    return [ActiveExit(exit=index, threshold=NEVER) for index in exits]


def _cost_models(exits: Sequence[ExitTrials], profile: Profile) -> dict[int, CostModel]:
    """By profiled batch size."""
    after = [e.candidate for e in exits]
    return {
        size: CostModel.at(profile, size, after, [row[column] for row in profile.exits_ms])
        for column, size in enumerate(profile.batch_sizes)
    }
