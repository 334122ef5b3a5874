"""Figures of the report: effects of the exit policy on the certify split, and costs.

There are three kinds of figures. *Counted* figures are numbers of answers on the certify split.
*Profiled* figures are times of parts, each timed alone. *Predicted* figures combine both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import NEVER, ExitPolicy, Manifest, Profile
from offramp.bundle.records import ClassLoss, count_label_losses, count_losses
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.certify.agreement import tuning_path
from offramp.certify.decision import MODEL_END, count_answers, first_exit
from offramp.certify.path import walk
from offramp.certify.records import savings_of
from offramp.engine.control.costs import CostModel

FloatArray = NDArray[np.float64]
_MOST_POINTS = 400
"""Largest number of points of the curve of savings."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyFigures:
    """Effects of an exit policy on the certify split, and times of the model's parts."""

    manifest: Manifest
    policy: ExitPolicy
    profile: Profile
    certify: ExitRecords
    thresholds: dict[int, float]
    """Thresholds of the exits in use, by index of the exit."""
    shares: FloatArray
    """Shares of the certify split that each exit answers, and last the model's end: float64[exits +
    1]."""
    agreement: float
    """Share of the certify split for which the policy and the source model agree."""
    by_class: tuple[ClassLoss, ...]
    """Answers that the policy changes, by class of the model; the class with the largest share is
    first."""
    by_label: tuple[ClassLoss, ...]
    """Answers that the policy changes, by label; the label with the largest share is first. Empty
    if the data has no labels."""
    accuracy: float | None
    """Accuracy of the policy, against the labels of the certify split."""

    @classmethod
    def of(
        cls, manifest: Manifest, policy: ExitPolicy, profile: Profile, certify: ExitRecords
    ) -> PolicyFigures:
        """Count the effects of a policy; ValueError if records or profile have other parts."""
        exits, recorded, timed = len(manifest.exits), len(certify.confidence), len(profile.exits_ms)
        if recorded != exits or timed != exits:
            raise ValueError(
                f"the manifest has {exits} exits, the records have {recorded} and the profile has "
                f"{timed}"
            )
        segments, timed = len(manifest.segments), len(profile.segments_ms)
        if timed != segments:
            raise ValueError(f"the manifest has {segments} segments, but the profile has {timed}")
        thresholds = {a.exit: a.threshold for a in policy.active if a.threshold <= 1}
        row = np.array([thresholds.get(i, NEVER) for i in range(exits)])
        first = first_exit(certify.confidence, row)
        answers = np.concatenate([certify.prediction, certify.final_prediction[None]])
        answer = answers[first, np.arange(len(first))]
        labels, final = certify.labels, certify.final_prediction
        differs = answer != final
        return cls(
            manifest=manifest,
            policy=policy,
            profile=profile,
            certify=certify,
            thresholds=thresholds,
            shares=count_answers(first, exits) / max(len(first), 1),
            agreement=_mean(~differs),
            by_class=count_losses(manifest.answer, final, differs),
            by_label=count_label_losses(manifest.answer, labels, differs),
            accuracy=None if labels is None else _mean(answer == labels),
        )

    @property
    def active(self) -> list[int]:
        """Indices of the exits in use, in depth order."""
        return sorted(self.thresholds)

    @property
    def reference(self) -> int:
        """Batch size for which savings are predicted."""
        return self.manifest.calibration.reference_batch_size

    def cost(self, batch_size: int) -> CostModel:
        """Return the profiled costs of the parts, in milliseconds per batch."""
        return CostModel.of(self.manifest, self.profile, batch_size)

    def predicted_ms(self, batch_size: int) -> float:
        """Return the mean milliseconds per batch: profiled times weighted by the counted shares."""
        rows = self.active
        times = self.cost(batch_size).latency_ms(rows)
        return float(times @ self.shares[[*rows, MODEL_END]])

    def savings_at(self, batch_size: int) -> float:
        """Return the predicted saving at a batch size, as a share of the source model's time."""
        return 1 - self.predicted_ms(batch_size) / self.cost(batch_size).source_ms

    @property
    def predicted_savings(self) -> float:
        """Predicted saving as a share of the source model's time; the promise's if there is one."""
        if self.policy.promise is not None:
            return self.policy.promise.predicted_savings
        return self.savings_at(self.reference)

    @property
    def disagreement(self) -> float:
        """Disagreement on the certify split; from the promise, if there is one."""
        if (promise := self.policy.promise) is not None:
            return promise.certify_errors / promise.certify_samples
        return 1 - self.agreement


def savings_curve(found: PolicyFigures, exits: Sequence[int]) -> tuple[FloatArray, FloatArray]:
    """Return disagreement and predicted savings for a range of thresholds of ``exits``.

    The thresholds are fitted on the same samples that they are judged on, so the curve is
    descriptive and certifies nothing. (The thresholds in the bundle were fitted on the tuning
    split.) Both results are shares, float64[points], from conservative to aggressive.
    """
    rows = list(exits)
    confidence, agrees = found.certify.confidence[rows], found.certify.agrees[rows]
    walked = walk(tuning_path(confidence, agrees), confidence, agrees)
    cost = found.cost(found.reference)
    saved = savings_of(walked.counts, cost.latency_ms(rows), cost.source_ms)
    keep = thin(len(saved), _MOST_POINTS)
    return walked.errors[keep] / agrees.shape[1], saved[keep]


def thin(length: int, most: int) -> NDArray[np.int64]:
    """Return at most ``most`` evenly spaced indices, including the first and the last."""
    if length <= most:
        return np.arange(length)
    return np.unique(np.linspace(0, length - 1, most).round().astype(np.int64))


def _mean(hits: NDArray[np.bool_]) -> float:
    return float(hits.mean()) if hits.size else 1.0
