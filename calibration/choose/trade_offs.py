"""Trade-offs of exits and subnets: time and agreement of a model that is made faster.

A model can be made faster by exits (Apparate 3, E3 2), by subnets (SuperServe 3), or by both: every
subnet with its own exits. Here all three are evaluated with the same records and profiles, so that
they can be compared. Answers are *counted* on recorded samples; time is *predicted* from profiled
parts. Neither paper combines exits with subnets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, Bundle, ExitPolicy, Manifest, Profile
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.choose.selection import Candidates
from offramp.certify import MODEL_END, tuning_path, walk
from offramp.engine.control.costs import CostModel

TradeOffKind: TypeAlias = Literal["exits", "subnets", "both", "handing-on"]
TRADE_OFF_KINDS: Final[tuple[TradeOffKind, ...]] = ("exits", "subnets", "both", "handing-on")
"""Ways to make a model faster: the full model's exits; subnets without exits; the full model and
every subnet, each with its exits; subnets with exits that hand samples on: the last exit, which is
the subnet's answer, passes samples with too little confidence to the full model."""
BOUNDS: Final = (0.002, 0.01, 0.05)
"""Bounds on disagreement for which sets of exits are chosen."""
_CONFIDENCE_LEVEL: Final = 0.95
_LEVELS: Final = 60
"""Number of levels of a path that are evaluated."""
_ALIKE: Final = 0.99
"""Two sets of records are of the same samples if at least this share of the full model's answers is
equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """A variant of a model with thresholds and the exit where it ends; its time and quality."""

    variant: int
    """Number of the variant; 0 is the full model."""
    active: tuple[ActiveExit, ...]
    """Exits in use, in depth order; all remaining samples leave at ``deepest``, where the threshold
    is 0."""
    deepest: int
    """Exit where the variant ends; ``MODEL_END`` if it ends with the full model."""
    cost: float
    """Mean time of a sample divided by the full model's, predicted from profiled parts."""
    agreement: float
    """Share of samples that get the full model's answer, counted on records."""
    accuracy: float | None
    """Share of samples whose answer is their label, counted on records; ``None`` without labels."""
    early: float
    """Share of samples that leave before ``deepest``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedVariant:
    """A variant of a model: recorded answers to the tuning split, and times of its parts."""

    variant: int
    name: str
    tune: ExitRecords
    """Records of the tuning split; thresholds are chosen on them alone."""
    cost: CostModel
    """Costs at the batch size that time is predicted for."""
    in_use: tuple[int, ...] = ()
    """Exits in the variant's policy."""

    @classmethod
    def kept_by(cls, bundle: Bundle, batch_size: int) -> RecordedVariant:
        """Read the tuning split of a bundle, or of one of its variants (:meth:`.Bundle.variant`).

        ValueError if the batch size was not profiled.
        """
        tune, profile = ExitRecords.kept_by(bundle, TUNE), bundle.profile()
        found = cls.of(bundle.manifest, bundle.policy, profile, tune, batch_size=batch_size)
        return replace(found, variant=bundle.number)

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        policy: ExitPolicy,
        profile: Profile,
        tune: ExitRecords,
        *,
        batch_size: int | None = None,
    ) -> RecordedVariant:
        """Return the full model as a variant, from the parts of a bundle.

        ``batch_size`` is by default the one that savings are predicted at; ValueError if it was not
        profiled.
        """
        size = batch_size or manifest.calibration.reference_batch_size
        return cls(
            variant=0,
            name=manifest.subnet or "full model",
            tune=tune,
            cost=CostModel.of(manifest, profile, size),
            in_use=tuple(active.exit for active in policy.active),
        )

    @property
    def end(self) -> int:
        """Exit where the variant ends: a subnet's last exit; ``MODEL_END`` for the full model."""
        return self.cost.exits - 1 if self.variant else MODEL_END

    @property
    def own_exits(self) -> int:
        """Number of exits before the variant's end."""
        return self.cost.exits - (1 if self.variant else 0)

    def exit_sets(self) -> tuple[tuple[int, ...], ...]:
        """Return sets of exits to try: those in use, each exit alone, the best set per bound.

        The sets are chosen on the tuning split. Exits are compared with the variant's end, so an
        error that both make does not reduce the agreement.
        """
        count, tune = self.own_exits, self.tune
        sets = {tuple(e for e in self.in_use if e < count), *((e,) for e in range(count))}
        if count and len(tune.final_prediction):
            agrees = tune.agrees
            if self.variant:
                agrees = agrees | ~agrees[self.end]
            for bound in BOUNDS:
                found = Candidates(
                    tune.confidence[:count],
                    agrees[:count],
                    max_disagreement=bound,
                    confidence_level=_CONFIDENCE_LEVEL,
                )
                sets.add(found.choose(self._alone()))
        return tuple(sorted(sets))

    def judge(self, active: Sequence[ActiveExit], deepest: int, judged: ExitRecords) -> TradeOff:
        """Evaluate thresholds on some records, where all remaining samples leave at ``deepest``.

        ``deepest`` is an exit after those of ``active``, or ``MODEL_END``.
        """
        levels = np.array([[a.threshold for a in active]], np.float64).reshape(1, len(active))
        (found,) = self._judge([a.exit for a in active], levels, deepest, judged)
        return found

    def along_paths(
        self, judged: ExitRecords, *, sets: Sequence[tuple[int, ...]], deepest: int | None = None
    ) -> Iterator[TradeOff]:
        """Yield a trade-off for every level of the threshold paths of some sets of exits.

        The paths are fixed on the tuning split, and the trade-offs are counted on ``judged``. Each
        exit of a set, and the variant's end, is tried as the deepest exit. If ``deepest`` is
        passed, only that exit is tried, after all exits of the set.
        """
        for exits in sets:
            path = np.empty((1, 0))
            if exits:
                rows = list(exits)
                path = tuning_path(self.tune.confidence[rows], self.tune.agrees[rows])
                path = path[np.unique(np.linspace(0, len(path) - 1, _LEVELS).round().astype(int))]
            if deepest is not None:
                yield from self._judge(exits, path, deepest, judged)
                continue
            for depth, last in enumerate((*exits, self.end)):
                before = path[:, :depth] if depth else path[:1, :0]
                yield from self._judge(exits[:depth], before, last, judged)

    def _alone(self) -> CostModel:
        """Return the costs if the variant were the whole model."""
        cost, count = self.cost, self.own_exits
        if not self.variant:
            return cost
        return replace(
            cost,
            source_ms=cost.front_ms,
            segments_ms=cost.segments_ms[: cost.source_begins],
            stages_ms=cost.stages_ms[:count],
            after_segment=cost.after_segment[:count],
            exits_ms=cost.exits_ms[:count],
            source_begins=0,
        )

    def _judge(
        self,
        exits: Sequence[int],
        levels: NDArray[np.float64],
        deepest: int,
        judged: ExitRecords,
    ) -> Iterator[TradeOff]:
        """Yield a trade-off for each level of thresholds [levels, exits], which never rise."""
        rows, samples = [*exits, deepest], len(judged.final_prediction)
        if not samples:
            return
        whole = deepest == MODEL_END
        said = [judged.prediction[e] for e in exits]
        said.append(judged.final_prediction if whole else judged.prediction[deepest])
        confidence = [judged.confidence[e] for e in exits]
        confidence.append(np.ones(samples, np.float32))  # all remaining samples leave there
        path = np.hstack([levels, np.zeros((len(levels), 1))])
        answers, sure = np.array(said), np.array(confidence)
        walked = walk(path, sure, answers == judged.final_prediction)
        wrong = None
        if judged.labels is not None:
            wrong = walk(path, sure, answers == judged.labels).errors / samples
        times = self.cost.latency_ms(list(exits) if whole else rows)
        shares = walked.counts[:, : len(rows)] / samples
        costs = shares @ times[: len(rows)] / self.cost.source_ms
        for level, thresholds in enumerate(levels.tolist()):
            active = [
                ActiveExit(exit=e, threshold=t) for e, t in zip(exits, thresholds, strict=True)
            ]
            if not whole:
                active.append(ActiveExit(exit=deepest, threshold=0.0))
            yield TradeOff(
                variant=self.variant,
                active=tuple(active),
                deepest=deepest,
                cost=float(costs[level]),
                agreement=1 - float(walked.errors[level]) / samples,
                accuracy=None if wrong is None else 1 - float(wrong[level]),
                early=1 - float(shares[level, -1]),
            )


Judged: TypeAlias = Sequence[tuple[RecordedVariant, ExitRecords]]
"""Variants, the full model first, each with the records that its trade-offs are counted on."""


QualityMeasure: TypeAlias = Callable[[TradeOff], float]
"""Quality of a trade-off's answers; more is better."""


def same_samples(judged: Judged) -> bool:
    """Return whether all records are of the same samples, by the full model's answers to them.

    Different rounding may change a few of these answers, so they need not all be equal.
    """
    (_, first), *others = judged
    said = first.final_prediction
    return all(
        len(records.final_prediction) == len(said)
        and float((records.final_prediction == said).mean()) >= _ALIKE
        for _, records in others
    )


def trade_offs(judged: Judged, way: TradeOffKind) -> list[TradeOff]:
    """Evaluate all trade-offs of one kind; every kind includes the unmodified full model.

    ValueError if the full model is not the first.
    """
    (full, of_full), *_ = judged
    if full.variant:
        raise ValueError(
            f"the first records are of variant {full.variant}, expected the full model, variant 0"
        )
    found = [full.judge((), MODEL_END, of_full)] if len(of_full.final_prediction) else []
    for variant, records in judged:
        if way == "exits" and variant.variant:
            continue
        if way == "subnets":
            found += variant.along_paths(records, sets=[()])
        elif way == "handing-on" and variant.variant:
            with_own = [(*exits, variant.end) for exits in variant.exit_sets()]
            found += variant.along_paths(records, sets=with_own, deepest=MODEL_END)
        elif way != "handing-on":
            found += variant.along_paths(records, sets=variant.exit_sets())
    return found


def agreement_quality(point: TradeOff) -> float:
    """Return the quality of a trade-off's answers as agreement."""
    return point.agreement


def accuracy_quality(point: TradeOff) -> float:
    """Return a trade-off's quality as accuracy, or as agreement if there are no labels."""
    return point.agreement if point.accuracy is None else point.accuracy


def front_of(
    points: Iterable[TradeOff], worth: QualityMeasure = agreement_quality
) -> tuple[TradeOff, ...]:
    """Return the points that no other point dominates, by rising cost and rising ``worth``."""
    front: list[TradeOff] = []
    for point in sorted(points, key=lambda p: (p.cost, -worth(p), p.variant, len(p.active))):
        if not front or worth(point) > worth(front[-1]):
            front.append(point)
    return tuple(front)


def cheapest_at(
    points: Iterable[TradeOff], level: float, worth: QualityMeasure = agreement_quality
) -> TradeOff | None:
    """Return the cheapest point with ``worth`` of at least ``level``; ``None`` if none has it."""
    reaching = (p for p in points if worth(p) >= level - 1e-12)
    return min(reaching, key=lambda p: (p.cost, -worth(p)), default=None)


def kept_variants(
    bundle: Bundle, batch_size: int | None = None
) -> list[tuple[RecordedVariant, ExitRecords]]:
    """Read a bundle's variants, the full model first, each with its records of the certify split.

    The default batch size is the one that the bundle's savings are predicted at.
    """
    size = batch_size or bundle.manifest.calibration.reference_batch_size
    return [
        (RecordedVariant.kept_by(shown, size), ExitRecords.kept_by(shown, CERTIFY))
        for shown in bundle.variants()
    ]
