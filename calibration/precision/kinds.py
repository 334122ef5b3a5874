"""The kinds of int8 that a CPU may be faster with: a graph of each, and mixes with float32.

:func:`quantise` makes a model's graph in one kind. If only some segments benefit,
:func:`best_mix` chooses those to quantise, by predicted savings.
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
    """Facts about one kind of int8."""

    what: str
    """Description in words, for reports."""
    operators: tuple[str, ...]
    """Operators that are quantised if their weights are constant; all others stay float32."""


class CpuPrecision(Enum):
    """The kinds that are offered; in all of them a row's answer is independent of other rows.

    ONNX Runtime's ``quantize_dynamic`` is not offered, as its activations have one scale for all
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
        """Description of the kind, and the operators that it applies to."""
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
        what="activations with a scale per row, int8 weights with a scale per channel",
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
    """Return a float32 model with its convolutions and matrix products in a kind of int8.

    Inputs, outputs and every tensor of ``graph`` keep their names and types, so that the result can
    be cut at the same tensors; names that are added begin with ``offramp_cpu/``. The same graph and
    data produce the same bytes, at least if ``threads`` is 1 (ranges are measured by running the
    graph).

    ``saturating`` is for CPUs that add products of uint8 and int8 in int16
    (:attr:`offramp.bundle.CpuFeatures.saturates`): weights that are multiplied by uint8 then have 7
    bits, so that no sum is clipped, and all CPUs compute the same answers.

    ``kept`` are outputs of operators that stay float32. ``ranges`` are the ranges of tensors that
    were measured earlier on the same graph and data; new measurements are added.

    If the kind has scales, they are measured on all of ``dataset``; some hundreds of samples
    suffice. A ``DataError`` if that fails; a ``PrecisionError`` if the kind applies to no operator.
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
            f"(at least {LEAST_WEIGHTS} for a product), but the model has none"
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
"""Share of the source model's time that a mix must be predicted to save beyond the fully quantised
copy, since predictions add up times that were measured separately."""
_TRIED = 3
"""Number of mixes for which exits are chosen again."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The range of segments that are quantised, ``first`` to ``end`` - 1; others are float32."""

    first: int
    end: int

    def __contains__(self, segment: int) -> bool:
        """Return whether a segment is quantised."""
        return self.first <= segment < self.end

    def describe(self, segments: int) -> str:
        """Return a description for a copy with ``segments`` segments."""
        if (self.first, self.end) == (0, segments):
            return "int8 throughout"
        last = self.end - 1
        which = f"segment {last}" if last == self.first else f"segments {self.first} to {last}"
        return f"int8 in {which}, float32 in the others"


def mixed_cost(float32: CostModel, int8: CostModel, mix: Mix) -> CostModel:
    """Combine the costs of a partly quantised copy.

    ``float32`` are the costs of the exits on the source model, ``int8`` those of the same exits on
    a fully quantised copy with as many segments, whose answer is its last exit. Ending a stage
    after a segment costs the same as in a copy that has that segment's precision everywhere.
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
    """Return the mix with the largest predicted savings; ``None`` if full int8 is as good.

    ``candidates`` are the exits of the fully quantised copy, whose answers on the tuning split are
    also used for every mix; ``active`` are the exits that this copy would use.
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
