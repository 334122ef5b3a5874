"""Streams drawn from a fixed population, so that every policy's true risk is known exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import ActiveExit, ExitPolicy, Promise
from offramp.certify import MODEL_END, UNKNOWN, Observations, first_exit, reaches
from offramp.engine.control.controller import Controller
from offramp.engine.control.costs import CostModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Population:
    """Everything about N samples; the source model answers 1, exits 1 or 2."""

    confidence: NDArray[np.float32]
    agrees: NDArray[np.bool_]

    @property
    def size(self) -> int:
        return int(self.confidence.shape[1])

    def answered_at(self, policy: ExitPolicy, rows: NDArray[Any] | slice) -> NDArray[np.int64]:
        exits = len(self.confidence)
        thresholds = np.full(exits, 2.0)
        for active in policy.active:
            thresholds[active.exit] = active.threshold
        return first_exit(self.confidence[:, rows], thresholds)

    def risk(self, policy: ExitPolicy) -> float:
        """True disagreement."""
        first = self.answered_at(policy, slice(None))
        agrees = np.concatenate([self.agrees, np.ones((1, self.size), dtype=np.bool_)])
        return float((~agrees[first, np.arange(self.size)]).mean())

    def mean_ms(self, policy: ExitPolicy, costs: CostModel) -> float:
        first = self.answered_at(policy, slice(None))
        exits = [a.exit for a in policy.active]
        times = np.zeros(len(self.confidence) + 1)
        times[[*exits, len(self.confidence)]] = costs.latency_ms(exits)
        return float(times[first].mean())

    def serve(
        self, policy: ExitPolicy, rows: NDArray[np.int64], *, q: float, rng: np.random.Generator
    ) -> Observations:
        """Serve some samples; each that leaves early runs on with probability q."""
        exits, n = len(self.confidence), len(rows)
        first = self.answered_at(policy, rows)
        complete = (rng.random(n) < q) | (first == MODEL_END)
        active = [a.exit for a in policy.active]
        passed = np.zeros((exits, n), dtype=np.bool_)
        passed[active] = reaches(first, active) | complete
        return Observations(
            confidence=np.where(passed, self.confidence[:, rows], np.float32(np.nan)),
            prediction=np.where(passed, np.where(self.agrees[:, rows], 1, 2), UNKNOWN).astype(
                np.int32
            ),
            answered_at=first,
            final=np.where(complete, 1, UNKNOWN).astype(np.int32),
            audit_probability=np.full(n, q),
            policy_version=np.full(n, policy.version),
            forced=np.zeros(n, dtype=np.bool_),
        )

    def records(self, rng: np.random.Generator, *, tune: int, certify: int) -> dict[str, Any]:
        """Calibration records drawn from it."""
        rows = rng.integers(self.size, size=tune + certify)
        return {
            "confidence": self.confidence[:, rows],
            "prediction": np.where(self.agrees[:, rows], 1, 2),
            "final_prediction": np.ones(len(rows), dtype=np.int32),
            "split": np.repeat([1, 2], [tune, certify]).astype(np.uint8),
        }


def synthetic(
    seed: int, *, exits: int = 3, size: int = 100_000, hardness: float = 0.0
) -> Population:
    """Later exits are surer; confidence is nearly the probability of agreement.

    ``hardness`` above 0 makes agreement rarer than confidence says.
    """
    rng = np.random.default_rng(seed)
    ease = rng.normal(size=size)
    confidence, agrees = [], []
    for exit_ in range(exits):
        logit = 2.6 + 1.1 * exit_ + 2.2 * ease + rng.normal(scale=0.6, size=size)
        confidence.append(1 / (1 + np.exp(-logit)))
        agrees.append(rng.random(size) < 1 / (1 + np.exp(-(1.15 * logit + 0.3 - hardness))))
    return Population(confidence=np.array(confidence, dtype=np.float32), agrees=np.array(agrees))


def synthetic_costs(exits: int = 3) -> CostModel:
    """Exits evenly over a model of 10 ms."""
    step = 10.0 / (exits + 1)
    return CostModel(
        source_ms=10.0,
        segments_ms=(step,) * (exits + 1),
        stages_ms=(0.05,) * exits,
        after_segment=tuple(range(exits)),
        exits_ms=(0.05,) * exits,
    )


def policy_of(
    thresholds: dict[int, float], *, version: int = 1, promised: float | None = None
) -> ExitPolicy:
    promise = None
    if promised is not None:
        promise = Promise(
            max_disagreement=promised,
            confidence_level=0.95,
            certify_samples=5000,
            certify_errors=30,
            p_value=0.01,
            predicted_savings=0.5,
        )
    return ExitPolicy(
        version=version,
        active=tuple(ActiveExit(exit=e, threshold=t) for e, t in sorted(thresholds.items())),
        promise=promise,
    )


def feed(
    controller: Controller,
    population: Population,
    samples: int,
    *,
    rng: np.random.Generator,
    chunk: int = 64,
) -> list[tuple[ExitPolicy, Any]]:
    """Serve a stream, with jobs run immediately; return policy and status before each chunk."""
    history = []
    for _ in range(0, samples, chunk):
        policy, status = controller.policy, controller.status()
        history.append((policy, status))
        rows = rng.integers(population.size, size=chunk)
        controller.observe(population.serve(policy, rows, q=controller.audit_probability, rng=rng))
        if (job := controller.take_job()) is not None:
            controller.finish(job, job.run())
    return history
