"""Runs a graph over a data set, batch by batch, and checks the source model's answers.

:func:`run_over` yields the outputs of each batch, and names the sample on which a graph fails.
:func:`check_answers` refuses NaN and infinity in answers; :func:`check_unusual` tests whether the
model accepts samples that contain them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.calibration.data.augmentation import AugmentedSamples
from offramp.calibration.data.dataset import DataError, Dataset
from offramp.engine.answers.agreement import agreement_of
from offramp.engine.backends.onnxruntime import make_session

_log = logging.getLogger(__name__)

BATCH_SIZE = 64
_UNUSUAL = 1024
"""Largest number of samples with NaN or infinity in an input that are tried before training."""

Graphs: TypeAlias = bytes | Sequence[bytes]
"""One graph, or several with different output names: the graphs of a cascade may have different
opsets, but one graph has only one opset."""


class _Part(NamedTuple):
    """One of the graphs, with the inputs that it reads and the outputs to compute."""

    session: ort.InferenceSession
    read: list[str]
    outputs: list[str]

    @classmethod
    def of(
        cls, graph: bytes, threads: int, outputs: Sequence[str], *, all_of_them: bool = True
    ) -> _Part:
        session = make_session(graph, threads)
        read = [tensor.name for tensor in session.get_inputs()]
        if all_of_them:
            return cls(session, read, list(outputs))
        given = {tensor.name for tensor in session.get_outputs()}
        return cls(session, read, [name for name in outputs if name in given])


def run_over(
    model: Graphs,
    outputs: Sequence[str],
    dataset: Dataset | AugmentedSamples,
    *,
    threads: int,
    batch_size: int = BATCH_SIZE,
) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
    """Yield the rows of each batch, and the model's ``outputs`` for them.

    ``model`` may read fewer inputs than the data set has; all samples are run, in order. A
    ``DataError`` if it fails on a sample, for instance on a token beyond its vocabulary.
    """
    if isinstance(model, bytes):
        parts = [_Part.of(model, threads, outputs)]
    else:
        each = [_Part.of(graph, threads, outputs, all_of_them=False) for graph in model]
        parts = [part for part in each if part.outputs]
    for start in range(0, len(dataset), batch_size):
        rows = slice(start, min(start + batch_size, len(dataset)))
        batch = dataset.take(rows)
        found: dict[str, NDArray[Any]] = {}
        for session, read, wanted in parts:
            try:
                values = session.run(wanted, {name: batch[name] for name in read})
            except Exception as error:  # ONNX Runtime's own classes derive from Exception only
                bad = dataset.rows[start + _first_failing(session, batch, read)]
                reason = str(error).splitlines()[0]
                raise DataError(f"the model fails on calibration sample {bad}: {reason}") from error
            found |= zip(wanted, values, strict=True)
        yield rows, [found[name] for name in outputs]


def _first_failing(
    session: ort.InferenceSession, batch: Mapping[str, NDArray[Any]], read: Sequence[str]
) -> int:
    """Return the first row of a batch that fails alone; 0 also if no row fails alone."""
    for row in range(len(next(iter(batch.values())))):
        try:
            session.run(None, {name: batch[name][row : row + 1] for name in read})
        except Exception:
            return row
    return 0


def check_answers(values: NDArray[Any], sources: NDArray[np.intp], answer: Answer) -> None:
    """Raise DataError for answers [rows, …] of the source model that no answer can agree with.

    ``sources`` [rows] are the samples' rows in the file.
    """
    decided = agreement_of(answer).decided(values)
    if not decided.all():
        bad = sources[np.flatnonzero(~decided)[0]]
        raise DataError(
            f"the source model answers calibration sample {bad} with NaN or infinity; "
            "correct the model or remove the sample"
        )


def check_unusual(
    graph: Callable[[], bytes], dataset: Dataset, answer: Answer, *, threads: int
) -> None:
    """Run a model on samples with NaN or infinity in an input, :data:`_UNUSUAL` at most.

    If the graph handles such values, with an imputer or an additive mask, these samples are used
    like all others. Otherwise the data are broken, and ``DataError`` is raised. ``graph`` returns
    the model's bytes.
    """
    rows = dataset.not_finite()
    if not len(rows):
        return
    found = (
        f"{len(rows):,} of {len(dataset):,} samples have NaN or infinite values in an input, first "
        f"sample {dataset.rows[rows[0]]}"
    )
    try:
        some = dataset.subset(rows[:_UNUSUAL])
        for part, (values,) in run_over(graph(), [answer.output], some, threads=threads):
            check_answers(values, some.rows[part], answer)
    except DataError as error:
        raise DataError(f"{found}; {error}") from error
    _log.warning("%s; the model's answers to them are finite, so they are used.", found)
