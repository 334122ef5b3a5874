"""Checks of the data with the model: input values, unusual answers, and ranges of answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, ValueBound
from offramp.bundle.records import has_classes
from offramp.calibration.choose.exit_records import ExitRecords
from offramp.calibration.data.data_sources import data_name
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.calibration.data.running import check_unusual
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.requests.value_limits import ValueLimits


def check_answers_of(model: SourceModel, dataset: Dataset, options: CompileOptions) -> None:
    """Raise DataError for samples with NaN or infinity that the model cannot answer."""
    try:
        check_unusual(
            lambda: serialised(model.proto), dataset, model.answer, threads=options.threads
        )
    except DataError as error:
        raise DataError(f"{data_name(options.data)}: {error}") from error


def check_values(bounds: Sequence[ValueBound], dataset: Dataset, options: CompileOptions) -> None:
    """Raise DataError for input values that the model fails on."""
    limits, first = ValueLimits(bounds), 0
    for batch in dataset.batches():
        if wrong := limits.wrong(batch):
            where = f"from sample {first} on, " if first else ""
            raise DataError(f"{data_name(options.data)}: {where}{wrong}")
        first += len(next(iter(batch.values())))


_ROUNDING: Final = 0.01
"""Share of the model's range by which answers of exits may be outside of that range."""


def check_ranges(
    model: SourceModel, ranges: NDArray[np.float64], active: Sequence[int], *, slack: float
) -> None:
    """Check that the answers of exits in use have the scale of the model's answers.

    ``ranges`` [exits + 1, 2] are the ranges of the answers of each exit and of the model. ``slack``
    is the share of the model's range that rounding may add. VerificationError if an
    exit's answers are outside of the range that the model's answers can have.
    """
    if not active or model.answer.form == "classes":
        return
    *exits, own = ranges.tolist()
    least, most = min(exits[e][0] for e in active), max(exits[e][1] for e in active)
    bounds = _bounds_of(model)
    if bounds is None:
        return
    allowed = max(slack, _ROUNDING) * (bounds[1] - bounds[0])
    if least < bounds[0] - allowed or most > bounds[1] + allowed:
        raise VerificationError(
            f"exits answer on another scale than the model: from {least:.3g} to {most:.3g}, "
            f"expected {bounds[0]:.3g} to {bounds[1]:.3g} (the model's answers are from "
            f"{own[0]:.3g} to {own[1]:.3g}); this is a defect, report it with the model. Until it "
            "is fixed, end the model at its probabilities or logits"
        )


def both_ranges(model: SourceModel, ranges: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the smallest and largest answer of the model, then those of all exits together.

    ``ranges`` is as in :func:`check_ranges`. The result is empty if no operators follow the
    model's scores (:attr:`.Answer.tail`), if there are no exits, or if a range is not finite.
    """
    if not model.answer.tail or len(ranges) < 2 or not np.isfinite(ranges).all():
        return ()
    exits, own = ranges[:-1], ranges[-1]
    return (*own.tolist(), float(exits[:, 0].min()), float(exits[:, 1].max()))


def _bounds_of(model: SourceModel) -> tuple[float, float] | None:
    """Return the smallest and largest value of possible answers; ``None`` without bounds."""
    if model.tail is not None:
        return model.tail.bounds
    return (0.0, 1.0) if model.answer.form == "probabilities" else None


_log = logging.getLogger(__name__)

_LEAST_KAPPA: Final = 0.05
"""Smallest Cohen's kappa of labels and answers that counts as better than chance."""
_REMEDY: Final = (
    "probably the data is not what the model was trained on: compare its preprocessing (scale, "
    "mean, channel order, tokenizer)"
)


def warn_of_answers(answer: Answer, records: ExitRecords) -> None:
    """Warn if a model answers all samples with one class, or is right only by chance."""
    if not has_classes(answer):
        return
    given, labels = records.final_prediction, records.labels
    if (given == given[0]).all():
        _log.warning(
            "The model answers all %d samples alike (%d): exits have nothing to learn from, "
            "and the certificate does not cover other answers; %s.",
            len(given), given[0], _REMEDY,
        )  # fmt: skip
    elif labels is not None and answer.task.kind == "classification":
        right, by_chance = _right(given, labels, answer.classes)
        if right - by_chance < _LEAST_KAPPA * (1 - by_chance):
            _log.warning(
                "By the labels of the data the model is right in %.1f %% of the samples, and a "
                "guess with the same frequencies would be right in %.1f %%; %s.",
                100 * right, 100 * by_chance, _REMEDY,
            )  # fmt: skip


def _right(given: np.ndarray, labels: np.ndarray, classes: int) -> tuple[float, float]:
    """Return the share of right answers, and the share that is expected by chance."""
    known = (labels >= 0) & (labels < classes)
    shares = [np.bincount(v, minlength=classes) / len(given) for v in (given, labels[known])]
    return float((given == labels).mean()), float(shares[0] @ shares[1])
