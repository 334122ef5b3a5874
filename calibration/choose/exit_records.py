"""Recorded answers of every exit to every sample, computed by the graphs that are served."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle import Answer, Bundle
from offramp.bundle.records import CERTIFY, TUNE
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.data.running import BATCH_SIZE, Graphs, check_answers, run_over
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.answers.criteria import State, host_criterion
from offramp.engine.answers.exit_check import confidence_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecords:
    """Answers of exits and source model, reduced to the values that thresholds are chosen from."""

    confidence: NDArray[np.float32]
    """Confidence of each exit in its answers, [exits, samples]."""
    prediction: NDArray[np.int32]
    """[exits, samples]: codes of the answers (:mod:`~offramp.engine.answers.agreement`); for
    classification they are the classes."""
    final_prediction: NDArray[np.int32]
    """[samples]: codes of the source model's answers. An exit's code equals the model's code where
    the two answers agree."""
    final_confidence: NDArray[np.float32]
    """Confidence of the source model in its answers, [samples]."""
    labels: NDArray[np.int64] | None
    """Labels of the samples, [samples]; ``None`` if the data has none."""
    ranges: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 2)))
    """[exits + 1, 2]: smallest and largest finite value of the answers of each exit, and of the
    model; shape [0, 2] if the ranges are not known, as in records that are read from a bundle."""
    copies: NDArray[np.int64] | None = None
    """[samples]: number of rows of the data that each sample represents; ``None`` means one row
    each."""

    @classmethod
    def kept_by(cls, bundle: Bundle, split: int) -> ExitRecords:
        """Read the records of a bundle's ``TUNE`` or ``CERTIFY`` split."""
        kept = bundle.records()
        rows = kept["split"] == split
        return cls(
            confidence=kept["confidence"][:, rows],
            prediction=kept["prediction"][:, rows],
            final_prediction=kept["final_prediction"][rows],
            final_confidence=kept["final_confidence"][rows],
            labels=kept["label"][rows] if "label" in kept else None,
            copies=kept["copies"][rows] if "copies" in kept else None,
        )

    @property
    def agrees(self) -> NDArray[np.bool_]:
        """True where an exit answers a sample like the source model, [exits, samples]."""
        same: NDArray[np.bool_] = self.prediction == self.final_prediction
        return same


def worst_of(records: Sequence[ExitRecords]) -> ExitRecords:
    """Return the worst case over records of the same samples in batches of other sizes.

    The model's answers are those of the first records. An exit's confidence is its largest
    confidence in any of the records, and the exit disagrees with the model if it does so in any of
    them. A bound that holds for the result therefore holds for each of the given records.
    """
    worst = replace(records[0])
    for other in records[1:]:
        differs = other.prediction != worst.final_prediction
        worst = replace(
            worst,
            confidence=np.maximum(worst.confidence, other.confidence),
            prediction=np.where(differs, other.prediction, worst.prediction),
        )
    return worst


def record_answers(
    model: Graphs,
    exit_outputs: Sequence[tuple[str, str]],
    answer: Answer,
    dataset: Dataset,
    *,
    threads: int,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[int], None] = lambda _: None,
) -> ExitRecords:
    """Run the joined graph of model and exits, or the graphs of a cascade, over a data set.

    ``model`` outputs ``answer`` and ``exit_outputs``: the names of the exits' answers and
    confidences, in depth order. ``progress`` is called with the size of each finished batch. A
    ``DataError`` if the model fails on a sample, or its answer is not finite; a ``CriterionError``
    if a user's criterion fails. A criterion that depends on earlier exits gets the answers of all
    earlier exits, as it does when the model is served.
    """
    shape = (len(exit_outputs), len(dataset))
    records = ExitRecords(
        confidence=np.empty(shape, np.float32),
        prediction=np.empty(shape, np.int32),
        final_prediction=np.empty(len(dataset), np.int32),
        final_confidence=np.empty(len(dataset), np.float32),
        labels=dataset.labels,
        ranges=np.tile([np.inf, -np.inf], (len(exit_outputs) + 1, 1)),
        copies=dataset.copies,
    )
    agreement = agreement_of(answer)
    criterion = host_criterion(answer.criterion)
    wanted = [*itertools.chain(*exit_outputs), answer.output]
    for rows, (*exits, final) in run_over(
        model, wanted, dataset, threads=threads, batch_size=batch_size
    ):
        check_answers(final, dataset.rows[rows], answer)
        ends = agreement.reduce(final)
        mask = None if answer.task.mask is None else dataset.column(answer.task.mask, rows)
        records.final_prediction[rows] = agreement.codes(ends)
        records.final_confidence[rows] = confidence_of(final, answer.form, answer.task)
        state: State = {}
        for place, (values, confidence) in enumerate(zip(exits[::2], exits[1::2], strict=True)):
            said = agreement.reduce(values)
            records.prediction[place, rows] = agreement.codes_against(said, ends, mask)
            if criterion is not None:
                records.confidence[place, rows], state = criterion.apply(values, state)
            else:
                records.confidence[place, rows] = np.fmax(confidence, 0)  # NaN is no confidence
        _widen(records, [*exits[::2], final])
        progress(len(final))
    return records


def _widen(records: ExitRecords, answers: Sequence[NDArray[Any]]) -> None:
    """Extend the ranges of each exit and of the model by the answers of a batch."""
    for place, values in enumerate(answers):
        finite = values[np.isfinite(values)]
        if finite.size:
            least, most = records.ranges[place]
            records.ranges[place] = min(least, finite.min()), max(most, finite.max())


def kept_records(tune: ExitRecords, certify: ExitRecords) -> dict[str, NDArray[Any]]:
    """Return both splits as a bundle stores them; see :meth:`offramp.bundle.Bundle.records`."""
    parts = (tune, certify)
    names = ("confidence", "prediction", "final_prediction", "final_confidence")
    arrays: dict[str, NDArray[Any]] = {
        name: np.concatenate([getattr(part, name) for part in parts], axis=-1) for name in names
    }
    sizes = [len(part.final_prediction) for part in parts]
    arrays["split"] = np.repeat(np.array([TUNE, CERTIFY], np.uint8), sizes)
    if tune.labels is not None and certify.labels is not None:
        arrays["label"] = np.concatenate([tune.labels, certify.labels])
    if tune.copies is not None and certify.copies is not None:
        arrays["copies"] = np.concatenate([tune.copies, certify.copies])
    return arrays


def dump_records(tune: ExitRecords, certify: ExitRecords) -> bytes:
    """Return the content of ``records.npz``."""
    arrays = kept_records(tune, certify)
    buffer = io.BytesIO()
    # allow_pickle is not passed: numpy before 2.1 would store it as an array
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()
