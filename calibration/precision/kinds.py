"""The kinds of int8 that a CPU may be faster with: a graph of each, and mixes with float32.

:func:`quantise` makes a model's graph in one kind. :func:`best_mix` chooses the segments to
quantise where only some of them gain by it, by the predicted savings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from operator import itemgetter

from offramp.calibration.choose.selection import Candidates
from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.quantised_graphs import (
    LEAST_WEIGHTS,
    LEVELS,
    LEVELS_OF_16_BITS,
    Editor,
    PrecisionError,
    Rewrite,
    quantise_blocks,
)
from offramp.calibration.precision.static_scales import Range, quantise_rows, quantise_static
from offramp.engine.control.costs import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFacts:
    """A way of computing with fewer bits."""

    what: str
    """In words, for reports."""
    operators: tuple[str, ...]
    """What is quantised, where its weights are constant; all else stays float32."""


class CpuPrecision(Enum):
    """The kinds that are offered: with all of them a row's answer depends on no other row.

    Not offered is ONNX Runtime's ``quantize_dynamic``, whose activations have one scale for all
    rows of a batch.
    """

    STATIC = "int8-static"
    SIGNED = "int8-static-signed"
    ROWS = "int8-rows"
    MIXED = "int8-static-rows"
    BLOCKS = "int8-blocks"
    BLOCKS4 = "int4-blocks"

    @property
    def facts(self) -> PrecisionFacts:
        """What it is, and for what."""
        return _FACTS[self]


_PRODUCTS = ("Gemm", "MatMul")
_FACTS = {
    CpuPrecision.STATIC: PrecisionFacts(
        what="uint8 activations with measured scales, int8 weights with a scale per channel",
        operators=("Conv", *_PRODUCTS),
    ),
    CpuPrecision.SIGNED: PrecisionFacts(
        what="int8 activations with measured scales, int8 weights with a scale per channel",
        operators=("Conv", *_PRODUCTS),
    ),
    CpuPrecision.ROWS: PrecisionFacts(
        what="activations with a scale per row of its own, int8 weights with a scale per channel",
        operators=_PRODUCTS,
    ),
    CpuPrecision.MIXED: PrecisionFacts(
        what="convolutions as in int8-static, matrix products as in int8-rows",
        operators=("Conv", *_PRODUCTS),
    ),
    CpuPrecision.BLOCKS: PrecisionFacts(
        what="int8 weights with a scale per 128 of them, activations likewise",
        operators=_PRODUCTS,
    ),
    CpuPrecision.BLOCKS4: PrecisionFacts(
        what="int4 weights with a scale per 128 of them, activations likewise in int8",
        operators=_PRODUCTS,
    ),
}


def quantise(
    graph: bytes,
    dataset: Dataset,
    kind: CpuPrecision,
    *,
    threads: int,
    saturating: bool,
    kept: Collection[str] = (),
    ranges: dict[str, Range] | None = None,
) -> bytes:
    """Give a float32 model with its convolutions and matrix products as a kind says.

    Inputs, outputs and every tensor that was there keep their names and types, so that the result
    can be cut where ``graph`` could; what is added begins with ``offramp_cpu/``. The same graph and
    data give the same bytes, with one ``threads`` at least (ranges are measured by running it).

    ``saturating`` is for CPUs that add products of uint8 and int8 in int16
    (:attr:`offramp.bundle.CpuFeatures.saturates`): weights that meet uint8 are of 7 bits then, so
    that no sum is clipped, and all CPUs give the same answers.

    ``kept`` are outputs of operators that stay float32. ``ranges`` are of tensors that were
    measured on the same graph and data before; those that are measured are added.

    Scales are measured on all of ``dataset``, where the kind has any; some hundreds of samples do.
    A ``DataError`` if that fails; a ``PrecisionError`` if there is nothing for the kind to do.
    """
    levels = LEVELS_OF_16_BITS if saturating else LEVELS
    editor = Editor(graph, kept=kept, weight_levels=levels)
    known = {} if ranges is None else ranges
    rewrites = _rewrites(
        editor, partial(quantise_static, editor, dataset, threads=threads, known=known), kind
    )
    if not all(rewrite.replaced for rewrite in rewrites):
        raise PrecisionError(
            f"{kind.value} is for {', '.join(kind.facts.operators)} with constant float32 weights "
            f"(products: {LEAST_WEIGHTS} at least), and the model has none"
            + (", or not both convolutions and products" if kind is CpuPrecision.MIXED else "")
        )
    return editor.rewritten(*rewrites)


def _rewrites(
    editor: Editor, static: Callable[..., Rewrite], kind: CpuPrecision
) -> tuple[Rewrite, ...]:
    match kind:
        case CpuPrecision.STATIC:
            return (static(),)
        case CpuPrecision.SIGNED:
            return (static(signed=True),)
        case CpuPrecision.ROWS:
            return (quantise_rows(editor),)
        case CpuPrecision.MIXED:
            return (static(products=False), quantise_rows(editor))
        case CpuPrecision.BLOCKS:
            return (quantise_blocks(editor, bits=8),)
        case CpuPrecision.BLOCKS4:
            return (quantise_blocks(editor, bits=4),)


LEAST_GAIN = 0.01
"""Share of the source model's time that a mix must be predicted to save beyond the copy that is
quantised throughout: predictions add up times that were measured apart."""
_TRIED = 3
"""Mixes that exits are chosen anew for."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The segments that are quantised: from the first to before the end; the others are float32."""

    first: int
    end: int

    def __contains__(self, segment: int) -> bool:
        """Whether a segment is quantised."""
        return self.first <= segment < self.end

    def describe(self, segments: int) -> str:
        """Say it in words, of a copy in so many segments."""
        if (self.first, self.end) == (0, segments):
            return "int8 throughout"
        last = self.end - 1
        which = f"segment {last}" if last == self.first else f"segments {self.first} to {last}"
        return f"int8 in {which}, float32 in the others"


def mixed_cost(float32: CostModel, int8: CostModel, mix: Mix) -> CostModel:
    """Put together the costs of a copy that is quantised in part.

    ``float32`` is of the exits on the source model, ``int8`` of the same exits on a copy of as many
    segments that is quantised throughout, whose own answer is its last exit. A border costs what it
    does behind a segment of its precision.
    """
    pace = int8.source_ms / float32.source_ms
    segments = [
        int8_ms if index in mix else float32_ms * pace
        for index, (float32_ms, int8_ms) in enumerate(
            zip(float32.segments_ms, int8.segments_ms[:-1], strict=True)
        )
    ]
    stages = [
        int8_ms if after in mix else float32_ms * pace
        for after, float32_ms, int8_ms in zip(
            float32.after_segment, float32.stages_ms, int8.stages_ms[:-1], strict=True
        )
    ]
    return replace(
        int8,
        segments_ms=(*segments, int8.segments_ms[-1]),
        stages_ms=(*stages, int8.stages_ms[-1]),
    )


def best_mix(
    candidates: Candidates,
    active: tuple[int, ...],
    float32: CostModel,
    int8: CostModel,
    *,
    max_overhead: float | None = None,
) -> Mix | None:
    """Find the mix that is predicted to save most; ``None`` if all in int8 is as good.

    ``candidates`` are the exits of the copy that is quantised throughout, with their answers on the
    tuning split, which stand for those of every mix; ``active`` those that it would use.
    """
    whole = candidates.savings(active, int8)
    used = active or tuple(range(candidates.exits))
    costs = {mix: mixed_cost(float32, int8, mix) for mix in _mixes(len(float32.segments_ms))}
    ranked = sorted(costs, key=lambda mix: -candidates.savings(used, costs[mix]))[:_TRIED]
    best: list[tuple[float, Mix]] = []
    for mix in ranked:
        chosen = candidates.choose(costs[mix], max_overhead=max_overhead)
        best.append((candidates.savings(chosen, costs[mix]), mix))
    saved, mix = max(best, key=itemgetter(0))
    return mix if saved >= whole + LEAST_GAIN else None


def _mixes(segments: int) -> Iterator[Mix]:
    for first in range(segments):
        for end in range(first + 1, segments + 1):
            yield Mix(first, end)
