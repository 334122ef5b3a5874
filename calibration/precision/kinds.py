"""The kinds of int8 that a CPU may be faster with, and graphs of each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from functools import partial

from offramp.calibration.data.dataset import Dataset
from offramp.calibration.precision.blocks import quantise_blocks
from offramp.calibration.precision.graphs import (
    LEAST_WEIGHTS,
    LEVELS,
    LEVELS_OF_16_BITS,
    Editor,
    PrecisionError,
    Rewrite,
)
from offramp.calibration.precision.ranges import Range
from offramp.calibration.precision.rows import quantise_rows
from offramp.calibration.precision.static import quantise_static


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
