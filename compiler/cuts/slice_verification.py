"""Whether segments answer as the source model does, in a chain and without samples that left."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from offramp.bundle import Answer
from offramp.compiler.common.errors import ModelError, VerificationError
from offramp.compiler.common.rounding import rounding_of
from offramp.compiler.cuts.slicing import SegmentModel
from offramp.compiler.graphs.graph import copied
from offramp.compiler.graphs.rows import compare_batches, middle, scaled_by_batch
from offramp.compiler.graphs.runtime import GraphRunner
from offramp.compiler.graphs.source_model import SourceModel
from offramp.engine.answers.differences import Difference, Scales, compare, relative_difference

VERIFIED_SAMPLES = 64
"""Calibration samples that chained segments and what was cut must agree on."""
TOLERANCE = 1e-5
"""Relative difference allowed between chained segments and source: float32 sums in another
order, as layouts and fusions differ at the borders."""


def verify(
    model: SourceModel,
    segments: Sequence[SegmentModel],
    samples: Mapping[str, NDArray[np.generic]],
    *,
    tolerance: float = TOLERANCE,
    batch_sizes: Sequence[int] = (1, 7),
) -> float:
    """Run the segments in a chain at some batch sizes, and compare with the source model.

    ``samples`` are arrays by graph input, repeated where they are fewer than a batch;
    ``tolerance`` is relative to the scale of each value (:mod:`.answers.differences`).

    Behind each cut some samples go on without the others too, as they do once those have left.

    Gives the largest difference found. VerificationError names the first segment that diverges,
    beyond ``tolerance`` or by NaN or infinity on one side alone; ModelError operators by which
    samples change each other's answers, or a cut behind which they do.
    """
    answer = model.answer.output
    rows = [middle(size, max(batch_sizes)) for size in batch_sizes]
    fed = [{k: v[chosen % len(v)] for k, v in samples.items()} for chosen in rows]
    wanted = [values[answer] for values in _run_alone(model.proto, fed)]
    chained: list[dict[str, NDArray[np.generic]]] = [dict(feeds) for feeds in fed]
    largest = int(np.argmax(batch_sizes))
    left: list[_Survivors] = []
    for segment in segments:
        chained, left = _through(segment, chained, left)
        if segment is not segments[-1]:
            left += _survivors(chained[largest], segment)
    worst, scales = 0.0, Scales.of(wanted[largest])
    for size, feeds, right, values in zip(batch_sizes, fed, wanted, chained, strict=True):
        difference = compare(values[answer], right, scales=scales, answer=model.answer)
        if not difference.share <= tolerance:
            raise VerificationError(
                f"chained segments differ from the source model at batch {size}, by "
                f"{difference.describe()}; allowed are {tolerance:.1e} of a model in "
                f"{rounding_of(model.proto).name}; "
                + _diagnosis(model, segments, feeds, values, tolerance)
                + _allowance(difference)
            )
        worst = max(worst, difference.share)
    answers = dict(zip(batch_sizes, wanted, strict=True))
    compare_batches(model.proto, samples, answers, model.answer)
    if not scaled_by_batch(model.proto):
        for survivors in left:
            survivors.check(wanted[largest], model.answer, rounding_of(model.proto).batches)
    return worst


def _allowance(difference: Difference) -> str:
    if not math.isfinite(difference.share):
        return ". No tolerance allows that; report it with the model"
    return f". If only rounding differs, allow it with --tolerance {2 * difference.share:.0e}"


def _through(
    segment: SegmentModel,
    chained: Sequence[dict[str, NDArray[np.generic]]],
    left: Sequence[_Survivors],
) -> tuple[list[dict[str, NDArray[np.generic]]], list[_Survivors]]:
    """Run a segment on batches and survivors; its session, with its weights, is gone behind."""
    runner = GraphRunner(segment.proto)
    passed = [values | runner.run(values) for values in chained]
    return passed, [survivors.through(runner) for survivors in left]


class _Survivors(NamedTuple):
    """Samples of a batch that go on behind a cut when the others have left."""

    rows: NDArray[np.intp]
    cut: str
    values: dict[str, NDArray[np.generic]]

    def through(self, runner: GraphRunner) -> _Survivors:
        """Run the next segment; ModelError if it does not take them."""
        try:
            return self._replace(values=self.values | runner.run(self.values))
        except RuntimeError as error:
            reason = str(error)
            raise ModelError(f"{self._where()} cannot go on: {reason}; {_APART}") from error

    def check(self, wanted: NDArray[np.generic], answer: Answer, tolerance: float) -> None:
        """Compare with what the source model answers them in the whole batch."""
        found, right = self.values[answer.output], wanted[self.rows]
        difference = compare(found, right, scales=Scales.of(wanted), answer=answer)
        if not difference.share <= tolerance:
            raise ModelError(
                f"{self._where()} are answered otherwise, by {difference.describe()} "
                f"({tolerance:.0e} allowed); {_APART}"
            )

    def _where(self) -> str:
        rows = ", ".join(map(str, self.rows.tolist()))
        return f"behind the cut `{self.cut}` samples {rows} of a batch, without the others,"


_APART = (
    "something that is computed again behind the cut depends on the whole batch, as its longest "
    "sample does: let the model compute it for each sample by itself, or build exits elsewhere "
    "(--exits)"
)


def _survivors(
    values: Mapping[str, NDArray[np.generic]], segment: SegmentModel
) -> Iterator[_Survivors]:
    """Choose samples that go on behind a segment: one alone and three, others at each cut.

    ``values`` are graph inputs and what segments gave so far.
    """
    batch = len(values[segment.output])
    for count in {1, min(3, batch - 1)} - {0} if batch > 1 else ():
        rows = np.sort((segment.index + np.arange(count)) % batch)
        kept = {name: value[rows] for name, value in values.items()}
        yield _Survivors(rows, segment.output, kept)


def _run_alone(
    proto: onnx.ModelProto, fed: Sequence[Mapping[str, NDArray[np.generic]]]
) -> list[dict[str, NDArray[np.generic]]]:
    """Run a graph on some batches, with no other loaded beside: each holds its weights."""
    runner = GraphRunner(proto)
    return [runner.run(feeds) for feeds in fed]


def _diagnosis(
    model: SourceModel,
    segments: Sequence[SegmentModel],
    feeds: Mapping[str, NDArray[np.generic]],
    chained: Mapping[str, NDArray[np.generic]],
    tolerance: float,
) -> str:
    """Name the first segment whose output differs from the same tensor in the source."""
    exposed = copied(model.proto)
    known = {info.name: info for info in model.proto.graph.value_info}
    inner = [name for s in segments for name in s.outputs if name in known]
    exposed.graph.output.extend(known[name] for name in inner)
    wanted = GraphRunner(exposed).run(feeds)
    for segment in segments:
        for name in segment.outputs:
            if not relative_difference(chained[name], wanted[name]) <= tolerance:
                return f"the first that diverges is segment {segment.index}, at `{name}`"
    return "each segment is within tolerance alone, the differences add up"
