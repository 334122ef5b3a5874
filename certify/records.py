"""Recorded answers of all exits on a set of samples, and the outcome of thresholds on them.

Every sample ran through the whole model and past every exit, so any thresholds can be tried
without running the model again (Apparate 3.2, "Evaluating threshold configurations").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from offramp.certify import decision
from offramp.certify.decision import BoolArray, ConfidenceArray, Float32Array, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """Confidence and agreement of all exits on some samples, and the latency of each exit."""

    confidence: Float32Array
    """float32[exits, samples], in [0, 1]; higher is more certain."""
    agrees: BoolArray
    """bool[exits, samples]: the exit's prediction equals the source model's."""
    latency_ms: FloatArray
    """float64[exits + 1]: time until exit i has answered, including every active ramp up to it.
    The last is the model's end, including all ramps (Apparate 3.2, 3.3)."""

    def __post_init__(self) -> None:
        check_confidence(self.confidence, self.agrees)
        check_latency(self.latency_ms, exits=self.confidence.shape[0])

    @classmethod
    def of(cls, confidence: ArrayLike, agrees: ArrayLike, latency_ms: ArrayLike) -> Records:
        """Convert arrays of any real dtype; confidence is rounded to float32, as in serving."""
        return cls(
            confidence=np.ascontiguousarray(confidence, dtype=np.float32),
            agrees=np.ascontiguousarray(agrees, dtype=np.bool_),
            latency_ms=np.ascontiguousarray(latency_ms, dtype=np.float64),
        )

    @property
    def exits(self) -> int:
        """Number of exits, the model's end not counted."""
        return int(self.confidence.shape[0])

    @property
    def samples(self) -> int:
        """Number of recorded samples."""
        return int(self.confidence.shape[1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """Savings and disagreement of some thresholds on given records."""

    savings: float
    """(vanilla − mean latency) / vanilla; negative where ramps take longer than exits save."""
    disagreement: float
    """Share of samples whose answer differs from the source model's: ``errors / samples``."""
    exit_shares: FloatArray
    """float64[exits + 1]: share of the samples answered at each exit, the last by the model."""
    errors: int
    """Number of samples whose answer differs from the source model's."""


def evaluate(
    confidence: ConfidenceArray,
    agrees: BoolArray,
    latency_ms: FloatArray,
    thresholds: FloatArray,
    *,
    vanilla_ms: float | None = None,
) -> Evaluation:
    """Evaluate thresholds: a sample leaves at the first exit where confidence reaches threshold.

    Confidences are float[exits, samples] in [0, 1] of at least one sample, ``agrees`` is
    bool[exits, samples], ``latency_ms`` as in :class:`Records`, and a threshold above 1 (``NEVER``)
    switches an exit off. Savings are relative to ``vanilla_ms``, the time of the model without
    ramps (Apparate 3.2); default ``latency_ms[-1]``, the model's end with all ramps.
    """
    confidence, agrees = check_confidence(confidence, agrees)
    exits, samples = confidence.shape
    latency = check_latency(latency_ms, exits=exits)
    first = decision.first_exit(confidence, thresholds)
    counts = decision.count_answers(first, exits)
    errors = int(np.count_nonzero(~final_agrees(agrees)[first, np.arange(samples)]))
    return Evaluation(
        savings=float(savings_of(counts, latency, vanilla_ms)),
        disagreement=errors / samples,
        exit_shares=counts / samples,
        errors=errors,
    )


def savings_of(
    counts: IntArray, latency_ms: FloatArray, vanilla_ms: float | None = None
) -> FloatArray:
    """Return savings for int[..., exits + 1] answer counts: float64[...].

    ValueError if there are no answers to judge by.
    """
    vanilla = float(latency_ms[-1] if vanilla_ms is None else vanilla_ms)
    if not (np.isfinite(vanilla) and vanilla > 0):
        raise ValueError(f"vanilla_ms must be finite and above 0, got {vanilla_ms}")
    samples = counts.sum(axis=-1)
    if not (samples > 0).all():
        raise ValueError("counts hold no samples to judge by, expected at least one answer")
    mean_ms = (counts * latency_ms).sum(axis=-1) / samples
    return np.asarray((vanilla - mean_ms) / vanilla, dtype=np.float64)


def final_agrees(agrees: BoolArray) -> BoolArray:
    """Append the row of the model's end, which always agrees: bool[exits + 1, samples]."""
    return np.concatenate([agrees, np.ones((1, agrees.shape[1]), dtype=np.bool_)])


def check_confidence(
    confidence: ConfidenceArray, agrees: BoolArray
) -> tuple[ConfidenceArray, BoolArray]:
    """Check that two matrices have one shape, at least 1 × 1, and confidences are in [0, 1]."""
    confidence, agrees = np.asarray(confidence), np.asarray(agrees)
    if confidence.ndim != 2:
        raise ValueError(f"confidence must be [exits, samples], got shape {confidence.shape}")
    if 0 in confidence.shape:
        raise ValueError(f"confidence {confidence.shape} holds no exits or no samples to judge by")
    if agrees.shape != confidence.shape or agrees.dtype != np.bool_:
        raise ValueError(
            f"agrees must be bool{list(confidence.shape)} like confidence, "
            f"got {agrees.dtype}{list(agrees.shape)}"
        )
    if not ((confidence >= 0) & (confidence <= 1)).all():
        exit_, sample = np.argwhere(~((confidence >= 0) & (confidence <= 1)))[0]
        raise ValueError(
            f"confidence of exit {exit_}, sample {sample} is {confidence[exit_, sample]}, "
            "expected a number in [0, 1]"
        )
    return confidence, agrees


def check_latency(latency_ms: FloatArray, *, exits: int) -> FloatArray:
    """Check that there are ``exits + 1`` finite times above 0."""
    latency = np.asarray(latency_ms, dtype=np.float64)
    if latency.shape != (exits + 1,):
        raise ValueError(
            f"latency_ms must have {exits + 1} entries, one for each of the {exits} exits and the "
            f"last for the model's end, got shape {latency.shape}"
        )
    if not (np.isfinite(latency) & (latency > 0)).all():
        raise ValueError(f"latency_ms must be finite and above 0, got {latency}")
    return latency
