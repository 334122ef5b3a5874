"""Operating points: the cost and the worth of answering everything by a certain exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.bundle import CERTIFY
from offramp.certify import MODEL_END, leaves
from offramp.engine.scheduling.latency import Latencies


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """A stage beyond which nothing runs: what is still there is forced to leave at its exit.

    The counterpart of SuperServe's subnets (4.1): depth is the control dimension that a
    multi-exit model has.
    """

    deepest: int
    """The stage; the last is the model as it is."""
    exit: int
    """Index into ``Manifest.exits``; ``MODEL_END`` for the last."""
    agreement: float
    """Share of the answers that equal the unmodified model's, measured at calibration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoints:
    """The operating points that a model has and allows, with the time that each takes."""

    points: tuple[OperatingPoint, ...]
    """Shallowest first; the last is the model as it is."""
    latencies: Latencies

    def __post_init__(self) -> None:
        depths = [point.deepest for point in self.points]
        if not depths or depths != sorted(set(depths)):
            raise ValueError(f"operating points at stages {depths} must rise, and be some")


def operating_points(
    exits: Sequence[tuple[int, int, float]], records: Mapping[str, NDArray[Any]], *, forced: bool
) -> tuple[OperatingPoint, ...]:
    """Measure the agreement of "force the exit at depth d" on the calibration records.

    Samples that are sure enough at an earlier exit have left there, as when serving. ``exits`` are
    (stage, exit, threshold) of each stage that has an exit, and of the last, whose exit is
    ``MODEL_END``. Of a bundle's records (``confidence``, ``prediction`` [exits, samples],
    ``final_prediction`` and ``split`` [samples]) the certify split is used, which trained nothing.
    If exits may not be ``forced``, only the last point is given.
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
    """[stages]: share of the rows of each stage that went on to the next one, at calibration.

    Exits and records as of :func:`operating_points`; from stages without an exit all go on.
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
