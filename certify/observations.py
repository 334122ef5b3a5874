"""Observations: what serving shows of samples, which tests and controllers take as evidence.

Arrays over samples, in the order in which the samples were started, so that whether and when a
sample runs on does not decide when it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.certify.decision import MODEL_END, BoolArray, Float32Array, FloatArray, IntArray

UNKNOWN = -1
"""In place of a prediction that nobody made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observations:
    """What is known of n served samples at all K exits of a bundle, whether in use or not."""

    confidence: Float32Array
    """float32[K, n] in [0, 1]; NaN where the sample did not pass the exit, or it was not in use."""
    prediction: NDArray[np.int32]
    """int32[K, n]: the code of the exit's answer; :data:`UNKNOWN` where ``confidence`` is NaN, or
    where only the model's end, which was not heard, could tell."""
    answered_at: IntArray
    """int64[n]: the exit that answered; :data:`MODEL_END` if none did."""
    final: NDArray[np.int32]
    """int32[n]: the source model's answer; :data:`UNKNOWN` where the sample left for good."""
    audit_probability: FloatArray
    """float64[n], in (0, 1]: with which probability, drawn before the sample was started, it was
    to run to the end had it left early. 1 is release mode. Samples that nothing answered early
    run to the end anyway."""
    policy_version: IntArray
    """int64[n]: the policy that the sample was started under, and held to."""
    forced: BoolArray
    """bool[n]: answered below the exit's threshold, to be in time; outside any promise."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            is_per_exit = name in ("confidence", "prediction")
            expected = self.confidence.shape if is_per_exit else self.confidence.shape[1:]
            if (shape := getattr(self, name).shape) != expected:
                raise ValueError(f"{name} has shape {shape}, expected {expected}")

    def __len__(self) -> int:
        return len(self.answered_at)

    @property
    def exits(self) -> int:
        """K."""
        return int(self.confidence.shape[0])

    @property
    def early(self) -> BoolArray:
        """bool[n]: answered by an exit."""
        return np.asarray(self.answered_at != MODEL_END)

    @property
    def complete(self) -> BoolArray:
        """bool[n]: ran to the end, so that every exit's answer can be judged."""
        return np.asarray(self.final != UNKNOWN)

    @property
    def weight(self) -> FloatArray:
        """float64[n]: inverse propensity; the mean of ``weight · x`` is that of x over all.

        1/q for an audited sample, 1 for what ran to the end anyway, 0 for what left for good.
        """
        weight = np.where(self.early, 1.0 / self.audit_probability, 1.0)
        return np.where(self.complete, weight, 0.0)

    @property
    def loss(self) -> FloatArray:
        """float64[n]: the weight of what was answered unlike the source model, as far as known.

        Else 0; the mean is the disagreement, without bias.
        """
        early = np.flatnonzero(self.early & self.complete)
        loss = np.zeros(len(self))
        wrong = self.prediction[self.answered_at[early], early] != self.final[early]
        loss[early] = wrong / self.audit_probability[early]
        return loss

    def agrees(self) -> BoolArray:
        """bool[K, n]: the exit's answer is the source model's; false where either is unknown."""
        return np.asarray((self.prediction == self.final) & self.complete)

    def take(self, rows: NDArray[Any] | slice) -> Observations:
        """Some of the samples."""
        return Observations(**{f.name: getattr(self, f.name)[..., rows] for f in fields(self)})
