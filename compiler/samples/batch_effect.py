"""Answers that depend on the rest of the batch: they are counted, and reduce the promise.

Dynamically quantised models round every row by the range of all rows of a batch. Exits make batches
smaller, so the answer to a sample depends on which other samples are in its batch. The share of
such answers is counted by running the model at several batch sizes, on samples that are not used to
certify. An upper bound of this share, and half of the risk, are subtracted from the promise. Exits
are certified for the rest, at the worst of these batch sizes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.compilation import BatchEffect
from offramp.calibration.data.dataset import Dataset, DataSplit
from offramp.calibration.data.running import BATCH_SIZE, run_over
from offramp.certify.binomial import half_risk
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.common.options import CompileOptions
from offramp.compiler.common.progress import Progress
from offramp.compiler.graphs.graph import serialised
from offramp.compiler.graphs.row_mixing import scaled_by_batch
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.common.environment import available_cores

_log = logging.getLogger(__name__)

COMPARED_BATCH_SIZES = (1, 7, BATCH_SIZE)
"""Batch sizes to compare: one row, a few rows, and the size with which all answers are recorded."""


def measure_batch_effect(
    model: SourceModel, parts: DataSplit, options: CompileOptions, progress: Progress
) -> BatchEffect | None:
    """Count the training and tuning samples whose answer changes in batches of another size.

    ``None`` if no operator rounds by the whole batch. VerificationError if the changes use up the
    promise; DataError if the model fails on a sample.
    """
    operators = scaled_by_batch(model.proto)
    if not operators:
        return None
    # only one of several equal samples is evidence
    compared = (parts.distinct_train(), parts.tune)
    samples = sum(map(len, compared))
    source, differs = serialised(model.proto), 0
    agreement = agreement_of(model.answer)
    steps = samples * len(COMPARED_BATCH_SIZES)
    with progress.step("Compare batches of other sizes", steps) as advance:
        for part in compared:
            ends, *others = (_answers(source, model, part, size) for size in COMPARED_BATCH_SIZES)
            mask = agreement.mask_in(part.inputs)
            same = [agreement.agree(answers, ends, mask) for answers in others]
            differs += int(np.count_nonzero(~np.all(same, axis=0)))
            advance(len(part) * len(COMPARED_BATCH_SIZES))
    effect = BatchEffect(
        operators=tuple(op.name for op in operators),
        batch_sizes=COMPARED_BATCH_SIZES,
        samples=samples,
        end_differs=differs,
        max_disagreement=options.promise.max_disagreement,
        confidence_level=options.promise.confidence_level,
    )
    if effect.left() <= 0:
        raise VerificationError(
            f"{effect.describe()}: that spends the whole promise, without any exit. The first of "
            f"the operators is {operators[0].name!r} ({operators[0].kind}). Compile the float32 "
            "model instead (--precision auto makes int8 copies that round each row alone), add "
            "more --data, or allow a larger --max-disagreement"
        )
    _log.warning("%s; %.2f %% are left for exits.", effect.describe(), 100 * effect.left())
    return effect


def left_for_exits(effect: BatchEffect, options: CompileOptions) -> CompileOptions:
    """Return options with the part of the promise that is left for exits, and half of the risk."""
    promise = replace(
        options.promise,
        max_disagreement=effect.left(),
        confidence_level=half_risk(options.promise.confidence_level),
    )
    return replace(options, promise=promise)


def _answers(source: bytes, model: SourceModel, part: Dataset, size: int) -> NDArray[Any]:
    """Return a model's answers [samples, …] in batches of a size, in the form to compare."""
    outputs, threads = [model.answer.output], available_cores()
    batches = run_over(source, outputs, part, threads=threads, batch_size=size)
    reduce = agreement_of(model.answer).reduce
    return np.concatenate([reduce(answer) for _, (answer,) in batches])
