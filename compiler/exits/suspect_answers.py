"""Warnings of answers that a model hardly gives to the data that it was made for."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from offramp.bundle import Answer
from offramp.bundle.records import has_classes
from offramp.calibration.choose.records import ExitRecords

_log = logging.getLogger(__name__)

_LEAST_KAPPA: Final = 0.05
"""Cohen's kappa of labels and answers below which the answers are no better than chance."""
_REMEDY: Final = (
    "probably the data is not what the model was trained on: compare its preprocessing (scale, "
    "mean, channel order, tokenizer)"
)


def warn_of_answers(answer: Answer, records: ExitRecords) -> None:
    """Warn of a model that gives one class throughout, or is right by chance alone."""
    if not has_classes(answer):
        return
    given, labels = records.final_prediction, records.labels
    if (given == given[0]).all():
        _log.warning(
            "The model gives all %d samples the same answer (%d): exits have nothing to learn "
            "from, and the certificate says nothing of other answers; %s.",
            len(given), given[0], _REMEDY,
        )  # fmt: skip
    elif labels is not None and answer.task.kind == "classification":
        right, by_chance = _right(given, labels, answer.classes)
        if right - by_chance < _LEAST_KAPPA * (1 - by_chance):
            _log.warning(
                "By the labels of the data the model is right in %.1f %% of the samples, and a "
                "guess with the same frequencies would be in %.1f %%; %s.",
                100 * right, 100 * by_chance, _REMEDY,
            )  # fmt: skip


def _right(given: np.ndarray, labels: np.ndarray, classes: int) -> tuple[float, float]:
    """Return the share of right answers, and what chance gives at the same frequencies."""
    known = (labels >= 0) & (labels < classes)
    shares = [np.bincount(v, minlength=classes) / len(given) for v in (given, labels[known])]
    return float((given == labels).mean()), float(shares[0] @ shares[1])
