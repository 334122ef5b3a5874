"""Records drawn at random, and plain solvers to hold the fast ones against."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.policy import NEVER

Problem: TypeAlias = tuple[NDArray[np.float32], NDArray[np.bool_], NDArray[np.float64]]
"""Confidence, agreement and latency, as ``tune`` takes them."""


def realistic(seed: int, exits: int = 10, samples: int = 512) -> Problem:
    """Draw samples of different hardness; deeper exits are abler, each is calibrated otherwise."""
    rng = np.random.default_rng(seed)
    hardness = rng.beta(1.2, 2.0, samples)
    ability = np.linspace(0.25, 1.0, exits) + rng.normal(0, 0.03, exits)
    margin = ability[:, None] - hardness + 0.15
    margin += rng.normal(0, 0.1, samples) + rng.normal(0, 0.12, (exits, samples))
    agrees = rng.random((exits, samples)) < 1 / (1 + np.exp(-15 * margin))
    temperature = rng.uniform(0.6, 2.0, exits)[:, None]
    logit = 6 * temperature * margin + rng.normal(0, 0.7, (exits, samples))
    confidence = 0.1 + 0.9 / (1 + np.exp(-logit))
    return confidence.astype(np.float32), agrees, _latency(rng, exits)


def unstructured(seed: int, exits: int = 10, samples: int = 512) -> Problem:
    """Draw confidences evenly and apart from each other; agreement rises with confidence."""
    rng = np.random.default_rng(seed)
    confidence = rng.random((exits, samples)).astype(np.float32)
    agrees = rng.random((exits, samples)) < confidence ** rng.uniform(0.05, 0.6, exits)[:, None]
    return confidence, agrees, _latency(rng, exits)


def _latency(rng: np.random.Generator, exits: int) -> NDArray[np.float64]:
    ramps = 0.05 * np.minimum(np.arange(1, exits + 2), exits)
    return np.cumsum(rng.uniform(0.5, 1.5, exits + 1)) + ramps


def grid_optimum(problem: Problem, allowed: int) -> float:
    """Best savings over every combination of distinct confidences; no theory, few exits only."""
    confidence, agrees, latency = problem
    samples = confidence.shape[1]
    best = -np.inf
    values = [np.append(np.unique(row), np.float32(NEVER)) for row in confidence]
    for combination in np.ndindex(*[len(v) for v in values]):
        thresholds = np.array([v[i] for v, i in zip(values, combination, strict=True)])
        leaves = np.vstack([confidence >= thresholds[:, None], np.ones(samples, bool)])
        first = leaves.argmax(axis=0)
        right = np.vstack([agrees, np.ones(samples, bool)])[first, np.arange(samples)]
        if samples - right.sum() <= allowed:
            best = max(best, 1 - latency[first].mean() / latency[-1])
    return float(best)


def two_exit_optimum(problem: Problem, allowed: int) -> float:
    """Best savings of two exits over every pair of distinct confidences; exact, no theory.

    For each threshold of the first exit, those who wait are sorted by their confidence at the
    second: running sums then hold every threshold there.
    """
    confidence, agrees, latency = problem
    samples = confidence.shape[1]
    best = -np.inf
    order = np.argsort(-confidence[1], kind="stable")
    ordered = confidence[1, order]
    complete = np.append(ordered[1:] != ordered[:-1], True)  # equal ones leave together
    for threshold in np.append(np.unique(confidence[0]), np.float32(NEVER)):
        leaves = confidence[0] >= threshold
        wrong = int((leaves & ~agrees[0]).sum())
        waits = ~leaves[order]
        count = np.append(0, np.cumsum(waits)[complete])
        errors = wrong + np.append(0, np.cumsum(waits & ~agrees[1, order])[complete])
        first = leaves.sum() * (latency[2] - latency[0])
        saved = first + count * (latency[2] - latency[1])
        best = max(best, saved[errors <= allowed].max(initial=-np.inf))
    return float(best / samples / latency[2])


def tree_optimum(problem: Problem, allowed: int, most_states: int = 40_000) -> float:
    """Best savings over every allocation of errors to exits; exact, for few allowed errors.

    The tree that :mod:`offramp.baselines.thresholds` describes, with nothing left
    out. Held against :func:`grid_optimum` in the tests.
    """
    confidence, agrees, latency = problem
    samples = confidence.shape[1]
    waiting, errors, saved = np.ones((1, samples), bool), np.zeros(1, int), np.zeros(1)
    for row, right, saving in zip(confidence, agrees, latency[-1] - latency[:-1], strict=True):
        levels = np.concatenate([[np.inf], np.unique(row)[::-1]])
        states: list[tuple[NDArray[np.bool_], int, float]] = []
        for mask, spent, gain in zip(waiting, errors, saved, strict=True):
            wrong = np.sort(row[mask & ~right])[::-1]
            # for e = 0, 1, …: the least level above the wrong sample number e
            useful = [levels[levels > w].min() for w in wrong[: allowed - spent + 1]]
            if len(wrong) <= allowed - spent:
                useful.append(levels[-1])
            for level in dict.fromkeys(useful):
                leaves = mask & (row >= level)
                count = spent + int((leaves & ~right).sum())
                if count <= allowed:
                    states.append((mask & ~leaves, count, gain + saving * leaves.sum()))
        assert len(states) <= most_states, "too many allocations for an exact solution"
        waiting = np.array([s[0] for s in states])
        errors = np.array([s[1] for s in states])
        saved = np.array([s[2] for s in states])
    return float(saved.max() / samples / latency[-1])


def greedy_loops(problem: Problem, allowed: int) -> list[float]:
    """Apparate's greedy, loop by loop: thresholds on the error 1 − confidence."""
    confidence, agrees, latency = problem
    exits, samples = confidence.shape
    conf = confidence.astype(np.float64).tolist()
    right_at = agrees.tolist()
    latency_ms = latency.tolist()

    def query(thresholds: list[float]) -> tuple[int, float, float]:
        correct = 0
        counts = [0] * (exits + 1)
        for s in range(samples):
            for e in range(exits):
                if 1.0 - conf[e][s] < thresholds[e]:
                    counts[e] += 1
                    correct += right_at[e][s]
                    break
            else:
                counts[-1] += 1
                correct += 1
        mean = 0.0
        for e in range(exits + 1):
            mean += counts[e] / samples * latency_ms[e]
        saved = (latency_ms[-1] - mean) / latency_ms[-1] * 100
        return correct, round(correct / samples, 7), saved

    thresholds, steps = [0.0] * exits, [0.1] * exits
    _, accuracy, saved = query(thresholds)
    while True:
        best, best_score, best_result = None, float("inf"), (0.0, 0.0)
        plateau, plateau_result = None, (0.0, 0.0)
        overstepped = []
        for e in range(exits):
            if thresholds[e] > 1:
                continue
            tried = list(thresholds)
            tried[e] = round(tried[e] + steps[e], 4)
            correct, tried_accuracy, tried_saved = query(tried)
            if samples - correct > allowed:
                overstepped.append(e)
            elif tried_saved == saved:
                if plateau is None:
                    plateau, plateau_result = e, (tried_accuracy, tried_saved)
            else:
                score = abs(tried_accuracy - accuracy) / abs(tried_saved - saved)
                if score < best_score:
                    best, best_score, best_result = e, score, (tried_accuracy, tried_saved)
        if best is None:
            best, best_result = plateau, plateau_result
        if best is None and all(steps[e] <= 0.01 for e in overstepped):
            return thresholds
        for e in overstepped:
            steps[e] = max(steps[e] / 2, 0.01)
        if best is not None:
            thresholds[best] = round(thresholds[best] + steps[best], 4)
            steps[best] *= 2
            accuracy, saved = best_result
