"""Operating points: a variant and the deepest exit for its samples, with latency and agreement."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.records import CERTIFY
from offramp.certify import MODEL_END, leaves
from offramp.engine.scheduling.latency import Latencies


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """A variant of the model, and its deepest stage.

    Samples that reach the stage are forced to leave at its exit. Variants are SuperServe's subnets
    (4.1); depth is the additional control dimension of a multi-exit model.
    """

    deepest: int
    """Deepest stage that runs; the last stage if the variant is unrestricted."""
    exit: int
    """Exit of the deepest stage: an index into ``Manifest.exits``; ``MODEL_END`` for the last
    stage."""
    agreement: float
    """Share of the answers that equal the unmodified model's, measured at calibration."""
    variant: int = 0
    """Variant; 0 is the full model, to which the promise applies. The promise covers answers of
    another variant only if the variant's exits are certified for it."""

    @property
    def worth(self) -> float:
        """Agreement; infinite for the full model that runs to its end."""
        return math.inf if self.variant == 0 and self.exit == MODEL_END else self.agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoints:
    """The operating points that a model has and allows, with their latencies."""

    points: tuple[OperatingPoint, ...]
    """Points in Pareto order (:func:`pareto_front`); the last is the unrestricted model."""
    latencies: Latencies

    def __post_init__(self) -> None:
        places = [(point.variant, point.deepest) for point in self.points]
        if not places or len(set(places)) < len(places):
            raise ValueError(
                f"operating points (variant, stage) are {places}, expected at least one, and all "
                "different"
            )
        front = pareto_front(self.points, self.latencies)
        if self.points != front:
            expected = [(point.variant, point.deepest) for point in front]
            raise ValueError(
                f"operating points (variant, stage) {places} are not in Pareto order, by latency "
                f"and agreement; expected {expected}"
            )


def pareto_front(
    points: Iterable[OperatingPoint], latencies: Latencies
) -> tuple[OperatingPoint, ...]:
    """Return the points that no other point dominates, fastest first (SuperServe 4.1, fig. 6a).

    A point dominates another if it takes no longer, as profiled for the largest batch, and agrees
    at least as often; of equal points, the point with the lower variant and stage is kept. Points
    of the full model never dominate each other: a deeper point forces fewer answers, so the promise
    covers more of them.
    """

    def seconds(point: OperatingPoint) -> float:
        return latencies.until_s(point.deepest, point.variant)[-1]

    def rank(point: OperatingPoint) -> tuple[float, ...]:
        return seconds(point), -point.worth, point.variant, point.deepest

    front: list[OperatingPoint] = []
    for point in sorted(points, key=rank):
        if not any(p.worth >= point.worth and (p.variant or point.variant) for p in front):
            front.append(point)
    return tuple(sorted(front, key=lambda point: (seconds(point), point.deepest)))


def operating_points(
    exits: Sequence[tuple[int, int, float]], records: Mapping[str, NDArray[Any]], *, forced: bool
) -> tuple[OperatingPoint, ...]:
    """Measure how often the full model agrees if all samples must leave at a stage, on its records.

    Samples that reach the threshold of an earlier exit have left there, as in serving. ``exits``
    are (stage, exit, threshold) of each stage that has an exit, and of the last, whose exit is
    ``MODEL_END``. ``records`` are the bundle's arrays (``confidence``, ``prediction`` [exits,
    samples], ``final_prediction`` and ``split`` [samples]); their certify split is used, because
    nothing was trained on it. If exits may not be ``forced``, only the last point is returned.
    """
    chosen = records["split"] == CERTIFY
    final = records["final_prediction"][chosen]
    answered = np.zeros(len(final), np.bool_)
    agreed = np.zeros(len(final), np.bool_)
    points = []
    for stage, exit_index, threshold in exits:
        if exit_index == MODEL_END:
            agrees = np.ones(len(final), np.bool_)
            leaving = agrees
        else:
            agrees = records["prediction"][exit_index][chosen] == final
            leaving = leaves(records["confidence"][exit_index][chosen], np.float32(threshold))
        forced_agreement = np.where(answered, agreed, agrees).mean() if len(final) else 0.0
        points.append(
            OperatingPoint(deepest=stage, exit=exit_index, agreement=float(forced_agreement))
        )
        newly = leaving & ~answered
        agreed[newly] = agrees[newly]
        answered |= newly
    return tuple(points) if forced else tuple(points[-1:])


def going_on(
    exits: Sequence[tuple[int, int, float]], records: Mapping[str, NDArray[Any]], stages: int
) -> list[float]:
    """Return the share of each stage's rows that went on at calibration: [stages].

    Arguments are as in :func:`operating_points`; all rows of a stage without an exit go on.
    """
    chosen = records["split"] == CERTIFY
    staying = np.ones(int(chosen.sum()), np.bool_)
    shares = [1.0] * stages
    for stage, exit_index, threshold in exits:
        if exit_index != MODEL_END and staying.any():
            unsure = ~leaves(records["confidence"][exit_index][chosen], np.float32(threshold))
            shares[stage] = float(unsure[staying].mean())
            staying &= unsure
    return shares
