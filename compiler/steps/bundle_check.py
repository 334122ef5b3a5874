"""``eecompile verify``: check on new data whether a bundle still keeps its promise.

File hashes are checked when the bundle is opened. Here the bundle's stages answer every sample, in
batches of many sizes. The answers are compared with those of the unmodified model in a plain
session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Bundle, Promise
from offramp.bundle.records import (
    ClassLoss,
    count_label_losses,
    count_losses,
    losses_on_records,
    uncertified,
)
from offramp.calibration.data.data_sources import DataSource, data_name
from offramp.calibration.data.dataset import DataError, Dataset, read_samples
from offramp.calibration.data.running import check_answers
from offramp.calibration.measure.paired import plain_session
from offramp.calibration.rehearsal import REHEARSAL, Rehearsed
from offramp.certify import MODEL_END, binomial_cdf, upper_bound
from offramp.certify.learn_then_test import level_of_each
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.common.options import DEFAULT_CONFIDENCE_LEVEL
from offramp.compiler.common.progress import SILENT, Progress
from offramp.compiler.common.rounding import SINGLE
from offramp.compiler.samples.grouping import groups_again
from offramp.compiler.samples.staged_answers import AnsweringStages, batches_of_many_sizes
from offramp.engine.answers.agreement import Codes, agreement_of
from offramp.engine.answers.differences import Scales, compare
from offramp.engine.backends.custom_ops import open_runnable
from offramp.engine.graphs.external_weights import graphs_of
from offramp.engine.models.whole_promise import end_evidence, whole_policy
from offramp.engine.stages.loaded import Loaded, fits_together
from offramp.engine.stages.plan import Mode, make_plan

Verdict: TypeAlias = Literal["kept", "contradicted", "nothing promised"]
"""Result of testing the promise on the data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of one run of ``eecompile verify``."""

    bundle: Path
    data: Path | DataSource
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleCheck:
    """Result of ``eecompile verify``; shares are fractions of the samples."""

    samples: int
    distinct_samples: int
    """Number of distinct samples; the verdict uses only one row of each."""
    disagreements: int
    """Number of samples whose answer differs from the unmodified model's."""
    max_disagreement: float | None
    """Promised bound; ``None`` if nothing was promised."""
    by_class: tuple[ClassLoss, ...]
    """Samples with another answer, by class of the unmodified model, the largest share first."""
    by_label: tuple[ClassLoss, ...]
    """Samples with another answer, by label, the largest share first; empty if the data has no
    labels."""
    shares: Mapping[int, float]
    """Share of the samples that each exit answered; :data:`MODEL_END` is the key of the model's
    end."""
    end_difference: float
    """Largest difference of answers at the model's end, relative to the scale of each value. For a
    dynamically quantised model, a difference is not an error: samples that remain in a batch are
    rounded differently after others left."""
    accuracy: float | None
    """Accuracy of the bundle's answers, if the data has labels."""
    source_accuracy: float | None
    on_calibration_data: bool
    """True if exits and thresholds were made with the same data. The result then proves little."""
    verdict: Verdict
    at_most: float
    """Upper bound of the disagreement on data like these, at the promise's confidence level (95 %
    without one)."""


def verify_bundle(options: VerifyOptions, progress: Progress = SILENT) -> BundleCheck:
    """Run a bundle in ``leave`` mode and the unmodified model over all samples.

    Raises:
        BundleError: There is no bundle, or it is damaged.
        DataError: The data does not fit the model, or the model fails on it or answers NaN.
        VerificationError: An answer at the model's end differs from the unmodified model's.
    """
    bundle = open_runnable(options.bundle)
    dataset = read_samples(options.data, bundle.manifest)
    runs = _Runs(bundle, options)
    with progress.step("Answer all samples", len(dataset)) as advance:
        found = list(runs.answers(dataset, advance))
    answer, exits, source = (np.concatenate(part) for part in zip(*found, strict=True))
    differs = answer != source
    distinct = groups_again(bundle.manifest, dataset).representative
    counted = differs[distinct]
    disagreements = int(counted.sum())
    places, counts = np.unique(exits, return_counts=True)
    labels = dataset.labels
    promise = whole_policy(bundle.policy, end_evidence(bundle)).promise
    level = promise.confidence_level if promise else DEFAULT_CONFIDENCE_LEVEL
    of_classes = _bounded_classes(
        bundle, count_losses(bundle.manifest.answer, source[distinct], counted)
    )
    return BundleCheck(
        samples=len(dataset),
        distinct_samples=len(counted),
        disagreements=int(differs.sum()),
        max_disagreement=promise.max_disagreement if promise else None,
        by_class=count_losses(bundle.manifest.answer, source, differs),
        by_label=count_label_losses(bundle.manifest.answer, labels, differs),
        shares={int(e): int(n) / len(dataset) for e, n in zip(places, counts, strict=True)},
        end_difference=runs.end_difference,
        accuracy=None if labels is None else float((answer == labels).mean()),
        source_accuracy=None if labels is None else float((source == labels).mean()),
        on_calibration_data=dataset.sha256 in _made_of(bundle),
        verdict=_verdict(
            promise if bundle.policy.active else None, disagreements, len(counted), of_classes
        ),
        at_most=upper_bound(disagreements, len(counted), level),
    )


_System: TypeAlias = ort.InferenceSession | AnsweringStages
_CHUNK = 64
"""Number of batches that a large model answers before the stages are loaded in its place."""


def _source_session(bundle: Bundle, threads: int) -> ort.InferenceSession:
    with graphs_of(bundle) as read:
        return plain_session(read(bundle.manifest.source.file), threads)


class _Runs:
    """The bundle's stages as the server runs them, and the model in a plain session."""

    def __init__(self, bundle: Bundle, options: VerifyOptions) -> None:
        manifest = bundle.manifest
        makers: list[Callable[[], _System]] = [
            partial(_source_session, bundle, options.threads),
            partial(AnsweringStages, make_plan(bundle, mode=Mode.LEAVE), threads=options.threads),
        ]
        together = fits_together(bundle.graph(manifest.source.file))
        self._systems = Loaded(makers, together=together)
        self._chunk = 1 if together else _CHUNK
        self._output = manifest.answer.output
        self._answer = manifest.answer
        self._agreement = agreement_of(manifest.answer)
        # Rows that remain of a batch run in a smaller batch than the whole one that the model
        # answers.
        self._tolerance = max(manifest.verified_tolerance, SINGLE.batches)
        self._varies = manifest.batch_effect is not None
        self._data = data_name(options.data)
        self.end_difference = 0.0

    def answers(
        self, dataset: Dataset, advance: Callable[[int], None]
    ) -> Iterator[tuple[Codes, NDArray[np.int32], Codes]]:
        """Yield, per batch, the codes of answers, the exits that gave them, and the model's codes.

        If stages and model do not fit in memory together, the model answers some batches first.
        """
        batches = batches_of_many_sizes(len(dataset))
        while chunk := list(islice(batches, self._chunk)):
            wholes = [self._whole(dataset, rows) for rows in chunk]
            for rows, whole in zip(chunk, wholes, strict=True):
                yield self._compared(dataset, rows, whole)
                advance(len(whole))

    def _whole(self, dataset: Dataset, rows: slice) -> NDArray[Any]:
        """Return the model's answers to a batch."""
        source, tensors = self._systems[0], dataset.take(rows)
        assert not isinstance(source, AnsweringStages)
        try:
            feed = {tensor.name: tensors[tensor.name] for tensor in source.get_inputs()}
            (whole,) = source.run([self._output], feed)
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            where = f"samples {rows.start} to {rows.stop - 1}"
            reason = str(error).splitlines()[0]
            raise DataError(f"{self._data}: the model fails on {where}: {reason}") from error
        check_answers(whole, dataset.rows[rows], self._answer)
        found: NDArray[Any] = whole
        return found

    def _compared(
        self, dataset: Dataset, rows: slice, whole: NDArray[Any]
    ) -> tuple[Codes, NDArray[np.int32], Codes]:
        stages, tensors = self._systems[1], dataset.take(rows)
        assert isinstance(stages, AnsweringStages)
        given = stages.run(tensors)
        if (ended := np.flatnonzero(given.exit == MODEL_END)).size:
            self._check_end(given.answer[ended], whole, rows.start, ended)
        ends, mask = self._agreement.reduce(whole), self._agreement.mask_in(tensors)
        said = self._agreement.codes_against(self._agreement.reduce(given.answer), ends, mask)
        return said, given.exit, self._agreement.codes(ends)

    def _check_end(
        self, answer: NDArray[Any], whole: NDArray[Any], start: int, rows: NDArray[np.intp]
    ) -> None:
        difference = compare(answer, whole[rows], scales=Scales.of(whole), answer=self._answer)
        if not self._varies and not difference.share <= self._tolerance:
            raise VerificationError(
                f"the model's end answers sample {start + rows[0]} and its batch mates differently "
                f"from the unmodified model, by {difference.describe()} ({self._tolerance:.0e} "
                "allowed); compile the model again on this machine"
            )
        self.end_difference = max(self.end_difference, difference.share)


def _made_of(bundle: Bundle) -> set[str]:
    """Return the hashes of the data that exits and thresholds were made with."""
    made_of = {bundle.manifest.calibration.data_sha256}
    if REHEARSAL in {entry.path for entry in bundle.manifest.files}:
        made_of.add(Rehearsed.parse(bundle.read(REHEARSAL)).data_sha256)
    return made_of


def _bounded_classes(bundle: Bundle, losses: Sequence[ClassLoss]) -> tuple[ClassLoss, ...]:
    """Return the classes for which a separate bound was certified."""
    promise, answer = bundle.policy.promise, bundle.manifest.answer
    if promise is None or promise.max_class_disagreement is None:
        return ()
    records = bundle.records()
    few = uncertified(
        answer,
        losses_on_records(answer, bundle.policy, records),
        max_disagreement=promise.max_class_disagreement,
        confidence_level=level_of_each(promise.confidence_level, copies="copies" in records),
    )
    return tuple(loss for loss in losses if loss.number not in few)


def _verdict(
    promise: Promise | None, disagreements: int, samples: int, of_classes: Sequence[ClassLoss] = ()
) -> Verdict:
    """Judge by exact binomial tests whether the data supports or contradicts the promise.

    ``of_classes`` are the classes with a separate bound, which are tested together.
    """
    if promise is None:
        return "nothing promised"
    least = 1 - promise.confidence_level
    tests = [(disagreements, samples, promise.max_disagreement, least)]
    if promise.max_class_disagreement is not None:
        bound = promise.max_class_disagreement
        tests += [(each.lost, each.samples, bound, least / len(of_classes)) for each in of_classes]
    broken = any(1.0 - binomial_cdf(k - 1, n, bound) < chance for k, n, bound, chance in tests)
    return "contradicted" if broken else "kept"
