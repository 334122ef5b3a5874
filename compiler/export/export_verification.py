"""Check that an exported file answers like its bundle, on every sample of some data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from offramp.bundle.onnx_wire import without_inputs
from offramp.calibration.data.dataset import Dataset
from offramp.compiler.common.errors import VerificationError
from offramp.compiler.export.nesting import Names
from offramp.compiler.graphs.graph import bodies
from offramp.compiler.samples.staged_answers import (
    AnsweringStages,
    BatchAnswers,
    batches_of_many_sizes,
)
from offramp.engine.answers.differences import compare
from offramp.engine.backends.custom_ops import load_session, session_options
from offramp.engine.stages.plan import Plan, exit_label

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Result of comparing an export with its bundle."""

    samples: int
    largest_difference: float
    """Largest difference of answers, relative to the scale of each value; 0 if all are equal."""
    exit_shares: dict[int, float]
    """Share of the samples that each exit answered, by exit index."""


def verify(
    plan: Plan,
    models: Mapping[str, onnx.ModelProto],
    names: Names,
    dataset: Dataset,
    *,
    unread: Collection[str] = (),
    weights: Path | None = None,
    tolerance: float,
    progress: Callable[[int], None] = lambda _: None,
) -> Verified:
    """Run bundle and exported models over all samples, in the same batches of several sizes.

    ``plan`` is in ``leave`` mode. ``models`` are keyed by their names in messages; if they output
    exits, these are compared, too. Only one model is loaded at a time. ``unread`` names inputs that
    no operator reads and that the data lacks. ``weights`` is the folder of weight files, if models
    do not contain their weights. Answers may differ by ``tolerance``, relative to the scale of each
    value (:mod:`~offramp.engine.answers.differences`); ``progress`` is called with the number of
    samples after each batch that the bundle or a model ran.

    Raises:
        VerificationError: A model cannot be run, or a sample's exit or answer differs from the
            bundle's.
        BackendError: A stage of the bundle cannot be run.
    """
    wanted = list(_answers_of(plan, dataset, progress))
    largest = 0.0
    for what, model in models.items():
        exported = _Exported(model, plan, names, unread, weights)
        for rows, expected in wanted:
            given = exported.run(dataset.take(rows))
            where = f"{what} on samples {rows.start} to {rows.stop - 1}"
            if isinstance(given, BatchAnswers):
                _compare_exits(given, expected, plan, f"{what} on sample", rows.start)
                given = given.answer
            largest = max(largest, _difference(given, expected.answer, tolerance, where))
            progress(rows.stop - rows.start)
        del exported  # release it before the next one loads its weights
    exits = [expected.exit for _, expected in wanted]
    found, counts = np.unique(np.concatenate(exits), return_counts=True)
    shares = {int(e): int(n) / len(dataset) for e, n in zip(found, counts, strict=True)}
    return Verified(samples=len(dataset), largest_difference=largest, exit_shares=shares)


def _answers_of(
    plan: Plan, dataset: Dataset, progress: Callable[[int], None]
) -> Iterator[tuple[slice, BatchAnswers]]:
    bundle = AnsweringStages(plan)
    for rows in batches_of_many_sizes(len(dataset)):
        yield rows, bundle.run(dataset.take(rows))
        progress(rows.stop - rows.start)


class _Exported:
    """An exported model in an ONNX Runtime session with default options, on one thread."""

    def __init__(
        self,
        model: onnx.ModelProto,
        plan: Plan,
        names: Names,
        unread: Collection[str],
        weights: Path | None,
    ) -> None:
        options = session_options(weights=weights)
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        if has_float16_weights(model.graph):
            # ONNX Runtime 1.30 and 1.31 crashed in blocked layouts of float16 convolutions.
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        try:
            graph = without_inputs(model.SerializeToString(), unread)
            self._session = load_session(graph, options)
        except Exception as error:  # ONNX Runtime's own classes derive from Exception only
            raise VerificationError(f"ONNX Runtime cannot load the export: {error}") from error
        given = {output.name for output in self._session.get_outputs()}
        self._outputs = [str(plan.stages[-1].answer)]
        if names.exit in given:
            self._outputs += [names.exit, names.confidence]

    def run(self, tensors: Tensors) -> BatchAnswers | NDArray[Any]:
        """Return the answers, with their exits if the model outputs them."""
        try:
            answer, *rest = self._session.run(self._outputs, tensors)
        except Exception as error:
            raise VerificationError(f"the export fails: {error}") from error
        if not rest:
            return np.asarray(answer)
        return BatchAnswers(answer=answer, exit=rest[0], confidence=rest[1])


def _compare_exits(
    given: BatchAnswers, wanted: BatchAnswers, plan: Plan, where: str, start: int
) -> None:
    wrong = np.flatnonzero(given.exit != wanted.exit)
    if not wrong.size:
        return
    row = int(wrong[0])
    thresholds = {s.exit: s.threshold for s in plan.stages if not s.final}
    raise VerificationError(
        f"{where} {start + row}: it leaves at {exit_label(int(given.exit[row]))} with confidence "
        f"{given.confidence[row]:.7f}, but in the bundle at {exit_label(int(wanted.exit[row]))} "
        f"with {wanted.confidence[row]:.7f} (thresholds {thresholds}); nothing was written"
    )


def _difference(given: NDArray[Any], wanted: NDArray[Any], tolerance: float, where: str) -> float:
    if given.dtype != wanted.dtype:
        raise VerificationError(
            f"{where}: answers are {given.dtype}, expected {wanted.dtype} as the bundle's; nothing "
            "was written"
        )
    difference = compare(given, wanted)
    if not difference.share <= tolerance:
        raise VerificationError(
            f"{where}: answers differ from the bundle's by {difference.describe()}; allowed are "
            f"{tolerance:.1e}, nothing was written"
        )
    return difference.share


def has_float16_weights(graph: onnx.GraphProto) -> bool:
    """Return whether any weight of a graph, or of a body in it, is float16."""
    half = any(weight.data_type == onnx.TensorProto.FLOAT16 for weight in graph.initializer)
    return half or any(has_float16_weights(b) for node in graph.node for b in bodies(node))
